"""A device that a module or the program itself brings: `--import`, and a target that is awaited."""

import re
from pathlib import Path

import pytest

import shadowrun
from tests import forked

BRINGS = """
import types, torch
torch.utils.rename_privateuse1_backend("vpu")
module = types.ModuleType("torch.vpu")
module.is_available = lambda: True
module.device_count = lambda: 1
module.current_device = lambda: 0
module.get_rng_state = lambda device=0: torch.zeros(1, dtype=torch.uint8)
module.set_rng_state = lambda state, device=0: None
module.synchronize = lambda device=0: None
torch._register_device_module("vpu", module)
library = torch.library.Library("aten", "IMPL")
def empty(*args, **kwargs):
    raise NotImplementedError("no memory")
library.impl("empty.memory_format", empty, "PrivateUse1")
"""
COMPUTES = "import torch\nx = torch.ones(3)\nx.exp()\n"


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Runs a command in a process of its own: a device cannot be taken back."""
    monkeypatch.chdir(tmp_path)
    Path("brings_vpu.py").write_text(BRINGS, encoding="utf-8")

    def run(*words, program=COMPUTES):
        Path("program.py").write_text(program, encoding="utf-8")
        return forked.shadowrun(*words)

    return run


def test_the_program_registers_its_device(shell):
    done = shell("run", "--target", "vpu", "program.py", program=BRINGS + COMPUTES)
    assert done.returncode == 1
    assert "shadowrun  vpu against cpu" in done.stdout
    found = {finding.op: finding.kind for finding in shadowrun.load(".shadowrun").findings()}
    assert found["aten::exp"] == "unsupported"


def test_one_that_never_comes_is_told_at_the_end(shell):
    done = shell("run", "--target", "vpu", "program.py", program=COMPUTES + "device = 'vpu'\nprint('ran to its end')\n")
    assert done.returncode == 2
    assert done.stdout == "ran to its end\n"
    assert "The program names the device 'vpu', and never registered it" in done.stderr


def test_a_program_that_does_not_name_it_is_not_run(shell):
    done = shell("run", "--target", "vpu", "program.py", program=COMPUTES + "print('it ran')\n")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--import PACKAGE, or an entry point of it in the group 'shadowrun.platforms'" in done.stderr


def test_a_module_brings_it_to_every_command_that_looks_for_a_device(shell):
    brought = "--import", "brings_vpu"
    assert "shadowrun  vpu against cpu" in shell("run", *brought, "--target", "vpu", "program.py").stdout
    assert re.search(r"^vpu +present +1 of them", shell("platforms", *brought).stdout, re.MULTILINE)
    swept = shell("sweep", *brought, "--target", "vpu", "--ops", "exp", "--parts", "forward", "--samples", "1")
    assert "unsupported operator" in swept.stdout
    assert "aten::exp" in shell("static", "vpu", *brought).stdout
    for words in (("slowdown",), ("repro",), ("coverage",)):
        assert "No module named 'brings_nothing'" in shell(*words, "--import", "brings_nothing").stderr
