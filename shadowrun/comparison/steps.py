"""The steps of a comparison: where each ends, how long it took, and whether the budget watches the next one.

The program marks the end of a step by `run.step()`. Without that call, an optimizer's hook says that a step is over
(of several that take turns, the hook of the last); it ends at the next call of a module. Code between the two, such as
`loss.item()`, a scheduler or a log, belongs to the step before, and if `run.step()` is called there, no step has ended
yet. Micro-batches that only accumulate gradients end no step. From the first `run.step()` on, only those marks count.

In an inference loop, a stretch lasts from one call of the model to the next. Only the budget uses it. Both need the
wrapper of `nn.Module.__call__` that attribution has: in an unwatched step the dispatch mode is off the stack, so no
operator call can say that the next step begins.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from shadowrun.intercept import torchapi
from shadowrun.intercept.dispatch import ModeToggle

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from shadowrun.intercept.dispatch import ShadowMode
    from shadowrun.recording.call_recorder import CallRecorder
    from shadowrun.recording.nonfinite import NonFiniteObserver
    from shadowrun.recording.recorder import Recorder
    from shadowrun.replay.replayer import Replayer
    from shadowrun.schedule.budget import Budget
    from shadowrun.schedule.selection import Selection

__all__ = ["StepOptimizer", "Steps"]

# Recording a call flushes too, but steps that are left out have none, and the file is to be whole after `kill -9`.
_FLUSH_S = 0.5
_KEPT_OUT = (
    "The program entered a dispatch mode of its own in a step that the overhead budget left out, and kept it: "
    "the steps in which it was there were not watched."
)


class StepOptimizer:
    """Finds the optimizer that ends a step: the last of several that take turns, as the two of a GAN do.

    Until the turns are known, it is the first one; if one steps more often than the others, it is that one.
    """

    def __init__(self) -> None:
        self._last = 0
        self._since: dict[int, None] = {}
        self._moved = False

    def ends(self, optimizer: int) -> bool:
        """Whether this step of an optimizer ends a step.

        Args:
            optimizer: The id of the optimizer.
        """
        since = self._since
        if optimizer != self._last and self._last and optimizer not in since:
            since[optimizer] = None
            return False
        self._since = {}
        if optimizer == self._last and since and not self._moved:
            self._moved = True  # corrected only once: irregular turns would move it back and forth
            self._last = next(reversed(since))
            self._since[optimizer] = None
            return False
        self._last = optimizer
        return True


class _OptimizerSteps:
    """Calls a function whenever an optimizer ends a step, on the thread of the comparison, outside of backward passes.

    Args:
        ended: The function; its exceptions are ignored.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._thread = threading.get_ident()
        self._turns = StepOptimizer()
        self._hook: Any = None

    def start(self) -> None:
        """Register a hook on the steps of all optimizers."""
        self._thread = threading.get_ident()
        is_compiling: Callable[[], bool] = torch.compiler.is_compiling

        def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if not is_compiling():  # a constant for Dynamo, which then traces and guards nothing below
                self._stepped(optimizer)

        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(hook)

    def stop(self) -> None:
        """Remove the hook."""
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._hook is None or threading.get_ident() != self._thread:
            return
        if torchapi.autograd_node() is not None or torchapi.in_transform():
            return
        try:
            if self._turns.ends(id(optimizer)):
                self._ended()
        except Exception:  # noqa: S110 - a wrong count of steps must not end the user's program
            pass


# Shorter stretches are joined: to end one takes some 10 µs.
_MIN_STRETCH_NS = 500_000
# After so many calls of other modules, the program no longer repeats the chosen module: choose another.
_MAX_OTHER_CALLS = 64


