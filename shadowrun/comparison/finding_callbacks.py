"""What follows from a finding while the program runs: a callback, an exception at the call, the end of the program."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Final

from shadowrun import analysis
from shadowrun.errors import CallFindingError, ShadowrunWarning
from shadowrun.intercept.call_sites import site_of
from shadowrun.replay.replayer import Replayer

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.analysis import Finding
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.types import OpRecord

__all__ = ["FindingWatch", "WatchedReplayer"]

# A callback comes soon after its finding, and most calls cost one look at the clock.
_TICK_S: Final = 0.25
_MAX_NOTE: Final = 300


class FindingWatch:
    """Sees each finding as it is recorded.

    Args:
        is_known: Whether the ledger excuses a record: then it is no finding.
        ends_program: Whether a finding ends the program: ``fail_fast``.
        stop_on: Kinds of findings that raise at their call.
        on_finding: Called with each new finding.

    Attributes:
        n_found: Findings so far, by kind.
        end_program: Called once, with the reason.
        on_tick: Called at most four times a second, while calls are recorded.
        notes: What a report must say: that the callback raised.
    """

    def __init__(
        self,
        is_known: Callable[[OpRecord], bool],
        ends_program: Callable[[OpRecord], bool],
        stop_on: tuple[str, ...],
        on_finding: Callable[[Finding], object] | None,
    ) -> None:
        self._is_known, self._ends_program = is_known, ends_program
        self._stop_on, self._on_finding = stop_on, on_finding
        self.n_found: Counter[str] = Counter()
        self.end_program: Callable[[str], None] | None = None
        self.on_tick: Callable[[], None] | None = None
        self.notes: tuple[str, ...] = ()
        self._keys: set[Any] = set()
        self._new: deque[OpRecord] = deque()
        self._stop: tuple[int, OpRecord] | None = None
        self._may_stop = self._delivering = False
        self._thread = 0
        self._ticked = 0.0

    def start(self) -> None:
        """The comparison begins on this thread."""
        self._thread, self._stop, self._may_stop = threading.get_ident(), None, bool(self._stop_on)

    # -- as a `Watch` ------------------------------------------------------------------------------------

    def on_finding(self, record: OpRecord) -> None:
        """A call that is a finding was recorded."""
        if self._is_known(record):
            return
        kind = str(record.verdict.status)
        if self.end_program is not None and self._ends_program(record):
            end, self.end_program = self.end_program, None
            where = f" at {record.call.site}" if record.call.site else ""
            end(f"stopped at the first finding that fails the run: {kind} of {record.call.op}{where}")
        if self._may_stop and self._stop is None and kind in self._stop_on:
            self._stop = threading.get_ident(), record
        verdict = record.verdict
        key = kind, record.call.op, verdict.cause, analysis.without_numbers(verdict.explanation)
        if key not in self._keys:
            self._keys.add(key)
            self.n_found[kind] += 1
            if self._on_finding is not None:
                self._new.append(record)

    def poll(self) -> None:
        """Look around, if it was not done just before."""
        now = time.monotonic()
        if now - self._ticked < _TICK_S:
            return
        self._ticked = now
        self.deliver()
        if self.on_tick is not None:
            with contextlib.suppress(Exception):  # a line that cannot be shown is not shown
                self.on_tick()

    # -- on the program's threads ---------------------------------------------------------------------------

    def after_call(self, held: Callable[[], Any]) -> None:
        """A call of the program has been compared, or handed over to be.

        Args:
            held: Gives its names, results of the target and of the reference.

        Raises:
            CallFindingError: It is a finding that `stop_on` names.
        """
        if self._new:
            self.deliver()
        stop = self._stop
        if stop is None or stop[0] != threading.get_ident():
            return
        # Once: what the program does on its way out, such as saving its state, must work.
        self._stop, self._may_stop = None, False
        finding, call = analysis.finding_of_call(stop[1]), stop[1].call
        names, actual, expected = held() or ((), (), ())
        where = call.site or site_of(None) or "a line that is not known"
        message = f"{finding.what}, in call {call.seq} of step {call.step} at {where}. {finding.next_step}"
        raise CallFindingError(message, finding, names, actual, expected)

    def deliver(self) -> None:
        """Call the callback with the findings that wait, if this is the thread of the block."""
        if self._on_finding is None or self._delivering or threading.get_ident() != self._thread:
            return
        self._delivering = True
        try:
            while self._new:
                try:
                    self._on_finding(analysis.finding_of_call(self._new.popleft()))
                except Exception as error:
                    self._failed(error)
        finally:
            self._delivering = False

    def _failed(self, error: Exception) -> None:
        if self.notes:
            return
        what = f"{type(error).__name__}: {error}"[:_MAX_NOTE]
        self.notes = (f"on_finding raised {what}; later exceptions of it are not noted.",)
        with contextlib.suppress(ShadowrunWarning):  # the user's filters make errors of warnings
            warnings.warn(
                f"shadowrun: on_finding raised {what}. Your program continues; this is noted once.",
                ShadowrunWarning,
                stacklevel=2,
            )


class WatchedReplayer(Replayer):
    """Has a `FindingWatch` look after each call; a subclass, so that other runs pay nothing."""

    watch: FindingWatch

    def observe(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As in `Replayer`; then what follows from a finding."""
        out = super().observe(plan, args, kwargs)
        self.watch.after_call(self.take_held)
        return out
