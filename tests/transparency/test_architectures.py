"""One training step of 25 published architectures, and generation with a cache, with and without shadowrun."""

import contextlib
import functools

import pytest
import torch

import shadowrun
from shadowrun import Status
from tests.models import assert_same
from tests.transparency.architectures import ALL, DECODERS, build

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

# A mixture of experts counts int32 tokens by histogram, which the CPU's kernels, and so `sim`, do not have.
NOT_ON_SIM = ("mixtral",)


def step(name, device="cpu", run=None):
    torch.manual_seed(0)
    model, batch = build(name)
    model = model.train().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {k: v.to(device) for k, v in batch.items()}
    with run or contextlib.nullcontext():
        output = model(**batch)
        loss = getattr(output, "loss", None)
        loss = output.last_hidden_state.square().mean() if loss is None else loss
        loss.backward()
        optimizer.step()
    state = {k: v.cpu() for k, v in model.state_dict().items()}
    return {**state, "loss": loss.detach().cpu(), "rng": torch.get_rng_state()}


@functools.cache
def plain_step(name, device="cpu"):
    return step(name, device)


def assert_clean(run):
    assert [(f.kind, f.op, f.evidence) for f in run.findings() if f.kind != "slow"] == []
    assert [(n.op, n.evidence) for n in run.internal_failures()] == []
    assert run.counts()[Status.MATCH] > 100


# The third only switches off other kernels of the same CPU: for most architectures in the slow tests.
TARGETS = [
    *((target, name) for target in ("cpu[threads=1]", "sim") for name in ALL),
    *(pytest.param("cpu[mkldnn=off]", name, marks=[pytest.mark.slow] if i % 5 else []) for i, name in enumerate(ALL)),
]


@pytest.mark.parametrize(("target", "name"), TARGETS)
def test_a_training_step_on_the_reference(clean_sim, target, name):
    run = shadowrun.compare(target, ref="cpu")
    assert_same(step(name, run=run), plain_step(name))
    assert_clean(run)


@pytest.mark.parametrize("name", [n for n in ALL if n not in NOT_ON_SIM])
def test_a_training_step_on_the_target(clean_sim, name):
    run = shadowrun.compare("sim")
    assert_same(step(name, "sim", run=run), plain_step(name, "sim"))
    assert_clean(run)


@pytest.mark.parametrize("name", DECODERS)
def test_generation_with_a_cache(clean_sim, name):
    def generate(run=None):
        torch.manual_seed(0)
        model, batch = build(name)
        model = model.eval()
        with torch.no_grad(), run or contextlib.nullcontext():
            tokens = model.generate(batch["input_ids"], max_new_tokens=5, do_sample=True, use_cache=True)
        return {"tokens": tokens, "rng": torch.get_rng_state()}

    run = shadowrun.compare("cpu[threads=1]")
    assert_same(generate(run), generate())
    assert_clean(run)
