"""Converts data files of older schemas to the present one, the only one that readers know."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shadowrun.store.schema import DIFF_COLUMNS, DIFF_COLUMNS_SINCE, POSITIONS, SCHEMA

if TYPE_CHECKING:
    import sqlite3
    from pathlib import Path

__all__ = ["fill_from", "schema_of"]

# Tables to the first schema whose rows are copied unchanged; for the columns of `diff`, see `DIFF_COLUMNS_SINCE`.
_TABLES = {
    **dict.fromkeys(("meta", "op", "site", "form", "context", "outcome", "verdict", "skipped", "folded", "step"), 1),
    "source": 2,
    "capture": 3,
    "region": 4,
    "tensor": 5,
    "call": 5,
    "diff": 6,
    "api": 7,
    "moment": 8,
}

# Letter for letter as shadowrun wrote it then: `validation.check_schema` compares a file of that age with it.
_BEFORE_5 = """
create table call (
    seq integer primary key, step integer not null, context_id integer not null references context (id),
    verdict_id integer not null references verdict (id), ref_us real not null, target_us real not null,
    drift_abs real not null, drift_rel real not null
);
create table diff (
    seq integer not null, position integer not null, name text not null,
    actual_id integer not null references form (id), expected_id integer not null references form (id),
    n_elements integer not null, n_different integer not null, n_mismatched integer not null, max_abs real not null,
    max_rel real not null, rmse real not null, max_ulp integer not null, remaining_bits integer not null,
    n_nan integer not null, n_inf integer not null, n_zero_sign integer not null, n_subnormal integer not null,
    worst_index text not null, worst_actual real not null, worst_expected real not null, excess_actual real not null,
    excess_expected real not null, detail text not null, n_from_zero integer not null, primary key (seq, position)
) without rowid;
"""
_STEP_1 = "create table step (step integer primary key, started_s real not null, wall_s real not null);"

_DIFF_5 = """
create table packed_diff (
    id integer primary key, tensor_id integer not null references tensor (id), n_different integer not null,
    n_mismatched integer not null, remaining_bits integer not null, n_nan integer not null, n_inf integer not null,
    n_zero_sign integer not null, n_subnormal integer not null, n_from_zero integer not null, max_ulp integer not null,
    worst_index, detail text not null, max_abs not null, max_rel not null, rmse not null, worst_actual not null,
    worst_expected not null, excess_actual, excess_expected
);
create view diff as select
    packed_diff.id as id, packed_diff.id / 65536 as seq, packed_diff.id % 65536 as position,
    name, actual_id, expected_id, n_elements, n_different, n_mismatched, {max_abs} as max_abs, {max_rel} as max_rel,
    {rmse} as rmse, max_ulp, remaining_bits, n_nan, n_inf, n_zero_sign, n_subnormal, worst_index,
    {worst_actual} as worst_actual, {worst_expected} as worst_expected, coalesce({excess_actual}, -1) as excess_actual,
    coalesce({excess_expected}, -1) as excess_expected, detail, n_from_zero
from packed_diff join tensor on tensor.id = tensor_id;
"""


def _unpacked(column: str) -> str:
    """SQL for a number of schema 5, which stored ``p / 2^s`` as the integer ``128 p + s``."""
    # The text must equal that of the view in such files: `validation.check_schema` compares them.
    c = column
    # Exact, since it divides by powers of two; in two steps, since 1 << 63 overflows an integer.
    return (
        f"case typeof({c}) when 'integer' then ({c} >> 7) * 1.0 / (1 << min({c} & 127, 62)) "
        f"/ (1 << max(({c} & 127) - 62, 0)) else {c} end"
    )


_NUMBERS_5 = {
    name: _unpacked(name) for name, kind in DIFF_COLUMNS.items() if kind in ("float", "SignedFloat", "Excess")
}

# `cast` truncates, so half is added to round. Before schema 5, -1 stood for not measured.
_NS = "case when {0} >= 0 then cast({0} * 1000 + 0.5 as integer) end"
_CALLS = f"""
insert into call select seq, step, context_id, verdict_id, {_NS.format("ref_us")}, {_NS.format("target_us")},
    nullif(drift_abs, -1), nullif(drift_rel, -1)
