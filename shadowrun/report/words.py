"""Figures, durations and sentences, as all formats print them."""

from __future__ import annotations

import os.path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shadowrun.analysis import Finding, OperatorSummary
    from shadowrun.types import OpRecord, RunInfo, TensorDiff

__all__ = [
    "clip",
    "describe",
    "describe_record",
    "deviation",
    "duration",
    "figure",
    "listed",
    "outcome",
    "overhead",
    "percent",
    "short_site",
    "worst",
]  # fmt: skip

MAX_TEXT = 400


def clip(text: str, length: int = MAX_TEXT) -> str:
    """At most `length` characters on one line, none of which a terminal would obey."""
    text = " ".join(text[: 4 * length].split())
    text = text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)
    return text if len(text) <= length else text[: length - 1] + "…"


def figure(value: float) -> str:
    """Three significant digits; zero as ``0``."""
    return f"{value:.3g}"


def short_site(site: str) -> str:
    """``model.py:12 in forward`` for a line that is given with the file's whole path."""
    return os.path.basename(site)  # noqa: PTH119 - line and function follow the path


def percent(part: float, whole: float) -> str:
    """``62 %``."""
    if not whole:
        return "0 %"
    share = 100 * part / whole
    # All and nothing are claims: only exact ones are printed.
    if 0 < share < 1 or 99 < share < 100:
        return "< 1 %" if share < 1 else "> 99 %"
    return f"{share:.0f} %"


def duration(us: float) -> str:
    """Microseconds in a unit that fits; a dash where nothing was measured."""
    if us < 0:
        return "-"
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.3g} µs"


def listed(texts: tuple[str, ...], total: int | None = None, shown: int = 3) -> str:
    """The first few, and how many more there are."""
    left = (len(texts) if total is None else total) - min(shown, len(texts))
    return ", ".join(texts[:shown]) + (f" … and {left:,} more" if left > 0 else "")


def overhead(info: RunInfo) -> str:
    """What the comparison cost; empty where it was not measured."""
    if info.wall_s <= 0:
        return ""
    alone = max(info.wall_s - info.own_s, 0.0)
    text = f"shadowrun took {percent(info.own_s, info.wall_s)} of the {info.wall_s:.3g} s wall time"
    if alone <= 0:
        return text
    return f"{text}; the program alone would have needed about {alone:.2g} s (×{info.wall_s / alone:.2g})"  # noqa: RUF001


def worst(diff: TensorDiff) -> str:
    """What differs in one tensor, as `torch.testing` would say it."""
    parts = [diff.detail] if diff.detail else []
    if diff.n_mismatched:
        share = percent(diff.n_mismatched, diff.n_elements)
        parts.append(f"{diff.n_mismatched:,} of {diff.n_elements:,} elements mismatch ({share})")
    elif diff.n_different:
        parts.append(f"{diff.n_different:,} of {diff.n_elements:,} elements differ")
    for n, name in (
        (diff.n_nan, "NaN on one side only"),
        (diff.n_inf, "infinite on one side only"),
        (diff.n_zero_sign, "zeros of other sign"),
        (diff.n_subnormal, "subnormal against zero"),
    ):
        if n:
            parts.append(f"{n:,} {name}")
    if diff.max_abs != 0:
        parts.append(f"greatest difference {figure(diff.max_abs)} absolute, {figure(diff.max_rel)} relative")
        if diff.remaining_bits >= 0:
            parts.append(f"{diff.max_ulp:,} ULP, {diff.remaining_bits} bits agree")
    if diff.excess_actual >= 0:
        own = figure(diff.excess_expected)
        parts.append(f"{figure(diff.excess_actual)} times rounding off the float64 result (reference: {own} times)")
    if diff.n_different:
        index = ", ".join(map(str, diff.worst_index))
        parts.append(f"at [{index}]: {diff.worst_actual:.6g} instead of {diff.worst_expected:.6g}")
    return f"{diff.name} ({diff.expected}): " + "; ".join(parts)


def outcome(cause: str | None, explanation: str, evidence: str, confidence: float) -> str:
    """Cause, explanation and evidence in one sentence."""
    named = f"{cause} ({explanation})" if cause and explanation else cause or explanation
    sure = f" [{100 * confidence:.0f} % sure]" if cause and confidence < 1 else ""
    return ": ".join(filter(None, [named, evidence])) + sure


def describe(finding: Finding) -> list[tuple[str, str]]:
    """Labelled lines: where, inputs, what differs, why, and what to do."""
    lines = [
        ("where", _where(listed(finding.modules, finding.n_modules), finding.phases, finding.sites, finding.n_sites))
    ]
    if finding.n_inputs:
        lines.append(("inputs", clip(finding.inputs[0], 160) + _more(finding.n_inputs - 1)))
    kernels = [kernel for kernel in finding.missing_kernels if kernel != finding.op]
    if kernels:
        lines.append(("missing", f"kernel {listed(tuple(kernels))}"))
    if finding.worst is not None:
        lines.append(("differs", worst(finding.worst)))
    lines.append(("why", outcome(finding.cause, finding.explanation, finding.evidence, finding.confidence)))
    lines.append(("do", finding.next_step))
    return [(label, clip(text)) for label, text in lines]


def deviation(op: OperatorSummary) -> str:
    """The greatest absolute difference, or that it is worse than any number; a dash where nothing differed."""
    if op.worst_seq < 0:
        return "-"
    return "NaN" if op.n_nan else "Inf" if op.n_inf else figure(op.max_abs)


def describe_record(record: OpRecord, advice: str = "") -> list[tuple[str, str]]:
    """The same for one call."""
    call, verdict = record.call, record.verdict
    lines = [
        ("call", f"number {call.seq:,} in step {call.step:,}: {call.op}({clip(call.inputs, 160)})"),
        ("where", _where(call.module, (call.phase,), (call.site,), 1)),
    ]
    lines += [("differs", worst(diff)) for diff in record.diffs[:3]]
    lines.append(("why", outcome(verdict.cause, verdict.explanation, verdict.evidence, verdict.confidence)))
    if advice:
        lines.append(("do", advice))
    return [(label, clip(text)) for label, text in lines]


def _where(modules: str, phases: tuple[str, ...], sites: tuple[str, ...], n_sites: int) -> str:
    return " · ".join(filter(None, [modules or "outside any module", ", ".join(phases), listed(sites, n_sites, 2)]))


def _more(n: int) -> str:
    return f" … and {n:,} more" if n > 0 else ""
