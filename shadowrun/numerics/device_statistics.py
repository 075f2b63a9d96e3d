"""How far results are apart, counted on their own device: a few numbers for each pair, and one host sync for many.

To bring a result to the host takes longer than to compute it. These numbers tell which results need no more than that.
They are fields of `TensorDiff`, with the meaning they have there, counted by one Triton kernel where Triton is, and by
operators of the device elsewhere.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from shadowrun.numerics.precision import FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.numerics.precision import FloatFormat

__all__ = ["COUNTED", "DeviceStatistics", "PendingStatistics", "limits"]

_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COUNTED: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes whose distances are counted; of others, only whether they differ."""
# Device types for which Triton compiles: elsewhere the import alone takes half a second.
_WITH_TRITON: Final = ("cuda", "xpu")
_UNKNOWN: Final = (1 << 31) - 1
"""Distance of differing numbers where it is not counted; also the greatest that is told from others."""


class DeviceStatistics(NamedTuple):
    """Differences of one pair of tensors.

    Attributes:
        n_different: Elements whose bits differ.
        max_ulp: Greatest distance of finite elements in units in the last place, at most 2**31 - 1.
        n_class: Elements that are NaN or infinite on one side only, or subnormal against zero.
        n_zero_sign: Zeros of other sign.
    """

    n_different: int
    max_ulp: int
    n_class: int
    n_zero_sign: int


class PendingStatistics:
    """Statistics that are counted on a device and were not fetched yet."""

    def __init__(self) -> None:
        self._rows: list[torch.Tensor] = []
        self._table: torch.Tensor | None = None
        self._kernel: dict[str, Callable[..., None] | None] = {}

    def add(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Count a pair of tensors of one form and device, without a host sync; `fetch` gives them in this order."""
        # A kernel reads memory as it is, without the lazy conjugation and sign of a view.
        actual, expected = (t.resolve_conj().resolve_neg() for t in (actual, expected))
        count = self._find_kernel(actual.device.type) if actual.dtype in COUNTED else None
        pair = _in_memory_order(actual, expected) if count is not None else None
        if count is None or pair is None:
            self._rows.append(_by_operators(actual, expected))
            return
        row = self._next_row(actual.device)
        count(*pair, row, FORMATS[actual.dtype])
        self._rows.append(row)

    def fetch(self) -> list[DeviceStatistics]:
        """Wait for all that was added, and forget it."""
        rows, self._rows, self._table = self._rows, [], None
        if not rows:
            return []
        device = rows[0].device
        if device.type in _WITH_TRITON:  # and with streams: they may have been counted on several
            getattr(torch, device.type).synchronize(device)
        return [DeviceStatistics(*row) for row in torch.stack(rows).tolist()]

    def _next_row(self, device: torch.device) -> torch.Tensor:
        at = len(self._rows) % _ROWS
        if self._table is None or not at or self._table.device != device:
            self._table = torch.zeros((_ROWS, 4), dtype=torch.int32, device=device)
        return self._table[at]

    def _find_kernel(self, device_type: str) -> Callable[..., None] | None:
        if device_type not in self._kernel:
            self._kernel[device_type] = _kernel_for(device_type)
        return self._kernel[device_type]


_ROWS: Final = 512


def _kernel_for(device_type: str) -> Callable[..., None] | None:
    """The Triton kernel, if it counts a known pair as the operators do."""
    if device_type not in _WITH_TRITON or importlib.util.find_spec("triton") is None:
        return None
    try:
        from shadowrun.numerics.device_statistics_kernel import count_differences

        for dtype in COUNTED:
            fmt = FORMATS[dtype]
            actual, expected = (t.to(device_type) for t in _probe(dtype))
            row = torch.zeros(4, dtype=torch.int32, device=device_type)
            count_differences(actual, expected, row, fmt)
            if row.tolist() != _by_operators(actual, expected).tolist():
                return None
    except Exception:  # no compiler, or a Triton that lacks what the kernel needs: slower, and right
        return None
    return count_differences


def _probe(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Each class against each, and neighbours."""
    inf, tiny = float("inf"), torch.finfo(dtype).tiny
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, tiny, tiny / 2, -tiny / 2, inf, -inf, float("nan")])
    x = values.to(dtype)
    actual, expected = x.repeat_interleave(len(x)), x.repeat(len(x))
    expected[0] = 1.0
    return actual, expected


def _in_memory_order(actual: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Both as flat tensors, in the order in which they lie in memory; None where that has gaps."""
    if actual.is_contiguous() and expected.is_contiguous():
        return actual.view(-1), expected.view(-1)
    n, strides = actual.numel(), actual.stride()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(actual.shape, strides, strict=True))
    # Of one form, with as many places as elements and each element in one: there are no gaps.
    if strides != expected.stride() or extent != n or 0 in strides:
        return None
    return tuple(t.as_strided((n,), (1,), t.storage_offset()) for t in (actual, expected))  # type: ignore[return-value]


def _by_operators(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """A row of int32 on the device."""
    a, e = _as_integers(actual), _as_integers(expected)
    differs = a != e
    if actual.dtype not in COUNTED:
        n = differs.sum()
        nothing = torch.zeros_like(n)
        return torch.stack([n, n.clamp(max=1) * _UNKNOWN, nothing, nothing]).to(torch.int32)
    fmt = FORMATS[actual.dtype]
    most, infinite, normal = limits(fmt)
    m, n = a & most, e & most
    finite = (m < infinite) & (n < infinite)
    nan_a, nan_e = m > infinite, n > infinite
    zero_a, zero_e = m == 0, n == 0
    class_differs = (nan_a != nan_e) | (~nan_a & ~nan_e & ~finite & differs)
    class_differs |= (zero_a & ~zero_e & (n < normal)) | (zero_e & ~zero_a & (m < normal))
    # As int64: two numbers of other sign are up to 2**32 - 2**24 apart.
    gap = torch.where(a < 0, -m.to(torch.int64), m.to(torch.int64)) - torch.where(
        e < 0, -n.to(torch.int64), n.to(torch.int64)
    )
    ulp = torch.where(finite, gap.abs(), 0).max().clamp(max=_UNKNOWN)
    return torch.stack([differs.sum(), ulp, class_differs.sum(), (differs & zero_a & zero_e).sum()]).to(torch.int32)


def limits(fmt: FloatFormat) -> tuple[int, int, int]:
    """Bits of the greatest magnitude, of infinity, and of the smallest normal number."""
    most = torch.iinfo(fmt.view).max
    return most, most >> fmt.mantissa << fmt.mantissa, 1 << fmt.mantissa


def _as_integers(t: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor: as numbers, two NaN would differ."""
    if t.element_size() == 16:
        # No integer has 16 bytes.
        t = torch.view_as_real(t)
    return t.view(_INTEGERS[t.element_size()])
