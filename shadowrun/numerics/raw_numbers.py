"""Numbers from their raw bits, as recordings keep them: zero-extended to 64 bits. Without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["decoded", "ulps_apart"]

_NUMPY: Final = {
    **{name: f"f{size}" for name, size in (("float64", 8), ("float32", 4), ("float16", 2))},
    # The parts of a complex number are kept one by one.
    **{name: f"f{size}" for name, size in (("complex128", 8), ("complex64", 4), ("complex32", 2))},
    **{f"int{8 * size}": f"i{size}" for size in (1, 2, 4, 8)},
    **{f"uint{8 * size}": f"u{size}" for size in (1, 2, 4, 8)},
    "bool": "u1",
}


def decoded(bits: npt.NDArray[np.unsignedinteger[Any]], dtype: str) -> npt.NDArray[np.float64] | None:
    """The numbers as float64, which holds every shorter float: of the shape of `bits`.

    Args:
        bits: Any unsigned dtype; a complex number is two.
        dtype: Name of torch's dtype.

    Returns:
        None for a dtype that numpy lacks: floats of 8 bits.
    """
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        if dtype == "bfloat16":
            # A bfloat16 is the upper half of a float32.
            return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        name = _NUMPY.get(dtype)
        return None if name is None else bits.astype(f"u{name[1:]}").view(name).astype(np.float64)


def ulps_apart(p: npt.NDArray[np.uint64], q: npt.NDArray[np.uint64], width: int) -> npt.NDArray[np.uint64]:
    """Distance of two floats in the order of all floats of their format; zeros of both signs are one.

    Args:
        p: Raw bits.
        q: Of the other ones.
        width: Bits of a float.
    """
    sign = np.uint64(1 << (width - 1))
    m, n = (bits & (sign - np.uint64(1)) for bits in (p, q))
    # The sum of two numbers of 63 bits has at most 64.
    return np.where((p & sign) != (q & sign), m + n, np.where(m > n, m - n, n - m))
