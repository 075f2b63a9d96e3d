"""No output hands on what a terminal obeys, breaks a line, or a spreadsheet computes; whatever a file says."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shadowrun.analysis.static import StaticCoverage, StaticOperator
from shadowrun.cli.main import main
from shadowrun.report.grid import comma_separated
from shadowrun.report.static import FORMATS as static_formats
from shadowrun.report.tame import one_line, show
from shadowrun.slowdown import formats
from shadowrun.slowdown.calls import Call
from shadowrun.slowdown.measuring import Measured
from shadowrun.slowdown.table import Slowdown
from shadowrun.store import DataFile
from shadowrun.sweep.cases import Case, Part
from shadowrun.sweep.coveragefile import CoverageFile, SweepInfo
from shadowrun.sweep.outcome import Finding, Kind, Outcome
from shadowrun.types import Cause, Phase, RunInfo, Status, TensorDiff, TensorMeta, Verdict

EVIL = "\x1b]0;own\x07\x1b[31m\nFAKE LINE\r\x9b1m \u202egnp\u2066\u200b\u2028 \udce9\x00 é"
FORMULA = "=cmd|' /C calc'!A0"


def safe(text: str, where: str) -> None:
    """Of what is no line end, all is printable; and no line is of the file's making."""
    for line in text.splitlines():
        assert line.isprintable(), (where, line)
        assert not line.startswith("FAKE"), (where, line)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("evil") / "run.shadowrun"
    info = RunInfo(
        f"npu{EVIL}", f"cpu{EVIL}", {EVIL: EVIL}, {EVIL: [EVIL]}, {EVIL: EVIL}, (EVIL, EVIL), {EVIL: EVIL},
        started=EVIL, wall_s=1.0, notes=(EVIL,), raised=EVIL, unselected=EVIL,
    )  # fmt: skip
    for field in dataclasses.fields(info):  # those of tomorrow, too
        assert field.type not in ("str", "tuple[str, ...]") or EVIL in getattr(info, field.name), field.name
    data = DataFile.create(path, info)
    meta = TensorMeta(EVIL, (2,), (1,), EVIL, EVIL)
    verdicts = [
        *(Verdict(s, Cause.IMPLEMENTATION, f"{EVIL}{s}", EVIL, 0.5) for s in Status),
        Verdict(Status.ERROR, Cause.HARNESS, EVIL, EVIL),
    ]
    for seq, verdict in enumerate(verdicts):
        op = f"compiled::{EVIL}" if seq % 2 else f"aten::{EVIL}{seq}"
        place = data.context_id(op, EVIL, (EVIL,), EVIL, EVIL, Phase.FORWARD, f"{EVIL}:1 in {EVIL}", EVIL)
        data.add_diffs(seq, [TensorDiff(EVIL, meta, meta, 2, 1, 1, 1.0, 1.0, 1.0, 1, detail=EVIL)])
        data.add((seq, 0, place, data.verdict_id(verdict, f"{EVIL}{seq}"), 1.0, 1e7, 1.0, 1.0))
        data.add_capture(seq, EVIL, 1)
    data.add_region(f"compiled::{EVIL}", EVIL, 1, EVIL)
    data.add_skipped({(EVIL, EVIL, EVIL): 1})
    data.close()
    assert not data.failure
    return path


@pytest.fixture(scope="module")
def sweep_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("evil") / "x.shadowcov"
    info = SweepInfo(f"npu{EVIL}", EVIL, 0, EVIL, {EVIL: EVIL}, {}, {"torch": EVIL}, (EVIL,), EVIL)
    file = CoverageFile.begin(path, info)
    for number, kind in enumerate((Kind.MISMATCH, Kind.UNSUPPORTED, Kind.REFERENCE, Kind.PASS)):
        finding = Finding(kind, EVIL, EVIL, "implementation", EVIL, EVIL)
        outcome = Outcome.of([] if kind is Kind.PASS else [finding], EVIL)
        file.add(Case(f"{EVIL}{number}", f"{EVIL}32", Part.FORWARD, 0), outcome)
        file.add(Case(f"{FORMULA}{number}", "float32", Part.FORWARD, 0), outcome)
    file.close()
    return path


def said(capsys, *argv: object) -> str:
    main([str(a) for a in argv])
    out, err = capsys.readouterr()
    assert "internal error" not in err, err
    return out + err


