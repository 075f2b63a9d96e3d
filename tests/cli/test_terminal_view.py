"""Reports at a terminal: a digest that fits a screen, details on request, the digest last, and the user's pager."""

import io
import itertools
import os
import pty
import re
import select
import subprocess
import sys

import pytest
import torch

import shadowrun
from shadowrun.cli import output_options
from shadowrun.cli.main import main
from shadowrun.cli.progress import progress_bar
from shadowrun.report.document import Document, Records, View, render_view
from shadowrun.report.document_blocks import Column, Table

pytestmark = pytest.mark.usefixtures("forked_processes")

ROWS, COLUMNS = 24, 100


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """A run that passes, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    with shadowrun.compare("cpu[threads=1]", file="a.shadowrun", settings=False) as run:
        torch.ones(2, 2) @ torch.ones(2, 2)
    return run


def at_terminal(*command, **variables):
    """Output of a command whose standard streams are a terminal of 24 lines; `CI` would switch the pager off."""
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("CI", "PAGER", "LESS", "NO_COLOR", "FORCE_COLOR")}
    environment |= {"TERM": "xterm-256color", "LINES": str(ROWS), "COLUMNS": str(COLUMNS), **variables}
    process = subprocess.Popen(
        [sys.executable, "-m", "shadowrun", *command], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    found = b""
    while True:
        ready, _, _ = select.select([ours], [], [], 120)
        try:
            piece = os.read(ours, 65536) if ready else b""
        except OSError:  # Linux: the last process that had the terminal is gone
            piece = b""
        if not piece:
            break
        found += piece
    os.close(ours)
    assert process.wait() in (0, 1)
    return re.sub(r"\x1b\[[0-9;]*m", "", found.decode()).replace("\r\n", "\n")


@pytest.fixture(scope="module")
def young(tmp_path_factory):
    """A run of a network on an accelerator with many flaws."""
    folder = tmp_path_factory.mktemp("young")
    code = """
import shadowrun, torch
from shadowrun import sim
sim.enable("sim", preset="young")
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.LayerNorm(4), torch.nn.Softmax(1)).to("sim")
with shadowrun.compare("sim", file="a.shadowrun", settings=False):
    (net(torch.randn(3, 4, device="sim")) ** 2).sum().backward()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder)
    return str(folder / "a.shadowrun")


def test_a_terminal_gets_a_digest_that_fits_its_screen_and_ends_with_the_verdict(young):
    lines = at_terminal("report", young, PAGER="false").splitlines()
    assert len(lines) < ROWS
    assert "aten::addmm" in "".join(lines)
    assert lines[0] == "shadowrun  sim against cpu"
    assert lines[-1].startswith("FAILED: ")
    assert any("-v: details of each finding" in line for line in lines)


def test_details_come_above_the_digest_where_there_is_no_pager(young):
    text = at_terminal("report", young, "-v", "--no-pager", PAGER="false")
    digest = at_terminal("report", young, PAGER="false")
    assert "\nOperators ──" in text
    # The same lines, without the title and the hint.
    assert text.splitlines()[-8:-2] == [line for line in digest.splitlines() if "-v: details" not in line][-8:-2]


def test_a_long_report_goes_through_the_pager_and_a_short_one_does_not(young):
    pages = f"{sys.executable} -c 'import sys; print(\"PAGED\", len(sys.stdin.read().splitlines()) > {ROWS})'"
    assert at_terminal("report", young, "-v", PAGER=pages) == "PAGED True\n"
    assert "PAGED" not in at_terminal("report", young, PAGER=pages)
    assert "PAGED" not in at_terminal("report", young, "-v", "--no-pager", PAGER=pages)
    assert "PAGED" not in at_terminal("report", young, "-v", PAGER=pages, CI="true")
    assert "PAGED" in at_terminal("report", young, "--all", PAGER="cat", SHADOWRUN_PAGER=pages)


def test_a_pager_that_does_not_start_or_ends_early_loses_nothing_else(young):
    assert at_terminal("report", young, "-v", PAGER="/no/such/pager").endswith("\n")
    assert at_terminal("report", young, "-v", PAGER="true") == ""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PAGER": "less -S"}, ["less", "-S"]),
        ({"PAGER": "less", "SHADOWRUN_PAGER": "cat -n"}, ["cat", "-n"]),
        ({"PAGER": ""}, None),
        ({"PAGER": "cat"}, None),
        ({"PAGER": "no-such-pager"}, None),
        ({"PAGER": "less 'open"}, None),
        ({"PAGER": "less", "CI": "true"}, None),
        ({"PAGER": "less", "TERM": "dumb"}, None),
    ],
)
def test_the_pager_is_chosen_as_git_does(monkeypatch, variables, expected):
    for name in ("PAGER", "SHADOWRUN_PAGER", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(output_options.shutil, "which", lambda name: None if name == "no-such-pager" else name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert output_options.pager_command() == expected


def test_a_pipe_gets_all_and_the_gate_line_first(capsys):
    assert main(["report", "a.shadowrun"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == lines[-1]
    assert lines[1].startswith("PASSED")
    assert any(line.startswith("Operators ──") for line in lines)


def test_all_shows_the_rows_that_a_terminal_leaves_out():
    rows = tuple((f"aten::op{n}",) for n in range(40))
    document = Document("t", (Table((Column("operator", "name"),), rows),), {}, Records((), ()))
    assert render_view(document, View()).count("aten::") == 12
    assert render_view(document, View(everything=True)).count("aten::") == 40


def test_a_progress_bar_says_how_long_it_still_takes(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    seconds = itertools.count()
    monkeypatch.setattr("rich.console.monotonic", lambda: float(next(seconds)))
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with progress_bar("sweep", total=1000) as update:
        for done in range(10):
            update(done)
    assert re.search(r"left\S* \S*\d:\d\d:\d\d", terminal.getvalue())
