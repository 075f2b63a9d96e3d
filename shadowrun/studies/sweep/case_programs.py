"""The program of a case: for each part, inputs on a device and a function that runs on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.studies.sweep.cases import Part
from shadowrun.studies.sweep.inputs import (
    Sample,
    channels_last,
    copied,
    emptied,
    leaves,
    strided,
    transposed,
    without_dims,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NoGradient", "Program", "applies", "gradient", "outs_for", "program", "varied"]

Prepared = Callable[[], Any]
Program = Callable[[torch.device], Prepared]
"""Copies the inputs to a device, and returns a function that runs there and returns all results."""

# Of the gradients only: `torch.manual_seed` would change what a random function draws.
_SEED = 0x5EED
_MAX_DERIVED = 16  # most samples are equal after the reduction to one element or to size 0
_VARIED = {
    Part.TRANSPOSED: lambda s: s.changed(transposed),
    Part.STRIDED: lambda s: s.changed(strided),
    Part.STRIDED_INPLACE: lambda s: s.changed(strided),
    Part.CHANNELS_LAST: lambda s: s.changed(channels_last),
    Part.ZERO_DIM: lambda s: s.changed(without_dims),
    Part.EMPTY: emptied,
}


def applies(info: Any, part: Part) -> bool:
    """Whether the operator has this part, according to the database."""
    if part in (Part.INPLACE, Part.STRIDED_INPLACE):
        return info.inplace_variant is not None
    if part is Part.OUT:
        return bool(info.supports_out)
    if part is Part.BACKWARD:
        return bool(info.supports_autograd)
    return part is not Part.INVALID or info.error_inputs_func is not None


def varied(samples: list[Sample], part: Part) -> Iterator[tuple[int, Sample]]:
    """The samples in the form of a part, with their numbers; samples that the form does not change are left out."""
    change = _VARIED.get(part)
    n = 0
    for number, sample in enumerate(samples):
        new = sample if change is None else change(sample)
        if new is None:
            continue
        n += 1
        if part in (Part.ZERO_DIM, Part.EMPTY) and n > _MAX_DERIVED:
            return
        # The number of the database: a case keeps its name when other samples are left out.
        yield number, new


def program(info: Any, part: Part, number: int, sample: Sample) -> Program:
    """The program of a case.

    Args:
        info: Entry of the database; for recorded calls a function, which may write to its inputs.
        part: Part of the case.
        number: Number of the sample.
        sample: Inputs, in the form of the part.
    """
    function = getattr(info, "op", info)
    if part in (Part.INPLACE, Part.STRIDED_INPLACE):
        return _inplace(info.inplace_variant, sample)
    if part is Part.OUT:
        return _out(function, sample, resized=number % 2 == 1)
    if part is Part.BACKWARD:
        return _backward(function, sample)
    if part is Part.MEMORY:
        return _memory(function, getattr(info, "inplace_variant", None), sample)
    # A recorded operator may write to its inputs, so they are results; functions of the database do not.
    return _forward(function, sample, inputs_too=not hasattr(info, "op"))


def _forward(function: Any, sample: Sample, *, inputs_too: bool) -> Program:
    def prepare(device: torch.device) -> Prepared:
        x, args, kwargs = copied(sample, device, grad=False)

        def run() -> Any:
            out = function(x, *args, **kwargs)
            return [out, x, args, kwargs] if inputs_too else out

        return run

    return prepare


def _inplace(function: Any, sample: Sample) -> Program:
    def prepare(device: torch.device) -> Prepared:
        x, args, kwargs = copied(sample, device, grad=False)
        # Both: a function may return the right values without writing them.
        return lambda: [function(x, *args, **kwargs), x]

    return prepare


def _memory(function: Any, inplace: Any, sample: Sample) -> Program:
    """The function, and its in-place variant on a view with gaps, if there is one that accepts the sample."""
    view = None if inplace is None else sample.changed(strided)

    def prepare(device: torch.device) -> Prepared:
        x, args, kwargs = copied(sample, device, grad=False)
        given = None if view is None else copied(view, device, grad=False)

        def run() -> Any:
            out = function(x, *args, **kwargs)
            if given is not None:
                first, others, named = given
                with contextlib.suppress(Exception):  # the part `strided_inplace` reports exceptions
                    inplace(first, *others, **named)
            return out

        return run

    return prepare


def _out(function: Any, sample: Sample, *, resized: bool) -> Program:
    def prepare(device: torch.device) -> Prepared:
        cpu = torch.device("cpu")
        x, args, kwargs = copied(sample, cpu, grad=False)
        # Run once without `out=`: the database does not have the shape of the result.
        expected = function(x, *args, **kwargs)
        given = Sample(outs_for(expected, resized=resized))
        x, args, kwargs = copied(sample, device, grad=False)
        out, _, _ = copied(given, device, grad=False)
        return lambda: [function(x, *args, **kwargs, out=out), out]

    return prepare


def outs_for(expected: Any, *, resized: bool) -> Any:
    """The argument ``out=`` for a result: a tensor or a tuple of tensors, of its shape or empty."""
    if isinstance(expected, torch.Tensor):
        return torch.empty(0, dtype=expected.dtype) if resized else torch.zeros_like(expected)
    return tuple(outs_for(t, resized=resized) for t in leaves(expected))


def _backward(function: Any, sample: Sample) -> Program:
    def prepare(device: torch.device) -> Prepared:
        x, args, kwargs = copied(sample, device, grad=True)
        wanted = [t for t in leaves([x, args, kwargs]) if t.requires_grad]

        def run() -> Any:
            result = function(x, *args, **kwargs)
            if sample.process is not None:
                result = sample.process(result)
            outs = [t for t in leaves(result) if t.requires_grad and (t.is_floating_point() or t.is_complex())]
            if not outs or not wanted:
                raise NoGradient
            # Not `out.sum().backward()`: a gradient of ones hides faults that a constant cannot show.
            torch.autograd.backward(outs, [gradient(t) for t in outs])
            return [t.grad for t in wanted]

        return run

    return prepare


class NoGradient(Exception):  # noqa: N818 - a reason, caught inside
    """No result, or no input, requires a gradient."""


def gradient(out: torch.Tensor) -> torch.Tensor:
    """The gradient that a backward pass starts with; the same numbers for the same shape."""
    if out.layout is not torch.strided or out.is_nested:
        # `randn` makes dense tensors only.
        return torch.ones_like(out)
    # Drawn on the CPU: random generators of devices give other numbers for the same seed.
    generator = torch.Generator().manual_seed(_SEED)
    dtype = out.dtype if out.is_complex() else torch.float32
    return torch.randn(out.shape, generator=generator, dtype=dtype).to(out.dtype).to(out.device)
