"""Exceptional values: which there are, and that each flaw of that family is found at its operator."""

import itertools
import math

import pytest
import torch

from shadowrun.sim import CATALOGUE, PRESETS
from shadowrun.studies.sweep import opinfo
from shadowrun.studies.sweep.case_programs import program
from shadowrun.studies.sweep.cases import FAILURES, Kind, Part
from shadowrun.studies.sweep.exceptional_inputs import batches, bounded, exceptional, probes, repeat_with_tail
from shadowrun.studies.sweep.run_case import CaseRunner
from shadowrun.types import Cause

pytestmark = pytest.mark.usefixtures("clean_sim")

PLAIN = (
    *(
        "mul",
        "sqrt",
        "exp",
        "eq",
        "copysign",
        "amin",
        "sum",
        "max.reduction_with_dim",
        "sort",
        "clamp",
        "baddbmm",
        "to",
    ),
    *("int", "isin", "softmax", "hypot", "nn.functional.silu"),
)
"""Operators whose kernels on the CPU agree with themselves."""


def made(name, dtype="float32"):
    return lambda: opinfo.samples(name, dtype, 0, None, grad=False)


def found(name, part=Part.PROBE, dtype="float32", target="sim"):
    """Findings of all cases of a part."""
    trial = CaseRunner(target, "cpu", 60.0, lambda: None)
    info = opinfo.database()[name]
    if part is Part.SLICE:
        samples = batches(name, dtype, made(name, dtype))
    else:
        samples = probes(name, info, dtype, made(name, dtype))
    shown = []
    for number, sample in enumerate(samples):
        shown += trial.run(part, program(info, part, number, sample)) or []
    return shown


def failures(findings):
    return [f for f in findings if f.kind in FAILURES]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_classes_are_among_the_values(dtype):
    values, info = exceptional(dtype), torch.finfo(dtype)
    bits = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
    assert len(set(bits.tolist())) == bits.numel(), "each once"
    assert len(set(bits[values.isnan()].tolist())) == 3, "quiet, negative, with payload"
    assert values[values.isinf()].tolist() == [math.inf, -math.inf]
    assert sorted(values[values == 0].signbit().tolist()) == [False, True]
    size = values[values.isfinite()].double().abs()
    assert ((size > 0) & (size < info.smallest_normal)).sum() == 4, (
        "the least and the greatest subnormal, of either sign"
    )
    for wanted in (info.max, info.smallest_normal, info.smallest_normal * info.eps, 1.0):
        assert {wanted, -wanted} <= set(values.tolist())
    # At least one value on either side of where each leaves the range.
    for function in (torch.exp, torch.square, torch.sinh):
        over = function(values[values.isfinite()].double().float() if dtype is torch.float32 else values).isinf()
        assert 0 < over.sum() < values.numel(), function
    if info.max > 2**53:
        assert {2.0**31, -(2.0**31), 2.0**53} <= set(values.double().tolist())


def test_integers_have_their_ends():
    assert {0, -1, 2**31 - 1, -(2**31)} <= set(exceptional(torch.int32).tolist())
    assert {0, 255} <= set(exceptional(torch.uint8).tolist())
    assert exceptional(torch.bool).tolist() == [True, False]
    assert not bounded(torch.float32, infinite=False, large=False).isinf().any()


def test_the_values_fill_vectors_and_leave_a_tail():
    values = exceptional(torch.float32)
    n = repeat_with_tail(values).numel()
    assert n > 2 * values.numel()
    assert n % 16


def test_two_operands_meet_in_all_pairs():
    (sample,) = probes("fmin", opinfo.database()["fmin"], "float32", made("fmin"))
    pairs = set(zip(sample.input.view(torch.int32).tolist(), sample.args[0].view(torch.int32).tolist(), strict=True))
    bits = exceptional(torch.float32).view(torch.int32).tolist()
    assert pairs == set(itertools.product(bits, bits))


