"""The parts of the time of an isolated comparison, in microseconds per call.

The total is the additional time of a step, without instrumentation. The cost of torch's dispatch is the same difference
for a mode that does nothing. The parts are timed where they are called; the time of the clock itself, measured on an
empty function, is subtracted. The rest belongs to none of the parts: the handler's own lines, names of modules,
`step()`, colder caches.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from measuring import timed
from tools import Tool, make_tools
from torch.utils._python_dispatch import TorchDispatchMode

from shadowrun import native
from shadowrun.intercept.attribution import Attribution
from shadowrun.numerics import bits
from shadowrun.recording.recorder import Recorder
from shadowrun.replay.comparator import Comparator
from shadowrun.replay.executor import Executor
from shadowrun.replay.input_copies import CopyBuffers
from shadowrun.replay.paths import same_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from workloads import Workload

__all__ = ["profile"]

_clock = time.thread_time_ns  # on a machine with other work, the wall would say nothing
_TRIALS = 20_000
_READING_NS = 25  # one reading of the clock in C, with which each of its parts begins or ends


class _Clocks:
    """Time spent in named functions, without that of named functions inside them."""

    def __init__(self) -> None:
        self.ns: Counter[str] = Counter()
        self.n: Counter[str] = Counter()
        self.compiled_ns: Counter[str] = Counter()
        self.n_compiled: Counter[str] = Counter()
        self._inner = [0]

    def on(self, name: str | Callable[..., str], function: Callable[..., Any], *, frames: bool = False) -> Any:
        """The function with a clock around it.

        Args:
            name: Of the part, or what finds it from the arguments.
            function: To be clocked.
            frames: Its last argument counts frames up from it, of which there is one more now.
        """

        def clocked(*args: Any, **kwargs: Any) -> Any:
            part = name if isinstance(name, str) else name(*args)
            if frames:
                args = (*args[:-1], args[-1] + 1)
            inner = self._inner
            inner.append(0)
            start = _clock()
            try:
                return function(*args, **kwargs)
            finally:
                took = _clock() - start
                self.ns[part] += took - inner.pop()
                self.n[part] += 1
                inner[-1] += took

        return clocked

    def add(self, name: str, ns: int, n: int) -> None:
        """Time that another clock took, whose own time is a tenth of ours."""
        self.compiled_ns[name] += ns
        self.n_compiled[name] += n

    def times(self, name: str) -> int:
        """How often it was called."""
        return self.n[name] + self.n_compiled[name]

    def us(self, name: str, own_ns: float) -> float:
        """Microseconds, without the clock's own time."""
        compiled = self.compiled_ns[name] - _READING_NS * self.n_compiled[name]
        return (max(0.0, self.ns[name] - own_ns * self.n[name]) + max(0.0, compiled)) / 1000


class _Count(TorchDispatchMode):
    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        return func(*args, **(kwargs or {}))


def profile(workload: Workload, rounds: int) -> str:
    """A table for one workload."""
    program = workload.build()
    step = program.step
    tools = {tool.name: tool for tool in make_tools()}
    n = workload.inner
    floor = _added_us(workload, step, tools["empty mode (floor)"], rounds)
    whole = _added_us(workload, step, tools["isolated"], rounds)
    plain = 1e6 * statistics.median(timed(step, n).cpu for _ in range(rounds))
    with _Count() as count:
        step()
    blocks = [_clocked(workload, step, tools["isolated"]) for _ in range(rounds)]
    own_ns = _own_ns()
    parts = {name: statistics.median(clocks.us(name, own_ns) for clocks in blocks) / n for name in _PARTS}
    rows = [("plain step", plain, None), ("dispatch: torch hands calls over", floor, count.n)]
    rows += [(name, us, blocks[-1].times(name) / n) for name, us in parts.items() if blocks[-1].times(name)]
    rows += [("the rest", whole - floor - sum(parts.values()), None), ("isolated, all that it adds", whole, count.n)]
    return _table(workload.name, rows, count.n)


def _clocked(workload: Workload, step: Callable[[], object], tool: Tool) -> _Clocks:
    """One block of steps with a clock around each part."""
    clocks = _Clocks()
    with _instrumented(clocks), tool.enter() as hooks, _attribution_clocked(clocks), _compiled_clocked(clocks):
        timed(hooks.step_of(step, trains=workload.trains), workload.inner, after=hooks.after)
    return clocks


