"""Each flaw has the effect that the catalogue claims, where it claims it, and no other."""

import time
import warnings

import pytest
import torch

from shadowrun.sim.catalogue import CATALOGUE, PRESETS
from shadowrun.sim.flaw import KernelChanges
from shadowrun.types import Cause, Status

RAISING = [f for f in CATALOGUE.values() if f.statuses[0] in ("unsupported", "error")]
FALLING_BACK = [f for f in CATALOGUE.values() if f.statuses == ("fallback",)]
RANDOM = {"index-put-random-order"}
CHANGING = [f for f in CATALOGUE.values() if f not in RAISING and f not in FALLING_BACK and f.kind != "speed"]


def ids(flaw):
    return flaw.name


@pytest.mark.parametrize("flaw", CHANGING, ids=ids)
def test_a_changing_flaw_shows_first_on_its_operators(record, flaw):
    clean = record(flaw)
    for _ in range(5 if flaw.name in RANDOM else 1):
        flawed = record(flaw, flaw.name)
        assert [name for name, _ in flawed] == [name for name, _ in clean]
        different = [name for (name, a), (_, b) in zip(clean, flawed, strict=True) if a != b]
        if different:
            break
    assert different, "no effect"
    if flaw.kind == "memory":  # its values are right: what reads that memory later shows it
        names = [name for name, _ in clean]
        assert set(names[: names.index(different[0])]) & set(flaw.operators) or different[0] in flaw.operators
    else:
        assert different[0] in flaw.operators
    assert record(flaw) == clean, "the flaw stays after it was switched off"


@pytest.mark.parametrize("flaw", RAISING, ids=ids)
def test_a_raising_flaw_raises_on_its_operators(sim, record, recorder, flaw):
    record(flaw)
    torch.manual_seed(0)
    with sim.flaws(flaw.name), recorder, pytest.raises(Exception):  # noqa: B017
        sim.trigger(flaw.name)("sim")
    assert recorder.error is not None
    assert recorder.error[0] in flaw.operators
    record(flaw)


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        (
            "missing-cumsum",
            NotImplementedError,
            "Could not run 'aten::cumsum.out' with arguments from the 'sim' backend",
        ),
        ("missing-cummax-helper", NotImplementedError, "Could not run 'aten::_cummax_helper'"),
        ("missing-lerp", NotImplementedError, "Could not run 'aten::lerp.Scalar_out'"),
        ("missing-addcdiv", NotImplementedError, "Could not run 'aten::addcdiv.out'"),
        ("missing-max-pool-backward", NotImplementedError, "max_pool2d_with_indices_backward.grad_input'"),
        ("histc-not-implemented", NotImplementedError, "is not currently implemented for the SIM device"),
        ("kthvalue-err01007", RuntimeError, "ERR01007 OPS feature not supported"),
        ("ctc-loss-not-lowered", Exception, "Operator with name aten::_ctc_loss.* has no lowering"),
        ("group-norm-no-bf16", RuntimeError, "EZ1001.* not implemented for DT_BFLOAT16"),
        ("softplus-no-half", NotImplementedError, "\"softplus_sim\" not implemented for 'Half'"),
        ("no-float64", TypeError, "framework doesn't support float64"),
        ("fft-key-error", KeyError, "torch.complex64"),
        ("topk-device-error", RuntimeError, "NPU function error.* 561103"),
    ],
)
def test_messages_of_raising_flaws(sim, name, kind, text):
    with sim.flaws(name), pytest.raises(kind, match=text):
        sim.trigger(name)("sim")


@pytest.fixture
def to_cpu_calls():
    """Calls of `aten::_to_cpu`, seen by a hook on the device's key as shadowrun sets it."""
    calls = []
    library = torch.library.Library("aten", "IMPL")

    def hook(tensors):
        calls.append(len(tensors))
        return [t.cpu() for t in tensors]

    library.impl("_to_cpu", hook, "PrivateUse1")
    yield calls
    library._destroy()


