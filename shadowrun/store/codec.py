"""Values to columns and back, so that NaN, infinities and large integers survive."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from shadowrun.types import RunInfo, TensorDiff, TensorMeta

__all__ = [
    "decode_float",
    "decode_info",
    "diff_from_row",
    "encode_diff",
    "encode_float",
    "encode_form",
    "encode_info",
    "encode_int",
    "jsonable",
]

INT64_MAX = 2**63 - 1
N_FORM_COLUMNS = 5


def encode_float(value: float) -> float | str:
    """``'nan'`` for NaN, which SQLite would turn into NULL."""
    return value if value == value else "nan"  # noqa: PLR0124 - the fastest NaN test


def decode_float(value: float | str) -> float:
    """Undo `encode_float`."""
    return float(value)


def encode_int(value: int) -> int | float:
    """Integers past 63 bits (a distance in ULP between two f64) become the nearest float."""
    return value if -INT64_MAX <= value <= INT64_MAX else float(value)


def jsonable(value: Any) -> Any:
    """A copy that strict JSON can hold: non-finite floats as ``"nan"``, ``"inf"``, ``"-inf"``; the rest by `str`."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((jsonable(v) for v in value), key=str)
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return str(value)


def encode_info(info: RunInfo) -> str:
    """A `RunInfo` as JSON."""
    return json.dumps(jsonable(info), sort_keys=True, allow_nan=False)


def decode_info(text: str) -> RunInfo:
    """A `RunInfo` from JSON; keys of a later shadowrun are ignored."""
    found: dict[str, Any] = json.loads(text)
    known = {f.name for f in dataclasses.fields(RunInfo)}
    values = {k: v for k, v in found.items() if k in known}
    for name in ("argv", "notes"):
        values[name] = tuple(values.get(name, ()))
    for name in ("wall_s", "own_s", "behind_s"):
        values[name] = float(values.get(name, 0.0))
    return RunInfo(**values)


def encode_form(meta: TensorMeta) -> tuple[str, ...]:
    """Columns of a form."""
    return (meta.dtype, json.dumps(meta.shape), json.dumps(meta.stride), meta.device, meta.layout)


def encode_diff(seq: int, position: int, actual: int, expected: int, d: TensorDiff) -> tuple[Any, ...]:
    """Columns of a `TensorDiff`, given the numbers of its forms."""
    e = encode_float
    return (
        seq, position, d.name, actual, expected, d.n_elements, d.n_different, d.n_mismatched, e(d.max_abs),
        e(d.max_rel), e(d.rmse), encode_int(d.max_ulp), d.remaining_bits, d.n_nan, d.n_inf, d.n_zero_sign,
        d.n_subnormal, str(list(d.worst_index)), e(d.worst_actual), e(d.worst_expected), e(d.excess_actual),
        e(d.excess_expected), d.detail, d.n_from_zero,
    )  # fmt: skip


def diff_from_row(row: tuple[Any, ...]) -> TensorDiff:
    """A `TensorDiff` from its columns: name, both forms (five columns each), the rest in field order."""
    name, rest = row[0], row[1:]
    actual, expected = _form(rest[:N_FORM_COLUMNS]), _form(rest[N_FORM_COLUMNS : 2 * N_FORM_COLUMNS])
    n_elements, n_different, n_mismatched, max_abs, max_rel, rmse, max_ulp, bits, nan, inf, zero, sub, *tail = rest[
        2 * N_FORM_COLUMNS :
    ]
    index, worst_actual, worst_expected, excess_actual, excess_expected, detail, from_zero = tail
    return TensorDiff(
        name,
        actual,
        expected,
        n_elements,
        n_different,
        n_mismatched,
        float(max_abs),
        float(max_rel),
        float(rmse),
        int(max_ulp),
        bits,
        nan,
        inf,
        zero,
        sub,
        tuple(json.loads(index)),
        float(worst_actual),
        float(worst_expected),
        float(excess_actual),
        float(excess_expected),
        detail,
        from_zero,
    )


def _form(columns: tuple[Any, ...]) -> TensorMeta:
    dtype, shape, stride, device, layout = columns
    return TensorMeta(dtype, tuple(json.loads(shape)), tuple(json.loads(stride)), device, layout)
