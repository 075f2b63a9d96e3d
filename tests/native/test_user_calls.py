"""The program's own call by the compiled handler: the same results, errors, warnings; who wants to be asked is."""

from __future__ import annotations

import contextlib
import warnings
from typing import ClassVar

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.common_methods_invocations import op_db

import shadowrun
from shadowrun import Status, native
from shadowrun.intercept import torchapi
from tests.native.both_ways import both_ways, in_python, once
from tests.transparency.checking import seed

pytestmark = pytest.mark.skipif(native.core is None, reason="there is no compiled part to compare with")

aten = torch.ops.aten
FINE = {Status.MATCH, Status.SKIPPED, Status.UNVERIFIED}


class Own(torch.Tensor):
    """Has `__torch_function__`, and no handler for operators."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_are_asked():
    def program(_):
        mine, x = torch.ones(3).as_subclass(Own), torch.ones(3)
        for _ in range(3):
            out = [torch.add(x, mine), torch.cat([x, mine]), torch.stack((mine, x)), torch.where(x > 0, x, mine)]
        return [o.as_subclass(torch.Tensor) for o in out]

    with in_python():
        Own.seen.clear()
        once(program)
        slowly = list(Own.seen)
    Own.seen.clear()
    once(program)
    assert Own.seen == slowly


def test_numbers_where_tensors_are_due():
    """As TorchScript hands over its constants."""
    x = torch.ones(3)
    with shadowrun.compare("cpu") as run:
        method = run._mode._method
        torchapi.pop_mode(run._mode)
        try:
            for func, args in ((aten.add.Tensor, (x, 2.0)), (aten.mul.Tensor, (x, 3)), (aten.mul.Tensor, (x, True))):
                for _ in range(3):
                    assert torch.equal(method(func, (torch.Tensor,), args, {}), func(*args))
            for _ in range(3):
                assert method(aten._local_scalar_dense.default, (), (4,), {}) == 4
                assert method(aten._local_scalar_dense.default, (torch.Tensor,), (x[0],), {}) == 1.0
        finally:
            torchapi.push_mode(run._mode)


def test_errors_are_the_same():
    calls = [
        lambda x: x @ torch.ones(5, 5),
        lambda x: x.view(7),
        lambda x: x.index_select(0, torch.tensor([9])),
        lambda x: torch.linalg.cholesky(-torch.eye(2)),
        lambda x: torch.cat([x, torch.ones(3, 3, 3)]),
        lambda x: x.transpose(0, 5),
        lambda x: x.add_(torch.ones(4, 2, 3)),
        lambda x: torch.ones(2, dtype=torch.bool) - torch.ones(2, dtype=torch.bool),
        lambda x: torch.empty(1 << 60),
        lambda x: x.expand(2, 3).add_(1).expand(3, 2, 3).add_(1),
        lambda x: F.nll_loss(x, torch.tensor([0, 9])),
    ]

    def program(_):
        outcomes = []
        x = torch.ones(2, 3)
        for call in calls:
            for _ in range(3):
                try:
                    outcomes.append(call(x))
                except Exception as error:
                    outcomes.append(f"{type(error).__mro__}: {error}")
        return outcomes

    both_ways(program)
    plain = program(None)
    with shadowrun.compare("cpu"):
        program(None)
        again = program(None)
    assert [t for t in again if isinstance(t, str)] == [t for t in plain if isinstance(t, str)]


def test_warnings_are_the_same():
    def program(_):
        x = torch.complex(torch.ones(2), torch.ones(2))
        out = torch.zeros(3)
        for _ in range(3):
            y = x.to(torch.float32)
            torch.add(torch.ones(2), 1, out=out)
            out.resize_(3)
        return y

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program(None)  # some come once for each process
    with warnings.catch_warnings(record=True) as plain:
        warnings.simplefilter("always")
        program(None)
    with warnings.catch_warnings(record=True) as compared, shadowrun.compare("cpu"):
        warnings.simplefilter("always")
        program(None)
    assert plain
    assert [(str(w.message), w.filename, w.lineno) for w in compared] == [
        (str(w.message), w.filename, w.lineno) for w in plain
    ]
    both_ways(program)


def test_a_profiler_sees_the_same():
    def events(block):
        with block, warnings.catch_warnings(), shadowrun.compare("cpu", replay=False):
            warnings.simplefilter("ignore")  # of torch 2.11, about cycles
            x = torch.ones(4, 4)
            (x @ x).exp().sum()
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                for _ in range(3):
                    (x @ x).exp().sum()
        return [e.name for e in profiled.events() if e.name.startswith("aten::")]

    slowly, quickly = events(in_python()), events(contextlib.nullcontext())
    assert quickly == slowly
    assert quickly.count("aten::mm") >= 3


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_operator_of_torchs_database(part):
    wrong = []
    for info in op_db[part::8]:
        if torch.float32 not in info.supported_dtypes("cpu"):
            continue
        seed()
        with warnings.catch_warnings(), shadowrun.compare("cpu") as run:
            warnings.simplefilter("ignore")
            for i, sample in enumerate(info.sample_inputs("cpu", torch.float32)):
                if i == 4:
                    break
                for _ in range(3):
                    with contextlib.suppress(Exception):
                        info.op(sample.input, *sample.args, **sample.kwargs)
        wrong += [f"{info.name}: {r.call.op} {r.verdict}" for r in run.records() if r.verdict.status not in FINE]
    assert wrong == []
