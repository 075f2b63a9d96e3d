"""The data file's schema: the contract between the process that records and everything that reads."""

from __future__ import annotations

__all__ = ["APPLICATION_ID", "SCHEMA", "SCHEMA_VERSION", "SEVERITY"]

SCHEMA_VERSION = 4
"""Kept in ``PRAGMA user_version``; raised whenever an older shadowrun could misread a new file."""

APPLICATION_ID = 0x53484452
"""``SHDR``, kept in ``PRAGMA application_id``: tells our files from other SQLite databases."""

SCHEMA = """\
-- Schema of a shadowrun data file (SQLite).
--
-- History
--   1  first version
--   2  table source, step.source_id: files that several runs were combined into; diff.n_from_zero
--   3  table capture: inputs of failing calls, kept in a folder beside the file
--   4  table region: graphs that torch.compile made
--
-- NaN is stored as the text 'nan' in REAL columns (SQLite would make it NULL); infinities are stored
-- as they are. -1 means: not measured. Times are in microseconds.

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
    ref_us real not null,
    target_us real not null,
    drift_abs real not null,
    drift_rel real not null
);

create table diff (             -- one row for each returned or mutated tensor that differed
    seq integer not null,       -- call.seq
    position integer not null,
    name text not null,         -- output 0, or the mutated argument's name
    actual_id integer not null references form (id),
    expected_id integer not null references form (id),
    n_elements integer not null,
    n_different integer not null,
    n_mismatched integer not null,
    max_abs real not null,
    max_rel real not null,
    rmse real not null,
    max_ulp integer not null,
    remaining_bits integer not null,
    n_nan integer not null,
    n_inf integer not null,
    n_zero_sign integer not null,
    n_subnormal integer not null,
    worst_index text not null,  -- JSON list
    worst_actual real not null,
    worst_expected real not null,
    excess_actual real not null,
    excess_expected real not null,
    detail text not null,
    n_from_zero integer not null,  -- 0 on the reference, finite and not 0 on the target; -1: not counted
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
    + min(max(excess_actual, 0), 1e5) + 0.5 * min(max_rel, 1)
)"""
"""How bad a `diff` row is, for choosing the worst: class differences (NaN, Inf), then form, then
elements beyond rounding, by how far beyond. SQL, because the worst of a million rows is chosen there;
text ('nan') counts as greater than any number."""
