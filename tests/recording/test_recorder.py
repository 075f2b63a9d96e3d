"""From calls to rows: contexts are interned by what stays the same from step to step."""

import threading

import pytest
import torch

import shadowrun
from shadowrun import Status
from shadowrun.intercept.call_sites import CallSites
from shadowrun.intercept.plan import make_plan
from shadowrun.recording import recorder as recorders
from shadowrun.replay.call import Call, Role
from shadowrun.types import Phase, Verdict

CPU = torch.device("cpu")
ORIGIN = ("Net.0", Phase.FORWARD, "a.py:1 in f")
PLAN = make_plan(torch.ops.aten.add.Tensor, 0)


@pytest.fixture
def run():
    with shadowrun.compare("cpu") as run:
        pass
    return run


@pytest.fixture
def recorder(run):
    run._recorder._contexts.clear()
    return run._recorder


def context(recorder, *args, origin=ORIGIN, device=CPU, plan=PLAN, **kwargs):
    role = Role(device, on_target=False, on_ref=False, shared=True)
    return recorder.context(Call(plan, args, kwargs, role, origin))


def test_the_same_form_is_the_same_context(recorder):
    x, y = torch.ones(2, 3), torch.zeros(2, 3)
    first = context(recorder, x, y, alpha=1)
    assert context(recorder, y, x, alpha=1) == first
    assert context(recorder, torch.nn.Parameter(x), y, alpha=1) == first


@pytest.mark.parametrize("other", [0.25, 1e30, float("nan"), -0.0])
def test_floats_and_large_integers_change_from_step_to_step(recorder, other):
    x = torch.ones(2)
    first = context(recorder, x, 0.5, [0.1, 0.2], alpha=3.0, n=1 << 40)
    assert context(recorder, x, other, [other, 0.2], alpha=other, n=1 << 41) == first


def test_what_makes_another_context(recorder):
    x = torch.ones(2)
    seen = [
        context(recorder, x, 1),
        context(recorder, x, 2),
        context(recorder, x, 1.0),
        context(recorder, x, True, None),
        context(recorder, x, None),
        context(recorder, x, [1, 2]),
        context(recorder, x, [1, 3]),
        context(recorder, x, [1, 2, 3]),
        context(recorder, x.double(), 1),
        context(recorder, x[:1], 1),
        context(recorder, [x, x], 1),
        context(recorder, [x, x.double()], 1),
        context(recorder, x, alpha=1),
        context(recorder, x, beta=1),
        context(recorder, x, dtype=torch.float16),
        context(recorder, x, mode="a"),
        context(recorder, x, mode="b"),
        context(recorder, x, 1, origin=("Net.1", *ORIGIN[1:])),
        context(recorder, x, 1, origin=("Net.0", Phase.BACKWARD, ORIGIN[2])),
        context(recorder, x, 1, origin=(*ORIGIN[:2], "a.py:2 in f")),
        context(recorder, x, 1, device=torch.device("meta")),
        context(recorder, x, 1, plan=make_plan(torch.ops.aten.mul.Tensor, 1)),
    ]
    assert len(set(seen)) == len(seen)


def test_how_inputs_are_printed(run, recorder):
    generator = torch.Generator()
    x = torch.ones(2, 3)
    args = (x, [x, x.half(), None, 1, 2, 3], 0.5, "mean", torch.float16, generator)
    recorder.match(context(recorder, *args, alpha=2, out=x.bfloat16()), 1.0, 2.0)
    (record,) = run.records()
    assert record.call.inputs == (
        "f32[2, 3], [f32[2, 3], f16[2, 3], None, 1, … 2 more], 0.5, 'mean', torch.float16, Generator, "
        "alpha=2, out=bf16[2, 3]"
    )
    assert (record.call.module, record.call.phase, record.call.site) == ORIGIN


def test_records_come_in_the_order_of_their_numbers(run, recorder):
    number = context(recorder, torch.ones(1))
    mismatch = Verdict(Status.MISMATCH, shadowrun.Cause.IMPLEMENTATION, "why", "evidence")
    numbers = [recorder.match(number, 1, 2), recorder.verdict(number, mismatch), recorder.match(number, 3, 4, (0.5, 1))]
    assert numbers == sorted(numbers)
    records = list(run.records())
    assert [r.verdict.status for r in records] == [Status.MATCH, Status.MISMATCH, Status.MATCH]
    assert records[1].verdict == mismatch
    assert (records[2].drift_abs, records[0].drift_abs) == (0.5, -1)


def test_skipped_calls_are_counted_once_each(run, recorder):
    for _ in range(3):
        recorder.skip("aten::view", "cpu", "view: metadata only")
    recorder.skip("aten::view", "sim:0", "view: metadata only")
    assert run.counts()[Status.SKIPPED] == 4
    recorder.skip("aten::view", "cpu", "view: metadata only")
    assert run.counts()[Status.SKIPPED] == 5, "and added to what is written"


def test_contexts_are_bounded(recorder, monkeypatch):
    monkeypatch.setattr(recorders, "_MAX_CONTEXTS", 10)
    numbers = [context(recorder, torch.ones(n)) for n in range(1, 30)]
    assert len(recorder._contexts) <= 11
    assert len(set(numbers)) == 29


def test_several_threads_may_record(run, recorder):
    def work(k):
        for n in range(200):
            number = context(recorder, torch.ones(n % 7 + 1), k)
            if n % 10:
                recorder.match(number, 1, 1)
            else:
                recorder.verdict(number, Verdict(Status.UNVERIFIED, None, f"reason {n % 3}"))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = list(run.records())
    assert len(records) == 800
    assert len({r.call.seq for r in records}) == 800


def test_a_origin_is_not_worth_the_user_s_program(run, recorder, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(CallSites, "find", broken)
    with shadowrun.compare("cpu") as other:
        y = torch.ones(2, requires_grad=True).view(2).neg()
    assert y.tolist() == [-1, -1]
    assert {(r.call.module, r.call.site) for r in other.records()} == {("", "")}


def test_the_clock_flushes_too(tmp_path, monkeypatch):
    monkeypatch.setattr(recorders, "FLUSH_S", 0.0)
    path = tmp_path / "a.shadowrun"
    x = torch.ones(2)
    with shadowrun.compare("cpu", file=path) as run:
        for _ in range(130):
            x.neg()
        assert len(run._data.rows) < 70, "written while running"
    assert len(list(shadowrun.load(path).records(op="aten::neg"))) == 130
