"""Classes of what `shadowrun.record` wrote."""

import pytest
import torch
from torch import nn

import shadowrun
from shadowrun.studies.classes import known_classes
from shadowrun.studies.classes.platforms import find_recordings, load
from shadowrun.studies.classes.study import Study


@pytest.fixture
def record(tmp_path):
    """Record a small net; `noise` is added by its middle layer, as other hardware would."""

    class Noisy(nn.Module):
        def __init__(self, noise):
            super().__init__()
            self.noise = noise

        def forward(self, x):
            return torch.full_like(x, 1 + self.noise) * x

    def record(name, noise=0.0, scale=1.0):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 16), Noisy(noise), nn.Linear(16, 4))
        x = torch.rand(2, 16) * scale
        with shadowrun.record(tmp_path / name) as run, torch.no_grad():
            for _ in range(2):
                net(x)
                run.step()
        return tmp_path / name

    return record


def test_runs_of_one_program(record, tmp_path):
    for name, noise in (("a", 0), ("b", 0), ("c", 2**-20)):
        record(f"{name}.shadowrec", noise)
    found = Study.from_platforms(load(find_recordings([tmp_path])))
    assert [o.classes.output.key.step for o in found.outputs] == [0, 1]
    assert [[m.text for m in o.classes.members] for o in found.outputs] == [["A", "A", "B"]] * 2
    assert not found.input_disagreements
    assert not found.are_different_programs
    first = next(c for c in found.changes if c.n_added)
    assert (first.key.module, first.key.op) == ("Sequential.1", "aten::full_like")
    assert "forward" in first.site
    addmm = next(c for c in found.changes if c.key.op == "aten::addmm" and c.key.module == "Sequential.2")
    assert (addmm.n_before, addmm.n_classes, addmm.n_added) == (2, 2, 0)
    assert "aten::mul.Tensor" in {key.op for key in addmm.parents}


def test_other_inputs_are_no_matter_of_hardware(record, tmp_path):
    record("a.shadowrec")
    record("b.shadowrec", scale=2.0)
    found = Study.from_platforms(load(find_recordings([tmp_path])))
    assert any(name.startswith("input:") for name in found.input_disagreements)


def test_a_known_result_passes_and_another_does_not(record, tmp_path):
    file = tmp_path / "known_classes.toml"
    known_classes.write_known(file, known_classes.classes_to_know(load([record("a.shadowrec")])))
    assert known_classes.check(record("b.shadowrec"), file).known
    with pytest.raises(AssertionError, match=r"the nearest is .* bits agree"):
        known_classes.check(record("c.shadowrec", noise=2**-20), file)


def test_the_number_of_a_tensor_can_be_a_known_result(tmp_path):
    def record(name, value):
        x = torch.full((1,), value)
        with shadowrun.record(tmp_path / name):
            (x + 1).item()
        return tmp_path / name

    file = tmp_path / "known_classes.toml"
    known_classes.write_known(file, known_classes.classes_to_know(load([record("a.shadowrec", 1.0)])))
    # It is a float64, and a view of a float32, whose ladder it has.
    assert known_classes.check(record("b.shadowrec", 1.0), file).known
    with pytest.raises(AssertionError, match=r"22 of 23 bits agree"):
        known_classes.check(record("c.shadowrec", 1 + 2**-22), file)
