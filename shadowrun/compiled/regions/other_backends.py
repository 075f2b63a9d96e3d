"""Regions of backends other than Inductor: wrappers around their code, and calls of code compiled before a comparison.

A wrapper calls the code and nothing else while no comparison is running. A backend that calls the graph's operators one
by one is found at its first call (`OpTracker`): then the operators are compared, and there is no region.

Code that was compiled before the comparison began has no graph any more, so its calls are counted, not compared.
Dynamo's code calls it through global variables; while a comparison runs, these hold counting wrappers.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import fx

from shadowrun.compiled import torchcompile
from shadowrun.compiled.compile_spec import CompileSpec
from shadowrun.compiled.graph import Graph, copy_graph, node_origin, user_line
from shadowrun.intercept import torch_operators, torchapi
from shadowrun.intercept.dispatch import ShadowMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from shadowrun.compiled.torchcompile import CompileRequest

__all__ = [
    "BackendObserver",
    "BackendRegion",
    "CompiledDynamoGraph",
    "OpTracker",
    "RegionCounter",
    "TracedGraph",
    "counted_precompiled_calls",
    "first_user_line",
    "graph_in_compilation",
    "observed_backends",
    "ops_are_compared",
    "without_shadow_mode",
]


# File names of frames that run a graph: code that fx generates, and its interpreter. Seen on 2.11 and 2.13.
_GENERATED = "<eval_with_key>"
_INTERPRETER = fx.interpreter.__file__


# Not recorded: copying random numbers calls them too.
_COPIES = frozenset({"aten.detach.default", "aten.clone.default"})


class OpTracker(torchapi.DispatchMode):  # type: ignore[no-untyped-call]
    """Records which operators a graph's own Python code calls; the other dispatch modes see these too.

    What is called from inside of compiled code (TorchScript for example) is part of that, and our mode does not see it.

    Args:
        hide: Keep calls from inside from our mode.

    Attributes:
        names: Of operators called from Python, in the order of their calls.
        from_inside: Whether there were other calls.
    """

    def __init__(self, *, hide: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hide = hide
        self.names: list[str] = []
        self.from_inside = False

    def run(self, call: Callable[[], Any]) -> Any:
        """Run compiled code."""
        with self:
            return call()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _from_python():
            if str(func) not in _COPIES:
                self.names.append(str(func))
            return func(*args, **(kwargs or {}))
        self.from_inside = True
        run = torch_operators.raw_operator(func) if isinstance(func, torch._ops.OpOverload) else func
        if not self._hide:
            return run(*args, **(kwargs or {}))
        return without_shadow_mode(lambda: run(*args, **(kwargs or {})))


def _is_ours(mode: Any) -> bool:
    """Whether a mode compares operators."""
    return isinstance(mode, ShadowMode) and mode.observes


def ops_are_compared() -> bool:
    """Whether operators of this thread are compared now; not while it traces."""
    return not torchapi.in_infra_mode() and any(map(_is_ours, torchcompile.modes()))


def without_shadow_mode(call: Callable[[], Any]) -> Any:
    """Run code without our mode; the user's modes stay."""
    with torchcompile.without_modes(_is_ours):
        return call()


def _from_python() -> bool:
    """Whether a graph's Python code is on the stack between `OpTracker.run` and here."""
    frame: FrameType | None = sys._getframe(1)
    # The stack decides, not the callable: a backend may hold the graph as a fallback only.
    while frame is not None and frame.f_code is not OpTracker.run.__code__:
        file = frame.f_code.co_filename
        if file.startswith(_GENERATED) or file == _INTERPRETER:
            return True
        frame = frame.f_back
    return False


class RegionCounter(Protocol):
    """Counts calls of regions.

    Attributes:
        n_met: Calls of regions met so far.
    """

    n_met: int

    def count_uncompared(self) -> None:
        """Count a call that is not compared."""


