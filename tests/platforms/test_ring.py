"""Calls that wait in shared memory for a worker: what it compares is what was there at the time of the call."""

import ctypes
import gc
import os
import random
import signal
import weakref
from pathlib import Path

import pytest
import torch

import shadowrun
from shadowrun import Status
from shadowrun.platforms.spec import parse
from shadowrun.platforms.worker import client, ring_calls
from shadowrun.platforms.worker.client import Worker
from shadowrun.platforms.worker.ring import Ring
from shadowrun.platforms.worker.ring_calls import RingCall, RingCalls

SPEC = "cpu[isa=default,threads=1]"
ONE = (1, (0,))
NOT_MATCH = [s for s in Status if s not in (Status.MATCH, Status.SKIPPED)]


def opened_ring(n_bytes):
    descriptor = Ring.make(n_bytes)
    ring = Ring(descriptor)
    os.close(descriptor)
    return ring


def statuses(run):
    return [(r.call.op.removeprefix("aten::"), r.verdict.status) for r in run.records()]


@pytest.fixture
def small_ring(monkeypatch):
    """A ring of which a program of a few calls needs all, again and again."""
    make = Ring.make
    monkeypatch.setattr(client.Ring, "make", staticmethod(lambda: make(1 << 19)))


@pytest.fixture
def waits(monkeypatch):
    """Names of the calls that waited."""
    names = []
    close = RingCalls.close

    def noted(self, call, values, changed):
        closed = close(self, call, values, changed)
        if closed is True:
            names.append(call.name.removeprefix("aten::"))
        return closed

    monkeypatch.setattr(RingCalls, "close", noted)
    return names


def test_memory_is_never_given_twice():
    """Pieces of random sizes, released in their order, do not overlap while they are in use."""
    ring = opened_ring(1 << 14)
    numbers = random.Random(3)
    used = []
    for _ in range(3000):
        n = numbers.choice([0, 1, 64, 100, 1000, 4000])
        at = ring.take(n)
        if at < 0:
            assert used, "an empty ring has room for each of them"
            ring.release(used.pop(0)[2])
            continue
        assert at + n <= ring.size
        assert all(at + n <= a or a + m <= at for a, m, _ in used), (at, n, used)
        used.append((at, n, ring.head))
        while used and numbers.random() < 0.3:
            ring.release(used.pop(0)[2])


def test_what_was_taken_last_can_be_given_back():
    ring = opened_ring(1 << 14)
    ring.take(1000)
    before = ring.head
    ring.take(10_000)
    ring.take_back(before)
    assert ring.take(10_000) == 1024
    assert ring.give_back(5000) == ring.head
    assert ring.take(5000) > 0


def test_calls_wait_and_are_compared_with_the_values_of_their_moment(waits):
    """The program writes to what it passed and to what it got, in ways that no version counter shows."""
    with shadowrun.compare(SPEC) as run:
        x = torch.arange(1.0, 9.0)
        y = x.exp()
        x.data.add_(1)
        z = x.sqrt()
        x.numpy()[0] = 100.0
        y.numpy()[:] = -1.0
        x.log()
        x.set_(torch.full((8,), 3.0))
        x.log2()
        for k in range(20):
            # Freed, and its address used again.
            torch.full((8,), float(k)).exp2()
        z.mul_(2).add_(z)
    assert [op for op, _ in statuses(run) if op not in waits] == []
    assert run.counts()[Status.MATCH] == len(waits) == 49, run.counts()
    assert not any(run.counts()[s] for s in NOT_MATCH)


def test_a_difference_is_judged_with_the_inputs_and_results_of_the_call(monkeypatch):
    """The worker gives another result for one call; what the program did to its tensors since is not to be seen."""
    theirs = RingCall.theirs

    def wrong(self):
        values = theirs(self)
        if self.name == "aten::exp":
            values[0][2] += 5.0
        return values

    conclude = shadowrun.replay.paths.waiting_calls.WaitingCalls.conclude

    def concluded(self, waiting):
        if waiting.ring_call.name == "aten::exp":
            waiting.ring_call.state = ring_calls.DIFFERENT
            copy(waiting.ring_call)
        conclude(self, waiting)

    def copy(call):
        for at, n, *_ in call.results:
            ctypes.memmove(call.ring.address + at + call.shift, call.ring.address + at, n)

    monkeypatch.setattr(RingCall, "theirs", wrong)
    monkeypatch.setattr(shadowrun.replay.paths.waiting_calls.WaitingCalls, "conclude", concluded)
    with shadowrun.compare(SPEC, capture=True) as run:
        x = torch.arange(4.0)
        y = x.exp()
        x.fill_(7.0)
        y.fill_(7.0)
    found = [r for r in run.records() if r.verdict.status is Status.MISMATCH]
    assert [r.call.op for r in found] == ["aten::exp"]
    assert found[0].diffs[0].max_abs == pytest.approx(5.0)
    assert found[0].diffs[0].n_different == 1
    assert [s for op, s in statuses(run) if op == "fill_.Scalar"] == [Status.MATCH] * 2


