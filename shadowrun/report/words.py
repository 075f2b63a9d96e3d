"""Figures, durations and sentences, as all formats print them."""

from __future__ import annotations

import decimal
import math
import os.path
from typing import TYPE_CHECKING

from shadowrun.report.tame import clip

if TYPE_CHECKING:
    from shadowrun.analysis import Finding, MinTolerance, OperatorSummary, RegionSummary
    from shadowrun.types import OpRecord, RunInfo, TensorDiff

__all__ = [
    "KNOWN_LEAD",
    "REGIONS_LEAD",
    "SHOWN",
    "clip",
    "describe",
    "describe_record",
    "describe_region",
    "deviation",
    "duration",
    "excuse",
    "figure",
    "listed",
    "outcome",
    "overhead",
    "percent",
    "reason",
    "region_outcomes",
    "short_site",
    "tolerance",
    "worst",
]  # fmt: skip

MAX_COMMAND = 10_000
SHOWN = "script"
"""Label of a command, which is given as it is to be typed."""
KNOWN_LEAD = "The ledger excuses these: they fail nothing, and no other part of the report lists them as findings."


REGIONS_LEAD = (
    "What torch.compile made of the program: it ran compiled, and each graph was run eagerly on the same inputs, "
    "as a whole."
)


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
    if info.budget:
        return _budget(info)
    alone = max(info.wall_s - info.own_s, 0.0)
    text = f"shadowrun took {percent(info.own_s, info.wall_s)} of the {info.wall_s:.3g} s wall time"
    if alone > 0:
        text += f"; the program alone would have needed about {alone:.2g} s (×{info.wall_s / alone:.2g})"  # noqa: RUF001
    if info.behind_s > 0:
        text += f"; a thread of its own compared behind the program meanwhile, {info.behind_s:.2g} s of processor time"
    return text


def _budget(info: RunInfo) -> str:
    """What became of the overhead budget."""
    b = info.budget
    n_stretches = b.get("n_stretches", 0)  # files of before that have none
    # Without them or steps, nobody sees what the clock of a comparison misses.
    about = "" if b["n_steps"] or n_stretches else "at least "
    text = (
        f"the program took {about}{b['achieved']:.3g} times as long as without shadowrun ({b['ratio']:g} allowed); "
        f"{b['n_verified']:,} of {b['n_signatures']:,} call signatures were verified at least once, "
        f"{b['n_replayed']:,} of the {b['n_calls']:,} calls seen"
    )
    if b["n_unwatched"]:
        stretches = f"{n_stretches:,} stretches from one call of the model to the next"
        what = f"{b['n_steps']:,} steps" if b["n_steps"] else stretches
        text += f"; {b['n_unwatched']:,} of {what} were left alone, their calls were not seen"
    elif about:
        text += (
            "; call run.step() after each batch or sequence: without it, what torch takes to hand over each call is "
            "neither seen nor left out"
        )
    return text


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
    if finding.seen_on:
        lines.append(("seen on", finding.seen_on))
    if finding.n_inputs:
        lines.append(("inputs", clip(finding.inputs[0], 160) + _more(finding.n_inputs - 1)))
    kernels = [kernel for kernel in finding.missing_kernels if kernel != finding.op]
    if kernels:
        lines.append(("missing", f"kernel {listed(tuple(kernels))}"))
    if finding.worst is not None:
        lines.append(("differs", worst(finding.worst)))
    passes = tolerance(finding.min_tolerance)
    if passes:
        lines.append(("passes", passes))
    lines.append(("why", outcome(finding.cause, finding.explanation, finding.evidence, finding.confidence)))
    lines.append(("do", finding.next_step))
    return [(label, clip(text)) for label, text in lines] + shown(finding)


def shown(finding: Finding | RegionSummary) -> list[tuple[str, str]]:
    """Commands that write a script, none of them cut short."""
    return [(SHOWN, clip(text, MAX_COMMAND)) for text in finding.commands]


def reason(finding: Finding) -> str:
    """Why, in a few words, and where not all ranks have it, which do."""
    why = finding.explanation or str(finding.cause or "")
    return why if finding.everywhere else f"{finding.seen_on}: {why}"


def excuse(finding: Finding) -> tuple[str, str]:
    """Reason and last day of the ledger's line that excuses a finding."""
    line = finding.known
    if line is None:
        return "", ""
    return clip(f"{line.reason} ({line.origin})"), str(line.expires or "")


def tolerance(least: MinTolerance | None) -> str:
    """The least tolerance with which calls would pass, rounded up; empty where none helps."""
    if least is None or math.isinf(least.atol):
        return ""
    if least.atol == 0:  # signs of zeros
        return "with any tolerance, 0 included"
    ways = [f"rtol ≥ {_rounded_up(least.rtol)} (atol 0)"] if math.isfinite(least.rtol) else []
    return "with " + " or ".join([*ways, f"atol ≥ {_rounded_up(least.atol)} (rtol 0)"])


def deviation(op: OperatorSummary) -> str:
    """The greatest absolute difference, or that it is worse than any number; a dash where nothing differed."""
    if op.worst_seq < 0:
        return "-"
    return "NaN" if op.n_nan else "Inf" if op.n_inf else figure(op.max_abs)


def describe_record(record: OpRecord, finding: Finding | None = None, origin: str = "") -> list[tuple[str, str]]:
    """The same for one call of a finding; `origin` is the run that it is from, in a combined file."""
    call, verdict = record.call, record.verdict
    lines = [
        ("call", f"number {call.seq:,} in step {call.step:,}: {call.op}({clip(call.inputs, 160)})"),
        ("where", _where(call.module, (call.phase,), (call.site,), 1)),
    ]
    lines += [("seen on", origin)] if origin else []
    lines += [("differs", worst(diff)) for diff in record.diffs[:3]]
    lines.append(("why", outcome(verdict.cause, verdict.explanation, verdict.evidence, verdict.confidence)))
    if finding is not None and finding.next_step:
        lines.append(("do", finding.next_step))
    return [(label, clip(text)) for label, text in lines] + ([] if finding is None else shown(finding))


def region_outcomes(region: RegionSummary) -> list[tuple[int, str]]:
    """Calls by status, worst first."""
    counts = (
        (region.n_mismatch, "mismatch"), (region.n_error, "error"), (region.n_unverified, "unverified"),
        (region.n_match, "match"),
    )  # fmt: skip
    return [(n, status) for n, status in counts if n]


def describe_region(region: RegionSummary) -> list[tuple[str, str]]:
    """Labelled lines: where, what differs, why, and what to do; none where all is right and nothing to be said."""
    if region.status == "match" and not region.explanation:
        return []
    why = outcome(region.cause or None, region.explanation, "", 1)
    lines = [("differs", worst(region.worst))] if region.worst is not None else []
    lines += [("why", why)] if why else []
    lines += [("do", region.next_step)] if region.next_step else []
    if lines and region.callers and region.callers[0] != region.site:
        lines.insert(0, ("called at", listed(region.callers)))
    return [(label, clip(text)) for label, text in lines] + shown(region)


def _where(modules: str, phases: tuple[str, ...], sites: tuple[str, ...], n_sites: int) -> str:
    return " · ".join(filter(None, [modules or "outside any module", ", ".join(phases), listed(sites, n_sites, 2)]))


def _rounded_up(value: float) -> str:
    """Three significant digits, none of them too small: who copies them into a file must see the calls pass."""
    return figure(float(decimal.Context(prec=3, rounding=decimal.ROUND_UP).create_decimal_from_float(value)))


def _more(n: int) -> str:
    return f" … and {n:,} more" if n > 0 else ""
