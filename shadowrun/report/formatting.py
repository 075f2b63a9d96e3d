"""Numbers, durations, differences and findings in words, the same in all formats."""

from __future__ import annotations

import dataclasses
import decimal
import math
import os.path
from typing import TYPE_CHECKING, Any

from shadowrun.report.document import Fact, Span
from shadowrun.report.sanitize import MAX_TEXT, clip

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shadowrun.analysis import Finding, MinTolerance, OperatorSummary, RegionSummary
    from shadowrun.report.document import Cell
    from shadowrun.types import OpRecord, RunInfo, TensorDiff

__all__ = [
    "describe_cause",
    "describe_diff",
    "duration",
    "finding_facts",
    "first_few",
    "first_few_cell",
    "float_text",
    "known_issue_texts",
    "max_abs_text",
    "min_tolerance_text",
    "overhead",
    "percent",
    "record_facts",
    "region_facts",
    "short_reason",
    "short_site",
    "verified_share",
]

# Commands are copied: a cut one would do something else. Names in them may come from an untrusted file.
MAX_COMMAND = 10_000
_TONES = {"do": "action", "why": "strong"}


def float_text(value: float) -> str:
    """Three significant digits."""
    return f"{value:.3g}"


def short_site(site: str) -> str:
    """``model.py:12 in forward`` for a source line with the whole path; the library's line follows in parentheses."""
    # A site may be of a user's line that a library's line follows: `train.py:9 in step (adam.py:30 in step)`.
    own, _, library = site.removesuffix(")").rpartition(" (") if site.endswith(")") else (site, "", "")
    name = os.path.basename(own)  # noqa: PTH119 - line and function follow the path
    return f"{name} ({os.path.basename(library)})" if library else name  # noqa: PTH119


def percent(part: float, whole: float) -> str:
    """``62 %``."""
    if not whole:
        return "0 %"
    share = 100 * part / whole
    # 0 % and 100 % are claims: printed only where they are exact.
    if 0 < share < 1 or 99 < share < 100:
        return "< 1 %" if share < 1 else "> 99 %"
    return f"{share:.0f} %"


def duration(us: float) -> str:
    """Microseconds in a readable unit; a dash where not measured (negative)."""
    if us < 0:
        return "-"
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.3g} µs"


def first_few(texts: tuple[str, ...], total: int | None = None, shown: int = 3) -> str:
    """The first `shown` texts, and how many more there are."""
    left = (len(texts) if total is None else total) - min(shown, len(texts))
    return ", ".join(texts[:shown]) + (f" … and {left:,} more" if left > 0 else "")


def first_few_cell(texts: tuple[str, ...], total: int | None = None, shown: int = 3, length: int = MAX_TEXT) -> Cell:
    """`first_few` as a cell, whose ``… and 8 more`` opens what it leaves out."""
    text = clip(first_few(texts, total, shown), length)
    known = texts[shown:]
    return (Span(text, opens=known),) if known else text


def overhead(info: RunInfo) -> str:
    """Time that the comparison took; empty if not measured."""
    if info.wall_s <= 0:
        return ""
    if info.budget:
        return _budget(info)
    alone = max(info.wall_s - info.own_s, 0.0)
    text = f"shadowrun took {percent(info.own_s, info.wall_s)} of the {info.wall_s:.3g} s wall time"
    if alone > 0:
        text += f"; the program alone would have taken about {alone:.2g} s (×{info.wall_s / alone:.2g})"  # noqa: RUF001
    if info.async_compare_s > 0:
        text += f"; an asynchronous comparison thread used {info.async_compare_s:.2g} s of processor time"
    return text


