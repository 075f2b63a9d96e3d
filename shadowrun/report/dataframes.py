"""Results as rows: lists that show themselves in a notebook and become data frames, and records as CSV or Parquet."""

from __future__ import annotations

import dataclasses
import enum
import io
import itertools
import math
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shadowrun.errors import UsageError
from shadowrun.report.sanitize import sanitize
from shadowrun.store.atomic_write import atomic_write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from shadowrun.report.document import Table
    from shadowrun.types import OpRecord

__all__ = ["Rows", "record_row", "to_dataframe", "write_records"]

T = TypeVar("T")
_MAX_SHOWN = 20
_BATCH = 10_000
_FORMATS = (".csv", ".parquet")


class Rows(list[T], Generic[T]):
    """A list of results; `repr` has a line for each, and a notebook shows it as a table.

    Args:
        values: The results: frozen dataclasses.
        table: Makes the table of a notebook.
    """

    def __init__(self, values: Iterable[T], table: Callable[[list[T]], Table] | None = None) -> None:
        super().__init__(values)
        self._table = table

    def to_rows(self) -> list[dict[str, Any]]:
        """One flat dictionary for each: a nested value gets its fields as ``worst_max_abs``, a tuple becomes text."""
        return [_flat(value) for value in self]

    def to_dataframe(self) -> Any:
        """A `pandas.DataFrame` with a row for each.

        Raises:
            UsageError: pandas is not installed.
        """
        return to_dataframe(self.to_rows())

    def __repr__(self) -> str:
        if not self:
            return "[]"
        shown = [f" {value!r}," for value in self[:_MAX_SHOWN]]
        more = [f" … {len(self) - _MAX_SHOWN} more"] if len(self) > _MAX_SHOWN else []
        return "\n".join(("[", *shown, *more, "]"))

    def _repr_html_(self) -> str | None:
        if self._table is None:
            return None
        from shadowrun.report.formats.html import table_html

        return table_html(self._table(self))


def record_row(record: OpRecord) -> dict[str, Any]:
    """A record as one flat row: the call, the verdict, the worst of its differences, times in microseconds."""
    # Flat, since neither CSV nor a data frame has nested columns; all differences are in the data file.
    row = _flat(record.call) | {name: _plain(value) for name, value in _fields(record.verdict)}
    worst = max(
        record.diffs, key=lambda d: (d.n_mismatched, d.max_abs if math.isfinite(d.max_abs) else 0), default=None
    )
    row["n_tensors_different"] = len(record.diffs)
    for name in ("n_elements", "n_different", "n_mismatched", "max_abs", "max_rel", "max_ulp", "remaining_bits"):
        row[name] = None if worst is None else getattr(worst, name)
    # Of two float64 it may exceed 63 bits, which no column of integers holds.
    row["max_ulp"] = None if worst is None else float(worst.max_ulp)
    for name in ("missing_kernel", "ref_time_us", "target_time_us", "drift_abs", "drift_rel"):
        row[name] = getattr(record, name)
    return row


def write_records(records: Iterable[OpRecord], path: Path) -> int:
    """Write a row for each call, a part of the file at a time, so that memory stays bounded.

    Args:
        records: What `Run.records` gives.
        path: Ends in ``.csv``, or ``.parquet`` (needs pyarrow).

    Returns:
        The number of rows.

    Raises:
        UsageError: Another ending, pyarrow is not installed, or the file cannot be written.
    """
    if path.suffix not in _FORMATS:
        raise UsageError(
            f"Records to {str(path)!r}: use a name that ends in {' or '.join(_FORMATS)}.", slug="unknown-format"
        )
    write = _write_csv if path.suffix == ".csv" else _write_parquet
    try:
        # Both are read in terminals and spreadsheets, where a text of a file could hide itself or the next one.
        return write((sanitize(record_row(record), whole=True) for record in records), path)
    except OSError as error:
        raise UsageError(
            f"The records {str(path)!r} cannot be written ({error.strerror or error}): the folder must exist and be "
            "writable.",
            slug="unwritable-report",
        ) from error


def _write_csv(rows: Iterator[dict[str, Any]], path: Path) -> int:
    from shadowrun.report.formats.json_csv import csv_writer

    n = 0
    with atomic_write(path) as raw, io.TextIOWrapper(raw, "utf-8", "replace", "") as file:
        write = csv_writer(file)
        for n, row in enumerate(rows, 1):
            if n == 1:
                write(row)
            write(row.values())
    return n


def _write_parquet(rows: Iterator[dict[str, Any]], path: Path) -> int:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError(
            "Parquet needs pyarrow: run `pip install 'shadowrun[parquet]'`, or write a .csv.", slug="missing-extra"
        ) from error
    # Given, not guessed: a column that is empty in the first part would be of another type.
    schema = pa.schema([(name, _arrow_type(pa, name)) for name in _COLUMNS])
    n = 0
    with atomic_write(path) as file, parquet.ParquetWriter(file, schema) as writer:
        # A part of the rows at a time: a run of a million calls must fit.
        while part := list(itertools.islice(rows, _BATCH)):
            writer.write_table(pa.Table.from_pylist(part, schema=schema))
            n += len(part)
    return n


_TEXTS = ("op", "inputs", "module", "phase", "site", "device", "status", "cause", "explanation", "evidence")
_INTEGERS = (
    "seq",
    "step",
    "rank",
    "n_tensors_different",
    "n_elements",
    "n_different",
    "n_mismatched",
    "remaining_bits",
)
_COLUMNS = (
    *("seq", "step", "rank", "op", "inputs", "module", "phase", "site", "device"),
    *("status", "cause", "explanation", "evidence", "confidence", "n_tensors_different"),
    *("n_elements", "n_different", "n_mismatched", "max_abs", "max_rel", "max_ulp", "remaining_bits"),
    *("missing_kernel", "ref_time_us", "target_time_us", "drift_abs", "drift_rel"),
)


def _arrow_type(pa: Any, name: str) -> Any:
    if name in _INTEGERS:
        return pa.int64()
    return pa.string() if name in _TEXTS or name == "missing_kernel" else pa.float64()


def to_dataframe(rows: Iterable[dict[str, Any]]) -> Any:
    """A `pandas.DataFrame`.

    Raises:
        UsageError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise UsageError(
            "A data frame needs pandas: run `pip install pandas`, or use to_rows().", slug="missing-extra"
        ) from error
    return pd.DataFrame(list(rows))


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(value):
        yield field.name, getattr(value, field.name)


def _flat(value: Any) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, v in _fields(value):
        if dataclasses.is_dataclass(v) and not isinstance(v, type):
            row |= {f"{name}_{inner}": x for inner, x in _flat(v).items()}
        else:
            row[name] = _plain(v)
    return row


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value))
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
