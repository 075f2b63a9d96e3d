"""The data of a report on two recordings: what JSON and CSV have of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shadowrun.recording.model import NONE, Kind
from shadowrun.report.document import (
    Records,
)
from shadowrun.studies.diff.compare import ARISING, Outcome, is_undeclared
from shadowrun.studies.diff.rounding import Rounding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shadowrun.recording.model import Recording
    from shadowrun.studies.diff.recordings import RecordingDiff
    from shadowrun.studies.diff.step_outputs import OutputDistance

__all__ = ["DiffData", "effects", "kernel"]

FORMAT: Final = 1
"""Version of the JSON's form."""


class DiffData:
    """What JSON and CSV have of a difference of two recordings.

    Args:
        found: What was found.
        limit: Entries of each list.
        replays: Commands that judge the first divergence in full.
    """

    def __init__(self, found: RecordingDiff, limit: int, replays: Sequence[str]) -> None:
        self._found = found
        self._replays = tuple(replays)
        self._limit = limit
        self._difference = found.difference
        self._a, self._b = found.difference.first.recording, found.difference.second.recording

    def data(self, title: str) -> dict[str, Any]:
        """The whole of it, for JSON."""
        found, alignment = self._found, self._difference.alignment
        first = found.flow.origins[0].pair if found.flow.origins else None
        return {
            "format": FORMAT,
            "of": title,
            "recordings": list(map(_recording_data, found.labels, (self._a, self._b))),
            "warnings": list(found.warnings),
            "provenance": {
                "same": found.provenance.is_same,
                "different": {k: list(v) for k, v in found.provenance.different.items()},
                "only_first": list(found.provenance.only_first),
                "only_second": list(found.provenance.only_second),
                "facts": {f.name: [f.first, f.second] for f in found.provenance.facts},
                "versions": {f.name: [f.first, f.second] for f in found.provenance.versions},
            },
            "n_matched": len(alignment.pairs),
            "matched_by": dict(alignment.by),
            "n_by_outcome": {str(outcome): self._difference.count(outcome) for outcome in Outcome},
            "n_by_rounding": {str(r): found.count_rounding(r) for r in Rounding},
            "n_only_first": len(alignment.only_first),
            "n_only_second": len(alignment.only_second),
            "first_divergence": None if first is None else self._pair_data(first),
            "replay": list(self._replays),
            "arising": [self._pair_data(o.pair) for o in found.flow.origins[: self._limit]],
            "outputs": [self._output_data(output) for output in found.outputs[: self._limit]],
            "reached": [self._pair_data(p) for p in self._reached()],
            "only_first": [_call_data(self._a, c) for c in alignment.only_first[: self._limit].tolist()],
            "only_second": [_call_data(self._b, c) for c in alignment.only_second[: self._limit].tolist()],
            "counterparts": self.counterparts()[: self._limit],
            "rows": [
                {
                    "module": f.rule.module, "op": f.rule.op, "n_first": f.n_first, "n_second": f.n_second,
                    "n_compared": len(f.pairs), "n_other_form": f.n_other_form, "modules_of_one_only": list(f.alone),
                    "different": [
                        {
                            "module": p.module, "row": p.number, "first": list(p.first), "second": list(p.second),
                            "remaining": p.remaining,
                        }
                        for p in f.pairs if not p.equal
                    ][: self._limit],
                }
                for f in found.rows
            ],
        }  # fmt: skip

    def _output_data(self, output: OutputDistance) -> dict[str, Any]:
        x, y = (int(c) for c in self._difference.alignment.pairs[output.pair])
        return {
            "first": _call_data(self._a, x), "second": _call_data(self._b, y), "position": output.position,
            "n_elements": output.n_elements, "n_differ": output.n_differ, "ulp": _finite(output.ulp),
            "relative": _finite(output.relative), "absolute": _finite(output.absolute),
        }  # fmt: skip

    def _reached(self) -> list[int]:
        reached: list[int] = self._difference.where(Outcome.INPUT, Outcome.UNKNOWN)[: self._limit].tolist()
        return reached

    def _pair_data(self, pair: int) -> dict[str, Any]:
        x, y = (int(c) for c in self._difference.alignment.pairs[pair])
        judged, flow = self._found.judgements.get(pair), self._found.flow
        origin = int(flow.origin[pair])
        return {
            "outcome": str(self._difference.outcome(pair)),
            "first": _call_data(self._a, x),
            "second": _call_data(self._b, y),
            "remaining": _or_none(int(self._difference.remaining[pair])),
            "min_ulp": _finite(judged.min_ulp) if judged else None,
            "max_ulp": _finite(judged.max_ulp) if judged else None,
            "min_relative": _finite(judged.relative) if judged else None,
            "is_exact": judged.is_exact if judged else False,
            "rounding": str(judged.rounding) if judged else None,
            "why": judged.why if judged else None,
            "undeclared": [list(effects(r, c)) for r, c in self.calls(pair)],
            "classes": {c: [m, n] for c, m, n in judged.classes} if judged else {},
            "parents": flow.parents_of(pair)[: self._limit],
            "origin": None if origin == NONE else int(self._difference.alignment.pairs[origin, 0]),
            "depth": int(flow.depth[pair]),
        }

    def records(self) -> Records:
        """A row for each call that differs or that one recording lacks, for CSV."""
        head = ("outcome", "call_first", "call_second", "step", "phase", "module", "operator", "line", "remaining",
                "min_ulp", "max_ulp", "rounding", "origin")  # fmt: skip
        rows: list[tuple[object, ...]] = []
        # Not the equal ones, which are nearly all of a million calls: CSV lists what a reader has to look at.
        for pair in self._difference.where(*ARISING, Outcome.INPUT, Outcome.UNKNOWN)[: self._limit].tolist():
            data = self._pair_data(pair)
            call = data["first"]
            rows.append((
                data["outcome"], call["call"], data["second"]["call"],
                *(call[name] for name in ("step", "phase", "module", "op", "site")),
                *(data[name] for name in ("remaining", "min_ulp", "max_ulp", "rounding", "origin")),
            ))  # fmt: skip
        for side, recording, call in self.missing_calls():
            data = _call_data(recording, call)
            numbers = (call, None) if side == 0 else (None, call)
            place = (data[name] for name in ("step", "phase", "module", "op", "site"))
            rows.append((f"only {('first', 'second')[side]}", *numbers, *place, *[None] * 5))
        return Records(head, tuple(rows))

    def counterparts(self) -> list[dict[str, Any]]:
        """Calls that correspond under two names of operators: of each two names, how many, and how many are equal."""
        pairs = self._difference.alignment.pairs
        ops = [np.array([c.op for c in r.contexts], object) for r in (self._a, self._b)]
        names = [of[r.calls["context"][pairs[:, side]]] if len(of) else of[:0]
                 for side, (of, r) in enumerate(zip(ops, (self._a, self._b), strict=True))]  # fmt: skip
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for pair in np.flatnonzero(names[0] != names[1]).tolist():
            first, second = (str(of[pair]) for of in names)
            # Counted by two names: attention of one device meets that of another in each layer, and one row says so.
            new = {"first": first, "second": second, "n_calls": 0, "n_equal": 0, "call": int(pairs[pair, 0])}
            row = found.setdefault((first, second), new)
            row["n_calls"] += 1
            row["n_equal"] += self._difference.outcome(pair) is Outcome.EQUAL
        return list(found.values())

    def missing_calls(self) -> Iterator[tuple[int, Recording, int]]:
        """Calls that one recording lacks: 0 or 1 for the one that has it, that recording, the call."""
        alignment = self._difference.alignment
        for side, recording, calls in ((0, self._a, alignment.only_first), (1, self._b, alignment.only_second)):
            yield from ((side, recording, call) for call in calls[: self._limit].tolist())

    def calls(self, pair: int) -> tuple[tuple[Recording, int], tuple[Recording, int]]:
        """The calls of a pair, each with its recording."""
        x, y = (int(c) for c in self._difference.alignment.pairs[pair])
        return (self._a, x), (self._b, y)