def _budget(info: RunInfo) -> str:
    """Use of the overhead budget."""
    b = info.budget
    n_stretches = b.get("n_stretches", 0)  # older files lack the key
    # Only at steps or stretches is the dispatch time outside of comparisons measured.
    about = "" if b["n_steps"] or n_stretches else "at least "
    met = "" if b.get("n_passes", 1) else "met so far "
    text = (
        f"the program took {about}{b['achieved']:.3g} times as long as without shadowrun ({b['ratio']:g} allowed); "
        f"{b['n_verified']:,} of {b['n_signatures']:,} call signatures {met}were verified at least once, "
        f"{b['n_replayed']:,} of the {b['n_calls']:,} calls seen"
    )
    if b["n_unwatched"]:
        stretches = f"{n_stretches:,} stretches from one call of the model to the next"
        what = f"{b['n_steps']:,} steps" if b["n_steps"] else stretches
        text += f"; {b['n_unwatched']:,} of {what} were skipped: their calls were not recorded"
        if share := verified_share(b):
            text += f", so that about {100 * share:.2g} % of all calls were verified"
    elif about:
        text += (
            "; call run.step() after each batch or sequence: without it, the dispatch overhead of each call is neither "
            "measured nor avoided"
        )
    return text


def verified_share(budget: Mapping[str, Any]) -> float:
    """Share of all of the program's calls that were verified, if skipped steps have as many as others; 0 if unknown.

    Args:
        budget: Of a `RunInfo`.
    """
    n_steps = budget["n_steps"] or budget.get("n_stretches", 0)
    n_watched = n_steps - budget["n_unwatched"] if n_steps else 1
    if n_watched <= 0 or not budget["n_calls"]:
        return 0.0
    return float(budget["n_replayed"] / budget["n_calls"] * n_watched / max(1, n_steps))


def describe_diff(diff: TensorDiff) -> str:
    """The difference of one tensor, in the terms of `torch.testing`."""
    parts = [diff.detail] if diff.detail else []
    if diff.n_mismatched:
        share = percent(diff.n_mismatched, diff.n_elements)
        parts.append(f"{diff.n_mismatched:,} of {diff.n_elements:,} elements mismatch ({share})")
    elif diff.n_different:
        parts.append(f"{diff.n_different:,} of {diff.n_elements:,} elements differ")
    # Labels stand at the fields in `types`: a new count is named in all reports without a change here.
    labels = {f.name: f.metadata["label"] for f in dataclasses.fields(diff) if "label" in f.metadata}
    parts += [f"{n:,} {label}" for name, label in labels.items() if (n := getattr(diff, name)) > 0]
    if diff.max_abs != 0:
        parts.append(f"greatest difference {float_text(diff.max_abs)} absolute, {float_text(diff.max_rel)} relative")
        if diff.remaining_bits >= 0:
            parts.append(f"{diff.max_ulp:,} ULP, {diff.remaining_bits} bits agree")
    if diff.excess_actual >= 0:
        actual, expected = float_text(diff.excess_actual), float_text(diff.excess_expected)
        parts.append(f"{actual} times the operator's rounding error, against float64 (reference: {expected} times)")
    if diff.n_different:
        index = ", ".join(map(str, diff.worst_index))
        parts.append(f"at [{index}]: {diff.worst_actual:.6g} instead of {diff.worst_expected:.6g}")
    return f"{diff.name} ({diff.expected}): " + "; ".join(parts)


def describe_cause(cause: str | None, explanation: str, evidence: str, confidence: float) -> str:
    """Cause, explanation and evidence in one sentence."""
    named = f"{cause} ({explanation})" if cause and explanation else cause or explanation
    sure = f" [{100 * confidence:.0f} % sure]" if cause and confidence < 1 else ""
    return ": ".join(filter(None, [named, evidence])) + sure


def finding_facts(finding: Finding) -> tuple[Fact, ...]:
    """Labelled lines: where, inputs, what differs, why, and what to do."""
    lines = [
        ("where", _where(first_few(finding.modules, finding.n_modules), finding.phases, finding.sites, finding.n_sites))
    ]
    if finding.seen_on:
        lines.append(("seen on", finding.seen_on))
    if finding.n_inputs:
        lines.append(("inputs", clip(finding.inputs[0], 160) + _more(finding.n_inputs - 1)))
    # Only where it is another one: that an unsupported operator lacks its own kernel is the finding itself.
    kernels = [kernel for kernel in finding.missing_kernels if kernel != finding.op]
    if kernels:
        lines.append(("missing", f"kernel {first_few(tuple(kernels))}"))
    if finding.worst is not None:
        lines.append(("differs", describe_diff(finding.worst)))
    passes = min_tolerance_text(finding.min_tolerance)
    if passes:
        lines.append(("passes", passes))
    lines.append(("why", describe_cause(finding.cause, finding.explanation, finding.evidence, finding.confidence)))
    lines.append(("do", finding.next_step))
    return _facts(lines, finding.commands)


