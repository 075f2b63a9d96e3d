"""No output hands on what a terminal obeys, breaks a line, or a spreadsheet computes; whatever a file says."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import os
import re
import sqlite3
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import shadowrun
from shadowrun.cli.main import main
from shadowrun.report.document import Column, Document, Fact, Facts, Limits, Note, Records, Table, render
from shadowrun.report.formats.json_csv import render_csv
from shadowrun.report.formats.junit import render_junit
from shadowrun.report.formats.terminal import render_terminal
from shadowrun.report.issues import Issues
from shadowrun.report.sanitize import code_line, one_line, replacing_unencodable, sanitize, write_to_stdout
from shadowrun.store import DataFile
from shadowrun.studies.slowdown.calls import Call
from shadowrun.studies.slowdown.table import Slowdown, slowdown_document
from shadowrun.studies.slowdown.timing import TimedCall
from shadowrun.studies.static.coverage import StaticCoverage, StaticOperator, static_document
from shadowrun.studies.sweep.cases import Case, CaseFinding, CaseOutcome, Kind, Part
from shadowrun.studies.sweep.coverage_file import CoverageFile, SweepInfo
from shadowrun.types import Cause, Phase, RunInfo, Status, TensorDiff, TensorMeta, Verdict

COMMANDS = "::set-output name=x::y ##[add-matcher]m.json ##vso[task.setvariable variable=x]y"
EVIL = f"{COMMANDS}\x1b]0;own\x07\x1b[31m\nFAKE LINE\r\x9b1m \u202egnp\u2066\u200b\u2028 \udce9\x00 é{COMMANDS}"
FORMATS = ("txt", "terminal", "md", "json", "csv", "html")
FORMULA = "=cmd|' /C calc'!A0"


def safe(text: str, where: str) -> None:
    """Of what is no line end, all is printable; no line is of the file's making, and none a command to a CI service."""
    for line in text.splitlines():
        assert line.isprintable(), (where, line)
        assert not re.search(r"^\s*::set-output|##\w*\[", line), (where, line)
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
        finding = CaseFinding(kind, EVIL, EVIL, "implementation", EVIL, EVIL)
        outcome = CaseOutcome.from_findings([] if kind is Kind.PASS else [finding], EVIL)
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
        ("slowdown", ...), ("known", ...), ("known", ..., "--init", "--dry-run"),
        *(("export", ..., "-f", form) for form in ("github", "sarif", "junit", "codequality", "csv")),
        ("report", ..., "--baseline", ...), ("explain", ..., "0"), ("classes", ...), ("diff", ..., ...),
    ],
    ids=lambda argv: " ".join("file" if a is ... else a for a in argv),
)  # fmt: skip
def test_of_a_run(run_file, argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    safe(said(capsys, *(run_file if a is ... else a for a in argv)), str(argv))


def test_of_a_run_that_python_prints(run_file, tmp_path):
    run = shadowrun.load(run_file, known=False)
    findings = run.findings()
    shown = [repr(run), repr(findings), *map(str, findings), *map(repr, findings), run.coverage()._repr_html_()]
    shown += [run._repr_html_(), findings._repr_html_()]
    assert all(repr(value).isprintable() for value in (run.gate(), run.info))
    with pytest.raises(shadowrun.FindingsError) as failed:
        run.raise_for_findings()
    other = tmp_path / "other.shadowrun"
    DataFile.create(other, RunInfo(EVIL, "cpu")).close()
    with pytest.raises(shadowrun.DataFileError) as refused:
        shadowrun.combine([run_file, other], tmp_path / "both.shadowrun")
    for number, text in enumerate((*shown, str(failed.value), str(refused.value))):
        safe(text, str(number))


def load_while_handling(error, path):
    try:
        raise error
    except KeyError:
        return shadowrun.load(path)


def test_of_what_an_exception_was_raised_from(tmp_path):
    """SQLite names the table; Python prints each exception of a chain."""
    path = tmp_path / "x.shadowrun"
    DataFile.create(path, RunInfo("npu", "cpu")).close()
    name = EVIL.encode("utf-8", "ignore").decode()  # a database has no lone surrogates
    with contextlib.closing(sqlite3.connect(path)) as file, file:
        file.execute("pragma writable_schema = on")
        file.execute("insert into sqlite_master values ('table', ?1, ?1, 0, ?2)", (name, f"create table x({name}"))
    own = KeyError(EVIL)
    with pytest.raises(shadowrun.DataFileError) as failed:
        load_while_handling(own, path)
    assert own.args == (EVIL,), "the program's own stays as it is"
    cause = failed.value.__cause__
    assert cause.__context__ is own
    assert isinstance(cause, sqlite3.DatabaseError)
    assert "malformed database schema" in str(cause)
    safe(str(cause), "cause")


@pytest.mark.parametrize("begin", ["---", "+++", "~~~", "^^^ +++"])
def test_no_text_begins_a_group_of_a_log(begin):
    assert one_line(f"{begin} all checks passed") == f" {begin} all checks passed"


def test_of_records_for_a_spreadsheet(run_file, tmp_path):
    assert shadowrun.load(run_file, known=False).write_records(tmp_path / "r.csv") > 0
    text = (tmp_path / "r.csv").read_text(encoding="utf-8")
    assert "FAKE LINE" in text
    safe(text, "records")


@pytest.mark.parametrize("form", ["txt", "md", "json", "csv", "html"])
def test_of_sweeps(sweep_file, form, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "\x1b[31mother.shadowcov"
    other.write_bytes(sweep_file.read_bytes())
    safe(said(capsys, "support", sweep_file, "-f", form), form)
    safe(said(capsys, "support", sweep_file, other, "-f", form), form)
    safe(said(capsys, "support", "--diff", sweep_file, other, "-f", form), form)
    said(capsys, "support", sweep_file, "-o", f"s.{form}")
    safe(Path(f"s.{form}").read_text(encoding="utf-8"), form)


def test_of_the_list_of_what_a_sweep_found(sweep_file, capsys):
    text = said(capsys, "repro", sweep_file)
    assert "FAKE LINE" in text
    safe(text, "repro")


def test_of_a_sweep_itself(sweep_file):
    from shadowrun.studies.sweep.reports.report import sweep_document
    from shadowrun.studies.sweep.reports.support import SupportTable

    file = CoverageFile.open(sweep_file)
    table, info = SupportTable.from_results(file.results()), file.info
    file.close()
    for form in FORMATS:
        safe(render(sweep_document(table, info, script=EVIL), form), "sweep")


def test_of_slowdown_and_static():
    failed = TimedCall(Call(EVIL, EVIL, 1, EVIL), None, None, None, EVIL, True)
    slowdown = slowdown_document(Slowdown.from_timings([failed], 1, 100.0), EVIL)
    coverage = StaticCoverage((EVIL,), (EVIL,), (StaticOperator(EVIL, ("absent",), 1),))
    for document in (slowdown, static_document(coverage, EVIL)):
        for form in FORMATS:
            safe(render(document, form), form)


MARKUP = "[/x] [link=http://e.example]a[/link] ![i](http://e.example/i.png) `b` *c* <img src=x>"


@pytest.mark.parametrize("width", ["80", "200"])
@pytest.mark.parametrize("command", [["export", "-f", "txt"], ["report"]])
def test_no_name_of_a_run_is_markup_of_rich(tmp_path, monkeypatch, capsys, width, command):
    """It ended in a traceback, or made a link of the terminal's."""
    data = DataFile.create(tmp_path / "x.shadowrun", RunInfo(MARKUP, "cpu", notes=(MARKUP,)))
    for seq, status in enumerate(Status):
        place = data.context_id(f"aten::{seq}", MARKUP, (MARKUP,), MARKUP, MARKUP, Phase.FORWARD, MARKUP, MARKUP)
        verdict = Verdict(status, Cause.IMPLEMENTATION, MARKUP, MARKUP, 0.5)
        data.add((seq, 0, place, data.verdict_id(verdict, MARKUP), 1.0, 1e7, 1.0, 1.0))
    data.close()
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setattr("shadowrun.report.formats.terminal.WIDE", 80)
    assert "[link=http" in "".join(said(capsys, *command, tmp_path / "x.shadowrun").split())


def test_no_name_of_a_sweep_is_markup(tmp_path):
    from shadowrun.studies.sweep.reports.report import sweep_document
    from shadowrun.studies.sweep.reports.support import SupportTable

    file = CoverageFile.begin(tmp_path / "x.shadowcov", SweepInfo("npu", "cpu", 0, MARKUP, {}, {}, {"torch": MARKUP}))
    found = CaseFinding(Kind.MISMATCH, MARKUP, MARKUP, "implementation", MARKUP, MARKUP)
    file.add(Case(MARKUP, MARKUP, Part.FORWARD, 0), CaseOutcome.from_findings([found], MARKUP))
    table, info = SupportTable.from_results(file.results()), file.info
    assert "[link=http" in render(sweep_document(table, info), "txt")
    file.close()


def test_of_errors(tmp_path, capsys):
    safe(said(capsys, "report", tmp_path / f"{EVIL.replace(chr(0), '')}.shadowrun"), "error")


def test_of_warnings():
    with replacing_unencodable():
        safe(warnings.formatwarning(EVIL, UserWarning, EVIL, 1, EVIL), "a warning")
    assert "\x1b" in warnings.formatwarning(EVIL, UserWarning, "x.py", 1, "")


def test_of_an_error_of_our_own(run_file, monkeypatch, capsys):
    def fails(*_, **__):
        raise ValueError(EVIL)

    monkeypatch.setattr(shadowrun, "load", fails)
    assert main(["report", str(run_file)]) == 2
    said = capsys.readouterr().err
    assert "internal error" in said
    assert f"in {fails.__name__}" in said
    safe(said, "a traceback")


@pytest.mark.parametrize(
    "text",
    ["x\r=1+1", "x\n=1+1", "x;=1+1", "x;-1+1", "x\t@SUM(1)", "\n=1+1", "\uff1d1+1", 'x;"=1+1;', 'x;""""=1+1'],
)
def test_no_text_of_a_table_begins_a_cell_with_a_formula(text):
    """A line break that was not quoted began a row; where a semicolon separates, a cell begins behind each."""
    table = render_csv(Document("", (), {}, Records(("a", "b"), (("1", text),))))
    assert [len(row) for row in csv.reader(io.StringIO(table, newline=""))] == [2, 2]
    cells = re.split("[;,\t\r\n]", table)
    assert not [cell for cell in cells if cell.lstrip('"')[:1] in set("=+-@\uff1d")], table


def test_no_cell_of_a_table_is_a_formula(sweep_file, tmp_path, monkeypatch, capsys):
    text = said(capsys, "support", sweep_file, "-f", "csv")
    cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
    assert any(cell.startswith(f"'{FORMULA}") for cell in cells)
    assert not [cell for cell in cells if cell[:1] in ("=", "+", "@")]


def test_numbers_stay_numbers():
    row = ["-1.5", "+2", "-1e-3", "-inf", -3, "-", "", "-a", "@x", "+1+1", "\tx", "1-", "=1", "-1,5"]
    text = render_csv(Document("", (), {}, Records((), (tuple(row),))))
    _, found = csv.reader(io.StringIO(text))
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
    write_to_stdout("a\udce9b")
    assert capsys.readouterr().out == "a?b"


@pytest.mark.parametrize(("width", "colour"), [(60, False), (61, True), (100, False)])
def test_a_folded_name_is_no_command(width, colour):
    """A table folds a long name anywhere, and a line of it may begin with what a service obeys."""
    texts = [f"{'x' * n}{text}" for n in range(70) for text in ("::Error::y", "##[error]y")]
    columns = Column("operator", "name"), Column("line"), Column("why")
    long = Limits(terminal=len(texts))
    blocks = (
        Table(columns, tuple((text, "", text) for text in texts), limits=long),
        Table(columns, tuple(("aten::mm", text, "") for text in texts), limits=long),
        Facts(tuple(Fact(text, text) for text in texts)),
        *map(Note, texts),
    )
    text = render_terminal(Document("x", sanitize(blocks), {}, Records((), ())), width=width, colour=colour)
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    assert not [line for line in lines if re.match(r"\s*::\w|\s*##\w*\[", line)]
    assert max(map(len, lines)) <= width, "aligned as before"
    assert len(re.findall("aten::mm", text)) == len(texts)


@pytest.mark.parametrize("text", ["A::Set-Output name=x::y", "A::STOP-COMMANDS::tok", "[[ATTACHMENT|/etc/passwd]]"])
def test_no_text_is_a_command_to_a_service(text):
    """GitHub's runner ignores the case of names; plug-ins of Jenkins, and GitLab, read tags of attachments."""
    shown = one_line(text)
    assert shown.replace(" ", "") == text.replace(" ", "")
    assert re.search(r"::[\w-]+-|\[\[ATTACHMENT", shown, re.IGNORECASE) is None


def test_a_platform_names_no_folder_in_junit():
    issues = Issues("x/../../home/.ssh", (), ("aten::mm",))
    assert 'classname="shadowrun.x_.._.._home_.ssh"' in render_junit(Document("", (), {}, (), issues=issues))


def test_one_line_keeps_what_is_harmless():
    assert one_line("lib::error of aten::add, x[::2], a ## b[0] and ::1") == (
        "lib::error of aten::add, x[::2], a ## b[0] and ::1"
    )
    assert one_line("aten::mm(f32[8, 16]) → é 日本") == "aten::mm(f32[8, 16]) → é 日本"
    assert one_line("a\r\n\tb") == "a b"


# Default_Ignorable_Code_Point of Unicode 16 (DerivedCoreProperties.txt), and blanks that are no spaces.
IGNORABLE = (
    (0xAD, 0xAD), (0x34F, 0x34F), (0x61C, 0x61C), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F),
    (0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF),
)  # fmt: skip
BLANKS = (0x2800, 0x1D159, 0x13441, 0x13442)


def test_no_character_is_invisible():
    """Two names that look the same, or nothing where a name is."""
    hidden = [*(chr(n) for first, last in IGNORABLE for n in range(first, last + 1)), *map(chr, BLANKS)]
    shown = {char: one_line(f"a{char}b") for char in hidden}
    assert {f"U+{ord(char):04X}" for char, text in shown.items() if text != "a\ufffdb"} == set()
    assert code_line("x = 1  # \ufe0f\u3164", 100) == "x = 1  # \ufffd\ufffd"


def test_what_is_visible_stays():
    kept = "é 日本 한글 ⠁ ␀ ␢ ∑ → µ ё ❤ e\u0301 नमस्ते ប្រ 😀"
    assert one_line(kept) == kept
