"""Bars of studies: shares by state, and figures by name."""

from __future__ import annotations

import re

import pytest

from shadowrun.report.bars import bar_chart, region_strip, stacked_bars
from shadowrun.report.svg import AMBER, GREEN, RED


def rects(figure):
    """Width and colour of each bar."""
    return [
        (float(w), c) for w, c in re.findall(r'width="([\d.]+)" height="[\d.]+" style="fill: (.*?)[;"]', figure.svg)
    ]


def test_a_bar_is_split_by_state_in_its_tone():
    (figure,) = stacked_bars(
        [("npu", {"full": 3, "none": 1, "untested": 0}), ("gpu", {"partial": 2})], "Support", "operators"
    )
    (full, good), (none, bad), (partial, warn) = rects(figure)
    assert (good, bad, warn) == (GREEN, RED, AMBER)
    assert full / none == pytest.approx(3, rel=1e-3)
    assert partial == pytest.approx(full + none, abs=0.2)
    assert figure.caption == "Share of operators, by state. npu: 3 full, 1 none; gpu: 2 partial."
    assert "npu: 3 full (75 %)" in figure.svg


def test_nothing_to_show_is_no_picture():
    assert stacked_bars([("npu", {"full": 0})], "Support", "operators") == ()
    assert stacked_bars([], "Support", "operators") == ()
    assert bar_chart([("a", 1.0, "1 s")], "Time", "time") == ()
    assert bar_chart([("a", 1.0, "1 s"), ("b", -1.0, "-")], "Time", "time") == ()


def test_the_first_bar_is_the_longest_and_the_rest_is_counted():
    (figure,) = bar_chart([(f"op{n} <b>", 100.0 - n, f"{100 - n} s") for n in range(50)], "Time", "time lost")
    widths = [width for width, _ in rects(figure)][1::2]
    assert len(widths) == 20
    assert widths == sorted(widths, reverse=True)
    assert figure.caption == "The first 20 of 50."
    assert "op0 &lt;b&gt;" in figure.svg


def test_a_strip_has_a_piece_for_each_region_as_wide_as_its_operators():
    (figure,) = region_strip([("f", [("graph 0", "ok", 30), ("graph 1", "mismatch", 10)]), ("g", [])], "Regions")
    widths = [float(w) for w in re.findall(r'<rect x="[\d.]+" y="[\d.]+" width="([\d.]+)"', figure.svg)]
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.05)
    assert "<title>graph 1: mismatch, 10 operators</title>" in figure.svg
    assert region_strip([("f", [("graph 0", "ok", 3)])], "Regions") == ()
    unknown = region_strip([("f", [("a", "ok", -1), ("b", "graph break", -1)])], "Regions")[0].svg
    assert "<title>b: graph break</title>" in unknown
