"""Regions that other backends than Inductor compiled before a comparison began: their calls are counted.

They cannot be compared, since nobody kept their graphs. The code that Dynamo made calls them by global variables; while
a comparison runs, these hold functions that call them and look whether anything of the call was seen.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Protocol

from shadowrun.compiled import torchcompile
from shadowrun.compiled.listening import Listening, watches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Counter", "watched"]


class Counter(Protocol):
    """Who counts.

    Attributes:
        n_met: Calls of regions met so far.
    """

    n_met: int

    def not_seen(self) -> None:
        """Count a call that is not compared."""


@contextlib.contextmanager
def watched(counter: Counter) -> Iterator[None]:
    """Have calls counted of which nothing is seen."""
    replaced = []
    for scope, name in torchcompile.compiled_functions():
        if name in scope:
            original = scope[name]
            scope[name] = ours = _watch(original, counter)
            replaced.append((scope, name, original, ours))
    try:
        yield
    finally:
        for scope, name, original, ours in replaced:
            if scope.get(name) is ours:
                scope[name] = original


def _watch(code: Callable[..., Any], counter: Counter) -> Callable[..., Any]:
    seen = False

    @functools.wraps(code)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        if seen or not watches():
            return code(*args, **kwargs)
        met = counter.n_met
        heard = Listening(hide=False)
        out = heard.run(lambda: code(*args, **kwargs))
        # Inductor's regions count themselves; operators called one by one are compared like any others.
        seen = bool(heard.names) or counter.n_met != met
        if not seen:
            counter.not_seen()
        return out

    return call
