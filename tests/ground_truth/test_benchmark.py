"""A slice of the benchmark: one further program for each flaw, and every family on the clean device."""

from dataclasses import dataclass

import pytest
import torch

from shadowrun.sim import CATALOGUE
from tests.ground_truth.benchmark import Bench, markdown, totals
from tests.ground_truth.programs import PROGRAMS
from tests.ground_truth.scoring import Score

SLICE = [p for p in reversed(PROGRAMS.values()) if p.number == 2]


@pytest.fixture(scope="session")
def bench():
    return Bench(times=False)


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_flaw_is_found_in_a_program(clean_sim, bench, name):
    flaw = CATALOGUE[name]
    program = next(p for p in SLICE if bench.matters(flaw, p))
    (score,) = bench.scores(flaw, program, ("isolated",))
    assert score.perfect, score


@pytest.mark.parametrize("program", SLICE, ids=lambda p: p.name)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nothing_is_found_on_the_clean_device(clean_sim, bench, program):
    assert bench.false_alarms(program, drift=True, device="sim") == []


@dataclass(frozen=True)
class Calls:
    """Calls of log_softmax in turn; its flaw is that each third call is wrong."""

    n: int
    held_out: bool = False

    @property
    def name(self):
        return f"calls-{self.n}"

    def __call__(self, device):
        return [torch.arange(20.0).view(4, 5).mul(i).to(device).log_softmax(1) for i in range(self.n)]


@pytest.mark.parametrize(("n", "shown"), [(1, False), (9, True)])
def test_a_flaw_does_not_show_where_no_wrong_turn_reached_the_program(clean_sim, bench, n, shown):
    (score,) = bench.scores(CATALOGUE["log-softmax-stale"], Calls(n), ("isolated",))
    assert score.shown is score.found is shown


def test_a_flaw_of_every_call_always_counts(clean_sim, bench):
    (score,) = bench.scores(CATALOGUE["silu-tail"], Calls(1), ("isolated",))
    assert score.shown
    assert not score.passed


def test_a_flaw_that_did_not_show_is_counted_apart_and_never_as_found():
    marks = {"found": True, "placed": True, "cause": True, "first": True, "quiet": True}
    seen = Score("f", "seen", "isolated", False, **marks)
    missed = Score("f", "missed", "isolated", False, quiet=True)
    lucky = Score("f", "lucky", "isolated", False, shown=False, **marks)
    unseen = Score("f", "unseen", "isolated", False, shown=False, quiet=True)
    scores = [seen, missed, lucky, unseen]
    counts = totals(scores)["isolated, tuned"]
    assert (counts["pairs"], counts["found"], counts["not shown"]) == (2, 1, 2)
    lines = list(markdown(scores, {}, 0))
    assert "| f | 4 | 1/2 | 1/2 |" in lines[2]
    assert [line[:20] for line in lines if line.startswith("- ")] == ["- f, missed, isolate"]
    assert [line.split(", ")[1] for line in lines if line.startswith("Not shown")] == ["lucky", "unseen"]


def test_a_false_finding_counts_where_the_flaw_did_not_show():
    score = Score("f", "p", "isolated", False, shown=False, quiet=False, notes=["false: mismatch aten::add"])
    assert "- f, p, isolated: false: mismatch aten::add" in markdown([score], {}, 0)
