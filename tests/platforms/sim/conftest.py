"""One registered device for the whole session: torch renames PrivateUse1 once per process."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shadowrun.platforms import sim as sim_package


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return []


def bits(value):
    """Form and bytes of all tensors in a value."""
    return [
        (str(t.dtype), tuple(t.shape), t.stride(), t.device.type, t.cpu().contiguous().flatten().view(torch.uint8).tolist())
        for t in map(torch.Tensor.detach, _tensors(value))
    ]


class Recorder(TorchDispatchMode):
    """Calls in order: operator, and bits of results and arguments after the call."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.error = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.name()
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self.error = (name, error)
            raise
        if "empty" not in name:
            self.calls.append((name, bits(args) + bits(list(kwargs.values())) + bits(result)))
        return result


@pytest.fixture(scope="session")
def sim():
    sim_package.enable("sim")
    return sim_package


@pytest.fixture(autouse=True)
def clean_device(sim):
    with sim.flaws():
        torch.manual_seed(0)
        yield


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def record(sim):
    """Calls of a flaw's trigger on the device with exactly the given flaws."""

    def run(flaw, *flaws):
        torch.manual_seed(0)
        with sim.flaws(*flaws), Recorder() as mode:
            sim.trigger(flaw.name)("sim")
        return mode.calls

    return run
