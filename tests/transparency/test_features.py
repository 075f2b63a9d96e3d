"""Programs that use torch's features see nothing of a comparison, and nothing is reported about right platforms."""

import pytest

from tests import forked
from tests.transparency import feature_programs, kernel_programs
from tests.transparency.programs import SETUPS, check

PROGRAMS = feature_programs.PROGRAMS | kernel_programs.PROGRAMS


# Drift with the program on the reference is both of two setups that all programs run with: here each third has it.
CASES = [
    pytest.param(name, setup, marks=[pytest.mark.slow] if setup == "drift on the reference" and i % 3 else [])
    for i, name in enumerate(PROGRAMS)
    for setup in SETUPS
]


@pytest.mark.parametrize(("name", "setup"), CASES)
def test_a_program_with_a_feature_is_unchanged(clean_sim, name, setup):
    program = PROGRAMS[name]
    if SETUPS[setup][0] == "sim" and program.not_on_sim:
        pytest.skip(program.not_on_sim)
    check(program, setup, name)


ON_SIM = """
import sys
from shadowrun import sim
from tests.transparency import feature_programs, kernel_programs
from tests.transparency.programs import case

sim.enable("sim")
case((feature_programs.PROGRAMS | kernel_programs.PROGRAMS)[sys.argv[1]], "sim").prepare()[1]({})
print("it runs")
"""


@pytest.fixture(scope="module")
def on_sim(tmp_path_factory):
    """Runs a program on the simulated device in a process of its own: torch itself may abort it."""
    path = tmp_path_factory.mktemp("on_sim") / "on_sim.py"
    path.write_text(ON_SIM, encoding="utf-8")
    modules = ("feature_programs", "kernel_programs", "programs")
    with forked.Server([f"tests.transparency.{name}" for name in modules]) as server:
        ran = server.run(path, "autograd.Function")
        assert ran.stdout == "it runs\n"
        yield lambda name: server.run(path, name)


@pytest.mark.parametrize("name", [n for n, p in PROGRAMS.items() if p.not_on_sim])
def test_what_is_said_not_to_run_on_the_simulated_device_does_not(on_sim, name):
    ran = on_sim(name)
    assert ran.returncode != 0
    assert "it runs" not in ran.stdout
