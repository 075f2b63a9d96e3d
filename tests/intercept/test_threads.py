"""Threads that the program starts: seen while the block runs, unchanged, and named where they cannot be seen."""

import threading
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
    bootstrap = threading.Thread._bootstrap_inner
    yield
    assert threading.Thread._bootstrap_inner is bootstrap
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

    with shadowrun.compare("cpu[threads=1]") as run:
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
        go_on.wait(20)
        with torch.inference_mode():
            results.append(F.linear(torch.ones(2), torch.ones(2, 2)))
        results.append(torch.ones(2).cos())

    with shadowrun.compare("cpu") as run:
        thread = threading.Thread(target=work, name="outlives")
        thread.start()
        inside.wait(20)
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
