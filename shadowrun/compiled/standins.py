"""What stands in for the code of a backend other than Inductor, so that a comparison sees its regions.

A stand-in calls the code and nothing else while no comparison is running. Backends that call the graph's operators one
by one are found by their first call: those operators are compared one by one, and the region is none.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import fx

from shadowrun.compiled import torchcompile
from shadowrun.compiled.graph import Graph, copied, place, user_line
from shadowrun.compiled.how import How

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.compiled.torchcompile import Asked

__all__ = ["Made", "Observer", "TracedGraph", "Whole", "first_line", "observed", "owner"]

_TORCH = str(Path(torch.__file__).parent)


class Observer(Protocol):
    """Who compares regions."""

    def observe_made(self, made: Made, given: list[Any], call: Callable[[], Any]) -> Any:
        """Run a region and return what it returns."""

    def observe_whole(self, whole: Whole, given: tuple[Any, ...], code: Callable[..., Any]) -> Any:
        """Run what was made of one of Dynamo's graphs and return what it returns."""

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
        owner: The graph of Dynamo's that it is a part of; None if it is one, or not known.
    """

    def __init__(self, graph: Graph, asked: Asked, line: str) -> None:
        self.graph, self.how, self.backend, self.line = graph, How.asked(asked), asked.name, line
        self.plain = not isinstance(graph, TracedGraph)
        self.one_by_one = self.opaque = False
        self.owner = _compiling.owner


class Whole:
    """One of Dynamo's graphs that went through AOT autograd: what its regions, forward and backward, are parts of.

    Attributes:
        module: It, before any decomposition.
        how: How it was compiled.
        backend: The backend's name, as a reader knows it.
        line: First line of the user's code in it.
        cuda_graphs: Its code may be a CUDA graph.
        n_checked: Calls of it that were compared as a whole.
        is_wrong: One of its regions was found to be wrong.
        drawn: What Inductor's code drew in the latest call, in order; None where that is not known.
        seen: Seen to be wrong as a whole, with what is needed to tell it.
    """

    def __init__(self, module: fx.GraphModule, asked: Asked) -> None:
        self.line = first_line(module)
        self.module = copied(module)
        for node in self.module.graph.nodes:  # what else is known of it takes memory
            node.meta = {"place": place(node)}
        self.how, self.backend = How.asked(asked), asked.name
        self.cuda_graphs = torchcompile.uses_cuda_graphs(asked)
        self.n_checked, self.is_wrong = 0, False
        self.drawn: list[torch.Tensor] | None = None
        self.seen: Any = None


class _Compiling(threading.local):
    """The graph of Dynamo's that is being compiled in this thread."""

    owner: Whole | None = None


_compiling = _Compiling()


def owner() -> Whole | None:
    """The graph of Dynamo's that is being compiled in this thread."""
    return _compiling.owner


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Have what backends compile inside stood in for, and let `observer` compare what is."""
    global _observer  # noqa: PLW0603 - one comparison at a time
    _observer = observer
    try:
        with torchcompile.wrapped_backends(_wrap, _wrap_whole):
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


@contextlib.contextmanager
def _wrap_whole(module: fx.GraphModule, asked: Asked) -> Iterator[Callable[[Any], Any]]:
    try:
        whole = Whole(module, asked)
    except Exception as error:  # not the user's affair
        if _observer is not None:
            _observer.not_seen(f"shadowrun failed: {type(error).__name__}")
        yield lambda code: code
        return
    before, _compiling.owner = _compiling.owner, whole
    try:
        yield functools.partial(_stand_in_whole, whole)
    finally:
        _compiling.owner = before


def _stand_in_whole(whole: Whole, code: Any) -> Any:
    @functools.wraps(code)
    def plain(*args: Any) -> Any:
        if _observer is None:
            return code(*args)
        return _observer.observe_whole(whole, args, code)

    return plain


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
