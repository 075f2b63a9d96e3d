"""What follows from a finding while the program runs: `stop_on`, `on_finding`, `ranks`."""

import linecache
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import nn

import shadowrun
from shadowrun import sim
from shadowrun.errors import CallFindingError, ShadowrunWarning, UsageError


@pytest.fixture(autouse=True)
def in_bf16():
    with sim.flaws("matmul-in-bf16"):
        yield


def compared(ref="cpu", **options):
    return shadowrun.compare("sim", ref, settings=False, known=False, **options)


def value(device):
    torch.manual_seed(0)
    return torch.randn(4, 4).to(device)


def line_of(caught):
    entry = caught.traceback[0]
    return linecache.getline(str(entry.path), entry.lineno + 1).strip()


@pytest.mark.parametrize("device", ["sim", "cpu"])
@pytest.mark.parametrize("ref", ["cpu", "cpu[threads=1]"])
def test_stop_on_raises_at_the_call_with_its_results(device, ref):
    x, after = value(device), []
    with pytest.raises(CallFindingError) as caught, compared(ref, stop_on="mismatch") as run:
        x = x + 1
        y = x @ x
        after.append(y)
    error = caught.value
    assert not after
    assert line_of(caught) == "y = x @ x"
    assert error.finding.op == "aten::mm"
    assert error.finding.kind == "mismatch"
    assert "mismatch of aten::mm (reduced precision: inputs rounded to bf16), in call" in str(error)
    ((actual,), (expected,)) = error.actual, error.expected
    assert torch.equal(expected.cpu(), x.cpu() @ x.cpu())
    assert not torch.equal(actual.cpu(), expected.cpu())
    assert error.names == ("output 0",)
    assert run.records(seq=error.finding.first_seq).__next__().call.op == "aten::mm"
    assert run.info.raised == "CallFindingError"


def test_stop_on_raises_in_backward_and_on_several_outputs():
    with sim.flaws("biased-running-variance"):
        net, x = nn.BatchNorm2d(2).to("sim"), torch.randn(4, 2, 3, 3, device="sim")
        with pytest.raises(CallFindingError) as caught, compared(stop_on=["mismatch"]):
            net(x)
        assert "running_var" in caught.value.names
        assert len(caught.value.actual) == len(caught.value.names) == len(caught.value.expected)
    with sim.flaws("relu-backward-leaks"):
        x = torch.randn(400, device="sim", requires_grad=True)
        with pytest.raises(CallFindingError, match="threshold_backward") as caught, compared(stop_on="mismatch"):
            loss = x.relu().sum()
            loss.backward()
        assert line_of(caught) == "loss.backward()"


def test_stop_on_raises_once_and_the_program_may_go_on():
    x, caught = value("sim"), 0
    with compared(stop_on="mismatch") as run:
        for _ in range(3):
            try:
                x @ x
            except CallFindingError:
                caught += 1
    assert caught == 1
    assert run.findings()[0].n_calls == 3
    with pytest.raises(CallFindingError), run:  # a second start raises again
        x @ x


def test_stop_on_other_kinds_and_known_issues(tmp_path):
    x = value("sim")
    with compared(stop_on="unsupported"):
        x @ x
    with sim.flaws("missing-cumsum"), compared(stop_on=True):
        with pytest.raises(CallFindingError, match="unsupported of aten::cumsum") as caught:
            x.cumsum(0)
        assert caught.value.actual == caught.value.expected == ()
    ledger = tmp_path / "shadowrun.toml"
    ledger.write_text('[[known]]\noperator = "aten::mm"\nplatform = "sim"\nreason = "ticket"\n', encoding="utf-8")
    with shadowrun.compare("sim", settings=False, known=ledger, stop_on="mismatch"):
        x @ x


