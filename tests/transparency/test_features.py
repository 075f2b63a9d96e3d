"""Programs that use torch's features see nothing of a comparison, and nothing is reported about right platforms."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.transparency import feature_programs, kernel_programs
from tests.transparency.programs import SETUPS, check

ROOT = Path(__file__).parents[2]
PROGRAMS = feature_programs.PROGRAMS | kernel_programs.PROGRAMS


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_with_a_feature_is_unchanged(clean_sim, name, setup):
    program = PROGRAMS[name]
    if SETUPS[setup][0] == "sim" and program.not_on_sim:
        pytest.skip(program.not_on_sim)
    check(program, setup, name)


ON_SIM = """
import sys
from shadowrun import sim
from tests.transparency.programs import case
from tests.transparency.test_features import PROGRAMS

sim.enable("sim")
case(PROGRAMS[sys.argv[1]], "sim").prepare()[1]({})
print("it runs")
"""


@pytest.mark.parametrize("name", [n for n, p in PROGRAMS.items() if p.not_on_sim])
def test_what_is_said_not_to_run_on_the_simulated_device_does_not(name):
    # In a process of its own: torch itself may abort it.
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ON_SIM, name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode != 0
    assert "it runs" not in ran.stdout
    assert "ImportError" not in ran.stderr
