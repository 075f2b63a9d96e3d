"""A run as a trace in Chrome's format, which ui.perfetto.dev and chrome://tracing show: lanes and counters.

Of a run with ``timeline=True``, a data file says when the parts of each call ran: all events are where they were.

Of other runs it has the duration of each call on both sides, start and duration of each step, and the time that a whole
run spent in shadowrun, but neither the start of a call nor the time that judging it took. So calls lie one after the
other from the start of their step, and what is left of a step comes behind them: split into judge and program where the
run has one step, one event where it has more. The trace says so itself, in `otherData` and in the names of the lanes.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from shadowrun.errors import UsageError
from shadowrun.report.sanitize import clip, sanitize
from shadowrun.store.atomic_write import atomic_write

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from shadowrun.store.datafile import DataFile
    from shadowrun.types import RunInfo

__all__ = ["MAX_CALLS", "trace_events", "write_trace"]

MAX_CALLS: Final = 200_000
"""Calls in a trace: browsers become slow with more; the others are counted."""
# A run of millions of calls is never in memory as a whole.
PIECE: Final = 20_000

PROGRAM, TARGET, REFERENCE, REST = 1, 2, 3, 4
JUDGE: Final = REST
_LANES: Final = {
    PROGRAM: "program: steps, phases, modules",
    TARGET: "calls on the target",
    REFERENCE: "calls on the reference",
    REST: "judge, copies, recording; the program's Python (not recorded by call)",
}
_TIMED_LANES: Final = {**_LANES, PROGRAM: "program: steps, phases, modules, calls", JUDGE: "judge"}
_TIMED_NOTE: Final = (
    "All times were measured, as the host sees them. In the lane of the program a call lasts until the program goes "
    "on, copies and replay included; what lies between two calls is the program's Python."
)
_UNTIMED_NOTE: Final = " Calls whose times were not recorded (behind the first 200,000, say) are left out."
_NOTE: Final = (
    "Durations of steps and calls are measured, as the host sees them. Start times of calls are not recorded: calls "
    "lie one after the other from the start of their step, the program's own before its replay."
)
_ASYNCHRONOUS: Final = (
    " Calls were compared behind the device: durations are times to launch, and the lanes of target and reference "
    "start each step together."
)
_CALLS: Final = """
select call.seq, call.step, call.context_id, outcome.status, call.ref_ns, call.target_ns,
    began_ns, ref_at_ns, target_at_ns, judge_at_ns, judged_ns, ended_ns
