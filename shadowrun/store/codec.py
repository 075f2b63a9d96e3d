"""Values to columns and back, so that NaN, infinities and large integers survive."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from shadowrun.store.schema import DIFF_COLUMNS
from shadowrun.types import RunInfo, TensorDiff, TensorMeta

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import DataclassInstance

__all__ = [
    "DIFF_PLACEHOLDERS",
    "SIZES",
    "STORED_DIFF",
    "decode_facts",
    "decode_float",
    "decode_info",
    "diff_from_row",
    "encode_diff",
    "encode_float",
    "encode_form",
    "encode_info",
    "encode_int",
    "jsonable",
    "storable",
]

INT64_MAX = 2**63 - 1
UINT64_MAX = 2**64 - 1
MAX_RANKS = 2**20  # `combine` makes a set of all ranks: a number from a hostile file must not size it
# `jsonable` and its like call themselves for each level, and a file may nest as deep as it likes.
MAX_NESTED = 20
SIZES = re.compile(r"\[(-?\d{1,19}(, ?-?\d{1,19}){0,999})?\]", re.ASCII)
"""A JSON list of whole numbers, such as a shape."""
_BUDGET = {"ratio", "achieved", "n_signatures", "n_verified", "n_calls", "n_replayed", "n_steps", "n_unwatched"}
_Facts = TypeVar("_Facts", bound="DataclassInstance")
N_FORM_COLUMNS = 5
_FIGURES = attrgetter(*DIFF_COLUMNS)  # a third of the time of as many attributes
_INDEX, _ULP = (list(DIFF_COLUMNS).index(name) for name in ("worst_index", "max_ulp"))
# SQLite binds NaN as NULL.
_PLACEHOLDER = {
    "float": "coalesce(?, 'nan')",
    "SignedFloat": "coalesce(?, 'nan')",
    "Excess": "nullif(coalesce(?, 'nan'), -1.0)",
}
DIFF_PLACEHOLDERS = ", ".join(["?, ?, ?", *(_PLACEHOLDER.get(kind, "?") for kind in DIFF_COLUMNS.values())])
"""Values of an insert into ``diff``, for the columns from `encode_diff`."""
STORED_DIFF = ", ".join(f"coalesce({c}, -1.0)" if kind == "Excess" else c for c, kind in DIFF_COLUMNS.items())
"""SQL for the last argument of `diff_from_row`."""


def encode_float(value: float) -> float | str:
    """``'nan'`` for NaN, which SQLite would turn into NULL."""
    return value if value == value else "nan"  # noqa: PLR0124 - the fastest NaN test


def decode_float(value: float | str) -> float:
    """Undo `encode_float`."""
    return float(value)


def encode_int(value: int) -> int | float:
    """Integers past 63 bits (a distance in ULP between two f64) become the nearest float."""
    return value if -INT64_MAX <= value <= INT64_MAX else float(value)


def storable(value: Any) -> Any:
    """A text that UTF-8 can hold: a lone surrogate, as in a file name that is not UTF-8, becomes its escape."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value


