"""Threads that the program starts: seen while the block runs, unchanged, and named where they cannot be seen."""

import _thread
import gc
import json
import sys
import threading
import types
import weakref
from _thread import start_new_thread
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shadowrun
from shadowrun import Phase, Status, report
from shadowrun.intercept import torchapi

N = 4


def assert_same_bits(actual, expected):
    if isinstance(actual, torch.Tensor):
        assert torch.equal(actual, expected)
        return
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert_same_bits(a, e)


@pytest.fixture(autouse=True)
def _no_threads_left():
    before = set(threading.enumerate())

    def patched():
        future = vars(torchapi.Future)
        return (
            threading.Thread._bootstrap_inner,
            _thread.start_new_thread,
            *[future[name] for name in torchapi.FUTURE_CALLBACKS],
        )

    originals = patched()
    yield
    assert all(now is original for now, original in zip(patched(), originals, strict=True))
    assert set(threading.enumerate()) <= before


def in_threads(work, n=N):
    results, errors = [None] * n, []

    def body(k):
        try:
            results[k] = work(k)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(k,), name=f"worker {k}") for k in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return results


def training(k):
    """A few steps of a model that belongs to one thread, with a random stream of its own."""
    generator = torch.Generator().manual_seed(k)
    model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.uniform_(-0.5, 0.5, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        x = torch.randn(5, 6, generator=generator)
        loss = F.cross_entropy(model(x), torch.arange(5) % 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters()), generator.get_state()]


@pytest.mark.parametrize("target", ["cpu", "cpu[threads=1,mkldnn=off]"])
def test_training_in_threads_is_seen_and_unchanged(target):
    plain = in_threads(training)
    threads_before, mkldnn_before = torch.get_num_threads(), torch.backends.mkldnn.enabled
    with shadowrun.compare(target) as alone:
        training(0)
    with shadowrun.compare(target) as run:
        observed = in_threads(training)
    assert_same_bits(plain, observed)
    assert (torch.get_num_threads(), torch.backends.mkldnn.enabled) == (threads_before, mkldnn_before)
    assert run.counts()[Status.MISMATCH] == run.counts()[Status.ERROR] == 0
    assert {s: n * N for s, n in alone.counts().items()} == run.counts(), "no call is lost, none is counted twice"
    records = list(run.records())
    assert [r.call.seq for r in records] == list(range(len(records)))
    (mm,) = {r.call.module for r in run.records(op="aten::native_layer_norm_backward")}
    assert mm == "Sequential.1", "backward in a thread finds the forward call of that thread"
    assert {r.call.phase for r in records} == set(Phase)


def test_forward_in_threads_and_backward_in_the_program(clean_sim):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def work():
        model.zero_grad()
        sum(in_threads(lambda k: model(torch.full((2, 3), k + 1.0)).sum(), 2)).backward()
        return [p.grad.clone() for p in model.parameters()]

    for p in model.parameters():
        nn.init.constant_(p, 0.1)
    plain = work()
    with shadowrun.compare("sim") as run:
        observed = work()
    assert_same_bits(plain, observed)
    assert sum(r.call.op == "aten::tanh" for r in run.records()) == 2
    assert sum(r.call.op == "aten::tanh_backward" for r in run.records()) == 2


def test_shared_tensors_are_not_torn():
    shared = torch.zeros(64)

    def add(k):
        for _ in range(50):
            shared.add_(1)

    with shadowrun.compare("cpu[threads=1]", slow_ratio=1e9) as run:
        in_threads(add)
    assert shared.tolist() == [N * 50.0] * 64
    assert run.counts()[Status.MATCH] >= N * 50
    assert not run.findings(), "no thread writes between a call and its replay"


def test_a_pool_and_its_exceptions():
    def work(k):
        if k == 3:
            return torch.ones(2) @ torch.ones(3)
        return (torch.ones(3) * k).sum().item()

    with shadowrun.compare("cpu") as run, ThreadPoolExecutor(2, thread_name_prefix="pool") as pool:
        futures = [pool.submit(work, k) for k in range(5)]
        with pytest.raises(RuntimeError, match="size"):
            futures[3].result()
        assert [f.result() for k, f in enumerate(futures) if k != 3] == [0, 3, 6, 12]
        assert all(t.name.startswith("pool_") for t in pool._threads)
    assert sum(r.call.op == "aten::mul.Tensor" for r in run.records()) == 4
    assert not any("running before" in note for note in run.info.notes)


