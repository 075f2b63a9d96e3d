"""The benchmark for accelerators runs on the simulated one: a script that is not run rots."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("forked_processes")

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


@pytest.mark.parametrize(
    ("program", "ways", "identical"),
    [
        ("ResNet-50-like, SGD", ["shadowrun"], True),
        (
            "mm f32 16",
            ["shadowrun", "other setting", "in float64", "budget 1.2", "record only", "waiting", "naive"],
            None,
        ),
    ],
)
def test_it_gives_figures_and_the_same_bits(tmp_path, program, ways, identical):
    out = tmp_path / "gpu.json"
    way = ["--way", ways[0]] if len(ways) == 1 else []
    command = [sys.executable, str(SCRIPT), "--device", "sim", "--rounds", "1", "--program", program, *way]
    done = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["repeats"]
    assert [f["way"] for f in found["figures"]] == ways
    for figures in found["figures"]:
        assert figures["compared"] >= figures["returned"] > 0
        assert figures["identical"] is identical
        assert set(figures["counts"]) <= {"match", "skipped", "close"}
        assert sum(figures["counts"].values()) > 10
    assert f"| {ways[0]} |" in done.stdout
