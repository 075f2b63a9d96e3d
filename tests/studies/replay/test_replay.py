"""Recordings replayed on a simulated device: the flawed operator is named, others are not; nothing passes unseen."""

from __future__ import annotations

import json
import sqlite3

import pytest
import torch
from torch import nn

import shadowrun
from shadowrun.recording.file_format.captured_reader import CapturedFile
from shadowrun.recording.file_format.recording_file import read
from shadowrun.sim import CATALOGUE
from shadowrun.studies.replay.outcomes import Outcome
from shadowrun.studies.replay.replay_recording import CallFilter, replay
from shadowrun.types import Status
from tests.ground_truth.recordings import triggered
from tests.ground_truth.replays import record_clean, replayed, score

pytestmark = pytest.mark.usefixtures("forked_processes")

MAX = 1 << 28


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.shadowrec"


def model(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).to(device)
    net(torch.randn(5, 6).to(device)).square().mean().backward()


def on_cpu(path, target="cpu", ref="cpu", **options):
    with CapturedFile(path) as captured:
        return replay(read(path), captured, target, ref, **options)


def flagged(found):
    return {call.context.op for call in found.flagged}


# -- flaws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "matmul-in-tf32", "gelu-by-tanh", "biased-running-variance", "embedding-loses-duplicates", "missing-lerp",
        "exp-overflows-early", "nll-loss-falls-back-silently", "vector-norm-falls-back", "relu-backward-leaks",
    ],
)  # fmt: skip
def test_the_flawed_operator_is_named_and_no_other(clean_sim, path, name):
    found = score(CATALOGUE[name], "trigger", triggered(CATALOGUE[name]), path)
    assert found.right, found
    assert not found.wrong, found


@pytest.mark.parametrize("name", ["sum-in-other-order", "tanh-one-ulp-off"])
def test_rounding_is_not_named(clean_sim, path, name):
    found = score(CATALOGUE[name], "trigger", triggered(CATALOGUE[name]), path)
    assert (found.right, found.wrong) == ([], [])
    assert found.n_differ


@pytest.fixture
def same_number_of_threads(clean_sim):
    """Autograd's own thread of a device keeps the number of threads that it began with, and adds up in that order."""
    n = torch.get_num_threads()
    x = torch.ones(1, device="sim", requires_grad=True)
    x.register_hook(lambda _: torch.set_num_threads(n))
    x.sum().backward()


@pytest.mark.usefixtures("same_number_of_threads")
def test_a_clean_device_is_equal(clean_sim, path):
    record_clean(model, path)
    found = replayed(path)
    assert found.count(Outcome.EQUAL) == len(found.calls) > 10
    assert {call.verdict.status for call in found.calls} == {Status.MATCH}
    assert not found.failures(["any", "mismatch", "error", "not-rounding"])


def test_the_reference_says_which_machine_is_off(clean_sim, path):
    def norm(device):
        torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(device).mm(torch.eye(64).to(device) / 3)

    with clean_sim.flaws("matmul-in-bf16"), shadowrun.record(path, capture=MAX):
        norm("sim")
    (call,) = [c for c in replayed(path).calls if c.context.op == "aten::mm"]
    assert (call.outcome, call.arbitration) == (Outcome.BEYOND, "recorded")
    record_clean(norm, path)
    (call,) = [c for c in replayed(path, "matmul-in-bf16").calls if c.context.op == "aten::mm"]
    assert (call.outcome, call.arbitration) == (Outcome.BEYOND, "here")


def test_another_platform_of_the_cpu_in_a_process_of_its_own(path):
    with shadowrun.record(path, capture=MAX):
        model("cpu")
    found = on_cpu(path, "cpu[env:SHADOWRUN_TEST=1]")
    assert found.count(Outcome.EQUAL) == len(found.calls) > 10
    assert found.ref == "cpu"


# -- what is counted -------------------------------------------------------------------------------


def test_calls_without_inputs_are_counted_and_never_passed(path):
    with shadowrun.record(path, capture=MAX) as run:
        for _ in range(5):
            torch.ones(3).exp()
            torch.rand(3)
            torch.ones(4).view(2, 2)
            run.step()
    found = on_cpu(path)
    assert (found.count(Outcome.EQUAL), dict(found.n_missing)) == (6, {"aten::ones": 6, "aten::exp": 3})
    assert (found.n_random, found.n_without_values) == (5, 5)
    assert found.failures(["missing"]) == ["9 calls could not be replayed"]
    assert not found.failures(["any"])


def test_a_recording_without_inputs_fails_any_gate(path):
    with shadowrun.record(path):
        torch.ones(3).exp()
    found = on_cpu(path)
    assert (len(found.calls), found.n_missing.total()) == (0, 2)
    assert "--capture" in found.warnings[0]
    assert found.failures(["error"]) == ["no call of the recording could be replayed"]


