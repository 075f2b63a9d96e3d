"""The pictures of the HTML report: their series from the data file, their marks, and what they leave out."""

from __future__ import annotations

import math
import re
from collections import Counter
from types import SimpleNamespace

import pytest

from shadowrun import report
from shadowrun.analysis.charts import ChartsReader
from shadowrun.report.formats.html import MAX_BYTES
from shadowrun.report.run_charts import _Log, histogram
from shadowrun.run import Run
from shadowrun.store import DataFile
from shadowrun.types import Cause, Phase, RunInfo, Status, TensorDiff, TensorMeta, Verdict

WRONG, GOOD = Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "scaled by 2"), Verdict(Status.MATCH)
LACKS = Verdict(Status.UNSUPPORTED, Cause.MISSING_OPERATOR, "no kernel")
META = TensorMeta("f32", (4,))
INFO = RunInfo("npu", "cpu", wall_s=10.0, own_s=6.0)


def run_of(calls, steps=(), info=INFO):
    """A run of calls (module, phase, verdict, max_abs, drift or None, step); each takes 1 s and 2 s."""
    data = DataFile.create(None, info)
    for seq, (module, phase, verdict, max_abs, drift, step) in enumerate(calls):
        context = data.context_id("aten::exp", "f32[4]", ("f32",), "[4]", module, Phase(phase), "", "npu:0")
        if max_abs:
            wrong = 4 if verdict is WRONG else 0
            data.add_diffs(
                seq,
                [TensorDiff("output 0", META, META, 4, 4, wrong, max_abs=max_abs, max_ulp=9, excess_actual=max_abs)],
            )
        drifts = (-1.0 if drift is None else drift,) * 2
        data.add((seq, step, context, data.verdict_id(verdict), 1e6, 2e6, *drifts))
    for step, wall_s in enumerate(steps):
        data.add_step(step, float(step), wall_s)
    data.close()
    return Run(data)


CALLS = [
    ("Net.a", "forward", GOOD, 0, 0.0, 0),
    ("Net.a", "forward", GOOD, 1e-7, 1e-7, 0),
    ("Net.b.0", "forward", WRONG, 0.5, 0.5, 0),
    ("Net.b.0", "backward", LACKS, 0, None, 0),
    ("Net.a", "forward", WRONG, math.nan, 2.0, 1),
    ("", "optimizer", GOOD, 0, 0.25, 1),
]


def test_the_graph_is_the_step_of_the_first_divergence():
    graph = (
        run_of([("Net", "forward", GOOD, 0, None, 0)] * 3 + [(*call[:5], 1 + call[5]) for call in CALLS]).charts().graph
    )
    assert (graph.step, graph.n_calls, graph.first) == (1, 4, 5)
    assert [(p.place, p.status.value, p.isolated, p.accumulated) for p in graph.points] == [
        (0, "match", 0.0, 0.0), (1, "match", 1e-7, 1e-7), (2, "mismatch", 0.5, 0.5), (3, "unsupported", 0.0, -1.0),
    ]  # fmt: skip


def test_a_long_step_keeps_its_first_divergence_and_its_failures():
    calls = [("Net", "forward", GOOD, 1e-6, None, 0)] * 5000
    calls[3333] = ("Net", "forward", WRONG, 1e-9, None, 0)
    calls[4444] = ("Net", "forward", LACKS, 0, None, 0)
    graph = run_of(calls).charts().graph
    assert len(graph.points) <= 400
    assert sum(p.n_calls for p in graph.points) == graph.n_calls == 5000
    assert [p.place for p in graph.points if p.status is not Status.MATCH] == [3333, 4444]
    assert graph.first == 3333


def test_errors_by_module_and_step():
    heat = run_of(CALLS).charts().heat
    assert heat.is_accumulated
    assert heat.modules == ("Net.a", "Net.b.0")
    assert heat.steps == ((0, 0), (1, 1))
    cells = {key: (cell.error, cell.n_failed, cell.n_calls) for key, cell in heat.cells.items()}
    assert cells == {(0, 0): (1e-7, 0, 2), (1, 0): (0.5, 1 + 1, 2), (0, 1): (2.0, 1, 1)}
    isolated = run_of([(*call[:4], None, call[5]) for call in CALLS]).charts().heat
    assert not isolated.is_accumulated
    assert math.isnan(isolated.cells[0, 1].error)


def test_modules_are_not_compared_with_each_other():
    """A file of a hundred thousand modules would take billions of comparisons."""
    compared = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    names = [Name(f"Net.{n}") for n in range(500)]
    series = ChartsReader(DataFile.create(None, INFO), None)
    series.contexts = {n: SimpleNamespace(module=name) for n, name in enumerate(names)}
    series._errors = {(name, 0): 1.0 for name in names[1:]}
    assert series._heat_map().modules == tuple(names[1:])
    assert compared < 5000


