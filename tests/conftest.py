"""One simulated device for the whole session: torch renames PrivateUse1 once per process."""

import gc
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

# Before torch loads OpenMP. Several test processes share the cores: threads that spin for their next piece of work take
# the time of the others' (58 tests with two processes on two cores: 53 and 55 s instead of 82 and 131 s).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

from shadowrun import sim as sim_package
from shadowrun.replay import memory_effects
from shadowrun.repro import script
from tests import forked
from tests.case_kit import give_sim, make_case_fixture  # noqa: F401 - fixtures


def pytest_configure(config):
    """Each process of ``-n`` begins with a share of its own, so that few fixtures of a module are made twice."""
    gc.disable()
    if getattr(config.option, "dist", "no") == "load":
        config.option.dist = "worksteal"


def pytest_collection_finish(session):
    """What is imported stays: Python's collector would go through millions of objects again and again."""
    gc.enable()
    gc.freeze()
    # At each entry of torch's database it looks through the stack for a test of unittest, which none is. Python goes
    # through all modules for some of the frames: 0.2 s an entry.
    for module in ("torch.testing._internal.common_utils", "torch.testing._internal.opinfo.core"):
        if module in sys.modules:
            sys.modules[module].extract_test_fn = lambda: None


@pytest.fixture(scope="session", autouse=True)
def sim_device():
    """The package of the simulated device, registered as ``sim``.

    For every test: torch counts the devices at the first backward of a process, and accepts no further one.
    """
    sim_package.enable("sim")
    return sim_package


@pytest.fixture(autouse=True)
def no_module_is_inherited():
    """``--import`` is handed on to processes by the environment, and a test runs commands in its own process."""
    yield
    os.environ.pop("SHADOWRUN_IMPORT", None)


@pytest.fixture(scope="session", autouse=True)
def no_looks_by_the_clock():
    """Once in a second one more call is looked at for memory effects, which tests that count calls would see."""
    memory_effects._REST_S = 1e9


@pytest.fixture
def clean_sim(sim_device):
    """The simulated device without flaws, and the same random stream for each test."""
    with sim_device.flaws():
        torch.manual_seed(0)
        yield sim_device


@pytest.fixture(scope="module")
def forked_processes():
    """What starts this interpreter gets a process that is forked from one with torch; see `tests.forked`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", forked.Popen)
        yield


@pytest.fixture
def new_processes(monkeypatch):
    """For one test of a module whose others have forked processes."""
    monkeypatch.setattr(subprocess, "Popen", forked.NewProcess)


@pytest.fixture
def interrupts():
    """A shell that starts the tests in the background has them, and all that they start, ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def one_thread():
    """Torch with one thread: on a busy machine, two that wait for each other take several times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def quick(monkeypatch):
    """Scripts are tried in forked processes, of one thread."""
    started = forked.server()
    monkeypatch.setattr(script, "run_script", lambda path, *_: started.try_script(path))
    return started


@pytest.fixture(scope="session")
def sample():
    """The module that builds the made-up run."""
    spec = importlib.util.spec_from_file_location("sample", Path(__file__).parent / "golden" / "sample.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