_ATTRIBUTION = "attribution: module, phase, line"
_CONTEXT = "context: operator and forms, interned"
_COPIES = "copies of what is written to"
_REPLAY = "replay: the operator once more"
_COMPARE = "compare"
_JUDGE = "judge, results that differ or are drawn"
_RECORD = "record, with writing to the data file"
_COMPILED_PARTS = (_ATTRIBUTION, _CONTEXT, _COPIES, _REPLAY, _COMPARE, _RECORD)
"""In the order of shadowrun/native/compare.h."""
_PARTS = (_ATTRIBUTION, _CONTEXT, _COPIES, _REPLAY, _COMPARE, _JUDGE, _RECORD)


@contextlib.contextmanager
def _instrumented(clocks: _Clocks) -> Iterator[None]:
    """Clocks around the parts of a comparison, all of them looked up when they are called."""

    def part_of_replay(function: Any, *_: Any) -> str:
        name = getattr(function, "__name__", "")
        return {"copy_mutated": _COPIES, "compare_and_record": _JUDGE}.get(name, _REPLAY)

    wanted: list[tuple[Any, str, str | Callable[..., str], bool]] = [
        (Recorder, "context", _CONTEXT, False),
        (bits, "memmove", _COPIES, False),
        (bits, "memmove_with_gil", _COPIES, False),
        (CopyBuffers, "make", _COPIES, False),
        (same_device, "copy_mutated", _COPIES, False),
        (same_device, "with_isolated_warnings", part_of_replay, False),
        (Executor, "run", _REPLAY, False),
        (Executor, "call", _REPLAY, False),
        (same_device, "plainly_equal", _COMPARE, False),
        (bits, "memcmp", _COMPARE, False),
        (bits, "memcmp_with_gil", _COMPARE, False),
        (Comparator, "equal", _COMPARE, False),
        (Comparator, "all_equal", _COMPARE, False),
        (Recorder, "match", _RECORD, False),
        (Recorder, "skip", _RECORD, False),
        (Recorder, "verdict", _RECORD, False),
        (Recorder, "flush", _RECORD, False),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, part, frames in wanted:
            original, inherited = getattr(owner, name), name not in vars(owner)
            setattr(owner, name, clocks.on(part, original, frames=frames))
            stack.callback(*((delattr, owner, name) if inherited else (setattr, owner, name, original)))
        yield


@contextlib.contextmanager
def _attribution_clocked(clocks: _Clocks) -> Iterator[None]:
    """Its functions belong to each instance, since they may be compiled: clocks on those that there are by now."""
    instances = [i for i in gc.get_objects() if isinstance(i, Attribution)]
    kept = [(i, i.find_origin, i.note_origin) for i in instances]
    for i in instances:
        i.find_origin = clocks.on(_ATTRIBUTION, i.find_origin, frames=True)
        i.note_origin = clocks.on(_ATTRIBUTION, i.note_origin, frames=True)
    try:
        yield
    finally:
        for i, find, note in kept:
            i.find_origin, i.note_origin = find, note


@contextlib.contextmanager
def _compiled_clocked(clocks: _Clocks) -> Iterator[None]:
    """The compiled handler's own clocks, for the calls that never reach Python."""
    core = native.core
    handlers = [] if core is None else [h for h in gc.get_objects() if type(h) is core.CompareHandler]
    for handler in handlers:
        handler.clocks(True)
    try:
        yield
    finally:
        for handler in handlers:
            for part, (ns, n) in zip(_COMPILED_PARTS, handler.clocks(False), strict=True):
                clocks.add(part, ns, n)


def _own_ns() -> float:
    """What a clock adds to what it measures."""

    def nothing() -> None:
        pass

    clocks = _Clocks()
    clocked = clocks.on("", nothing)
    for _ in range(_TRIALS):
        clocked()
    return clocks.ns[""] / _TRIALS


def _added_us(workload: Workload, step: Callable[[], object], tool: Tool, rounds: int) -> float:
    with tool.enter() as hooks:
        hooks.step_of(step, trains=workload.trains)()
    added = []
    for _ in range(rounds):
        plain = timed(step, workload.inner).cpu
        with tool.enter() as hooks:
            run = hooks.step_of(step, trains=workload.trains)
            added.append(1e6 * (timed(run, workload.inner, after=hooks.after).cpu - plain))
    return statistics.median(added)


def _table(name: str, rows: list[tuple[str, float, float | None]], n_calls: int) -> str:
    lines = [
        f"{name}: {n_calls} calls in a step",
        f"{'':42}{'µs per step':>12}{'times':>8}{'µs each':>9}{'µs per call':>13}",
    ]
    for what, us, times in rows:
        each = f"{us / times:9.2f}" if times else f"{'':9}"
        lines.append(f"{what:42}{us:12.1f}{'' if times is None else f'{times:.0f}':>8}{each}{us / n_calls:13.2f}")
    return "\n".join(lines) + "\n"
