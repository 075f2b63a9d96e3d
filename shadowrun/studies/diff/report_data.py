"""The data of a report on two recordings: what JSON, CSV and the picture have of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shadowrun.recording.model import NONE, Kind
from shadowrun.report.document import (
    Records,
)
from shadowrun.report.document_blocks import Figure
from shadowrun.report.sanitize import clip
from shadowrun.report.svg import AMBER, BLUE, GREEN, INK, LINE, RED, SOFT, dot, line, svg, text
from shadowrun.studies.diff.compare import ARISING, Outcome, is_undeclared
from shadowrun.studies.diff.rounding import Rounding

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence

    from shadowrun.recording.model import Recording
    from shadowrun.studies.diff.recordings import RecordingDiff
    from shadowrun.studies.diff.step_outputs import OutputDistance

__all__ = ["DiffData", "effects", "kernel", "precision_figure"]

FORMAT: Final = 1
"""Version of the JSON's form."""


class DiffData:
    """What JSON and CSV have of a difference of two recordings.

    Args:
        found: What was found.
        limit: Entries of each list.
        replays: Commands that judge the first divergence in full.
    """

    def __init__(self, found: RecordingDiff, limit: int, replays: Sequence[str]) -> None:
        self._found = found
        self._replays = tuple(replays)
        self._limit = limit
        self._difference = found.difference
        self._a, self._b = found.difference.first.recording, found.difference.second.recording

    def data(self, title: str) -> dict[str, Any]:
        """The whole of it, for JSON."""
        found, alignment = self._found, self._difference.alignment
        first = found.flow.origins[0].pair if found.flow.origins else None
        return {
            "format": FORMAT,
            "of": title,
            "recordings": list(map(_recording_data, found.labels, (self._a, self._b))),
            "warnings": list(found.warnings),
            "provenance": {
                "same": found.provenance.is_same,
                "different": {k: list(v) for k, v in found.provenance.different.items()},
                "only_first": list(found.provenance.only_first),
                "only_second": list(found.provenance.only_second),
                "facts": {f.name: [f.first, f.second] for f in found.provenance.facts},
                "versions": {f.name: [f.first, f.second] for f in found.provenance.versions},
            },
            "n_matched": len(alignment.pairs),
            "matched_by": dict(alignment.by),
            "n_by_outcome": {str(outcome): self._difference.count(outcome) for outcome in Outcome},
            "n_by_rounding": {str(r): found.count_rounding(r) for r in Rounding},
            "n_only_first": len(alignment.only_first),
            "n_only_second": len(alignment.only_second),
            "first_divergence": None if first is None else self._pair_data(first),
            "replay": list(self._replays),
            "arising": [self._pair_data(o.pair) for o in found.flow.origins[: self._limit]],
            "outputs": [self._output_data(output) for output in found.outputs[: self._limit]],
            "reached": [self._pair_data(p) for p in self._reached()],
            "only_first": [_call_data(self._a, c) for c in alignment.only_first[: self._limit].tolist()],
            "only_second": [_call_data(self._b, c) for c in alignment.only_second[: self._limit].tolist()],
            "counterparts": self.counterparts()[: self._limit],
            "rows": [
                {
                    "module": f.rule.module, "op": f.rule.op, "n_first": f.n_first, "n_second": f.n_second,
                    "n_compared": len(f.pairs), "n_other_form": f.n_other_form, "modules_of_one_only": list(f.alone),
                    "different": [
                        {
                            "module": p.module, "row": p.number, "first": list(p.first), "second": list(p.second),
                            "remaining": p.remaining,
                        }
                        for p in f.pairs if not p.equal
                    ][: self._limit],
                }
                for f in found.rows
            ],
        }  # fmt: skip

    def _output_data(self, output: OutputDistance) -> dict[str, Any]:
        x, y = (int(c) for c in self._difference.alignment.pairs[output.pair])
        return {
            "first": _call_data(self._a, x), "second": _call_data(self._b, y), "position": output.position,
            "n_elements": output.n_elements, "n_differ": output.n_differ, "ulp": _finite(output.ulp),
            "relative": _finite(output.relative), "absolute": _finite(output.absolute),
        }  # fmt: skip

    def _reached(self) -> list[int]:
        reached: list[int] = self._difference.where(Outcome.INPUT, Outcome.UNKNOWN)[: self._limit].tolist()
        return reached

    def _pair_data(self, pair: int) -> dict[str, Any]:
        x, y = (int(c) for c in self._difference.alignment.pairs[pair])
        judged, flow = self._found.judgements.get(pair), self._found.flow
        origin = int(flow.origin[pair])
        return {
            "outcome": str(self._difference.outcome(pair)),
            "first": _call_data(self._a, x),
            "second": _call_data(self._b, y),
            "remaining": _or_none(int(self._difference.remaining[pair])),
            "min_ulp": _finite(judged.min_ulp) if judged else None,
            "max_ulp": _finite(judged.max_ulp) if judged else None,
            "min_relative": _finite(judged.relative) if judged else None,
            "is_exact": judged.is_exact if judged else False,
            "rounding": str(judged.rounding) if judged else None,
            "why": judged.why if judged else None,
            "undeclared": [list(effects(r, c)) for r, c in self.calls(pair)],
            "classes": {c: [m, n] for c, m, n in judged.classes} if judged else {},
            "parents": flow.parents_of(pair)[: self._limit],
            "origin": None if origin == NONE else int(self._difference.alignment.pairs[origin, 0]),
            "depth": int(flow.depth[pair]),
        }

    def records(self) -> Records:
        """A row for each call that differs or that one recording lacks, for CSV."""
        head = ("outcome", "call_first", "call_second", "step", "phase", "module", "operator", "line", "remaining",
                "min_ulp", "max_ulp", "rounding", "origin")  # fmt: skip
        rows: list[tuple[object, ...]] = []
        # Not the equal ones, which are nearly all of a million calls: CSV lists what a reader has to look at.
        for pair in self._difference.where(*ARISING, Outcome.INPUT, Outcome.UNKNOWN)[: self._limit].tolist():
            data = self._pair_data(pair)
            call = data["first"]
            rows.append((
                data["outcome"], call["call"], data["second"]["call"],
                *(call[name] for name in ("step", "phase", "module", "op", "site")),
                *(data[name] for name in ("remaining", "min_ulp", "max_ulp", "rounding", "origin")),
            ))  # fmt: skip
        for side, recording, call in self.missing_calls():
            data = _call_data(recording, call)
            numbers = (call, None) if side == 0 else (None, call)
            place = (data[name] for name in ("step", "phase", "module", "op", "site"))
            rows.append((f"only {('first', 'second')[side]}", *numbers, *place, *[None] * 5))
        return Records(head, tuple(rows))

    def counterparts(self) -> list[dict[str, Any]]:
        """Calls that correspond under two names of operators: of each two names, how many, and how many are equal."""
        pairs = self._difference.alignment.pairs
        ops = [np.array([c.op for c in r.contexts], object) for r in (self._a, self._b)]
        names = [of[r.calls["context"][pairs[:, side]]] if len(of) else of[:0]
                 for side, (of, r) in enumerate(zip(ops, (self._a, self._b), strict=True))]  # fmt: skip
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for pair in np.flatnonzero(names[0] != names[1]).tolist():
            first, second = (str(of[pair]) for of in names)
            # Counted by two names: attention of one device meets that of another in each layer, and one row says so.
            new = {"first": first, "second": second, "n_calls": 0, "n_equal": 0, "call": int(pairs[pair, 0])}
            row = found.setdefault((first, second), new)
            row["n_calls"] += 1
            row["n_equal"] += self._difference.outcome(pair) is Outcome.EQUAL
        return list(found.values())

    def missing_calls(self) -> Iterator[tuple[int, Recording, int]]:
        """Calls that one recording lacks: 0 or 1 for the one that has it, that recording, the call."""
        alignment = self._difference.alignment
        for side, recording, calls in ((0, self._a, alignment.only_first), (1, self._b, alignment.only_second)):
            yield from ((side, recording, call) for call in calls[: self._limit].tolist())

    def calls(self, pair: int) -> tuple[tuple[Recording, int], tuple[Recording, int]]:
        """The calls of a pair, each with its recording."""
        x, y = (int(c) for c in self._difference.alignment.pairs[pair])
        return (self._a, x), (self._b, y)


