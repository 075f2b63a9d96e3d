import pytest
import torch
from torch import nn

from shadowrun.studies.zoo import subgraphs
from shadowrun.studies.zoo.capture import capture_generated
from shadowrun.studies.zoo.graph import Runner
from shadowrun.studies.zoo.input_values import make_inputs
from shadowrun.studies.zoo.program import program_of, unique


def program(name, function, *args):
    return program_of(name, "test", capture_generated(function, *args))


@pytest.fixture(scope="module")
def found():
    torch.manual_seed(0)
    programs = [
        program("one", nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.Softmax(-1)), torch.randn(3, 4)),
        program("other", nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 2), nn.Tanh()), torch.randn(2, 6)),
        program("embedding", nn.Sequential(nn.Embedding(9, 4), nn.GELU()), torch.arange(6)),
        program("writes", lambda x, i: x.index_add_(0, i, x[:2] * 2).mul(3), torch.zeros(4, 4), torch.tensor([3, 0])),
        program("more", lambda x, i: x.index_add_(0, i, x[:2] * 3).exp(), torch.zeros(4, 4), torch.tensor([3, 0])),
    ]
    return programs, subgraphs.mine_subgraphs(programs)


def test_frequent_subgraphs_are_counted(found):
    _, collected = found
    counts = {p.name: p.count for p in collected.programs}
    assert counts["addmm"] == 4
    assert counts["gelu"] == 3
    assert counts["addmm → gelu → addmm"] == 2
    assert "tanh" not in counts  # one program has it
    assert not any("_softmax" in name for name in counts)


def test_subgraphs_have_the_views_between_their_operators(found):
    _, collected = found
    (whole, other) = (p for p in collected.programs if p.name == "addmm → gelu → addmm")
    assert [n.name for n in whole.graph.nodes] == ["aten::t", "aten::addmm", "aten::gelu", "aten::t", "aten::addmm"]
    assert {p.graph.inputs[0].shape for p in (whole, other)} == {(8, 4), (6, 6)}


def test_each_runs_and_its_inputs_have_the_kind_of_values_that_were_there(found):
    _, collected = found
    assert {s.name: s for s in collected.stages}["runs on generated values"].left_out == ()
    for p in collected.programs:
        assert all(torch.isfinite(t).all() for t in Runner(p.graph)(make_inputs(p.graph.inputs)))
    (scatter,) = (p for p in collected.programs if p.name == "index_add_")
    assert [i.fill.b for i in scatter.graph.inputs if i.dtype is torch.int64] == [3.0]
    assert not scatter.graph.inputs[0].requires_grad  # it is written


def test_programs_that_they_come_from_are_named_and_none_occurs_twice(found):
    programs, collected = found
    kept, left_out = unique(collected.programs)
    assert kept == collected.programs
    assert left_out == ()
    assert all(set(p.made_from) <= {q.id for q in programs} for p in kept)


def test_operators_are_limited(found):
    programs, _ = found
    assert max(p.name.count("→") for p in subgraphs.mine_subgraphs(programs, max_operators=2).programs) == 1
    few = subgraphs.mine_subgraphs(programs, most=1)
    assert len({p.name for p in few.programs}) == 1
    steps = {s.name: s for s in few.stages}
    assert steps["the 1 most frequent"].n_in > steps["the 1 most frequent"].n_out == 1
    assert steps["the 1 most frequent"].n_in == steps["patterns that 2 programs have"].n_out


def test_memory_is_bounded_and_what_most_programs_have_stays(found, monkeypatch):
    programs, collected = found
    monkeypatch.setattr(subgraphs, "_MAX_COUNTED", 12)
    bounded = subgraphs.mine_subgraphs(programs)
    assert {"addmm", "gelu"} <= {p.name for p in bounded.programs}
    n_counted = [{s.name: s.n_in for s in c.stages}["patterns that 2 programs have"] for c in (bounded, collected)]
    assert n_counted[0] <= 12 < n_counted[1]
    counts = {p.name: p.count for p in collected.programs}
    assert all(p.count <= counts[p.name] for p in bounded.programs)


def test_the_values_of_a_program_are_bounded(found, monkeypatch):
    programs, collected = found
    monkeypatch.setattr(subgraphs, "_MAX_BYTES", 500)
    bounded = subgraphs.mine_subgraphs(programs)
    steps = {s.name: s for s in bounded.stages}
    assert steps["program looked at"].n_out == len(programs)
    assert [name for name, _ in steps["program run"].left_out] == ["one"]
    assert {reason for _, reason in steps["program run"].left_out} == {"more than 0 MiB of values"}
    # What is left is counted as before, and cut out of the other programs.
    counts = {p.name: p.count for p in collected.programs}
    assert bounded.programs
    assert all(counts[p.name] == p.count and programs[0].id not in p.made_from for p in bounded.programs)
