"""`timeline=True`: when the parts of each call ran, on every path, and the lanes that a trace makes of it."""

import json
from collections import defaultdict
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch

import shadowrun
from shadowrun.errors import UsageError
from shadowrun.replay import timeline
from shadowrun.report.chrome_trace import JUDGE, PROGRAM, REFERENCE, TARGET, trace_events
from tests.models import assert_same
from tests.report.test_chrome_trace import check, spans

TIMES = """
select call.seq, op.name, call.step, began_ns, target_at_ns, call.target_ns, ref_at_ns, call.ref_ns, judge_at_ns,
    judged_ns, ended_ns
from call join moment on moment.seq = call.seq
join context on context.id = context_id join op on op.id = op_id order by call.seq"""


def train(device, spec, *, blocks=1, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)).to(device)
    optimizer, x = torch.optim.SGD(model.parameters(), 0.1), torch.ones(2, 4, device=device)
    run = shadowrun.compare(spec, **options)
    for _ in range(blocks):
        with run:
            for _ in range(2):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
                run.step()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}, run


PATHS = [
    ("cpu", "cpu[threads=1]", {}, False),
    ("cpu", "cpu[threads=1]", {"drift": True}, False),
    ("cpu", "sim", {}, False),
    ("sim", "sim", {"asynchronous": False}, False),
    ("sim", "sim", {}, True),
]
NAMES = ["same device", "drift", "program on the reference", "cross-device", "asynchronous"]


@pytest.mark.parametrize(("device", "spec", "options", "behind"), PATHS, ids=NAMES)
def test_each_path(device, spec, options, behind, clean_sim, tmp_path):
    plain, _ = train(device, spec, steps={99})
    with clean_sim.asynchronous() if behind else nullcontext():
        results, run = train(device, spec, file=tmp_path / "r", timeline=True, **options)
    assert_same(results, plain)
    run = shadowrun.load(tmp_path / "r")
    rows = list(run._data.query(TIMES))
    assert len(rows) == len(list(run.records())) > 20
    steps = {
        step: (start, start + wall) for step, start, wall in run._data.query("select step, started_s, wall_s from step")
    }
    compared = 0
    for seq, op, step, began, target_at, target, ref_at, ref, judge_at, judged, ended in rows:
        assert 0 <= began < ended, (seq, op)
        start, end = steps[step]
        assert start - 1e-4 <= began / 1e9 <= ended / 1e9 <= end + 1e-4, (seq, op)
        runs = [(at, took) for at, took in ((target_at, target), (ref_at, ref)) if at is not None]
        assert runs, (seq, op)
        for at, took in runs:
            assert began <= at, (seq, op)
            assert behind or at + took <= ended
        if len(runs) == 2:
            compared += 1
            # The two runs of a call are apart, and the judge comes behind both.
            (first, took), (second, _) = sorted(runs)
            assert first + took <= second
            # A slow run counts with the time of its fastest repetition, and the judge waited for the first.
            ends = max(at + took for at, took in runs)
            assert judge_at == ends or (judge_at > ends and (behind or judge_at - ends > 500_000)), (seq, op)
        assert judge_at is None or judge_at < judged
        assert behind or judged is None or judged <= ended
    assert compared > 15
    # Calls of the program come one after the other.
    assert all(earlier[-1] <= later[3] for earlier, later in pairwise(rows))
    events = list(trace_events(run._data))
    check(events)
    lanes = spans(events)
    assert len([e for *_, e in lanes[0, PROGRAM] if e["cat"] == "call"]) == len(rows)
    own, other = (TARGET, REFERENCE) if device == "sim" else (REFERENCE, TARGET)
    if spec == "sim":
        assert {e["cat"] for *_, e in lanes[0, own]} == {"program"}
        assert {e["cat"] for *_, e in lanes[0, other]} == {"replay"}
    for lane, column in ((TARGET, 4), (REFERENCE, 6), (JUDGE, 8)):
        starts = sorted(row[column] / 1e3 for row in rows if row[column] is not None)
        assert [began for began, *_ in lanes[0, lane]] == pytest.approx(starts, abs=2e-3)


def test_spans_of_modules_and_steps_hold_their_calls(tmp_path):
    train("cpu", "cpu[threads=1]", file=tmp_path / "r", timeline=True)
    run = shadowrun.load(tmp_path / "r")
    run.write_trace(tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert trace["otherData"]["note"].startswith("All times were measured")
    named = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {"judge", "program: steps, phases, modules, calls"} <= named
    by_kind = defaultdict(list)
    for began, ended, event in spans(trace["traceEvents"])[0, PROGRAM]:
        by_kind[event["cat"]].append((began, ended, event["name"]))
    calls = by_kind["call"]
    for began, ended, module in by_kind["module"]:
        inside = [name for b, e, name in calls if began <= b and e <= ended + 1e-3]
        assert inside, module
        assert "aten::addmm" in inside or not module.endswith((".0", ".2")) or len(by_kind["phase"]) > 1
    assert [name for *_, name in by_kind["step"]] == ["step 0", "step 1"]
    (_, first_ended, _), (second_began, *_) = by_kind["step"]
    assert first_ended <= second_began + 1e-3
    assert {name for *_, name in by_kind["phase"]} == {"forward", "backward", "optimizer"}


def test_the_clock_stands_still_between_blocks(tmp_path):
    train("cpu", "cpu[threads=1]", blocks=2, file=tmp_path / "r", timeline=True)
    data = shadowrun.load(tmp_path / "r")._data
    times = [row[3] for row in data.query(TIMES)]
    assert times == sorted(times)
    started = [s for (s,) in data.query("select started_s from step order by step")]
    assert started == sorted(started)
    assert len(started) == 4
    check(list(trace_events(data)))


def test_calls_beyond_the_bound_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "MAX_MOMENTS", 7)
    train("cpu", "cpu[threads=1]", file=tmp_path / "r", timeline=True)
    run = shadowrun.load(tmp_path / "r")
    assert len(list(run._data.query("select * from moment"))) == 7
    run.write_trace(tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert trace["otherData"]["calls without times"] == len(list(run.records())) - 7
    assert len([e for e in trace["traceEvents"] if e.get("cat") == "call"]) == 7


def test_a_run_without_it_has_no_times(tmp_path):
    train("cpu", "cpu[threads=1]", file=tmp_path / "r")
    assert list(shadowrun.load(tmp_path / "r")._data.query("select * from moment")) == []


def test_it_needs_a_comparison():
    with pytest.raises(UsageError, match="timeline=True needs a comparison"):
        shadowrun.compare("cpu[threads=1]", timeline=True, replay=False)


def test_the_command(tmp_path, capsys):
    from shadowrun.cli.main import main

    script = tmp_path / "s.py"
    script.write_text("import torch\ntorch.randn(4, 4) @ torch.randn(4, 4)\n", encoding="utf-8")
    file = tmp_path / "r.shadowrun"
    assert main(["run", "--target", "cpu[threads=1]", "--timeline", "--data", str(file), str(script)]) == 0
    assert main(["export", str(file), "--trace", str(tmp_path / "t.json")]) == 0
    trace = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert [e["name"] for e in trace["traceEvents"] if e.get("tid") == JUDGE and e["ph"] == "X"][-1] == "aten::mm"