def jsonable(value: Any) -> Any:
    """A copy that strict JSON can hold: non-finite floats as ``"nan"``, ``"inf"``, ``"-inf"``; the rest by `str`."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        # The order of a set differs from process to process: equal options of two ranks have to be equal texts.
        return sorted((jsonable(v) for v in value), key=str)
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {_key(f): jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return str(value)


def _key(field: dataclasses.Field[Any]) -> str:
    """The key of a field in JSON: its name, unless the field was renamed since files have it."""
    return str(field.metadata.get("key", field.name))


def encode_info(info: RunInfo) -> str:
    """A `RunInfo` as JSON."""
    # Sorted: `combine` recognises a run that is in two files by this text.
    return json.dumps(jsonable(info), sort_keys=True, allow_nan=False)


def decode_info(text: str) -> RunInfo:
    """A `RunInfo` from JSON; unknown keys, of a later shadowrun, are ignored.

    Raises:
        ValueError: The text is not a `RunInfo`.
    """
    info = decode_facts(RunInfo, text)
    if not 0 <= info.rank < info.world_size <= MAX_RANKS:
        raise ValueError(f"rank {info.rank} of {info.world_size}")
    for name, value in (("slow_ratio", info.config.get("slow_ratio", 0)), *info.budget.items()):
        if not _is_number(value):
            raise ValueError(f"{name} is not a number")
    missing = _BUDGET - info.budget.keys() if info.budget else ()
    if missing:
        raise ValueError(f"the budget lacks {', '.join(sorted(missing))}")
    return dataclasses.replace(info, budget={name: _number(value) for name, value in info.budget.items()})


def decode_facts(kind: type[_Facts], text: str) -> _Facts:
    """A dataclass of texts, numbers, lists and dictionaries from JSON; unknown keys are ignored.

    Raises:
        ValueError: A field has another type, or is missing.
    """
    try:
        found = _of_type(dict)(json.loads(text))
        given = {f.name: (str(f.type), found[_key(f)]) for f in dataclasses.fields(kind) if _key(f) in found}
        return kind(**{name: _DECODERS[type_name](value) for name, (type_name, value) in given.items()})
    except (TypeError, ValueError, KeyError, RecursionError) as error:
        raise ValueError(f"its information cannot be read: {type(error).__name__} {error}"[:200]) from error


def _is_number(value: Any) -> bool:
    """Whether `jsonable` returns such a value for a number, and a float can hold it."""
    return _is_integer(value) or type(value) is float or value in ("nan", "inf", "-inf")


def _is_integer(value: Any) -> bool:
    return type(value) is int and -UINT64_MAX <= value <= UINT64_MAX


def _number(value: Any) -> float:
    """Undo `jsonable` for a number."""
    if not _is_number(value):
        raise TypeError(f"{value!r:.40} is not a number")
    return float(value) if isinstance(value, str) else value


def _integer(value: Any) -> int:
    if not _is_integer(value):
        raise TypeError(f"{str(value)[:40]} is not an int")
    return int(value)


def _of_type(*types: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) not in types:  # not `isinstance`: True would pass as an int
            raise TypeError(f"{value!r:.40} is not of type {types[0].__name__}")
        return value

    return check


def _dictionary(value: Any) -> dict[str, Any]:
    _of_type(dict)(value)
    # `jsonable` and its like call themselves for each level.
    if _depth(value) > MAX_NESTED:
        raise ValueError("nested too deeply")
    return dict(value)


def _depth(value: Any, above: int = 0) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    # Ends at the limit: this function, too, calls itself for each level.
    return above if above > MAX_NESTED else max((_depth(part, above + 1) for part in parts), default=above)


# By the type of a field.
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "str": _of_type(str),
    "int": _integer,
    "float": lambda value: float(_number(value)),
    "bool": _of_type(bool),
    "dict[str, Any]": _dictionary,
    "dict[str, int]": lambda value: {name: _integer(n) for name, n in _dictionary(value).items()},
    "dict[str, str]": lambda value: {name: str(text) for name, text in _dictionary(value).items()},
    "tuple[str, ...]": lambda value: tuple(_of_type(str)(text) for text in _of_type(list)(value)),
}


def encode_form(meta: TensorMeta) -> tuple[str, ...]:
    """Columns of a form."""
    return (meta.dtype, json.dumps(meta.shape), json.dumps(meta.stride), meta.device, meta.layout)


def encode_diff(seq: int, position: int, tensor: int, d: TensorDiff) -> tuple[Any, ...]:
    """Columns of ``diff``, given the number of the tensor; see `DIFF_PLACEHOLDERS`."""
    figures = list(_FIGURES(d))
    figures[_INDEX] = _encode_index(d.worst_index, d.actual.shape)
    figures[_ULP] = encode_int(d.max_ulp)
    return (seq, position, tensor, *figures)


def _encode_index(index: tuple[int, ...], shape: tuple[int, ...]) -> int | str | None:
    """Offset in row-major order, which is smaller than a JSON list; a list if the index is outside of the shape."""
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
    # A hostile file may name an element of an empty tensor, where `divmod` would divide by 0.
    if place is None or (0 in shape and not isinstance(place, str)):
        return ()
    if isinstance(place, str):
        return tuple(json.loads(place))
    index = []
    for n in reversed(shape):
        place, i = divmod(place, n)
        index.append(i)
    return tuple(reversed(index))


_DECODE: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("float", "SignedFloat", "Excess"), float),  # also of the text 'nan'
    "UlpDistance": int,
}
_DECODERS_OF_DIFF = [_DECODE.get(kind, lambda value: value) for kind in DIFF_COLUMNS.values()]


def diff_from_row(row: tuple[Any, ...]) -> TensorDiff:
    """A `TensorDiff` from its columns: name, both forms (five columns each), `n_elements`, `STORED_DIFF`."""
    name, *forms = row[: 1 + 2 * N_FORM_COLUMNS]
    n_elements, *stored = row[1 + 2 * N_FORM_COLUMNS :]
    actual, expected = _form(forms[:N_FORM_COLUMNS]), _form(forms[N_FORM_COLUMNS:])
    figures = [decode(value) for decode, value in zip(_DECODERS_OF_DIFF, stored, strict=True)]
    figures[_INDEX] = _decode_index(figures[_INDEX], actual.shape)
    return TensorDiff(name, actual, expected, n_elements, *figures)


def _form(columns: list[Any]) -> TensorMeta:
    dtype, shape, stride, device, layout = columns
    return TensorMeta(dtype, tuple(json.loads(shape)), tuple(json.loads(stride)), device, layout)
