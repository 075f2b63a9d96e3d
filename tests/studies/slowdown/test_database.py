"""Operators of torch's own database, timed: which inputs they get, and what is made of the figures."""

import json
from pathlib import Path

import pytest
import torch

from shadowrun import UsageError
from shadowrun.cli.main import main
from shadowrun.platforms import resolve
from shadowrun.report.document import render
from shadowrun.studies.slowdown.calls import entries, names_of
from shadowrun.studies.slowdown.table import Slowdown, slowdown_document
from shadowrun.studies.slowdown.timing import measure
from tests.studies.slowdown.test_slowdown import timed


def one(name, dtype="float32"):
    (entry,) = entries([name], dtype, 0)
    return entry


def test_names():
    assert {"cosh", "acosh"} <= set(names_of(["*cosh"], "float32")) < set(names_of([], "float32"))
    with pytest.raises(UsageError, match="no_such_operator in float32"):
        names_of(["no_such_operator"], "float32")


@pytest.mark.parametrize("name", ["exp", "add", "sum", "amax", "maximum", "special.legendre_polynomial_p"])
def test_element_wise_operators_and_reductions_get_a_million_elements(name):
    x = one(name).sample.input
    assert x.numel() == 1 << 20
    out = getattr(torch.special, name.removeprefix("special."), None) or getattr(torch, name)
    assert out(*(one(name).sample.input, *one(name).sample.args), **one(name).sample.kwargs).isfinite().any()


def test_a_domain_of_its_own_keeps_the_samples_of_the_database():
    """Of numbers between 0 and 2 the arc sine knows half, of those above 1 the arc hyperbolic cosine the others."""
    for name in ("asin", "acosh", "log"):
        sample = one(name).sample
        assert getattr(torch, name)(sample.input).isfinite().double().mean() >= 0.5


def test_all_others_get_the_largest_of_their_samples():
    from shadowrun.studies.sweep import opinfo

    samples = opinfo.samples("nn.functional.conv2d", "float32", 0, None, grad=False)
    sizes = [sum(t.numel() for t in (s.input, *s.args) if isinstance(t, torch.Tensor)) for s in samples]
    chosen = one("nn.functional.conv2d").sample
    assert sum(t.numel() for t in (chosen.input, *chosen.args) if isinstance(t, torch.Tensor)) == max(sizes)


def test_the_same_call_for_the_same_seed():
    first, second = (one("nn.functional.linear").sample for _ in range(2))
    assert torch.equal(first.input, second.input)


def test_an_operator_is_timed_on_both(clean_sim):
    m = measure(one("cumsum"), resolve("sim"), resolve("cpu"), rounds=3)
    assert (m.failed, m.call.op, m.call.n) == ("", "cumsum", 1)
    assert "f32[" in m.call.inputs
    for spread in (m.ref_us, m.target_us, m.ratio):
        assert 0 < spread.lower <= spread.median <= spread.upper
    with clean_sim.flaws("missing-cumsum"):
        assert measure(one("cumsum"), resolve("sim"), resolve("cpu"), rounds=3).on_target


def test_the_slowest_come_first_and_there_is_no_step():
    measured = [timed("a", 1, 1000, 2000), timed("b", 1, 1, 30), timed("c", 1, 10, 5)]
    found = Slowdown.from_timings(measured, 1, 10, of_program=False)
    assert [o.op for o in found.operators] == ["b", "a", "c"]
    text = render(slowdown_document(found, "x against y"), "txt")
    assert "more than 10 times slower: 1 of 3 operators (33.3 %)" in text
    assert "critical, more than 10 times: b" in text
    assert "step" not in text
    assert json.loads(render(slowdown_document(found, "x"), "json"))["step"] is None
    assert [o.op for o in Slowdown.from_timings(measured, 1, 10).operators] == ["a", "b", "c"]


def test_command(clean_sim, tmp_path, monkeypatch, capsys):
    """Without a data file, and by name; the operators of a run are called by other names."""
    monkeypatch.chdir(tmp_path)
    assert main(["slowdown", "--target", "sim", "--ops", "exp,sort,cumsum", "--rounds", "3", "-f", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {o["op"] for o in document["operators"]} == {"exp", "sort", "cumsum"}
    Path(".shadowrun").write_text("a run", encoding="utf-8")
    assert main(["slowdown", "--database", "--target", "sim", "--ops", "exp", "--rounds", "3"]) == 0
    assert "1 operators timed, 0 fail on the target" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--database"], "--target npu"),
        (["--database", "x.shadowrun", "--target", "cpu"], "use only one of them"),
        (["--database", "--target", "cpu", "--dtype", "float3"], "use float32"),
        (["--database", "--target", "cpu", "--ops", "nothing"], "nothing in float32"),
        (["--database", "--target", "cpu", "--fail-over", "2"], "needs the steps of a run"),
        (["--database", "--target", "cpu[isa=default]", "--ops", "exp"], "no functions of torch's database"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.chdir(tmp_path)
    assert main(["slowdown", *options]) == 2
    assert words in capsys.readouterr().err.replace("\n", " ")
