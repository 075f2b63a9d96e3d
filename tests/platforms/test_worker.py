"""The worker process: what travels, what comes back, and what happens when it crashes, hangs or loses its parent."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shadowrun
from shadowrun import Status
from shadowrun.errors import PlatformError
from shadowrun.intercept.plan import make_plan
from shadowrun.platforms import resolve
from shadowrun.platforms.spec import parse
from shadowrun.platforms.worker import question
from shadowrun.platforms.worker.channel import Channel
from shadowrun.platforms.worker.client import Unsendable, Worker, WorkerDied
from shadowrun.replay.call import Call, CallRun, Role
from shadowrun.replay.executor import Executor
from shadowrun.replay.paths import cross_device
from shadowrun.replay.paths.cross_device import CrossDevicePath
from shadowrun.replay.paths.platform_runs import return_to_program

ONE = (1, (0,))
SPEC = "cpu[isa=default,threads=1]"


@pytest.fixture(scope="module")
def worker():
    made = Worker(parse(SPEC))
    yield made
    made.stop()


@pytest.fixture
def own_worker():
    made = Worker(parse(SPEC))
    yield made
    made.stop()


@contextlib.contextmanager
def ends(shared=True):
    here, there = socket.socketpair()
    with here, there:
        yield Channel(here, shared=shared), Channel(there, answers=True, shared=shared)


def through(message, shared=True):
    """What arrives at the other end, and is sent back from there."""
    with ends(shared) as (asking, answering):

        def answer():
            answering.send(answering.receive())

        server = threading.Thread(target=answer)
        server.start()
        asking.send(message)
        received = asking.receive()
        server.join()
    return received


def raw(t):
    t = torch.view_as_real(t.resolve_conj().resolve_neg()) if t.is_complex() else t.resolve_neg()
    return torch.empty(t.numel(), dtype=t.dtype).copy_(t.flatten()).view(torch.uint8).numpy().tobytes()


def assert_equal(got, sent):
    assert got.dtype == sent.dtype
    assert got.shape == sent.shape
    assert got.stride() == sent.stride()
    assert (got.is_conj(), got.is_neg()) == (sent.is_conj(), sent.is_neg())
    assert raw(got) == raw(sent)


def has_ended(pid, seconds=120.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(") ")[2][0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


# -- what travels ----------------------------------------------------------------------------------


DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.int8, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn),
]


@st.composite
def layouts(draw):
    """A base of some dtype, and views of it: sliced, transposed, expanded, with offsets, empty, conjugate."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    width = dtype.itemsize
    n = max(1, int(torch.Size(shape).numel())) + draw(st.integers(0, 9))
    numbers = torch.frombuffer(bytearray((7 * i) % 251 for i in range(n * width)), dtype=torch.uint8)
    base = numbers.remainder(2).view(dtype) if dtype is torch.bool else numbers.view(dtype)
    views = []
    for _ in range(draw(st.integers(1, 3))):
        t = base[draw(st.integers(0, n - max(1, torch.Size(shape).numel()))) :][: torch.Size(shape).numel()].view(shape)
        for step in draw(st.lists(st.sampled_from(["transpose", "slice", "expand", "conj", "neg"]), max_size=3)):
            if step == "transpose" and t.dim() > 1:
                t = t.transpose(0, -1)
            elif step == "slice" and t.dim() and t.shape[0] > 1:
                t = t[1::2]
            elif step == "expand":
                t = t.unsqueeze(0).expand(3, *t.shape)
            elif step == "conj" and t.is_complex():
                t = t.conj()
            elif step == "neg" and t.is_complex():
                t = t.conj().imag if t.is_complex() else t
        views.append(t)
    return views


@given(layouts(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_layouts_and_sharing_travel(views, shared):
    got = through(views, shared)
    for a, b in zip(got, views, strict=True):
        assert_equal(a, b)
    filled = [i for i, v in enumerate(views) if v.numel()]
    for i in filled:
        for j in filled:
            same = got[i].untyped_storage().data_ptr() == got[j].untyped_storage().data_ptr()
            assert same
            assert got[i].data_ptr() - got[j].data_ptr() == views[i].data_ptr() - views[j].data_ptr()


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(max_size=9)
    | st.sampled_from(
        [torch.float32, torch.bool, torch.strided, torch.sparse_coo, torch.channels_last, torch.device("cpu")]
    ),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple),
    max_leaves=12,
)


