"""A slice of the benchmark of overhead budgets: two flaws."""

import pytest

from shadowrun.sim import CATALOGUE
from tests.ground_truth.budgets import is_persistent, markdown, search
from tests.ground_truth.programs import PROGRAMS

PAIRS = [("gelu-by-tanh", "mlp-adamw-foreach-0"), ("addcdiv-scaled", "mlp-adam-single-0")]


@pytest.mark.parametrize(("flaw", "program"), PAIRS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_persistent_flaw_is_found_within_a_few_steps(clean_sim, flaw, program):
    flaw, program = CATALOGUE[flaw], PROGRAMS[program]
    assert is_persistent(flaw, program)
    assert not is_persistent(CATALOGUE["slow-max-pool"], program)
    every_call = search(flaw, program, None, within=(2,))
    assert (every_call.steps, every_call.right) == (1, True)
    found = search(flaw, program, 1.5)
    assert found.steps is not None, "within 200 steps"
    assert found.right
    assert found.achieved >= 1
    lines = list(markdown([every_call, found]))
    assert any(line.startswith("| 1.5 | 1 |") for line in lines)
    assert any(line.startswith(f"| {flaw.name} | 1 |") for line in lines)


def test_what_was_never_found_is_not_counted_as_found():
    found = search(CATALOGUE["gelu-by-tanh"], PROGRAMS["mlp-sgd-0"], 1.5, within=(2,))
    assert found.steps is None
    assert "| > 200 | 0/1 | 0/1 |" in next(line for line in markdown([found]) if line.startswith("| 1.5"))