def test_records_keep_the_order_of_the_calls(waits):
    """Also those of calls that cannot wait."""
    with shadowrun.compare(SPEC) as run:
        x = torch.ones(3)
        x.exp()
        torch._foreach_add_([x, x.clone()], 1.0)  # writes to a list
        x.log()
        torch.sparse.sum(torch.eye(3).to_sparse())
        x.neg()
    found = [op for op, _ in statuses(run)]
    assert "_foreach_add_.Scalar" not in waits
    wanted = ["ones", "exp", "clone", "_foreach_add_.Scalar", "log", "eye", "neg"]
    assert [op for op in found if op in wanted] == wanted
    assert {"exp", "log", "neg"} <= set(waits)


def test_a_small_ring_is_used_again_and_again(small_ring, waits):
    """A call waits for room, one that is too large is asked for by itself, and all are recorded."""
    with shadowrun.compare(SPEC) as run:
        for k in range(200):
            x = torch.full((1 + 97 * (k % 50),), 1.5)
            x.mul_(2.0)
        torch.ones(100_000).neg()
    assert run.counts()[Status.MATCH] == 402, run.counts()
    assert not any(run.counts()[s] for s in NOT_MATCH)
    assert len(waits) == 400


def test_forms_and_numbers(waits):
    """Views with gaps, transposed and conjugate tensors, several results, numbers, arguments that grow."""
    base = torch.arange(24.0).view(4, 6)
    with shadowrun.compare(SPEC) as run:
        base[1:, ::2].mul_(2)
        base.t().add(1)
        torch.view_as_complex(base.view(12, 2)).conj().mul(2)
        torch.complex(base, base).conj().clone()
        base.sort()
        torch.aminmax(base)
        base.sum().item()
        torch.tensor([float("nan")]).sum().item()
        torch.exp(base, out=torch.empty(0))
        torch.empty(0).add_(1)
        torch.add(base[0, :1].expand(6), base[0])
    assert not any(run.counts()[s] for s in NOT_MATCH), statuses(run)
    assert {"mul_.Tensor", "add.Tensor", "sort", "_local_scalar_dense", "exp.out"} <= set(waits)


def test_random_numbers_are_drawn_from_the_same_state(waits):
    with shadowrun.compare(SPEC) as run:
        torch.manual_seed(5)
        x = torch.rand(100)
        torch.nn.functional.dropout(x, 0.5)
        after = torch.rand(3)
    torch.manual_seed(5)
    y = torch.rand(100)
    torch.nn.functional.dropout(y, 0.5)
    assert torch.equal(x, y)
    assert torch.equal(after, torch.rand(3))
    assert {"rand", "bernoulli_.float"} <= set(waits)
    assert not any(run.counts()[s] for s in NOT_MATCH), statuses(run)


def test_settings_of_the_program_are_those_of_the_call(waits, monkeypatch):
    monkeypatch.setattr(Worker, "ask", lambda *_: pytest.fail("the worker had other settings"))
    with shadowrun.compare(SPEC) as run:
        torch.scalar_tensor(1)
        torch.set_default_dtype(torch.float64)
        try:
            torch.scalar_tensor(1)
        finally:
            torch.set_default_dtype(torch.float32)
        torch.scalar_tensor(1)
    assert run.counts()[Status.MATCH] == waits.count("scalar_tensor") == 3


def test_a_call_that_raises_is_forgotten(waits):
    x = torch.ones(2, 3)
    with shadowrun.compare(SPEC) as run:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                torch.mm(x, x)
            x.add_(1)
    assert run.counts()[Status.MATCH] == len(waits) == 3
    assert not any(run.counts()[s] for s in NOT_MATCH)


def test_a_death_is_a_record_of_the_oldest_call_and_the_others_are_compared(waits):
    with shadowrun.compare(SPEC) as run:
        x = torch.ones(5)
        run.step()
        os.kill(run._target.remote.pid, signal.SIGKILL)
        for _ in range(30):
            x = x + 1
    found = [r for r in run.records() if r.verdict.status is not Status.MATCH]
    assert [r.verdict.status for r in found] == [Status.ERROR]
    assert found[0].verdict.explanation == "worker died: signal 9 (SIGKILL)"
    assert run.counts()[Status.MATCH] == 30
    assert x.tolist() == [31.0] * 5


def test_a_worker_that_hangs_while_calls_wait_is_ended():
    with shadowrun.compare(SPEC, call_limit_s=0.5) as run:
        x = torch.ones(5)
        run.step()
        os.kill(run._target.remote.pid, signal.SIGSTOP)
        for _ in range(100):  # more than may wait
            x = x + 1
    found = [r for r in run.records() if r.verdict.status is not Status.MATCH]
    assert [r.verdict.status for r in found] == [Status.ERROR]
    assert found[0].verdict.explanation.startswith("worker hung: no answer within 0.5 s")
    assert run.counts()[Status.MATCH] == 100


