"""What data files of older schemas hold, in the tables of the present one: readers know no other."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shadowrun.store.schema import POSITIONS, SCHEMA

if TYPE_CHECKING:
    import sqlite3
    from pathlib import Path

__all__ = ["fill_from", "schema_of"]

_SAME = ("meta", "op", "site", "form", "context", "outcome", "verdict", "skipped", "folded")
_SINCE = {"source": 2, "capture": 3, "region": 4}
"""Tables that are still what they were, and the first schema that has them."""

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
_LATER = {"tensor": 5, "packed_diff": 5, **_SINCE}

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

_DIFFS = f"""
insert into packed_diff select seq * {POSITIONS} + position, tensor.id, n_different, n_mismatched,
    remaining_bits, n_nan, n_inf, n_zero_sign, n_subnormal, {{n_from_zero}}, max_ulp, nullif(worst_index, '[]'), detail,
    max_abs, max_rel, rmse, worst_actual, worst_expected, nullif(excess_actual, -1), nullif(excess_expected, -1)
from old.diff d join tensor on tensor.name = d.name and tensor.actual_id = d.actual_id
    and tensor.expected_id = d.expected_id and tensor.n_elements = d.n_elements
order by seq, position
"""  # noqa: S608 - names from above

_STEPS = "insert into step (step, started_s, wall_s{source}) select step, started_s, wall_s{source} from old.step"


def schema_of(version: int) -> str:
    """The tables of an older schema.

    Raises:
        ValueError: There was none of this number.
    """
    if version < 1:
        raise ValueError(f"there is no schema {version}")
    changed = re.findall(r"create table .*?;", _BEFORE_5 if version < 5 else "", re.DOTALL)
    if version == 1:
        changed = [*(sql.replace(" n_from_zero integer not null,", "") for sql in changed), _STEP_1]
    tables = {}
    for sql in (*re.findall(r"^create table .*?;$", SCHEMA, re.DOTALL | re.MULTILINE), *changed):
        name = sql.split(maxsplit=3)[2]
        if version >= _LATER.get(name, 1):
            tables[name] = sql
    if version == 1:
        tables["folded"] = tables["folded"].replace("outcome_id, first_seq)", "outcome_id)")
    return "\n".join(tables.values())


def fill_from(connection: sqlite3.Connection, path: Path, version: int) -> None:
    """Fill a database of the present schema, which holds nothing yet, from a data file of an older one.

    Args:
        connection: Where to; opened by a URI.
        path: The file, which is only read.
        version: Its schema.

    Raises:
        sqlite3.Error: The file is damaged, or the database cannot be written.
    """
    run = connection.execute
    run("attach database ? as old", (f"{path.absolute().as_uri()}?mode=ro",))
    try:
        run("begin")
        for table in (*_SAME, *(name for name, first in _SINCE.items() if version >= first)):
            run(f"insert into main.{table} select * from old.{table}")  # noqa: S608 - names from above
        run(_CALLS)
        run(_TENSORS)
        run(_DIFFS.format(n_from_zero="-1" if version < 2 else "n_from_zero"))
        run(_STEPS.format(source="" if version < 2 else ", source_id"))
        run("commit")
    finally:
        if connection.in_transaction:
            run("rollback")
        run("detach database old")
