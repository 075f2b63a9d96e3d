"""`shadowrun replay`: as a user calls it."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys

import pytest

from shadowrun.cli.main import main
from shadowrun.recording.file_format.recording_file import read

pytestmark = pytest.mark.usefixtures("forked_processes")

PROGRAM = """
import sys, torch
device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
x = torch.linspace(-1, 1, 48).reshape(6, 8).to(device)
w = torch.linspace(0, 3, 32).reshape(8, 4).to(device)
y = torch.nn.functional.gelu(x @ w)
print(float(y.sum()))
"""


@pytest.fixture
def recorded(tmp_path, monkeypatch, capfd, clean_sim):
    """A recording of the clean simulated device."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(PROGRAM)
    assert main(["record", "--capture", "1MB", "-o", "a.shadowrec", "net.py", "sim"]) == 0
    assert "inputs of" in capfd.readouterr().err
    return tmp_path


def report_of(folder, *words):
    status = main(["replay", "a.shadowrec", "-o", "out.json", *words])
    return status, json.loads((folder / "out.json").read_text())


def row(report, op):
    return next(o for o in report["operators"] if o["op"] == op)


def test_a_clean_device_passes(recorded, capfd):
    status, report = report_of(recorded, "--target", "sim", "--fail-on", "any,not-rounding,mismatch,error")
    assert status == 0
    assert report["n_by_outcome"]["equal"] == sum(report["n_by_outcome"].values()) > 3
    assert row(report, "aten::gelu")["verdicts"] == {"match": 1}
    assert not report["flagged"]


def test_a_flaw_fails_the_gate(recorded, capfd):
    status, report = report_of(recorded, "--flaws", "gelu-by-tanh", "--fail-on", "not-rounding,mismatch")
    assert status == 1
    assert [(c["op"], c["off"]) for c in report["flagged"]] == [("aten::gelu", "here")]
    assert report["flagged"][0]["verdict"]["status"] == "mismatch"
    assert "FAILED" in capfd.readouterr().err


@pytest.mark.parametrize("form", ["txt", "md", "json", "csv", "html"])
def test_every_format_has_the_operator_and_the_command(recorded, capfd, form):
    assert main(["replay", "a.shadowrec", "--flaws", "gelu-by-tanh", "-f", form]) == 0
    text = capfd.readouterr().out
    assert "aten::gelu" in text
    if form in ("txt", "md", "html"):
        call = next(c for c, key in enumerate(read(recorded / "a.shadowrec").call_keys()) if key.op == "aten::gelu")
        assert f"shadowrun replay a.shadowrec --call {call} --flaws gelu-by-tanh" in text
    if form == "csv":
        rows = list(csv.DictReader(io.StringIO(text)))
        assert {r["operator"]: r["verdict"] for r in rows}["aten::gelu"] == "mismatch"


def test_both_errors_in_one_table(recorded, capfd):
    words = ["--flaws", "gelu-by-tanh", "-o", "out.html", "--free", "net.py", "sim"]
    _, report = report_of(recorded, *words)
    gelu, total, product = (row(report, f"aten::{op}") for op in ("gelu", "sum", "mm"))
    assert (gelu["verdicts"], gelu["off"]) == ({"mismatch": 1}, {"here": 1})
    assert gelu["propagated"]["n_differ"] == 1
    # It only passes on what it is given.
    assert (total["outcomes"], total["propagated"]["n_differ"]) == ({"equal": 1}, 1)
    assert product["propagated"] == {"n_pairs": 1, "n_differ": 0, "remaining": None}
    assert "script" not in " ".join(report["warnings"])
    assert "propagated" in (recorded / "out.html").read_text()


def test_another_program_is_not_credited_to_the_platform(recorded, capfd):
    (recorded / "other.py").write_text(PROGRAM.replace("48", "48.0 .__int__()") + "# another\n")
    status, report = report_of(recorded, "--target", "sim", "--fail-on", "provenance", "--free", "other.py", "sim")
    assert status == 1
    assert any("PROVENANCE DIFFERS: the script" in text for text in report["warnings"])


def test_a_program_that_ends_before_its_first_call(recorded, capfd):
    (recorded / "broken.py").write_text("import absent_module\n")
    status, report = report_of(recorded, "--target", "sim", "--free", "broken.py")
    assert status == 0
    assert any("exit status 1" in text for text in report["warnings"])
    assert main(["replay", "a.shadowrec", "--target", "sim", "--free", "missing.py"]) == 2
    assert "replay-free" in capfd.readouterr().err


