"""The slowdown as text, Markdown, JSON and CSV."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from shadowrun.report.grid import clip, columns, comma_separated, pipes
from shadowrun.report.tame import one_line, tame
from shadowrun.slowdown.measuring import Spread
from shadowrun.slowdown.table import BOUNDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.slowdown.measuring import Measured
from shadowrun.slowdown.table import OperatorSlowdown, Slowdown

__all__ = ["FORMATS"]

MAX_LISTED = 20
_MOST_SHOWN = 40
_FORMAT = 1
"""Version of the JSON's form."""
_HEAD = ("operator", "calls", "times slower", "spread", "a step loses", "worst with")
_HEAD_OF_DATABASE = ("operator", "times slower", "spread", "reference", "target", "with")


def _us(us: float) -> str:
    sign, us = ("-" if us < 0 else ""), abs(us)
    return f"{sign}{us:.3g} µs" if us < 1e3 else f"{sign}{us / 1e3:.3g} ms" if us < 1e6 else f"{sign}{us / 1e6:.3g} s"


def _rows(found: Slowdown) -> list[tuple[str, ...]]:
    """Head, and the first `MAX_LISTED` operators."""
    shown = found.operators[:MAX_LISTED]
    return [_HEAD, *map(_row, shown)] if found.of_program else [_HEAD_OF_DATABASE, *map(_row_of_database, shown)]


def _row(o: OperatorSlowdown) -> tuple[str, ...]:
    return (
        o.op,
        f"{o.n_calls:,}",
        f"{o.ratio:.2f}",
        f"{o.lower:.2f} to {o.upper:.2f}",
        _us(o.lost_us),
        clip(o.worst.call.inputs, _MOST_SHOWN),
    )


def _row_of_database(o: OperatorSlowdown) -> tuple[str, ...]:
    times = [_us(spread.median) if spread else "" for spread in (o.worst.ref_us, o.worst.target_us)]
    spread = f"{o.lower:.2f} to {o.upper:.2f}"
    return (o.op, f"{o.ratio:.2f}", spread, *times, clip(o.worst.call.inputs, _MOST_SHOWN))


def _facts(found: Slowdown) -> Iterator[str]:
    step, n = found.step, len(found.operators)
    part = "" if step.complete else ", without the calls that could not be timed"
    if found.of_program:
        yield f"operators of a step: {_us(step.ref_us)} on the reference, {_us(step.target_us)} on the target"
        yield f"expected step: {step.ratio:.2f} times as long on the target{part}"
    else:
        yield f"{n} operators timed, {len(found.failing)} fail on the target, {len(found.left_out)} cannot be timed"
    if n:
        yield f"median operator: {found.median_ratio:.2f} times as long"
    for bound in BOUNDS:
        slower, surely = len(found.slower(bound)), len(found.surely_slower(bound))
        noise = f" ({slower - surely} of them within the noise)" if surely < slower else ""
        share = f" ({100 * slower / n:.1f} %)" if n and not found.of_program else ""
        yield f"more than {bound:g} times slower: {slower} of {n} operators{share}{noise}"
    intolerable = found.surely_slower(found.intolerable)
    if intolerable:
        more = len(intolerable) - MAX_LISTED
        names = ", ".join(o.op for o in intolerable[:MAX_LISTED])
        yield f"intolerable, more than {found.intolerable:g} times: {names}{f' and {more} more' if more > 0 else ''}"
    yield f"faster than the reference: {len(found.faster)} of {n}"


def _failures(found: Slowdown) -> Iterator[tuple[str, str, str]]:
    for m in found.failing:
        yield m.call.op, m.call.inputs, f"the target: {m.failed}"
    for m in found.left_out:
        yield m.call.op, m.call.inputs, m.failed


def _text(found: Slowdown, title: str) -> str:
    lines = [f"slowdown of {title}", "", *_facts(found), ""]
    lines += columns(_rows(found))
    if len(found.operators) > MAX_LISTED:
        lines.append(f"… and {len(found.operators) - MAX_LISTED} more: -f csv lists all")
    failures = list(_failures(found))
    if failures:
        lines += [
            "",
            "not timed:",
            *(f"  {op}({clip(inputs, _MOST_SHOWN)})  {why}" for op, inputs, why in failures[:MAX_LISTED]),
        ]
        if len(failures) > MAX_LISTED:
            lines.append(f"  … and {len(failures) - MAX_LISTED} more: -f csv lists all")
    return "\n".join(lines) + "\n"


def _markdown(found: Slowdown, title: str) -> str:
    lines = [f"# Slowdown of {title}", "", *(f"- {fact}" for fact in _facts(found)), ""]
    lines += pipes(_rows(found))
    if len(found.operators) > MAX_LISTED:
        lines += ["", f"… and {len(found.operators) - MAX_LISTED} more"]
    failures = list(_failures(found))
    if failures:
        lines += ["", "Not timed:", "", *(f"- `{op}({inputs})`: {why}" for op, inputs, why in failures[:MAX_LISTED])]
    return "\n".join(lines) + "\n"


def _json(found: Slowdown, title: str) -> str:
    document = {
        "format": _FORMAT,
        "of": title,
        "step": {**dataclasses.asdict(found.step), "ratio": found.step.ratio} if found.of_program else None,
        "median_ratio": found.median_ratio,
        "n_operators": len(found.operators),
        "n_slower": {f"{bound:g}": len(found.slower(bound)) for bound in BOUNDS},
        "n_surely_slower": {f"{bound:g}": len(found.surely_slower(bound)) for bound in BOUNDS},
        "intolerable": {"bound": found.intolerable, "ops": [o.op for o in found.surely_slower(found.intolerable)]},
        "operators": [_operator_json(o) for o in found.operators],
        "failing": list(map(_measured_json, found.failing)),
        "left_out": list(map(_measured_json, found.left_out)),
    }
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def _operator_json(o: OperatorSlowdown) -> dict[str, Any]:
    figures = {f.name: getattr(o, f.name) for f in dataclasses.fields(o) if f.name != "worst"}
    return {**figures, "worst": _measured_json(o.worst)}


def _measured_json(m: Measured) -> dict[str, Any]:
    figures = {f.name: getattr(m, f.name) for f in dataclasses.fields(m) if f.name != "call"}
    spreads = {k: dataclasses.asdict(v) if isinstance(v, Spread) else v for k, v in figures.items()}
    return {**spreads, "call": {k: getattr(m.call, k) for k in ("op", "inputs", "n", "shapes")}}


def _csv(found: Slowdown, _: str) -> str:
    rows = [
        (o.op, o.n_calls, *(f"{x:.4g}" for x in (o.ratio, o.lower, o.upper, o.lost_us)), o.worst.call.inputs, "")
        for o in found.operators
    ]
    rows += [(op, "", "", "", "", "", inputs, why) for op, inputs, why in _failures(found)]
    head = ("operator", "calls", "ratio", "lower", "upper", "lost_us_per_step", "worst_inputs", "failed")
    return comma_separated(head, rows)


FORMATS: dict[str, Callable[[Slowdown, str], str]] = {
    "txt": lambda found, title: _text(tame(found, whole=True), one_line(title)),
    "md": lambda found, title: _markdown(tame(found, whole=True), one_line(title)),
    "json": _json,
    "csv": lambda found, title: _csv(tame(found, whole=True), title),
}
"""Format to function of a slowdown and its title."""
