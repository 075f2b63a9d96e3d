"""Digests of tensors: the ladder of `numerics.ladder`, counts of classes, and sampled elements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from shadowrun.intercept import torchapi
from shadowrun.numerics.bits import resolved
from shadowrun.numerics.ladder import ladder, mantissa_of
from shadowrun.numerics.precision import FORMATS
from shadowrun.recording.model import sample_positions

if TYPE_CHECKING:
    import numpy.typing as npt

    from shadowrun.numerics.ladder import Hashes

__all__ = ["Digest", "digest"]

_INTEGERS: Final = frozenset(
    getattr(torch, name) for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)
_AS_COMPLEX: Final = frozenset({torch.complex32, torch.complex64, torch.complex128})
_SAME_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Digest(NamedTuple):
    """What a recording keeps of a tensor's values.

    Attributes:
        rungs: The ladder: (mantissa bits + 1,), of one rung for integers and bool.
        samples: Raw bits of the elements at `model.sample_positions`, zero-extended; two of each complex element.
        n_nan, n_pos_inf, n_neg_inf, n_zero, n_neg_zero, n_subnormal: Elements of each class; `n_zero` counts +0, and
            the parts of complex elements count one by one.
        min, max: Of the finite elements; NaN where there are none.
        norm: 2-norm of the finite elements, computed in float64; likewise.
    """

    rungs: Hashes
    samples: Hashes
    n_nan: int
    n_pos_inf: int
    n_neg_inf: int
    n_zero: int
    n_neg_zero: int
    n_subnormal: int
    min: float
    max: float
    norm: float


def digest(tensor: torch.Tensor) -> Digest | None:
    """Digest a tensor, as if it were contiguous.

    Args:
        tensor: Of any dtype, layout and device. Lazy conjugation and negation count as carried out.

    Returns:
        None for what has no plain values: meta, fake, sparse, quantized, nested and opaque tensors, and dtypes of less
        than a byte.
    """
    if not _has_values(tensor):
        return None
    with torchapi.as_in_handler():
        found: Digest | None = torchapi.with_isolated_warnings(_digest, (), (tensor,), None)
        return found


def _has_values(t: torch.Tensor) -> bool:
    if t.layout is not torch.strided or t.is_quantized or t.is_nested or t.is_meta:
        return False
    if t.dtype not in FORMATS and t.dtype not in _INTEGERS and t.dtype not in _AS_COMPLEX:
        return False
    if type(t) is torch.Tensor or type(t) is torch.nn.Parameter:
        return True
    with torchapi.as_in_handler():
        # Fake tensors and wrappers (DTensor) name a device, but their own storage has no memory.
        try:
            storage = t.untyped_storage()
            return storage.device.type != "meta" and (storage.data_ptr() != 0 or not t.numel())
        except (RuntimeError, NotImplementedError):
            return False


def _digest(tensor: torch.Tensor) -> Digest:
    t = resolved(tensor.detach().cpu())
    n_elements = t.numel()
    t = torch.view_as_real(t) if t.is_complex() else t
    flat = t.contiguous().reshape(-1)
    bits = flat.view(_SAME_SIZE[flat.itemsize]).numpy()
    bits = bits.view(f"u{bits.itemsize}")
    positions = sample_positions(n_elements)
    if tensor.is_complex():
        positions = np.stack([2 * positions, 2 * positions + 1], axis=1).reshape(-1)
    rungs = ladder(bits, mantissa_of(str(t.dtype).removeprefix("torch.")))
    samples = bits[positions].astype(np.uint64)
    if flat.dtype in FORMATS:
        return Digest(rungs, samples, *_float_statistics(flat, FORMATS[flat.dtype].normal))
    return Digest(rungs, samples, 0, 0, 0, int((bits == 0).sum()), 0, 0, *_range(flat.numpy().astype(np.float64)))


def _float_statistics(flat: torch.Tensor, normal: float) -> tuple[int, int, int, int, int, int, float, float, float]:
    values = flat.to(torch.float64).numpy()
    zero, negative = values == 0, np.signbit(values)
    infinite = np.isinf(values)
    return (
        int(np.isnan(values).sum()),
        int((infinite & ~negative).sum()),
        int((infinite & negative).sum()),
        int((zero & ~negative).sum()),
        int((zero & negative).sum()),
        int((~zero & (np.abs(values) < normal)).sum()),
        *_range(values[np.isfinite(values)]),
    )


def _range(values: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    if not values.size:
        return float("nan"), float("nan"), float("nan")
    # Scaled, so that no square overflows or vanishes.
    low, high = float(values.min()), float(values.max())
    scale = max(abs(low), abs(high))
    norm = scale * float(np.sqrt(np.square(values / scale).sum())) if scale else 0.0
    return low, high, norm