class _ImplicitSteps:
    """Decides which outermost calls of modules end a stretch, in a program whose optimizers end no step."""

    def __init__(self) -> None:
        self._left_to_steps = 0
        self._model = 0
        self._n_others = 0
        self._began_ns = 0

    def pause_for_training(self) -> None:
        """The program trains: no stretches, until so many calls come without an optimizer's step."""
        self._left_to_steps = _MAX_OTHER_CALLS

    def ends_at(self, module: nn.Module) -> bool:
        """Whether a stretch ends at this call of the module."""
        if self._left_to_steps:
            self._left_to_steps -= 1
            return False
        if id(module) != self._model:
            self._n_others += 1
            if not self._model or self._n_others > _MAX_OTHER_CALLS:
                self._model, self._n_others, self._began_ns = id(module), 0, time.perf_counter_ns()
            return False
        self._n_others = 0
        now = time.perf_counter_ns()
        if now - self._began_ns < _MIN_STRETCH_NS:
            return False
        self._began_ns = now
        return True


class Steps:
    """The steps of a comparison or recording, and its dispatch mode, which the budget takes off in unwatched steps.

    The order of calls is `start_detection`, `begin`, the methods that end a step, `leave`, `release`, `finish`.

    Attributes:
        marked: Whether the program has called `run.step()` since `begin`.
        watching: The dispatch mode on the stack of the program; None before `begin`.
    """

    def __init__(
        self,
        recorder: Recorder | CallRecorder | NonFiniteObserver,
        observer: Replayer | CallRecorder | NonFiniteObserver,
        selection: Selection,
        budget: Budget | None = None,
    ) -> None:
        self._recorder = recorder
        self._attribution = recorder.attribution
        self._replayer: Any = observer  # with a budget, it is a `Replayer`
        self._selection = selection
        self._budget = budget
        self._first_step = recorder.step
        self._stretches: _ImplicitSteps | None = None
        self._optimizers: _OptimizerSteps | None = None
        self._end_step: Callable[[], None] = lambda: None
        self._due = self._at_once = self._by_optimizer = False
        self._n_unwatched_next = 0
        self._unwatched_ends_ns: list[int] = []
        self._running = self._has_begun = False
        self._began = 0.0
        self._step_began = 0.0
        self._first_began = 0.0
        self._flushed_at = 0.0
        self._wall_s = self._zero = 0.0
        self.marked = False
        self.watching: ModeToggle | None = None

    @property
    def wall_s(self) -> float:
        """Seconds in all blocks so far."""
        return self._wall_s + (time.perf_counter() - self._began if self._running else 0.0)

    @property
    def zero_ns(self) -> int:
        """Start of the clock of `add_step`, by `time.perf_counter_ns`."""
        return int(self._zero * 1e9)

    def start_detection(self, end_step: Callable[[], None] | None) -> None:
        """Start to detect steps.

        Args:
            end_step: Called at the end of a step that the program did not mark; None if it marks all steps.
        """
        if end_step is not None:
            self._end_step = end_step
            self._optimizers = _OptimizerSteps(self._optimizer_stepped)
            self._optimizers.start()
        if self._budget is not None:
            self._stretches = _ImplicitSteps()
            self._attribution.outermost = self._module_called

    def begin(self, mode: ShadowMode, began_ns: int) -> None:
        """Begin the first step.

        Args:
            mode: The dispatch mode to put on the stack.
            began_ns: Time at which the comparison began to start, by `time.perf_counter_ns`.
        """
        self.marked = False
        self._running = True
        self._began = self._step_began = self._first_began = time.perf_counter()
        self._zero = self._began - self._wall_s  # the run's clock stands still between two blocks
        self.watching = ModeToggle(mode, self._attribution)
        self.watching.begin()
        if self._budget is not None:
            self._budget.watched = self.watching.toggle(self._budget.watched)
            # What the first start prepares belongs to no step; a function that is decorated starts at each call.
            now = time.perf_counter_ns()
            began_ns = began_ns if self._has_begun else now
            self._has_begun = True
            self._budget.start(began_ns)
            self._budget.spend_on_step(began_ns, now)

    def switch_to_marks(self) -> None:
        """The program marks a step for the first time: stop to detect steps."""
        if self.marked:
            return
        self.marked = True
        self._stop_detection()
        self._record_ended_steps()
        # Steps of optimizers before the first mark were parts of one step of the program.
        if self._by_optimizer:
            self._by_optimizer = False
            self._recorder.step = self._first_step
            self._step_began = self._first_began

    def end_if_unwatched(self, began_ns: int) -> bool:
        """End the step if it is unwatched: the fast path, since in a short step each microsecond counts.

        Args:
            began_ns: Time of the end of the step, by `time.perf_counter_ns`.

        Returns:
            Whether the step was unwatched; if not, call `end`.
        """
        budget, lock = self._budget, self._replayer.lock
        # Does not wait for the lock, which another thread holds while it compares.
        if budget is None or budget.watched or not lock.acquire(False):
            return False
        now = began_ns / 1e9
        try:
            self._record_ended_steps()
            self._begin_step(now)
            if now - self._flushed_at > _FLUSH_S:  # recording a call flushes too, but here are none
                self._flushed_at = now
                self._recorder.flush()
            self._watch(budget, began_ns)
            self._n_unwatched_next = budget.n_unwatched_next
        except Exception:  # noqa: S110 - a lost row must not end the user's program
            pass
        finally:
            lock.release()
        return True

    def end_and_record_later(self) -> bool:
        """End the step if it is one of those that stay unwatched until the debt is paid.

        Only the time is noted, in about a microsecond; `_record_ended_steps` writes the rows later.

        Returns:
            Whether it was such a step.
        """
        n = self._n_unwatched_next
        if not n:
            return False
        self._n_unwatched_next = n - 1
        self._unwatched_ends_ns.append(time.perf_counter_ns())
        self._recorder.step += 1
        return True

    def _record_ended_steps(self) -> None:
        """Write the rows of the steps that `end_and_record_later` ended, and charge their time."""
        self._n_unwatched_next = 0
        ends_ns = self._unwatched_ends_ns
        if not ends_ns or self._budget is None:
            return
        began_ns = time.perf_counter_ns()
        self._recorder.step -= len(ends_ns)
        for ended_ns in ends_ns:
            self._begin_step(ended_ns / 1e9)
        own_ns = time.perf_counter_ns() - began_ns
        self._budget.add_unwatched_steps(ends_ns, own_ns, by_hook=not self.marked)
        ends_ns.clear()

    def end(self, began_ns: int) -> None:
        """End the step; arguments as for `end_if_unwatched`."""
        with self._replayer.between_calls():
            try:
                self._record_ended_steps()
                self._begin_step(began_ns / 1e9)
                self._attribution.end_step()
                if self._budget is not None:
                    self._watch(self._budget, began_ns)
                    self._n_unwatched_next = self._budget.n_unwatched_next
            except Exception:  # noqa: S110 - a wrong count of steps must not end the user's program
                pass

    def leave(self) -> None:
        """End the last step, and take the dispatch mode off the stack."""
        self._record_ended_steps()
        self._running = False
        if self.watching is not None:
            self.watching.end()

    def stop_in_child(self, mode: ShadowMode) -> None:
        """Take the mode off the stack of a forked child."""
        self._running = False
        if self.watching is None:
            return
        # A mode below another one cannot leave the stack: detached, it passes all calls on.
        if self.watching.can_leave:
            self.watching.end()
        else:
            mode.detach()

    def release(self) -> None:
        """Remove all hooks and wrappers."""
        self._running = False
        self._stop_detection()

    def finish(self) -> None:
        """Record the last step, if any call was recorded in it."""
        now = time.perf_counter()
        self._wall_s += now - self._began
        if self._recorder.recorded_in_step:
            with contextlib.suppress(Exception):
                self._recorder.add_step(self._recorder.step, self._step_began - self._zero, now - self._step_began)
        # A later block of this comparison begins with the next step.
        if self._due:
            self._due = False
            self._recorder.step += 1

    def notes(self) -> tuple[str, ...]:
        """Notes for the report."""
        return (_KEPT_OUT,) if self.watching is not None and self.watching.kept_out else ()

    def _begin_step(self, now: float) -> None:
        """Record the step that ended, and begin the next."""
        recorder, step_began = self._recorder, self._step_began
        step = recorder.step
        recorder.add_step(step, step_began - self._zero, now - step_began)
        self._step_began = now
        recorder.step = step = step + 1
        # `steps=` and a schedule count from this comparison on, also where the file has steps of an earlier one.
        self._selection.begin_step(step - self._first_step)

    def _module_called(self, module: nn.Module) -> None:
        """The program calls a module from outside of any: end the step that is due, or else a stretch."""
        if self._budget is None:
            self._attribution.outermost = None  # asked for one step
        elif torchapi.in_transform():
            return  # after a functorch transform, torch restores the mode stack from before: no switch inside
        if self._due:
            self._due = False
            self._end_step_of_optimizer()
        elif self._stretches is not None and self._stretches.ends_at(module):
            self._end_stretch()

    def _end_stretch(self) -> None:
        began_ns = time.perf_counter_ns()
        budget, watching = self._budget, self.watching
        if budget is None or watching is None:
            return
        if not watching.can_toggle:
            watching.kept_out = watching.kept_out or not watching.on
            return
        if self._replayer.lock.acquire(False):
            try:
                self._record_ended_steps()
                self._watch(budget, began_ns, is_stretch=True)
            except Exception:  # noqa: S110 - a wrong choice of steps must not end the user's program
                pass
            finally:
                self._replayer.lock.release()

    def _optimizer_stepped(self) -> None:
        """Make the step end at the next call of a module; at once in a program without modules."""
        if not self._running:
            return
        if self._stretches is not None:
            self._stretches.pause_for_training()
        # Still due from the optimizer's last step: no module was called since, so the program calls none.
        if self._due:
            self._at_once = True
            self._due = False
            self._end_step_of_optimizer()
            self._recorder.step += 1  # two steps ended: the due one and this one
        elif self._at_once:
            self._end_step_of_optimizer()
        else:
            self._due = True
            self._attribution.outermost = self._module_called

    def _end_step_of_optimizer(self) -> None:
        if self._running:
            self._by_optimizer = True
            self._end_step()

    def _stop_detection(self) -> None:
        """Stop to detect steps, and remove the hooks."""
        optimizers, self._optimizers = self._optimizers, None
        if optimizers is not None:
            optimizers.stop()
        self._attribution.outermost = None
        if self._running:
            self._due = False
        self._stretches = None

    def _watch(self, budget: Budget, began_ns: int, *, is_stretch: bool = False) -> None:
        """Decide whether the next step is watched, and switch the mode."""
        watching = self.watching
        if watching is None or not self._running:
            return
        # Calls on the target need an answer from us. A mode that the user entered above ours keeps ours on the stack.
        must = self._replayer.runs_on_target or (watching.on and not watching.can_leave)
        may = self._selection.compares_step
        was_watched = budget.watched
        self._replayer.charge_passed()
        by_hook = not self.marked and not is_stretch
        wanted = budget.end_step(began_ns, must_watch=must, may_watch=may, is_stretch=is_stretch, by_hook=by_hook)
        judges = wanted and self._replayer.has_postponed and (must or not was_watched)
        # Time goes to postponed calls first: they may be findings already.
        if wanted and self._replayer.has_postponed and not must:
            wanted = budget.watched = False
        if wanted is not watching.on:
            budget.watched = watching.toggle(wanted)
        if judges:
            self._replayer.judge_postponed(budget.judging_ns)
        ended_ns = time.perf_counter_ns()
        budget.spend_on_step(began_ns, ended_ns)
        if judges:
            budget.judged(ended_ns - began_ns)
