"""One registered device for the whole session: torch renames PrivateUse1 once per process."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shadowrun import sim as sim_package


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return []


def bits(value):
    """Form and bytes of all tensors in a value."""
    return [
        (
            str(t.dtype),
            tuple(t.shape),
            t.stride(),
            t.device.type,
            t.cpu().contiguous().flatten().view(torch.uint8).tolist(),
        )
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


class Replayer(TorchDispatchMode):
    """Runs every call again on another device, inside the handler, and compares bits."""

    def __init__(self, device, *, answer=False):
        super().__init__()
        self.device, self.answer = device, answer
        self.checked, self.different, self.unsupported = [], set(), set()

    def copy(self, value, memo):
        if isinstance(value, torch.Tensor):
            if id(value) not in memo:
                span = (
                    1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
                    if value.numel()
                    else 0
                )
                flat = value.detach().as_strided((span,), (1,), value.storage_offset())
                there = flat.to(self.device) if value.device.type != self.device else flat.clone()
                memo[id(value)] = there.as_strided(value.shape, value.stride())
            return memo[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(self.copy(v, memo) for v in value)
        return torch.device(self.device) if isinstance(value, torch.device) else value

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if view or torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.name():
            return func(*args, **kwargs)
        there_args = self.copy(args, memo := {})
        there_kwargs = {k: self.copy(v, memo) for k, v in kwargs.items()}
        try:
            result = func(*args, **kwargs)
        except NotImplementedError:
            if not self.answer:
                raise
            self.unsupported.add(func.name())
            there = func(*there_args, **there_kwargs)
            for mine, theirs in zip(_tensors(args), _tensors(there_args), strict=True):
                if func._schema.is_mutable:
                    mine.copy_(theirs)
            return self.back(there, args)
        there = func(*there_args, **there_kwargs)
        self.checked.append(func.name())
        mine, theirs = ([b[:3] + b[4:] for b in bits([r, *a])] for r, a in ((result, args), (there, there_args)))
        if mine != theirs:
            self.different.add(func.name())
        return result

    def back(self, value, args):
        if isinstance(value, torch.Tensor):
            return value.to(_tensors(args)[0].device)
        return type(value)(self.back(v, args) for v in value) if isinstance(value, (list, tuple)) else value


@pytest.fixture
def replayer():
    return Replayer
