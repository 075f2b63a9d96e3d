"""The compiled handler does what the Python code does: the same results, records and warnings, and nothing is left."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import traceback
import warnings
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shadowrun
from shadowrun import Phase, Status, native
from shadowrun.errors import ShadowrunWarning
from shadowrun.intercept import torchapi
from shadowrun.intercept.dispatch import ShadowMode
from shadowrun.recording.recorder import Recorder
from tests.models import digits, tokens, train
from tests.native.both_ways import WAYS, both_ways, handled, once, skipped
from tests.transparency import feature_programs, kernel_programs, tensor_programs

pytestmark = pytest.mark.skipif(native.core is None, reason="there is no compiled part to compare with")

PROGRAMS = tensor_programs.PROGRAMS | feature_programs.PROGRAMS | kernel_programs.PROGRAMS
LONG = {
    *("recurrent networks", "torch.compile", "flex attention", "make_fx and export", "torch.jit", "GradScaler"),
    *("checkpoint, reentrant", "an optimizer that steps in backward", "attention: math", "sparse tensors"),
    *("attention: the others, and whichever fits", "cond, while_loop and map", "checkpoint, not reentrant"),
    *("double backward", "attention: flash", "autocast", "no_grad, enable_grad and set_grad_enabled"),
}
ways = pytest.mark.parametrize("way", WAYS)
aten = torch.ops.aten


# -- programs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n not in LONG])
def test_programs(name):
    both_ways(lambda _: PROGRAMS[name].run("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LONG))
def test_long_programs(name):
    both_ways(lambda _: PROGRAMS[name].run("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_recorded_only(name):
    both_ways(lambda _: PROGRAMS[name].run("cpu"), replay=False)


@ways
@pytest.mark.parametrize("make", [digits, tokens], ids=lambda m: m.__name__)
def test_training(make, way):
    class Steps:
        """`train` starts and stops what it is given."""

        def __init__(self, run):
            self.step = run.step

        def start(self):
            pass

        stop = start

    run = both_ways(lambda run: train(make, steps=2, run=Steps(run)), **WAYS[way])
    assert handled(run)
    found = [r.call for r in run.records()]
    assert {c.step for c in found} >= {0, 1, 2, 3}
    assert {c.phase.value for c in found} == {"forward", "backward", "optimizer"}
    assert run.counts()[Status.MATCH if way == "compared" else Status.SKIPPED] > 200


@pytest.mark.parametrize(
    "options",
    [
        {"ops": ["aten::addmm", "aten::*add*"]},
        {"ops": ["aten::mm"], "replay": False},
        {"modules": ["Sequential.0"]},
        {"steps": [1]},
        {"steps": [0, 2], "replay": False},
        {"schedule": lambda step: step == 2},
    ],
    ids=",".join,
)
def test_selections(options):
    run = both_ways(lambda run: train_steps(run, torch.optim.SGD, lr=0.1), **options)
    assert list(run.records())


OPTIMIZERS = [
    (torch.optim.SGD, {"momentum": 0.9, "foreach": False}),
    (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.RMSprop, {"foreach": False}),
]


def train_steps(run, optimizer_type, **options):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = optimizer_type(model.parameters(), **options)
    x, losses = torch.randn(5, 4), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        run.step()
    return losses, model.state_dict(), optimizer.state_dict()


@pytest.mark.parametrize(("optimizer_type", "options"), OPTIMIZERS, ids=str)
def test_optimizers(optimizer_type, options):
    run = both_ways(lambda run: train_steps(run, optimizer_type, **options))
    assert any(r.call.phase is shadowrun.Phase.OPTIMIZER for r in run.records())


def in_place(_):
    x = torch.randn(4, 3)
    y, half, long = x.clone(), x[1:3], torch.arange(6)
    x.add_(1).mul_(x)
    x[:2].add_(x[2:])  # on one storage
    half.sub_(2.0)
    y.t().exp_()
    y.resize_(2, 6).fill_(2)
    y.set_(torch.ones(3)).neg_()
    long.add_(long).bitwise_not_()
    x.zero_().copy_(torch.ones(3)).index_put_((torch.tensor([0]),), torch.tensor(5.0), accumulate=True)
    torch.empty(0).add_(1)
    torch.tensor(1.5).mul_(2)
    big = torch.ones(200, 200).mul_(3).add_(torch.ones(200))
    return x, y, half, long, big


def kinds_of_arguments(_):
    x = torch.arange(6.0).reshape(2, 3)
    out = [x.add(2), x.add(True), x.add(2**60), x.add(0.5, alpha=2), x.sum(0), x.sum((0, 1), keepdim=True)]
    out += [x.to(torch.float64), torch.zeros_like(x, dtype=torch.int8), x.clamp(min=1), F.pad(x, (1, 2), value=3)]
    out += [torch.cat([x] * 9), torch.stack([x, x.neg()]), torch.div(x, 2, rounding_mode="floor"), x.repeat(1, 2)]
    out += [x.new_full((3,), 7), torch.complex(x, x).conj().neg(), torch.complex(x, x).imag.neg(), x.contiguous()]
    out += [x.is_nonzero() if x.numel() == 1 else x[0, 1].is_nonzero(), torch.equal(x, x.clone()), x.max().item()]
    return [*out, torch.tensor(3).item(), torch.tensor(True).item(), torch.tensor(1 + 2j).item(), bool(x.any())]


def failing(_):
    x = torch.ones(2, 3)
    errors = []
    for call in (
        lambda: torch.mm(x, x),
        lambda: x.add_(torch.ones(4)),
        lambda: torch.tensor(1).div_(2),
        lambda: torch.linalg.inv(torch.zeros(2, 2)),
        lambda: torch.cat([x, torch.ones(1)]),
        lambda: x.view(7),
    ):
        try:
            call()
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)  # Python's way shows its call at the program's line
            files = [f.filename for f in frames if "shadowrun" not in f.filename and f.name != "<operator>"]
            errors.append((type(error).__name__, str(error), files))
    return errors


def derivatives(_):
    x = torch.randn(3, 3, requires_grad=True)
    y = (x.tanh() @ x).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    g.square().sum().backward()
    z = (
        checkpoint(lambda v: v.sin().exp(), x, use_reentrant=False).sum()
        + checkpoint(torch.tanh, x, use_reentrant=True).sum()
    )
    z.backward()
    with torch.no_grad():
        x.sub_(x.grad, alpha=0.1)
    with torch.inference_mode():
        free = (x.detach() * 2).add_(1)
    return y, g, x, x.grad, free.clone()


def warning(_):
    return [torch.ones(1).std() for _ in range(3)], torch.ones(1, 2).var(0), torch.tensor([1 + 2j]).to(torch.float32)


@ways
@pytest.mark.parametrize(
    "program", [in_place, kinds_of_arguments, failing, derivatives, warning], ids=lambda p: p.__name__
)
def test_calls(program, way):
    assert handled(both_ways(program, **WAYS[way]))


def test_warnings_come_once_each_and_at_the_line_of_the_program():
    outcome, _ = once(warning)
    lines = [text.rpartition(":")[2] for text in outcome.warned if "degrees of freedom" in text]
    assert len(lines) == 8
    assert set(lines) == {str(warning.__code__.co_firstlineno + 1)}
    assert all(Path(__file__).name in text for text in outcome.warned)


def test_warnings_that_are_errors(either):
    def program(_):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="degrees of freedom"):
                torch.ones(1).std()
        return torch.ones(2) + 1

    outcome, run = once(program)
    assert outcome.error == ""
    assert not run.internal_failures()


def test_an_exception_of_an_operator_has_no_frame_of_ours():
    x = torch.ones(2, 3)
    errors = []
    with shadowrun.compare("cpu"):
        for _ in range(2):
            with pytest.raises(RuntimeError) as raised:
                torch.mm(x, x)
            errors.append(raised)
    assert [frame.filename for frame in traceback.extract_tb(errors[1].value.__traceback__)] == [__file__]


def test_threads(either):
    def work(out, i):
        x = torch.full((8, 8), float(i))
        for _ in range(30):
            x = (x @ x).softmax(0).add_(i)
        out[i] = x

    def program():
        out = {}
        threads = [threading.Thread(target=work, args=(out, i)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return out

    alone = program()
    with shadowrun.compare("cpu") as run:
        compared = program()
    assert all(torch.equal(alone[i], compared[i]) for i in range(4))
    assert list(run.records(status=["mismatch", "error", "unverified"])) == []
    assert run.counts()[Status.MATCH] == 4 * (1 + 3 * 30)
    assert len({r.call.seq for r in run.records()}) == sum(1 for _ in run.records())


# -- faults ----------------------------------------------------------------------------------------------


def off_by_one(run, args, kwargs):
    out = run(*args, **kwargs)
    return out.add_(1) if isinstance(out, torch.Tensor) else out + 1


def resizes(run, args, kwargs):
    return run(*args, **kwargs).resize_(1)


def moves(run, args, kwargs):
    out = run(*args, **kwargs)
    return out.set_(out.clone())


FAULTY = {
    "fresh": (aten.tanh.default, lambda x: x.tanh(), off_by_one),
    "with strides": (aten.tanh.default, lambda x: x.t().tanh(), lambda run, args, _: run(*args).contiguous().exp_()),
    "number": (aten._local_scalar_dense.default, lambda x: x[0, 0].item(), off_by_one),
    "in place": (aten.mul_.Tensor, lambda x: x.mul_(2), off_by_one),
    "in place, large": (aten.mul_.Tensor, lambda _: torch.ones(130, 130).mul_(2), off_by_one),
    "another dtype": (aten.neg.default, lambda x: x.neg(), lambda run, args, _: run(*args).double()),
    "another shape": (aten.neg.default, lambda x: x.neg(), lambda run, args, _: run(*args).reshape(-1)),
    "another number of bits": (aten.eq.Scalar, lambda x: x.eq(1), lambda run, args, _: run(*args).int()),
    "resized": (aten.mul_.Tensor, lambda x: x.mul_(2), resizes),
    "other memory": (aten.mul_.Tensor, lambda x: x.mul_(2), moves),
}


def batch_norm(x):
    mean, var = torch.zeros(3), torch.ones(3)
    return F.batch_norm(x, mean, var, training=True), mean, var


def second_off_by_one(run, args, kwargs):
    first, second = run(*args, **kwargs)
    return first, second + 1


def other_statistics(run, args, kwargs):
    out = run(*args, **kwargs)
    args[4].add_(1)
    return out


FAULTY |= {
    "second of two": (aten.var_mean.correction, lambda x: torch.var_mean(x, 0), second_off_by_one),
    "one of a list": (
        aten._foreach_neg.default,
        lambda x: torch._foreach_neg([x, x + 1]),
        lambda run, args, _: [run(*args)[0], args[0][0]],
    ),
    "statistics that the schema does not name": (aten.native_batch_norm.default, batch_norm, other_statistics),
}

# New memory with the same values is what a right operator may have.
EXPECTED = {"other memory": Status.MATCH}


@pytest.mark.parametrize("name", FAULTY)
def test_a_planted_fault_is_found_both_ways(replays, name):
    func, call, answer = FAULTY[name]
    n_calls = Counter()

    def late(*args):
        """Right at first: the compiled handler goes by what Python found out then."""
        n_calls[shadowrun.current()] += 1
        return answer(*args) if n_calls[shadowrun.current()] > 2 else args[0](*args[1], **args[2])

    replays(func, late)
    run = both_ways(lambda _: [call(torch.full((2, 3), 1.5)) for _ in range(2)])
    found = [r.verdict.status for r in run.records(op=func.name())]
    assert found == [Status.MATCH] * 2 + [EXPECTED.get(name, Status.MISMATCH)] * 2


def test_an_operator_that_was_wrong_once_is_looked_at_closely(replays):
    wrong = iter([True, False, False])
    replays(aten.tanh.default, lambda run, args, kwargs: run(*args) + next(wrong, 0))
    _, run = once(lambda _: [torch.full((2,), float(i)).tanh() for i in range(3)])
    found = [r.verdict.status for r in run.records(op="aten::tanh")]
    assert found == [Status.MISMATCH, *[Status.MATCH] * 5]
    comparator = run._replayer._context.comparator
    (index,) = comparator.suspects
    assert torch.equal(comparator._previous[index][0], torch.full((2,), 2.0).tanh())


class Interrupt(BaseException):
    """What is no error, and must reach the program."""


def raising(error):
    def answer(*_):
        raise error

    return answer


@pytest.mark.parametrize("func", [aten.tanh.default, aten.tanh_.default], ids=str)
@pytest.mark.parametrize("error", [RuntimeError("planted"), MemoryError(), RecursionError(), UserWarning("planted")])
def test_a_replay_that_fails_is_a_record(replays, either, func, error):
    replays(func, raising(error))
    method = "tanh_" if "tanh_" in func.name() else "tanh"
    expected = torch.ones(3).tanh()

    def program(_):
        with contextlib.suppress(ShadowrunWarning):
            return getattr(torch.ones(3), method)(), torch.ones(3) + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome, run = once(program)
    assert outcome.error == ""
    assert torch.equal(outcome.state["out"][1][0], expected)
    found = [r.verdict.status for r in run.records(op=func.name())]
    # A warning is ours; memory and recursion are limits of this process, and no fault of the target's.
    no_fault = isinstance(error, (Warning, MemoryError, RecursionError))
    assert found == [Status.UNVERIFIED if no_fault else Status.ERROR] * 2
    assert next(run.records(op="aten::add.Tensor")).verdict.status is Status.MATCH
    assert len([text for text in outcome.warned if "ShadowrunWarning" in text]) == (not no_fault)


@pytest.mark.parametrize("func", [aten.tanh.default, aten.tanh_.default], ids=str)
def test_an_interrupt_in_a_replay_reaches_the_program(replays, either, func):
    replays(func, raising(Interrupt()))
    method = "tanh_" if "tanh_" in func.name() else "tanh"
    torch.ones(3).add_(1)
    with shadowrun.compare("cpu") as run:
        x = torch.ones(3)
        for _ in range(2):
            with pytest.raises(Interrupt):
                getattr(x, method)()
        assert x.add(1) is not None  # the lock is free
    assert not run._replayer.lock._is_owned()
    assert next(run.records(op="aten::add.Tensor")).verdict.status is Status.MATCH


@ways
@pytest.mark.parametrize(
    "call", [lambda x: x.neg(), lambda x: x.neg_(), lambda x: x.view(-1)], ids=["fresh", "in place", "view"]
)
def test_an_interrupt_on_the_way_reaches_the_program(monkeypatch, either, call, way):
    with shadowrun.compare("cpu", **WAYS[way]) as run:
        x = torch.ones(3, requires_grad=True) * 1
        for known in (x.neg, x.view(-1).clone().neg_):  # operators, forms and verdicts, but not the line
            known()
            known()
        attribution = run._replayer._recorder.attribution
        with monkeypatch.context() as patch:
            once_only, new = iter([Interrupt()]), type(attribution._sites)._new

            def interrupted(*args):
                for error in once_only:  # Python, asked again, would not raise it
                    raise error
                return new(*args)

            patch.setattr(type(attribution._sites), "_new", interrupted)
            with pytest.raises(Interrupt):
                call(x)
        assert not run._replayer.lock._is_owned()
        torch.ones(2).exp()
    assert list(run.records(op="aten::exp"))


@ways
def test_rows_that_cannot_be_written_are_told_of_once_for_each(monkeypatch, either, way):
    def program(_):
        x = torch.ones(2)
        for _ in range(69):
            x = x + 1
        return x

    monkeypatch.setattr(Recorder, "_flush_if_due", raising(OSError("no space left")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome, run = once(program, **WAYS[way])
    monkeypatch.undo()
    assert outcome.error == ""
    assert torch.equal(outcome.state["out"][1], torch.full((2,), 70.0))
    found = [r for r in run.records(op="aten::add.Tensor") if r.verdict.status is not Status.ERROR]
    assert len(found) == 138
    n_reported = sum(n.n_calls for n in run.internal_failures()) + sum(
        n for *_, reason, n in skipped(run) if reason == "OSError"
    )
    assert n_reported >= 3  # of each 64th row, which is there all the same


# -- where the handler is and where it is not ------------------------------------------------------------------


def test_it_is_there_again_after_a_pause():
    with shadowrun.compare("cpu", steps=[0, 3]) as run:
        found, mode = [], run._mode
        for _ in range(5):
            torch.ones(2).neg()
            found.append(mode._method is not None)
            run.step()
    assert found[0]
    assert found[3]
    assert [r.call.step for r in run.records(op="aten::neg")] == [0, 3]
    assert mode._method is None


def test_calls_by_keyword_and_wrong_ones():
    with shadowrun.compare("cpu") as run:
        mode, x = run._mode, torch.ones(2)
        method = mode._method
        torchapi.pop_mode(mode)
        try:
            out = method(aten.neg.default, (torch.Tensor,), args=(x,), kwargs={})
            assert torch.equal(out, -x)
            assert torch.equal(method(aten.neg.default, types=(), args=(x,)), -x)
            assert torch.equal(method(aten.neg.default, [torch.Tensor], (x,), None), -x)
            assert torch.equal(
                method(aten.sum.dim_IntList, (torch.Tensor,), (x, [0]), {"keepdim": True}), x.sum(0, keepdim=True)
            )
            assert method(aten.empty.memory_format, (), ([2],), {"device": torch.device("cpu")}).shape == (2,)
            with pytest.raises(TypeError):
                method()
            with pytest.raises(TypeError):
                method(aten.neg.default, (), (x,), {}, 1)
            mode.detach()
            assert torch.equal(method(aten.neg.default, (torch.Tensor,), (x,), {}), -x)
        finally:
            torchapi.push_mode(mode)
    assert sum(1 for _ in run.records(op="aten::neg")) == 3


def test_a_mode_that_ended_on_another_thread_passes_calls():
    """It stays on the stack of its thread: no other thread can take it off."""
    go, stopped, got = threading.Event(), threading.Event(), []

    def work():
        torch.ones(2).neg()
        go.set()
        stopped.wait(60)
        got.append(torch.ones(2).neg())
        got.extend(mode.native_handler for mode in torchapi.modes() if isinstance(mode, ShadowMode))

    with shadowrun.compare("cpu") as run:
        thread = threading.Thread(target=work)
        thread.start()
        go.wait(60)
    stopped.set()
    thread.join()
    assert torch.equal(got[0], -torch.ones(2))
    assert got[1:] == [None]
    assert sum(1 for _ in run.records(op="aten::neg")) == 1


def test_modes_of_threads_are_gone_with_them():
    found = []

    def work():
        found.extend(weakref.ref(mode) for mode in torchapi.modes() if isinstance(mode, ShadowMode))

    gc.collect()
    gc.disable()
    try:
        with shadowrun.compare("cpu"):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        assert [mode() for mode in found] == [None]
    finally:
        gc.enable()


def test_a_comparison_is_given_back():
    def compared():
        run = shadowrun.compare("cpu")
        with run:
            mode = run._mode
            (torch.ones(3, requires_grad=True) * 2).sum().backward()
        parts = run, mode, run._replayer, run._replayer._recorder.attribution, run._replayer._recorder
        return [weakref.ref(part) for part in parts]

    found = compared()
    gc.collect()
    assert [part() for part in found] == [None] * 5


def test_a_custom_operator_waits_for_no_lock():
    """Its kernel may wait for another thread, views included."""
    with torch.library._scoped_library("shadowrun_native_test", "FRAGMENT") as library:
        library.define("waits(Tensor(a) x) -> Tensor(a)")

        def kernel(x):
            thread = threading.Thread(target=lambda: got.append(x.neg()))
            thread.start()
            thread.join(120)
            return x.view(x.shape)

        got = []
        library.impl("waits", kernel, "CPU")
        with shadowrun.compare("cpu") as run:
            torch.ops.shadowrun_native_test.waits(torch.ones(2))
            assert not run._replayer._gate.locked()
        assert len(got) == 1
    assert [r.verdict.status for r in run.records(op="aten::neg")] == [Status.MATCH]


@ways
def test_under_a_debugger_and_a_profiler(way):
    events = []

    def trace(frame, event, arg):
        events.append(event)
        return trace

    def program(_):
        sys.settrace(trace)
        sys.setprofile(lambda *_: None)
        try:
            model, optimizer, loss = digits()
            loss().backward()
            optimizer.step()
        finally:
            sys.setprofile(None)
            sys.settrace(None)
        return model.state_dict()

    with_it, run = once(program, **WAYS[way])
    assert events
    plain, other = once(lambda _: train_once(), **WAYS[way])
    for name, value in plain.state["out"][1].items():
        assert torch.equal(with_it.state["out"][1][name], value)
    assert [r.call.op for r in run.records()] == [r.call.op for r in other.records()]
    assert all(Path(__file__).name in r.call.site or "models.py" in r.call.site for r in run.records())


def train_once():
    model, optimizer, loss = digits()
    loss().backward()
    optimizer.step()
    return model.state_dict()


def test_a_tensor_that_shares_its_memory_until_it_is_written_to(either):
    x = torch.ones(5)
    y = torch._lazy_clone(x)
    for options in WAYS.values():
        with shadowrun.compare("cpu", **options):
            assert torch.equal(x + y, torch.full((5,), 2.0))
            y.sum(), y.view(5).neg()
        assert torch._C._is_cow_tensor(y)
    with shadowrun.compare("cpu"):
        z = torch._lazy_clone(x)
        assert torch._C._is_cow_tensor(z)
        y.add_(1)
    assert torch.equal(x, torch.ones(5))


# -- nothing is left ------------------------------------------------------------------------------------------


def leaking(x, w, args):
    """One call of each way."""
    x.neg()
    x.mul_(1.0)
    x.view(-1)
    torch.cat([x, x])
    x.sum(0, keepdim=True)
    torch.add(x, x, alpha=2)
    with contextlib.suppress(RuntimeError):
        torch.mm(x, x)
    with contextlib.suppress(RuntimeError):
        x.add_(args)
    (w * x).sum().backward()
    w.grad = None


@ways
def test_nothing_is_left_behind_by_many_calls(way):
    x, w, args = torch.ones(2, 3), torch.ones(2, 3, requires_grad=True), torch.ones(7)
    fixed = [x, w, args, None, True, torch.float32, aten.neg.default, torch.Tensor, Phase.FORWARD]

    def counts(run):
        run.counts()  # writes what waits
        gc.collect()
        return len(gc.get_objects()), [sys.getrefcount(v) for v in fixed]

    with shadowrun.compare("cpu", **WAYS[way], max_records=1000) as run:
        for _ in range(300):
            leaking(x, w, args)
        n, refs = counts(run)
        for _ in range(1500):
            leaking(x, w, args)
        later, later_refs = counts(run)
        assert later - n < 200
        assert all(abs(b - a) < 100 for a, b in zip(refs, later_refs, strict=True)), (refs, later_refs)
    assert handled(run)


@pytest.mark.parametrize(
    "call", [lambda x: x.neg(), lambda x: x.mul_(2.0), lambda x: x.view(-1)], ids=["fresh", "in place", "view"]
)
@ways
def test_arguments_and_results_are_held_by_the_program_alone(call, way):
    x = torch.ones(2)
    call(x)
    plain = sys.getrefcount(x), sys.getrefcount(call(x))
    with shadowrun.compare("cpu", **WAYS[way]):
        for _ in range(3):
            assert (sys.getrefcount(x), sys.getrefcount(call(x))) == plain
