"""The benchmarks run, and give a figure for every tool: a script that is not run rots."""

import importlib
import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.usefixtures("forked_processes")

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "overhead.py"
TOOLS = {
    "empty mode (floor)",
    "count only",
    "record only",
    "record digests",
    "budget 1.2",
    "isolated",
    "drift",
    "every result 1 ULP off",
    "1 ULP off, budget 1.2",
    "another instruction set",
    "products in bf16",
    "products and convolutions in tf32",
    "oracle for every result",
    "flop_counter",
    "DebugMode + hashes",
    "naive: clone, rerun, assert_close",
}


def run(*args):
    command = [sys.executable, str(SCRIPT), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Figures, page and picture of the quick form on one program."""
    folder = tmp_path_factory.mktemp("benchmark")
    page, figures, picture = folder / "page.md", folder / "figures.json", folder / "bars.svg"
    page.write_text("# Before\n<!-- measured: begin -->\nold\n<!-- measured: end -->\nAfter\n", encoding="utf-8")
    files = ("--json", str(figures), "--markdown", str(page), "--svg", str(picture))
    run("--quick", "--rounds", "1", "--part", "steps", "--workload", "micro*", *files)
    return json.loads(figures.read_text(encoding="utf-8")), page.read_text(encoding="utf-8"), picture


def test_every_tool_has_figures(measured):
    (workload,) = measured[0]["workloads"]
    # Some processors have products in bf16.
    assert set(workload["tools"]) - {"products in bf16 by the processor"} == TOOLS
    for name, figures in workload["tools"].items():
        assert "error" not in figures, (name, figures)
        assert "problems" not in figures, (name, figures)
        for clock in ("cpu", "thread", "wall"):
            assert math.isfinite(figures[clock]), name
            assert figures[clock] > 0, name
            assert figures[f"plain_{clock}_ms"] > 0, name


@pytest.mark.parametrize("changes", [True, False])
def test_a_row_of_results_that_do_not_differ_says_so(monkeypatch, changes):
    """By the records, not by a clock: a busy machine takes any time."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    tools = importlib.import_module("tools")
    if not changes:
        monkeypatch.setattr(tools, "_add_one_ulp", lambda _: None)
    rounded = tools._Rounded(oracle=False)
    x = torch.rand(8, 8)
    with rounded():
        for _ in range(3):
            (x @ x).exp()
    assert rounded.few_differed() == ("" if changes else "only 0% of the calls differed")


def test_only_the_part_between_the_marks_of_a_page_is_replaced(measured):
    page = measured[1]
    assert page.startswith("# Before\n")
    assert page.endswith("\nAfter\n")
    assert "old" not in page
    for name in TOOLS:
        assert name in page


def test_picture_is_well_formed_and_shows_every_tool(measured):
    root = ET.parse(measured[2]).getroot()
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert texts >= TOOLS
    width = float(root.get("width"))
    for bar in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(bar.get("x", 0)) + float(bar.get("width")) <= width


def test_single_operators_rates_and_startup_have_figures(tmp_path):
    file = tmp_path / "figures.json"
    parts = ("--part", "operators", "--part", "rates", "--part", "startup")
    run("--quick", "--rounds", "1", *parts, "--workload", "add, 1 element", "--tool", "isolated", "--json", str(file))
    found = json.loads(file.read_text(encoding="utf-8"))
    added = found["workloads"][0]["tools"]["isolated"]["added_cpu_us"]
    assert 1 < added < 10_000
    assert all(row["rate"] > 0 and math.isfinite(row["rate"]) for row in found["rates"])
    assert {row["size"] for row in found["rates"]} == {"4 KB", "4 MB", "64 MB"}
    assert {row["name"] for row in found["startup"]} >= {"shadowrun --help", "shadowrun --version", "import shadowrun"}
    assert all(row["cpu_ms"] > 0 for row in found["startup"])
    assert {target["unit"] for target in found["targets"]} == {
        "µs added", "ms", "of memcmp's rate", "of memcpy's rate", "GB/s",
    }  # fmt: skip


def test_profile_accounts_for_the_whole():
    lines = run("--profile", "micro*", "--rounds", "2").splitlines()
    rows = {line[:42].strip(): line[42:].split() for line in lines if line[:42].strip() and ":" not in line[-3:]}
    parts = [name for name in rows if name.startswith(("dispatch", "attribution", "context", "copies", "replay"))]
    parts += [name for name in rows if name.startswith(("compare", "judge", "record", "the rest"))]
    assert len(parts) >= 8
    whole = float(rows["isolated, all that it adds"][-1])
    assert sum(float(rows[name][-1]) for name in parts) == pytest.approx(whole, abs=0.1)
    attribution = next(name for name in parts if name.startswith("attribution"))
    assert float(rows[attribution][1]) > 10  # calls of a step that were attributed