@given(plain)
@settings(max_examples=200, deadline=None)
def test_plain_values_travel(value):
    got = through(value)
    assert got == value
    assert repr(got) == repr(value)


def test_only_the_part_that_is_covered_travels():
    base = torch.arange(1_000_000.0)
    got = through([base[500_000:500_010]])[0]
    assert torch.equal(got, base[500_000:500_010])
    assert got.untyped_storage().nbytes() < 256
    assert got.data_ptr() % 64 == base[500_000:].data_ptr() % 64


def test_generators_travel_with_their_state():
    g = torch.Generator().manual_seed(3)
    torch.rand(5, generator=g)
    assert torch.equal(torch.rand(4, generator=through([g])[0]), torch.rand(4, generator=g))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.eye(2).to_sparse(), "a sparse_coo tensor"),
        (torch.empty(2, device="meta"), "a strided tensor of meta"),
        (object(), "object cannot be sent"),
    ],
)
def test_what_cannot_travel_says_so(worker, value, reason):
    with pytest.raises(Unsendable, match=reason):
        worker.call("aten::relu", (value,), {}, ONE, [])
    assert worker.call("aten::relu", (torch.ones(1),), {}, ONE, [])[0][0].item() == 1


# -- what comes back -------------------------------------------------------------------------------


def test_settings_reach_the_process(worker):
    facts = worker.facts()
    assert facts["cpu_capability"] == "DEFAULT"
    assert facts["env"]["ATEN_CPU_CAPABILITY"] == "default"
    assert facts["threads"] == 1
    assert os.environ.get("ATEN_CPU_CAPABILITY") is None


def test_settings_of_the_program_reach_the_process(own_worker):
    def dtype_there():
        return own_worker.call("aten::scalar_tensor", (1,), {}, ONE, [])[0][0].dtype

    assert dtype_there() == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert dtype_there() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_several_returns_and_unwanted_ones(worker):
    x = torch.tensor([[3.0, 1.0, 2.0]])
    fresh, mutated, ns = worker.call("aten::sort", (x,), {}, (2, (1,)), [])
    assert fresh[0] is None
    assert fresh[1].tolist() == [[1, 2, 0]]
    assert mutated == []
    assert ns > 0


def test_mutated_arguments_come_back_and_stay_here(worker):
    x = torch.ones(3)
    fresh, mutated, _ = worker.call("aten::add_.Tensor", (x, x), {}, (1, ()), [("self", 0)])
    assert fresh == [None]
    assert mutated[0].tolist() == [2.0] * 3
    assert x.tolist() == [1.0] * 3


def test_sharing_between_arguments_is_kept(worker):
    base = torch.arange(6.0)
    fresh, mutated, _ = worker.call("aten::copy_", (base[1:5], base[0:1]), {}, (1, ()), [("self", 0)])
    assert fresh == [None]
    assert mutated[0].tolist() == [0.0] * 4
    base = torch.zeros(4)
    _, (lists,), _ = worker.call("aten::_foreach_add_.Scalar", ([base, base[1:]], 1.0), {}, (0, ()), [("self", 0)])
    assert lists[0].tolist() == [1, 2, 2, 2]


def test_arguments_by_name_and_words_of_torch(worker):
    out = torch.empty(0)
    _, mutated, _ = worker.call("aten::add.out", (torch.ones(2), torch.ones(2)), {"out": out}, (1, ()), [("out", -1)])
    assert mutated[0].tolist() == [2.0, 2.0]
    assert out.numel() == 0
    options = {"dtype": torch.float64, "layout": torch.strided, "device": torch.device("cpu"), "pin_memory": False}
    got = worker.call("aten::full", ([2], 3), options, ONE, [])[0][0]
    assert got.dtype == torch.float64
    got = worker.call("aten::clone", (torch.ones(1, 2, 3, 4),), {"memory_format": torch.channels_last}, ONE, [])[0][0]
    assert got.is_contiguous(memory_format=torch.channels_last)


