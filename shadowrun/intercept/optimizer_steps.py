"""Steps of a program without `run.step()`: an optimizer's own hook ends each.

If several optimizers take turns, the last one ends the step. Micro-batches that only accumulate gradients end no step.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from shadowrun.intercept import torchapi

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OptimizerSteps", "OptimizerTurns"]


class OptimizerTurns:
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


class OptimizerSteps:
    """Calls a function whenever an optimizer ends a step, on the thread of the comparison, outside of backward passes.

    Args:
        ended: The function; its exceptions are ignored.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._thread = threading.get_ident()
        self._turns = OptimizerTurns()
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
