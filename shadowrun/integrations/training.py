"""What the callbacks of all frameworks have in common: a comparison that hooks start and pause."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from shadowrun.comparison import Comparison, compare
from shadowrun.integrations.loggers import FigureLog, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["ComparedTraining"]


def _never_raising(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def guarded(self: ComparedTraining, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            # Once: the next step would most probably fail in the same way.
            if not self.failed:
                self.failed = True
                warn(f"the training is not compared from here on, {type(error).__name__}: {error}")

    return guarded


class ComparedTraining:
    """A comparison of the training steps of a framework's loop.

    The hooks of the loop call `resume` before a step, `end_step` after it, and `finish` at the end of the training.
    Between steps nothing is compared: evaluations, checkpoints and metrics are no part of a step.

    Args:
        target, ref, options: Arguments of `shadowrun.compare`, which raises for wrong ones.
        log_to: See `shadowrun.integrations.log_to`; None for no log.
        every: Log at each so many steps.

    Attributes:
        run: The comparison.
        failed: Whether it could not start, or failed; then all methods do nothing.
    """

    def __init__(self, target: Any, ref: Any, options: Mapping[str, Any], log_to: Any, every: int) -> None:
        self.run: Comparison = compare(target, ref, **options)
        self.failed = False
        self._every = every
        self._logs: list[FigureLog] = []
        self._at = -1
        if log_to is not None:
            self.log_to(log_to)

    def log_to(self, logger: Any, every: int | None = None) -> None:
        """Also log to this logger.

        Raises:
            UsageError: It is no logger.
        """
        self._logs.append(FigureLog(logger, self._every if every is None else every))

    @_never_raising
    def begin(self) -> None:
        """A training begins: try again what failed in an earlier one."""
        self.failed = False

    @_never_raising
    def resume(self) -> None:
        """A step begins, or goes on with the next micro-batch."""
        if not self.failed and not self.run.running:
            self.run.start()

    @_never_raising
    def pause(self) -> None:
        """Something that is no training begins."""
        self.run.pause()

    @_never_raising
    def end_step(self, number: int) -> None:
        """A step ends.

        Args:
            number: Its number in the log.
        """
        run = self.run
        if not run.running:
            return
        run.step()
        run.pause()
        self._at = number
        for log in self._logs:
            log.add(run, number)

    @_never_raising
    def finish(self) -> None:
        """The training is over."""
        run = self.run
        run.stop()
        if self._at >= 0:
            for log in self._logs:
                log.add(run, self._at, last=True)