def test_an_uncaught_exception_is_reported_as_ever(monkeypatch):
    caught = []
    monkeypatch.setattr(threading, "excepthook", caught.append)

    def work():
        torch.ones(2).neg()
        raise KeyError("mine")

    def names():
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join()
        (args,) = caught
        caught.clear()
        frames, tb = [], args.exc_traceback
        while tb is not None:
            frames.append(tb.tb_frame.f_code.co_name)
            tb = tb.tb_next
        return args.exc_type, args.thread is thread, thread.daemon, frames

    plain = names()
    with shadowrun.compare("cpu") as run:
        assert names() == plain
    assert sum(r.call.op == "aten::neg" for r in run.records()) == 1


def test_a_subclass_with_its_own_run_and_a_timer():
    class Mine(threading.Thread):
        def run(self):
            self.result = torch.ones(2).exp()

    with shadowrun.compare("cpu") as run:
        thread = Mine()
        thread.start()
        thread.join()
        timer = threading.Timer(0.001, lambda: torch.ones(2).log())
        timer.start()
        timer.join()
    assert "run" not in vars(thread)
    assert {"aten::exp", "aten::log"} <= {r.call.op for r in run.records()}


def test_a_thread_outlives_the_block_and_a_later_one_names_it():
    go_on, inside = threading.Event(), threading.Event()
    results = []

    def work():
        results.append(torch.ones(2).exp())
        inside.set()
        go_on.wait(120)
        with torch.inference_mode():
            results.append(F.linear(torch.ones(2), torch.ones(2, 2)))
        results.append(torch.ones(2).cos())

    with shadowrun.compare("cpu") as run:
        thread = threading.Thread(target=work, name="outlives")
        thread.start()
        inside.wait(120)
    n = len(list(run.records()))
    with shadowrun.compare("cpu") as later:
        torch.ones(1)
        go_on.set()
        thread.join()
    assert len(results) == 3
    assert results[1].tolist() == [2, 2]
    assert len(list(run.records())) == n
    assert not any("cos" in r.call.op for r in later.records())
    assert [n for n in later.info.notes if "1 thread was running before" in n and "outlives" in n]
    assert "outlives" in report.render(later, "txt")


def test_the_random_stream_of_the_process_is_drawn_from_once():
    def draw(k):
        return [torch.rand(3) for _ in range(20)]

    def work():
        torch.manual_seed(5)
        drawn = torch.cat([t for ts in in_threads(draw) for t in ts])
        return drawn.view(-1, 3).sort(0).values, torch.get_rng_state()

    plain = work()
    with shadowrun.compare("cpu[threads=1]"):
        observed = work()
    assert_same_bits(plain, observed)


def test_stopping_from_another_thread():
    run = shadowrun.compare("cpu").start()
    in_threads(lambda k: run.stop(), 1)
    torch.ones(2).neg()
    assert not list(run.records(op="aten::neg"))
    with shadowrun.compare("cpu") as again:
        torch.ones(2).neg()
    assert len(list(again.records(op="aten::neg"))) == 1
    assert torchapi.top_mode() is None


def raw(work, start=None):
    """Run in a thread that `threading` does not know, started as `_thread` has it now; wait for it."""
    done = threading.Event()

    def body():
        try:
            work()
        finally:
            done.set()

    (start or _thread.start_new_thread)(body, ())
    assert done.wait(120)


def test_a_raw_thread_is_followed():
    with shadowrun.compare("cpu") as run:
        raw(lambda: torch.ones(2).exp())
    raw(lambda: torch.ones(2).log())
    assert len(list(run.records(op="aten::exp"))) == 1
    assert not list(run.records(op="aten::log"))
    assert not any("thread" in note for note in run.info.notes)


def test_an_exception_in_a_raw_thread_is_shown_as_ever(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: shown.append((u.exc_type, u.err_msg, repr(u.object))))

    def work():
        try:
            raise KeyError
        finally:
            done.set()

    def show():
        done.clear()
        n = len(shown)
        _thread.start_new_thread(work, ())
        done.wait(120)
        while len(shown) == n:
            pass
        return shown[-1]

    done = threading.Event()
    plain = show()
    with shadowrun.compare("cpu"):
        assert show() == plain
        with pytest.raises(TypeError, match="callable"):
            _thread.start_new_thread(3, ())
    assert plain[0] is KeyError


