"""The trace of a run: Chrome's format, nesting, durations that are those of the data file, and what it lacks."""

import contextlib
import gzip
import json
import sqlite3
from collections import Counter, defaultdict

import pytest
import torch

import shadowrun
from shadowrun import sim
from shadowrun.cli.main import main
from shadowrun.errors import UsageError
from shadowrun.report.chrome_trace import PROGRAM, REFERENCE, REST, TARGET, _n_bytes, trace_events

N_STEPS = 3


def train(**options):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with shadowrun.compare("sim", **options) as run:
        for _ in range(N_STEPS):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            run.step()
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "r.shadowrun"
    sim.register()
    with sim.flaws("matmul-in-bf16"):
        train(file=path)
    return shadowrun.load(path)


def spans(events):
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event))
    return {lane: sorted(found, key=lambda span: (span[0], -span[1])) for lane, found in lanes.items()}


def check(events):
    """The rules of the format: fields of each event, spans of a lane inside of each other or apart, rising counters."""
    for event in events:
        assert {"ph", "ts", "pid", "tid", "name"} <= event.keys(), event
        assert event["ph"] in "XCMi"
        assert event["ph"] != "X" or event["dur"] >= 0
        assert event["ts"] >= 0
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
    for lane, found in spans(events).items():
        ends = []
        for began, ended, event in found:
            while ends and ends[-1] <= began + 1e-6:
                ends.pop()
            assert not ends or ended <= ends[-1] + 1e-3, (lane, event)
            ends.append(ended)
    counters = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            counters[event["pid"], event["name"]].append((event["ts"], *event["args"].values()))
    for name, values in counters.items():
        assert values == sorted(values), name


def test_a_run(run, tmp_path):
    assert run.write_trace(tmp_path / "t.json") == (len(list(run.records())),) * 2
    trace = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    events = trace["traceEvents"]
    check(events)
    lanes = spans(events)
    records = list(run.records())
    for lane, field in ((TARGET, "target_time_us"), (REFERENCE, "ref_time_us")):
        times = [getattr(r, field) for r in records if getattr(r, field) >= 0]
        assert len(lanes[0, lane]) == len(times)
        assert sum(e["dur"] for *_, e in lanes[0, lane]) == pytest.approx(sum(times), rel=1e-6, abs=len(times) * 2e-3)
    # The program's own calls are those of the CPU.
    assert {e["cat"] for *_, e in lanes[0, REFERENCE]} == {"program"}
    assert {e["cat"] for *_, e in lanes[0, TARGET]} == {"replay"}
    names = Counter(e["name"] for *_, e in lanes[0, PROGRAM])
    assert [names[f"step {n}"] for n in range(N_STEPS)] == [1] * N_STEPS
    assert names["Sequential.0"] >= N_STEPS
    assert {"forward", "backward", "optimizer"} <= set(names)
    mismatches = [e for e in events if e["ph"] == "i" and e["cat"] == "mismatch"]
    assert len(mismatches) == sum(str(r.verdict.status) == "mismatch" for r in records) > 0
    last = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "mismatches"][-1]
    assert last == {"mismatches": len(mismatches)}


def test_steps_are_where_the_file_has_them(run):
    events = list(trace_events(run._data))
    stored = list(run._data.query("select step, started_s, wall_s from step order by step"))
    steps = [e for e in events if e["ph"] == "X" and e["cat"] == "step"]
    assert [e["name"] for e in steps] == [f"step {n}" for n, *_ in stored]
    for event, (_, started_s, wall_s) in zip(steps, stored, strict=True):
        assert event["ts"] == pytest.approx(started_s * 1e6, abs=50)
        assert event["dur"] == pytest.approx(wall_s * 1e6, abs=50)
    # What is left of a step is one event of its lane.
    rests = [e for e in events if e["ph"] == "X" and e["tid"] == REST]
    assert [e["name"] for e in rests] == ["rest of the step: judge and the program"] * N_STEPS
    for step, rest in zip(steps, rests, strict=True):
        assert rest["ts"] + rest["dur"] == pytest.approx(step["ts"] + step["dur"], abs=0.01)


