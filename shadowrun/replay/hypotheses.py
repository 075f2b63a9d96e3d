"""Cause by hypothesis: the explanation under which the target's result is right to rounding.

A table of small functions, tried from the most specific evidence to the least; the first that holds for every
mismatched element of every mismatched result is the cause. Some look at the values only (`patterns`), some run the
target again (as it was, or on contiguous copies), some ask the float64 oracle on changed inputs. At most 4 runs of the
target and 26 of the oracle, on calls that are wrong: they are few.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from shadowrun.numerics.bits import bits_equal
from shadowrun.numerics.form import form_difference
from shadowrun.numerics.tolerance import accumulates, base_name
from shadowrun.replay import alternatives, patterns
from shadowrun.replay.alternatives import under
from shadowrun.replay.finding import Finding, flat_values, op_name
from shadowrun.replay.foreign import has_foreign_values
from shadowrun.replay.oracle import Oracle, tensors
from shadowrun.replay.patterns import Suspect
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.replay.case import Case, Value

__all__ = ["HYPOTHESES", "Hypothesis", "Known", "explain", "order_varies", "to_tf32"]

RERUNS: Final = 3
CERTAIN: Final = 0.8
"""Confidence from which an explanation is tried first on the next such call: a guess might keep a better one away."""
MOST_KNOWN: Final = 1024


_ATOMIC: Final = frozenset(
    """
    index_put _index_put_impl _unsafe_index_put put index_add index_reduce scatter_add scatter_reduce bincount histc
    embedding_dense_backward _embedding_bag_dense_backward grid_sampler_2d_backward max_pool2d_with_indices_backward
    adaptive_max_pool2d_backward avg_pool3d_backward upsample_bilinear2d_backward upsample_nearest2d_backward
    cumsum _ctc_loss_backward nll_loss2d_forward convolution_backward
    """.split()  # noqa: SIM905
)
"""Operators whose order of additions varies between runs on CUDA (`torch.use_deterministic_algorithms` lists them)."""


class Hypothesis(NamedTuple):
    """One explanation.

    Attributes:
        cause: What it would mean.
        confidence: How sure that is if it holds.
        test: Gives the explanation, or None if it does not hold.
    """

    cause: Cause
    confidence: float
    test: Callable[[Suspect], str | None]


Known: TypeAlias = "dict[tuple[object, ...], tuple[Hypothesis, str]]"
"""Explanations that held, by the kind of call."""


def explain(
    case: Case, findings: list[Finding], oracle: Callable[[], Oracle | None], known: Known | None = None
) -> Verdict | None:
    """Find the first hypothesis that reproduces the target's result.

    Args:
        case: The call.
        findings: Its mismatched results.
        oracle: Gives the oracle, if it can be asked.
        known: What held for earlier calls, tried first; what holds now is added.

    Returns:
        A MISMATCH with cause, explanation and confidence, its evidence saying what was found; None if none holds.
    """
    findings = _without_companions([f for f in findings if f.bad.size])
    if not findings:
        return None
    key = _kind(case, findings)
    suspect = Suspect(case, findings, oracle)
    # Results judged on the whole have no single element that rounding could not explain: any hypothesis would hold.
    on_the_whole = all(
        f.fmt is not None
        and f.limit > 0
        and f.residual(f.expected) <= f.tolerance
        and not np.isin(f.bad, f.where[f.zero_signs]).any()
        for f in findings
    )
    hypothesis, found = _first(suspect, _ON_THE_WHOLE if on_the_whole else HYPOTHESES, known, key)
    if found is None:
        return None
    evidence = f"holds for all {sum(f.bad.size for f in findings)} mismatched elements"
    return Verdict(Status.MISMATCH, hypothesis.cause, found, evidence, hypothesis.confidence)


def _first(
    suspect: Suspect, table: tuple[Hypothesis, ...], known: Known | None, key: tuple[object, ...]
) -> tuple[Hypothesis, str | None]:
    """The hypothesis that held for such a call before, where it does again; else the first of the table that does."""
    before = None if known is None else known.get(key)
    if before is not None and before[0] in table:
        hypothesis, explanation = before
        if hypothesis.test(replace(suspect, known=explanation)) == explanation:
            return before
    for hypothesis in table:
        found = hypothesis.test(suspect)
        if found is not None:
            if known is not None and len(known) < MOST_KNOWN and hypothesis.confidence >= CERTAIN:
                known[key] = hypothesis, found
            return hypothesis, found
    return table[-1], None


def _kind(case: Case, findings: list[Finding]) -> tuple[object, ...]:
    """What two calls that mismatch for one reason have in common: operator, forms of the inputs, and what is wrong."""
    forms = [(t.dtype, t.shape, t.layout is torch.strided and t.stride()) for t in tensors(case.args, case.kwargs)]
    return (op_name(case), *forms, *(f.position for f in findings))


def _without_companions(findings: list[Finding]) -> list[Finding]:
    """Leave out indices that are wrong only where the values beside them are (max, topk, median): a consequence."""
    values = [f for f in findings if f.fmt is not None]

    def follows(index: Finding, value: Finding) -> bool:
        same_size = index.actual.numel() == value.actual.numel()
        return index.fmt is None and same_size and bool(np.isin(index.bad, value.bad).all())

    return [f for f in findings if not any(follows(f, v) for v in values)]


def not_written(suspect: Suspect) -> str | None:
    """An argument that the operator should have written is as it was."""
    found = patterns.not_written(suspect)
    if found is None or not all(bool(f.actual[torch.from_numpy(f.bad)].isnan().all()) for f in suspect.findings):
        return found
    # Any arithmetic with NaN gives NaN. Only where the argument holds numbers does it show whether it is written.
    numbers = Suspect(_from_numbers(suspect.case), suspect.findings, suspect.oracle)
    values = _run_target(numbers, None)
    if values is None:
        return None
    again = [replace(f, actual=flat_values(values[f.position])) for f in suspect.findings]
    return patterns.not_written(Suspect(numbers.case, again, suspect.oracle))


def _from_numbers(case: Case) -> Case:
    args, kwargs = case.fresh_inputs(lambda t: t.nan_to_num() if t.is_floating_point() else t)
    return replace(case, args=args, kwargs=kwargs)


def order_varies(case: Case) -> bool:
    """Whether another run of the target differs at all, for operators that add atomically on parallel devices."""
    if base_name(op_name(case)) not in _ATOMIC:
        return False
    again = case.run_target(*case.fresh_inputs())
    return not all(bits_equal(a, b) for a, b in zip(again, case.actual, strict=True))


def not_deterministic(suspect: Suspect) -> str | None:
    """Another run of the target, on the same inputs at the same offsets, differs beyond rounding."""
    first: tuple[Value, ...] | None = None
    for _ in range(RERUNS):
        values = _run_target(suspect, None, as_it_lay=True)
        if values is None:
            return None
        if suspect.case.run_as_it_lay is not None and not _all_right(suspect, values):
            # What lies before an offset is not copied: a kernel that reads it is wrong in another way each time.
            first = first or values
            again = [replace(f, actual=flat_values(first[f.position])) for f in suspect.findings]
            if all(_residual(f, values) <= f.tolerance for f in again):
                continue
        if any(_residual(f, values) > (0.0 if f.exact else f.tolerance) for f in suspect.findings):
            return "another run of the target differs"
    return None


def _all_right(suspect: Suspect, values: tuple[Value, ...]) -> bool:
    return all(_residual(replace(f, actual=f.expected, truth=f.truth), values) <= f.tolerance for f in suspect.findings)


def uninitialised(suspect: Suspect) -> str | None:
    """An operator that only moves values returned others than it was given, and others again in another run."""
    return "uninitialised memory" if has_foreign_values(suspect) and not_deterministic(suspect) else None


def right_when_contiguous(suspect: Suspect) -> str | None:
    """The target is right on contiguous copies of the inputs."""
    inputs = [t for t in tensors(suspect.case.args, suspect.case.kwargs) if t.layout == torch.strided]
    contiguous = all(t.is_contiguous() for t in inputs)
    if contiguous and suspect.case.run_as_it_lay is None and all(t.storage_offset() == 0 for t in inputs):
        return None
    values = _run_target(suspect, lambda t: t.detach().clone(memory_format=torch.contiguous_format))
    if values is None:
        return None
    for f in suspect.findings:
        found = values[f.position]
        if found is None or form_difference(found, suspect.case.expected[f.position]).startswith(("shape", "dtype")):
            return None
        right = _replaced(f, flat_values(found))
        if right.residual(f.expected) > f.tolerance:
            return None
    return "right without a storage offset" if contiguous else "right on contiguous inputs"


def flushed_inputs(suspect: Suspect) -> str | None:
    """The oracle agrees with the target once subnormal inputs are zero."""
    inputs = [t for t in tensors(suspect.case.args, suspect.case.kwargs) if t.is_floating_point()]
    if not any(_has_subnormals(t) for t in inputs):
        return None
    normal = max((torch.finfo(t.dtype).smallest_normal for t in inputs), default=0.0)

    def flush(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.abs() < normal, x * 0.0, x)

    if under(suspect, flush):
        return "subnormal inputs flushed"
    return "subnormal inputs and results flushed" if under(suspect, flush, results=flush) else None


def rounded_inputs(suspect: Suspect) -> str | None:
    """The oracle agrees with the target once the inputs are rounded to a shorter dtype."""
    judged = [f for f in suspect.findings if f.fmt is not None and f.fmt.mantissa >= 23]
    if len(judged) < len(suspect.findings) or all(1000 * f.bad.size < f.actual.numel() for f in judged):
        return None  # Rounded inputs change most results, not a few; and 16-bit inputs would stay as they are.
    if all(f.bad.size < 2 < f.actual.numel() for f in judged):
        return None  # One element has the value of one of six roundings too easily.
    matrices = {t.dim() >= 2 for t in tensors(suspect.case.args, suspect.case.kwargs) if t.is_floating_point()}
    names = _ROUNDINGS if accumulates(op_name(suspect.case)) else _ROUNDINGS[2:] + _ROUNDINGS[:2]
    for name, change in sorted(names, key=lambda n: suspect.known != f"inputs rounded to {n[0]}"):
        # Units for matrix products round their operands, but not the bias.
        if len(matrices) == 2 and under(suspect, change, lambda t: t.dim() >= 2):
            return f"inputs rounded to {name}"
        if under(suspect, change):
            return f"inputs rounded to {name}"
    return None


def _to_bits(x: torch.Tensor, dropped: int, half: int) -> torch.Tensor:
    """Round float64 values to float32 with its last `dropped` mantissa bits cleared, after adding `half`."""
    bits = x.to(torch.float32).view(torch.int32)
    return ((bits + half) & -(1 << dropped)).view(torch.float32).to(torch.float64)


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Round float64 values to the 10 bits of mantissa that tf32 keeps of float32."""
    return _to_bits(x, 13, 1 << 12)


