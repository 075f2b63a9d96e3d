"""Private APIs of torch's compiler, wrapped once; each line says where it was seen and what happens without it.

Importing this module imports Dynamo (2 s).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
from torch._dynamo.backends.common import aot_autograd as _aot_autograd
from torch._dynamo.utils import counters as _counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = [
    "backend_names",
    "boxed",
    "compiler",
    "forgotten",
    "graph_breaks",
    "graph_of",
    "module_of",
    "no_modes",
    "through_autograd",
    "wrapped_regions",
]

Compiler = Any

# Seen on 2.13: compiled code is first called under a mode of torch's own, under which nothing else compiles.
no_modes = _disable_current_modes


def compiler(backend: Any, mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None) -> Compiler:
    """What `torch.compile` makes of its arguments: takes a graph and inputs, returns a callable.

    Seen on 2.13. Unlike `torch.compile`, Inductor's takes mode and options together. Without it, a graph cannot be
    compiled exactly as `torch.compile(backend=..., mode=...)` would.
    """
    if backend == "inductor":
        return torch._TorchCompileInductorWrapper(mode, dict(options or {}), dynamic)  # type: ignore[no-untyped-call]
    return torch._TorchCompileWrapper(backend, mode, dict(options or {}) or None, dynamic)  # type: ignore[no-untyped-call]


def through_autograd(forward: Callable[..., Any], backward: Callable[..., Any], inference: Callable[..., Any]) -> Any:
    """A backend that splits a graph of Dynamo's into forward and backward of plain operators, as eager runs them.

    Seen on 2.13. No decompositions: what a backend replaces is inside the graphs that it is handed, so that a wrong
    decomposition is a deviation like any other. The partition is Inductor's.
    """
    return _aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function that takes its inputs as one list, which it may empty. Seen on 2.13."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def graph_breaks() -> dict[str, int]:
    """Reasons of the graph breaks so far in this process, and how often. Seen on 2.13."""
    return {str(reason): int(n) for reason, n in _counters["graph_break"].items()}


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Nothing compiled before is met inside, and nothing compiled inside afterwards.

    Seen on 2.13. The caches of Inductor's results stay: they are keyed by what was compiled.
    """
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


@contextlib.contextmanager
def wrapped_regions(unseen: Callable[[], None]) -> Iterator[None]:
    """While inside, Inductor wraps what it compiles, so that a dispatch mode sees each region as one operator.

    Seen on 2.13 (`torch._inductor.config.wrap_inductor_compiled_regions`). Dynamo keeps no guard on it: what was
    compiled inside stays, and runs outside without a detour; what was compiled outside is not seen inside.

    Args:
        unseen: Told of each call of a region that was compiled outside.
    """
    from torch._inductor import config
    from torch._inductor.output_code import CompiledFxGraph

    original = CompiledFxGraph.__call__

    def call(self: Any, inputs: Any) -> Any:
        if not self._wrap_compiled_regions:
            unseen()
        return original(self, inputs)

    CompiledFxGraph.__call__ = call  # type: ignore[method-assign]
    try:
        with config.patch(wrap_inductor_compiled_regions=True):
            yield
    finally:
        if CompiledFxGraph.__call__ is call:
            CompiledFxGraph.__call__ = original  # type: ignore[method-assign]


def graph_of(code: Any) -> Any:
    """The graph that a wrapped region was compiled from; None if torch kept none. Seen on 2.13."""
    return getattr(code, "original_gm", None)


def backend_names() -> list[str]:
    """Backends that have names."""
    return list(torch._dynamo.list_backends(exclude_tags=()))


def module_of(compiler: Compiler) -> str:
    """Name of the module that has the function behind a compiler; empty for Inductor's. Seen on 2.13."""
    return str(getattr(getattr(compiler, "compiler_fn", None), "__module__", ""))
