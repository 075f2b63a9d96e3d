"""Programs on awkward tensors see nothing of a comparison, and nothing is reported about right platforms."""

import pytest

from tests.transparency.programs import SETUPS, case, check
from tests.transparency.tensor_programs import PROGRAMS


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_on_tensors_is_unchanged(clean_sim, name, setup):
    program = PROGRAMS[name]
    if SETUPS[setup][0] == "sim" and program.not_on_sim:
        pytest.skip(program.not_on_sim)
    check(program, setup, name)


@pytest.mark.parametrize("name", [n for n, p in PROGRAMS.items() if p.not_on_sim])
def test_what_is_said_not_to_run_on_the_simulated_device_does_not(clean_sim, name):
    _, run = case(PROGRAMS[name], "sim").prepare()
    with pytest.raises(Exception):  # noqa: B017 - whatever torch raises there
        run({})
