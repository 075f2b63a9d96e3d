"""The difference of two recordings as a picture: remaining precision of each pair of calls, in call order."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from shadowrun.recording.model import NONE
from shadowrun.report.document_blocks import Figure
from shadowrun.report.sanitize import clip
from shadowrun.report.svg import AMBER, BLUE, GREEN, INK, LINE, RED, SOFT, dot, line, svg, text
from shadowrun.studies.diff.compare import Outcome

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from shadowrun.studies.diff.recordings import RecordingDiff

__all__ = ["precision_figure"]

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