def _recording_data(label: str, recording: Recording) -> dict[str, Any]:
    return {
        "name": label,
        "n_calls": len(recording.calls),
        "n_processes": len(recording.processes),
        "complete": all(p.complete for p in recording.processes),
        "argv": [list(p.argv) for p in recording.processes[:1]],
        "skipped": dict(recording.processes[0].skipped) if recording.processes else {},
    }


def _call_data(recording: Recording, call: int) -> dict[str, Any]:
    context = recording.context_of(call)
    return {
        "call": call,
        "step": int(recording.calls["step"][call]),
        "rank": recording.process_of(call).rank,
        "phase": str(context.phase),
        "module": context.module,
        "op": context.op,
        "site": context.site,
        "device": context.device,
        "kernel": kernel(recording, call),
    }


def kernel(recording: Recording, call: int) -> str:
    """Name of the kernel of a call; empty where it was not recorded."""
    number = int(recording.calls["kernel"][call])
    return recording.kernels[number] if number != NONE else ""


def effects(recording: Recording, call: int) -> Iterator[str]:
    """What a call does to memory and its schema does not declare."""
    rows = recording.results_of(call)
    for row in recording.results[rows.start : rows.stop][is_undeclared(recording.results[rows.start : rows.stop])]:
        if row["kind"] == Kind.OVERWRITTEN:
            yield f"undeclared write in tensor argument {row['position']}, or next to it"
        else:
            yield f"result {row['position']} lies in the memory of an earlier tensor, undeclared"


def _or_none(value: int) -> int | None:
    return None if value == NONE else value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# The difference of two recordings as a picture: remaining precision of each pair of calls, in call order.

