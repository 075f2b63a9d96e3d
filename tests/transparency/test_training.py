"""Twenty training steps with and without shadowrun are the same to the last bit."""

import pytest

import shadowrun
from shadowrun import Status
from tests.models import assert_same, digits, tokens, train

SETUPS = {
    "self-check": ("cpu", "cpu", "cpu", {}),
    "program on the reference, one thread": ("cpu", "cpu[threads=1]", "cpu", {}),
    "both replayed": ("cpu", "cpu[threads=1]", "cpu[mkldnn=off]", {}),
    "program on the target": ("sim", "sim", "cpu", {}),
    "program on the reference": ("cpu", "sim", "cpu", {}),
    "program on a third device": ("sim", "cpu[threads=1]", "cpu", {}),
    "drift": ("cpu", "cpu", "cpu", {"drift": True}),
    "drift on the target": ("sim", "sim", "cpu", {"drift": True}),
    "some steps": ("cpu", "cpu", "cpu", {"steps": [1, 3]}),
    "raise": ("sim", "sim", "cpu", {"on_unsupported": "raise"}),
}


@pytest.mark.parametrize("make", [digits, tokens])
@pytest.mark.parametrize("setup", SETUPS)
def test_training_is_unchanged(clean_sim, make, setup):
    device, target, ref, options = SETUPS[setup]
    plain = train(make, device)
    run = shadowrun.compare(target, ref=ref, **options)
    assert_same(train(make, device, run=run), plain)
    counts = run.counts()
    assert counts[Status.MATCH] > 100
    assert [f for f in run.findings() if f.kind != "slow"] == []
    assert counts[Status.ERROR] == 0


@pytest.mark.parametrize("make", [digits, tokens])
def test_training_with_flaws_is_unchanged_for_a_program_on_the_reference(clean_sim, make):
    plain = train(make)
    with clean_sim.flaws(*clean_sim.PRESETS["young"]):
        run = shadowrun.compare("sim")
        assert_same(train(make, run=run), plain)
    assert {f.kind for f in run.findings()} >= {"unsupported", "mismatch"}


@pytest.mark.parametrize("make", [digits, tokens])
def test_training_with_wrong_numbers_is_unchanged_for_a_program_on_the_target(clean_sim, make):
    flaws = ("matmul-in-bf16", "softmax-error", "relu-backward-leaks", "biased-running-variance")
    with clean_sim.flaws(*flaws):
        plain = train(make, "sim")
        run = shadowrun.compare("sim")
        assert_same(train(make, "sim", run=run), plain)
    assert "mismatch" in {f.kind for f in run.findings()}