def test_an_interrupt_drops_what_waits_with_a_record(monkeypatch):
    run = shadowrun.compare(SPEC)
    with pytest.raises(KeyboardInterrupt), run:
        x = torch.ones(5)
        run.step()
        x.exp()
        x.log()
        await_call = Worker.await_call

        def interrupted(self, call):
            monkeypatch.setattr(Worker, "await_call", await_call)
            raise KeyboardInterrupt

        monkeypatch.setattr(Worker, "await_call", interrupted)
    assert [s for _, s in statuses(run)] == [Status.MATCH, Status.UNVERIFIED, Status.UNVERIFIED]


def test_inputs_stay_as_before_the_call_where_the_worker_writes_to_them():
    """The judge starts from them; the worker's results lie next to the program's."""
    worker = Worker(parse(SPEC))
    worker.start()
    x = torch.ones(40)
    call = worker.open_call("aten::add_.Tensor", (x, x), {}, (1, ()), [("self", 0)])
    x.fill_(7.0)
    assert worker.close_call(call, [x]) is True
    x.zero_()
    worker.await_call(call)
    assert call.state == ring_calls.DIFFERENT
    assert call.ns > 0
    (before, other), _ = call.inputs()
    assert before.tolist() == [1.0] * 40
    assert other.tolist() == [1.0] * 40
    assert other.data_ptr() == before.data_ptr()
    assert call.own()[0].tolist() == [7.0] * 40
    assert call.theirs()[0].tolist() == [2.0] * 40
    worker.stop()


def test_a_call_inside_a_call_is_not_in_the_ring():
    calls = RingCalls(opened_ring(1 << 16))
    settings = ()
    outer = RingCall("aten::neg", calls.ring, ONE, [], settings, 1.0)
    inner = RingCall("aten::neg", calls.ring, ONE, [], settings, 1.0)
    assert calls.open(outer, (torch.ones(3),), {}, None) is True
    assert calls.open(inner, (torch.ones(3),), {}, None) is False
    calls.abandon(outer)
    assert calls.ring.head == 0
    assert calls.open(inner, (torch.ones(3),), {}, None) is True
    assert inner.inputs()[0][0].tolist() == [1.0] * 3


@pytest.mark.parametrize("options", [{"drift": True}, {"asynchronous": False}, {"timeline": True}])
def test_where_each_result_is_needed_at_once_no_call_waits(waits, options):
    with shadowrun.compare(SPEC, **options) as run:
        torch.ones(3).exp()
    assert not waits
    assert run.counts()[Status.MATCH] == 2


def test_the_program_s_tensors_are_not_kept(waits):
    with shadowrun.compare(SPEC):
        x = torch.ones(3)
        y = x.exp()
        kept = weakref.ref(x), weakref.ref(y)
        del x, y
        assert [k() for k in kept] == [None, None]
    assert waits


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of what a process has mapped")
def test_nothing_is_left_of_the_ring():
    """Also not after a crash. The memory has no name, so only a mapping or a descriptor could keep it."""

    def mapped():
        lines = Path("/proc/self/maps").read_text().splitlines()
        n_files = sum("memfd:shadowrun" in str(f.readlink()) for f in Path("/proc/self/fd").iterdir() if f.is_symlink())
        return sum("memfd:shadowrun" in line for line in lines), n_files

    gc.collect()
    before = mapped()
    with shadowrun.compare(SPEC) as run:
        torch.ones(3).exp()
        run.step()
        os.kill(run._target.remote.pid, signal.SIGKILL)
        torch.ones(3).exp()
        assert mapped()[0] > before[0]
    del run
    gc.collect()
    assert mapped() == before


def _foreach():
    values = [torch.arange(1.0, 5), torch.ones(3)]
    torch._foreach_sqrt(values)
    torch._foreach_sqrt(values[:1])
    torch._foreach_add_(values, 1.0)


def _norms_that_want_few_gradients():
    x = torch.arange(32.0).reshape(4, 8)
    torch.nn.functional.layer_norm(x.clone().requires_grad_(), (8,)).square().sum().backward()
    weight = torch.ones(8, requires_grad=True)
    torch.nn.functional.layer_norm(x, (8,), weight).square().sum().backward()


def _several():
    x = torch.arange(10.0).reshape(5, 2)
    torch.histogramdd(x, bins=[2, 2])
    torch.aminmax(x)
    x.sort()


@pytest.mark.parametrize("program", [_foreach, _norms_that_want_few_gradients, _several])
def test_lists_and_missing_results_are_compared_as_they_are(program):
    """A list is one result, and so is a gradient that is not wanted: neither is a value in the ring."""
    with shadowrun.compare(SPEC) as run:
        program()
    assert not list(run.internal_failures())
    found = statuses(run)
    assert len(found) > 2
    assert not [pair for pair in found if pair[1] not in (Status.MATCH, Status.SKIPPED)]


def test_inputs_of_what_returns_lists_are_copied_to_the_ring_once_only(monkeypatch):
    opened = []
    open_ = RingCalls.open
    monkeypatch.setattr(
        RingCalls, "open", lambda self, call, *rest: (opened.append(call.name), open_(self, call, *rest))[1]
    )
    with shadowrun.compare(SPEC):
        for _ in range(3):
            torch._foreach_sqrt([torch.ones(3), torch.ones(2)])
    assert opened.count("aten::_foreach_sqrt") == 1
