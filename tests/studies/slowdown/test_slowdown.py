"""Operators timed on two platforms: the figures, and what is made of them. No test judges a time of this machine."""

import csv
import io
import json
import statistics
from pathlib import Path

import pytest
import torch

import shadowrun
from shadowrun.cli.main import main
from shadowrun.cli.studies import slowdown as slowdown_command
from shadowrun.errors import DataFileError
from shadowrun.platforms import resolve
from shadowrun.studies.slowdown import timing
from shadowrun.studies.slowdown.calls import Call, read_mix
from shadowrun.studies.slowdown.table import FAIL_ON, Slowdown, slowdown_issues
from shadowrun.studies.slowdown.timing import Spread, TimedCall, measure

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Three steps of a small program, its optimizer with lists of tensors."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    with shadowrun.compare("cpu[threads=1]", file=".shadowrun") as run:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            run.step()
    return Path(".shadowrun")


def test_the_calls_of_a_run_and_how_often(recorded):
    mix = read_mix(recorded)
    assert mix.n_steps == 3
    assert (mix.target, mix.ref) == ("cpu[threads=1]", "cpu")
    calls = {(c.op, c.inputs): c for c in mix.calls}
    assert calls["aten::addmm", "f32[4], f32[2, 4], f32[4, 4]"].n == 12
    (update,) = (c for c in mix.calls if c.op == "aten::_foreach_add_.List")
    assert "… 4 more" in update.inputs
    assert update.shapes == " ".join(["[4, 4] [4]"] * 8)


def test_every_call_of_the_run_is_timed(recorded):
    cpu, one = resolve("cpu"), resolve("cpu[threads=1]")
    measured = [measure(c, one, cpu, rounds=3) for c in read_mix(recorded).calls]
    assert [m.failed for m in measured if m.failed] == []
    for m in measured:
        for spread in (m.ref_us, m.target_us, m.ratio):
            assert 0 < spread.lower <= spread.median <= spread.upper


def test_a_long_list_is_made_again_with_all_its_tensors(monkeypatch):
    seen = []
    real = timing.Timer.__init__

    def spy(self, platform, job):
        seen.append([t.shape for t in job.args[0]])
        real(self, platform, job)

    monkeypatch.setattr(timing.Timer, "__init__", spy)
    text = "[f32[2], f32[3], f32[4], f32[5], … 2 more], 0.5"
    call = Call("aten::_foreach_mul_.Scalar", text, 1, "[2] [3] [4] [5] [6] [7, 8]")
    assert measure(call, resolve("cpu"), resolve("cpu"), rounds=3).failed == ""
    assert seen[0] == [(2,), (3,), (4,), (5,), (6,), (7, 8)]
    cut = Call("aten::_foreach_mul_.Scalar", text, 1, "[2] [3] [4] [5] [6]")
    assert measure(cut, resolve("cpu"), resolve("cpu"), rounds=3).failed == "its inputs were recorded in part"


def test_a_call_that_writes_gets_new_inputs_each_time(monkeypatch):
    values = []
    monkeypatch.setattr(timing, "_SAMPLE_NS", 10**12)  # as many calls in a sample as may be

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mul_.Tensor:
                values.append(float(args[0].abs().max()))
            return func(*args, **(kwargs or {}))

    with Spy():
        m = measure(Call("aten::mul_.Tensor", "f32[4], f32[4]", 1), resolve("cpu"), resolve("cpu"), rounds=3)
    assert m.failed == ""
    assert len(values) > 40
    assert len(set(values)) == 1


def test_the_target_s_failure_is_the_target_s(clean_sim):
    call = Call("aten::cumsum", "f32[4], 0", 3)
    with clean_sim.flaws("missing-cumsum"):
        m = measure(call, resolve("sim"), resolve("cpu"), rounds=3)
    assert m.on_target
    assert "cumsum" in m.failed
    assert measure(call, resolve("sim"), resolve("cpu"), rounds=3).ratio is not None


@pytest.mark.parametrize(
    ("op", "inputs", "why"),
    [
        ("aten::no_such_operator", "f32[4]", "no operator"),
        ("aten::mm", "f32[2, 3], f32[2, 3]", "the reference: RuntimeError"),
        ("aten::mm", "f32[2, 3], [", "in part"),
        ("aten::relu", "f32[1024, 1024]", "2 GiB"),
    ],
)
def test_what_cannot_be_timed_says_why(op, inputs, why, monkeypatch):
    monkeypatch.setattr(timing, "MAX_BYTES", 1 << 20)
    m = measure(Call(op, inputs, 1), resolve("cpu"), resolve("cpu"), rounds=3)
    assert why in m.failed
    assert not m.on_target


def test_a_platform_with_a_process_of_its_own():
    target = resolve("cpu[isa=default]")
    target.start()
    try:
        m = measure(Call("aten::mm", "f32[8, 8], f32[8, 8]", 1), target, resolve("cpu"), rounds=3)
    finally:
        target.stop()
    assert m.failed == ""
    assert m.target_us.median > 0


