"""What the columns of a data file may hold, and the check of a whole file before it is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.store import untrusted
from shadowrun.store.codec import decode_info
from shadowrun.store.schema import POSITIONS
from shadowrun.store.untrusted import COUNT, NUMBER, SHAPE, SIGNED, TEXT, one_of, optional
from shadowrun.types import Cause, Phase, Status

if TYPE_CHECKING:
    import sqlite3

__all__ = ["COLUMNS", "check_sources", "check_values"]

_NUMBERED = f"{COUNT} and {{0}} < {2**63 // POSITIONS}"
"""A number of a call: times `POSITIONS`, it has 63 bits."""
_TIME = f"{NUMBER} and {{0}} < 1e300"  # nan is greater
_FIGURE = "(typeof({0}) = 'integer' or typeof({0}) = 'real' and abs({0}) < 1e300)"

COLUMNS: untrusted.Columns = {
    "meta": {"key": one_of("info"), "value": TEXT},
    "source": {"id": COUNT, "file": TEXT, "info": TEXT, "first_seq": _NUMBERED},
    "op": {"name": TEXT},
    "site": {"text": TEXT},
    "form": {"dtype": TEXT, "shape": SHAPE, "stride": SHAPE, "device": TEXT, "layout": TEXT},
    "context": {
        **dict.fromkeys(("inputs", "dtypes", "shapes", "module", "device"), TEXT),
        "phase": one_of(*Phase),
    },
    "outcome": {
        "status": one_of(*Status),
        "cause": one_of("", *Cause),
        "explanation": TEXT,
        "missing_kernel": TEXT,
    },
    "verdict": {"evidence": TEXT, "confidence": NUMBER},
    "call": {
        "seq": _NUMBERED,
        "step": COUNT,
        "ref_ns": optional(COUNT),
        "target_ns": optional(COUNT),
        "drift_abs": optional(NUMBER),
        "drift_rel": optional(NUMBER),
    },
    "tensor": {"name": TEXT, "n_elements": COUNT},
    "packed_diff": {
        "id": COUNT,
        **dict.fromkeys(("n_different", "n_mismatched"), COUNT),
        **dict.fromkeys(("n_nan", "n_inf", "n_zero_sign", "n_subnormal"), COUNT),
        **dict.fromkeys(("remaining_bits", "n_from_zero"), SIGNED),
        "max_ulp": _FIGURE,
        "worst_index": optional(f"({COUNT} or {SHAPE})"),
        "detail": TEXT,
        **dict.fromkeys(("max_abs", "max_rel", "rmse", "worst_actual", "worst_expected"), NUMBER),
        **dict.fromkeys(("excess_actual", "excess_expected"), optional(NUMBER)),
    },
    "capture": {"file": TEXT, "bytes": COUNT},
    "region": {"backend": TEXT, "n_operators": SIGNED, "site": TEXT},
    "skipped": {"device": TEXT, "reason": TEXT, "n": COUNT},
    "folded": {
        **dict.fromkeys(("n", "first_step", "n_ref", "n_target", "n_mismatched", "n_nan", "n_inf"), COUNT),
        **dict.fromkeys(("first_seq", "worst_seq"), _NUMBERED),
        **dict.fromkeys(("ref_us_total", "ref_us_min", "target_us_total", "target_us_min", "severity"), _TIME),
        **dict.fromkeys(("max_abs", "max_rel", "drift_abs", "drift_rel"), NUMBER),
        "max_ulp": _FIGURE,
        "remaining_bits": SIGNED,
    },
    "step": {"source_id": COUNT, "step": COUNT, "started_s": _FIGURE, "wall_s": _FIGURE},
}


def check_values(connection: sqlite3.Connection) -> None:
    """Refuse a data file of the present schema that holds what shadowrun does not write.

    Raises:
        ValueError: What.
        sqlite3.Error: It cannot be read.
    """
    untrusted.check_values(connection, COLUMNS)
    infos = connection.execute("select value from meta").fetchall()
    if len(infos) != 1:
        raise ValueError("it has no run information")
    decode_info(infos[0][0])
    check_sources(connection)


def check_sources(connection: sqlite3.Connection) -> None:
    """Each run of a combined file has a block of numbers of its own, all blocks are of one length.

    Raises:
        ValueError: Not in this one.
    """
    sources = connection.execute("select id, first_seq, info from source order by id").fetchall()
    if not sources:
        return
    block = sources[1][1] if len(sources) > 1 else 2**63
    for number, (source, first, info) in enumerate(sources):
        decode_info(info)
        if source != number or first != number * block or block <= 0:
            raise ValueError("the numbers of its runs are not in order")
    end = len(sources) * block
    for table, column in (("call", "seq"), ("folded", "first_seq"), ("folded", "worst_seq")):
        (greatest,) = connection.execute(f"select max({column}) from {table}").fetchone()  # noqa: S608 - names from above
        if greatest is not None and greatest >= end:
            raise ValueError(f"a call of {table} is of no run")