from call join verdict on verdict.id = call.verdict_id join outcome on outcome.id = verdict.outcome_id
left join moment on moment.seq = call.seq
where call.seq > ? order by call.seq limit ?"""
_FIRST_MOMENTS: Final = "select min(seq) from moment group by seq / ?"
_CONTEXTS: Final = """
select context.id, op.name, inputs, dtypes, shapes, module, phase, site.text, device
from context join op on op.id = op_id join site on site.id = site_id"""
_BITS: Final = re.compile(r"[a-z]*?(\d{1,3})")
_SHAPE: Final = re.compile(r"\[([\d, ]*)\]", re.ASCII)
_SIZE: Final = re.compile(r"\d{1,19}", re.ASCII)
_MAX_SHAPES: Final = 2000
"""Characters of the shapes of a call: a file may have any."""
_MAX_SECONDS: Final = 1e12
_FAILING: Final = ("mismatch", "unsupported", "error", "fallback")


@dataclass(frozen=True, slots=True)
class _Context:
    op: str
    inputs: str
    module: str
    phase: str
    site: str
    device: str
    n_bytes: int

    @property
    def args(self) -> dict[str, Any]:
        """What an event of a call says."""
        return {
            "inputs": clip(self.inputs, 200),
            "module": clip(self.module, 200),
            "phase": self.phase,
            "line": clip(self.site, 200),
            "device of the program": self.device,
        }


@dataclass(frozen=True, slots=True)
class _Times:
    """When a call ran, in microseconds of the run's clock.

    Attributes:
        began, ended: In the program.
        at: Lane to the start of its event.
        judged: End of the judge's event.
    """

    began: float
    ended: float
    at: dict[int, float]
    judged: float

    @classmethod
    def from_row(cls, row: Sequence[int | None]) -> _Times | None:
        """From the columns of ``moment``; None if the call has no row there."""
        if row[0] is None:
            return None
        began, ref, target, judge, judged, ended = (None if ns is None else ns / 1e3 for ns in row)
        at = {REFERENCE: ref, TARGET: target, JUDGE: judge if judged is not None else None}
        known = {lane: start for lane, start in at.items() if start is not None}
        return cls(began or 0.0, ended or 0.0, known, judged or 0.0)


@dataclass(slots=True)
class _Process:
    """What is written of one run: its clock, and the spans that are open.

    Attributes:
        pid: Number of the run in a combined file.
        devices: Device type of the target and the reference, to tell the program's own calls.
        steps: Start and duration of its steps, in microseconds.
        serial: Whether replays made the program wait.
        own_us: Time of the whole run in shadowrun, replays included.
        timed: The data file has the times of its calls.
        replayed_us: Time of the replays so far; None once a call's own side was not known.
    """

    pid: int
    devices: tuple[str, str]
    steps: dict[int, tuple[float, float]]
    serial: bool
    own_us: float
    timed: bool = False
    replayed_us: float | None = 0.0
    step: int | None = None
    started: float = 0.0
    clock: dict[int, float] = field(default_factory=lambda: {TARGET: 0.0, REFERENCE: 0.0})
    spans: list[tuple[str, str, float]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def now(self) -> float:
        return max(self.clock.values())

    def call(
        self, step: int, seq: int, where: _Context, status: str, times: dict[int, float], when: _Times | None
    ) -> Iterator[dict[str, Any]]:
        if step != self.step:
            yield from self.end_step()
            self.step, self.started = step, max(self.now, self.steps.get(step, (0.0, 0.0))[0])
            # Calls of a data file without times have durations alone: they are laid one after the other from the step's
            # start.
            self.clock = dict.fromkeys(self.clock, self.started)
        yield from self._enter((("phase", where.phase), ("module", where.module)), when)
        args = where.args | {"call": seq, "status": status}
        if when is not None:
            yield from self._at_their_times(where, args, times, when)
        for lane in () if self.timed else self._order(where.device):
            if lane not in times:
                continue
            # One lane waits for the other: what runs on one thread would look as if it ran at once.
            if self.serial:
                self.clock = dict.fromkeys(self.clock, self.now)
            began = self.clock[lane]
            self.clock[lane] = began + times[lane]
            own = self._own(where.device)
            if own is None or self.replayed_us is None:
                self.replayed_us = None
            # The program's own side is its time, whatever shadowrun does; only the other side is overhead.
            elif lane != own:
                self.replayed_us += times[lane]
            kind = "program" if lane == own else "replay"
            yield _span(self.pid, lane, where.op, began, times[lane], kind, args | {"of": kind})
        self.counts.update(calls=1, bytes=where.n_bytes, mismatches=int(status == "mismatch"))
        for name in ("calls", "mismatches", "bytes"):
            if name == "calls" or self.counts[name]:
                yield {"ph": "C", "pid": self.pid, "tid": 0, "ts": _us(self.now), "name": _COUNTERS[name],
                       "args": {name: self.counts[name]}}  # fmt: skip
        if status in _FAILING:
            yield {"ph": "i", "s": "t", "pid": self.pid, "tid": PROGRAM, "ts": _us(self.now), "cat": status,
                   "name": f"{status}: {where.op}", "args": args}  # fmt: skip

    def _at_their_times(
        self, where: _Context, args: dict[str, Any], times: dict[int, float], when: _Times
    ) -> Iterator[dict[str, Any]]:
        own = self._own(where.device)
        # Viewers refuse an event of negative length, and a file from anyone may have any numbers.
        yield _span(self.pid, PROGRAM, where.op, when.began, max(when.ended - when.began, 0.0), "call", args)
        for lane, began in when.at.items():
            took = when.judged - began if lane == JUDGE else times.get(lane, 0.0)
            kind = "judge" if lane == JUDGE else "program" if lane == own else "replay"
            yield _span(self.pid, lane, where.op, began, max(took, 0.0), kind, args | {"of": kind})
        self.clock = dict.fromkeys(self.clock, max(self.now, when.ended))

    @property
    def judge_us(self) -> float | None:
        """What shadowrun took beside the replays; None if that is not known."""
        return None if self.replayed_us is None or not self.own_us else max(0.0, self.own_us - self.replayed_us)

    def _own(self, device: str) -> int | None:
        """The lane of the program's own calls; None if both platforms are one device."""
        target, ref = self.devices
        kind = device.partition(":")[0]
        # Both sides are the program's device: nothing in the file says which of the two runs was the program's.
        if target == ref:
            return None
        return TARGET if kind == target else REFERENCE if kind == ref else None

    def _order(self, device: str) -> tuple[int, int]:
        return (TARGET, REFERENCE) if self._own(device) == TARGET else (REFERENCE, TARGET)

    def _enter(self, wanted: tuple[tuple[str, str], ...], when: _Times | None) -> Iterator[dict[str, Any]]:
        """Close the phase and the module that the next call is not in, and open its own."""
        same = 0
        while same < min(len(self.spans), len(wanted)) and self.spans[same][:2] == wanted[same]:
            same += 1
        yield from self._close(same)
        if when is not None:  # the program's Python between two calls is in neither module
            self.clock = dict.fromkeys(self.clock, max(self.now, when.began))
        # A call outside any module still has a place in the list, so that the next one closes what is open.
        self.spans += [(kind, name, self.now) for kind, name in wanted[same:]]

    def _close(self, keep: int) -> Iterator[dict[str, Any]]:
        while len(self.spans) > keep:
            kind, name, began = self.spans.pop()
            if name:
                yield _span(self.pid, PROGRAM, clip(name, 200), began, self.now - began, kind, {})

    def end_step(self) -> Iterator[dict[str, Any]]:
        """Close all that is open; gives the step itself, and its rest."""
        if self.step is None:
            return
        yield from self._close(0)
        wall = self.steps.get(self.step, (0.0, 0.0))[1]
        rest = self.started + wall - self.now
        args: dict[str, Any] = {"measured, ms": round(wall / 1e3, 3) if wall else "not recorded"}
        yield _span(
            self.pid, PROGRAM, f"step {self.step}", self.started, max(wall, self.now - self.started), "step", args
        )
        judge = self.judge_us
        if self.timed:
            pass
        elif self.serial and rest > 0 and judge is not None and len(self.steps) == 1:
            judge = min(judge, rest)
            yield _span(self.pid, REST, "judge, copies, recording", self.now, judge, "judge", {})
            yield _span(self.pid, REST, "the program's Python", self.now + judge, rest - judge, "rest", {})
        elif self.serial and rest > 0:
            yield _span(self.pid, REST, "rest of the step: judge and the program", self.now, rest, "rest", {})
        end = max(self.now, self.started + wall)
        self.clock = dict.fromkeys(self.clock, end)
        self.step = None