def test_one_call(recorded):
    assert main(["replay", "a.shadowrec", "--target", "cpu", "--call", "0-99999"]) == 2
    assert main(["replay", "a.shadowrec", "--target", "cpu", "--ops", "mm", "-o", "out.json"]) == 0
    found = json.loads((recorded / "out.json").read_text())
    assert [(o["op"], o["outcomes"]) for o in found["operators"]] == [("aten::mm", {"equal": 1})]
    assert found["ref"] is None


def test_diff_names_the_command(recorded, capfd):
    assert main(["record", "--capture", "1MB", "--flaws", "gelu-by-tanh", "-o", "b.shadowrec", "net.py", "sim"]) == 0
    capfd.readouterr()
    assert main(["diff", "a.shadowrec", "b.shadowrec", "-o", "d.json", "-f", "txt"]) == 0
    commands = json.loads((recorded / "d.json").read_text())["replay"]
    assert [c.partition(" --call")[0] for c in commands] == [
        "shadowrun replay a.shadowrec",
        "shadowrun replay b.shadowrec",
    ]
    assert all(command in capfd.readouterr().out for command in commands[:1])
    assert main([*commands[0].split()[1:], "-o", "out.json"]) == 0
    assert [o["op"] for o in json.loads((recorded / "out.json").read_text())["operators"]] == ["aten::gelu"]
    # Without inputs on both sides there is nothing to replay.
    assert main(["record", "--flaws", "gelu-by-tanh", "-o", "c.shadowrec", "net.py", "sim"]) == 0
    assert main(["diff", "a.shadowrec", "c.shadowrec", "-o", "d.json"]) == 0
    assert json.loads((recorded / "d.json").read_text())["replay"] == []


@pytest.mark.parametrize(
    ("words", "slug"),
    [
        (["a.shadowrec"], "missing-target"),
        (["absent.shadowrec", "--target", "cpu"], "data-file-missing"),
        (["net.py", "--target", "cpu"], "data-file-not-ours"),
        (["a.shadowrec", "--target", "cpu", "--fail-on", "nonsense"], "bad-option"),
        (["a.shadowrec", "--target", "cpu", "--free"], "missing-script"),
        (["a.shadowrec", "--target", "cpu", "--call", "77777"], "unknown-call"),
        (["a.shadowrec", "--target", "nothing-here"], ""),
        (["a.shadowrec", "--target", "cpu", "--ops", "aten::no_such_op"], "unknown-operator"),
        (["a.shadowrec", "--target", "cpu", "-o", "x.doc"], "unknown-format"),
    ],
)
def test_wrong_use(recorded, capfd, words, slug):
    assert main(["replay", *words]) == 2
    said = capfd.readouterr().err
    assert f"shadowrun explain {slug}" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("size", ["", "x", "-5MB", "1TB", "nan", "MB", "1e400"])
def test_sizes_that_are_none(recorded, capfd, size):
    with pytest.raises(SystemExit) as end:
        main(["record", f"--capture={size}", "net.py"])
    assert end.value.code == 2
    assert "no size" in capfd.readouterr().err


STOPPER = """
import os, signal
from shadowrun.repro.call_replayer import CallReplayer
run = CallReplayer.run
def stopping(self, plan, args, kwargs):
    if plan.name == "aten::log":
        os.kill(os.getpid(), signal.SIGINT)
    return run(self, plan, args, kwargs)
CallReplayer.run = stopping
"""


def test_an_interrupt_reports_and_ends_by_the_signal(tmp_path):
    (tmp_path / "net.py").write_text("import torch\ntorch.ones(2).exp()\ntorch.ones(2).log()\ntorch.ones(2).sin()\n")
    (tmp_path / "stopper.py").write_text(STOPPER)
    command = [sys.executable, "-m", "shadowrun"]
    subprocess.run([*command, "record", "--capture=1MB", "net.py"], cwd=tmp_path, check=True, capture_output=True)
    done = subprocess.run(
        [*command, "replay", "run.shadowrec", "--target", "cpu", "--import", "stopper", "-f", "json"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert done.returncode == -signal.SIGINT, done.stderr
    assert b"Traceback" not in done.stderr
    report = json.loads(done.stdout)
    assert (report["n_left"], report["n_by_outcome"]["equal"]) == (3, 3)
