"""The steps of a training: how long each took, and whether the coming one is watched.

The program marks them, or its optimizers do. Who marks them himself is believed from his first mark on.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from shadowrun.intercept.optimizers import Optimizers
from shadowrun.intercept.stretches import Stretches
from shadowrun.intercept.watching import Watching

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.intercept.dispatch import ShadowMode
    from shadowrun.replay.budget import Budget
    from shadowrun.replay.recorder import Recorder
    from shadowrun.replay.replayer import Replayer
    from shadowrun.replay.schedule import Selection

__all__ = ["Steps"]

_FLUSH_S = 0.5
_KEPT_OUT = (
    "The program entered a dispatch mode of its own in a step that the overhead budget left out, and kept it: "
    "the steps in which it was there were not watched."
)


class Steps:
    """The steps of a comparison, and our mode, which the budget takes off for those that it leaves out.

    The methods go in this order: `listen`, `begin`, those that end a step, `leave`, `release`, `finish`.

    Attributes:
        told: Whether the program marked a step since the beginning.
        watching: Our mode on the program's stack; None before the beginning.
    """

    def __init__(self, recorder: Recorder, replayer: Replayer, selection: Selection, budget: Budget | None) -> None:
        self._recorder = recorder
        self._add_step = recorder.data.add_step
        self._attribution = recorder.attribution
        self._replayer = replayer
        self._selection = selection
        self._budget = budget
        self._first_step = recorder.step
        self._stretches: Stretches | None = None
        self._optimizers: Optimizers | None = None
        self._end_step: Callable[[], None] = lambda: None
        self._due = self._at_once = self._guessed = False
        self._n_to_rest = 0
        self._rested: list[int] = []
        self._running = False
        self._began = 0.0
        self._step_began = 0.0
        self._first_began = 0.0
        self._flushed_at = 0.0
        self._wall_s = 0.0
        self.told = False
        self.watching: Watching | None = None

    @property
    def wall_s(self) -> float:
        """Seconds from beginnings to ends, and until now."""
        return self._wall_s + (time.perf_counter() - self._began if self._running else 0.0)

    def listen(self, end_step: Callable[[], None] | None) -> None:
        """Look for what stands for steps. Attribution starts later: its wrapper lies around that of stretches.

        Args:
            end_step: Called where a step is over that the program did not mark; None where it marks all.
        """
        if end_step is not None:
            self._end_step = end_step
            self._optimizers = Optimizers(self._optimizer_stepped)
            self._optimizers.start()
        if self._budget is not None:
            self._stretches = Stretches(self._begin_stretch, self._end_step_of_call)
            self._stretches.start()

    def begin(self, mode: ShadowMode, began_ns: int) -> None:
        """The first step begins.

        Args:
            mode: Ours, to be put on the stack.
            began_ns: When the comparison began to start, by `time.perf_counter_ns`.
        """
        self.told = False
        self._running = True
        self._began = self._step_began = self._first_began = time.perf_counter()
        self.watching = Watching(mode, self._attribution)
        self.watching.begin()
        if self._budget is not None:
            self._budget.start(began_ns)
            self._budget.watched = self.watching.turn(self._budget.watched)
            self._budget.spend_on_step(began_ns, time.perf_counter_ns())

    def mark(self) -> None:
        """The program marks the end of a step: nobody else does any more."""
        if self.told:
            return
        self.told = True
        self._listen_no_more()
        self._end_rest()
        if self._guessed:  # an optimizer stepped several times before: all that was the first step
            self._guessed = False
            self._recorder.step = self._first_step
            self._step_began = self._first_began

    def end_unwatched(self, began_ns: int) -> bool:
        """End the step if the budget left it out: for a small step, each microsecond counts.

        Args:
            began_ns: When the program told of its end, by `time.perf_counter_ns`.

        Returns:
            Whether it was such a step; else it is left to `end`.
        """
        budget, lock = self._budget, self._replayer.lock
        if budget is None or budget.watched or not lock.acquire(False):
            return False
        now = began_ns / 1e9
        try:
            self._end_rest()
            self._begin_step(now)
            if now - self._flushed_at > _FLUSH_S:  # no call does it meanwhile
                self._flushed_at = now
                self._recorder.flush()
            self._watch(budget, began_ns)
            self._n_to_rest = budget.n_to_rest
        except Exception:  # noqa: S110 - a step's row is not worth the user's program
            pass
        finally:
            lock.release()
        return True

    def rests(self) -> bool:
        """End the step if it is of those that are left out whatever they bring: nothing is weighed.

        Returns:
            Whether it was such a step.
        """
        n = self._n_to_rest
        if not n:
            return False
        self._n_to_rest = n - 1
        self._rested.append(time.perf_counter_ns())
        self._recorder.step += 1
        return True

    def _end_rest(self) -> None:
        """Catch up with what was left undone in such steps."""
        self._n_to_rest = 0
        rested = self._rested
        if not rested or self._budget is None:
            return
        began_ns = time.perf_counter_ns()
        self._recorder.step -= len(rested)
        for ended_ns in rested:
            self._begin_step(ended_ns / 1e9)
        own_ns = time.perf_counter_ns() - began_ns
        self._budget.rested(rested[-1], len(rested), own_ns, by_hook=not self.told)
        rested.clear()

    def end(self, began_ns: int) -> None:
        """End the step; arguments as for `end_unwatched`."""
        with self._replayer.between_calls():
            try:
                self._end_rest()
                self._begin_step(began_ns / 1e9)
                self._attribution.end_step()
                if self._budget is not None:
                    self._watch(self._budget, began_ns)
            except Exception:  # noqa: S110 - a step that is not counted right is not worth the user's program
                pass

    def leave(self) -> None:
        """The last step is over: take our mode off."""
        self._end_rest()
        self._running = False
        if self.watching is not None:
            self.watching.end()

    def abandon(self, mode: ShadowMode) -> None:
        """In a forked child: its operators pass."""
        self._running = False
        if self.watching is None:
            return
        if self.watching.can_leave:
            self.watching.end()
        else:
            mode.go_blind()

    def release(self) -> None:
        """Give back what was wrapped."""
        self._running = False
        self._listen_no_more()

    def finish(self) -> None:
        """Record the last step, if anything was in it."""
        now = time.perf_counter()
        self._wall_s += now - self._began
        if self._recorder.recorded_in_step:
            with contextlib.suppress(Exception):
                self._add_step(self._recorder.step, self._step_began - self._began, now - self._step_began)
        if self._due:
            self._due = False
            self._recorder.step += 1

    def notes(self) -> tuple[str, ...]:
        """What a reader should know of them."""
        return (_KEPT_OUT,) if self.watching is not None and self.watching.kept_out else ()

    def _begin_step(self, now: float) -> None:
        """Record the step that is over, and begin another."""
        recorder, step_began = self._recorder, self._step_began
        step = recorder.step
        self._add_step(step, step_began - self._began, now - step_began)
        self._step_began = now
        recorder.step = step = step + 1
        self._selection.begin_step(step - self._first_step)

    def _begin_stretch(self) -> Callable[..., Any] | None:
        """The program called its module again, and never told of a step: the time between stands for one."""
        began_ns = time.perf_counter_ns()
        budget, watching = self._budget, self.watching
        if self.told or budget is None or watching is None:
            return None
        if not watching.can_turn:
            watching.kept_out = watching.kept_out or not watching.on
            return None
        followed = self._attribution.following
        if self._replayer.lock.acquire(False):
            try:
                self._end_rest()
                self._watch(budget, began_ns, is_stretch=True)
            except Exception:  # noqa: S110 - what is watched is not worth the user's program
                pass
            finally:
                self._replayer.lock.release()
        return self._attribution.call if self._attribution.following and not followed else None

    def _end_step_of_call(self) -> Callable[..., Any] | None:
        """A step is over that an optimizer ended, at the call of a module."""
        followed = self._attribution.following
        self._end_due_step()
        return self._attribution.call if self._attribution.following and not followed else None

    def _optimizer_stepped(self) -> None:
        """The step is over at the next call of a module; at once in a program that calls none."""
        if not self._running:
            return
        if self._due:
            self._at_once = True
            self._due = False
            self._end_step_of_optimizer()
            self._recorder.step += 1  # the one before had its own
        elif self._at_once:
            self._end_step_of_optimizer()
        else:
            self._due = True
            if self._stretches is not None:
                self._stretches.due = True
            else:
                self._attribution.outermost = self._end_due_step

    def _end_due_step(self) -> None:
        if self._due:
            self._due = False
            self._end_step_of_optimizer()

    def _end_step_of_optimizer(self) -> None:
        if self._running:
            self._guessed = True
            self._end_step()

    def _listen_no_more(self) -> None:
        """The program marks its steps: what stood for them is done."""
        optimizers, self._optimizers = self._optimizers, None
        if optimizers is not None:
            optimizers.stop()
        self._attribution.outermost = None
        if self._running:
            self._due = False
        stretches, self._stretches = self._stretches, None
        if stretches is None:
            return
        follows = self._attribution.following
        self._attribution.stop()  # its wrapper lies around ours
        stretches.stop()
        if self._running:
            self._attribution.start()
            if not follows:
                self._attribution.pause()

    def _watch(self, budget: Budget, began_ns: int, *, is_stretch: bool = False) -> None:
        """Have the coming step watched, or left out."""
        watching = self.watching
        if watching is None or not self._running:
            return
        # Calls on the target have to be answered; a mode that the user has put above ours keeps ours where it is.
        must = self._replayer.answers or (watching.on and not watching.can_leave)
        may = self._selection.compares_step
        wanted = budget.end_step(began_ns, must_watch=must, may_watch=may, is_stretch=is_stretch)
        if wanted is not watching.on:
            budget.watched = watching.turn(wanted)
        budget.spend_on_step(began_ns, time.perf_counter_ns())
