"""Steps of optimizers as programs."""

import torch

from shadowrun.studies.zoo.graph import Runner
from shadowrun.studies.zoo.input_values import make_inputs
from shadowrun.studies.zoo.sources import modules, optimizers


def test_steps_of_optimizers_are_programs_with_lists_and_without():
    found = optimizers.collect(lambda name: name in ("optim.AdamW", "optim.SGD"), lambda *_: None)
    named = {p.name: p.graph for p in found.programs}
    assert len(named) == 18
    assert {s.name: s.n_in - s.n_out for s in found.stages} == {"captured": 0, "runs on generated values": 0}
    lists, single = named["optim.AdamW foreach=True"], named["optim.AdamW foreach=False"]
    assert "aten::_foreach_addcdiv_.ScalarList" in {n.name for n in lists.nodes}
    assert not any("_foreach" in n.name for n in single.nodes)
    # Both compute the same.
    for a, b in zip(*(Runner(g)(make_inputs(g.inputs)) for g in (lists, single)), strict=True):
        torch.testing.assert_close(a, b)


def test_layers_of_transformers_without_gradients():
    found = modules.collect(lambda name: name == "nn.TransformerEncoderLayer", lambda *_: None)
    fused = {p.name: {n.name for n in p.graph.nodes} for p in found.programs if "without" in p.name}
    assert any("aten::_transformer_encoder_layer_fwd" in names for names in fused.values())
