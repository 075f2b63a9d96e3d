"""Calls on the edge of what the compiled handler takes, and what it remembers: the same as by Python."""

from __future__ import annotations

import contextlib
import gc
import time
import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

import shadowrun
from shadowrun import Status, native
from shadowrun.intercept import torchapi
from shadowrun.replay.replayer import Replayer
from tests.native.both_ways import WAYS, both_ways, handled, skipped

pytestmark = pytest.mark.skipif(native.core is None, reason="there is no compiled part to compare with")

aten = torch.ops.aten


class Named(torch.Tensor):
    """Has no `__torch_dispatch__`: calls with it reach shadowrun's."""


def bits(_):
    x = torch.arange(6.0).reshape(2, 3) + 1
    negative, complex_ = torch._neg_view(x.clone()), torch.complex(x, x)
    x.add_(negative.add_(1)).copy_(negative.mul(2))
    complex_.conj().mul_(2)
    complex_.imag.neg_()
    running = torch._neg_view(torch.zeros(3)), torch.ones(3)
    return x, negative.neg_(), complex_, complex_.conj() * 2, F.batch_norm(x, *running, training=True), running[1]


def without_values(_):
    x, meta = torch.ones(3), torch.empty(3, device="meta")
    meta.add_(1)
    made = [torch.zeros_like(x, device="meta"), x.to("meta"), meta + meta, torch.cat([meta, meta]), meta.max(0)[0]]
    return [v.shape for v in made]


def statistics(training):
    def program(_):
        x, found = torch.randn(3, 3), []
        for make in (lambda v: v, lambda v: v.repeat_interleave(2)[::2], lambda v: v.as_subclass(Named)):
            mean, var = make(torch.zeros(3)), make(torch.ones(3))
            found += [F.batch_norm(x, mean, var, training=training), mean, var]
        both = torch.ones(6)
        found += [F.batch_norm(x, both[:3], both[3:], training=training), both]
        return [*found, F.batch_norm(x, x[0], x[1].abs_(), training=training), x]

    return program


def on_one_memory(_):
    x, s = torch.randn(3, 4), torch.tensor(3.0)
    x.index_put_((torch.tensor([0, 2]),), torch.zeros(4))
    x[0].add_(x[1])
    x.add_(x.sum()).add_(torch.tensor(2.0)).sub_(x.as_subclass(Named))
    s.add_(s).mul_(1.5)
    return x.t().add_(1), s, x.masked_fill_(x > 0, 0), torch._foreach_add([x, s], 1)


def on_one_line(_):
    x, dtypes = torch.ones(1, 2, 1, 1), (torch.float64, torch.int8, torch.bool)
    found = [(x.to(d), torch.zeros(2, dtype=d), x.sum(0, dtype=d)) for d in dtypes]
    formats = torch.contiguous_format, torch.channels_last, torch.preserve_format
    return found, [x.clone(memory_format=f) for f in formats]


