"""Private APIs of torch for Inductor's regions, each with the versions that have it and what happens without it.

An option makes torch wrap a region in a higher-order operator. Some versions after 2.11 also keep the graph that a
region was compiled from; for the others it is kept here.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import TYPE_CHECKING, Any

from torch import fx
from torch.utils import _python_dispatch as _modes

from shadowrun.compiled.torchcompile import patched_attribute
from shadowrun.torch_versions import need, optional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["CodeOfGraph", "graph_of", "inductor_settings", "wrapped_regions"]

need(
    *("torch._higher_order_ops.wrap.inductor_compiled_code", "torch._inductor.output_code.CompiledFxGraph"),
    *("torch._inductor.output_code.CompiledFxGraph.post_compile", "torch._inductor.config.patch"),
    *(
        "torch._inductor.config.wrap_inductor_compiled_regions",
        "torch.utils._python_dispatch.is_in_torch_dispatch_mode",
    ),
)
_known_settings: Mapping[str, Any] = optional(
    "torch._inductor.config._config", {}, "scripts for compiled graphs compile with Inductor's default settings"
)
_is_default: Callable[[str], bool] = optional(
    "torch._inductor.config._is_default",
    lambda _: True,
    "scripts for compiled graphs compile with Inductor's default settings",
)
_in_process: Any = optional(
    "torch._inductor.compile_fx._InProcessFxCompile", None, "what Inductor's passes on graphs get wrong is not seen"
)

_WRAPPING = "wrap_inductor_compiled_regions"
# A region from a cache comes without its graph, since nothing is compiled then.
_NO_CACHE = ("fx_graph_cache", "fx_graph_remote_cache")
# Settings that we change, and that do not change what is compiled.
_OURS = (_WRAPPING, *_NO_CACHE)


class CodeOfGraph:
    """Compiled code with its graph: what later versions of torch (seen on 2.13) hand to the operator of a region."""

    def __init__(self, compiled_callable: Callable[[Any], Any], original_gm: fx.GraphModule | None) -> None:
        self.compiled_callable = compiled_callable
        self.original_gm = original_gm

    def __call__(self, inputs: Any) -> Any:
        """Run the code."""
        return self.compiled_callable(inputs)


def graph_of(code: Any) -> Any:
    """The graph that a wrapped region was compiled from; None if it was not kept. Seen on 2.11 (kept here) and 2.13."""
    return getattr(code, "original_gm", None)


def inductor_settings() -> dict[str, Any]:
    """Settings of Inductor that are not its defaults, with those of a mode or of options while it compiles.

    Seen on 2.11 and 2.13 (`ConfigModule._config`, `_is_default`). Without it, scripts compile with the defaults.
    """
    from torch._inductor import config

    changed = [name for name in _known_settings if name not in _OURS and not _is_default(name)]
    # Names have dots (`cpp.simdlen`): the settings of a backend are an object within the module.
    values = {name: functools.reduce(getattr, name.split("."), config) for name in changed}
    return {name: value for name, value in values.items() if value is not _known_settings[name].default}


@contextlib.contextmanager
def wrapped_regions(
    on_unknown_call: Callable[[], None],
    on_graph: Callable[[Any], Callable[[Any], None]],
    on_compiled: Callable[[Any], None],
) -> Iterator[None]:
    """While inside, Inductor wraps what it compiles, so that a dispatch mode sees each region as one operator.

    Seen on 2.11 and 2.13 (`torch._inductor.config.wrap_inductor_compiled_regions`). Dynamo keeps no guard on it: what
    was compiled inside stays, and runs outside without a detour; what was compiled outside is not seen inside. 2.11
    keeps no graphs, and has none for what comes from a cache of Inductor's, so those caches are off inside.

    Args:
        on_unknown_call: Called for each call of a region that was compiled outside.
        on_graph: Called with each graph before Inductor's own passes change it; returns a function that is called with
            the graph that `graph_of` will return, which torch copied after them. (`_InProcessFxCompile`, seen on 2.11
            and 2.13; neither is called for what comes from Inductor's cache.)
        on_compiled: Called with each graph that `graph_of` will return, also one from the cache, while the settings are
            those that it was compiled with.
    """
    from torch._inductor import config
    from torch._inductor.output_code import CompiledFxGraph

    original_compile: Any = getattr(_in_process, "codegen_and_compile", None)
    original, original_finish = CompiledFxGraph.__call__, CompiledFxGraph.post_compile
    graphs: _Graphs | None = None if hasattr(CompiledFxGraph, "_original_gm") else _Graphs()

    def call(self: Any, inputs: Any) -> Any:
        # Compiled before the comparison: such code is no operator, and no mode sees it.
        if not self._wrap_compiled_regions:
            on_unknown_call()
        return original(self, inputs)

    def compile_graph(self: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        finish = on_graph(module)
        # Before the compilation: its passes change the graph in place.
        graph = None if graphs is None else _bare_copy(module)
        code = original_compile(self, module, *args, **kwargs)
        if graphs is None:
            graph = getattr(code, "_original_gm", None)
        elif graph is not None and isinstance(code, CompiledFxGraph):
            graphs.add(code, graph)
        if graph is not None:
            finish(graph)
        return code

    @functools.wraps(original_finish)
    def finish_graph(self: Any, *args: Any, **kwargs: Any) -> None:
        graph = None if graphs is None else graphs.pop(self)
        if graph is None:
            original_finish(self, *args, **kwargs)
            graph = getattr(self, "_original_gm", None)
        else:
            # Torch 2.11 would wrap a function without its graph; `_wrapped` does it with the graph.
            wraps, self._wrap_compiled_regions = self._wrap_compiled_regions, False
            try:
                original_finish(self, *args, **kwargs)
            finally:
                self._wrap_compiled_regions = wraps
            if wraps and self.current_callable is not None:
                self.current_callable = _wrapped(CodeOfGraph(self.current_callable, graph))
        if self._wrap_compiled_regions and graph is not None:
            on_compiled(graph)

    changed = {_WRAPPING: True} | ({} if graphs is None else dict.fromkeys(_NO_CACHE, False))
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched_attribute(CompiledFxGraph, "__call__", call))
        stack.enter_context(patched_attribute(CompiledFxGraph, "post_compile", finish_graph))
        if original_compile is not None:
            replacement = functools.wraps(original_compile)(compile_graph)
            stack.enter_context(patched_attribute(_in_process, "codegen_and_compile", replacement))
        stack.enter_context(config.patch(changed))
        yield


class _Graphs:
    """Graphs of what was compiled and is not finished yet: an attribute of the code would go into Inductor's cache."""

    def __init__(self) -> None:
        self._graphs: dict[int, tuple[weakref.ref[Any], fx.GraphModule]] = {}

    def add(self, code: Any, graph: fx.GraphModule) -> None:
        """Keep the graph that `code` was compiled from."""
        # By identity: torch's class of compiled code has no hash.
        number = id(code)
        self._graphs[number] = weakref.ref(code, lambda _: self._graphs.pop(number, None)), graph

    def pop(self, code: Any) -> fx.GraphModule | None:
        """Give it away; None if there is none."""
        kept = self._graphs.pop(id(code), None)
        return kept[1] if kept is not None and kept[0]() is code else None


def _bare_copy(module: fx.GraphModule) -> fx.GraphModule | None:
    """The graph as it is now, without what is known of its nodes, which takes memory; constants are shared."""
    try:
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        for node in graph.nodes:
            node.meta = {}
        return fx.GraphModule(module, graph)
    except Exception:  # not worth the user's program: the region is then unverified
        return None


def _wrapped(code: CodeOfGraph) -> Callable[[Any], Any]:
    """What torch itself makes of code where it wraps it, with our `code` in place of a function without a graph."""
    from torch._higher_order_ops.wrap import inductor_compiled_code

    plain = code.compiled_callable

    def wrapped(inputs: Any) -> Any:
        return inductor_compiled_code(code, inputs) if _modes.is_in_torch_dispatch_mode() else plain(inputs)

    return wrapped
