"""A target that runs behind its host is compared later, on another thread, without stopping it.

The simulated device then poisons host memory until the host waits, so a missing wait shows in every test here.
"""

import gc
import os
import signal
import threading
import time
import weakref

import pytest
import torch

import shadowrun
from shadowrun import Status, UsageError
from shadowrun.replay.paths import build_paths, pipeline, snapshots
from shadowrun.report.formatting import overhead
from shadowrun.sim.stream import STREAM
from tests.models import assert_same, digits, tokens, train


@pytest.fixture(autouse=True)
def behind(clean_sim):
    with clean_sim.asynchronous():
        yield


@pytest.fixture(params=[False, True], ids=["copied each time", "shared"])
def sharing(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(snapshots, "_SHARED_FROM_BYTES", 0)
    return request.param


def untimed(run):
    return [f for f in run.findings() if f.kind != "slow"]


def waits():
    return STREAM.waits[threading.get_ident()]


def chain(x, n=20):
    for _ in range(n):
        x = (x * 1.01 + 0.5).tanh()
    return x


def test_the_time_of_the_comparing_thread_is_counted_apart_and_added_up(tmp_path):
    file = tmp_path / "a.shadowrun"
    work_s = []
    for _ in range(2):
        with shadowrun.compare("sim", file=file, append=file.exists()) as run:
            chain(torch.rand(64, 64, device="sim"))
        work_s.append(run._replayer.async_compare_ns / 1e9)
        async_compare_s = run.info.async_compare_s
    assert min(work_s) > 0
    assert async_compare_s == pytest.approx(sum(work_s))
    assert shadowrun.load(file).info.async_compare_s == pytest.approx(async_compare_s)
    assert "an asynchronous comparison thread used" in overhead(run.info)
    with shadowrun.compare("sim", asynchronous=False) as run:
        chain(torch.rand(64, 64, device="sim"))
    assert run.info.async_compare_s == 0
    assert "asynchronous" not in overhead(run.info)


@pytest.mark.parametrize("make", [digits, tokens])
def test_training_is_unchanged_and_all_calls_match(make, sharing):
    plain = train(make, "sim", steps=6)
    run = shadowrun.compare("sim")
    assert_same(train(make, "sim", steps=6, run=run), plain)
    assert untimed(run) == []
    counts = run.counts()
    assert counts[Status.MATCH] > 100
    assert counts[Status.MISMATCH] == counts[Status.ERROR] == 0
    assert {r.verdict.explanation for r in run.records(status=Status.UNVERIFIED)} == {
        "random: drawn values handed over to the reference"
    }


@pytest.mark.parametrize("make", [digits, tokens])
def test_a_tiny_queue_and_little_memory_report_nothing(make, sharing, monkeypatch):
    monkeypatch.setattr(build_paths, "_MAX_PENDING", 1)
    plain = train(make, "sim", steps=6)
    run = shadowrun.compare("sim", max_bytes=200_000)
    assert_same(train(make, "sim", steps=6, run=run), plain)
    assert untimed(run) == []
    assert run.counts()[Status.MATCH] > 100
    assert run.counts()[Status.ERROR] == 0


def test_the_same_calls_get_the_same_records_in_the_same_order(sharing):
    found = []
    for wanted in (False, None):
        run = shadowrun.compare("sim", asynchronous=wanted)
        train(tokens, "sim", steps=3, run=run)
        found.append(
            [
                (r.call.op, r.call.step, r.call.module, r.call.phase, r.call.site, r.verdict)
                for r in run.records()
                if (r.call.op, r.call.device) != ("aten::_local_scalar_dense", "cpu")
            ]
        )
    assert len(found[0]) > 300
    assert found[0] == found[1]


def test_no_call_waits_for_the_device(sharing, monkeypatch):
    monkeypatch.setattr(build_paths, "_MAX_PENDING", 1000)  # a full queue makes the program wait: on a busy machine
    x = torch.randn(64, 64).to("sim")
    with shadowrun.compare("sim", slow_ratio=1e9) as run:
        chain(x)  # the first call of an operator is run twice, to hear its warnings
        # The comparing thread asks this one for looks at effects on memory: on a busy machine, not before now.
        assert run.counts()[Status.MATCH] == 60
        before = waits()
        chain(x)
        assert waits() == before
    assert run.counts()[Status.MATCH] == 120
    with shadowrun.compare("sim", slow_ratio=1e9, asynchronous=False) as run:
        before = waits()
        chain(x)
        assert waits() >= before + 120


def test_without_the_wait_calls_mismatch(monkeypatch):
    monkeypatch.setattr(snapshots.Copies, "wait", lambda self: None)
    x = torch.randn(64, 64).to("sim")
    with shadowrun.compare("sim") as run:
        chain(x)
    assert run.counts()[Status.MATCH] < 120
    assert run.counts()[Status.MISMATCH] > 0


def test_what_was_copied_is_what_the_device_held_at_the_call(sharing):
    x = torch.randn(8, 8).to("sim")
    with shadowrun.compare("sim") as run:
        for _ in range(30):
            y = x.clone()
            y.mul_(2).add_(1)
            x = y / 2
            y.zero_()
    assert run.counts()[Status.MISMATCH] == 0
    assert run.counts()[Status.MATCH] == 150


def test_what_is_returned_serves_the_next_call(monkeypatch):
    x = torch.randn(600, 600).to("sim")
    copied = []
    original = STREAM.defer_copy
    monkeypatch.setattr(STREAM, "defer_copy", lambda host, value: copied.append(host.nbytes) or original(host, value))
    with shadowrun.compare("sim") as run:
        y = chain(x, 4)
        y.add_(1)
        y.neg()
    assert run.counts()[Status.MATCH] == 14
    large = [n for n in copied if n >= x.nbytes]
    assert len(large) == 1 + 14  # the first input, and what each call returned or wrote


class UntrackedThreads:
    """A kernel that no dispatcher sees."""

    def __init__(self, t):
        from shadowrun.sim import device

        self.memory = device.to_cpu(t)

    def run(self):
        import ctypes

        ctypes.memset(self.memory.data_ptr(), 0, self.memory.nbytes)


@pytest.mark.parametrize("guarded", [True, False])
def test_memory_that_an_unseen_kernel_wrote_to_is_no_mismatch(monkeypatch, guarded):
    monkeypatch.setattr(snapshots, "_SHARED_FROM_BYTES", 0)
    if not guarded:
        monkeypatch.setattr(torch, "equal", lambda a, b: True)
    x = torch.randn(8, 8).to("sim")
    kernel = UntrackedThreads(x)
    with shadowrun.compare("sim") as run:
        x.add(1)
        kernel.run()
        x.add(1)
        run.step()
        x.add(1)
    counts = run.counts()
    if not guarded:
        assert counts[Status.MISMATCH] > 0
        return
    assert counts[Status.MISMATCH] == 0
    assert [r.verdict.explanation for r in run.records(status=Status.UNVERIFIED)] == [
        "memory was written to by code that the dispatcher does not see"
    ]
    assert counts[Status.MATCH] == 2


def test_a_freed_storage_s_copy_is_not_taken_for_another_s(sharing):
    with shadowrun.compare("sim") as run:
        for i in range(200):
            torch.full((16,), float(i), device="sim").mul(2)
    assert untimed(run) == []
    assert run.counts()[Status.MATCH] == 400


def test_nothing_of_the_program_is_held():
    with shadowrun.compare("sim"):
        x = torch.randn(64, 64).to("sim")
        y = chain(x)
        alive = [weakref.ref(x), weakref.ref(y)]
        gc.disable()
        try:
            del x, y
            assert [a() for a in alive] == [None, None]
        finally:
            gc.enable()


def test_the_copies_take_no_more_than_allowed(monkeypatch, sharing):
    most, held = 300_000, []
    original = snapshots.Snapshots._reserve

    def reserve(self, n_bytes):
        original(self, n_bytes)
        held.append(self._budget.held + n_bytes)

    monkeypatch.setattr(snapshots.Snapshots, "_reserve", reserve)
    with shadowrun.compare("sim", max_bytes=most) as run:
        chain(torch.randn(128, 128).to("sim"), 100)
    assert max(held) <= most
    assert run.counts()[Status.MATCH] == 301
    x = torch.randn(128, 128).to("sim")
    with shadowrun.compare("sim", max_bytes=100_000) as run:
        chain(x, 2)
    assert {r.verdict.explanation.partition(":")[0] for r in run.records(status=Status.UNVERIFIED)} == {"budget"}


def test_a_report_in_between_has_all_calls():
    x = torch.randn(64, 64).to("sim")
    with shadowrun.compare("sim") as run:
        chain(x)
        assert run.counts()[Status.MATCH] == 60
        chain(x)
        run.step()
        assert len([r for r in run.records() if r.call.step == 0]) == 120
        chain(x)
    assert [r.call.step for r in run.records()] == [0] * 120 + [1] * 60


def test_the_program_s_own_copies_to_the_host_are_as_they_were():
    x = torch.arange(16.0).to("sim")
    with shadowrun.compare("sim") as run:
        host = torch.empty(16)
        host.copy_(x, non_blocking=True)
        event = torch.sim.Event()
        event.record()
        event.synchronize()
        assert host.tolist() == list(range(16))
        assert (x * 2).sum().item() == 240
    assert untimed(run) == []


def test_inference_mode_and_views_and_lists(sharing):
    model = torch.nn.Linear(8, 8).to("sim")
    x = torch.randn(4, 8).to("sim")
    with shadowrun.compare("sim") as run, torch.inference_mode():
        for _ in range(3):
            x = model(x).relu_()
            x[:, 2:5].mul_(3)
            x = torch.cat([x[:, 4:], x.t().contiguous().t()[:, :4]], 1)
            torch._foreach_add_([x[0], x[1]], 1)
    assert untimed(run) == []
    assert run.counts()[Status.MATCH] > 10
    assert run.counts()[Status.ERROR] == run.counts()[Status.UNVERIFIED] == 0


def test_settings_that_change_while_calls_wait_leave_them_unverified(monkeypatch):
    gate = threading.Event()
    original = snapshots.Copies.wait

    def wait(self):
        gate.wait(120)
        original(self)

    x = torch.arange(6, device="sim")
    with shadowrun.compare("sim") as run:
        _ = x / 2  # heard
        run.step()
        monkeypatch.setattr(snapshots.Copies, "wait", wait)
        _ = x / 2
        torch.set_default_dtype(torch.float64)
        try:
            gate.set()
            run.step()
        finally:
            torch.set_default_dtype(torch.float32)
    assert [r.verdict.explanation for r in run.records(status=Status.UNVERIFIED)] == [
        "the program changed torch's settings while the call waited"
    ]


def test_an_exception_of_the_program_loses_nothing():
    x = torch.randn(64, 64).to("sim")
    run = shadowrun.compare("sim")
    with pytest.raises(ZeroDivisionError), run:
        chain(x)
        raise ZeroDivisionError
    assert run.counts()[Status.MATCH] == 60


def test_an_invalid_call_raises_what_it_would():
    x = torch.randn(4, 4).to("sim")
    with shadowrun.compare("sim") as run:
        y = chain(x)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            y @ torch.ones(3, 3, device="sim")
        chain(y)
    assert run.counts()[Status.MATCH] == 121
    assert untimed(run) == []


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_drops_what_waits_with_a_record(monkeypatch):
    began, let_go = threading.Event(), threading.Event()
    original = snapshots.Copies.wait

    def wait(self):
        began.set()
        let_go.wait(120)
        original(self)

    x = torch.randn(8, 8).to("sim")
    run = shadowrun.compare("sim")
    with run:
        chain(x, 1)
        run.step()
        monkeypatch.setattr(snapshots.Copies, "wait", wait)
        chain(x, 3)
        assert began.wait(120)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            run.step()
        let_go.set()
        monkeypatch.setattr(snapshots.Copies, "wait", original)
        chain(x, 1)
    counts = run.counts()
    assert counts[Status.MATCH] == 3 + 1 + 3
    dropped = {r.verdict.explanation for r in run.records(status=Status.UNVERIFIED)}
    assert dropped == {"KeyboardInterrupt while the call waited to be compared"}
    assert counts[Status.UNVERIFIED] == 8


def test_stopping_from_another_thread_ends_the_comparing_thread():
    x = torch.randn(64, 64).to("sim")
    run = shadowrun.compare("sim").start()
    chain(x)
    assert "shadowrun-replays" in {t.name for t in threading.enumerate()}
    stopper = threading.Thread(target=run.stop)
    stopper.start()
    stopper.join(120)
    assert not stopper.is_alive()
    assert run.counts()[Status.MATCH] == 60
    assert "shadowrun-replays" not in {t.name for t in threading.enumerate()}
    chain(x)
    assert run.counts()[Status.MATCH] == 60


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_goes_on_alone():
    x = torch.randn(64, 64).to("sim")
    with shadowrun.compare("sim") as run:
        chain(x)
        child = os.fork()
        if not child:
            signal.alarm(20)
            chain(torch.ones(2, 2))
            run.stop()
            os._exit(0)
        chain(x)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert run.counts()[Status.MATCH] == 120


def test_backward_on_the_device_s_thread_and_threads_of_the_program():
    def work(seed):
        x = torch.full((8, 8), float(seed)).to("sim").requires_grad_()
        chain(x, 5).sum().backward()

    with shadowrun.compare("sim") as run:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
    assert untimed(run) == []
    assert run.counts()[Status.ERROR] == 0
    assert run.counts()[Status.MATCH] > 60


def test_what_waits_at_the_end_of_the_process_is_recorded(tmp_path):
    import subprocess
    import sys

    file = tmp_path / "run.shadowrun"
    code = (
        "import torch, shadowrun\n"
        "from shadowrun import sim\n"
        "sim.enable(asynchronous=True)\n"
        f"run = shadowrun.compare('sim', file={str(file)!r}).start()\n"
        "x = torch.ones(64, 64).to('sim')\n"
        "for _ in range(50):\n"
        "    x = x * 1.0001\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_it_can_be_switched_off_and_insisted_on(clean_sim):
    x = torch.randn(8, 8).to("sim")
    with shadowrun.compare("sim", asynchronous=False) as run:
        chain(x)
        assert "shadowrun-replays" not in {t.name for t in threading.enumerate()}
    assert run.counts()[Status.MATCH] == 60
    shadowrun.compare("sim", asynchronous=True)
    with pytest.raises(UsageError, match="asynchronous"):
        shadowrun.compare("cpu", asynchronous=True)
    with pytest.raises(UsageError, match="drift"):
        shadowrun.compare("sim", asynchronous=True, drift=True)
    with pytest.raises(UsageError, match="asynchronous"):
        shadowrun.compare("sim", asynchronous="yes")


def test_a_slow_reference_is_waited_for_by_the_queue_alone(monkeypatch):
    monkeypatch.setattr(build_paths, "_MAX_PENDING", 4)
    original = snapshots.Copies.wait
    monkeypatch.setattr(snapshots.Copies, "wait", lambda self: (time.sleep(0.002), original(self))[1])
    with shadowrun.compare("sim") as run:
        chain(torch.randn(8, 8).to("sim"), 30)
    assert run.counts()[Status.MATCH] == 91


@pytest.mark.parametrize("started", [True, False])
def test_what_is_run_again_at_the_end_of_a_step_is_not_the_program_s(clean_sim, monkeypatch, started):
    if not started:  # as at the end of a process
        monkeypatch.setattr(pipeline.Pipeline, "_start", lambda self: False)
    x = torch.full((64, 64), 0.3).to("sim").requires_grad_()
    autocast = torch.autocast("sim", dtype=torch.bfloat16)
    with clean_sim.flaws("softmax-error"), shadowrun.compare("sim") as run, autocast:
        for _ in range(3):
            torch.nn.functional.softmax(x, -1)
            run.step()
    assert [(r.call.op, r.call.step) for r in run.records()] == [("aten::_softmax", i) for i in range(3)]
    assert run.counts()[Status.MISMATCH] == 3


def test_the_optimizer_s_numbers_on_the_cpu_stop_no_comparison():
    torch.manual_seed(0)
    _, optimizer, loss_of = tokens("sim")
    with shadowrun.compare("sim", slow_ratio=1e9) as run:
        for i in range(3):
            before = waits()
            optimizer.zero_grad()
            loss_of().backward()
            optimizer.step()
            if i == 2:
                assert waits() == before
            run.step()
    assert run.counts()[Status.MISMATCH] == run.counts()[Status.ERROR] == 0
    assert [r for r in run.records() if r.call.op == "aten::_foreach_add_.Tensor" and r.call.device == "cpu"]
    assert not [r for r in run.records() if r.call.op == "aten::_local_scalar_dense"]


def test_numbers_of_a_program_on_the_cpu_are_read_from_the_target_too():
    with shadowrun.compare("sim") as run:
        x = torch.ones(4)
        for _ in range(5):
            x.add_(1)
        assert (x * 2).sum().item() == 48
    assert [r.call.op for r in run.records()][-1] == "aten::_local_scalar_dense"
    assert run.counts()[Status.MATCH] == 9
    assert untimed(run) == []