def _recording_data(label: str, recording: Recording) -> dict[str, Any]:
    return {
        "name": label,
        "n_calls": len(recording.calls),
        "n_processes": len(recording.processes),
        "complete": all(p.complete for p in recording.processes),
        "argv": [list(p.argv) for p in recording.processes[:1]],
        "skipped": dict(recording.processes[0].skipped) if recording.processes else {},
    }


def _call_data(recording: Recording, call: int) -> dict[str, Any]:
    context = recording.context_of(call)
    return {
        "call": call,
        "step": int(recording.calls["step"][call]),
        "rank": recording.process_of(call).rank,
        "phase": str(context.phase),
        "module": context.module,
        "op": context.op,
        "site": context.site,
        "device": context.device,
        "kernel": kernel(recording, call),
    }


def kernel(recording: Recording, call: int) -> str:
    """Name of the kernel of a call; empty where it was not recorded."""
    number = int(recording.calls["kernel"][call])
    return recording.kernels[number] if number != NONE else ""


def effects(recording: Recording, call: int) -> Iterator[str]:
    """What a call does to memory and its schema does not declare."""
    rows = recording.results_of(call)
    for row in recording.results[rows.start : rows.stop][is_undeclared(recording.results[rows.start : rows.stop])]:
        if row["kind"] == Kind.OVERWRITTEN:
            yield f"undeclared write in tensor argument {row['position']}, or next to it"
        else:
            yield f"result {row['position']} lies in the memory of an earlier tensor, undeclared"


def _or_none(value: int) -> int | None:
    return None if value == NONE else value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
