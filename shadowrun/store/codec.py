"""Values to columns and back, so that NaN, infinities and large integers survive."""

from __future__ import annotations

import dataclasses
import json
import math
from operator import attrgetter
from typing import Any

from shadowrun.store.schema import POSITIONS
from shadowrun.types import RunInfo, TensorDiff, TensorMeta

__all__ = [
    "PackedDiff",
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
PackedDiff = tuple[tuple[Any, ...], tuple[float, ...]]
# These getters take a third of the time of as many attributes.
_COUNTS = attrgetter(
    "n_different", "n_mismatched", "remaining_bits", "n_nan", "n_inf", "n_zero_sign", "n_subnormal", "n_from_zero"
)
_NUMBERS = attrgetter(
    "max_abs", "max_rel", "rmse", "worst_actual", "worst_expected", "excess_actual", "excess_expected"
)


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


def encode_diff(seq: int, position: int, tensor: int, d: TensorDiff) -> PackedDiff:
    """Columns of `packed_diff`, given the number of the tensor: those with a type, and those without."""
    index = _encode_index(d.worst_index, d.actual.shape)
    max_ulp = d.max_ulp if -INT64_MAX <= d.max_ulp <= INT64_MAX else float(d.max_ulp)  # between two f64
    return (seq * POSITIONS + position, tensor, *_COUNTS(d), max_ulp, index, d.detail), _NUMBERS(d)


def _encode_index(index: tuple[int, ...], shape: tuple[int, ...]) -> int | str | None:
    """Place in row-major order; a JSON list where the index is none of the shape's; None for none."""
    if not index:
        return None
    place = 0
    if len(index) != len(shape):
        return str(list(index))
    for i, n in zip(index, shape):  # noqa: B905 - their lengths are equal, and each argument takes time
        if not 0 <= i < n:
            return str(list(index))
        place = place * n + i
    return place if place <= INT64_MAX else str(list(index))


def _decode_index(place: int | str | None, shape: tuple[int, ...]) -> tuple[int, ...]:
    if place is None:
        return ()
    if isinstance(place, str):
        return tuple(json.loads(place))
    index = []
    for n in reversed(shape):
        place, i = divmod(place, n)
        index.append(i)
    return tuple(reversed(index))


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
        _decode_index(index, actual.shape),
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
