"""Support over releases, joined shards, and badges."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from shadowrun.cli.main import main
from shadowrun.errors import UsageError
from shadowrun.studies.sweep.cases import Part
from shadowrun.studies.sweep.reports.support import joined, read_sweeps
from shadowrun.studies.sweep.reports.trend import Trend, badge_json, badge_svg, percent_full
from tests.coverage_kit import CRASH, FALLBACK, MISMATCH, OPERATORS, UNSUPPORTED, write


@pytest.fixture
def releases(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cumsum, matmul = {("cumsum", None, None): UNSUPPORTED}, {("matmul", None, Part.FORWARD): MISMATCH}
    return [
        write(tmp_path / "1.0.shadowcov", {**cumsum, **matmul, ("exp", None, Part.OUT): CRASH}),
        write(tmp_path / "1.1.shadowcov", {**cumsum, **matmul}, target_fingerprint={"plugin": "1.1"}),
        write(
            tmp_path / "2.0.shadowcov",
            {("cumsum", None, Part.OUT): UNSUPPORTED, ("softmax", None, Part.BACKWARD): MISMATCH},
            operators=[*OPERATORS, "sin"],
        ),
    ]


def test_what_each_release_gained_and_lost(releases):
    trend = Trend.from_sweeps([(path.stem, sweep) for path, sweep in zip(releases, read_sweeps(releases), strict=True)])
    seen = [(r.name, r.gained, r.lost, r.added, r.dropped) for r in trend.releases]
    assert seen == [
        ("1.0", (), (), (), ()),
        ("1.1", ("exp",), (), (), ()),
        ("2.0", ("cumsum", "matmul"), ("softmax",), ("sin",), ()),
    ]


def test_the_report_of_a_trend(releases, capsys):
    words = ["support", "--trend", *map(str, releases)]
    assert main([*words, "-o", "t.html", "-o", "t.json", "-o", "t.csv", "-o", "junit.xml", "-f", "txt"]) == 0
    text = capsys.readouterr().out
    assert "vpu over 3 releases" in text
    assert "2.0 gained  2: cumsum, matmul" in text
    assert "2.0 lost  1: softmax" in text
    lines = [line.split() for line in text.splitlines()]
    # What the last release lost comes first.
    assert lines[lines.index(["operator", "1.0", "1.1", "2.0"]) + 1] == ["softmax", "full", "full", "partial"]
    data = json.loads(Path("t.json").read_text(encoding="utf-8"))
    assert [r["lost"] for r in data["releases"]] == [[], [], ["softmax"]]
    assert "1.0,softmax,full" in Path("t.csv").read_text(encoding="utf-8")
    cases = ET.parse("junit.xml").getroot().iter("testcase")
    assert "softmax [float32 backward]: regressed (mismatch)" in {case.get("name") for case in cases}
    assert main([*words, "--fail-on", "regressed", "-f", "csv"]) == 1
    assert "2.0 lost 1 operator: softmax" in capsys.readouterr().err


def test_shards_are_one_sweep(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    one = write(tmp_path / "s1.shadowcov", {("exp", None, None): CRASH}, operators=OPERATORS[:3])
    two = write(tmp_path / "s2.shadowcov", {("matmul", None, None): MISMATCH}, operators=OPERATORS[2:])
    sweep = joined([one, two])
    assert [o.name for o in sweep.table.operators] == sorted(OPERATORS)
    assert sum(sweep.table.totals.values()) == 3 * len(OPERATORS)
    words = ["support", "--join", "s1.shadowcov", "s2.shadowcov", "-o", "junit.xml", "-f", "txt"]
    assert main([*words, "--fail-on", "crash"]) == 1
    assert "vpu: cases that count against the target: 3 crash (--fail-on)" in capsys.readouterr().err
    suite = next(ET.parse("junit.xml").getroot().iter("testsuite"))
    assert (suite.get("name"), suite.get("failures")) == ("shadowrun.vpu", "1")
    other = write(tmp_path / "s3.shadowcov", {}, target="npu")
    with pytest.raises(UsageError, match=r"target is 'vpu' in .*, and 'npu' in "):
        joined([one, other])


def test_badges(tmp_path):
    (sweep,) = read_sweeps([write(tmp_path / "a", {("exp", None, None): FALLBACK, ("add", None, None): CRASH})])
    assert percent_full(sweep) == 66.6  # cut, not rounded
    endpoint = {"schemaVersion": 1, "label": "operators on vpu", "message": "66.6 % full", "color": "yellow"}
    assert json.loads(badge_json(sweep)) == endpoint
    texts = [
        element.text for element in ET.fromstring(badge_svg(sweep)).iter() if element.text and element.text.strip()
    ]
    assert texts == ["operators on vpu: 66.6 % full", "operators on vpu", "66.6 % full"]


@pytest.mark.parametrize(("n_failing", "colour"), [(0, "brightgreen"), (1, "green"), (2, "yellow"), (5, "red")])
def test_the_colour_of_a_badge(tmp_path, n_failing, colour):
    failing = {(operator, None, None): CRASH for operator in OPERATORS[:n_failing]}
    (sweep,) = read_sweeps([write(tmp_path / "a", failing)])
    assert json.loads(badge_json(sweep))["color"] == colour


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--badge", "x.png"], "use a file that ends in .svg or .json"),
        (["--write", "x:y"], "use LIST:FILE, with a list of opinfo, backend-yaml, accuracy"),
        (["--write", "opinfo"], "use LIST:FILE"),
        (["--write", "accuracy:x.csv"], "--write takes one sweep, and there are 3 files"),
        (["--fail-on", "regressed"], "it needs --diff or --trend"),
        (["--trend", "--fail-on", "crash"], "with --diff and --trend, use regressed"),
        (["--diff"], "--diff compares two coverage files, not 3"),
    ],
)
def test_what_is_refused(releases, capsys, words, says):
    assert main(["support", *map(str, releases), *words]) == 2
    assert says in capsys.readouterr().err