def test_arguments_that_the_call_makes_larger(worker):
    """Shared memory cannot grow: such an argument gets memory of its own, and still shares it with others."""
    base = torch.zeros(4)
    x = torch.arange(9.0)
    _, mutated, _ = worker.call("aten::neg.out", (x,), {"out": base}, (1, ()), [("out", -1)])
    assert torch.equal(mutated[0], -x)
    assert base.numel() == 4
    _, mutated, _ = worker.call("aten::resize_", (base, [9]), {}, (1, ()), [("self", 0)])
    assert mutated[0].shape == (9,)
    big = torch.ones(600_000)
    _, mutated, _ = worker.call("aten::cat.out", ([big, big],), {"out": big[:5].clone()}, (1, ()), [("out", -1)])
    assert mutated[0].numel() == 1_200_000
    assert mutated[0].all()


def test_results_stay_when_later_calls_come(own_worker):
    x = torch.arange(500_000.0)
    kept = [own_worker.call("aten::mul.Scalar", (x, k), {}, ONE, [])[0][0] for k in range(5)]
    inplace = [own_worker.call("aten::add_.Scalar", (x, k), {}, (1, ()), [("self", 0)])[1][0] for k in range(3)]
    own_worker.stop()
    for k, got in enumerate(kept):
        assert torch.equal(got, x * k)
    for k, got in enumerate(inplace):
        assert torch.equal(got, x + k)


def test_random_state_is_handed_over(worker):
    state = torch.get_rng_state()
    got = worker.call("aten::randint", (1000, [50]), {}, ONE, [], rng=state)[0][0]
    torch.set_rng_state(state)
    assert torch.equal(got.to(torch.int64), torch.randint(1000, (50,)))


def test_big_tensors_travel(worker):
    x = torch.arange(6_000_000, dtype=torch.float32)
    assert torch.equal(worker.call("aten::neg", (x,), {}, ONE, [])[0][0], -x)


# -- errors, crashes, hangs ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "args", "kind", "text"),
    [
        ("aten::mm", (torch.ones(2, 3), torch.ones(2, 3)), RuntimeError, "mat1 and mat2 shapes cannot be multiplied"),
        ("aten::select.int", (torch.ones(2), 0, 5), IndexError, "out of range"),
        ("aten::relu", ("x",), RuntimeError, "Expected a value of type 'Tensor'"),
        ("aten::linalg_lu", (torch.ones(2, 2, dtype=torch.int32),), NotImplementedError, "not implemented for 'Int'"),
        ("aten::linalg_cholesky", (-torch.eye(2),), torch.linalg.LinAlgError, "not positive-definite"),
    ],
)
def test_errors_come_back_as_they_were(worker, name, args, kind, text):
    with pytest.raises(kind, match=text) as caught:
        worker.call(name, args, {}, ONE, [])
    assert type(caught.value) is kind
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    with pytest.raises(kind) as own, torch.no_grad():
        getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")(*args)
    assert str(caught.value) == str(own.value)


def test_an_operator_that_the_worker_lacks(worker):
    with pytest.raises(Unsendable, match="no operator mine::twice"):
        worker.call("mine::twice", (torch.ones(1),), {}, ONE, [])


def test_foreign_exception_types_become_runtime_errors():
    error = question._rebuild_exception("mypackage", "Strange", "what")
    assert type(error) is RuntimeError
    assert str(error) == "Strange: what"
    assert type(question._rebuild_exception("builtins", "eval", "1")) is RuntimeError
    assert type(question._rebuild_exception("builtins", "SystemExit", "1")) is RuntimeError


def crash(worker):
    """Kill the process in the middle of a call that takes long."""
    killer = threading.Timer(0.5, os.kill, (worker.pid, signal.SIGSEGV))
    killer.start()
    try:
        big = torch.ones(2500, 2500)
        while killer.is_alive():
            worker.call("aten::mm", (big, big), {}, ONE, [])
        worker.call("aten::mm", (big, big), {}, ONE, [])
    finally:
        killer.join()


def test_a_crash_is_reported_and_the_next_call_works(own_worker):
    own_worker.start()
    before = own_worker.pid
    with pytest.raises(WorkerDied, match=r"worker died: signal 11 \(SIGSEGV\)"):
        crash(own_worker)
    assert own_worker.pid == 0
    assert own_worker.call("aten::relu", (torch.ones(1),), {}, ONE, [])[0][0].item() == 1
    assert own_worker.pid not in (0, before)