def test_an_empty_recording(path):
    with shadowrun.record(path, capture=MAX):
        pass
    found = on_cpu(path)
    assert found.warnings == ("no calls are recorded",)
    assert found.failures(["any"])


def test_chosen_calls(path):
    with shadowrun.record(path, capture=MAX):
        model("cpu")
    found = on_cpu(path, wanted=CallFilter(ops=["aten::*mm"]))
    assert {call.context.op for call in found.calls} == {"aten::addmm", "aten::mm"}
    number = found.calls[-1].call
    assert [c.call for c in on_cpu(path, wanted=CallFilter(calls={number})).calls] == [number]
    assert found.n_unselected


def test_an_operator_that_raises_where_only_values_tell(path):
    with shadowrun.record(path, capture=MAX):
        torch.nn.functional.embedding(torch.tensor([1, 5]), torch.ones(6, 2))
    edit(path, "aten::embedding", {"tensors": lambda rows: [[*rows[0][:3], [3, 2], *rows[0][4:]], rows[1]]})
    (call,) = [c for c in on_cpu(path).calls if c.context.op == "aten::embedding"]
    assert call.outcome is Outcome.RAISED
    assert "IndexError" in call.why


# -- hostile files ---------------------------------------------------------------------------------


def call_of(path, op):
    return next(call for call, key in enumerate(read(path).call_keys()) if key.op == op)


def edit(path, op, changes):
    """Change parts of what is kept of the first call of an operator."""
    call = call_of(path, op)
    with sqlite3.connect(path) as connection:
        (text,) = connection.execute("select arguments from captured where call = ?", (call,)).fetchone()
        parts = json.loads(text)
        parts |= {name: change(parts[name]) for name, change in changes.items()}
        connection.execute("update captured set arguments = ? where call = ?", (json.dumps(parts), call))
    connection.close()


def rename(path, op, name):
    with sqlite3.connect(path) as connection:
        connection.execute("update context set op = ? where op = ?", (name, op))
    connection.close()


@pytest.fixture
def small(path):
    with shadowrun.record(path, capture=MAX):
        torch.ones(4).exp()
        torch.ones(4).log()
    return path


def only(path, op):
    (call,) = [c for c in on_cpu(path).calls if c.context.op == op]
    return call


@pytest.mark.parametrize(
    "name",
    ["aten::from_file", "aten::set_.source_Storage", "os::system", "aten::no_such", "prim::Print", "x", "a::b::c",
     "aten::_reshape_alias", "c10d::send", "aten::save", "mkldnn::_linear_pointwise", "aten::__class__"],
)  # fmt: skip
def test_an_operator_that_no_file_may_name_is_not_run(small, name):
    rename(small, "aten::exp", name)
    found = on_cpu(small)
    (call,) = [c for c in found.calls if c.context.op == name]
    assert (call.outcome, bool(call.why)) == (Outcome.NOT_RUN, True)
    assert found.failures(["missing"])
    assert found.count(Outcome.EQUAL) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"args": lambda _: []},
        {"args": lambda a: a * 3},
        {"args": lambda _: ["/etc/passwd"]},
        {"kwargs": lambda _: {"out": {"tensor": 0}, "nonsense": 1}},
        {"tensors": lambda rows: [[*rows[0][:3], [1 << 50], [0], *rows[0][5:]]]},
        {"tensors": lambda rows: [[*rows[0][:2], "int64", [4], [1], *rows[0][5:]]]},
        {"memories": lambda _: ["0" * 64]},
    ],
)
def test_arguments_that_do_not_fit_are_counted(small, changes):
    edit(small, "aten::exp", changes)
    call = only(small, "aten::exp")
    assert call.outcome in (Outcome.NOT_RUN, Outcome.RAISED), call
    assert only(small, "aten::log").outcome is Outcome.EQUAL


def test_inputs_that_were_changed_are_no_equal_results(small):
    edit(small, "aten::exp", {"tensors": lambda rows: [[*rows[0][:2], "int32", *rows[0][3:]]]})
    assert only(small, "aten::exp").outcome is Outcome.BEYOND


def test_a_file_that_was_cut(small):
    content = small.read_bytes()
    small.write_bytes(content[: len(content) // 2])
    with pytest.raises(shadowrun.DataFileError):
        on_cpu(small)


def test_an_interrupt_leaves_what_was_found(small, monkeypatch):
    from shadowrun.repro.call_replayer import CallReplayer

    run = CallReplayer.run

    def stopped(self, plan, args, kwargs):
        if plan.name == "aten::log":
            raise KeyboardInterrupt
        return run(self, plan, args, kwargs)

    monkeypatch.setattr(CallReplayer, "run", stopped)
    found = on_cpu(small)
    assert (len(found.calls), found.n_left, found.count(Outcome.EQUAL)) == (3, 1, 3)
