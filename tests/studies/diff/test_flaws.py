"""Real recordings: the first divergence of a flawed device from a clean one is at the flaw."""

import os
import subprocess
import sys

import pytest

from shadowrun.recording.file_format.recording_file import read
from shadowrun.sim import CATALOGUE
from shadowrun.studies.diff.provenance import compare_provenance
from tests.ground_truth.recordings import score, triggered

pytestmark = pytest.mark.usefixtures("forked_processes")

FLAWS = (
    "matmul-in-tf32",
    "gelu-by-tanh",
    "sum-in-other-order",
    "biased-running-variance",
    "embedding-loses-duplicates",
)


@pytest.mark.parametrize("name", FLAWS)
def test_the_first_divergence_is_the_flaw(clean_sim, tmp_path, name):
    found = score(CATALOGUE[name], "trigger", triggered(CATALOGUE[name]), tmp_path)
    assert (found.right, found.outcome) == (True, "algorithm"), found


SCRIPT = """
import numpy, torch, shadowrun, sys
random = numpy.random.default_rng(0)  # torch's own numbers depend on the instruction set
model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Tanh(), torch.nn.Linear(300, 7))
with torch.no_grad():
    for p in model.parameters():
        p.copy_(torch.from_numpy(random.uniform(-0.1, 0.1, p.shape)))
torch.manual_seed(0)
x = torch.from_numpy(random.standard_normal((50, 300)).astype("f4"))
with shadowrun.record(sys.argv[1]):
    model(x).square().mean().backward()
"""


def test_two_instruction_sets(tmp_path, capsys):
    script = tmp_path / "net.py"
    script.write_text(SCRIPT)
    for name, settings in (("a", {}), ("b", {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"})):
        subprocess.run(
            [sys.executable, script, tmp_path / f"{name}.shadowrec"], check=True, env={**os.environ, **settings}
        )
    a, b = (read(tmp_path / f"{name}.shadowrec") for name in "ab")
    provenance = compare_provenance(a, b)
    assert provenance.is_same, provenance.line
    if a.processes[0].fingerprint["cpu_capability"] == "DEFAULT":
        pytest.skip("this processor has one instruction set only")
    assert "cpu_capability" in [fact.name for fact in provenance.facts]
    from shadowrun.cli.main import main

    assert main(["diff", str(tmp_path / "a.shadowrec"), str(tmp_path / "b.shadowrec"), "--fail-on", "missing"]) == 0
    assert "First divergence" in capsys.readouterr().out
