"""Report of a sweep of mitigations as a `Document`."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Final

from shadowrun.report.document import (
    Block,
    Cell,
    Column,
    Document,
    Fact,
    Facts,
    Limits,
    Note,
    Records,
    Section,
    Span,
    Table,
)
from shadowrun.studies.classes.equivalence import letter
from shadowrun.studies.grid import RECORDED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadowrun.studies.mitigate.sweep import Sweep, Trial

__all__ = ["mitigation_document"]

FORMAT: Final = 1
"""Version of the JSON's form."""
_LIMITS: Final = Limits(30, 100, 400)
_MAX_NAMES: Final = 4
_LEGEND: Final = (
    "settings: platforms that are still set differently; bits left: mantissa bits in which all agree; ignore: low "
    "bits of the outputs without which they agree; processor, clock: time in units of the program as it is"
)
# Where time by the clock grows by so much more than processor time, processors stand idle.
_IDLE: Final = 1.25


def mitigation_document(sweep: Sweep) -> Document:
    """The report."""
    blocks: list[Block] = [Note(line) for line in _summary(sweep)]
    blocks += [Note(line, "warn", "warning") for line in _warnings(sweep)]
    if sweep.best.mitigations:
        blocks.append(Facts(tuple(_in_a_program(sweep.best))))
    table = _table(sweep, (sweep.base, *sweep.singles))
    blocks.append(Section("Mitigations", (table,), _LEGEND, len(sweep.singles)))
    if sweep.combinations:
        lead = f"{sweep.n_untried:,} others could be tried: --combinations." if sweep.n_untried else ""
        table = _table(sweep, sweep.combinations)
        blocks.append(Section("Combinations", (table,), lead, len(sweep.combinations)))
    blocks.append(
        Section("Classes", (_letters(sweep),), "Platforms with one letter gave the same bytes in all outputs.")
    )
    blocks.append(Section("How each is applied", (_how(sweep),)))
    if sweep.inapplicable:
        columns = (Column("mitigation", "name"), Column("why"))
        table = Table(columns, tuple(sweep.inapplicable.items()), noun="mitigations", limits=_LIMITS)
        blocks.append(Section("Not applicable", (table,), count=len(sweep.inapplicable)))
    if failed := [
        (t.name, c.platform, c.outcome, c.note) for t in _trials(sweep) for c in t.cells if c.outcome != RECORDED
    ]:
        heads = (Column("mitigation", "name"), Column("platform"), Column("outcome"), Column("last line"))
        table = Table(heads, tuple(failed), noun="processes", limits=_LIMITS)
        blocks.append(Section("Processes that failed", (table,), count=len(failed)))
    return Document(f"mitigations of {sweep.program}", tuple(blocks), _data(sweep), _records(sweep))


def _trials(sweep: Sweep) -> tuple[Trial, ...]:
    return (sweep.base, *sweep.singles, *sweep.combinations)


def _summary(sweep: Sweep) -> Iterator[str]:
    base, best = sweep.base, sweep.best
    outputs = ", ".join(sweep.outputs[:_MAX_NAMES]) + (", …" if len(sweep.outputs) > _MAX_NAMES else "")
    yield f"{_n(len(sweep.platforms), 'platform')}, {_n(len(sweep.outputs), 'output')} ({outputs})"
    yield f"as it is: {_n(base.n_classes, 'class', 'classes')}"
    if base.n_classes == 1:
        yield "the platforms agree already: no mitigation is needed"
    elif not best.mitigations:
        yield "no mitigation leaves fewer classes"
    else:
        what = "cheapest that leaves one class" if best.n_classes == 1 else f"fewest classes ({best.n_classes})"
        yield f"{what}: {best.name}{_cost(sweep, best)}"
    if base.ignored:
        yield f"without any, the outputs agree if their lowest {base.ignored} mantissa bits are ignored"


def _cost(sweep: Sweep, trial: Trial) -> str:
    processor, wall = (trial.ratio(sweep.base, which) for which in ("processor", "wall"))
    if math.isnan(processor):
        return ""
    return f", {processor:.2f} times the processor time, {wall:.2f} times the time by the clock"


def _warnings(sweep: Sweep) -> Iterator[str]:
    base, best = sweep.base, sweep.best
    if base.differing:
        names = ", ".join(base.differing[:_MAX_NAMES]) + (", …" if len(base.differing) > _MAX_NAMES else "")
        yield (
            f"random numbers or inputs differ between the platforms ({names}): seed the program, and load inputs and "
            "parameters from a file, since random numbers depend on the platform even with a seed"
        )
    # On one machine, platforms are often the same but for a setting: to set it equal makes them one platform.
    if best.mitigations and best.n_settings < len(sweep.platforms):
        yield (
            f"{best.name} replaces settings in which these platforms differ: {best.n_settings} of "
            f"{len(sweep.platforms)} are left different. On separate machines, set it on each of them"
        )
    # One thread instead of many costs no processor time, and much time by the clock: a cheap mitigation may be a slow
    # one.
    processor, wall = (best.ratio(base, which) for which in ("processor", "wall"))
    if best.mitigations and wall > max(_IDLE, _IDLE * processor):
        yield (
            f"{best.name} takes {wall:.2f} times as long by the clock, and {processor:.2f} times the processor time: "
            "processors stand idle"
        )
    if incomplete := [c.platform for c in base.cells if c.outcome != RECORDED]:
        yield f"not counted, since the program fails there without a mitigation: {', '.join(incomplete)}"


