import torch

from shadowrun.studies.zoo.graph import Runner
from shadowrun.studies.zoo.input_values import make_inputs
from shadowrun.studies.zoo.sources import modules


def test_modules_of_torchs_database_are_programs():
    before = torch.get_rng_state()
    found = modules.collect(lambda name: name in ("nn.Linear", "nn.GroupNorm", "nn.LazyConv1d"), lambda *_: None)
    assert torch.equal(before, torch.get_rng_state())
    assert {p.name.split()[0] for p in found.programs} == {"nn.Linear", "nn.GroupNorm", "nn.LazyConv1d"}
    for program in found.programs:
        assert all(torch.isfinite(t).all() for t in Runner(program.graph)(make_inputs(program.graph.inputs)))
    stages = {s.name: s for s in found.stages}
    assert stages["runs on generated values"].n_out == len(found.programs)
    for stage in found.stages:
        assert stage.n_in == stage.n_out + len(stage.left_out)