_ROUNDINGS: Final[tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...]] = (
    ("tf32", to_tf32),
    ("tf32 (truncated)", lambda x: _to_bits(x, 13, 0)),
    ("fp16", lambda x: x.to(torch.float32).to(torch.float16).to(torch.float64)),
    ("bf16", lambda x: x.to(torch.float32).to(torch.bfloat16).to(torch.float64)),
    ("bf16 (truncated)", lambda x: _to_bits(x, 16, 0)),
    ("fp32", lambda x: x.to(torch.float32).to(torch.float64)),
)


def _residual(finding: Finding, values: tuple[Value, ...], *, only_bad: bool = True) -> float:
    value = values[finding.position] if finding.position < len(values) else None
    if value is None:
        return float("inf")
    flat = flat_values(value)
    if flat.numel() != finding.actual.numel():
        return float("inf")
    return finding.residual(flat, only_bad=only_bad)


def _replaced(finding: Finding, actual: torch.Tensor) -> Finding:
    return Finding(
        finding.position, finding.name, actual, finding.expected, finding.fmt, finding.where, finding.zero_signs,
        finding.classes, finding.bad, floor=finding.floor, truth=finding.truth, limit=finding.limit,
    )  # fmt: skip


def _run_target(
    suspect: Suspect, convert: Callable[[torch.Tensor], torch.Tensor] | None, *, as_it_lay: bool = False
) -> tuple[Value, ...] | None:
    """Run the target again; None where it raises, which is no explanation of wrong values."""
    run = suspect.case.run_as_it_lay if as_it_lay else None
    try:
        return (run or suspect.case.run_target)(*suspect.case.fresh_inputs(convert))
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None