_WIDTH: Final = 960.0
_LEFT, _RIGHT, _TOP, _BASE = 58.0, 20.0, 58.0, 258.0
_MAX_POINTS: Final = 400
_MAX_NAME: Final = 80
_COLOURS: Final = {
    Outcome.EQUAL: GREEN,
    Outcome.INPUT: BLUE,
    Outcome.KERNEL: AMBER,
    Outcome.OTHER_CALLS: AMBER,
    Outcome.ALGORITHM: RED,
    Outcome.ARGUMENTS: RED,
    Outcome.FORM: RED,
    Outcome.UNKNOWN: SOFT,
}


def _legend(seen: Container[Outcome]) -> Iterator[str]:
    """Colours of the outcomes that a picture shows, below it."""
    at = _LEFT
    for outcome in (o for o in Outcome if o in seen):
        yield from (dot(at + 4, _BASE + 64, 4, _COLOURS[outcome]), text(at + 13, _BASE + 68, str(outcome), INK))
        at += 34 + 7 * len(outcome)


def precision_figure(found: RecordingDiff) -> tuple[Figure, ...]:
    """The picture; nothing where fewer than two calls correspond, or all are equal."""
    difference, recording = found.difference, found.difference.first.recording
    pairs, outcomes = difference.alignment.pairs, tuple(Outcome)
    n = len(pairs)
    if n < 2 or difference.count(Outcome.EQUAL) == n:
        return ()
    bits = difference.remaining
    most = max(8, int(bits.max()) + 1)
    step = math.ceil(n / _MAX_POINTS)
    origins = {origin.pair for origin in found.flow.origins}
    first = found.flow.origins[0].pair if found.flow.origins else -1

    def rank(pair: int) -> tuple[bool, bool, bool, int]:
        """The first divergence, then others, then the least precision: a picture must not lose these."""
        is_equal = outcomes[difference.outcomes[pair]] is Outcome.EQUAL
        return pair != first, pair not in origins, is_equal, int(bits[pair]) if bits[pair] != NONE else most

    def x(pair: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * pair / max(1, n - 1)

    def y(value: float) -> float:
        return _BASE - (_BASE - _TOP) * value / most

    parts = [text(_LEFT, 18, "bits left: leading bits of the mantissa that agree in all elements", SOFT)]
    for value in range(0, most, max(1, round(most / 6))):
        parts += [line(_LEFT, y(value), _WIDTH - _RIGHT, y(value), LINE)]
        parts += [text(_LEFT - 8, y(value) + 4, str(value), SOFT, anchor="end")]
    parts += [line(_LEFT, y(most), _WIDTH - _RIGHT, y(most), LINE)]
    parts += [text(_LEFT - 8, y(most) + 4, "equal", SOFT, anchor="end")]
    parts += [text(_LEFT - 8, _BASE + 22, "none", SOFT, anchor="end")]
    chosen = [min(range(at, min(n, at + step)), key=rank) for at in range(0, n, step)]
    seen: dict[Outcome, None] = {}
    for pair in sorted(chosen, key=lambda pair: outcomes[difference.outcomes[pair]] is not Outcome.EQUAL):
        outcome, call = outcomes[difference.outcomes[pair]], int(pairs[pair, 0])
        context = recording.context_of(call)
        left = int(bits[pair])
        # Integers, other forms, and results without a digest have no bits to count.
        height = y(most) if outcome is Outcome.EQUAL else _BASE + 18 if left == NONE else y(left)
        where = f" in {context.module}" if context.module else ""
        figures = "" if left == NONE else f", {left} bits left"
        name = clip(f"call {call:,}: {context.op}{where}: {outcome}{figures}", _MAX_NAME * 2)
        parts.append(dot(x(pair), height, 3.5 if pair in origins else 2.2, _COLOURS[outcome], name))
        seen[outcome] = None
    if first >= 0:
        at, context = x(first), recording.context_of(int(pairs[first, 0]))
        is_right = at > _WIDTH / 2
        label = clip(f"first divergence: {context.op}", _MAX_NAME)
        shift, anchor = (-6, "end") if is_right else (6, "start")
        parts.append(line(at, _TOP - 22, at, _BASE, RED, dash="5 3"))
        parts.append(text(at + shift, _TOP - 14, label, RED, anchor=anchor, bold=True))
    parts.append(text((_LEFT + _WIDTH) / 2, _BASE + 44, "pairs of calls, in call order", SOFT, anchor="middle"))
    parts += _legend(seen)
    worst = [int(b) for b in bits if b != NONE]
    caption = f"{n:,} pairs of calls" + (f", {len(chosen):,} points: each the worst of {step}" if step > 1 else "")
    caption += f"; at least {min(worst)} bits are left. " if worst else ". "
    caption += "Large dots: where a difference arises; the others inherit it. none: no bits to count, such as integers."
    title = "Remaining precision along the graph"
    return (Figure(svg(_WIDTH, _BASE + 82, title, parts, caption, wide=True), caption, title),)
