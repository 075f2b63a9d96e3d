"""What the target answers and the reference refuses; and limits of this machine, which are no fault of the target."""

import dataclasses
import runpy

import pytest
import torch

import shadowrun
from shadowrun import Cause, Status, sim
from shadowrun.platforms.unsupported import limit_of_host
from shadowrun.sim import registered_device

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture(autouse=True, scope="module")
def enabled():
    sim.enable("sim")


def unchecked_index_select(kernels):
    kernels.replace(
        lambda kernel, x, dim, index: kernel(x, dim, index.clamp(0, x.shape[dim] - 1)), "aten::index_select"
    )


def unchecked_mm(kernels):
    kernels.replace(lambda _, a, b: a.new_zeros(a.shape[0], b.shape[1]), "aten::mm")


@pytest.fixture(params=["sim", "behind"])
def unchecked(request, monkeypatch):
    """A device on which a flaw of another name has been replaced by one that checks nothing."""
    name = "mul-inplace-lost"

    def fault(kernels):
        unchecked_index_select(kernels)
        unchecked_mm(kernels)

    changed = dataclasses.replace(sim.CATALOGUE[name], fault=fault)
    monkeypatch.setitem(registered_device.FLAWS, name, changed)
    with sim.flaws(name):
        yield {"asynchronous": None if request.param == "behind" else False}


def test_an_index_out_of_range_that_the_target_answers_is_a_finding(unchecked, tmp_path):
    x, index = torch.randn(4, 3).to("sim"), torch.tensor([1, 7]).to("sim")
    with shadowrun.compare("sim", file=tmp_path / "run.shadowrun", **unchecked) as run:
        x.index_select(0, index)
    (found,) = run.findings()
    assert (found.kind, found.op, found.cause) == ("mismatch", "aten::index_select", Cause.NO_ERROR)
    assert found.explanation == "answered where the reference raises IndexError"
    assert "index out of range" in found.evidence
    assert "Add the check" in found.next_step
    repro = run.repro(found, tmp_path / "repro")
    with pytest.raises(SystemExit) as ended:  # in this process, where the device has that fault
        runpy.run_path(str(repro.script), run_name="__main__")
    assert ended.value.code == 1


def test_shapes_that_do_not_fit_are_told_by_the_meta_kernel(unchecked):
    with shadowrun.compare("sim", **unchecked) as run:
        torch.mm(torch.randn(2, 3).to("sim"), torch.randn(4, 5).to("sim"))
    assert [(f.kind, f.op, f.cause) for f in run.findings()] == [("mismatch", "aten::mm", Cause.NO_ERROR)]


@pytest.mark.parametrize(
    "error",
    [
        NotImplementedError("Could not run 'aten::mm' with arguments from the 'CPU' backend"),
        RuntimeError("\"mm\" not implemented for 'Half'"),
        RuntimeError("this build of torch has no LAPACK"),
        MemoryError(),
    ],
)
def test_what_the_reference_lacks_is_no_finding(monkeypatch, error):
    def raises(*_, **__):
        raise error

    x = torch.randn(3, 3).to("sim")
    with shadowrun.compare("sim", asynchronous=False) as run:
        monkeypatch.setattr(run._replayer._context.ref, "run_mirrored", raises)
        x @ x
    assert run.findings() == []
    (record,) = run.records()
    assert record.verdict.status is Status.UNVERIFIED
    assert record.verdict.explanation == f"the reference cannot run it: {type(error).__name__}"


@pytest.mark.parametrize(
    "error",
    [
        RecursionError("maximum recursion depth exceeded"),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to"),
        ArithmeticError("argument 1: RecursionError: maximum recursion depth exceeded"),
    ],
)
@pytest.mark.parametrize("target", ["sim", "cpu[threads=1]"])
def test_limits_of_this_machine_are_never_findings_of_the_target(monkeypatch, error, target):
    def raises(*_, **__):
        raise error

    x = torch.randn(3, 3)
    with shadowrun.compare(target, asynchronous=False) as run:
        monkeypatch.setattr(run._replayer._context.target, "run_mirrored", raises)
        monkeypatch.setattr(run._replayer._context.target, "call", raises)
        x.exp()
    assert run.findings() == []
    (record,) = run.records()
    assert (record.verdict.status, record.verdict.explanation) == (Status.UNVERIFIED, limit_of_host(error))


def test_a_program_at_the_limit_of_recursion_passes():
    def deeper(x):
        return deeper(torch.add(x, 1)) + 1

    with shadowrun.compare("sim") as run, pytest.raises(RecursionError):
        deeper(torch.zeros(2))
    assert run.findings() == []
    assert run.counts()[Status.ERROR] == 0