def test_columns_are_of_several_steps_in_a_long_run():
    heat = run_of([("Net", "forward", GOOD, 1.0, None, step) for step in range(1000)]).charts().heat
    assert len(heat.steps) == 40
    assert (heat.steps[0], heat.steps[-1]) == ((0, 24), (975, 999))
    assert {cell.n_calls for cell in heat.cells.values()} == {25}


def test_modules_contain_their_children():
    outside, net = sorted(run_of(CALLS).charts().modules, key=lambda m: m.path)
    assert (outside.path, outside.n_calls, outside.n_wrong) == ("", 1, 0)
    assert (net.path, net.n_calls, net.n_wrong, net.target_us) == ("Net", 5, 8, 10e6)
    assert net.statuses == {Status.MATCH: 2, Status.MISMATCH: 2, Status.UNSUPPORTED: 1}
    assert list(net.children) == ["Net.a", "Net.b"]
    assert list(net.children["Net.b"].children) == ["Net.b.0"]


def test_times_by_step():
    charts = run_of(CALLS, steps=(9.0, 7.0)).charts()
    assert [(t.first, t.wall_s, t.ref_s, t.target_s) for t in charts.times] == [(0, 9.0, 4.0, 8.0), (1, 7.0, 2.0, 4.0)]
    assert (charts.ref_s, charts.target_s) == (6.0, 12.0)


def figures(run):
    text = report.render(run, "html").partition('<section id="pictures">')[2].partition("</section>")[0]
    return dict(re.findall(r"<h3>(.*?)</h3>(.*?)</figure>", text, re.DOTALL))


def test_each_picture_says_what_it_shows():
    found = figures(run_of(CALLS, steps=(9.0, 7.0)))
    assert list(found) == [
        "Error along the graph, step 0", "Errors by module and step", "Modules", "Where the time went",
        "Steps along the run",
    ]  # fmt: skip
    for title, body in found.items():
        assert "<figcaption" in body, title
        assert title == "Modules" or ("<title>" in body and "<desc>" in body and 'role="img"' in body), title
    graph = found["Error along the graph, step 0"]
    assert "first divergence: aten::exp, call 2 of the step" in graph
    assert "number of the call within the step, in call order" in graph
    assert "call 2, aten::exp, Net.b.0, forward: mismatch, isolated 0.5, accumulated 0.5" in graph
    assert "was not recorded" not in graph
    assert "greatest error 0.5; 2 of 2 calls failed" in found["Errors by module and step"]
    assert "67 %" in found["Where the time went"]


def test_what_the_file_lacks_is_left_out():
    assert figures(run_of([])) == {}
    one = figures(run_of([("", "forward", GOOD, 0, None, 0)] * 3, info=RunInfo("npu", "cpu")))
    assert list(one) == ["Error along the graph, step 0"]
    assert "The accumulated error was not recorded" in one["Error along the graph, step 0"]


@pytest.mark.parametrize(
    ("bins", "said"), [({4: 9}, ""), ({1: 2, 3: 2}, ""), ({1: 5, 3: 2}, "7 calls of this finding")]
)
def test_histograms_are_of_several_calls_that_differ(bins, said):
    found = histogram(Counter(bins), is_excess=True)
    assert bool(found) == bool(said)
    assert said in "".join(figure.caption for figure in found)


def test_the_excess_of_a_finding_s_calls():
    run = run_of([("Net", "forward", WRONG, float(2**n), None, 0) for n in range(8)])
    assert sum(run.charts().excess.values(), Counter()) == {n + 1: 1 for n in range(8)}
    assert "8 calls of this finding by their greatest error, in rounding errors of the operator" in report.render(
        run, "html"
    )


def test_a_run_of_many_modules_steps_and_wild_figures_is_bounded():
    wild = [math.inf, math.nan, 5e-324, 1e308, 1e-30, 0]
    calls = [
        (f"{'.'.join(['x' * (n % 7)] * (1 + n % 90))}{n}", "backward", WRONG, wild[n % 6], wild[-n % 6], n * 10**6)
        for n in range(3000)
    ]  # fmt: skip
    text = report.render(run_of(calls, steps=(math.inf, math.nan, 1e300)), "html")
    assert len(text.encode()) <= MAX_BYTES
    assert "nan," not in re.sub(r"<title>.*?</title>", "", text)
    assert 'x="nan' not in text


def test_the_greatest_numbers_have_an_axis():
    axis = _Log([1e308, 1.7e308], 0.0, 100.0)
    assert "1e309" in "".join(axis.ticks(0.0, 10.0))