@contextlib.contextmanager
def counted_precompiled_calls(counter: RegionCounter) -> Iterator[None]:
    """While inside, count calls of precompiled code of which no mode sees an operator."""
    replaced = []
    for scope, name in torchcompile.compiled_functions():
        if name in scope:
            original = scope[name]
            scope[name] = watched = _watch(original, counter)
            replaced.append((scope, name, original, watched))
    try:
        yield
    finally:
        for scope, name, original, watched in replaced:
            # Dynamo may have compiled the function anew: its newer code stays.
            if scope.get(name) is watched:
                scope[name] = original


def _watch(code: Callable[..., Any], counter: RegionCounter) -> Callable[..., Any]:
    seen = False

    @functools.wraps(code)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        # Once its operators have been seen one by one, the wrapper need not look again.
        if seen or not ops_are_compared():
            return code(*args, **kwargs)
        met = counter.n_met
        tracker = OpTracker(hide=False)
        out = tracker.run(lambda: code(*args, **kwargs))
        # Inductor's regions count themselves; operators called one by one are compared like any others.
        seen = bool(tracker.names) or counter.n_met != met
        if not seen:
            counter.count_uncompared()
        return out

    return call


_TORCH = str(Path(torch.__file__).parent)


class BackendObserver(Protocol):
    """Compares regions."""

    def observe_backend_region(self, region: BackendRegion, inputs: list[Any], call: Callable[[], Any]) -> Any:
        """Run a region and return what it returns."""

    def observe_dynamo_graph(
        self, dynamo_graph: CompiledDynamoGraph, inputs: tuple[Any, ...], code: Callable[..., Any]
    ) -> Any:
        """Run what was made of one of Dynamo's graphs and return what it returns."""

    def count_uncompared(self, reason: str) -> None:
        """Count a call that is not compared."""


_observer: BackendObserver | None = None


class TracedGraph(Graph):
    """A graph of Dynamo's: calls of torch's functions, which may write to any tensor that they are given."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        inputs = [n for n in self.module.graph.nodes if n.op == "placeholder"]
        # Dynamo's graphs call functions, not operators: no schema states which inputs they write to.
        self.written = tuple(k for k, n in enumerate(inputs) if isinstance(n.meta.get("example_value"), torch.Tensor))


class BackendRegion:
    """A region that a backend made.

    Attributes:
        graph: As it was before.
        compile_spec: How it was compiled.
        backend: The backend's name, as a reader knows it.
        plain: The graph is one of plain operators, not one of Dynamo's.
        line: First line of the user's code in it.
        one_by_one: It calls the graph's operators one by one, and these are compared.
        opaque: It calls no operator from the graph's Python code.
        owner: The graph of Dynamo's that it is a part of; None if it is one, or not known.
    """

    def __init__(self, graph: Graph, request: CompileRequest, line: str) -> None:
        self.graph, self.compile_spec, self.backend, self.line = (
            graph,
            CompileSpec.from_request(request),
            request.name,
            line,
        )
        self.plain = not isinstance(graph, TracedGraph)
        self.one_by_one = self.opaque = False
        self.owner = _compiling.owner


class CompiledDynamoGraph:
    """One of Dynamo's graphs that went through AOT autograd: what its regions, forward and backward, are parts of.

    Attributes:
        module: The graph before any decomposition.
        compile_spec: How it was compiled.
        backend: The backend's name, as a reader knows it.
        line: First line of the user's code in it.
        cuda_graphs: Its code may be a CUDA graph.
        n_checked: Calls of it that were compared as a whole.
        n_wrong: Calls of wrong regions of unknown graphs before the latest of these.
        is_wrong: One of its regions was found to be wrong.
        random_numbers: Those of Inductor's code in the latest call, in order; None where they are not known.
        seen: What was found wrong with it as a whole, to be recorded later.
    """

    def __init__(self, module: fx.GraphModule, request: CompileRequest) -> None:
        self.line = first_user_line(module)
        self.module = copy_graph(module)
        for node in self.module.graph.nodes:  # what else is known of it takes memory
            node.meta = {"place": node_origin(node)}
        self.compile_spec, self.backend = CompileSpec.from_request(request), request.name
        self.cuda_graphs = torchcompile.uses_cuda_graphs(request)
        self.n_checked, self.n_wrong, self.is_wrong = 0, 0, False
        self.random_numbers: list[torch.Tensor] | None = None
        self.seen: Any = None


class _Compiling(threading.local):
    """The graph of Dynamo's that is being compiled in this thread."""

    owner: CompiledDynamoGraph | None = None


