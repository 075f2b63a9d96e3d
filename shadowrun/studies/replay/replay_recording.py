"""Runs the calls of a recording on a platform of this machine, and holds their results against the recorded digests.

The recording may come from anyone: operators are those that `intercept.untrusted.op_allowlist` allows, sizes are
checked before memory is taken, and what cannot be run is counted, never passed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from shadowrun.config import Config
from shadowrun.errors import DataFileError
from shadowrun.intercept.plan import Action
from shadowrun.intercept.torchapi import as_in_handler
from shadowrun.intercept.untrusted.checked_calls import check_call, graphs_of_file
from shadowrun.intercept.untrusted.op_allowlist import Refused
from shadowrun.limits import bounded_memory, current_call
from shadowrun.operators.cpu_only_ops import EQUIVALENTS
from shadowrun.operators.facts import facts
from shadowrun.operators.vendor_ops import COUNTERPARTS, for_reference
from shadowrun.recording.digests.tensor_digest import digest
from shadowrun.recording.file_format.captured_reader import TooLarge
from shadowrun.recording.file_format.recording_file import in_memory
from shadowrun.recording.file_format.recording_writer import Block
from shadowrun.recording.model import CALL, NONE, RESULT, Form, Kind, Process
from shadowrun.recording.step_outputs import content_of
from shadowrun.replay.call import argument
from shadowrun.repro.call_replayer import CallReplayer, operator
from shadowrun.settings import fits_operator
from shadowrun.studies.diff.align import Alignment
from shadowrun.studies.diff.compare import Outcome as DiffOutcome
from shadowrun.studies.diff.compare import compare
from shadowrun.studies.diff.rounding import judge_rounding
from shadowrun.studies.diff.values import Values
from shadowrun.studies.replay.outcomes import Outcome, Replay, ReplayedCall, outcome_of
from shadowrun.torch_private import schema_of
from shadowrun.types import RunInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    import numpy.typing as npt

    from shadowrun.intercept.plan import OpPlan
    from shadowrun.recording.digests.tensor_digest import Digest
    from shadowrun.recording.file_format.captured_reader import CapturedCall, CapturedFile
    from shadowrun.recording.model import Context, Recording
    from shadowrun.replay.call import CallRun
    from shadowrun.studies.diff.compare import Difference
    from shadowrun.types import Verdict

__all__ = ["CallFilter", "ResultRows", "replay"]

MAX_JUDGED: Final = 100_000
_ABSENT: Final = "this process has no such operator: --import the library that brings it"


@dataclass(frozen=True, slots=True)
class CallFilter:
    """Which calls to replay.

    Attributes:
        calls: Numbers; empty for all.
        ops: Patterns of operators; empty for all.
    """

    calls: Collection[int] = ()
    ops: Sequence[str] = ()

    def has(self, call: int, op: str) -> bool:
        """Whether a call is wanted."""
        by_op = not self.ops or any(fits_operator(pattern, op) for pattern in self.ops)
        return by_op and (not self.calls or call in self.calls)


class _Sorted(NamedTuple):
    """The calls of a recording, by what can be done with them."""

    captured: list[int]
    missing: Counter[str]
    n_random: int
    n_without_values: int
    n_unselected: int


def replay(
    recording: Recording,
    captured: CapturedFile,
    target: str,
    ref: str,
    wanted: CallFilter | None = None,
    *,
    trusted: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Replay:
    """Run the captured calls of a recording.

    Args:
        recording: The recording.
        captured: Its captured inputs.
        target: Platform to run them on; from the command line, never from a file.
        ref: Platform whose results judge them too; the same as `target` for none.
        wanted: Which calls.
        trusted: This process made the recording: operators need not be among those that a file may name.
        progress: Called with the calls done, all calls, and the operator of the next.

    Raises:
        PlatformError: A platform is not here.
        UsageError: Memory ran out.
    """
    wanted = wanted or CallFilter()
    values = Values(recording)
    found = _sorted(recording, values, captured, wanted)
    done: list[ReplayedCall] = []
    info = RunInfo(target, ref)
    # `bounded_memory` outermost: loading the inputs allocates too. `as_in_handler`: the recorded calls were seen below
    # autograd and autocast, and would be changed by them a second time.
    looks = contextlib.nullcontext() if trusted else graphs_of_file()
    with bounded_memory(), as_in_handler(), looks, CallReplayer(info) as replayer:
        runner = _Runner(recording, captured, replayer, checked=not trusted)
        try:
            for n, call in enumerate(found.captured):
                if progress is not None:
                    progress(n, len(found.captured), recording.context_of(call).op)
                done.append(runner.run(call))
        except KeyboardInterrupt:  # what was found until then is reported
            pass
        current_call.begin(-1, "")
        names = str(replayer.target.platform), str(replayer.ref.platform)
    _judge_by_digests(values, runner, done)
    return Replay(
        recording.name,
        names[0],
        names[1] if names[0] != names[1] else "",
        _machine(recording),
        done,
        found.missing,
        found.n_random,
        found.n_without_values,
        found.n_unselected,
        n_left=len(found.captured) - len(done),
        warnings=tuple(_warnings(recording, found)),
        not_captured=sum((Counter(p.not_captured) for p in recording.processes), Counter()),
    )


def _sorted(recording: Recording, values: Values, captured: CapturedFile, wanted: CallFilter) -> _Sorted:
    has_values = _with_values(recording, values)
    kept = captured.calls()
    calls: list[int] = []
    missing: Counter[str] = Counter()
    n_random = n_unselected = 0
    ops = [context.op for context in recording.contexts]
    random = [bool(facts(op).distribution) for op in ops]
    for call, context in enumerate(recording.calls["context"].tolist()):
        # Views and calls without tensors have nothing to be held against.
        if not has_values[call]:
            continue
        if not wanted.has(call, ops[context]):
            n_unselected += 1
        elif call in kept:
            calls.append(call)
        # Another device draws other numbers; without the inputs, not even their plausibility can be judged.
        elif random[context]:
            n_random += 1
        else:
            missing[ops[context]] += 1
    return _Sorted(calls, missing, n_random, int((~has_values).sum()), n_unselected)


def _with_values(recording: Recording, values: Values) -> npt.NDArray[np.bool_]:
    """Whether a call has a result of its own with a digest: (n_calls,)."""
    results = recording.results
    own = np.isin(results["kind"], [Kind.RESULT, Kind.WRITTEN]) & (results["n_rungs"] > 0)
    return np.bincount(values.call[own], minlength=len(recording.calls)) > 0


class _Runner:
    """Runs calls, and collects their results.

    Args:
        recording: The recording.
        captured: Its captured inputs.
        replayer: The platforms.
        checked: Only operators that a file may name.

    Attributes:
        rows: Results of the calls that gave any.
        ran: Their numbers in `done` of the caller, in the order of `rows`.
    """

    def __init__(self, recording: Recording, captured: CapturedFile, replayer: CallReplayer, *, checked: bool) -> None:
        self._recording = recording
        self._captured = captured
        self._replayer = replayer
        self._checked = checked
        self._max_bytes = Config.from_options(settings=False, known=False).max_bytes
        self._plans: dict[str, OpPlan | str] = {}
        self._device = replayer.target.device.type
        self._n = 0
        self.rows = ResultRows(recording, self._device)
        self.ran: list[int] = []

    def run(self, call: int) -> ReplayedCall:
        """Run a call."""
        context = self._recording.context_of(call)
        done = ReplayedCall(call, int(self._recording.calls["step"][call]), context, Outcome.NOT_RUN)
        done.is_output = any(row in self._recording.outputs for row in self._recording.results_of(call))
        self._n += 1
        if call in current_call.ended:
            done.outcome, done.why = Outcome.RAISED, current_call.ended[call]
            return done
        current_call.begin(call, context.op)
        plan = self._plan(context.op)
        if isinstance(plan, str):
            done.why = plan
            return done
        try:
            given = self._captured.load(call, self._max_bytes)
            if given is None:  # results of a step's last call are there, and no inputs
                done.why = "its inputs were not kept"
                return done
            own = COUNTERPARTS.get(plan.name)
            check_call(plan.func, given.args, given.kwargs, checked=self._checked, stand_in=own)
        except (DataFileError, Refused, TooLarge) as why:
            done.why = f"too large: {why}" if isinstance(why, TooLarge) else str(why)
            return done
        self._run(done, _placed(plan, given, context), given)
        return done

    def _run(self, done: ReplayedCall, plan: OpPlan, given: CapturedCall) -> None:
        on_cpu = self._device == "cpu"
        # A recording of another device may hold operators that the CPU lacks, such as cuDNN's: there is a stand-in
        # for each.
        ran, judged = self._replayer.run(for_reference(plan) if on_cpu else plan, given.args, given.kwargs)
        done.verdict = judged.verdict if judged is not None else None
        if ran is None:
            done.outcome, done.verdict, done.why = _raised(done.verdict)
            return
        stands_in = plan.name in COUNTERPARTS if on_cpu else plan.name in EQUIVALENTS
        self.rows.add(done.call, plan, ran, stand_in=stands_in)
        self.ran.append(self._n - 1)

    def _plan(self, op: str) -> OpPlan | str:
        """The plan of an operator, or why it is not run."""
        # A recording names an operator thousands of times, and its check reads the schema.
        known = self._plans.get(op)
        if known is None:
            try:
                known = operator(op, checked=self._checked, index=len(self._plans))
                # The reason takes the place of the plan: asked again, the answer is the same.
                if known.action in (Action.PASS, Action.EMPTY, Action.VIEW):
                    known = known.reason or "it computes no values"
            except Refused as why:
                known = str(why)
            except (AttributeError, RuntimeError):
                known = _ABSENT
            self._plans[op] = known
        return known


def _placed(plan: OpPlan, given: CapturedCall, context: Context) -> OpPlan:
    """The plan with the names of the tensors that lay on the CPU though the call ran on another device."""
    if context.device == "cpu" or not given.on_cpu:
        return plan
    names = [a.name for a in schema_of(plan.func).arguments]
    named = dict(zip(names, given.args, strict=False)) | given.kwargs
    there = [name for name, value in named.items() if any(value is t for t in given.on_cpu)]
    # What is written to decides where the call runs, wherever it lay.
    written = {a.name for a in plan.mutated}
    return dataclasses.replace(
        plan, on_cpu=tuple(dict.fromkeys((*plan.on_cpu, *(n for n in there if n not in written))))
    )


def _raised(verdict: Verdict | None) -> tuple[Outcome, Verdict | None, str]:
    if verdict is None:
        return Outcome.NOT_RUN, None, "it did not run"
    why = ": ".join(text for text in (verdict.explanation, verdict.evidence) if text)
    # A limit of this process or machine is no fault of the platform.
    return (Outcome.NOT_RUN, None, why) if verdict.status == "unverified" else (Outcome.RAISED, verdict, why)


def _judge_by_digests(values: Values, runner: _Runner, done: list[ReplayedCall]) -> None:
    """Fill in the outcomes of the calls that ran."""
    if not runner.ran:
        return
    here = Values(runner.rows.recording())
    calls = np.array([done[n].call for n in runner.ran], np.int64)
    pairs = np.stack([calls, np.arange(len(calls))], axis=1)
    none = np.empty(0, np.int64)
    # By the code that compares two machines, so that `replay` and `diff` never disagree on a call. The inputs are
    # equal by construction: they were loaded from the file.
    difference = compare(values, here, Alignment(pairs, none, none, {}), same_inputs=True)
    judgements = judge_rounding(difference, MAX_JUDGED)
    for pair, n in enumerate(runner.ran):
        _fill(done[n], difference, pair)
        done[n].judgement = judgement = judgements.get(pair)
        if done[n].outcome is Outcome.UNDECIDED and judgement is not None:
            done[n].outcome, done[n].why = outcome_of(judgement.rounding), judgement.why


def _fill(done: ReplayedCall, difference: Difference, pair: int) -> None:
    outcome = difference.outcome(pair)
    done.remaining = int(difference.remaining[pair])
    if outcome is DiffOutcome.EQUAL:
        done.outcome = Outcome.EQUAL
    elif outcome is DiffOutcome.FORM:
        done.outcome, done.why, done.remaining = Outcome.FORM, "dtypes, shapes or strides differ", NONE
    elif outcome is DiffOutcome.UNKNOWN:
        done.outcome, done.why = Outcome.NO_DIGEST, "a result has no digest"
    else:
        done.outcome = Outcome.UNDECIDED


def _machine(recording: Recording) -> str:
    """``sim, torch 2.13.0`` of the machine that the recording was made on."""
    facts_of = recording.processes[0].fingerprint if recording.processes else {}
    platform = facts_of.get("platform") or facts_of.get("device") or "an unknown platform"
    torch_version = facts_of.get("torch")
    return f"{platform}, torch {torch_version}" if torch_version else str(platform)


def _warnings(recording: Recording, found: _Sorted) -> list[str]:
    if not len(recording.calls):
        return ["no calls are recorded"]
    if not found.captured and found.missing:
        how = "record with --capture 100MB, or run the program here with --free"
        return [f"no inputs of these calls are in the recording: {how}"]
    return []


_WIDE: Final = {float: torch.float64, complex: torch.complex128}
_STATISTICS: Final = (
    *("n_nan", "n_pos_inf", "n_neg_inf", "n_zero", "n_neg_zero", "n_subnormal"),
    *("min", "max", "norm"),
)
_MAX_POSITION: Final = 255


class ResultRows:
    """Collects digests of the results of calls, in the form of the recording that the calls come from.

    Args:
        recording: The recording.
        device: Type of the device that runs the calls.
    """

    def __init__(self, recording: Recording, device: str) -> None:
        self._recording = recording
        self._contexts: list[Context] = [c._replace(device=device if c.device else "") for c in recording.contexts]
        self._forms: dict[Form, int] = {}
        self._calls: list[tuple[int, int, int, int]] = []
        self._results: list[tuple[int, int, int, Digest | None]] = []
        self._outputs: dict[int, bytes] = {}
        self._kept: set[tuple[int, int]] = set()

    def add(self, call: int, plan: OpPlan, ran: CallRun, *, stand_in: bool) -> None:
        """Add a call.

        Args:
            call: Its number in the recording.
            plan: The operator.
            ran: Its run here.
            stand_in: Another operator ran for it, whose first result alone is comparable.
        """
        row = self._recording.calls[call]
        context, n_before = int(row["context"]), len(self._results)
        self._kept = self._kept_results(call)
        for position, value in enumerate(_returned(plan, ran)):
            if value is not _WRITTEN:
                self._add(Kind.RESULT, position, value)
        for position, value in enumerate(v for a in plan.mutated for v in _flat(argument(a, ran.args, ran.kwargs))):
            if isinstance(value, torch.Tensor):
                self._add(Kind.WRITTEN, position, value)
        if stand_in:  # a name of its own: the comparison then takes the first result only
            context = len(self._contexts)
            self._contexts.append(self._contexts[int(row["context"])]._replace(op=f"{plan.name} (stand-in)"))
        self._calls.append((int(row["step"]), context, int(row["occurrence"]), len(self._results) - n_before))

    def _kept_results(self, call: int) -> set[tuple[int, int]]:
        """Kind and position of the results of which the recording has all elements."""
        recording = self._recording
        rows = [row for row in recording.results_of(call) if row in recording.outputs] if recording.outputs else []
        return {(int(recording.results["kind"][row]), int(recording.results["position"][row])) for row in rows}

    def _add(self, kind: Kind, position: int, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            # On the CPU: the program may have set another default device.
            value = torch.tensor(value, dtype=_WIDE.get(type(value)), device="cpu")
        # Nested tensors say that they are strided, and raise when asked for their strides.
        is_strided = value.layout is torch.strided and not value.is_nested
        dtype = str(value.dtype).removeprefix("torch.")
        form = Form(dtype, tuple(value.shape), tuple(value.stride()) if is_strided else (), str(value.layout)[6:])
        number = self._forms.setdefault(form, len(self._forms))
        # As the recorder counts them: the column has one byte.
        found, position = digest(value), min(position, _MAX_POSITION)
        if found is not None and (int(kind), position) in self._kept:
            self._outputs[len(self._results)] = content_of(value)
        self._results.append((number, int(kind), position, found))

    def recording(self) -> Recording:
        """The calls so far as a recording: call k is the k-th that was added."""
        calls = np.zeros(len(self._calls), CALL)
        for row, values in zip(calls, self._calls, strict=True):
            row["step"], row["context"], row["occurrence"], row["n_results"] = values
        calls["kernel"] = NONE
        results = np.zeros(len(self._results), RESULT)
        results["base"] = NONE
        rungs, samples = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
        for row, (form, kind, position, found) in zip(results, self._results, strict=True):
            row["form"], row["kind"], row["position"] = form, kind, position
            if found is not None:
                row["n_rungs"], row["n_samples"] = len(found.rungs), len(found.samples)
                for name in _STATISTICS:
                    row[name] = getattr(found, name)
                rungs.append(found.rungs)
                samples.append(found.samples)
        none = np.empty(0, np.uint64)
        block = Block(calls, results, np.empty(0, np.int64), np.concatenate(rungs), np.concatenate(samples), none)
        made = in_memory("replay", Process("replay", complete=True), block, self._contexts, list(self._forms))
        return dataclasses.replace(made, outputs=self._outputs)


class _Written:
    """Stands for a return that is an argument which the call wrote to."""


_WRITTEN: Final = _Written()


def _returned(plan: OpPlan, ran: CallRun) -> Iterator[Any]:
    """What a call returned, lists taken apart, as the recorder numbers it."""
    returns = schema_of(plan.func).returns
    written = {i for i, r in enumerate(returns) if r.alias_info is not None and r.alias_info.is_write}
    out = (ran.out,) if plan.n_returns == 1 else ran.out if isinstance(ran.out, (list, tuple)) else ()
    for number, value in enumerate(out):
        for v in _flat(value):
            yield _WRITTEN if plan.mutated and number in written else v


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for v in value:
            yield from _flat(v)
    elif value is not None:
        yield value