def spread(median, noise=0.0):
    return Spread(median, median - noise, median + noise)


def timed(op, n, ref, target, noise=0.0):
    return TimedCall(Call(op, "f32[2]", n), spread(ref), spread(target), spread(target / ref, noise))


def test_the_step_is_weighted_by_the_run_s_own_mix():
    found = Slowdown.from_timings([timed("a", 30, 10, 20), timed("b", 3, 100, 50), timed("a", 3, 1, 40)], 3, 10)
    assert found.step.ref_us == pytest.approx((30 * 10 + 3 * 100 + 3 * 1) / 3)
    assert found.step.target_us == pytest.approx((30 * 20 + 3 * 50 + 3 * 40) / 3)
    assert found.step.complete
    a, b = found.operators
    assert (a.op, a.n_calls, a.n_signatures) == ("a", 33, 2)
    assert a.ratio == pytest.approx(720 / 303)
    assert a.lost_us == pytest.approx((720 - 303) / 3)
    assert a.worst.ratio.median == 40
    assert b.lost_us == -50
    assert found.faster == (b,)
    assert found.median_ratio == pytest.approx(statistics.median([720 / 303, 0.5]))


def test_noise_is_told_from_slowness():
    found = Slowdown.from_timings(
        [timed("sure", 1, 1, 12, 1), timed("noisy", 1, 1, 12, 5), timed("two", 1, 1, 3)], 1, 10
    )
    assert [o.op for o in found.slower(10)] == ["noisy", "sure"]
    assert [o.op for o in found.surely_slower(10)] == ["sure"]
    assert [o.op for o in found.slower(2)] == ["noisy", "sure", "two"]


def test_what_failed_makes_the_step_incomplete():
    failed = TimedCall(Call("c", "", 1), failed="NotImplementedError: no", on_target=True)
    found = Slowdown.from_timings([timed("a", 1, 1, 1), failed], 1, 10)
    assert not found.step.complete
    assert found.failing == (failed,)


def test_the_slow_ones_as_issues():
    failed = TimedCall(Call("c", "f32[3]", 1), failed="NotImplementedError: no", on_target=True)
    calls = [
        timed("sure", 1, 1, 12, 1),
        timed("noisy", 1, 1, 12, 11),
        timed("two", 1, 1, 3),
        timed("a", 1, 1, 1),
        failed,
    ]
    found = Slowdown.from_timings(calls, 1, 10)
    issues = slowdown_issues(found, "npu against cpu", ["critical"], "run.shadowrun")
    assert [(i.name, i.rule, i.level) for i in issues.rows] == [
        ("sure", "slow/critical", "error"),
        ("two", "slow", "warning"),
        ("c", "error", "warning"),
    ]
    assert issues.rows[0].message == "sure, npu against cpu: 12.00 times slower, more than 10 beyond the noise"
    # Within the noise is no finding.
    assert sorted(issues.passed) == ["a", "noisy"]
    assert [i.level for i in slowdown_issues(found, "x", FAIL_ON).rows] == ["error", "warning", "error"]
    assert slowdown_command._FAIL_ON == FAIL_ON


def test_command(recorded, capsys):
    assert main(["slowdown", "--rounds", "3", "--ops", "aten::*mm*"]) == 0
    shown = capsys.readouterr().out
    assert "slowdown of cpu[threads=1] against cpu" in shown
    assert "aten::addmm" in shown
    assert "aten::sum" not in shown
    assert main(["slowdown", "--rounds", "3", "--target", "sim", "--flaws", "slow-max-pool", "-f", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["of"] == "sim against cpu"
    assert document["failing"] == []
    assert document["step"]["complete"]
    assert {o["op"] for o in document["operators"]} >= {"aten::addmm", "aten::_foreach_add_.List"}
    assert main(["slowdown", "--rounds", "3", "--ops", "aten::addmm", "-f", "csv"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (row["operator"], row["calls"]) == ("aten::addmm", "12")
    assert main(["slowdown", "--rounds", "3", "--ops", "aten::addmm", "-o", "x.md"]) == 0
    assert "| aten::addmm | 12 |" in Path("x.md").read_text(encoding="utf-8")


def test_gate(recorded, capsys):
    assert main(["slowdown", "--rounds", "3", "--ops", "aten::addmm", "--fail-over", "1e-9"]) == 1
    assert "times as long, over 1e-09" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rounds", "2"], "needs 3"),
        (["--critical-ratio", "0.5"], "above 1"),
        (["--ops", "aten::nothing"], "no calls of aten::nothing"),
        (["--target", "abacus"], "abacus"),
        (["missing.shadowrun"], "missing.shadowrun"),
    ],
)
def test_bad_input(recorded, capsys, options, words):
    assert main(["slowdown", *options]) == 2
    assert words in capsys.readouterr().err


def test_no_data_file(tmp_path):
    with pytest.raises(DataFileError):
        read_mix(tmp_path / "none")