@pytest.mark.parametrize(
    "argv",
    [
        ("report", ...), ("coverage", ...), ("coverage", ..., "--fail-under", "100"), ("export", ..., "-f", "json"),
        ("export", ..., "-f", "md"), ("export", ..., "-f", "txt"), ("export", ..., "-f", "html"),
        ("repro", ..., "--finding", "no"), ("repro", ..., "--no-minimise"), ("combine", ..., "-o", "c.shadowrun"),
        ("static", "mps", ...), ("static", "mps", ..., "-f", "csv"), ("static", "mps", ..., "-f", "json"),
        ("slowdown", ...),
    ],
    ids=lambda argv: " ".join("file" if a is ... else a for a in argv),
)  # fmt: skip
def test_of_a_run(run_file, argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    safe(said(capsys, *(run_file if a is ... else a for a in argv)), str(argv))


@pytest.mark.parametrize("form", ["txt", "md", "json", "csv", "html"])
def test_of_sweeps(sweep_file, form, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "\x1b[31mother.shadowcov"
    other.write_bytes(sweep_file.read_bytes())
    safe(said(capsys, "support", sweep_file, "-f", form), form)
    safe(said(capsys, "support", sweep_file, other, "-f", form), form)
    if form != "html":
        safe(said(capsys, "support", "--diff", sweep_file, other, "-f", form), form)
    said(capsys, "support", sweep_file, "-f", form, "-o", f"s.{form}")
    safe(Path(f"s.{form}").read_text(encoding="utf-8"), form)


def test_of_the_list_of_what_a_sweep_found(sweep_file, capsys):
    text = said(capsys, "repro", sweep_file)
    assert "FAKE LINE" in text
    safe(text, "repro")


def test_of_a_sweep_itself(sweep_file):
    from shadowrun.sweep import report
    from shadowrun.sweep.support import SupportTable

    file = CoverageFile.open(sweep_file)
    table, info = SupportTable.of(file.results()), file.info
    file.close()
    for form in (report.as_text, report.as_markdown, report.as_json):
        safe(form(table, info), "sweep")
    safe(report.as_csv(table), "sweep")


def test_of_slowdown_and_static():
    failed = Measured(Call(EVIL, EVIL, 1, EVIL), None, None, None, EVIL, True)
    for form in formats.FORMATS.values():
        safe(form(Slowdown.of([failed], 1, 100.0), EVIL), "slowdown")
    coverage = StaticCoverage((EVIL,), (EVIL,), (StaticOperator(EVIL, ("absent",), 1),))
    for form in static_formats.values():
        safe(form(coverage, EVIL), "static")


def test_of_errors(tmp_path, capsys):
    safe(said(capsys, "report", tmp_path / f"{EVIL.replace(chr(0), '')}.shadowrun"), "error")


def test_no_cell_of_a_table_is_a_formula(sweep_file, tmp_path, monkeypatch, capsys):
    text = said(capsys, "support", sweep_file, "-f", "csv")
    cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
    assert any(cell.startswith(f"'{FORMULA}") for cell in cells)
    assert not [cell for cell in cells if cell[:1] in ("=", "+", "@")]


def test_numbers_stay_numbers():
    row = ["-1.5", "+2", "-1e-3", "-inf", -3, "-", "", "-a", "@x", "+1+1", "\tx", "1-", "=1", "-1,5"]
    (found,) = list(csv.reader(io.StringIO(comma_separated(row, []))))
    assert found == ["-1.5", "+2", "-1e-3", "-inf", "-3", "-", "", "'-a", "'@x", "'+1+1", "'\tx", "1-", "'=1", "'-1,5"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_an_encoding_that_lacks_a_character(run_file, encoding, tmp_path):
    """Replaces it, and the exit status is what it would be."""
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    for argv, status in ((["report", run_file], 0), (["coverage", run_file, "--fail-under", "100"], 1)):
        command = [sys.executable, "-m", "shadowrun", *argv]
        ended = subprocess.run(command, capture_output=True, env=environment, check=False)
        assert ended.returncode == status, ended.stderr
        assert ended.stdout.decode(encoding)


PROGRAM = """
import sys, torch
torch.softmax(torch.ones(3, device="sim"), 0)
try:
    print("\\u03c0")
except UnicodeEncodeError:
    print("as plain Python")
"""


def test_a_program_prints_as_without_us(tmp_path):
    (tmp_path / "é.py").write_text(PROGRAM, encoding="utf-8")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(
        [sys.executable, "-m", "shadowrun", "run", "--flaws", "matmul-in-bf16", "--target", "sim", "é.py"],
        capture_output=True, text=True, cwd=tmp_path, env=environment, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("as plain Python\n")


def test_show_replaces_what_cannot_be_shown(capsys):
    show("a\udce9b")
    assert capsys.readouterr().out == "a?b"


def test_one_line_keeps_what_is_harmless():
    assert one_line("aten::mm(f32[8, 16]) → é 日本") == "aten::mm(f32[8, 16]) → é 日本"
    assert one_line("a\r\n\tb") == "a b"
