"""Faults planted into a compiler, one at a time, forward and backward: each is found and its nodes named exactly."""

import time
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from shadowrun import Status
from shadowrun.compiled.backend import CheckedBackend, Region
from shadowrun.compiled.fault_location import TOGETHER, WITHIN, localise
from tests.compiled import models, planted

RIGHT = planted.compiler()


@pytest.fixture(scope="module")
def regions():
    """Graphs of a model, forward and backward, each with the inputs it was called with."""
    known = {}

    def of(name):
        if name not in known:
            model, x = models.make(name)
            checked = CheckedBackend(RIGHT)
            torch.compile(model, backend=checked, fullgraph=True)(x).square().sum().backward()
            assert [r.name for r in checked.regions] == ["graph 0 forward", "graph 0 backward"]
            assert all(r.worst.verdict.status is Status.MATCH and r.error is None for r in checked.regions)
            known[name] = {r.name.split()[-1]: r for r in checked.regions}
        return known[name]

    yield of
    torch._dynamo.reset()


def check(region, compiler):
    """The same region, compiled by another compiler."""
    again = Region(region.name, region.graph)
    CheckedBackend(compiler).check(again, region.worst.snapshot.fresh())
    assert again.error is None
    return again


def line_of(culprit):
    """The user's line that a culprit names."""
    file, number = culprit.site.split(" in ")[0].rsplit(":", 1)
    assert file == models.__file__
    return Path(file).read_text(encoding="utf-8").splitlines()[int(number) - 1]


@pytest.mark.parametrize("name", planted.FAULTS)
def test_a_planted_fault_is_named_exactly(regions, name):
    fault = planted.FAULTS[name]
    compiler = planted.compiler(fault)
    region = check(regions(fault.model)[fault.phase], compiler)
    assert region.worst.verdict.status is Status.MISMATCH
    found = localise(region, region.worst, compiler)
    assert found.complete
    assert [c.node for c in found.culprits] == planted.named(region.graph.module.graph, fault.op)
    for culprit in found.culprits:
        assert culprit.op == str(fault.op)
        assert fault.line in line_of(culprit)
    assert sorted({c.module for c in found.culprits}) == sorted(fault.module)


@pytest.mark.parametrize("name", planted.FAULTS)
def test_the_other_phase_is_not_blamed(regions, name):
    fault = planted.FAULTS[name]
    other = "backward" if fault.phase == "forward" else "forward"
    region = regions(fault.model)[other]
    if not planted.named(region.graph.module.graph, fault.op):
        assert check(region, planted.compiler(fault)).worst.verdict.status is Status.MATCH


def test_several_faults_at_once_are_all_named(regions):
    faults = [planted.FAULTS[n] for n in ("gelu by tanh", "another epsilon in layer norm")]
    compiler = planted.compiler(*faults)
    region = check(regions("transformer")["forward"], compiler)
    found = localise(region, region.worst, compiler)
    graph = region.graph.module.graph
    assert sorted(c.node for c in found.culprits) == sorted(n for f in faults for n in planted.named(graph, f.op))
    assert found.n_compiled == 1


def test_a_fault_that_needs_its_neighbours_is_found_by_bisection(regions):
    compiler = aot_autograd(fw_compiler=planted.fusing)
    region = check(regions("gated")["forward"], compiler)
    assert region.worst.verdict.status is Status.MISMATCH
    told = []
    found = localise(region, region.worst, compiler, on_progress=lambda what, done, of: told.append((what, done, of)))
    (culprit,) = found.culprits
    assert culprit.op == "aten.add.Tensor"
    assert culprit.how in (WITHIN, TOGETHER)
    assert "self.scale + 0.25" in line_of(culprit)
    assert found.n_compiled == len(told)
    assert all(done < of for _, done, of in told)


def test_out_of_time_the_best_answer_so_far_is_given(regions):
    fault = planted.FAULTS["tanh a little too small"]
    compiler = planted.compiler(fault)
    region = check(regions("gated")["forward"], compiler)
    found = localise(region, region.worst, compiler, until=time.perf_counter())
    assert not found.complete
    assert found.n_compiled == 0
    assert "exp" in found.note
