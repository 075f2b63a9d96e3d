"""Calls whose results differ by rounding, recorded in C: the same rows as by Python, and no more calls than those."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from shadowrun import Status, native
from shadowrun.intercept import dispatch
from shadowrun.operators.facts import ulp_bound
from shadowrun.replay.paths import native_handler, same_device
from tests.native.both_ways import both_ways, records

pytestmark = pytest.mark.skipif(native.core is None, reason="there is no compiled part to compare with")

INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}


class Device:
    """Changes the last bits of each result of a replay, but of operators that are exact."""

    def __init__(self, monkeypatch):
        self.mask, self.first, self.n_by_python, inexact = 1, None, 0, set()
        isolated, make_plan = same_device.with_isolated_warnings, dispatch.make_plan
        conclude = native_handler.NativeHandler._conclude

        def noted(func, index):
            plan = make_plan(func, index)
            if ulp_bound(plan.name, [torch.float32]) != 0:
                inexact.add(id(plan.run))
            return plan

        def rerun(function, modes, args=(), kwargs=None):
            out = isolated(function, modes, args, kwargs or {})
            if id(function) in inexact:
                self.change(args[0] if out is None and args else out)
            return out

        def counted(handler, *args):
            self.n_by_python += 1
            return conclude(handler, *args)

        for user in (native_handler, same_device):
            monkeypatch.setattr(user, "with_isolated_warnings", rerun)
        monkeypatch.setattr(dispatch, "make_plan", noted)
        monkeypatch.setattr(native_handler.NativeHandler, "_conclude", counted)

    def change(self, values):
        for value in values if isinstance(values, (list, tuple)) else (values,):
            if isinstance(value, torch.Tensor) and value.dtype in INTEGERS and value.is_contiguous() and value.numel():
                value.view(INTEGERS[value.dtype]).bitwise_xor_(self.mask)
                if self.first is not None:
                    value.view(-1)[0] = self.first


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


def arithmetic(x, y):
    return [x + y, x * 3.0, (x / (y.abs() + 1)).mul_(0.5).add_(y), x.mm(y), x.softmax(1), x.exp().sum()]


def norms(x, y):
    return [F.layer_norm(x, x.shape[1:]), torch.lerp(x, y, 0.25), x.clone().lerp_(y, 0.5), torch.var_mean(x, 1)]


def one_wide(x, y):
    # Where a dimension has one element, any stride is right: the form that is stored is torch's.
    column, row = x[:, :1].contiguous(), torch.empty_strided((1, 4), (7, 1)).copy_(y[:1])
    return [column * 2.0, row + 1.0, column + column, row.mul(row)]


def short(x, y):
    return [x.bfloat16() + y.bfloat16(), x.bfloat16() * 2.0, x.double() * y.double()]


@pytest.mark.parametrize("body", [arithmetic, norms, one_wide, short], ids=lambda f: f.__name__)
def test_the_rows_are_those_of_python(device, body):
    def program(run):
        torch.manual_seed(0)
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        for k in range(8):
            # One call in eight is further off, and is Python's.
            device.mask = 6 if k == 5 else 1
            body(x, y)
            run.step()

    run = both_ways(program)
    counts = run.counts()
    assert counts[Status.MATCH] > 50
    n_differ = sum(1 for record in run.records() if record.diffs)
    assert n_differ > 40
    assert device.n_by_python < 0.7 * n_differ


def test_another_dtype_of_the_result_in_the_same_context_is_not_taken_for_the_known_one(device):
    def program(run):
        x = torch.arange(1, 9).reshape(2, 4)
        for k in range(6):
            torch.set_default_dtype(torch.float64 if k % 2 else torch.float32)
            try:
                x * 0.3
            finally:
                torch.set_default_dtype(torch.float32)

    run = both_ways(program)
    dtypes = [record.diffs[0].actual.dtype for record in run.records() if record.diffs]
    assert set(dtypes) == {"f32", "f64"}


def plus_one(x):
    return x + 1.0


def test_a_class_of_values_or_a_greater_distance_is_left_to_python(device):
    def program(run):
        for first, mask in [(None, 1)] * 8 + [(float("nan"), 1), (float("inf"), 1), (None, 1 << 12)]:
            device.first, device.mask = first, mask  # of the first element; the others are as close as before
            plus_one(torch.ones(64))
        device.first, device.mask = None, 1

    run = both_ways(program)
    assert run.counts()[Status.MISMATCH] >= 3


def test_other_strides_in_the_same_context_are_recorded_as_they_are(device):
    def program(run):
        for stride in (4, 4, 4, 7, 4, 7):
            torch.empty_strided((1, 4), (stride, 1)).fill_(3.0).mul_(1.5)

    run = both_ways(program)
    assert {record.diffs[0].actual.stride for record in run.records() if record.diffs} == {(4, 1), (7, 1)}


@pytest.mark.parametrize("n", [8, 512])
def test_zeros_against_subnormal_numbers_pass_where_python_passes_them(device, n):
    # 1 ULP from zero is a subnormal number; of many terms, such a product has to climb the ladder each time.
    def program(run):
        torch.manual_seed(0)
        for lower in (False, False, False, True, True, True):
            x = torch.randn(n, n)
            torch.eye(n).mm(x.tril() if lower else x)

    run = both_ways(program)
    assert sum(1 for record in run.records() if record.diffs and record.diffs[0].n_subnormal) >= 3


def test_written_arguments_that_share_their_memory_are_left_to_python(device):
    def program(run):
        for _ in range(6):
            values = torch.ones(8)
            other = torch.from_numpy(values.numpy())  # another storage, the same memory
            values.add_(other)
            torch.ones(8).add_(torch.ones(8))

    run = both_ways(program)
    assert any(r.verdict.status is Status.UNVERIFIED for r in run.records())


def test_verdicts_that_folding_deleted_get_new_rows(device, monkeypatch):
    from shadowrun.recording import recorder
    from shadowrun.store import datafile

    monkeypatch.setattr(datafile, "FLUSH_ROWS", 16)
    for user in (datafile, recorder):  # flushes at other calls on a busy machine would fold other calls
        monkeypatch.setattr(user, "FLUSH_S", 1e9)

    def program(run):
        x = torch.ones(4)
        for _ in range(300):
            x + 1.0

    run = both_ways(program, max_records=64)
    assert all(r.verdict.status in (Status.MATCH, Status.SKIPPED) for r in run.records())
    assert any("1 ULP" in text for text in records(run))
