"""The coverage file's schema: what a sweep writes, and every table and difference is made from."""

from __future__ import annotations

__all__ = ["APPLICATION_ID", "SCHEMA", "SCHEMA_VERSION"]

SCHEMA_VERSION = 1
"""Kept in ``PRAGMA user_version``; raised whenever an older shadowrun could misread a new file."""

APPLICATION_ID = 0x53484443
"""``SHDC``, kept in ``PRAGMA application_id``."""

SCHEMA = """\
-- Schema of a coverage file of shadowrun (SQLite).
--
-- History
--   1  first version

create table meta (             -- one row: info (a SweepInfo as JSON)
    key text primary key,
    value text not null
);

create table operator (         -- operators swept, as in torch's database, or aten::add.Tensor of a recorded call
    id integer primary key,
    name text not null unique
);

create table task (             -- parts that were run to their end
    operator_id integer not null references operator (id),
    dtype text not null,        -- float32; any for invalid inputs
    part text not null,         -- forward, backward, inplace, out, strided, ...
    samples integer not null,   -- limit of samples that it was run under; -1 for all
    n_duplicates integer not null,  -- cases left out, since they repeat another
    primary key (operator_id, dtype, part)
);

create table result (           -- one row for each case that was run
    id integer primary key,
    operator_id integer not null references operator (id),
    dtype text not null,
    part text not null,
    sample integer not null,    -- number of the sample, from 0
    kind text not null,         -- pass, mismatch, unsupported operator, ...: that of its worst finding
    inputs text not null,       -- f32[2, 3], dim=1; empty for a pass
    unique (operator_id, dtype, part, sample)
);

create table finding (          -- what cases showed; shared by many
    id integer primary key,
    kind text not null,
    op text not null,           -- aten::_softmax: operator inside that is to blame; empty where unknown
    kernel text not null,       -- missing kernel; empty where none was
    cause text not null,        -- a Cause; empty where there is none
    explanation text not null,
    message text not null       -- of the first case
);

create table result_finding (   -- the worst of a case has position 0
    result_id integer not null references result (id),
    position integer not null,
    finding_id integer not null references finding (id),
    primary key (result_id, position)
) without rowid;
"""
