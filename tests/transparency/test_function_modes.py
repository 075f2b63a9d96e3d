"""Function modes that are on while C++ calls operators: they see nothing of a comparison, and change nothing of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

import shadowrun
from shadowrun import Status


class Twice(TorchFunctionMode):
    """Doubles what it is asked about."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        out = func(*args, **(kwargs or {}))
        return out * 2 if isinstance(out, torch.Tensor) and out.is_floating_point() else out


class Strict(Twice):
    """Forbids everything."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        raise RuntimeError(f"not allowed: {func}")


@torch.jit.script
def scripted(x):
    y = torch.cat([x, x])
    if bool((y.index_select(0, torch.tensor([0, 2])).sum() < 3e9).item()):
        y = y.clone().add_(2.5)
    return y.sum(), torch.full([2], 3.0), torch.rand_like(x).clamp(1, 1)


def by_script():
    x = torch.arange(2.0)
    return lambda: scripted(x)


def from_numpy():
    values = np.ones(2)
    return lambda: (torch.from_numpy(values),)


def in_the_engine():
    """A backward pass as a program in C++ would begin it."""
    leaf = torch.tensor([1.0, 2.0], requires_grad=True)
    y, gradient = (leaf.exp() * leaf).sum(), torch.ones(())
    return lambda: torch.autograd.Variable._execution_engine.run_backward(
        (y,), (gradient,), False, False, (leaf,), allow_unreachable=True, accumulate_grad=False
    )


def run(prepare, make):
    """What a program gives three times under a function mode, and what that saw."""
    found = []
    for _ in range(3):
        program = prepare()
        with make() as mode:
            try:
                out = program()
            except RuntimeError as error:
                out = str(error)
        found.append((out if isinstance(out, str) else [t.tolist() for t in out], mode.seen))
    return found


@pytest.mark.parametrize("make", [Twice, Strict])
@pytest.mark.parametrize("prepare", [by_script, from_numpy, in_the_engine])
@pytest.mark.parametrize("options", [{}, {"replay": False}, {"drift": True}], ids=["compared", "recorded", "drift"])
def test_a_function_mode_sees_and_changes_nothing(prepare, make, options):
    plain = run(prepare, make)
    with shadowrun.compare("cpu", **options) as comparison:
        compared = run(prepare, make)
    assert compared == plain
    assert comparison.internal_failures() == []
    statuses = {r.verdict.status for r in comparison.records()}
    assert statuses <= {Status.MATCH, Status.SKIPPED}
    assert sum(comparison.counts().values()) > 0
