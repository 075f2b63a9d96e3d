"""The recommended next step for a finding: one sentence for each kind and cause, as a template."""

from __future__ import annotations

from shadowrun.store.records import REGION
from shadowrun.types import Cause

__all__ = ["next_step", "worst_call"]

_BY_CAUSE = {
    (
        "unsupported",
        Cause.MISSING_OPERATOR,
    ): "Write {kernel} for the target, or decompose {op} into operators that it has.",
    (
        "unsupported",
        Cause.MISSING_DTYPE,
    ): "Add this dtype to {kernel} on the target, or cast before the call at {site}.",
    (
        "fallback",
        Cause.SILENT_FALLBACK,
    ): "Write {kernel} for the target: it computes this on the CPU without a warning, "
    "and every call moves its tensors there and back.",
    (
        "fallback",
        Cause.WARNED_FALLBACK,
    ): "Write {kernel} for the target: every call moves its tensors to the CPU and back.",
    (
        "mismatch",
        Cause.REDUCED_PRECISION,
    ): "Turn off reduced-precision arithmetic on the target ({why}) and run again; "
    "if the difference remains, the kernel of {op} itself computes in too low a precision.",
    ("mismatch", Cause.EXCEPTIONAL_VALUES): "Look for NaN and infinity handling in the target's {op}: "
    "{call} shows the elements.",
    (
        "mismatch",
        Cause.IMPLEMENTATION,
    ): "Replay {call} alone and debug the target's {op}: no rounding explains its result.",
    ("mismatch", Cause.FLUSHED_SUBNORMALS): "Check whether the target flushes subnormals to zero by design; "
    "if so, list it as a known issue; if not, turn the flush mode off.",
    (
        "mismatch",
        Cause.LAYOUT,
    ): "Call {op} on contiguous copies of its inputs: if that matches, the target misreads strides.",
    (
        "mismatch",
        Cause.METADATA,
    ): "Fix the metadata that the target's {op} returns (shape, dtype, strides) before looking at values.",
    (
        "mismatch",
        Cause.MEMORY_EFFECTS,
    ): "Look at what the target's {op} writes to and returns: its values are right, and its memory effects "
    "violate its schema ({why}).",
    (
        "mismatch",
        Cause.NO_ERROR,
    ): "Add the check of the inputs of {call} to the target's {op}: it must raise for this invalid call.",
    (
        "mismatch",
        Cause.NON_DETERMINISM,
    ): "Run {op} several times on the same inputs, or ask for deterministic algorithms, before calling it wrong.",
    ("mismatch", Cause.RANDOMNESS): "Compare distributions, not values: the two random streams differ.",
    ("mismatch", Cause.PROPAGATED): "Start at the first divergence: the inputs of this call differed already.",
    (
        "mismatch",
        Cause.REFERENCE,
    ): "The target is right: report {op} to the reference platform, or compare with another one.",
}

_BY_KIND = {
    "unsupported": "Write {kernel} for the target.",
    "error": "Run {call} alone on the target: the reference accepts the same inputs ({site}).",
    "mismatch": "Replay {call} alone and compare the target's {op} with its definition.",
    "fallback": "Write {kernel} for the target.",
    "slow": "Profile {op} on the target at {site}: it needs {ratio} times as long as on the reference.",
}


_COMPILE_CHECK = (
    "Call shadowrun.compile_check(model, *inputs), or run `shadowrun compile` on the program: it names the operator of "
    "the graph that is wrong."
)
_BY_REGION: dict[tuple[str, Cause | None], str] = {
    ("mismatch", Cause.REFERENCE): "The compiled code is right and eager is not: compare eager with another platform.",
    ("unverified", Cause.RANDOMNESS): "Call shadowrun.compile_check(model, *inputs): it compiles the graph once more "
    "with eager's random numbers as its inputs, and judges everything else.",
}
_BY_REGION_KIND = {
    "unverified": "Call shadowrun.compile_check(model, *inputs): it checks the graph alone, on copies.",
}


def worst_call(seq: int, first_seq: int, n_calls: int) -> str:
    """The worst call, and the first if that is another one: ``call 578 (the worst of …)``."""
    if seq == first_seq:
        return f"call {seq}"
    return f"call {seq} (the worst of {n_calls:,} such calls; the first is {first_seq})"


def next_step(
    kind: str, cause: Cause | None, *, op: str, why: str, kernel: str, site: str, call: str, ratio: float
) -> str:
    """The recommended next step for a finding, or for a compiled region that could not be verified."""
    # A compiled region is no operator: nothing can be written for it, and no call of it replayed alone.
    if op.startswith(REGION):
        return _BY_REGION.get((kind, cause), _BY_REGION_KIND.get(kind, _COMPILE_CHECK))
    # A cause without a sentence of its own has that of its kind.
    template = _BY_KIND[kind] if cause is None else _BY_CAUSE.get((kind, cause), _BY_KIND[kind])
    return template.format(
        op=op,
        kernel=kernel or op,
        site=site or "its call",
        why=why or "tf32 or bf16 inside f32 kernels",
        call=call,
        ratio=f"{ratio:.3g}",
    )
