"""What recordings of equal processes say of each operator: holds, breaks, or lies downstream."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import shadowrun
from shadowrun.recording.file_format.recording_file import read
from shadowrun.recording.model import Key
from shadowrun.studies.determinism.stability import (
    CallDigests,
    Outcome,
    Stability,
    across_threads,
    call_digests,
    merged,
    run_to_run,
)

ADD = Key(0, 0, "forward", "", "aten::add.Tensor", 0)
MM = Key(0, 0, "forward", "fc", "aten::mm", 0)


def runs_of(key, *digests):
    return [{key: CallDigests(*pair)} for pair in digests]


def recorded(tmp_path, program, name="a"):
    with shadowrun.record(tmp_path / f"{name}.shadowrec"):
        program()
    return call_digests(read(tmp_path / f"{name}.shadowrec"))


def test_equal_inputs_and_different_results_break_the_operator():
    found, _ = run_to_run(runs_of(MM, (1, 7), (1, 8), (1, 7), (1, 9)))
    of_mm = found["aten::mm"]
    assert of_mm.outcome is Outcome.BREAKS
    assert (of_mm.n_distinct, of_mm.mode, of_mm.n_runs) == (3, 2, 4)
    assert list(of_mm.where) == ["fc, forward, step 0"]


def test_different_inputs_lie_downstream():
    found, _ = run_to_run(runs_of(ADD, (1, 7), (2, 8), (3, 9)))
    assert found["aten::add.Tensor"].outcome is Outcome.DOWNSTREAM


def test_runs_with_equal_inputs_among_others_are_enough():
    found, _ = run_to_run(runs_of(ADD, (1, 7), (2, 8), (1, 7)))
    assert found["aten::add.Tensor"].outcome is Outcome.HOLDS
    found, _ = run_to_run(runs_of(ADD, (1, 7), (2, 8), (1, 6)))
    assert found["aten::add.Tensor"].outcome is Outcome.BREAKS


def test_calls_that_a_run_lacks_are_counted():
    _, n_missing = run_to_run([*runs_of(ADD, (1, 7)), *runs_of(MM, (1, 7))])
    assert n_missing == 2


@pytest.mark.parametrize(("mode", "is_unstable"), [(59, True), (60, False)])
def test_a_mode_below_60_percent_is_unstable(mode, is_unstable):
    found, _ = run_to_run(runs_of(MM, *[(1, 0)] * mode, *[(1, n + 1) for n in range(100 - mode)]))
    assert found["aten::mm"].is_unstable is is_unstable


def test_threads_break_where_results_differ_on_equal_inputs():
    runs = {1: runs_of(MM, (1, 7), (1, 7)), 2: runs_of(MM, (1, 7)), 4: runs_of(MM, (1, 8), (1, 8))}
    of_mm = across_threads(runs)["aten::mm"]
    assert of_mm.outcome is Outcome.BREAKS
    assert list(of_mm.where) == ["4 threads"]
    assert (of_mm.n_distinct, of_mm.mode, of_mm.n_runs) == (2, 2, 3)


def test_what_breaks_from_run_to_run_says_nothing_of_threads():
    runs = {1: runs_of(MM, (1, 7), (1, 7)), 2: runs_of(MM, (1, 7), (1, 8))}
    assert across_threads(runs)["aten::mm"].outcome is Outcome.NOT_TESTED


def test_other_inputs_with_other_threads_lie_downstream():
    runs = {1: runs_of(MM, (1, 7)), 2: runs_of(MM, (2, 8))}
    assert across_threads(runs)["aten::mm"].outcome is Outcome.DOWNSTREAM


def test_merged_adds_calls_and_keeps_the_worst():
    one = {"aten::mm": Stability(n_holds=2, n_runs=3, mode=3)}
    other = {"aten::mm": Stability(n_breaks=1, n_distinct=2, n_runs=3, mode=2, where={"fc": None})}
    of_mm = merged([one, other])["aten::mm"]
    assert (of_mm.outcome, of_mm.n_holds, of_mm.n_distinct, of_mm.mode) == (Outcome.BREAKS, 2, 2, 2)


def test_a_program_that_repeats_itself_has_equal_digests(tmp_path):
    def program():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        model(torch.randn(3, 4)).sum().backward()

    one, other = (recorded(tmp_path, program, name) for name in "ab")
    assert one == other
    assert {key.op for key in one} >= {"aten::addmm", "aten::relu", "aten::sum"}


def test_digests_know_order_of_inputs_arguments_and_bits(tmp_path):
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    (one,) = recorded(tmp_path, lambda: a - b).values()
    (swapped,) = recorded(tmp_path, lambda: b - a).values()
    (scaled,) = recorded(tmp_path, lambda: torch.sub(a, b, alpha=2)).values()
    nudged = torch.nextafter(a, b)
    (other,) = recorded(tmp_path, lambda: nudged - b).values()
    assert len({one.inputs, swapped.inputs, scaled.inputs, other.inputs}) == 4


def test_views_and_uninitialised_memory_are_no_computation(tmp_path):
    def program():
        torch.empty(4)
        torch.ones(2, 2).t()

    assert {key.op for key in recorded(tmp_path, program)} == {"aten::ones"}


def test_needs_no_torch():
    code = "import sys, shadowrun.studies.determinism.stability; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
