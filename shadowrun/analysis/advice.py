"""The recommended next step for a finding: one sentence for each kind and cause, as a template."""

from __future__ import annotations

from shadowrun.store.records import REGION
from shadowrun.types import Cause

__all__ = ["for_authors", "next_step", "worst_call"]

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


_NOTHING_HERE = "Nothing at this call."
# Two texts for one cause: the author of a model can only avoid a call, the author of the kernel can repair it.
# Cause to what the author of the model can do, and the author of the kernel.
_FOR_AUTHORS: dict[Cause, tuple[str, str]] = {
    Cause.MISSING_OPERATOR: (
        "Use another operator here, or a decomposition into operators that the target has.",
        "Register a kernel for {kernel}, or a decomposition of it.",
    ),
    Cause.MISSING_DTYPE: (
        "Cast to a dtype that the target has, such as float32, before this call, and back after it.",
        "Add the dtype to {kernel}.",
    ),
    Cause.SILENT_FALLBACK: (
        "The values are right and the transfers cost time: keep this call out of the step, or use another operator.",
        "Register a kernel for {kernel}; until then, warn when the CPU computes it.",
    ),
    Cause.WARNED_FALLBACK: (
        "The values are right and the transfers cost time: keep this call out of the step, or use another operator.",
        "Register a kernel for {kernel}.",
    ),
    Cause.REDUCED_PRECISION: (
        (
            'Ask for full precision: torch.set_float32_matmul_precision("highest"); for 16-bit products on CUDA, '
            "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False. Or use float32 here."
        ),
        "Multiply and accumulate in the precision of the inputs unless a setting allows less.",
    ),
    Cause.EXCEPTIONAL_VALUES: (
        "Keep infinities and NaN away from this call: mask with a large finite number, not -inf; clamp before it.",
        "Follow the definition of {op} for NaN, infinities, overflow and empty reductions.",
    ),
    Cause.IMPLEMENTATION: (
        "No setting explains it: use another operator, or compute this call on the CPU, until it is repaired.",
        "Begin with the elements that differ: block edges, tails, scales, indices; `shadowrun repro` has few of them.",
    ),
    Cause.FLUSHED_SUBNORMALS: (
        "Keep values above the smallest normal number: scale the loss, or use float32 here.",
        "Compile the kernel without flush-to-zero, or document the mode.",
    ),
    Cause.LAYOUT: (
        "Call .contiguous() on the inputs of this call.",
        "Test with transposed, expanded and sliced inputs: the kernel misreads strides, or takes a wrong path.",
    ),
    Cause.METADATA: (
        "Do not rely on the strides or the dtype of this result: call .contiguous() or .to() after it.",
        "Return the shape, dtype and strides that torch's meta kernel of {op} gives.",
    ),
    Cause.MEMORY_EFFECTS: (
        "Use the out-of-place form of {op}, or clone what it writes to.",
        "Write only to what the schema marks as mutable, and return no alias that it does not declare.",
    ),
    Cause.NO_ERROR: (
        "Check these inputs before the call: they are invalid, and the target does not say so.",
        "Raise for the inputs for which the reference raises.",
    ),
    Cause.NON_DETERMINISM: (
        "Call torch.use_deterministic_algorithms(True), or take the spread between two runs as the error.",
        "Replace atomic additions by a fixed order, or raise under use_deterministic_algorithms(True).",
    ),
    Cause.RANDOMNESS: (
        "Draw on the CPU and move the numbers to the target, if both platforms must see the same ones.",
        "Compare moments and frequencies: the distribution is wrong, not single values.",
    ),
    Cause.UNDEFINED: (
        "Avoid inputs whose result is not defined, such as an index that is written twice.",
        _NOTHING_HERE,
    ),
    Cause.PROPAGATED: (f"{_NOTHING_HERE} Its inputs differed: begin with the first divergence.", _NOTHING_HERE),
    Cause.REFERENCE: (
        f"{_NOTHING_HERE} The reference is wrong, not the target.",
        f"{_NOTHING_HERE} float64 confirms it.",
    ),
    Cause.SLOW: (
        "Look for a faster operator or shape, or move this call out of the step.",
        "Profile {op} with the inputs of its fastest call.",
    ),
}


def for_authors(cause: Cause | None, *, op: str, kernel: str = "") -> tuple[str, str] | None:
    """What the model's author can do about a finding, and what the kernel's author; None for other causes.

    A compiled region is no operator, so that it has no such advice.
    """
    advice = None if cause is None or op.startswith(REGION) else _FOR_AUTHORS.get(cause)
    if advice is None:
        return None
    # Only an unsupported call or a fallback names its kernel; for the others the operator stands for it.
    names = {"op": op, "kernel": kernel or op}
    return advice[0].format(**names), advice[1].format(**names)


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
