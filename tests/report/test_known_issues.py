"""Known divergences and least tolerances in all formats."""

from __future__ import annotations

import datetime as dt
import json

import pytest

from shadowrun import report
from shadowrun.analysis import MinTolerance
from shadowrun.report.formats.terminal import render_terminal
from shadowrun.report.formatting import min_tolerance_text
from shadowrun.report.run_report import run_document
from shadowrun.run import Run
from shadowrun.settings import KnownLine

REASON = "NaN where a row is masked: <ticket> | 7"


@pytest.fixture(scope="module")
def run(sample) -> Run:
    lines = (
        KnownLine("_softmax", "npu", REASON, expires=dt.date(2999, 1, 31), origin="shadowrun.toml:1"),
        KnownLine("aten::roll", "npu*", "driver 8", expires=dt.date(2020, 1, 31), origin="shadowrun.toml:7"),
        KnownLine("aten::relu_", "*", "fixed long ago", origin="shadowrun.toml:13"),
        KnownLine("aten::erfinv", "npu", "not in this run", origin="shadowrun.toml:18"),
    )
    return Run(sample.build(), lines)


EXPIRED = "aten::roll on npu"
STALE = "no longer diverges in 3 calls: delete this line (fixed long ago)."


@pytest.mark.parametrize("kind", ["txt", "md", "html"])
def test_pages(run: Run, kind: str) -> None:
    text = report.render(run, kind)
    plain = " ".join(text.split())
    assert "Known" in plain
    assert "NaN where a row is masked" in plain
    assert "<ticket>" in plain if kind == "txt" else "<ticket>" not in plain
    assert "2999-01-31" in plain
    assert "1 known mismatch not counted)" in plain
    assert EXPIRED in plain
    assert "the line expired on 2020-01-31 (driver 8)" in plain
    assert STALE in plain
    assert "erfinv" not in plain
    assert "NaN for rows of -inf" not in plain, "an excused finding stands in its own section only"


def test_narrow_terminal(run: Run) -> None:
    lines = render_terminal(run_document(run), width=80, colour=False).splitlines()
    assert max(len(line) for line in lines if not line.startswith("FAILED: ")) <= 80, "the closing line is for grep"
    start = next(i for i, line in enumerate(lines) if line.startswith("Known issues (1)"))
    assert any(line.startswith("aten::_softmax") for line in lines[start : start + 6])


def test_json(run: Run) -> None:
    document = json.loads(report.render(run, "json"))
    assert "aten::_softmax" not in {finding["op"] for finding in document["findings"]}
    (known,) = document["known"]["findings"]
    assert known["op"] == "aten::_softmax"
    assert known["known"]["expires"] == "2999-01-31"
    assert [use["state"] for use in document["known"]["lines"]] == ["matched", "expired", "stale", "not exercised"]
    assert document["known"]["lines"][0]["line"]["reason"].startswith("NaN where")
    mm = next(finding for finding in document["findings"] if finding["op"] == "aten::mm")
    assert mm["min_tolerance"]["atol"] == pytest.approx(0.0317, rel=1e-5)
    assert mm["min_tolerance"]["rtol"] == pytest.approx(0.0088, rel=1e-5)


def test_without_a_ledger_no_section(sample) -> None:
    plain = Run(sample.build())
    assert "Known" not in report.render(plain, "txt")
    assert 'id="known"' not in report.render(plain, "html")


def test_a_long_ledger_is_cut(sample) -> None:
    lines = [KnownLine("aten::relu_", "npu", f"reason {i}", origin=f"shadowrun.toml:{i}") for i in range(30)]
    text = " ".join(report.render(Run(sample.build(), lines), "txt").split())
    assert text.count("delete this line") == 8
    assert "The ledger has 22 more lines that are out of date." in text


@pytest.mark.parametrize(
    ("rtol", "atol", "text"),
    [
        (0.0012341, 5.0, "with rtol ≥ 0.00124 (atol 0) or atol ≥ 5 (rtol 0)"),
        (float("inf"), 9.985e-9, "with atol ≥ 9.99e-09 (rtol 0)"),
        (float("inf"), 9.991e-9, "with atol ≥ 1e-08 (rtol 0)"),
        (float("inf"), float("inf"), ""),
        (0.0, 0.0, "with any tolerance, 0 included"),
    ],
)
def test_tolerances_are_rounded_up(rtol: float, atol: float, text: str) -> None:
    assert min_tolerance_text(MinTolerance(rtol, atol)) == text
    assert min_tolerance_text(None) == ""
