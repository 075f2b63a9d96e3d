import json

import pytest

pytest.importorskip("transformers")

from shadowrun.studies.isolation.pool import FailureKind, WorkerFailure
from shadowrun.studies.isolation.worker_progress import Step
from shadowrun.studies.zoo.graph import Runner, from_json
from shadowrun.studies.zoo.input_values import make_inputs
from shadowrun.studies.zoo.sources import architectures
from shadowrun.studies.zoo.sources.scaled_models import VOCABULARY, scaled
from shadowrun.studies.zoo.sources.source import Collected

pytestmark = pytest.mark.filterwarnings("ignore")


class Channel:
    """Keeps what a worker sends, as JSON gives it."""

    def __init__(self):
        self.sent = []

    def send(self, line):
        self.sent.append(json.loads(json.dumps(line)))


def made(name, config, table):
    channel = Channel()
    architectures.Maker(name, channel).make(config, [{name: table}], all_heads=False)
    return channel.sent


@pytest.fixture(scope="module")
def gpt2():
    return made("gpt2", "GPT2Config", "GPT2LMHeadModel")


def test_an_architecture_gives_a_forward_pass_and_a_training_step(gpt2):
    graphs = {line["program"]: from_json(line["graph"]) for line in gpt2 if "graph" in line}
    assert list(graphs) == ["gpt2/GPT2LMHeadModel forward", "gpt2/GPT2LMHeadModel training-step"]
    forward, step = graphs.values()
    names = [n.name for n in step.nodes]
    assert "aten::scaled_dot_product_attention" in [n.name for n in forward.nodes]
    assert "aten::embedding_dense_backward" in names
    assert any(name.startswith("aten::_foreach_") for name in names)
    assert [line["step"] for line in gpt2 if "step" in line] == [
        "models built",
        "forward and backward",
        "optimizer step",
    ]


def test_a_training_step_trains(gpt2):
    step = from_json(
        next(line["graph"] for line in gpt2 if line.get("program", "").endswith("step") and "graph" in line)
    )
    inputs = make_inputs(step.inputs)
    runner = Runner(step)
    losses = [float(runner(inputs)[0].detach()) for _ in range(6)]  # it writes to its parameters
    assert losses[-1] < losses[0]


def test_a_forward_pass_has_gradients(gpt2):
    forward = from_json(next(line["graph"] for line in gpt2 if "graph" in line))
    inputs = [
        t.requires_grad_(i.requires_grad) for t, i in zip(make_inputs(forward.inputs), forward.inputs, strict=True)
    ]
    sum(t.sum() for t in Runner(forward)(inputs) if t.is_floating_point()).backward()
    assert all(t.grad is not None for t, i in zip(inputs, forward.inputs, strict=True) if i.role == "parameter")


def test_configurations_are_scaled_down():
    from transformers import GPT2Config, LlamaConfig, SwinConfig

    config = scaled(LlamaConfig, 0)
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (2, 32, VOCABULARY)
    assert config.pad_token_id < VOCABULARY
    assert scaled(GPT2Config, 0).resid_pdrop == 0
    assert list(scaled(SwinConfig, 0).depths) == [1, 1, 1, 1]


def test_what_does_not_work_is_counted_with_its_reason():
    found = Collected("transformers")
    work = architectures._Work(["good", "bad", "crash", "none"], found, lambda *_: None, {})
    assert [work.next() for _ in range(5)] == ["good", "bad", "crash", "none", None]
    work.receive("bad", {"step": "models built", "program": "bad/Model", "why": "ValueError: no"})
    work.ended("bad")
    work.lost("crash", WorkerFailure(FailureKind.CRASH, "signal 11 (SIGSEGV)", "", Step()))
    work.ended("none")
    stages = {s.name: s for s in found.stages}
    assert stages["models built"].left_out == (("bad/Model", "ValueError: no"),)
    assert dict(stages["architectures"].left_out) == {
        "bad": "ValueError: no",
        "crash": "crash: signal 11 (SIGSEGV)",
        "none": "it has no model",
    }


def test_a_model_that_stays_large_is_left_out():
    from transformers import GPT2Config, GPT2LMHeadModel

    class Large(GPT2Config):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.n_embd = 4096

    with pytest.raises(architectures.LeftOut, match="parameters are left"):
        architectures._built(GPT2LMHeadModel, Large, 0)