_COUNTERS: Final = {"calls": "calls", "mismatches": "mismatches", "bytes": "bytes of inputs"}


def trace_events(data: DataFile, most: int = MAX_CALLS) -> Iterator[dict[str, Any]]:
    """The events, those of a lane in the order of their ends.

    Args:
        data: Data file to read.
        most: Calls at most.
    """
    return _events(data, _processes(data), most)


def _events(data: DataFile, processes: list[tuple[_Process, str]], most: int) -> Iterator[dict[str, Any]]:
    contexts = {number: _context(rest) for number, *rest in data.query(_CONTEXTS)}
    for process, name in processes:
        yield _named(process.pid, 0, "process_name", name)
        for lane, text in (_TIMED_LANES if process.timed else _LANES).items():
            yield _named(process.pid, lane, "thread_name", text)
            yield {**_named(process.pid, lane, "thread_sort_index", ""), "args": {"sort_index": lane}}
    n_stored, n_folded = _counts(data)
    if n_stored > most or n_folded:
        # The time in shadowrun is that of all calls, also of those that are left out.
        for process, _ in processes:
            process.replayed_us = None
    last, n_left = -1, most
    while n_left > 0 and (rows := list(data.query(_CALLS, (last, min(PIECE, n_left))))):
        for seq, step, context, status, ref_ns, target_ns, *moment in rows:
            measured = ((TARGET, target_ns), (REFERENCE, ref_ns))
            times = {lane: ns / 1e3 for lane, ns in measured if ns is not None and ns >= 0}
            process, _ = processes[min(seq // data.block, len(processes) - 1)]
            yield from process.call(step, seq, contexts[context], status, times, _Times.from_row(moment))
        last, n_left = rows[-1][0], n_left - len(rows)
    for process, _ in processes:
        yield from process.end_step()


def write_trace(data: DataFile, path: Path, most: int = MAX_CALLS) -> tuple[int, int]:
    """Write a trace, compressed if the name ends in ``.gz``.

    Args:
        data: Data file to read.
        path: Ends in ``.json`` or ``.json.gz``.
        most: Calls at most.

    Returns:
        The number of calls in it, and of those that the data file has.

    Raises:
        UsageError: Another ending, or the file cannot be written.
    """
    if not path.name.endswith((".json", ".json.gz")):
        raise UsageError(f"--trace {str(path)!r}: use a file that ends in .json or .json.gz.", slug="bad-option")
    n_stored, n_folded = _counts(data)
    n_all, n = n_stored + n_folded, min(n_stored, most)
    processes = _processes(data)
    try:
        with atomic_write(path) as raw:
            # Without a time: two traces of a run are equal.
            packed = gzip.GzipFile("", "wb", 6, raw, mtime=0) if path.suffix == ".gz" else None
            file = io.TextIOWrapper(packed or raw, "utf-8", "replace", "\n")
            _write(file, _events(data, processes, most))
            # Last: how long the replays took is known now.
            others = [process for process, _ in processes]
            other = _other(data.info, n, n_all, others, _untimed(data, others))
            file.write(f'"otherData": {json.dumps(sanitize(other), allow_nan=False)}}}\n')
            file.flush()
            file.detach()
            if packed is not None:
                packed.close()
    except OSError as error:
        raise UsageError(
            f"The trace {str(path)!r} cannot be written ({error.strerror}): its folder must exist and be writable.",
            slug="unwritable-report",
        ) from error
    return n, n_all


def _counts(data: DataFile) -> tuple[int, int]:
    """Calls with a row of their own, and those of which only sums are kept."""
    ((n_stored,),) = data.query("select count(*) from call")
    ((n_folded,),) = data.query("select coalesce(sum(n), 0) from folded")
    return n_stored, n_folded


def _write(file: io.TextIOWrapper, events: Iterable[dict[str, Any]]) -> None:
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    for number, event in enumerate(events):
        file.write(",\n" if number else "\n")
        json.dump(sanitize(event), file, allow_nan=False)
    file.write("\n],\n")


def _untimed(data: DataFile, processes: Sequence[_Process]) -> int:
    """Calls without times in a file that has those of others."""
    if not any(process.timed for process in processes):
        return 0
    ((n,),) = data.query("select count(*) from call where seq not in (select seq from moment)")
    return int(n)


def _other(info: RunInfo, n: int, n_all: int, processes: Sequence[_Process], n_untimed: int) -> dict[str, Any]:
    """What the trace says of itself."""
    timed = all(process.timed for process in processes)
    note = _TIMED_NOTE if timed else _NOTE + (_ASYNCHRONOUS if info.async_compare_s > 0 else "")
    note += _UNTIMED_NOTE if n_untimed else ""
    left, judge_us = n_all - n, [None if process.timed else process.judge_us for process in processes]
    return {
        "note": note,
        "target": clip(info.target, 200),
        "reference": clip(info.ref, 200),
        "calls": n,
        **({"calls left out": left} if left else {}),
        **({"calls without times": n_untimed} if n_untimed else {}),
        "wall time of the run, s": _seconds_of_file(info.wall_s),
        "of it in shadowrun, replays included, s": _seconds_of_file(info.own_s),
        # Of all calls: a trace of some would count the replays of the others.
        **({"of it judge, copies and recording, s": known} if not left and (known := _seconds(judge_us)) else {}),
    }


def _processes(data: DataFile) -> list[tuple[_Process, str]]:
    steps: dict[int, dict[int, tuple[float, float]]] = {}
    for source, step, started_s, wall_s in data.query("select source_id, step, started_s, wall_s from step"):
        if _seconds_of_file(started_s) >= 0 and _seconds_of_file(wall_s) >= 0:
            steps.setdefault(source, {})[step] = (_seconds_of_file(started_s) * 1e6, _seconds_of_file(wall_s) * 1e6)
    timed = {seq // data.block for (seq,) in data.query(_FIRST_MOMENTS, (data.block,))}
    runs = [(source.number, source.file, source.info) for source in data.sources] or [(0, "", data.info)]
    found = []
    for number, file, info in runs:
        devices = (re.split(r"[:\[]", info.target)[0], re.split(r"[:\[]", info.ref)[0])
        serial = info.async_compare_s <= 0
        name = f"{info.target} against {info.ref}" + (f", rank {info.rank}" if info.world_size > 1 else "")
        process = _Process(
            number, devices, steps.get(number, {}), serial, _seconds_of_file(info.own_s) * 1e6, number in timed
        )
        found.append((process, clip(f"{name} ({file})" if file else name, 200)))
    return found


def _context(row: list[Any]) -> _Context:
    op, inputs, dtypes, shapes, module, phase, site, device = row
    return _Context(op, inputs, module, phase, site, device, _n_bytes(dtypes, shapes))


def _n_bytes(dtypes: str, shapes: str) -> int:
    """Bytes of the tensors ``f32,f32`` of shapes ``[3, 4] [3]``."""
    total = 0
    for dtype, shape in zip(dtypes[:_MAX_SHAPES].split(","), _SHAPE.findall(shapes[:_MAX_SHAPES]), strict=False):
        bits = _BITS.match(dtype)
        sizes = [min(int(size), 2**53) for size in _SIZE.findall(shape)]
        total += math.prod(sizes) * (int(bits[1]) // 8 if bits else 1)
    return min(total, 2**53)


def _span(pid: int, tid: int, name: str, ts: float, dur: float, category: str, args: dict[str, Any]) -> dict[str, Any]:
    place = {"pid": pid, "tid": tid, "ts": _us(ts), "dur": _us(_us(ts + dur) - _us(ts))}
    return {"ph": "X", "name": name, "cat": category, **place, "args": args}


def _named(pid: int, tid: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _us(us: float) -> float:
    return round(us, 3)


def _seconds(times: list[float | None]) -> float | None:
    known = [us for us in times if us is not None]
    return round(sum(known) / 1e6, 6) if len(known) == len(times) else None


def _seconds_of_file(value: Any) -> float:
    """Seconds; 0 for what no run takes: sums of such numbers are infinite, which JSON does not know."""
    return float(value) if isinstance(value, (int, float)) and abs(value) <= _MAX_SECONDS else 0.0
