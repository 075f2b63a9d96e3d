"""The tables of docs/coverage.md: from files of sweeps, and what the CPU has in 16 bits."""

import json
import subprocess
import sys
from pathlib import Path

from shadowrun.studies.sweep.cases import Case, CaseFinding, CaseOutcome, Kind, Part
from shadowrun.studies.sweep.coverage_file import CoverageFile, SweepInfo
from tests.ground_truth import dtype_support

ROOT = Path(__file__).parents[1]
LACKS = CaseFinding(Kind.UNSUPPORTED, "aten::sin", "aten::sin.out", "missing operator", "no kernel")
FALLS = CaseFinding(Kind.SILENT_FALLBACK, "aten::cos", "", "silent fallback", "computed on the CPU")


def tables(folder, *arguments):
    command = [sys.executable, str(ROOT / "benchmarks/coverage_tables.py"), "--folder", str(folder), "--no-run"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def rows(page, platform):
    return [line for line in page.splitlines() if line.startswith(f"| {platform} |")]


def test_tables_of_files(tmp_path):
    file = CoverageFile.begin(tmp_path / "lazy.shadowcov", SweepInfo("lazy", "cpu", started="2026-01-02T03:04"))
    for name, part, *findings in (
        ("exp", Part.FORWARD),
        ("sin", Part.FORWARD, LACKS),
        ("sin", Part.BACKWARD, FALLS),
        ("cos", Part.FORWARD, FALLS),
        ("cos", Part.BACKWARD),
        ("rand", Part.FORWARD, CaseFinding(Kind.UNVERIFIED)),
    ):
        file.add(Case(name, "float32", part, 0), CaseOutcome.from_findings(list(findings)))
    file.add_time(120.0, 60.0, complete=True)
    file.close()
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- measured: begin -->\nold\n<!-- measured: end -->\nafter\n")
    tables(tmp_path, "--markdown", str(page))
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    support, why, by_dtype = rows(text, "lazy")
    assert support == "| lazy | forward, backward; 3 samples | 3 | 1 | 1 | 1 | 33.3 / 33.3 / 33.3 | 1 | 6 | 2 |"
    assert why == "| lazy | 1 |  |  |  |  |  |  |  | 1 | 1 |  |  |  |"
    assert by_dtype == "| lazy | float32 | 1 | 1 | 1 | 33.3 / 33.3 / 33.3 |"
    assert "| unsupported operator | `aten::sin.out` | no kernel | 1 | `sin` |" in text
    assert "| silent fallback |  |  | 2 | `cos`, `sin` |" in text


def test_16_bits_of_the_cpu(tmp_path):
    file = tmp_path / "dtypes.jsonl"
    file.write_text('{"operator": "matmul"}\n')  # the process ended in it
    assert dtype_support.main([str(file), "--op", "mat[rm]*", "--samples", "2"]) == 0
    assert dtype_support.main([str(file), "--op", "geqrf", "--samples", "2"]) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    found = {(line["operator"], line["dtype"]): line for line in lines if "dtype" in line}
    assert all(operator != "matmul" for operator, _ in found)
    for dtype in ("bfloat16", "float16"):
        assert found["matrix_exp", dtype]["deviating"] == ["aten::linalg_matrix_exp"]
        assert found["matrix_exp", dtype]["refused"] == 0
        refused = found["geqrf", dtype]
        assert (refused["claimed"], refused["refused"]) == (False, refused["samples"])
        assert "not implemented for" in refused["error"]
    assert found["geqrf", "float32"]["refused"] == 0
    page = tables(tmp_path, "--only", "nothing")
    assert "| bfloat16 | 2 | 1 | 1 | 0 | 1 | 50.0 / 0.0 / 50.0 | 1 |" in page
    assert "- bfloat16: deviates in `aten::linalg_matrix_exp`, called by `matrix_exp`" in page
    assert "- ended the process: `matmul`" in page
