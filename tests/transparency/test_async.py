"""Programs on a device that runs behind its host notice nothing of a comparison either, and nothing is reported."""

import pytest

from tests.transparency import feature_programs, tensor_programs
from tests.transparency.programs import check

ALL = tensor_programs.PROGRAMS | feature_programs.PROGRAMS


@pytest.mark.parametrize("name", [name for name, program in ALL.items() if not program.not_on_sim])
def test_the_program_goes_on_unchanged(clean_sim, name):
    with clean_sim.asynchronous():
        check(ALL[name], "program on the target", name)
