"""Form of values: everything about a result but its bits."""

from __future__ import annotations

import torch

from shadowrun.types import TensorMeta

__all__ = ["Value", "as_tensor", "dtype_name", "form_difference", "forms", "meta"]

Value = torch.Tensor | int | float | bool | complex | None
"""What an operator returns: a tensor, a Python scalar (``_local_scalar_dense``) or nothing."""

_ABBREVIATIONS: dict[torch.dtype, str] = {
    torch.bfloat16: "bf16",
    torch.bool: "b8",
    torch.complex32: "c32",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
}
_PREFIXES = (("uint", "u"), ("int", "i"), ("float", "f"))
_SCALARS: dict[type, str] = {bool: "b8", int: "i64", float: "f64", complex: "c128"}


def dtype_name(dtype: torch.dtype) -> str:
    """Short name as `torch.utils._debug_mode` prints it: ``f32``, ``bf16``, ``i64``, ``b8``, ``f8e4m3fn``.

    Quantized and bits dtypes keep their own name.
    """
    short = _ABBREVIATIONS.get(dtype)
    if short is None:
        short = str(dtype).removeprefix("torch.")
        for prefix, letter in _PREFIXES:
            if short.startswith(prefix):
                short = letter + short.removeprefix(prefix).replace("_e", "e")
                break
        _ABBREVIATIONS[dtype] = short
    return short


def meta(value: Value) -> TensorMeta:
    """Form of a tensor of any layout, or of a Python scalar (``b8[]``, ``i64[]``, ``f64[]``, ``c128[]``)."""
    if not isinstance(value, torch.Tensor):
        return TensorMeta("none" if value is None else _SCALARS[type(value)], (), layout="python")
    layout = "strided" if value.layout is torch.strided else str(value.layout).removeprefix("torch.")
    if value.is_nested:
        # torch raises for a size in which the parts differ, so only the number of parts is kept.
        sizes = tuple(value.size(i) if i == 0 else -1 for i in range(value.dim()))
        return TensorMeta(dtype_name(value.dtype), sizes, (), str(value.device), "nested")
    stride = value.stride() if layout == "strided" else ()
    return TensorMeta(dtype_name(value.dtype), tuple(value.shape), stride, str(value.device), layout)


def as_tensor(value: torch.Tensor | complex) -> torch.Tensor:
    """Tensor of a result; Python scalars become 0-dim tensors of 64-bit (or bool) dtype, exactly where they fit."""
    if isinstance(value, torch.Tensor):
        return value
    # By default torch makes float32 of a Python float, which would round it.
    wide = {float: torch.float64, complex: torch.complex128}.get(type(value))
    return torch.tensor(value, dtype=wide)


def form_difference(actual: Value, expected: Value) -> str:
    """Say how two results differ in form: ``dtype f16 against f32, shape (2,) against (3,)``; "" if they do not.

    Strides of dimensions of size 1, and of tensors without elements, do not matter: no element is placed by them.
    The device is not compared, as both have been brought to the CPU.
    """
    if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)):
        if type(actual) is type(expected):
            return ""
        return f"type {_kind(actual)} against {_kind(expected)}"
    return _difference(meta(actual), meta(expected))


def forms(actual: Value, expected: Value) -> tuple[TensorMeta, TensorMeta, str]:
    """Form of two results, and how they differ in it, as `form_difference` says it."""
    a, e = meta(actual), meta(expected)
    if a.layout == "python" or e.layout == "python":
        return a, e, form_difference(actual, expected)
    return a, e, _difference(a, e)


def _difference(actual: TensorMeta, expected: TensorMeta) -> str:
    if actual == expected:
        return ""
    parts = []
    if actual.dtype != expected.dtype:
        parts.append(f"dtype {actual.dtype} against {expected.dtype}")
    if actual.layout != expected.layout:
        parts.append(f"layout {actual.layout} against {expected.layout}")
    if actual.shape != expected.shape:
        parts.append(f"shape {actual.shape} against {expected.shape}")
    elif actual.stride != expected.stride and 0 not in actual.shape:
        # The stride of a dimension of size 1 places nothing, and torch's kernels give it any value.
        pairs = zip(actual.shape, actual.stride, expected.stride, strict=False)
        if any(n > 1 and a != e for n, a, e in pairs) and actual.layout == expected.layout:
            parts.append(f"stride {actual.stride} against {expected.stride}")
    return ", ".join(parts)


def _kind(value: Value) -> str:
    return "tensor" if isinstance(value, torch.Tensor) else "None" if value is None else type(value).__name__
