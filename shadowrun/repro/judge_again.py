"""How a recorded call came to its verdict: what its record says and, where its inputs were kept, the judge's steps."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.errors import ShadowrunError
from shadowrun.intercept.torchapi import as_in_handler
from shadowrun.judge.ladder import Trace, recorded_steps
from shadowrun.repro.builder import captured_plan, load_captured
from shadowrun.repro.call_replayer import CallReplayer
from shadowrun.repro.memory import bounded_memory
from shadowrun.repro.platform_setup import allowed_platforms, check_harmless

if TYPE_CHECKING:
    from shadowrun.judge.ladder import Step
    from shadowrun.store.datafile import DataFile
    from shadowrun.types import Allowed, OpRecord, Verdict

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a call came to its verdict.

    Attributes:
        record: The call as it was recorded.
        recorded: What the record says of the steps.
        verdict: The verdict of the call run again; None where it was not.
        steps: Its steps.
        note: Why it was not run again, or what the second verdict means.
    """

    record: OpRecord
    recorded: tuple[Step, ...]
    verdict: Verdict | None = None
    steps: tuple[Step, ...] = ()
    note: str = ""


def explain(data: DataFile, record: OpRecord, *, kept: bool, allowed: Allowed) -> Explanation:
    """Explain the verdict of a call.

    Args:
        data: The run's data file.
        record: The call.
        kept: Whether its inputs were kept: then it is run and judged again.
        allowed: What the data file may have started.
    """
    recorded = tuple(recorded_steps(record.verdict, record.diffs))
    if not kept:
        return Explanation(record, recorded, note="its inputs were not kept: it cannot be judged again")
    trace = Trace()
    try:
        verdict = _judged_again(data, record, allowed, trace)
    except ShadowrunError as error:
        return Explanation(record, recorded, note=f"not judged again: {error}")
    if verdict is None:
        return Explanation(record, recorded, note="not judged again: the reference cannot run it here")
    same = (verdict.status, verdict.cause) == (record.verdict.status, record.verdict.cause)
    note = "" if same else "another verdict than in the run: it depends on earlier calls, on this machine, or on chance"
    return Explanation(record, recorded, verdict, tuple(trace), note)


def _judged_again(data: DataFile, record: OpRecord, allowed: Allowed, trace: Trace) -> Verdict | None:
    info = allowed_platforms(data.info, allowed)
    check_harmless(info, allowed)
    call = load_captured(data, record)
    plan = captured_plan(call, checked=not allowed.modules)
    # A call from an untrusted file must not take all memory.
    bound = contextlib.nullcontext() if allowed.modules else bounded_memory()
    # A comparison may be running: this is none of its calls.
    with bound, as_in_handler(), CallReplayer(info, trace=trace) as replayer:
        judged = replayer.judge(plan, call.args, call.kwargs)
    return None if judged is None else judged.verdict
