"""What stands in for the code of a backend other than Inductor, so that a comparison sees its regions.

A stand-in calls the code and nothing else while no comparison is running. Backends that call the graph's operators one
by one are found by their first call: those operators are compared one by one, and the region is none.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import fx

from shadowrun.compiled import torchcompile
from shadowrun.compiled.graph import Graph, user_line
from shadowrun.compiled.how import How

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.compiled.torchcompile import Asked

__all__ = ["Made", "Observer", "TracedGraph", "first_line", "observed"]

_TORCH = str(Path(torch.__file__).parent)


class Observer(Protocol):
    """Who compares regions."""

    def observe_made(self, made: Made, given: list[Any], call: Callable[[], Any]) -> Any:
        """Run a region and return what it returns."""

    def not_seen(self, reason: str) -> None:
        """Count a call that is not compared."""


_observer: Observer | None = None


class TracedGraph(Graph):
    """A graph of Dynamo's: calls of torch's functions, which may write to any tensor that they are given."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        inputs = [n for n in self.module.graph.nodes if n.op == "placeholder"]
        self.written = tuple(k for k, n in enumerate(inputs) if isinstance(n.meta.get("example_value"), torch.Tensor))


class Made:
    """A region that a backend made.

    Attributes:
        graph: As it was before.
        how: How it was compiled.
        backend: The backend's name, as a reader knows it.
        plain: The graph is one of plain operators, not one of Dynamo's.
        line: First line of the user's code in it.
        one_by_one: It calls the graph's operators one by one, and these are compared.
        opaque: It calls no operator from the graph's Python code.
    """

    def __init__(self, graph: Graph, asked: Asked, line: str) -> None:
        self.graph, self.how, self.backend, self.line = graph, How.asked(asked), asked.name, line
        self.plain = not isinstance(graph, TracedGraph)
        self.one_by_one = self.opaque = False


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Have what backends compile inside stood in for, and let `observer` compare what is."""
    global _observer  # noqa: PLW0603 - one comparison at a time
    _observer = observer
    try:
        with torchcompile.wrapped_backends(_wrap):
            yield
    finally:
        _observer = None


def first_line(module: fx.GraphModule) -> str:
    """The first line of the user's code that a graph comes from, ``model.py:12 in forward``; empty if not known."""
    return next(filter(None, (user_line(node, outside=_TORCH) for node in module.graph.nodes)), "")


def _wrap(module: fx.GraphModule, asked: Asked, plain: bool) -> Callable[[Any], Any]:
    try:
        graph = Graph(module) if plain else TracedGraph(module)
        made = Made(graph, asked, first_line(module))
    except Exception as error:  # not the user's affair
        failed = f"shadowrun failed: {type(error).__name__}"
        if _observer is not None:
            _observer.not_seen(failed)
        return lambda code: code
    return functools.partial(_stand_in, made)


def _stand_in(made: Made, code: Any) -> Any:
    module = getattr(code, "__self__", code)
    if isinstance(module, fx.GraphModule) and module.code == made.graph.module.code:
        return code  # the backend changed nothing: the operators are called one by one
    if getattr(code, "_boxed_call", False):

        @functools.wraps(code)
        def boxed(args: list[Any]) -> Any:
            if _observer is None:
                return code(args)
            return _observer.observe_made(made, list(args), lambda: code(args))

        return torchcompile.boxed(boxed)

    @functools.wraps(code)
    def plain(*args: Any) -> Any:
        if _observer is None:
            return code(*args)
        return _observer.observe_made(made, list(args), lambda: code(*args))

    return plain
