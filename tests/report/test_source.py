"""The user's lines with the findings in the margin, read when the report is made; whatever a data file names."""

from __future__ import annotations

import os
import sys
import types

import pytest

from shadowrun import report
from shadowrun.analysis import read_source, source_lines, split_site
from shadowrun.analysis.call_groups import CallGroups
from shadowrun.run import Run
from shadowrun.store import DataFile
from shadowrun.types import Cause, Phase, RunInfo, Status, Verdict

PROGRAM = (
    "import torch\n\n\ndef f(x):\n    if x:  # <b>\n        y = x.exp()\n    z = y.sin()\n    return z\n"
    + "pass\n" * 30
)
WRONG, GOOD = Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "scaled by 2"), Verdict(Status.MATCH)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(PROGRAM)
    os.utime("net.py", (1e9, 1e9))
    return tmp_path


def run_at(*sites, started="2026-11-30T10:00:00+00:00", verdict=WRONG):
    data = DataFile.create(None, RunInfo("npu", "cpu", started=started))
    for seq, site in enumerate(sites):
        context = data.context_id("aten::exp", "f32[4]", ("f32",), "[4]", "Net", Phase.FORWARD, site, "npu:0")
        data.add((seq, 0, context, data.verdict_id(verdict), 1.0, 1.0, -1.0, -1.0))
    data.close()
    return Run(data)


def page(run):
    text = report.render(run, "html")
    return text.partition('<section id="source">')[2].partition("</section>")[0]


def test_lines_with_findings_are_shown_with_those_around_them():
    text = run_at("net.py:6 in f", "net.py:30 in g").source()
    (file,) = text.files
    assert [line.number for line in file.lines] == [*range(3, 10), *range(27, 34)]
    assert {line.number: line.findings for line in file.lines if line.findings} == {6: (1,), 30: (1,)}
    assert (file.is_changed, file.n_left_out, text.unread) == (False, 0, ())
    shown = page(run_at("net.py:6 in f"))
    assert '<tr class="bad" title="1 mismatch" id="source-0-6">' in shown
    assert 'href="#finding-1">1 exp</a>' in shown
    assert "if x:  # &lt;b&gt;" in shown
    assert "        y = x.exp()" in shown


def test_lines_whose_calls_all_match_say_so():
    data = DataFile.create(None, RunInfo("npu", "cpu"))
    for seq, (line, verdict) in enumerate(((6, WRONG), (7, GOOD))):
        context = data.context_id("aten::exp", "", (), "", "", Phase.FORWARD, f"net.py:{line} in f", "npu:0")
        data.add((seq, 0, context, data.verdict_id(verdict), 1.0, 1.0, -1.0, -1.0))
    data.close()
    assert '<tr class="good" title="1 match">' in page(Run(data))


def test_a_finding_links_to_its_line():
    assert '<a href="#source-0-6">net.py:6</a>' in report.render(run_at("net.py:6 in f"), "html")


def test_a_file_that_was_changed_or_is_gone_is_named():
    (file,) = run_at("net.py:6 in f", started="2001-01-01T00:00:00+00:00").source().files
    assert file.is_changed
    assert "was written after the run started" in page(run_at("net.py:6 in f", started="2001-01-01T00:00:00+00:00"))
    assert run_at("away.py:6 in f").source().unread == (("away.py", "it is not there"),)
    assert run_at("net.py:6000 in f").source().unread == (("net.py", "it has fewer lines than when it ran"),)
    assert "Not shown: away.py: it is not there." in page(run_at("away.py:6 in f"))


def test_a_loaded_file_reads_only_python_files_below_the_working_directory(folder, monkeypatch):
    (folder / "secret.txt").write_text("a\nb\n")
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "x.py").write_text("a\nb\n")
    (folder / "in").mkdir()
    (folder / "up.py").write_text("a\nb\n")
    (folder / "in" / "link.py").symlink_to(folder / "up.py")
    os.mkfifo(folder / "pipe.py")
    for name in ("secret.txt", ".hidden/x.py", "pipe.py"):
        assert not run_at(f"{name}:1 in f").source().files, name
    monkeypatch.chdir(folder / "in")
    for name in ("../up.py", str(folder / "up.py"), "link.py", "\0.py", "", "/etc/passwd", "x" * 5000 + ".py"):
        assert not run_at(f"{name}:1 in f").source().files, name
    table, places = (run := run_at(f"{folder / 'up.py'}:1 in f"))._read(), run.origins()
    assert isinstance(table, CallGroups)
    assert read_source(table, places, "", everywhere=True).files


@pytest.mark.parametrize(
    "name", ["//evil.example/share/x.py", "/net/evil.example/x.py", "shadowrun/../../net/x.py", "a/../../x.py"]
)
def test_no_other_machine_is_asked_for_a_file(folder, monkeypatch, name):
    """A name of a network drive would be looked up there."""
    (folder / "in").mkdir()
    monkeypatch.chdir(folder / "in")
    run = run_at(f"{name}:1 in f", "shadowrun/cli/main.py:1 in f", "x.py:1 in f")
    asked = []
    monkeypatch.setattr(source_lines, "_located", lambda path: asked.append(path) or folder)
    run.source()
    assert asked == ["shadowrun/cli/main.py", "x.py"]


def test_cells_are_those_of_the_notebook_that_ran(monkeypatch):
    run = run_at("In [3], line 2 in <module>")
    ((path, why),) = run.source().unread
    assert path == "In [3]"
    assert why == "the kernel that ran this cell has ended: write the report in the notebook itself"
    shell = types.SimpleNamespace(user_ns={"In": ["", "", "", "x = 1\ny = x.exp()\n"]})
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    (file,) = read_source(run._read(), run.origins(), "", everywhere=True).files
    assert [(line.number, line.code, line.findings) for line in file.lines] == [
        (1, "x = 1", ()),
        (2, "y = x.exp()", (1,)),
    ]


def test_it_is_bounded(folder):
    (folder / "long.py").write_text("x" * 9000 + "\n" + "y\n" * 50_000)
    text = run_at(*(f"long.py:{n} in f" for n in range(1, 5000, 8))).source()
    (file,) = text.files
    assert len(file.lines) < 320
    assert len(file.lines[0].code) == 200
    assert file.n_left_out > 500
    many = run_at(*(f"{n}.py:1 in f" for n in range(100))).source()
    assert (len(many.unread), many.n_left_out) == (30, 70)


@pytest.mark.parametrize(
    ("site", "found"),
    [
        ("train.py:9 in step (adam.py:30 in step)", ("train.py", 9)),
        ("C:\\a b\\x.py:7 in f", ("C:\\a b\\x.py", 7)),
        ("In [12], line 3 in <module>", ("In [12]", 3)),
        ("", None),
        ("x.py:99999999999 in f", None),
    ],
)
def test_sites(site, found):
    assert split_site(site) == found
