"""The command that records a program, alone and on many platforms."""

from __future__ import annotations

import hashlib
import json

import pytest

from shadowrun.cli.main import main
from shadowrun.recording.file_format.recording_file import read

pytestmark = pytest.mark.usefixtures("forked_processes")

PROGRAM = """
import os, sys, torch
print("arguments:", *sys.argv[1:])
x = torch.linspace(0, 1, 24).reshape(4, 6)
y = (x @ x.T).exp().sum()
print(torch.get_num_threads())
if "kill" in sys.argv and torch.get_num_threads() == 3:
    os.kill(os.getpid(), 4)
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1].isdigit() else 0)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    return "program.py"


def test_the_program_runs_unchanged_and_one_line_says_what_next(script, tmp_path, capsys):
    assert main(["record", "-o", "a.shadowrec", script, "3", "-o", "x"]) == 3
    said = capsys.readouterr()
    assert said.out.startswith("arguments: 3 -o x\n")
    size = (tmp_path / "a.shadowrec").stat().st_size
    recording = read(tmp_path / "a.shadowrec")
    assert f"{len(recording.calls)} calls, {size:,} bytes in a.shadowrec" in said.err
    assert "shadowrun diff a.shadowrec" in said.err
    assert recording.processes[0].argv == ("program.py", "3", "-o", "x")


def test_a_module(script, tmp_path):
    assert main(["record", "-o", "a.shadowrec", "--ops", "aten::mm", "-m", "program"]) == 0
    assert [key.op for key in read(tmp_path / "a.shadowrec").call_keys()] == ["aten::mm"]


def test_the_script_of_the_provenance_is_the_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    for text in ("import torch\ntorch.ones(2)\n", "import torch\ntorch.ones(2) \n"):
        (tmp_path / "program.py").write_text(text)
        for command in (["program.py"], ["-m", "program"]):
            assert main(["record", "-o", "a.shadowrec", *command]) == 0
            found.append(read(tmp_path / "a.shadowrec").processes[0].provenance["script"])
            (tmp_path / "a.shadowrec").unlink()
    assert found[0] == found[1] != found[2] == found[3]
    assert found[0] == hashlib.sha256(b"import torch\ntorch.ones(2)\n").hexdigest()[:16]


def test_an_exception_of_the_program(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text("import torch\ntorch.ones(2).sin()\nraise ValueError('mine')\n")
    assert main(["record", "-o", "a.shadowrec", "program.py"]) == 1
    said = capsys.readouterr().err
    assert "ValueError: mine" in said
    assert "shadowrun/" not in said.partition("shadowrun: ")[0]
    assert [key.op for key in read(tmp_path / "a.shadowrec").call_keys()] == ["aten::ones", "aten::sin"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Give the program to run"),
        (["-o", "a.txt", "program.py"], "ends in .shadowrec"),
        (["-o", "absent/a.shadowrec", "program.py"], "no folder"),
        (["absent.py"], "does not exist"),
        (["--out", "d", "program.py"], "give --grid"),
        (["--grid", "threads=1", "program.py"], "--out DIR"),
        (["--grid", "thread=1", "--out", "d", "program.py"], "Did you mean 'threads'"),
        (["--grid", "threads", "--out", "d", "program.py"], "such as threads=1,2"),
        (["--grid", "threads=0", "--out", "d", "program.py"], "threads='0'"),
        (["--each", "sim", "--out", "d", "program.py"], "of the CPU's settings"),
        (["--each", "cpu[python=/x]", "--out", "d", "program.py"], "in this interpreter"),
        (["--grid", "threads=1", "-j", "0", "--out", "d", "program.py"], "-j 0"),
        (
            ["--grid", "env:A=" + "1," * 200 + "1", "--grid", "env:B=" + "1," * 99 + "1", "--out", "d", "x.py"],
            "at most",
        ),
    ],
)
def test_wrong_use_is_refused_before_anything_runs(script, tmp_path, capsys, arguments, said):
    assert main(["record", *arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""
    assert not (tmp_path / "d").exists()


def test_a_grid_is_a_process_for_each_platform(script, tmp_path, capsys):
    assert (
        main(["record", "--grid", "threads=1,3", "--each", "cpu[threads=2,mkldnn=off]", "--out", "d", script, "kill"])
        == 1
    )
    said = capsys.readouterr().out
    assert "2 of 3 platforms recorded" in said
    rows = json.loads((tmp_path / "d" / "grid.json").read_text())["platforms"]
    assert [(row["platform"], row["outcome"]) for row in rows] == [
        ("cpu[threads=1]", "recorded"),
        ("cpu[threads=3]", "SIGILL"),
        ("cpu[mkldnn=off,threads=2]", "recorded"),
    ]
    for row, threads in ((rows[0], 1), (rows[1], 3)):
        assert f"\n{threads}\n" in (tmp_path / "d" / f"{row['file']}.log").read_text()
    recording = read(tmp_path / "d" / rows[0]["file"])
    assert recording.processes[0].options["platform"] == "cpu[threads=1]"
    assert rows[0]["n_calls"] == len(recording.calls)


def test_a_process_that_fails_before_it_records_is_a_row(new_processes, script, tmp_path, capsys):
    each = ["--each", "cpu[threads=1]", "--each", "cpu[env:PYTHONHOME=/nowhere]"]
    assert main(["record", *each, "--out", "d", script]) == 1
    assert "1 of 2 platforms recorded" in capsys.readouterr().out
    rows = json.loads((tmp_path / "d" / "grid.json").read_text())["platforms"]
    assert [(row["outcome"], row["n_calls"] > 0) for row in rows] == [("recorded", True), ("exit status 1", False)]
    assert "PYTHONHOME" in (tmp_path / "d" / f"{rows[1]['file']}.log").read_text()


def test_a_platform_that_this_processor_lacks_is_a_row(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shadowrun.platforms.cpu._cpuinfo", lambda: ("", frozenset({"sse4_1"})))
    assert main(["record", "--grid", "isa=avx512", "--out", "d", script]) == 1
    assert "cannot run here" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "d" / "grid.json").read_text())["platforms"]
    assert "lacks: avx2, fma" in row["note"]