_compiling = _Compiling()


def graph_in_compilation() -> CompiledDynamoGraph | None:
    """The graph of Dynamo's that is being compiled in this thread."""
    return _compiling.owner


@contextlib.contextmanager
def observed_backends(observer: BackendObserver) -> Iterator[None]:
    """While inside, wrap what backends compile, and let `observer` compare it."""
    # A global, not an argument of the wrappers: these stay in Dynamo's code, and the next comparison uses them.
    global _observer  # noqa: PLW0603 - one comparison at a time
    _observer = observer
    try:
        with torchcompile.wrapped_backends(_wrap, _wrap_dynamo_graph):
            yield
    finally:
        _observer = None


def first_user_line(module: fx.GraphModule) -> str:
    """The first line of the user's code that a graph comes from, ``model.py:12 in forward``; empty if not known."""
    return next(filter(None, (user_line(node, outside=_TORCH) for node in module.graph.nodes)), "")


def _wrap(module: fx.GraphModule, request: CompileRequest, plain: bool) -> Callable[[Any], Any]:
    try:
        graph = Graph(module) if plain else TracedGraph(module)
        region = BackendRegion(graph, request, first_user_line(module))
    # A failure here would end the user's compilation; the region is counted as not compared.
    except Exception as error:  # the program must not see it
        failed = f"shadowrun failed: {type(error).__name__}"
        if _observer is not None:
            _observer.count_uncompared(failed)
        return lambda code: code
    return functools.partial(_wrapper_of_region, region)


@contextlib.contextmanager
def _wrap_dynamo_graph(module: fx.GraphModule, request: CompileRequest) -> Iterator[Callable[[Any], Any]]:
    try:
        dynamo_graph = CompiledDynamoGraph(module, request)
    except Exception as error:  # the program must not see it
        if _observer is not None:
            _observer.count_uncompared(f"shadowrun failed: {type(error).__name__}")
        yield lambda code: code
        return
    before, _compiling.owner = _compiling.owner, dynamo_graph
    try:
        yield functools.partial(_wrapper_of_dynamo_graph, dynamo_graph)
    finally:
        _compiling.owner = before


def _wrapper_of_dynamo_graph(dynamo_graph: CompiledDynamoGraph, code: Any) -> Any:
    @functools.wraps(code)
    def plain(*args: Any) -> Any:
        # Wrappers stay in Dynamo's code when the comparison ends: from then on they only call.
        if _observer is None:
            return code(*args)
        return _observer.observe_dynamo_graph(dynamo_graph, args, code)

    return plain


def _wrapper_of_region(region: BackendRegion, code: Any) -> Any:
    module = getattr(code, "__self__", code)
    if isinstance(module, fx.GraphModule) and module.code == region.graph.module.code:
        return code  # the backend changed nothing: the operators are called one by one
    # By this mark AOTAutograd knows that it must pass one list: the wrapper has to take inputs in the same way.
    if getattr(code, "_boxed_call", False):

        @functools.wraps(code)
        def boxed(args: list[Any]) -> Any:
            if _observer is None:
                return code(args)
            return _observer.observe_backend_region(region, list(args), lambda: code(args))

        return torchcompile.mark_boxed(boxed)

    @functools.wraps(code)
    def plain(*args: Any) -> Any:
        if _observer is None:
            return code(*args)
        return _observer.observe_backend_region(region, list(args), lambda: code(*args))

    return plain