def _facts(lines: Iterable[tuple[str, str]], commands: Iterable[str]) -> tuple[Fact, ...]:
    """Labelled lines, then the commands that write a script."""
    facts = [Fact(label, clip(text), _TONES.get(label, "")) for label, text in lines]
    return (*facts, *(Fact("script", clip(text, MAX_COMMAND), command=True) for text in commands))


def short_reason(finding: Finding) -> str:
    """The explanation or cause; in a combined file, after the ranks that have it if not all do."""
    why = finding.explanation or str(finding.cause or "")
    return why if finding.everywhere else f"{finding.seen_on}: {why}"


def known_issue_texts(finding: Finding) -> tuple[str, str]:
    """Reason and expiry date of the known issue that excuses a finding."""
    line = finding.known
    if line is None:
        return "", ""
    return clip(f"{line.reason} ({line.origin})"), str(line.expires or "")


def min_tolerance_text(least: MinTolerance | None) -> str:
    """The smallest tolerance with which calls would pass, rounded up; empty if none helps."""
    if least is None or math.isinf(least.atol):
        return ""
    if least.atol == 0:  # signs of zeros
        return "with any tolerance, 0 included"
    # Two alternatives, each with the other tolerance 0: any pair between them is the choice of the user.
    ways = [f"rtol ≥ {_rounded_up(least.rtol)} (atol 0)"] if math.isfinite(least.rtol) else []
    return "with " + " or ".join([*ways, f"atol ≥ {_rounded_up(least.atol)} (rtol 0)"])


def max_abs_text(op: OperatorSummary) -> str:
    """The greatest absolute difference, NaN or Inf; a dash if nothing differed."""
    if op.worst_seq < 0:
        return "-"
    return "NaN" if op.n_nan else "Inf" if op.n_inf else float_text(op.max_abs)


def record_facts(record: OpRecord, finding: Finding | None = None, origin: str = "") -> tuple[Fact, ...]:
    """Labelled lines of one call; `origin` names its run in a combined file."""
    call, verdict = record.call, record.verdict
    lines = [
        ("call", f"number {call.seq:,} in step {call.step:,}: {call.op}({clip(call.inputs, 160)})"),
        ("where", _where(call.module, (call.phase,), (call.site,), 1)),
    ]
    lines += [("seen on", origin)] if origin else []
    lines += [("differs", describe_diff(diff)) for diff in record.diffs[:3]]
    lines.append(("why", describe_cause(verdict.cause, verdict.explanation, verdict.evidence, verdict.confidence)))
    if finding is not None and finding.next_step:
        lines.append(("do", finding.next_step))
    return _facts(lines, finding.commands if finding is not None else ())


def region_facts(region: RegionSummary) -> tuple[Fact, ...]:
    """Labelled lines of a compiled region: caller, difference, cause, next step; none for a plain match."""
    if region.status == "match" and not region.explanation:
        return ()
    why = describe_cause(region.cause or None, region.explanation, "", 1)
    lines = [("differs", describe_diff(region.worst))] if region.worst is not None else []
    lines += [("why", why)] if why else []
    lines += [("do", region.next_step)] if region.next_step else []
    if lines and region.callers and region.callers[0] != region.site:
        lines.insert(0, ("called at", first_few(region.callers)))
    return _facts(lines, region.commands)


def _where(modules: str, phases: tuple[str, ...], sites: tuple[str, ...], n_sites: int) -> str:
    return " · ".join(filter(None, [modules or "outside any module", ", ".join(phases), first_few(sites, n_sites, 2)]))


def _rounded_up(value: float) -> str:
    """Three significant digits, rounded up: with the printed tolerance the calls must pass."""
    return float_text(float(decimal.Context(prec=3, rounding=decimal.ROUND_UP).create_decimal_from_float(value)))


def _more(n: int) -> str:
    return f" … and {n:,} more" if n > 0 else ""