def test_raw_threads_that_cannot_be_followed_are_named():
    """The program imported the function before; what runs when a step ends is seen there."""
    go_on, inside = threading.Event(), threading.Event()

    def my_raw_work():
        torch.ones(2).exp()
        inside.set()
        go_on.wait(120)
        ended.set()

    ended = threading.Event()
    with shadowrun.compare("cpu") as run:
        start_new_thread(my_raw_work, ())
        inside.wait(120)
        run.step()
        go_on.set()
        ended.wait(120)
    assert not list(run.records(op="aten::exp"))
    (note,) = [n for n in run.info.notes if "thread" in n]
    assert "1 thread was running" in note
    assert "my_raw_work (test_threads.py:" in note
    assert "MainThread" not in note


def test_what_a_function_holds_is_freed_when_it_returns(clean_sim):
    """The frames of all threads were looked at in a frame that kept itself, until Python's collector came."""

    def step():
        x = torch.ones(3)
        with shadowrun.compare("sim"):
            x + 1
        return weakref.ref(x)

    gc.collect()
    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["pool", "raw"])
def test_threads_that_call_modules_unseen_are_told_from_idle_ones(how):
    """A short call leaves no trace at the end of a step; `nn.Module.__call__` notices it all the same."""
    model = nn.Linear(2, 2)
    with ThreadPoolExecutor(1, thread_name_prefix="early") as pool, ThreadPoolExecutor(1, "idle") as idle:
        pool.submit(int).result()
        idle.submit(int).result()
        with shadowrun.compare("cpu") as run:
            if how == "pool":
                pool.submit(model, torch.ones(1, 2)).result()
            else:
                raw(lambda: model(torch.ones(1, 2)), start_new_thread)
            in_threads(lambda k: model(torch.ones(1, 2)), 2)
    assert sum(r.call.op == "aten::addmm" for r in run.records()) == 2
    calling, running = (n for n in run.info.notes if "thread" in n)
    assert calling.startswith("Operators that 1 thread called were not compared")
    assert calling.endswith(": early_0." if how == "pool" else f": body (test_threads.py:{raw_line()}).")
    assert running.endswith(": idle_0." if how == "pool" else ": early_0, idle_0.")
    assert calling in json.loads(report.render(run, "json"))["info"]["notes"]
    assert "Operators that 1 thread" in report.render(run, "txt")


def raw_line():
    (code,) = [c for c in raw.__code__.co_consts if isinstance(c, types.CodeType)]
    return code.co_firstlineno


def test_threads_that_serve_are_not_named():
    """Progress bars, debuggers, notebooks and logs have threads that call nothing of the program's."""
    end = threading.Event()
    module = types.ModuleType("tqdm._monitor")
    exec("def run(end): end.wait(120)", module.__dict__)
    monitor = threading.Thread(target=module.run, args=(end,), name="monitor", daemon=True)
    other = threading.Thread(target=end.wait, args=(20,), name="other")
    monitor.start()
    other.start()
    with shadowrun.compare("cpu") as run:
        torch.ones(2).exp()
    end.set()
    monitor.join()
    other.join()
    (note,) = [n for n in run.info.notes if "thread" in n]
    assert note.endswith(": other.")


def test_threads_in_which_inductor_compiled_are_not_named():
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.pool.cache_clear()
    compiling, waiting = AsyncCompile.pool(), ThreadPoolExecutor(1)
    for pool in (compiling, waiting):
        pool.submit(int).result()  # starts a thread, which then waits for more: as after a first compilation
    try:
        with shadowrun.compare("cpu[threads=1]") as run:
            torch.ones(3).exp()
        (note,) = run.info.notes
        assert note.endswith(f": {next(iter(waiting._threads)).name}.")
    finally:
        for pool in (compiling, waiting):
            pool.shutdown()
        AsyncCompile.pool.cache_clear()


def test_callbacks_of_futures_are_followed_on_any_thread():
    """Communication hooks of DDP end in such callbacks, which gloo's threads run."""

    def chain():
        future = torch.futures.Future()
        made = future.then(lambda f: f.value().sinh())
        future.add_done_callback(lambda f: seen.append(f.value().cosh()))
        failing = future.then(lambda f: 1 / 0)
        raw(lambda: future.set_result(torch.ones(3)), start_new_thread)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            failing.wait()
        return made.wait()

    seen = []
    plain = chain()
    with shadowrun.compare("cpu") as run:
        observed = chain()
    assert_same_bits(plain, observed)
    assert_same_bits(*seen)
    assert len(list(run.records(op="aten::sinh"))) == len(list(run.records(op="aten::cosh"))) == 1
