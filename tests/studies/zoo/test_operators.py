import torch

from shadowrun.studies.zoo.graph import Runner
from shadowrun.studies.zoo.input_values import make_inputs
from shadowrun.studies.zoo.sources import operators

NAMES = (
    "kthvalue",
    "nn.functional.silu",
    "nn.functional.embedding",
    "isin",
    "bernoulli",
    "item",
    "nn.functional.dropout",
)


def test_operators_of_torchs_database_are_programs_with_their_gradients():
    before = torch.get_rng_state()
    found = operators.collect(lambda name: name in NAMES, lambda *_: None)
    assert torch.equal(before, torch.get_rng_state())
    called = {p.name: [n.name for n in p.graph.nodes] for p in found.programs}
    assert called["nn.functional.silu backward 0"] == ["aten::silu", "aten::ones_like", "aten::silu_backward"]
    names = {name for calls in called.values() for name in calls}
    assert {"aten::kthvalue", "aten::embedding_dense_backward", "aten::isin.Tensor_Tensor"} <= names
    assert not any("bernoulli" in name for name in names)
    assert called["native_dropout 0.25"] == ["aten::native_dropout", "aten::zeros_like"]
    for program in found.programs:
        Runner(program.graph)(make_inputs(program.graph.inputs))
    stages = {s.name: s for s in found.stages}
    assert stages["captured"].n_in == stages["captured"].n_out + len(stages["captured"].left_out)
    left_out = {name.partition(" ")[0] for name, _ in stages["captured"].left_out}
    assert left_out <= {"item", "bernoulli", "nn.functional.dropout"}