PROGRAMS = {
    "on one line": on_one_line,
    "bits": bits,
    "without values": without_values,
    "statistics": statistics(True),
    "statistics, not written to": statistics(False),
    "on one memory": on_one_memory,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_on_the_edge(name, way):
    run = both_ways(PROGRAMS[name], **WAYS[way])
    assert handled(run)
    assert not list(run.records(status=["mismatch", "error"]))


class Weight(torch.nn.Parameter):
    """As many libraries have one."""


def statuses(run, op):
    return [r.verdict.status for r in run.records(op=op)]


@pytest.mark.parametrize("kind", [Named, Weight], ids=lambda k: k.__name__)
def test_an_argument_of_a_subclass_on_the_memory_that_is_written_to(either, kind):
    with shadowrun.compare("cpu") as run:
        for _ in range(3):
            x = torch.full((3,), 2.0)
            x.mul_(x.as_subclass(kind))
            assert x.tolist() == [4.0] * 3
    assert statuses(run, "aten::mul_.Tensor") == [Status.MATCH] * 3


def test_memory_that_a_failing_replay_moved_is_not_written_to(replays, either):
    n_calls = []

    def third_fails(run, args, kwargs):
        n_calls.append(1)
        if len(n_calls) == 3:
            args[0].resize_(5000)
            raise RuntimeError("planted")
        return run(*args, **kwargs)

    replays(aten.mul_.Tensor, third_fails)
    x, two = torch.ones(3), torch.tensor(2.0)
    with warnings.catch_warnings(), shadowrun.compare("cpu") as run:
        warnings.simplefilter("ignore")
        for _ in range(5):
            x.mul_(two)
            kept = run._replayer._paths.same_device.fast.buffers.by_form.values()
            assert [s.work.data_ptr() for s in kept] == [s.work_at for s in kept]
    assert x.tolist() == [32.0] * 3
    assert statuses(run, "aten::mul_.Tensor") == [Status.MATCH, Status.MATCH, Status.ERROR, Status.MATCH, Status.MATCH]


def test_a_device_is_remembered_once():
    """Torch makes a new one for each call; each would be a new context."""
    with shadowrun.compare("cpu") as run:
        for _ in range(50):
            torch.zeros(3)
        held = gc.get_referents(run._replayer.native_handler)
    assert sum(type(v) is torch.device for v in held) <= 3


@pytest.mark.parametrize(
    ("namespace", "options"),
    [("aten_test", {}), ("aten_test", {"replay": False}), ("quantized", {"replay": False})],
    ids=["passed by", "passed by, recorded", "recorded"],
)
def test_a_call_that_is_not_compared_takes_no_lock(either, namespace, options):
    """It may wait for another thread, or take long."""
    with torch.library._scoped_library(namespace, "FRAGMENT") as library:
        held = []

        def kernel(x):
            held.append(run._replayer.lock._is_owned())
            return x.clone()

        library.define("shadowrun_looks(Tensor x) -> Tensor")
        library.impl("shadowrun_looks", kernel, "CPU")
        with shadowrun.compare("cpu", **options) as run:
            for _ in range(3):
                getattr(torch.ops, namespace).shadowrun_looks(torch.ones(2))
    assert held == [False] * 3


def test_what_is_passed_by_is_counted(either):
    x = torch.ones(2)
    with shadowrun.compare("cpu") as run:
        for _ in range(4):
            aten.is_same_size(x, x)
    assert ("aten::is_same_size", "", "asks about form, not values", 4) in skipped(run)


def test_a_call_that_was_slow_is_run_again(either):
    """The replay is quick: only a third run shows whether the first had to wait for something else."""
    with torch.library._scoped_library("quantized", "FRAGMENT") as library:
        runs = []

        def kernel(x):
            runs[-1] += 1
            if runs[-1] == 1:
                time.sleep(0.1)
            return x.clone()

        library.define("shadowrun_sleeps(Tensor x) -> Tensor")
        library.impl("shadowrun_sleeps", kernel, "CPU")
        with shadowrun.compare("cpu") as run:
            for _ in range(5):
                runs.append(0)
                torch.ops.quantized.shadowrun_sleeps(torch.ones(2))
    assert max(runs[1:]) > 2  # of those that the compiled handler may know; a busy machine makes a replay slow, too
    assert statuses(run, "quantized::shadowrun_sleeps") == [Status.MATCH] * 5


def test_who_waits_for_the_lock_goes_first(monkeypatch, either):
    turns, x = [], torch.ones(2)
    monkeypatch.setattr(Replayer, "hold_calls", lambda self: turns.append(1) or self.lock.acquire())
    with shadowrun.compare("cpu") as run:
        gate = run._replayer._gate
        for waits in (False, False, False, True, False):  # on one line: the handler knows it by then
            turns.clear()
            with gate if waits else contextlib.nullcontext():  # as a thread that waits has it
                x.neg()
                x.mul_(2.0)
            assert len(turns) == 2 * waits


class Counts(torchapi.DispatchMode):
    """A mode of the program's own."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_below_sees_the_program_s_own_calls_once(either):
    x = torch.ones(2)
    with Counts() as mode, shadowrun.compare("cpu") as run:
        for _ in range(4):
            x.neg()
    assert mode.seen == 4
    assert statuses(run, "aten::neg") == [Status.MATCH] * 4


def test_two_tensors_of_one_numpy_array(either):
    array, apart = np.full(3, 2.0), np.full(3, 3.0)
    with shadowrun.compare("cpu") as run:
        for _ in range(3):
            torch.from_numpy(array).mul_(torch.from_numpy(array))
            torch.from_numpy(array[:1]).add_(torch.from_numpy(apart[:1]))
    assert statuses(run, "aten::mul_.Tensor") == [Status.UNVERIFIED] * 3  # not a fault of the platform
    assert statuses(run, "aten::add_.Tensor") == [Status.MATCH] * 3  # on two storages that lie apart
    assert array.tolist()[0] == ((2.0**2 + 3) ** 2 + 3) ** 2 + 3


def test_a_subclass_with_a_handler_takes_itself_apart(either):
    x = torch.ones(2)
    with shadowrun.compare("cpu") as run:
        for _ in range(4):
            found = x.add(TwoTensor(x, x))
    assert type(found) is TwoTensor
    assert statuses(run, "aten::add.Tensor") == [Status.MATCH] * 8
