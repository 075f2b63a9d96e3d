"""When the parts of a call ran, for runs with ``timeline=True``: what a trace shows beside the durations.

A call has a `Moment` while a path observes it. The asynchronous path hands it to the thread that compares, so that the
judge's time is that of the judge's own thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, ParamSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.replay.call import Call, CallRun
    from shadowrun.replay.context import Path, RecordSink

__all__ = ["MAX_MOMENTS", "Moment", "TimedPath", "TimedSink", "Timeline"]

MAX_MOMENTS: Final = 200_000
"""Calls whose times are kept, some 40 bytes each; a trace shows no more."""

_clock = time.perf_counter_ns
_P = ParamSpec("_P")


@dataclass(slots=True)
class Moment:
    """Times of a call, by `time.perf_counter_ns`; 0 where there is none.

    Attributes:
        began, ended: When the program called, and when it went on.
        target, ref: When the run on each side began.
        judge: When the judge began: both runs had ended, and a thread that compares later had got to the call.
        judged: When the call was recorded.
        seq: Its number; -1 before it is recorded.
        handed_over: Another thread compares it.
    """

    began: int
    ended: int = 0
    target: int = 0
    ref: int = 0
    judge: int = 0
    judged: int = 0
    seq: int = -1
    handed_over: bool = False


class Timeline:
    """Notes the times of calls.

    Args:
        add: Takes the number of a call, and its times from `Moment.began` to `Moment.ended` in the order of the table.

    Attributes:
        zero_ns: Start of the run's clock, by `time.perf_counter_ns`.
    """

    def __init__(self, add: Callable[[int, tuple[int | None, ...]], None]) -> None:
        self._add = add
        self._left = MAX_MOMENTS
        self._thread = threading.local()
        self.zero_ns = 0

    @property
    def current(self) -> Moment | None:
        """The call that this thread is in."""
        return getattr(self._thread, "moment", None)

    @contextlib.contextmanager
    def noted_for(self, moment: Moment | None) -> Iterator[None]:
        """Within, what this thread notes belongs to this call; a call inside of it has its own."""
        outer = self.current
        self._thread.moment = moment
        try:
            yield
        finally:
            self._thread.moment = outer

    def ran(self, actual: CallRun | None, expected: CallRun | None) -> None:
        """Note the runs that are to be compared."""
        moment = self.current
        if moment is not None:
            moment.target = 0 if actual is None else actual.began
            moment.ref = 0 if expected is None else expected.began
            ended = max(run.began + run.ns for run in (actual, expected) if run is not None)
            moment.judge = max(ended, _clock()) if moment.handed_over else ended

    def recorded(self, seq: int) -> None:
        """Note that the call was recorded; the first number counts."""
        moment = self.current
        if moment is not None and moment.seq < 0 <= seq:
            moment.seq, moment.judged = seq, _clock()

    def hand_over(self) -> Moment | None:
        """The call that this thread is in, for the thread that compares it. Here it is over, but for the hand-over."""
        moment = self.current
        if moment is not None:
            moment.handed_over, moment.ended = True, _clock()
        return moment

    def finish(self, moment: Moment) -> None:
        """Record the times of a call, unless it has no row of its own."""
        if moment.seq < 0 or self._left <= 0:
            return
        self._left -= 1
        m = moment
        times = (m.began, m.target, m.ref, m.judge, m.judged if m.judge else 0, m.ended)
        self._add(m.seq, tuple([at - self.zero_ns if at else None for at in times]))


class TimedPath:
    """A path whose calls have a `Moment`."""

    def __init__(self, path: Path, timeline: Timeline) -> None:
        self._path = path
        self._timeline = timeline

    def observe(self, call: Call) -> CallRun:
        """As the path does."""
        timeline = self._timeline
        moment = Moment(_clock())
        with timeline.noted_for(moment):
            ran = self._path.observe(call)
        if not moment.handed_over:
            moment.ended = _clock()
            # A call that is not compared has one run.
            if not moment.judge and ran.began:
                moment.target, moment.ref = (ran.began, 0) if call.role.on_target else (0, ran.began)
            timeline.finish(moment)
        return ran


class TimedSink:
    """A `RecordSink` that notes when calls are recorded."""

    def __init__(self, sink: RecordSink, timeline: Timeline) -> None:
        def noting(record: Callable[_P, int]) -> Callable[_P, int]:
            def record_and_note(*args: _P.args, **kwargs: _P.kwargs) -> int:
                seq = record(*args, **kwargs)
                timeline.recorded(seq)
                return seq

            return record_and_note

        self.match, self.verdict = noting(sink.match), noting(sink.verdict)
        self._reserve = sink.reserve
        self._timeline = timeline
        self.context = sink.context
        self.keep_inputs = sink.keep_inputs
        self.bytes_for_inputs = sink.bytes_for_inputs
        self.skip = sink.skip
        self.flush = sink.flush

    def reserve(self) -> tuple[int, int]:
        """As the sink does: a call that is judged later has its number from here on."""
        seq, step = self._reserve()
        self._timeline.recorded(seq)
        return seq, step