def _has_subnormals(t: torch.Tensor) -> bool:
    if t.layout != torch.strided or t._is_zerotensor():
        return False
    size = t.detach().to(torch.float64).abs()
    return bool(((size > 0) & (size < torch.finfo(t.dtype).smallest_normal)).any())


_TRUNCATED: Final = Hypothesis(Cause.REDUCED_PRECISION, 0.9, alternatives.truncated_results)
_SCALED: Final = Hypothesis(Cause.IMPLEMENTATION, 0.9, patterns.scaled)
_COARSE: Final = Hypothesis(Cause.REDUCED_PRECISION, 0.85, patterns.coarse_sums)
HYPOTHESES: Final[tuple[Hypothesis, ...]] = (
    Hypothesis(Cause.IMPLEMENTATION, 0.95, patterns.stale),
    Hypothesis(Cause.IMPLEMENTATION, 0.9, uninitialised),
    Hypothesis(Cause.NON_DETERMINISM, 0.9, not_deterministic),
    Hypothesis(Cause.LAYOUT, 0.95, right_when_contiguous),
    Hypothesis(Cause.IMPLEMENTATION, 0.95, patterns.biased_variance),
    Hypothesis(Cause.IMPLEMENTATION, 0.95, not_written),
    Hypothesis(Cause.FLUSHED_SUBNORMALS, 0.95, patterns.flushed_results),
    # Before what compares values, to which both zeros are the same.
    Hypothesis(Cause.EXCEPTIONAL_VALUES, 0.9, patterns.sign_of_zero),
    Hypothesis(Cause.FLUSHED_SUBNORMALS, 0.9, flushed_inputs),
    Hypothesis(Cause.EXCEPTIONAL_VALUES, 0.9, patterns.nan_missing),
    Hypothesis(Cause.EXCEPTIONAL_VALUES, 0.9, patterns.nan_produced),
    Hypothesis(Cause.EXCEPTIONAL_VALUES, 0.9, patterns.early_overflow),
    Hypothesis(Cause.EXCEPTIONAL_VALUES, 0.9, patterns.saturated),
    Hypothesis(Cause.IMPLEMENTATION, 0.9, alternatives.argument_ignored),
    Hypothesis(Cause.IMPLEMENTATION, 0.9, alternatives.lost_duplicates),
    _TRUNCATED,
    Hypothesis(Cause.REDUCED_PRECISION, 0.95, rounded_inputs),
    Hypothesis(Cause.IMPLEMENTATION, 0.9, alternatives.missing_terms),
    Hypothesis(Cause.IMPLEMENTATION, 0.9, alternatives.cancelling_formula),
    Hypothesis(Cause.REDUCED_PRECISION, 0.9, patterns.rounded_results),
    Hypothesis(Cause.IMPLEMENTATION, 0.9, patterns.sign_flipped),
    Hypothesis(Cause.IMPLEMENTATION, 0.8, patterns.last_elements),
    _SCALED,
    Hypothesis(Cause.IMPLEMENTATION, 0.85, patterns.update_scaled),
    Hypothesis(Cause.IMPLEMENTATION, 0.8, patterns.offset),
    Hypothesis(Cause.IMPLEMENTATION, 0.8, patterns.equals_input),
    Hypothesis(Cause.IMPLEMENTATION, 0.8, patterns.permuted),
    Hypothesis(Cause.IMPLEMENTATION, 0.7, patterns.block_edge),
    _COARSE,
    Hypothesis(Cause.REDUCED_PRECISION, 0.4, patterns.coarse_noise),
)
_ON_THE_WHOLE: Final = (_TRUNCATED, _SCALED, _COARSE)
