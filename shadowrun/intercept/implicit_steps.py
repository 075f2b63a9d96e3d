"""Steps of a program without `run.step()`, and `ModeToggle`, which takes the dispatch mode off in unwatched steps.

A training step ends at the first module call after `optimizer.step()` (of the last optimizer, if several take turns).
Code between the two, such as `loss.item()`, a scheduler or a log, belongs to the step before; if the program calls
`run.step()` there, no step has been inferred yet. Micro-batches that only accumulate gradients end no step.

In an inference loop, a stretch lasts from one call of the outermost module to the next. It is used by the budget only.
`nn.Module.__call__` is wrapped while a comparison has a budget and the program has marked no step; the wrapper of
attribution is outside of this one.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from shadowrun.intercept import torch_compiler, torchapi

if TYPE_CHECKING:
    from collections.abc import Callable

    _Begin = Callable[[], Callable[..., Any] | None]
    from shadowrun.intercept.attribution import Attribution
    from shadowrun.intercept.dispatch import ShadowMode

__all__ = ["ImplicitSteps", "ModeToggle", "OptimizerSteps", "OptimizerTurns"]


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


_MIN_STRETCH_NS = 500_000
"""Shorter stretches are joined: to end one takes some 10 µs."""
_MAX_OTHER_CALLS = 64
"""After so many calls of other modules, the program no longer repeats the chosen module: choose another."""


class ImplicitSteps:
    """Detects the outermost module calls that begin a step or stretch, on the thread of the comparison.

    Args:
        begin: Called before a call that begins a stretch. If attribution starts at this call, it returns the function
            that makes the call instead; it gets the module and the arguments.
        end_step: Called instead of `begin` if a step is due.

    Attributes:
        due: Whether a step is over; set by the caller after an optimizer's step.
    """

    def __init__(self, begin: _Begin, end_step: _Begin) -> None:
        self._begin = begin
        self._end_step = end_step
        self.due = False
        self._left_to_steps = 0
        self._thread = threading.get_ident()
        self._inside = False
        self._marker = 0
        self._n_others = 0
        self._began_ns = 0
        self._original: Callable[..., Any] | None = None

    def start(self) -> None:
        """Wrap `nn.Module.__call__`; attribution must wrap it afterwards."""
        steps, original = self, nn.Module.__call__
        self._original = original
        is_compiling: Callable[[], bool] = torch.compiler.is_compiling

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            # Dynamo leaves the wrapper out of the graph only if this comes first: what comes before would be guarded.
            if is_compiling() or steps._inside or not steps._is_outermost():
                return original(self, *args, **kwargs)
            steps._inside = True
            try:
                call = steps._begin_at(self)
                return (call or original)(self, *args, **kwargs)
            finally:
                steps._inside = False

        torch_compiler.replace_module_call(__call__, original)
        nn.Module.__call__ = __call__  # type: ignore[method-assign]
        self._patched = __call__

    def stop(self) -> None:
        """Restore `nn.Module.__call__`, unless other code has wrapped it since (then this wrapper passes calls on)."""
        original, self._original = self._original, None  # a wrapper that stays in place passes all calls on
        if original is None:
            return
        if nn.Module.__call__ is self._patched:
            nn.Module.__call__ = original  # type: ignore[method-assign]
        torch_compiler.restore_module_call(self._patched, original)

    def _is_outermost(self) -> bool:
        # After a backward pass or a functorch transform, torch restores the mode stack from before: no switch inside.
        return (
            self._original is not None
            and threading.get_ident() == self._thread
            and torchapi.autograd_node() is None
            and not torchapi.in_transform()
        )

    def _begin_at(self, module: nn.Module) -> Callable[..., Any] | None:
        """Begin a step or stretch if one is due; returns the function that makes this call, as `begin` does."""
        if self.due:
            self.due = False
            self._left_to_steps = _MAX_OTHER_CALLS
            return self._end_step()
        # The program trains. After so many calls without an optimizer's step, the training is over.
        if self._left_to_steps:
            self._left_to_steps -= 1
            return None
        if id(module) != self._marker:
            self._n_others += 1
            if self._marker and self._n_others <= _MAX_OTHER_CALLS:
                return None
            self._marker, self._n_others, self._began_ns = id(module), 0, time.perf_counter_ns()
            return None
        self._n_others = 0
        now = time.perf_counter_ns()
        if now - self._began_ns < _MIN_STRETCH_NS:
            return None
        self._began_ns = now
        return self._begin()


class ModeToggle:
    """Puts the dispatch mode on the stack of the current thread, and takes it off.

    Attributes:
        on: Whether the mode is on the stack.
        kept_out: Whether it could not be put back at least once, since the program had entered another mode.
    """

    def __init__(self, mode: ShadowMode, attribution: Attribution) -> None:
        self._mode = mode
        self._attribution = attribution
        self._thread = threading.get_ident()
        self._below: list[Any] = []
        self.on = False
        self.kept_out = False

    def begin(self) -> None:
        """Put the mode on top of the stack."""
        self._mode.__enter__()
        self.on = True

    def end(self) -> None:
        """Take the mode off finally."""
        # The mode stack is thread-local: on another thread the mode stays on it, detached, and passes calls on.
        if self._thread != threading.get_ident():
            self._mode.detach()
        elif self.on:
            self._mode.__exit__(None, None, None)
        self.on = False

    @property
    def can_leave(self) -> bool:
        """Whether the mode can be taken off: it is on top of the stack of this thread."""
        return self.on and torchapi.top_mode() is self._mode and self._thread == threading.get_ident()

    @property
    def can_turn(self) -> bool:
        """Whether the mode can be taken off or put back now."""
        return self.can_leave if self.on else self._can_return

    @property
    def _can_return(self) -> bool:
        # `__exit__` of a mode pops the top of the stack without a check. If the program entered a mode in between, its
        # `__exit__` would pop ours.
        return self._thread == threading.get_ident() and _same(torchapi.modes(), self._below)

    def turn(self, wanted: bool) -> bool:
        """Put the mode on or take it off, if possible.

        Returns:
            Whether the mode is on.
        """
        if wanted is self.on:
            return self.on
        if wanted:
            self._return()
        elif self.can_leave:
            self._mode.__exit__(None, None, None)
            self._attribution.pause()
            self._below = torchapi.modes()
            self.on = False
        return self.on

    def _return(self) -> None:
        if not self._can_return:
            self.kept_out = self.kept_out or self._thread == threading.get_ident()
            return
        self._attribution.resume()
        self.begin()


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
