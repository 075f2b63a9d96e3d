"""The data file's schema: the contract between the process that records and everything that reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shadowrun.types import TensorDiff

__all__ = ["APPLICATION_ID", "POSITIONS", "SCHEMA", "SCHEMA_VERSION", "SEVERITY", "number", "severity"]

SCHEMA_VERSION = 5
"""Kept in ``PRAGMA user_version``; raised whenever an older shadowrun could misread a new file."""

APPLICATION_ID = 0x53484452
"""``SHDR``, kept in ``PRAGMA application_id``: tells our files from other SQLite databases."""

POSITIONS = 65536
"""Numbers of differences that a call has; its first is ``seq * POSITIONS``."""


def number(column: str) -> str:
    """SQL for the value of a column of `packed_diff` that holds a fraction as a whole number.

    ``p / 2^s`` is kept as ``128 p + s``: what comes from 16- or 32-bit floats takes half the room of a REAL so, often a
    quarter. Dividing by a power of two is exact; it is done in two halves since a whole number has 63 bits.
    """
    c = column
    return (
        f"case typeof({c}) when 'integer' then ({c} >> 7) * 1.0 / (1 << min({c} & 127, 62)) "
        f"/ (1 << max(({c} & 127) - 62, 0)) else {c} end"
    )


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
--
-- NaN is stored as the text 'nan' (SQLite would make it NULL); infinities are stored as they are. -1 means: not
-- measured, but in call, where NULL does.

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

-- Columns without a type hold p / 2^s as the integer 128 p + s, or a REAL: the view diff shows what they mean.
create table packed_diff (
    id integer primary key,     -- call.seq * {POSITIONS} + position
    tensor_id integer not null references tensor (id),
    n_different integer not null,
    n_mismatched integer not null,
    remaining_bits integer not null,
    n_nan integer not null,
    n_inf integer not null,
    n_zero_sign integer not null,
    n_subnormal integer not null,
    n_from_zero integer not null,
    max_ulp integer not null,
    worst_index,
    detail text not null,
    max_abs not null,
    max_rel not null,
    rmse not null,
    worst_actual not null,
    worst_expected not null,
    excess_actual,              -- NULL: the oracle was not asked
    excess_expected
);

create view diff as             -- one row for each returned or mutated tensor that differed
select
    packed_diff.id as id,
    packed_diff.id / {POSITIONS} as seq,  -- call.seq
    packed_diff.id % {POSITIONS} as position,
    name, actual_id, expected_id, n_elements, n_different, n_mismatched,
    {number("max_abs")} as max_abs,
    {number("max_rel")} as max_rel,
    {number("rmse")} as rmse,
    max_ulp, remaining_bits, n_nan, n_inf, n_zero_sign, n_subnormal,
    worst_index,                -- place in row-major order; a JSON list where there is none; NULL: not known
    {number("worst_actual")} as worst_actual,
    {number("worst_expected")} as worst_expected,
    coalesce({number("excess_actual")}, -1) as excess_actual,
    coalesce({number("excess_expected")}, -1) as excess_expected,
    detail,
    n_from_zero                 -- 0 on the reference, finite and not 0 on the target; -1: not counted
from packed_diff join tensor on tensor.id = tensor_id;

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
"""  # noqa: S608 - no value from outside enters it

SEVERITY = f"""(
    case when n_nan + n_inf > 0 then 3e6 when detail <> '' then 2e6 else 0 end
    + case when n_mismatched > 0 then 1e6 else 0 end
    + min(max(coalesce({number("excess_actual")}, 0), 0), 1e5) + 0.5 * min({number("max_rel")}, 1)
)"""
"""How bad a `packed_diff` row is, for choosing the worst: class differences (NaN, Inf), then form, then
elements beyond rounding, by how far beyond. SQL, because the worst of a million rows is chosen there;
text ('nan') counts as greater than any number."""


def severity(diff: TensorDiff) -> float:
    """The same of one difference, for who has to know before it is written."""
    excess = 1e5 if diff.excess_actual != diff.excess_actual else min(max(diff.excess_actual, 0.0), 1e5)
    relative = 1.0 if diff.max_rel != diff.max_rel else min(diff.max_rel, 1.0)
    form = 3e6 if diff.n_nan + diff.n_inf > 0 else 2e6 if diff.detail else 0.0
    return form + (1e6 if diff.n_mismatched > 0 else 0.0) + excess + 0.5 * relative
