"""The data file's schema: the contract between the process that records and everything that reads."""

from __future__ import annotations

import dataclasses

from shadowrun.types import TensorDiff

__all__ = [
    "APPLICATION_ID",
    "DIFF_COLUMNS",
    "DIFF_COLUMNS_SINCE",
    "POSITIONS",
    "SCHEMA",
    "SCHEMA_VERSION",
    "SEVERITY",
    "severity",
]

APPLICATION_ID = 0x53484452
"""``SHDR``, kept in ``PRAGMA application_id``: marks a SQLite database as a data file of shadowrun."""

POSITIONS = 65536
"""Most tensors that one call may return or mutate."""

# Equal in all calls of an operator on one form, so that a table of their own has them once.
_IN_TABLE_TENSOR = ("name", "actual", "expected", "n_elements")

DIFF_COLUMNS = {f.name: str(f.type) for f in dataclasses.fields(TensorDiff) if f.name not in _IN_TABLE_TENSOR}
"""Columns of ``diff`` with a figure of `TensorDiff`, and the annotations of the fields."""

DIFF_COLUMNS_SINCE: dict[str, int] = {
    f.name: f.metadata["since"] for f in dataclasses.fields(TensorDiff) if "since" in f.metadata
}
"""Schemas that added a column to ``diff``. Of an older file, the column reads -1: not known."""

# A column of `diff` raises it by itself: who adds a field in `types` cannot forget the number here.
SCHEMA_VERSION = max(8, *DIFF_COLUMNS_SINCE.values())
"""Kept in ``PRAGMA user_version``; raised whenever an older shadowrun could misread a new file."""

_SQL_TYPES = {
    "Count": "integer not null",
    "UnknownOrCount": "integer not null",
    "UlpDistance": "integer not null",
    "float": "real not null",
    "SignedFloat": "not null",  # a column of type REAL would lose the sign of -0.0
    "Excess": "real",
    "str": "text not null",
    "tuple[int, ...]": "",
}
_NOTES = {f.name: f"-- {f.metadata['note']}" for f in dataclasses.fields(TensorDiff) if "note" in f.metadata} | {
    "worst_index": "-- place in row-major order; a JSON list where there is none; NULL: not known",
    "excess_actual": "-- NULL: the float64 reference was not computed",
}


def _diff_columns() -> str:
    """The lines of ``create table diff`` for `DIFF_COLUMNS`."""
    lines = (f"    {name} {_SQL_TYPES[kind]}".rstrip() + "," for name, kind in DIFF_COLUMNS.items())
    notes = (_NOTES.get(name, "") for name in DIFF_COLUMNS)
    return "\n".join(f"{line:<31} {note}".rstrip() for line, note in zip(lines, notes, strict=True))


