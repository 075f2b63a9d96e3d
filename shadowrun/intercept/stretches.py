"""Where a program that tells of no steps begins anew: at the next call of the module that it called first.

In a training, it is the first call of any module after an optimizer's step; see `optimizers`.
`nn.Module.__call__` is wrapped while a comparison has a budget and the program marked no step. The wrapper lies below
that of attribution, which lets calls pass where nobody watches. Calls inside of a module's call pass at once.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shadowrun.intercept import torchapi

if TYPE_CHECKING:
    from collections.abc import Callable

    _Begin = Callable[[], Callable[..., Any] | None]

__all__ = ["Stretches"]

_LEAST_NS = 500_000
"""A stretch lasts so long at least: to end one takes some 10 µs."""
_MOST_OTHERS = 64
"""So many calls of other modules without one of ours, and it is not what the program repeats."""


class Stretches:
    """Tells of the calls, from outside of any module, that begin a stretch. For the thread that made it.

    Args:
        begin: Called as the first thing of such a call. If modules are followed from here on, it returns what follows
            this very call: called with the module and its arguments.
        end_step: Called instead of it where a step is over.

    Attributes:
        due: Whether a step is over; to be set where an optimizer has stepped.
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
        """Begin to look at module calls; attribution must do so afterwards."""
        stretches, original = self, nn.Module.__call__
        self._original = original
        is_compiling: Callable[[], bool] = torch.compiler.is_compiling

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            # Dynamo, which leaves our wrapper out of the graph then, must find nothing before that it would guard.
            if is_compiling() or stretches._inside or not stretches._is_outermost():
                return original(self, *args, **kwargs)
            stretches._inside = True
            try:
                call = stretches._begin_at(self)
                return (call or original)(self, *args, **kwargs)
            finally:
                stretches._inside = False

        torchapi.stand_for_module_call(__call__, original)
        nn.Module.__call__ = __call__  # type: ignore[method-assign]
        self._patched = __call__

    def stop(self) -> None:
        """Give `nn.Module.__call__` back, unless somebody else wrapped it meanwhile (then ours passes calls on)."""
        original, self._original = self._original, None  # an instance may be in a call: it passes those that follow
        if original is None:
            return
        if nn.Module.__call__ is self._patched:
            nn.Module.__call__ = original  # type: ignore[method-assign]
        torchapi.stand_no_more(self._patched, original)

    def _is_outermost(self) -> bool:
        # In a backward pass or a functorch transform, torch puts the stack of modes back as it was at their beginning.
        return (
            self._original is not None
            and threading.get_ident() == self._thread
            and torchapi.autograd_node() is None
            and not torchapi.in_transform()
        )

    def _begin_at(self, module: nn.Module) -> Callable[..., Any] | None:
        """Begin a stretch if one is due; returns what follows this very call, if that begins only now."""
        if self.due:
            self.due = False
            self._left_to_steps = _MOST_OTHERS
            return self._end_step()
        if self._left_to_steps:  # of a training; past so many calls without an optimizer's step, it is none any more
            self._left_to_steps -= 1
            return None
        if id(module) != self._marker:
            self._n_others += 1
            if self._marker and self._n_others <= _MOST_OTHERS:
                return None
            self._marker, self._n_others, self._began_ns = id(module), 0, time.perf_counter_ns()
            return None
        self._n_others = 0
        now = time.perf_counter_ns()
        if now - self._began_ns < _LEAST_NS:
            return None
        self._began_ns = now
        return self._begin()