def test_the_judge_of_a_run_with_one_step(tmp_path):
    with shadowrun.compare("sim", file=tmp_path / "one") as run:
        for _ in range(20):
            torch.randn(8, 8) @ torch.randn(8, 8)
    run = shadowrun.load(tmp_path / "one")
    events = list(trace_events(run._data))
    check(events)
    judge, rest = (e for e in events if e["ph"] == "X" and e["tid"] == REST)
    assert (judge["name"], rest["name"]) == ("judge, copies, recording", "the program's Python")
    replays = sum(r.target_time_us for r in run.records() if r.target_time_us >= 0)
    assert judge["dur"] == pytest.approx(run.info.own_s * 1e6 - replays, abs=1)
    run.write_trace(tmp_path / "t.json")
    other = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["otherData"]
    assert other["of it judge, copies and recording, s"] == pytest.approx(judge["dur"] / 1e6, abs=1e-5)


def test_it_says_what_is_not_recorded(run, tmp_path):
    run.write_trace(tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert "Start times of calls are not recorded" in trace["otherData"]["note"]
    lanes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert any("judge" in name and "not recorded by call" in name for name in lanes)


def test_the_first_calls_of_a_long_run(run):
    events = list(trace_events(run._data, most=5))
    check(events)
    assert max(e["args"]["calls"] for e in events if e["name"] == "calls") == 5


def test_the_command_and_compression(run, tmp_path, capsys):
    path = tmp_path / "t.json.gz"
    assert main(["export", str(run._data.path), "--trace", str(path)]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    assert str(path) in said.err
    with gzip.open(path, "rt", encoding="utf-8") as file:
        check(json.load(file)["traceEvents"])
    assert main(["export", str(run._data.path), "--trace", str(tmp_path / "t.pb")]) == 2
    assert "use a file that ends in .json or .json.gz" in capsys.readouterr().err
    with pytest.raises(UsageError, match="its folder must exist"):
        run.write_trace(tmp_path / "no" / "t.json")


def test_each_run_of_a_combined_file_is_a_process(run, tmp_path):
    train(file=tmp_path / "b.shadowrun")
    both = shadowrun.combine([run._data.path, tmp_path / "b.shadowrun"], tmp_path / "c.shadowrun")
    events = list(trace_events(both._data))
    check(events)
    assert {e["pid"] for e in events} == {0, 1}
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [name.startswith("sim against cpu") for name in names] == [True, True]


@pytest.mark.parametrize(
    ("dtypes", "shapes", "n"),
    [
        ("f32,bf16", "[3, 4] [2]", 52),
        ("i64", "[]", 8),
        ("f8e4m3fn,c64", "[5] [2]", 21),
        ("", "", 0),
        ("b8", "[3]", 3),
        ("f32", f"[{'9' * 500}]", 2**53),
        ("f32," * 5, "[2" * 5000, 0),
        ("f32,f32", "[1 2] [, ]", 12),
        ("f32", "[\u0663]", 0),
    ],
)
def test_bytes_of_inputs(dtypes, shapes, n):
    assert _n_bytes(dtypes, shapes) == n


@pytest.mark.parametrize("seconds", [1e308, 1e300, 1e13, float("inf"), float("nan")])
def test_times_that_no_run_takes(tmp_path, seconds):
    """Numbers of a file whose microseconds or sums are infinite, which JSON does not know."""
    path = tmp_path / "r.shadowrun"
    for _ in range(2):
        train(file=path, append=path.exists())
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        ((info,),) = connection.execute("select value from meta where key = 'info'").fetchall()
        info = json.loads(info) | {"own_s": seconds, "wall_s": seconds}
        connection.execute("update meta set value = ? where key = 'info'", (json.dumps(info),))
        if seconds < 1e300:
            connection.execute("update step set wall_s = ?", (seconds,))
    shadowrun.load(path).write_trace(tmp_path / "t.json")
    json.loads((tmp_path / "t.json").read_text(), parse_constant=pytest.fail)
