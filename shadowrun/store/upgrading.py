"""Bringing a data file of an older schema to the present one, before a run is appended to it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shadowrun.store.schema import SCHEMA, SCHEMA_VERSION

if TYPE_CHECKING:
    import sqlite3

__all__ = ["upgrade"]


def upgrade(connection: sqlite3.Connection) -> None:
    """Change a file in place, in one transaction; one of the present schema stays as it is.

    Raises:
        sqlite3.Error: It cannot be written.
    """
    (version,) = connection.execute("pragma user_version").fetchone()
    if version >= SCHEMA_VERSION:
        return
    connection.execute("begin immediate")
    try:
        if version < 2:
            _from_1(connection)
        if version < 3:
            connection.execute(_create("capture"))
        connection.execute(_create("region"))
        connection.execute(f"pragma user_version = {SCHEMA_VERSION}")
        connection.execute("commit")
    except BaseException:
        connection.execute("rollback")
        raise


def _from_1(connection: sqlite3.Connection) -> None:
    connection.execute(_create("source"))
    connection.execute("alter table diff add column n_from_zero integer not null default -1")
    for table, columns in (("step", "step, started_s, wall_s"), ("folded", "*")):
        connection.execute(f"alter table {table} rename to old_{table}")
        connection.execute(_create(table))
        names = "" if columns == "*" else f"({columns})"
        connection.execute(f"insert into {table} {names} select {columns} from old_{table}")  # noqa: S608
        connection.execute(f"drop table old_{table}")


def _create(table: str) -> str:
    """The statement that makes a table of the present schema."""
    statement = re.search(rf"^create table {table} .*?;$", SCHEMA, re.MULTILINE | re.DOTALL)
    assert statement is not None
    return statement[0]
