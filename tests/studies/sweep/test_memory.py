"""The part `memory` of a sweep: side effects of operators on memory."""

import pytest
import torch

from shadowrun import sim
from shadowrun.studies.sweep import case_programs, opinfo
from shadowrun.studies.sweep.cases import PARTS, Kind, Part
from shadowrun.studies.sweep.rebuild_case import Sampler
from shadowrun.studies.sweep.run_case import CaseRunner
from shadowrun.types import Cause


@pytest.fixture(scope="module", autouse=True)
def enabled():
    sim.enable("sim")


def found(name, target="sim", dtype="float32", n=3):
    trial, info = CaseRunner(target, "cpu", 60.0, lambda: None), opinfo.database()[name]
    seen = []
    for number, sample in Sampler(name, dtype, 0, n).samples(Part.MEMORY):
        seen += trial.run(Part.MEMORY, case_programs.program(info, Part.MEMORY, number, sample)) or []
    return {(f.kind, f.op, f.cause, f.explanation) for f in seen}


def test_it_is_a_part_of_every_sweep():
    assert Part.MEMORY in PARTS


@pytest.mark.parametrize(
    ("flaw", "name", "op", "explanation"),
    [
        ("layer-norm-centres-its-input", "nn.functional.layer_norm", "aten::native_layer_norm", "input overwritten"),
        ("mul-writes-past-the-view", "mul", "aten::mul_.Tensor", "memory outside the argument written"),
        ("clone-aliases", "clone", "aten::clone", "result shares memory with an input"),
    ],
)
def test_each_flaw_of_memory_is_found_by_it(flaw, name, op, explanation):
    with sim.flaws(flaw):
        assert found(name, n=8) >= {(Kind.MISMATCH, op, Cause.MEMORY_EFFECTS, explanation)}


@pytest.mark.parametrize("flaw", ["matmul-in-bf16", "missing-cumsum"])
def test_nothing_else_is_found(flaw):
    with sim.flaws(flaw):
        assert found("mm") == found("cumsum") == set()


@pytest.mark.parametrize("target", ["sim", "cpu[threads=1]"])
@pytest.mark.parametrize("name", ["batch_norm", "reshape", "dropout", "index_put", "addmm", "clone", "stft"])
def test_what_operators_usually_do_to_memory_is_no_finding(name, target):
    before = torch.get_num_threads()
    names = [n for n in opinfo.database() if n == name or n == f"nn.functional.{name}"]
    with sim.flaws():
        for n in names:
            assert found(n, target) == set()
    assert names
    assert torch.get_num_threads() == before
