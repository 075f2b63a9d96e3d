"""Torch's own operators with the inputs of torch's operator database, as programs, with their gradients.

What a random operator draws is an input (`zoo.capture`), so that it has no program; but for dropout, whose result
follows from its mask.
"""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.studies.sweep.opinfo import database, dtypes, samples
from shadowrun.studies.zoo.capture import capture_generated, tensors_in
from shadowrun.studies.zoo.graph import Graph, Input, Node, Ref
from shadowrun.studies.zoo.sources.source import Collected, LeftOut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shadowrun.studies.sweep.inputs import Sample

__all__ = ["SOURCE", "collect"]

SOURCE: Final = "operators"
# Of one operator in one dtype: the first that have other shapes or arguments.
_SAMPLES: Final = 4
# The first of these that an operator takes; mutations make others of it.
_DTYPES: Final = ("float32", "int64", "bool", "complex64")
_MAX_ELEMENTS: Final = 1 << 16
# Shares that dropout drops.
_DROPPED: Final = (0.1, 0.25, 0.9)


def collect(patterns: Callable[[str], bool], on_progress: Callable[..., None]) -> Collected:
    """Programs of the operators whose names fit.

    Args:
        patterns: Whether a name such as ``nn.functional.silu`` is wanted.
        on_progress: Called with done, total and name.

    Raises:
        UsageError: Torch's database cannot be imported.
    """
    found = Collected(SOURCE)
    wanted = [name for name in database() if patterns(name)]
    # The database seeds torch's global generator.
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, name in enumerate(wanted):
            on_progress(number, len(wanted), name)
            info = database()[name]
            dtype = next((d for d in _DTYPES if d in dtypes(info)), None)
            if dtype is None:
                found.count_step("samples of the operator", name, "it takes none of the dtypes")
                continue
            made = found.try_step("samples of the operator", name, functools.partial(_samples, name, dtype))
            for k, sample in enumerate(made or ()):
                for what, capture in (("", _forward), (" backward", _backward)):
                    if what and (k > 1 or not info.supports_autograd or dtype not in ("float32", "complex64")):
                        continue
                    graph = found.try_step(
                        f"captured{what}", f"{name}{what} {k}", functools.partial(capture, info, sample)
                    )
                    if graph is not None:
                        found.add(f"{name}{what} {k}", graph)
            if name == "nn.functional.dropout":
                for p in _DROPPED:
                    found.add(f"native_dropout {p}", _dropout(p))
    return found


def _dropout(p: float) -> Graph:
    """Dropout whose result is judged at its call, and read by nothing that depends on its values: these are drawn."""
    shape = (16, 64)
    drawn = Node(torch.ops.aten.native_dropout.default, (Ref(-1), p, True))
    return Graph((Input("input", shape),), (drawn, Node(torch.ops.aten.zeros_like.default, (Ref(0),))), (Ref(1),))


def _samples(name: str, dtype: str) -> list[Sample]:
    made = samples(name, dtype, 0, 5 * _SAMPLES, grad=False)
    small = [s for s in made if all(t.numel() <= _MAX_ELEMENTS for t in tensors_in((s.input, s.args, s.kwargs)))]
    # Samples without elements come first for some operators: they compute nothing.
    full = [s for s in small if all(t.numel() for t in tensors_in(s.input))]
    step = max(len(full) // _SAMPLES, 1)
    return (full or small)[::step][:_SAMPLES]


def _forward(info: Any, sample: Sample) -> Graph:
    return capture_generated(info.op, sample.input, *sample.args, **(sample.kwargs or {}))


def _backward(info: Any, sample: Sample) -> Graph:
    """The operator and its gradients, as calls below autograd."""

    def both(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        given = [t for t in tensors_in((args, kwargs)) if t.is_floating_point() or t.is_complex()]
        for t in given:
            t.requires_grad_(True)
        try:
            with torch.enable_grad():
                out = info.op(*args, **kwargs)
                results = [t for t in tensors_in(sample.process(out) if sample.process else out) if t.requires_grad]
                if not results:
                    raise LeftOut("it has no gradient")
                seeds = [torch.ones_like(t) for t in results]
                grads: Sequence[torch.Tensor | None] = torch.autograd.grad(results, given, seeds, allow_unused=True)
        finally:
            for t in given:
                t.requires_grad_(False)
        return [t.detach() for t in (*results, *grads) if t is not None]

    return capture_generated(both, sample.input, *sample.args, **(sample.kwargs or {}))