def test_a_hang_is_ended_and_the_next_call_works(own_worker):
    own_worker.start()
    pid = own_worker.pid
    own_worker.limit_s = 0.5
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerDied, match=r"worker hung: no answer within 0.5 s"):
        own_worker.call("aten::relu", (torch.ones(1),), {}, ONE, [])
    assert has_ended(pid)
    own_worker.limit_s = 60.0
    assert own_worker.call("aten::relu", (torch.ones(1),), {}, ONE, [])[0][0].item() == 1


def test_an_operator_that_kills_it_three_times_is_left_alone(own_worker):
    own_worker.limit_s = 0.2
    for _ in range(3):
        own_worker.start()
        os.kill(own_worker.pid, signal.SIGSTOP)
        with pytest.raises(WorkerDied, match="worker hung"):
            own_worker.call("aten::relu", (torch.ones(1),), {}, ONE, [])
    with pytest.raises(WorkerDied, match="not tried again"):
        own_worker.call("aten::relu", (torch.ones(1),), {}, ONE, [])


def test_an_interrupt_does_not_mix_up_answers(own_worker, monkeypatch):
    own_worker.start()
    receive = Channel.receive

    def interrupted(channel):
        monkeypatch.setattr(Channel, "receive", receive)
        raise KeyboardInterrupt

    monkeypatch.setattr(Channel, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        own_worker.call("aten::neg", (torch.ones(1),), {}, ONE, [])
    assert own_worker.call("aten::relu", (torch.ones(1),), {}, ONE, [])[0][0].item() == 1


def test_a_process_that_does_not_start_is_refused(monkeypatch):
    monkeypatch.setattr("shadowrun.platforms.worker.process._START", "raise SystemExit('no such thing')")
    with pytest.raises(PlatformError, match=r"did not start \(exit status 1\): no such thing\.") as caught:
        Worker(parse(SPEC)).start()
    assert caught.value.slug == "no-worker"


# -- its end -----------------------------------------------------------------------------------------


def test_it_ends_with_stop_and_with_its_owner():
    made = Worker(parse(SPEC))
    made.start()
    pid = made.pid
    made.stop()
    made.stop()
    assert has_ended(pid)
    made.start()
    pid = made.pid
    del made
    assert has_ended(pid)


@pytest.mark.parametrize("busy", [False, True])
def test_it_ends_when_its_parent_is_killed(busy):
    code = f"""
import os, signal, threading, torch
from shadowrun.platforms.worker.client import Worker
from shadowrun.platforms.spec import parse
w = Worker(parse({SPEC!r}))
w.start()
print(w.pid, flush=True)
if {busy}:
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    x = torch.ones(7000, 7000)
    w.call("aten::mm", (x, x), {{}}, (1, (0,)), [])
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert has_ended(int(done.stdout))


# -- in a comparison -----------------------------------------------------------------------------------


def test_platforms_with_such_settings_have_a_process():
    assert resolve("cpu[threads=1]").remote is None
    platform = resolve(SPEC)
    assert platform.remote is not None
    assert not platform.same_device(resolve("cpu"))
    assert not resolve("cpu").same_device(platform)
    assert not platform.has_program_settings


def test_it_lives_as_long_as_the_comparison():
    run = shadowrun.compare(SPEC)
    run.start()
    torch.ones(3).exp()
    pid = run._target.remote.pid
    run.stop()
    assert has_ended(pid)
    with run:
        torch.ones(3).exp()
        assert run._target.remote.pid not in (0, pid)
    counts = run.counts()
    assert counts[Status.MATCH] == 4
    assert run.info.target_fingerprint["cpu_capability"] == "DEFAULT"


def test_a_death_is_an_error_of_that_call_alone():
    with shadowrun.compare(SPEC) as run:
        x = torch.rand(8)
        run.step()
        os.kill(run._target.remote.pid, signal.SIGSEGV)
        y = x.exp()
        z = y.log()
    assert torch.equal(z, x.exp().log())
    statuses = {r.call.op: r.verdict for r in run.records()}
    assert statuses["aten::exp"].status is Status.ERROR
    assert statuses["aten::exp"].explanation == "worker died: signal 11 (SIGSEGV)"
    assert statuses["aten::log"].status is Status.MATCH


def test_a_call_that_takes_too_long_is_an_error_of_that_call_alone():
    with shadowrun.compare(SPEC) as run:
        x = torch.rand(8)
        run.step()
        os.kill(run._target.remote.pid, signal.SIGSTOP)
        run._target.remote.limit_s = 0.5
        y = x.exp()
        run._target.remote.limit_s = 60.0
        z = y.log()
    assert torch.equal(z, x.exp().log())
    statuses = {r.call.op: r.verdict for r in run.records()}
    assert statuses["aten::exp"].status is Status.ERROR
    assert statuses["aten::exp"].explanation == "worker hung: no answer within 0.5 s, ended by signal 9 (SIGKILL)"
    assert statuses["aten::log"].status is Status.MATCH


def test_memory_of_a_worker_is_not_handed_to_the_program():
    """What the reference answers for the target is memory of the program's own."""
    worker = Worker(parse(SPEC))
    x = torch.ones(500_000)
    out = worker.call("aten::neg", (x,), {}, ONE, [])[0][0]
    plan = make_plan(torch.ops.aten.neg.default, 0)
    role = Role(torch.device("cpu"), on_target=True, on_ref=False, shared=False)
    handed = return_to_program(Call(plan, (x,), {}, role), CallRun((x,), {}, out, 0))
    worker.stop()
    handed.resize_(1_000_000)
    assert torch.equal(handed[:500_000], out)


def test_a_death_of_the_reference_leaves_the_call_unverified():
    with shadowrun.compare("cpu", ref=SPEC) as run:
        x = torch.rand(8)
        os.kill(run._ref.remote.pid, signal.SIGSEGV)
        x.exp()
    verdict = next(r.verdict for r in run.records() if r.call.op == "aten::exp")
    assert verdict.status is Status.UNVERIFIED
    assert "worker died: signal 11" in verdict.explanation


def test_what_cannot_travel_is_unverified():
    with shadowrun.compare(SPEC) as run:
        torch.sparse.sum(torch.eye(3).to_sparse() * 2)
    unverified = [r for r in run.records() if r.verdict.status is Status.UNVERIFIED]
    assert unverified
    assert not [r for r in run.records() if r.verdict.status in (Status.ERROR, Status.MISMATCH)]


def test_calls_that_raise_on_both_sides_raise_for_the_user():
    with shadowrun.compare(SPEC) as run, pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert run.counts()[Status.ERROR] == 0


def test_dropout_is_drawn_from_the_same_state():
    torch.manual_seed(1)
    with shadowrun.compare(SPEC) as run:
        torch.nn.functional.dropout(torch.ones(100), 0.5)
    verdict = next(r.verdict for r in run.records() if "bernoulli" in r.call.op or "dropout" in r.call.op)
    assert verdict.status is Status.MATCH


def test_inputs_that_are_not_copied_are_those_before_the_call(monkeypatch):
    """The process gets them after the program's own call; only what no call writes to may stay uncopied."""
    kept = []
    find = CrossDevicePath._not_copied

    def note(self, call):
        found = find(self, call)
        kept.append((call.plan.name, len(found or ())))
        return found

    monkeypatch.setattr(CrossDevicePath, "_not_copied", note)
    x, y = torch.rand(6, 6), torch.rand(6, 6)
    with shadowrun.compare(SPEC, asynchronous=False) as run:
        z = torch.add(x, y)
        z.add_(x)
        torch.mul(x[1:], y.t()[1:], out=z[1:])
        torch.cat([x, y[2:], z.t()])
        torch.rand_like(x)
        torch.relu_(z)
    assert run.counts()[Status.MATCH] == 6, run.counts()
    assert run.counts()[Status.UNVERIFIED] == run.counts()[Status.MISMATCH] == 0
    # Offsets are laid out anew, and views of one memory stay.
    assert kept == [("aten::add.Tensor", 2), ("aten::cat", 2), ("aten::rand_like", 0)], kept


def test_results_of_out_and_lists_are_compared():
    with shadowrun.compare(SPEC) as run:
        torch.exp(torch.ones(3), out=torch.empty(3))
        torch._foreach_mul_([torch.ones(3), torch.ones(2)], 2.0)
        torch.ones(5, 5)[:, 1:3].add_(1)
    assert not [r for r in run.records() if r.verdict.status not in (Status.MATCH, Status.SKIPPED)]


suppress = [HealthCheck.function_scoped_fixture]


@given(layouts())
@settings(max_examples=60, deadline=None, suppress_health_check=suppress)
def test_operators_see_the_layouts(worker, views):
    fresh = [worker.call("aten::eq.Tensor", (v, v), {}, ONE, [])[0][0] for v in views if v.dtype.itemsize > 1]
    own = [torch.ops.aten.eq.Tensor(v, v) for v in views if v.dtype.itemsize > 1]
    for a, b in zip(fresh, own, strict=True):
        assert_equal(a, b)


def test_a_question_has_the_values_of_its_moment(own_worker):
    """The program goes on while the worker computes, and writes to what it passed."""
    for n in (4, 1 << 20):  # in the mailbox, and in a segment
        x = torch.ones(n)
        question = own_worker.ask("aten::neg", (x,), {}, ONE, ())
        x.zero_()
        (out,), _, _ = own_worker.answer(question)
        assert bool((out == -1).all())


def test_answers_are_read_in_any_order(own_worker):
    first = own_worker.ask("aten::neg", (torch.ones(3),), {}, ONE, ())
    refused = own_worker.ask("aten::neg", (torch.ones(3).to_sparse(),), {}, ONE, ())
    last = own_worker.ask("aten::neg", (torch.ones(3) * 2,), {}, ONE, ())
    assert own_worker.call("aten::neg", (torch.ones(1),), {}, ONE, ())[0][0] == -1
    assert own_worker.answer(last)[0][0].tolist() == [-2.0] * 3
    with pytest.raises(Unsendable):
        own_worker.answer(refused)
    assert own_worker.answer(first)[0][0].tolist() == [-1.0] * 3


def test_a_question_to_a_process_that_was_ended_has_no_answer(own_worker):
    question = own_worker.ask("aten::neg", (torch.ones(3),), {}, ONE, ())
    own_worker.stop()
    assert own_worker.call("aten::neg", (torch.ones(1),), {}, ONE, ())[0][0] == -1
    with pytest.raises(WorkerDied):
        own_worker.answer(question)


def test_the_process_begins_before_the_program_s_call(monkeypatch):
    """And what is left of a call that raises, or that the program makes inside another, is not mixed up."""
    order = []
    ask, answer = Worker.ask, Worker.answer
    monkeypatch.setattr(cross_device, "_N_PROCESSORS", 64)
    monkeypatch.setattr(Worker, "ask", lambda self, name, *a: order.append(("ask", name)) or ask(self, name, *a))
    monkeypatch.setattr(Worker, "answer", lambda self, q: order.append(("answer", q.name)) or answer(self, q))
    a, b = torch.rand(3, 3), torch.rand(4, 4)
    passed = weakref.ref(b)
    # A call that seems slow, on a busy machine, would run again.
    with shadowrun.compare(SPEC, slow_ratio=1e9, asynchronous=False) as run:
        with contextlib.suppress(RuntimeError):
            torch.mm(a, b)
        del b
        assert passed() is None
        a.add_(1)
        torch.relu(a)
        product = torch.mm(a, a)
    assert order[:2] == [("ask", "aten::mm"), ("ask", "aten::add_.Tensor")]
    assert order[2:] == [
        ("answer", "aten::add_.Tensor"), ("ask", "aten::relu"), ("answer", "aten::relu"), ("ask", "aten::mm"),
        ("answer", "aten::mm"),
    ]  # fmt: skip
    assert torch.equal(product, torch.mm(a, a))
    assert run.counts()[Status.MATCH] == 3


def test_what_fails_where_it_begins_is_a_record_and_no_exception(monkeypatch):
    monkeypatch.setattr(cross_device, "_has_processors", lambda _: True)
    with shadowrun.compare("cpu[isa=default]", asynchronous=False) as run:
        monkeypatch.setattr(Worker, "ask", raising(ValueError("of ours")))
        assert torch.ones(3).exp().sum() > 8
    assert "ValueError: of ours" in {r.verdict.evidence for r in run.records(status=Status.ERROR)}


def raising(error):
    def raise_it(*_args, **_kwargs):
        raise error

    return raise_it


def test_nothing_begins_early_where_processors_are_few(monkeypatch):
    monkeypatch.setattr(cross_device, "_N_PROCESSORS", 1)
    monkeypatch.setattr(Executor, "begin_remote", lambda *_: pytest.fail("it was begun"))
    with shadowrun.compare(SPEC, asynchronous=False) as run:
        torch.relu(torch.rand(3))
    assert run.counts()[Status.MATCH] == 2