from old.call order by seq
"""  # noqa: S608 - names from above

_TENSORS = """
insert into tensor (name, actual_id, expected_id, n_elements)
select distinct name, actual_id, expected_id, n_elements from old.diff order by seq, position
"""

_DIFFS_BEFORE_5 = """
insert into diff select seq, position, tensor.id, {values}
from old.diff d join tensor on tensor.name = d.name and tensor.actual_id = d.actual_id
    and tensor.expected_id = d.expected_id and tensor.n_elements = d.n_elements
order by seq, position
"""
_DIFFS_5 = f"""
insert into diff select id / {POSITIONS}, id % {POSITIONS}, tensor_id, {{values}} from old.packed_diff order by id
"""  # noqa: S608 - names from above
_DIFFS = "insert into diff select seq, position, tensor_id, {values} from old.diff order by seq, position"


def schema_of(version: int) -> str:
    """The tables and views of an older schema.

    Raises:
        ValueError: No schema had this number.
    """
    if version < 1:
        raise ValueError(f"there is no schema {version}")
    tables = _statements(SCHEMA)
    tables["diff"] = "".join(
        line for line in tables["diff"].splitlines(keepends=True) if version >= _column_since(line.split()[0])
    )
    if version < 6:
        tables |= _statements(_BEFORE_5 if version < 5 else _DIFF_5.format(**_NUMBERS_5))
    if version == 1:
        tables |= _statements(_STEP_1)
        tables["diff"] = tables["diff"].replace(" n_from_zero integer not null,", "")
        tables["folded"] = tables["folded"].replace("outcome_id, first_seq)", "outcome_id)")
    return "\n".join(sql for name, sql in tables.items() if version >= _TABLES.get(name, 1) or name in ("call", "diff"))


def _statements(schema: str) -> dict[str, str]:
    """``create`` statements by the name that they create."""
    return {sql.split()[2]: sql for sql in re.findall(r"^create .*?;$", schema, re.DOTALL | re.MULTILINE)}


def _column_since(name: str) -> int:
    return DIFF_COLUMNS_SINCE.get(name, 1)


def fill_from(connection: sqlite3.Connection, path: Path, version: int) -> None:
    """Fill an empty database of the present schema from a data file of an older one.

    Args:
        connection: To the database; opened by a URI.
        path: The file, which is only read.
        version: Schema of the file.

    Raises:
        sqlite3.Error: The file is damaged, or the database cannot be written.
    """
    run = connection.execute
    # For reading only: the user's file stays of its schema.
    run("attach database ? as old", (f"{path.absolute().as_uri()}?mode=ro",))
    try:
        run("begin")
        for table, since in _TABLES.items():
            if version >= since and table != "diff":
                columns = ", ".join(name for _, name, *_ in run(f"pragma old.table_info({table})").fetchall())
                run(f"insert into main.{table} ({columns}) select {columns} from old.{table}")  # noqa: S608
        if version < 5:
            run(_CALLS)
            run(_TENSORS)
        diffs = _DIFFS_BEFORE_5 if version < 5 else _DIFFS_5 if version == 5 else _DIFFS
        run(diffs.format(values=", ".join(_figure(name, version) for name in DIFF_COLUMNS)))
        run("commit")
    finally:
        if connection.in_transaction:
            run("rollback")
        run("detach database old")


def _figure(name: str, version: int) -> str:
    """SQL for a column of ``diff``, from the columns of an older schema."""
    if version < _column_since(name):
        return "-1"
    # In SQLite, 1 << 64 is 0: a damaged number becomes a text here, which validation refuses afterwards.
    if version == 5 and name in _NUMBERS_5:
        return f"case when typeof({name}) = 'integer' and {name} & 127 > 123 then 'none' else {_NUMBERS_5[name]} end"
    if version < 5 and DIFF_COLUMNS[name] == "Excess":
        return f"nullif({name}, -1)"
    return f"nullif({name}, '[]')" if version < 5 and name == "worst_index" else name
