-- A data file of schema 7, as the shadowrun of that time wrote it.
pragma application_id = 1397245010;
pragma user_version = 7;
BEGIN TRANSACTION;
CREATE TABLE api (              -- what the program called, of runs with api=True
    context_id integer primary key references context (id),
    name text not null          -- F.linear, nn.GRU, Tensor.__matmul__, optim.AdamW.step
);
CREATE TABLE call (             -- one row for each compared call
    seq integer primary key,    -- number of the call in the run
    step integer not null,
    context_id integer not null references context (id),
    verdict_id integer not null references verdict (id),
    ref_ns integer,             -- NULL, here and below: not measured
    target_ns integer,
    drift_abs real,
    drift_rel real
);
INSERT INTO "call" VALUES(0,0,1,1,3141,12345678,NULL,NULL);
INSERT INTO "call" VALUES(1,0,1,2,1,NULL,0.25,'nan');
INSERT INTO "call" VALUES(2,1,1,3,NULL,10000000003,9e999,1.0e-09);
INSERT INTO "call" VALUES(3,1,2,1,0,7000,0.0,0.0);
CREATE TABLE capture (          -- calls whose inputs were kept, in the folder <name of this file>.tensors
    seq integer primary key,    -- call.seq
    file text not null,         -- a bare name in that folder, as 0.pt
    bytes integer not null
);
INSERT INTO "capture" VALUES(2,'0.pt',100);
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
INSERT INTO "context" VALUES(1,1,'f32[3, 4]','f32','[3, 4]','Net.fc','forward',1,'npu:0');
INSERT INTO "context" VALUES(2,2,'f32[3, 4]','f32','[3, 4]','Net.fc','forward',1,'npu:0');
CREATE TABLE diff (             -- one row for each returned or mutated tensor that differed
    seq integer not null,       -- call.seq
    position integer not null,  -- of the tensor among those of the call that differed
    tensor_id integer not null references tensor (id),
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
    worst_index,                -- place in row-major order; a JSON list where there is none; NULL: not known
    worst_actual not null,
    worst_expected not null,
    excess_actual real,         -- NULL: the float64 reference was not computed
    excess_expected real,
    detail text not null,
    n_from_zero integer not null, -- 0 on the reference, finite and not 0 on the target; -1: not counted
    primary key (seq, position)
) without rowid;
INSERT INTO "diff" VALUES(1,0,1,5,0,2.32830643653869628906e-10,0.1,3.14159265358979311599e+00,3,20,0,0,0,0,11,-0.75,0.0,NULL,NULL,'',0);
INSERT INTO "diff" VALUES(2,0,1,5,0,2.32830643653869628906e-10,0.1,3.14159265358979311599e+00,3,20,0,0,0,0,11,-0.75,0.0,NULL,NULL,'',0);
INSERT INTO "diff" VALUES(2,1,2,5,5,'nan',9e999,0.0,1.18059162071741130344e+21,-1,0,0,0,0,NULL,0.0,0.0,NULL,NULL,'shape',0);
INSERT INTO "diff" VALUES(2,2,3,1,0,1.0e-300,4.94065645841247e-324,0.25,1,2,1,2,3,4,'[7, 7]',1.0e+38,-1.0e+38,0.5,3.33333333333333314829e-01,'x',9);
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
    primary key (context_id, outcome_id, first_seq)
) without rowid;
CREATE TABLE form (             -- forms of tensors
    id integer primary key,
    dtype text not null,        -- f32, bf16, i64
    shape text not null,        -- JSON list
    stride text not null,       -- JSON list
    device text not null,
    layout text not null
);
INSERT INTO "form" VALUES(1,'f32','[3, 4]','[4, 1]','npu:0','strided');
INSERT INTO "form" VALUES(2,'f32','[5]','[]','cpu','strided');
CREATE TABLE meta (             -- one row each for: info (a RunInfo as JSON)
    key text primary key,
    value text not null
);
INSERT INTO "meta" VALUES('info','{"argv": ["a.py"], "behind_s": 0.0, "budget": {}, "complete": true, "config": {}, "notes": [], "own_s": 0.0, "raised": "", "rank": 0, "ref": "cpu", "ref_fingerprint": {"threads": 2}, "repairs": {}, "started": "2026-01-01", "target": "npu", "target_fingerprint": {"name": "N"}, "unselected": "", "versions": {"torch": "2.13.0"}, "wall_s": 0.0, "world_size": 1}');
CREATE TABLE op (               -- operators met, as aten::add.Tensor
    id integer primary key,
    name text not null unique
);
INSERT INTO "op" VALUES(1,'aten::mm');
INSERT INTO "op" VALUES(2,'compiled::graph 0');
INSERT INTO "op" VALUES(3,'aten::view');
CREATE TABLE outcome (          -- what can become of a call
    id integer primary key,
    status text not null,       -- match, mismatch, unsupported, fallback, error, unverified, skipped
    cause text not null,        -- empty where there is none
    explanation text not null,
    missing_kernel text not null
);
INSERT INTO "outcome" VALUES(1,'match','','','');
INSERT INTO "outcome" VALUES(2,'match','rounding','','');
INSERT INTO "outcome" VALUES(3,'mismatch','implementation','wrong','a kernel');
CREATE TABLE region (           -- graphs that torch.compile made, recorded like operators called compiled::graph 0
    op_id integer primary key references op (id),
    backend text not null,      -- inductor
    n_operators integer not null,  -- in the graph; -1 where torch kept none
    site text not null          -- first line of the user's code in it; empty where it is not known
);
INSERT INTO "region" VALUES(2,'inductor',5,'a.py:2 in g');
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
INSERT INTO "skipped" VALUES(3,'npu:0','view',7);
CREATE TABLE source (           -- runs that were combined into this file; none in the file of one run
    id integer primary key,     -- from 0
    file text not null,         -- name of its own data file
    info text not null,         -- its RunInfo as JSON
    first_seq integer not null  -- id * block, added to the numbers of its calls: seq / block is a call's source
);
CREATE TABLE step (             -- training steps
    source_id integer not null default 0,  -- the key first: else SQLite 3.40's integrity_check sees NULLs
    step integer not null,
    started_s real not null,    -- seconds since the run's start
    wall_s real not null,
    primary key (source_id, step)
) without rowid;
INSERT INTO "step" VALUES(0,0,0.5,0.25);
INSERT INTO "step" VALUES(0,1,0.75,0.125);
CREATE TABLE tensor (           -- what can differ
    id integer primary key,
    name text not null,         -- output 0, or the mutated argument's name
    actual_id integer not null references form (id),
    expected_id integer not null references form (id),
    n_elements integer not null
);
INSERT INTO "tensor" VALUES(1,'output 0',1,1,12);
INSERT INTO "tensor" VALUES(2,'output 1',1,2,5);
INSERT INTO "tensor" VALUES(3,'self',1,1,12);
CREATE TABLE verdict (          -- an outcome with the figures that led to it
    id integer primary key,
    outcome_id integer not null references outcome (id),
    evidence text not null,
    confidence real not null
);
INSERT INTO "verdict" VALUES(1,1,'',1.0);
INSERT INTO "verdict" VALUES(2,2,'at most 3 ULP',1.0);
INSERT INTO "verdict" VALUES(3,3,'evidence',0.5);
COMMIT;
