"""The tables of a campaign's store: their schema, what each column may hold, and their rows in Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shadowrun.store.file_kind import FileKind
from shadowrun.store.validation import COUNT, INTEGER, NUMBER, SIGNED, TEXT, one_of, optional
from shadowrun.studies.sweep.cases import Kind
from shadowrun.types import Cause, Phase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["KIND", "OPS", "STATUSES", "CampaignInfo", "Event", "FindingRow", "ResultRow", "VariantRow"]

APPLICATION_ID: Final = 0x53484447
"""``SHDG``, in ``PRAGMA application_id``."""
VERSION: Final = 1
STATUSES: Final = ("ok", "finding", "unsupported", "unverified", "failed")
"""Of a variant on a target; ``failed`` is a fault of shadowrun."""
OPS: Final = ("ok", "unsupported", "fallback", "error")
"""Of an operator in a variant on a target."""

# Numbers for all texts and two bytes a mutator: 100,000 variants are written while they run, and are read for each
# report.
SCHEMA: Final = """\
-- Schema of a store of a campaign of shadowrun (SQLite).
--
-- History
--   1  first version

create table meta (             -- one row: info (a CampaignInfo as JSON)
    key text primary key,
    value text not null
);

create table name (             -- programs, mutators, reasons, operators
    id integer primary key,
    text text not null unique
);

create table variant (
    number integer primary key,     -- of its recipe
    program_id integer references name (id),  -- NULL: its making ended the process
    identity integer,               -- first 64 bits of the hash of what it computes; NULL: it could not be made
    duplicate_of integer not null,  -- lower number with the same identity; -1: none is known
    invalid_id integer references name (id),  -- why the reference cannot run it; NULL: it can
    mutators blob not null,         -- ids of names, two bytes each, little-endian
    recipe text                     -- JSON; NULL for a variant that passes
);

create table result (
    number integer not null references variant (number),
    target integer not null,        -- number of the platform in the info
    status text not null,           -- ok, finding, unsupported, unverified, failed
    reason_id integer references name (id),
    oracles integer not null,       -- bits of the rules by which the results differ; -1: not compared
    n_calls integer not null,
    cpu_us integer not null,
    ops blob not null,              -- ids in op, two bytes each, little-endian
    primary key (number, target)
) without rowid;

create table op (                   -- an operator, with what became of it
    id integer primary key,
    name_id integer not null references name (id),
    status text not null,           -- ok, unsupported, fallback, error
    unique (name_id, status)
);

create table outcome (              -- what findings share
    id integer primary key,
    op text not null,
    dtype text not null,
    kind text not null,
    cause text not null,
    explanation text not null,
    phase text not null,
    unique (op, dtype, kind, cause, explanation, phase)
);

create table finding (
    number integer not null references variant (number),
    target integer not null,        -- -1: the reference, against itself
    position integer not null,
    outcome_id integer not null references outcome (id),
    message text not null,
    primary key (number, target, position)
) without rowid;

create table event (                -- processes that ended in a variant
    number integer not null,
    target integer not null,        -- -1: while it was made
    attempt integer not null,       -- 1, or 2 in a fresh process
    ending text not null,           -- crash, time-out, out of memory, device lost
    explanation text not null,
    op text not null,               -- operator in hand; empty if not known
    primary key (number, target, attempt)
) without rowid;

create table session (              -- starts of the command
    id integer primary key,
    started text not null,          -- ISO 8601, UTC
    jobs integer not null,
    n_variants integer not null,
    wall_s real not null,
    cpu_s real not null
);
"""

_NAME: Final = optional(INTEGER)
COLUMNS: Final = {
    "meta": {"key": one_of("info"), "value": TEXT},
    "name": {"id": COUNT, "text": TEXT},
    "variant": {
        "number": COUNT,
        "identity": optional(INTEGER),
        "duplicate_of": f"{SIGNED} and {{0}} < number",
        "mutators": "typeof({0}) = 'blob' and length({0}) % 2 = 0",
        "recipe": optional(TEXT),
    },
    "result": {
        "target": COUNT,
        "status": one_of(*STATUSES),
        "oracles": SIGNED,
        "n_calls": COUNT,
        "cpu_us": COUNT,
        "ops": "typeof({0}) = 'blob' and length({0}) % 2 = 0",
    },
    "op": {"status": one_of(*OPS)},
    "outcome": {
        **dict.fromkeys(("op", "dtype", "explanation"), TEXT),
        "kind": one_of(*Kind),
        "cause": one_of("", *Cause),
        "phase": one_of(*Phase),
    },
    "finding": {"target": SIGNED, "position": COUNT, "message": TEXT},
    "event": {
        "number": COUNT,
        "target": SIGNED,
        "attempt": COUNT,
        **dict.fromkeys(("ending", "explanation", "op"), TEXT),
    },
    "session": {
        "started": TEXT,
        "jobs": COUNT,
        "n_variants": COUNT,
        **dict.fromkeys(("wall_s", "cpu_s"), f"{NUMBER} and {{0}} < 1e300"),
    },
}
"""Valid values of each column."""

KIND: Final = FileKind(
    noun="store of a campaign",
    slug="campaign-store",
    maker="`shadowrun campaign run DIR` writes one",
    again="Remove it: `shadowrun campaign resume DIR` runs what is missing then.",
    application_id=APPLICATION_ID,
    version=VERSION,
    schema=SCHEMA,
    columns=COLUMNS,
)


@dataclass(frozen=True, slots=True)
class CampaignInfo:
    """What makes two stores parts of one campaign, and where they were made.

    Attributes:
        campaign: Hash of what decides recipes and results: programs, seed, mutators, platforms, torch.
        targets: Platform specs; a simulated target is followed by its flaws, ``sim (matmul-in-bf16)``.
        ref: Spec of the reference.
        oracles: Names of the bits in ``result.oracles``.
        fingerprints: Of the platforms, by spec.
        versions: As in a data file.
    """

    campaign: str
    targets: tuple[str, ...]
    ref: str
    oracles: tuple[str, ...] = ()
    fingerprints: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


class VariantRow(NamedTuple):
    """A variant: see the table ``variant``."""

    number: int
    program: str | None
    identity: int | None
    duplicate_of: int = -1
    invalid: str | None = None
    mutators: tuple[str, ...] = ()
    recipe: str | None = None


class FindingRow(NamedTuple):
    """A finding: see the tables ``finding`` and ``outcome``; its role is ``reference`` where the target is -1."""

    op: str
    dtype: str
    kind: str
    cause: str
    explanation: str
    message: str
    phase: str
    role: str = "target"


class ResultRow(NamedTuple):
    """A variant on a target: see the table ``result``."""

    number: int
    target: int
    status: str
    reason: str = ""
    oracles: int = -1
    n_calls: int = 0
    cpu_us: int = 0
    ops: Mapping[str, str] = {}
    findings: Sequence[FindingRow] = ()


class Event(NamedTuple):
    """A process that ended in a variant: see the table ``event``."""

    number: int
    target: int
    attempt: int
    ending: str
    explanation: str
    op: str
