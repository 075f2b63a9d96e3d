"""What a run keeps of failing calls: the inputs as they were before, once for each finding, within a budget."""

import gc

import pytest
import torch

import shadowrun
from shadowrun.recording import input_capture
from shadowrun.store import captured_inputs

NAN = float("nan")


def files(path):
    return sorted(p.name for p in captured_inputs.folder_of(path).glob("*"))


def inputs(run, finding):
    name = captured_inputs.captured_calls(run._data)[finding.captured][2]
    return captured_inputs.load(run._data.tensors, name)


def maximum(*shape):
    x = torch.full(shape or (2,), NAN).to("sim")
    return torch.maximum(x, torch.zeros_like(x))


@pytest.fixture
def flawed(clean_sim):
    with clean_sim.flaws("maximum-drops-nan", "missing-cumsum", "mul-inplace-lost"):
        yield clean_sim


def test_the_first_call_of_each_finding_is_kept(flawed, tmp_path):
    file = tmp_path / "run.shadowrun"
    with shadowrun.compare("sim", file=file) as run:
        for n in (3, 2, 4):
            maximum(n)
            torch.ones(n).to("sim").cumsum(0)
    assert files(file) == ["0.pt", "1.pt"]
    found = {f.op: f for f in shadowrun.load(file).findings()}
    assert inputs(run, found["aten::maximum"]).args[0].shape == (3,)
    assert inputs(run, found["aten::cumsum"]).args[1] == 0
    number = found["aten::maximum"].number
    assert found["aten::maximum"].commands == (f"shadowrun repro {file} --finding {number}",)


def drifting(*factors):
    """A product that is wrong by another part of it in each call."""
    for factor in factors:
        x = torch.ones(8, 8)
        x[0, 0] = factor
        torch.mm(x, torch.ones(8, 8))


def test_the_worst_call_of_each_finding_is_captured_as_well_as_the_first(clean_sim, tmp_path):
    file = tmp_path / "a run.shadowrun"
    with clean_sim.flaws("matmul-in-bf16"), shadowrun.compare("sim", file=file) as run:
        drifting(1.0100, 1.0105, 1.0117, 1.0, 1.0090)
    (finding,) = shadowrun.load(file).findings()
    seqs = [record.call.seq for record in run.records(op="aten::mm", status="mismatch")]
    assert finding.captured == seqs[0]
    assert finding.worst_seq not in (seqs[0], seqs[-1])
    assert set(finding.kept) == {finding.captured, finding.worst_seq}
    assert len(files(file)) == 2, "those that were the worst for a while are deleted"
    name = captured_inputs.captured_calls(run._data)[finding.worst_seq][2]
    assert captured_inputs.load(run._data.tensors, name).args[0][0, 0] == torch.tensor(1.0117)
    assert finding.commands == (
        f"shadowrun repro '{file}' --finding 1",
        f"shadowrun repro '{file}' --call {finding.worst_seq}",
    )


def test_where_each_call_is_worse_than_the_last_not_each_is_written(clean_sim, tmp_path, monkeypatch):
    monkeypatch.setattr(input_capture, "_MAX_WORSE", 3)
    saved = []
    monkeypatch.setattr(
        captured_inputs, "save", lambda *given, save=captured_inputs.save: saved.append(1) or save(*given)
    )
    file = tmp_path / "run.shadowrun"
    with clean_sim.flaws("matmul-in-bf16"), shadowrun.compare("sim", file=file):
        drifting(*(1 + 2**-9 + 2**-13 * n for n in range(1, 16)))
    assert len(saved) <= 1 + 3 + 4
    assert len(files(file)) == 2


def test_inputs_are_those_before_the_call(flawed, tmp_path):
    file = tmp_path / "run.shadowrun"
    with shadowrun.compare("sim", file=file) as run:
        x = torch.arange(6.0).reshape(2, 3).to("sim").t()
        x.mul_(2)
    (finding,) = run.findings()
    kept = inputs(run, finding).args[0]
    assert torch.equal(kept, torch.arange(6.0).reshape(2, 3).t())
    assert kept.stride() == (1, 3)


def test_inputs_are_those_before_the_call_on_one_device(tmp_path):
    with shadowrun.compare("cpu[flush_denormal=on]", file=tmp_path / "f.shadowrun") as run:
        x = torch.full((64,), 1e-30)
        x.mul_(1e-10)
    (finding,) = run.findings()
    assert torch.equal(inputs(run, finding).args[0], torch.full((64,), 1e-30))


@pytest.mark.parametrize(("options", "kept"), [({"capture": False}, 0), ({"capture": 3000}, 1), ({"capture": 0}, 0)])
def test_the_budget(flawed, tmp_path, options, kept):
    file = tmp_path / "run.shadowrun"
    with shadowrun.compare("sim", file=file, **options):
        maximum(1000)  # larger than a quarter of any of these budgets
        maximum(2)
        torch.ones(2).to("sim").cumsum(0)
    assert len(files(file)) == kept
    if kept:
        assert file.with_name("run.shadowrun.tensors").joinpath("0.pt").stat().st_size < 3000


def test_a_run_in_memory_keeps_nothing_unless_it_is_asked_to(flawed):
    with shadowrun.compare("sim") as run:
        maximum()
    assert run.findings()[0].captured < 0
    with shadowrun.compare("sim", capture=True) as run:
        maximum()
    folder = run._data.tensors
    assert run.findings()[0].captured >= 0
    assert len(list(folder.glob("*.pt"))) == 1
    del run
    gc.collect()
    assert not folder.exists()


def test_nothing_is_kept_of_calls_that_are_right(clean_sim, tmp_path):
    file = tmp_path / "run.shadowrun"
    with shadowrun.compare("sim", file=file):
        maximum()
        torch.randn(4).to("sim").exp()
    assert files(file) == []


def test_a_full_disk_is_not_the_program_s_business(flawed, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(input_capture.captured_inputs, "save", full)
    with shadowrun.compare("sim", file=tmp_path / "run.shadowrun") as run:
        for _ in range(5):
            assert torch.equal(maximum().cpu(), torch.zeros(2))
    assert run.counts()["mismatch"] == 5
    assert run.findings()[0].captured < 0


def test_a_later_run_replaces_what_was_kept_and_an_appended_one_adds(flawed, tmp_path):
    file = tmp_path / "run.shadowrun"
    for options, expected in (({}, ["0.pt"]), ({}, ["0.pt"]), ({"append": True}, ["0.pt", "1.pt"])):
        with shadowrun.compare("sim", file=file, **options):
            maximum()
        assert files(file) == expected
    assert len(captured_inputs.captured_calls(shadowrun.load(file)._data)) == 2


def test_calls_that_wait_to_be_compared_are_kept_too(flawed, tmp_path):
    file = tmp_path / "run.shadowrun"
    with flawed.asynchronous(), shadowrun.compare("sim", file=file, asynchronous=True) as run:
        maximum(3)
        torch.ones(3).to("sim").cumsum(0)
    assert {f.op for f in run.findings() if f.captured >= 0} == {"aten::maximum", "aten::cumsum"}
