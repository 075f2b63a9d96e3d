-- A data file of schema 1, as the shadowrun of that time wrote it.
pragma application_id = 1397245010;
pragma user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE call (             -- one row for each compared call
    seq integer primary key,    -- number of the call in the run
    step integer not null,
    context_id integer not null references context (id),
    verdict_id integer not null references verdict (id),
    ref_us real not null,
    target_us real not null,
    drift_abs real not null,
    drift_rel real not null
);
INSERT INTO "call" VALUES(0,0,1,1,1.0,2.0,-1.0,-1.0);
INSERT INTO "call" VALUES(1,0,1,2,1.0,2.0,-1.0,-1.0);
INSERT INTO "call" VALUES(2,0,1,1,1.0,2.0,-1.0,-1.0);
CREATE TABLE context (          -- who called what, from where; shared by many calls
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
INSERT INTO "context" VALUES(1,1,'f32[2, 3]','f32','[2, 3]','Net.fc','forward',1,'npu:0');
CREATE TABLE diff (             -- one row for each returned or mutated tensor that differed
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
    primary key (seq, position)
) without rowid;
INSERT INTO "diff" VALUES(1,0,'output 0',1,1,6,5,4,0.5,'nan',0.25,9,3,0,0,0,0,'[1, 2]',1.5,0.0,-1.0,-1.0,'');
CREATE TABLE folded (           -- matches of which only sums are kept (a run bounded in memory)
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
    primary key (context_id, outcome_id)
) without rowid;
CREATE TABLE form (             -- forms of tensors
    id integer primary key,
    dtype text not null,        -- f32, bf16, i64
    shape text not null,        -- JSON list
    stride text not null,       -- JSON list
    device text not null,
    layout text not null
);
INSERT INTO "form" VALUES(1,'f32','[2, 3]','[3, 1]','npu:0','strided');
CREATE TABLE meta (             -- one row each for: info (a RunInfo as JSON)
    key text primary key,
    value text not null
);
INSERT INTO "meta" VALUES('info','{"argv": ["train.py"], "complete": true, "config": {"slow_ratio": 10.0}, "notes": [], "own_s": 1.0, "rank": 0, "ref": "cpu", "ref_fingerprint": {"threads": 2}, "started": "2026-01-01T00:00:00", "target": "npu", "target_fingerprint": {"name": "Simulated NPU"}, "versions": {"torch": "2.13.0"}, "wall_s": 2.0, "world_size": 2}');
CREATE TABLE op (               -- operators met, as aten::add.Tensor
    id integer primary key,
    name text not null unique
);
INSERT INTO "op" VALUES(1,'aten::mm');
INSERT INTO "op" VALUES(2,'aten::view');
CREATE TABLE outcome (          -- what can become of a call
    id integer primary key,
    status text not null,       -- match, mismatch, unsupported, fallback, error, unverified, skipped
    cause text not null,        -- empty where there is none
    explanation text not null,
    missing_kernel text not null
);
INSERT INTO "outcome" VALUES(1,'match','','','');
INSERT INTO "outcome" VALUES(2,'mismatch','implementation','wrong','');
CREATE TABLE site (             -- lines of the user's code, as file.py:12 in forward
    id integer primary key,
    text text not null unique
);
INSERT INTO "site" VALUES(1,'a.py:1 in f');
CREATE TABLE skipped (          -- calls that were not compared on purpose, only counted
    op_id integer not null references op (id),
    device text not null,
    reason text not null,
    n integer not null,
    primary key (op_id, device, reason)
) without rowid;
INSERT INTO "skipped" VALUES(2,'npu:0','view',2);
CREATE TABLE step (             -- training steps
    step integer primary key,
    started_s real not null,    -- seconds since the run's start
    wall_s real not null
);
INSERT INTO "step" VALUES(0,0.0,1.5);
CREATE TABLE verdict (          -- an outcome with the figures that led to it
    id integer primary key,
    outcome_id integer not null references outcome (id),
    evidence text not null,
    confidence real not null
);
INSERT INTO "verdict" VALUES(1,1,'',1.0);
INSERT INTO "verdict" VALUES(2,2,'by 3',0.5);
COMMIT;