def test_on_finding_is_called_once_for_each_on_the_threads_own_time():
    found, threads = [], []

    def note(finding):
        found.append(finding)
        threads.append(threading.get_ident())
        torch.ones(2) + 1  # it may call operators, which are not recorded

    x = value("sim")
    with compared(on_finding=note) as run:
        for _ in range(3):
            x @ x
            assert len(found) == 1
        torch.addmm(x, x, x)
    assert [f.op for f in found] == ["aten::mm", "aten::addmm"]
    assert found[0].what == run.findings()[0].what
    assert found[0].worst.n_mismatched
    assert found[0].sites == run.findings()[0].sites
    assert set(threads) == {threading.get_ident()}
    assert not list(run.records(op="aten::add.Tensor"))


def test_an_exception_of_the_callback_is_noted_and_warns_once():
    calls = []

    def fail(finding):
        calls.append(finding)
        raise ValueError("no disk")

    x = value("sim")
    run = compared(on_finding=fail)

    def program():
        with run:
            x @ x
            torch.addmm(x, x, x)

    with pytest.warns(ShadowrunWarning, match="on_finding raised ValueError: no disk") as warned:
        program()
    assert len(calls) == 2
    assert len(warned) == 1
    assert any("on_finding raised ValueError: no disk" in note for note in run.info.notes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with compared(on_finding=fail):
            x @ x


def test_an_interrupt_in_the_callback_reaches_the_program():
    def interrupt(_):
        raise KeyboardInterrupt

    x = value("sim")
    with pytest.raises(KeyboardInterrupt), compared(on_finding=interrupt):
        x @ x


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stop_on": "slow"}, "stop_on='slow'"),
        ({"stop_on": "mismatch", "budget": 1.2}, "stop_on= raises at the call"),
        ({"on_finding": 3}, "on_finding=3 is not callable"),
        ({"ranks": -1}, "ranks=-1: use a rank number >= 0"),
    ],
)
def test_wrong_values_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        compared(**options)


def test_other_ranks_run_plain_and_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    x = value("sim")
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        with compared(ranks=[0, 2], file=tmp_path / "a.shadowrun") as run:
            x @ x
            run.step()
            assert run.left_out == (rank in (1, 3)) == (not run.running)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".shadowrun") == [
        "a.0.shadowrun",
        "a.2.shadowrun",
    ]
    monkeypatch.delenv("WORLD_SIZE")
    with compared(ranks=3) as run:  # not distributed: no effect
        x @ x
    assert run.findings()


def test_a_rank_that_is_known_late_stops_at_the_end_of_its_step(tmp_path):
    code = """
import sys, torch, shadowrun, torch.distributed as dist
with shadowrun.compare("cpu[threads=1]", settings=False, ranks=0) as run:
    torch.ones(2) + 1
    store = dist.HashStore()
    import os
    class Fake: pass
    os.environ.update(RANK="1", WORLD_SIZE="2")
    run.step()
    assert not run.running and run.left_out
    torch.ones(2) + 1
assert run.counts()["match"] == 2, run.counts()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_stop_on_is_exact_on_an_asynchronous_device():
    with sim.asynchronous():
        x = value("sim")
        with pytest.raises(UsageError, match="stop_on= raises at the call itself"):
            compared(stop_on="mismatch", asynchronous=True)
        with pytest.raises(CallFindingError) as caught, compared(stop_on="mismatch"):
            y = x @ x
            y.sum()
        assert line_of(caught) == "y = x @ x"
        assert len(caught.value.actual) == 1


def test_stop_on_is_exact_between_two_settings_of_a_device():
    with sim.flaws():
        x = value("sim")
        with pytest.raises(CallFindingError) as caught, compared("sim[tf32=on]", stop_on="mismatch"):
            y = x @ x
            y.sum()
        assert line_of(caught) == "y = x @ x"
        assert not torch.equal(caught.value.actual[0].cpu(), caught.value.expected[0].cpu())


def test_on_finding_where_another_thread_compares():
    found, threads = [], set()

    def note(finding):
        found.append(finding.op)
        threads.add(threading.get_ident())

    with sim.asynchronous():
        x = value("sim")
        with compared(on_finding=note) as run:
            x @ x
            run.step()
            assert found == ["aten::mm"]
    assert threads == {threading.get_ident()}