SCHEMA = f"""\
-- Schema of a shadowrun data file (SQLite).
--
-- History
--   1  first version
--   2  table source, step.source_id: files that several runs were combined into; diff.n_from_zero
--   3  table capture: inputs of failing calls, kept in a folder beside the file
--   4  table region: graphs that torch.compile made
--   5  smaller: call has whole nanoseconds, and NULL for what was not measured; tables tensor and packed_diff,
--      of which diff is a view now; diff.worst_index is the place in row-major order
--   6  diff is a table again, and its numbers are kept as they are: packed_diff is gone
--   7  table api: functions and modules of torch that the program called
--   8  table moment: when the parts of a call ran
{"".join(f"--   {since}  diff.{name}{chr(10)}" for name, since in DIFF_COLUMNS_SINCE.items() if since > 8)}--
-- NaN is stored as the text 'nan' (SQLite would make it NULL); infinities are stored as they are. What was not
-- measured is -1; in call and in diff.excess_*, NULL.

create table meta (             -- one row each for: info (a RunInfo as JSON)
    key text primary key,
    value text not null
);

create table source (           -- runs that were combined into this file; none in the file of one run
    id integer primary key,     -- from 0
    file text not null,         -- name of its own data file
    info text not null,         -- its RunInfo as JSON
    first_seq integer not null  -- id * block, added to the numbers of its calls: seq / block is a call's source
);

create table op (               -- operators met, as aten::add.Tensor
    id integer primary key,
    name text not null unique
);

create table site (             -- lines of the user's code, as file.py:12 in forward
    id integer primary key,
    text text not null unique
);

create table form (             -- forms of tensors
    id integer primary key,
    dtype text not null,        -- f32, bf16, i64
    shape text not null,        -- JSON list
    stride text not null,       -- JSON list
    device text not null,
    layout text not null
);

create table context (          -- who called what, from where; shared by many calls
    id integer primary key,
    op_id integer not null references op (id),
    inputs text not null,       -- f32[8, 16], f32[16], 1.0
    dtypes text not null,       -- f32,f32
    shapes text not null,
    module text not null,       -- Net.features.0; empty outside any module
    phase text not null,        -- forward, backward, optimizer
    site_id integer not null references site (id),
    device text not null        -- where the user's program ran it
);

create table outcome (          -- what can become of a call
    id integer primary key,
    status text not null,       -- match, mismatch, unsupported, fallback, error, unverified, skipped
    cause text not null,        -- empty where there is none
    explanation text not null,
    missing_kernel text not null
);

create table verdict (          -- an outcome with the figures that led to it
    id integer primary key,
    outcome_id integer not null references outcome (id),
    evidence text not null,
    confidence real not null
);

create table call (             -- one row for each compared call
    seq integer primary key,    -- number of the call in the run
    step integer not null,
    context_id integer not null references context (id),
    verdict_id integer not null references verdict (id),
    ref_ns integer,             -- NULL, here and below: not measured
    target_ns integer,
    drift_abs real,
    drift_rel real
);

create table tensor (           -- what can differ
    id integer primary key,
    name text not null,         -- output 0, or the mutated argument's name
    actual_id integer not null references form (id),
    expected_id integer not null references form (id),
    n_elements integer not null
);

create table diff (             -- one row for each returned or mutated tensor that differed
    seq integer not null,       -- call.seq
    position integer not null,  -- of the tensor among those of the call that differed
    tensor_id integer not null references tensor (id),
{_diff_columns()}
    primary key (seq, position)
) without rowid;

create table capture (          -- calls whose inputs were kept, in the folder <name of this file>.tensors
    seq integer primary key,    -- call.seq
    file text not null,         -- a bare name in that folder, as 0.pt
    bytes integer not null
);

create table region (           -- graphs that torch.compile made, recorded like operators called compiled::graph 0
    op_id integer primary key references op (id),
    backend text not null,      -- inductor
    n_operators integer not null,  -- in the graph; -1 where torch kept none
    site text not null          -- first line of the user's code in it; empty where it is not known
);

create table api (              -- what the program called, of runs with api=True
    context_id integer primary key references context (id),
    name text not null          -- F.linear, nn.GRU, Tensor.__matmul__, optim.AdamW.step
);

create table moment (           -- when the parts of a call ran, of runs with timeline=True; since the run's start
    seq integer primary key,
    began_ns integer not null,  -- the program called
    target_at_ns integer,       -- the run on the target began; how long it took is in call
    ref_at_ns integer,
    judge_at_ns integer,        -- both runs were over; NULL: not compared
    judged_ns integer,          -- the call was recorded
    ended_ns integer not null   -- the program went on
);

create table skipped (          -- calls that were not compared on purpose, only counted
    op_id integer not null references op (id),
    device text not null,
    reason text not null,
    n integer not null,
    primary key (op_id, device, reason)
) without rowid;

create table folded (           -- matches of which only sums are kept (a run bounded in memory)
    context_id integer not null references context (id),
    outcome_id integer not null references outcome (id),
    n integer not null,         -- calls
    first_seq integer not null,
    first_step integer not null,
    n_ref integer not null,     -- calls with a reference time
    ref_us_total real not null,
    ref_us_min real not null,
    n_target integer not null,
    target_us_total real not null,
    target_us_min real not null,
    max_abs real not null,
    max_rel real not null,
    max_ulp integer not null,
    remaining_bits integer not null,
    n_mismatched integer not null,
    n_nan integer not null,
    n_inf integer not null,
    severity real not null,     -- of the worst call; -1 where no call differed
    worst_seq integer not null,
    drift_abs real not null,
    drift_rel real not null,
    primary key (context_id, outcome_id, first_seq)
) without rowid;

create table step (             -- training steps
    source_id integer not null default 0,  -- the key first: else SQLite 3.40's integrity_check sees NULLs
    step integer not null,
    started_s real not null,    -- seconds since the run's start
    wall_s real not null,
    primary key (source_id, step)
) without rowid;
"""

SEVERITY = """(
    case when n_nan + n_inf > 0 then 3e6 when detail <> '' then 2e6 else 0 end
    + case when n_mismatched > 0 then 1e6 else 0 end
    + min(max(coalesce(excess_actual, 0), 0), 1e5) + 0.5 * min(max_rel, 1)
)"""
"""Rank of a row of ``diff`` for choosing the worst: NaN and Inf first, then form, then elements beyond rounding error,
by their excess. In SQL, which chooses the worst of a million rows; a text ('nan') is greater than any number there."""


def severity(diff: TensorDiff) -> float:
    """`SEVERITY` of one difference, before it is written."""
    excess = 1e5 if diff.excess_actual != diff.excess_actual else min(max(diff.excess_actual, 0.0), 1e5)
    relative = 1.0 if diff.max_rel != diff.max_rel else min(diff.max_rel, 1.0)
    form = 3e6 if diff.n_nan + diff.n_inf > 0 else 2e6 if diff.detail else 0.0
    return form + (1e6 if diff.n_mismatched > 0 else 0.0) + excess + 0.5 * relative
