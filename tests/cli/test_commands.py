"""The commands that read a recorded run or the machine, and the demo."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import shadowrun
from shadowrun.cli.main import main
from shadowrun.sim import CATALOGUE, PRESETS
from tests import forked


def read(name):
    return Path(name).read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """A recorded run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    with shadowrun.compare("cpu[threads=1]", file=".shadowrun"):
        torch.ones(3, 3) @ torch.ones(3, 3)
    return tmp_path / ".shadowrun"


def test_report(capsys, data):
    assert main(["report"]) == 0
    shown = capsys.readouterr().out
    assert "cpu[threads=1] against cpu" in shown
    assert "aten::mm" in shown
    assert main(["report", str(data), "-o", "x.md", "-o", "x.json"]) == 0
    assert capsys.readouterr().out == ""
    assert "aten::mm" in read("x.md")
    assert "aten::mm" in read("x.json")


def test_export(capsys):
    assert main(["export", "-f", "json"]) == 0
    assert "aten::mm" in json.dumps(json.loads(capsys.readouterr().out))
    for name, mark in (("md", "aten::mm"), ("html", "<html"), ("txt", "aten::mm")):
        assert main(["export", "-f", name]) == 0
        assert mark in capsys.readouterr().out
    assert main(["export", "-o", "page.md", "-o", "page.csv"]) == 0
    assert capsys.readouterr().out == ""
    assert "aten::mm" in read("page.md")
    assert "\naten::mm,1," in read("page.csv")
    assert main(["export", "-f", "txt", "-o", "page.md"]) == 0
    assert "aten::mm" in capsys.readouterr().out
    assert main(["export"]) == 2
    assert "Give a format" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["report"], ["export", "-f", "json"], ["coverage"]])
def test_a_file_that_is_no_data_file(capsys, command):
    Path("other").write_text("hello", encoding="utf-8")
    assert main([*command, "other"]) == 2
    assert "shadowrun: error: 'other' is not a shadowrun data file" in capsys.readouterr().err


def test_coverage(capsys):
    assert main(["coverage", "--fail-under", "100"]) == 0
    shown = capsys.readouterr().out
    assert "coverage: cpu[threads=1] against cpu" in shown
    assert "On cpu[threads=1] the program runs" in shown
    assert "operators    2 of 2 (100.0 %)" in shown


def test_coverage_names_what_is_missing_and_fails(tmp_path):
    (tmp_path / "x.py").write_text("import torch; torch.ones(2).lerp_(torch.ones(2), 0.5); torch.ones(2).exp()")
    assert forked.shadowrun("run", "--flaws", "missing-lerp", "--fail-on", "none", "x.py").returncode == 0
    done = forked.shadowrun("coverage", "--fail-under", "90")
    assert done.returncode == 1
    assert re.search(r"^aten::lerp_\.Scalar +1 aten::lerp\.Scalar_out$", done.stdout, re.MULTILINE)
    assert "shadowrun: FAILED: operator coverage" in done.stderr
    assert "is under 90 %" in done.stderr


def test_platforms(capsys):
    assert main(["platforms"]) == 0
    shown = capsys.readouterr().out
    states = dict(re.findall(r"^(\w+) +(present|absent) ", shown, re.MULTILINE))
    assert (states["cpu"], states["lazy"], states["musa"]) == ("present", "present", "absent")
    assert "Fingerprint of cpu" in shown
    assert f"torch {torch.__version__}" in shown


def test_all_flaws_and_presets_are_listed(capsys):
    assert main(["platforms", "--flaws"]) == 0
    shown = capsys.readouterr().out
    assert {name for name in (*CATALOGUE, *PRESETS) if name not in shown} == set()


def demo(*argv):
    return forked.shadowrun("demo", *argv)


def test_demo_finds_the_flaws(tmp_path):
    done = demo("--directory", "out", "-o", "out.csv")
    assert done.returncode == 0, done.stderr
    run = shadowrun.load(tmp_path / "out" / "shadowrun-demo.shadowrun")
    kinds = {finding.kind for finding in run.findings()}
    assert {"unsupported", "mismatch", "fallback"} <= kinds
    assert run.internal_failures() == []
    found = {finding.op for finding in run.findings()}
    for name in PRESETS["young"]:
        flaw = CATALOGUE[name]
        if "match" not in flaw.statuses and flaw.kind != "speed":
            assert found & set(flaw.operators), f"{name} was not found"
    assert "<html" in (tmp_path / "out" / "shadowrun-demo.html").read_text(encoding="utf-8")
    assert "sim against cpu" in done.stdout
    assert (tmp_path / "out.csv").read_text(encoding="utf-8").startswith("op,n_calls,")
    assert "demo_models.py" in done.stdout


def test_demo_on_a_clean_device_finds_nothing(tmp_path):
    done = demo("--preset", "clean")
    assert done.returncode == 0, done.stderr
    run = shadowrun.load(tmp_path / "shadowrun-demo.shadowrun")
    assert [f for f in run.findings() if f.kind != "slow"] == []
    assert run.info.notes == ()
    assert run.internal_failures() == []
    assert run.counts()[shadowrun.Status.MATCH] > 500


def test_demo_without_its_images(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo"]) == 2
    assert "not installed: pip install 'shadowrun[examples]'" in capsys.readouterr().err