@pytest.mark.parametrize("flaw", FALLING_BACK, ids=ids)
def test_a_fallback_is_seen_by_the_hook_and_keeps_the_values(record, flaw, to_cpu_calls, capfd):
    clean = record(flaw)
    assert not to_cpu_calls
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flawed = record(flaw, flaw.name)
    assert flawed == clean
    assert to_cpu_calls
    written = capfd.readouterr().err
    assert bool(caught) == (flaw.name == "vector-norm-falls-back")
    on_stderr = flaw.name in ("isin-falls-back", "encoder-layer-falls-back")
    assert ("CAUTION: The operator" in written) == on_stderr
    assert written.count("CAUTION") <= 1


def test_the_stderr_warning_comes_once_per_activation(sim, capfd):
    with sim.flaws("isin-falls-back"):
        sim.trigger("isin-falls-back")("sim")
        sim.trigger("isin-falls-back")("sim")
    assert capfd.readouterr().err.count("CAUTION") == 1


def test_slow_operator_is_slow_and_right(sim, record):
    flaw = CATALOGUE["slow-max-pool"]
    assert record(flaw) == record(flaw, flaw.name)
    with sim.flaws(flaw.name):
        start = time.perf_counter()
        sim.trigger(flaw.name)("sim")
        assert time.perf_counter() - start > 0.005


def test_rounding_flaws_stay_within_rounding(sim):
    x = torch.randn(10_000)
    with sim.flaws(*PRESETS["rounding"]):
        assert torch.allclose(x.to("sim").sum().cpu(), x.double().sum().float(), atol=1e-3)
        torch.testing.assert_close(x.to("sim").tanh().cpu(), x.tanh(), rtol=2.4e-7, atol=0)


def test_a_rounding_flaw_keeps_the_sign_of_zero(sim):
    with sim.flaws("tanh-one-ulp-off"):
        for value in (0.0, -0.0):
            x = torch.full((3,), value)
            assert torch.equal(x.to("sim").tanh().cpu().signbit(), x.signbit())


@pytest.mark.parametrize("flaw", CATALOGUE.values(), ids=ids)
def test_catalogue_entries_are_well_formed(sim, flaw):
    from shadowrun.sim.device import overload

    for name in flaw.operators:
        assert overload(name).name() == name
    assert set(flaw.statuses) <= set(Status)
    assert flaw.cause is None or isinstance(flaw.cause, Cause)
    assert flaw.issue.startswith("none: ") or "#" in flaw.issue
    flaw.fault(changes := KernelChanges())
    assert {name for name in changes.replaced if name.partition(".")[0].endswith("_")} <= set(flaw.operators)
    sim.trigger(flaw.name)("cpu")


def test_presets_name_flaws(sim):
    assert {name for names in PRESETS.values() for name in names} <= set(CATALOGUE)
    assert PRESETS["clean"] == ()
    for name in PRESETS:
        sim.enable(preset=name)
        assert sim.active() == PRESETS[name]
    sim.enable()


def test_flaws_on_one_operator_add_up(sim):
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    with sim.flaws("matmul-in-bf16", "matmul-in-tf32"):
        both = (a.to("sim") @ b.to("sim")).cpu()
    from shadowrun.sim.catalogue.precision import _to_tf32

    assert torch.equal(both, _to_tf32(a).bfloat16().float() @ _to_tf32(b).bfloat16().float())


def test_a_flaw_that_loses_duplicates_keeps_the_last_on_any_number_of_threads(sim):
    rows, values, n_threads = torch.arange(90) % 12, torch.randn(90, 64), torch.get_num_threads()
    last = values[78:].roll(78 % 12, 0)
    with sim.flaws("index-put-loses-duplicates"):
        for _ in range(50):
            zeros = torch.zeros(12, 64).to("sim")
            put = zeros.index_put((rows.to("sim"),), values.to("sim"), accumulate=True)
            assert torch.equal(put.cpu(), last)
    assert torch.get_num_threads() == n_threads
