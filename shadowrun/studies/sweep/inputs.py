"""Inputs of a case: copies on a device with the same memory layout, and variants with the same values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.numerics.form import meta
from shadowrun.replay.copies import mirror

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Change = Callable[[torch.Tensor], torch.Tensor]

__all__ = [
    "Sample",
    "channels_last",
    "copied",
    "emptied",
    "is_plain",
    "key",
    "leaves",
    "printed",
    "strided",
    "transposed",
    "without_dims",
]

# `rebuild_case` compares this text with that of the file: with another limit it would refuse older files.
_MAX_PRINTED = 400
# Samples of the database are small; those of a file are bounded where they are made.
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Sample:
    """Inputs of one call, on the CPU.

    Attributes:
        input: The first argument: a tensor, a list of them, or a number.
        args, kwargs: The others.
        process: Function of the result whose gradients are taken; None for the result itself.
        stays: Indices of inputs that stay on the CPU for any device: 0 is `input`, 1 the first of `args`.
    """

    input: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    process: Callable[[Any], Any] | None = None
    stays: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        """Input, args, kwargs."""
        return iter((self.input, self.args, self.kwargs or {}))

    def changed(self, change: Change) -> Sample | None:
        """The sample with each tensor changed; None if no tensor changed."""
        # One tensor may occur twice (`torch.mul(x, x)`): both must become the same new tensor.
        memo: dict[int, torch.Tensor] = {}
        new = replace(
            self,
            input=_mapped(self.input, change, memo),
            args=_mapped(self.args, change, memo),
            kwargs=_mapped(self.kwargs or {}, change, memo),
        )
        return new if any(a is not b for a, b in zip(leaves(tuple(self)), leaves(tuple(new)), strict=True)) else None


def leaves(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested values."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from leaves(v)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from leaves(v)


def is_plain(t: torch.Tensor) -> bool:
    """Whether it is an ordinary strided tensor: not sparse, nested, quantized or of a subclass."""
    plain = t.layout is torch.strided and not t.is_nested and not t.is_quantized
    return plain and type(t) in (torch.Tensor, torch.nn.Parameter)


def copied(sample: Sample, device: torch.device, *, grad: bool) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Copy inputs to a device with their exact strides and shared storage; a ``device`` keyword becomes that device.

    Args:
        sample: What to copy.
        device: Where to.
        grad: Whether copies of tensors that require gradients require them too.
    """
    given = (sample.input, *sample.args)
    # Some arguments have to be on the CPU for any device, such as the indices of `tensor_split`.
    stay = [t for place in sample.stays for t in leaves(given[place : place + 1])]
    old = list({id(t): t for t in leaves(tuple(sample))}.values())
    with torch.no_grad():
        # As if all were written to: tensors that share memory then share it in the copy too.
        (new,), _ = mirror((old,), {}, device, _NO_LIMIT, written=old, kept=stay)
    # By identity: an input that occurs twice must be one tensor on the device too.
    memo = {id(t): n for t, n in zip(old, new, strict=True)}
    if grad:
        for t, n in zip(old, new, strict=True):
            n.requires_grad_(t.requires_grad)
    x, args, kwargs = (_mapped(value, lambda t: t, memo) for value in sample)
    if kwargs.get("device") is not None:
        # Factories (`zeros_like`) take it; the sample names the CPU.
        kwargs["device"] = device
    return x, args, kwargs


def transposed(t: torch.Tensor) -> torch.Tensor:
    """The same values, with the first and the last dimension exchanged in memory."""
    # `contiguous` resolves the bits of a conjugated or negated view: the case would lose what it tests.
    if not is_plain(t) or t.dim() < 2 or t.numel() < 2 or t.is_conj() or t.is_neg():
        return t
    # Detached: gradients are read from inputs, which have to be leaves.
    return t.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_(t.requires_grad)


def strided(t: torch.Tensor) -> torch.Tensor:
    """The same values, transposed in memory and with a gap after each element."""
    if not is_plain(t) or t.dim() == 0 or t.numel() < 2 or t.is_conj() or t.is_neg():
        return t
    turned = t.detach().transpose(0, -1)
    # Zeros in the gaps: what a kernel that ignores strides reads there is known, and never NaN by chance.
    wide = torch.zeros(*turned.shape, 2, dtype=t.dtype)
    wide[..., 0] = turned
    return wide[..., 0].transpose(0, -1).requires_grad_(t.requires_grad)


def channels_last(t: torch.Tensor) -> torch.Tensor:
    """The same values with the channels innermost, for 4 and 5 dimensions."""
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(t.dim() if is_plain(t) else 0)
    if form is None or t.is_contiguous(memory_format=form):
        return t
    return t.detach().contiguous(memory_format=form).requires_grad_(t.requires_grad)


def without_dims(t: torch.Tensor) -> torch.Tensor:
    """The first element, as a tensor without dimensions."""
    if not is_plain(t) or t.dim() == 0 or t.numel() == 0:
        return t
    # A copy: a view would share the storage of the sample, and an in-place operator would write to it.
    return t.detach()[(0,) * t.dim()].clone()


def emptied(sample: Sample) -> Sample | None:
    """Size 0 in the first dimension, for all tensors that have the size of the first tensor there."""
    first = next((t for t in leaves(tuple(sample)) if is_plain(t) and t.dim()), None)
    if first is None or first.shape[0] == 0:
        return None
    n = first.shape[0]

    def cut(t: torch.Tensor) -> torch.Tensor:
        return t.detach()[:0].clone() if is_plain(t) and t.dim() and t.shape[0] == n else t

    return sample.changed(cut)


def key(sample: Sample) -> Any:
    """Identity of a case: forms, numbers, values of integers, and which classes of floats occur.

    A kernel takes the same path for two samples with equal keys, so the sweep runs only the first.
    """
    return tuple(_key(value) for value in sample)


def printed(sample: Sample) -> str:
    """``f32[2, 3], dim=1``."""
    x, args, kwargs = sample
    shown = [_printed(v) for v in (x, *args)] + [f"{name}={_printed(v)}" for name, v in kwargs.items()]
    return ", ".join(shown)[:_MAX_PRINTED]


def _mapped(value: Any, change: Change, memo: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in memo:
            memo[id(value)] = change(value)
        return memo[id(value)]
    # Exact types only: a named tuple takes its fields one by one, and raises on a generator.
    if type(value) in (list, tuple):
        return type(value)(_mapped(v, change, memo) for v in value)
    if type(value) is dict:
        return {k: _mapped(v, change, memo) for k, v in value.items()}
    return value


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if not is_plain(value):
            return id(value)  # unique: what a sparse or quantized tensor holds is not compared
        form = (value.dtype, value.shape, value.stride(), value.requires_grad, value.is_conj(), value.is_neg())
        if not (value.is_floating_point() or value.is_complex()):
            return (*form, value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        v = value.detach().reshape(-1).resolve_conj().resolve_neg()  # flat: few operators take 65 dimensions
        v = torch.view_as_real(v) if v.is_complex() else v
        v = v.float() if v.element_size() == 1 else v  # float8 has few operators
        return (*form, bool(v.isnan().any()), bool(v.isinf().any()), bool((v < 0).any()), bool((v == 0).any()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_key(v) for v in value))
    if isinstance(value, dict):
        return tuple((k, _key(v)) for k, v in value.items())
    return type(value).__name__, repr(value)


def _printed(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(meta(value))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_printed, value))}]"
    return repr(value)