def _in_a_program(trial: Trial) -> Iterator[Fact]:
    for mitigation in trial.mitigations:
        yield Fact(mitigation.name, mitigation.in_a_program or mitigation.applied, "action")


def _table(sweep: Sweep, trials: tuple[Trial, ...]) -> Table:
    columns = (
        *(Column("mitigation", "name"), Column("classes", "number"), Column("settings", "number")),
        *(Column("bits left", "number"), Column("ignore", "number"), Column("processor", "number")),
        *(Column("clock", "number"), Column("note")),
    )
    return Table(columns, tuple(_row(sweep, trial) for trial in trials), noun="mitigations", limits=_LIMITS)


def _row(sweep: Sweep, trial: Trial) -> tuple[Cell, ...]:
    is_best = trial is sweep.best and trial is not sweep.base
    tone = "good" if trial.is_complete and trial.n_classes == 1 else ""
    # 0 classes: no platform recorded, which is not the fewest.
    n = f"{trial.n_classes}" if trial.n_classes else "-"
    return (
        trial.name,
        (Span(n, tone),),
        f"{trial.n_settings}",
        f"{trial.bits[0]} of {trial.bits[1]}" if trial.bits[1] else "-",
        f"{trial.ignored}" if trial.ignored is not None else "none",
        *(_ratio(trial.ratio(sweep.base, which)) for which in ("processor", "wall")),
        (Span("cheapest" if is_best and trial.n_classes == 1 else _note(sweep, trial)),),
    )


def _ratio(ratio: float) -> str:
    return "-" if math.isnan(ratio) else f"{ratio:.2f}"


def _note(sweep: Sweep, trial: Trial) -> str:
    if trial is sweep.base:
        return ""
    # A mitigation that kills a platform's process leaves fewer classes, and has mended nothing.
    n_failed = sum(cell.outcome != RECORDED for cell in trial.cells)
    if n_failed:
        return f"fails on {_n(n_failed, 'platform')}"
    return "" if sweep.has_effect(trial) else "no effect"


def _letters(sweep: Sweep) -> Table:
    columns = (Column("mitigation", "name"), *(Column(name) for name in sweep.platforms))
    rows = tuple((t.name, *(letter(label) if label >= 0 else "failed" for label in t.labels)) for t in _trials(sweep))
    return Table(columns, rows, noun="mitigations", limits=_LIMITS)


def _how(sweep: Sweep) -> Table:
    columns = (Column("mitigation", "name"), Column("here"), Column("in a program", detail=1))
    rows = tuple((m.name, m.applied, m.in_a_program) for t in sweep.singles for m in t.mitigations)
    return Table(columns, rows, noun="mitigations", limits=_LIMITS)


def _n(n: int, one: str, many: str = "") -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else round(value, 4)


def _data(sweep: Sweep) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "program": sweep.program,
        "platforms": list(sweep.platforms),
        "outputs": list(sweep.outputs),
        "n_runs": sweep.n_runs,
        "n_untried_combinations": sweep.n_untried,
        "best": [m.name for m in sweep.best.mitigations],
        "trials": [_trial_data(sweep, trial) for trial in _trials(sweep)],
        "not_applicable": dict(sweep.inapplicable),
    }


def _trial_data(sweep: Sweep, trial: Trial) -> dict[str, Any]:
    return {
        "mitigations": [m.name for m in trial.mitigations],
        "applied": [m.applied for m in trial.mitigations],
        "n_classes": trial.n_classes,
        "classes": [letter(label) if label >= 0 else None for label in trial.labels],
        "n_platforms_left": trial.n_settings,
        "remaining_bits": trial.bits[0],
        "mantissa_bits": trial.bits[1],
        "bits_to_ignore": trial.ignored,
        "has_effect": sweep.has_effect(trial),
        "processor_time_ratio": _number(trial.ratio(sweep.base, "processor")),
        "wall_time_ratio": _number(trial.ratio(sweep.base, "wall")),
        "seconds": [None if s is None else dataclasses.asdict(s) for s in trial.seconds],
        "differing_inputs": list(trial.differing),
        "processes": [dataclasses.asdict(cell) for cell in trial.cells],
    }


def _records(sweep: Sweep) -> Records:
    head = (
        *("mitigations", "platform", "outcome", "class", "classes", "platforms left", "bits left", "mantissa bits"),
        *("bits to ignore", "processor s", "wall s", "processor time ratio", "wall time ratio"),
    )
    rows = tuple(
        (
            *(t.name, platform, cell.outcome, letter(label) if label >= 0 else "", t.n_classes, t.n_settings, *t.bits),
            *("" if t.ignored is None else t.ignored, *_seconds(t, number)),
            *(_number(t.ratio(sweep.base, which)) for which in ("processor", "wall")),
        )
        for t in _trials(sweep)
        for number, (platform, cell, label) in enumerate(zip(sweep.platforms, t.cells, t.labels, strict=True))
    )
    return Records(head, rows)


def _seconds(trial: Trial, number: int) -> tuple[float | str, float | str]:
    found = trial.seconds[number] if trial.seconds else None
    return ("", "") if found is None else (round(found.processor, 4), round(found.wall, 4))