def test_a_row_of_a_reduction_holds_one_exceptional_value():
    sample = next(probes("sum", opinfo.database()["sum"], "float32", made("sum")))
    assert ((sample.input.isnan() | sample.input.isinf()).sum(1) <= 1).all()
    assert sample.input.isnan().any(0).sum() > 2, "at several positions"
    assert sample.kwargs == {"dim": -1}


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("name", ["div.floor_rounding", "remainder", "__rmod__", "bitwise_left_shift", "gcd"])
def test_integers_are_never_divided_by_what_ends_the_process(name, dtype):
    (sample,) = probes(name, opinfo.database()[name], dtype, made(name, dtype))
    divisor = sample.input if name.startswith("__r") else sample.args[0]
    assert (divisor >= 0).all()
    assert name == "bitwise_left_shift" or (divisor > 0).all()


@pytest.mark.parametrize(
    ("flaw", "name"),
    [
        ("maximum-drops-nan", "maximum"),
        ("maximum-drops-nan", "minimum"),
        ("reduced-max-drops-nan", "amax"),
        ("reduced-max-drops-nan", "amin"),
        ("reduced-max-drops-nan", "max.reduction_with_dim"),
        ("reduced-max-drops-nan", "max.reduction_no_dim"),
        ("clamp-nan-to-bound", "clamp"),
        ("tril-of-inf", "tril"),
        ("tril-of-inf", "triu"),
        ("baddbmm-beta-zero", "baddbmm"),
        ("hypot-overflows", "hypot"),
        ("exp-overflows-early", "exp"),
        ("round-loses-zero-sign", "round"),
        ("mul-flushes-subnormals", "mul"),
        ("sqrt-nan-is-zero", "sqrt"),
    ],
)
def test_flaws_of_exceptional_values(clean_sim, flaw, name):
    clean_sim.enable(flaws=[flaw])
    shown = failures(found(name))
    assert shown
    assert {f.kind for f in shown} == {Kind.MISMATCH}
    assert {f.op for f in shown} <= set(CATALOGUE[flaw].operators)
    if flaw != "hypot-overflows":  # it is wrong in finite numbers too: squares of small numbers vanish
        assert {f.cause for f in shown} == {CATALOGUE[flaw].cause}


def test_what_no_standard_defines_is_not_blamed(clean_sim):
    """NaN as an integer: unverified, and said to be."""
    clean_sim.enable(flaws=["nan-to-zero-integer"])
    for name in ("to", "int"):
        shown = found(name)
        assert {(f.kind, f.cause) for f in shown if f.kind is not Kind.NOT_VALID} == {
            (Kind.UNVERIFIED, Cause.UNDEFINED)
        }


@pytest.mark.parametrize("name", ["abs", "add", "fmin", "sum", "argmin", "sort", "neg", "matmul", "where", "to"])
def test_flaws_are_not_blamed_on_other_operators(clean_sim, name):
    clean_sim.enable(flaws=PRESETS["exceptional"])
    assert not failures(f for f in found(name) if f.kind is not Kind.UNSUPPORTED)


@pytest.mark.parametrize("part", [Part.PROBE, Part.TAIL, Part.LAYOUT, Part.SLICE])
def test_a_right_device_passes(part):
    shown = {name: failures(found(name, part)) for name in PLAIN}
    assert {name: f for name, f in shown.items() if f} == {}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int64", "bool"])
def test_a_right_device_passes_in_other_dtypes(dtype):
    names = [name for name in PLAIN[::3] if dtype in opinfo.dtypes(opinfo.database()[name])]
    assert not [f for name in names for f in failures(found(name, dtype=dtype))]


def test_complex_numbers_and_transforms_have_no_probes():
    assert list(probes("exp", opinfo.database()["exp"], "complex64", made("exp", "complex64"))) == []
    assert list(probes("fft.fft", opinfo.database()["fft.fft"], "float32", made("fft.fft"))) == []
