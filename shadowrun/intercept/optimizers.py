"""The optimizers' steps, as the end of a training step in a program that marks none.

A training step lasts until the first module call after the step of the last optimizer that takes turns: what a loop
does in between (`loss.item()`, a scheduler, a log) belongs to the step that is over, and a program that calls
`run.step()` there does so before anything was guessed. Micro-batches that only add to the gradients end none.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from shadowrun.intercept import torchapi

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Optimizers", "Turns"]


class Turns:
    """Which of several optimizers ends a step: the last of those that take turns, as a GAN's two do.

    Until it is known who takes turns, the first; where one steps more often than the others, that one.
    """

    def __init__(self) -> None:
        self._last = 0
        self._since: dict[int, None] = {}
        self._moved = False

    def ends(self, optimizer: int) -> bool:
        """Whether a step ends where this optimizer has stepped.

        Args:
            optimizer: Its id.
        """
        since = self._since
        if optimizer != self._last and self._last and optimizer not in since:
            since[optimizer] = None
            return False
        self._since = {}
        if optimizer == self._last and since and not self._moved:
            self._moved = True  # once: who was wrong about the last one takes what comes
            self._last = next(reversed(since))
            self._since[optimizer] = None
            return False
        self._last = optimizer
        return True


class Optimizers:
    """Tells of optimizers that ended a step, on the thread that made it, outside of any backward pass.

    Args:
        ended: Called then; whatever it raises is swallowed.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        self._ended = ended
        self._thread = threading.get_ident()
        self._turns = Turns()
        self._hook: Any = None

    def start(self) -> None:
        """Begin to listen to every optimizer."""
        self._thread = threading.get_ident()
        is_compiling: Callable[[], bool] = torch.compiler.is_compiling

        def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if not is_compiling():  # Dynamo then finds nothing to trace or to guard
                self._stepped(optimizer)

        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(hook)

    def stop(self) -> None:
        """Listen no more."""
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
        except Exception:  # noqa: S110 - a step is not worth the user's program
            pass
