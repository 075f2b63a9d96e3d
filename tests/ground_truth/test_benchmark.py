"""A slice of the benchmark: one further program for each flaw, and every family on the clean device."""

import pytest

from shadowrun.sim import CATALOGUE
from tests.ground_truth.benchmark import Bench
from tests.ground_truth.programs import PROGRAMS

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
