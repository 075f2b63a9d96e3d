"""Turns what happened to a call into rows of the data file: contexts interned, counters kept."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shadowrun.native import tensors as native
from shadowrun.numerics.form import dtype_name, meta
from shadowrun.replay.context import NO_DRIFT, NO_TIMES
from shadowrun.store.datafile import FLUSH_ROWS, FLUSH_S, DataFile
from shadowrun.types import Cause, OpCall, OpRecord, Phase, Status, TensorDiff, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shadowrun.intercept.attribution import Attribution, Origin
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.recording.input_capture import Capturing
    from shadowrun.replay.call import Call
    from shadowrun.replay.context import InputsFile

__all__ = ["Recorder", "Watch", "WatchingRecorder", "context_key", "printed_inputs"]

_MATCH = Verdict(Status.MATCH)
_SEEN = Verdict(Status.SKIPPED, None, "recorded only")
_UNKNOWN = -1.0
# A program with changing shapes makes new contexts for ever.
_MAX_CONTEXTS = 100_000
# Fused optimizers pass hundreds of tensors: all of them would make the key longer than the call.
_MAX_LIST = 4
_MAX_SHAPES = 512
# A matching call takes a few microseconds: the clock is not read in each.
_LOOK_AT_CLOCK = 63
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_EXACT = frozenset({bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format})


class Recorder:
    """Writes records. Safe to use from several threads: numbers come from one counter, rows are appended.

    Attributes:
        attribution: Finds where a call comes from.
        every_second: Called about once a second, while calls are recorded.
        name_api: Called with the phase of a context's first call; returns what the program called. None: not asked.
    """

    def __init__(self, data: DataFile, attribution: Attribution, capturing: Capturing | None = None) -> None:
        self.data = data
        self._capturing = capturing
        self._rows = data.rows
        self._rows.start(data.next_seq, data.next_step)
        self.attribution = attribution
        self._contexts: dict[tuple[Any, ...], int] = {}
        # Numbered once: nearly all calls match.
        self._match = data.verdict_id(_MATCH)
        self._seen = data.verdict_id(_SEEN)
        self._skipped: Counter[tuple[str, str, str]] = Counter()
        self._collect: Callable[[Counter[tuple[str, str, str]]], None] | None = None
        self._lock = threading.Lock()
        self._flushed_at = time.monotonic()
        self.every_second: Callable[[], None] | None = None
        self.name_api: Callable[[str], str] | None = None

    def native_parts(self) -> dict[str, Any]:
        """What the C handler writes to, by its names; none of it is ever replaced by another object."""
        return {
            "recorder": self,
            # The C handler holds these very objects, so `clear` is used and never a new dictionary.
            "contexts": self._contexts,
            **self.data.native_parts(),
            "matched": self._match,
            "seen_verdict": self._seen,
        }

    @property
    def step(self) -> int:
        """The current training step."""
        return self._rows.step

    @step.setter
    def step(self, step: int) -> None:
        self._rows.step = step

    @property
    def recorded_in_step(self) -> bool:
        """Whether the current step has records: after the last `step()` usually nothing comes."""
        return self._rows.last_step == self._rows.step

    def add_step(self, step: int, began_s: float, took_s: float) -> None:
        """Note a step: its number, when it began, and how long it took."""
        self.data.add_step(step, began_s, took_s)

    def context(self, call: Call) -> int:
        """Number of the call's context (operator, forms of the inputs, module, phase, line, device), also set there."""
        number = call.context
        if number < 0:
            key = context_key(call.plan.index, call.role.device, call.origin, call.args, call.kwargs)
            # Without the lock: `get` is atomic, and only a new context has to wait.
            known = self._contexts.get(key)
            number = call.context = self._new_context(key, call) if known is None else known
        return number

    def match(self, context: int, ref_us: float, target_us: float, drift: tuple[float, float] = NO_DRIFT) -> int:
        """Record a bit-identical call."""
        rows = self._rows
        seq = rows.next_seq()
        drift_abs, drift_rel = drift
        rows.add(seq, context, self._match, ref_us, target_us, drift_abs, drift_rel)
        if not seq & _LOOK_AT_CLOCK:
            self._flush_if_due()
        return seq

    def record_only(self, context: int) -> None:
        """Record a call that is only recorded."""
        rows = self._rows
        seq = rows.next_seq()
        rows.add(seq, context, self._seen, _UNKNOWN, _UNKNOWN)
        if not seq & _LOOK_AT_CLOCK:
            self._flush_if_due()

    def _flush_if_due(self) -> None:
        if len(self._rows) >= FLUSH_ROWS or time.monotonic() - self._flushed_at > FLUSH_S:
            # A database in memory is not read after a crash: counts are put there when a report is asked for.
            self._flush(counts=self.data.path is not None)
            # About once a second, another operator becomes due for a look at its effects on memory.
            if self.every_second is not None:
                self.every_second()

    def verdict(
        self,
        context: int,
        verdict: Verdict,
        diffs: tuple[TensorDiff, ...] = (),
        missing_kernel: str = "",
        times: tuple[float, float] = NO_TIMES,
        drift: tuple[float, float] = NO_DRIFT,
        captured: InputsFile | None = None,
        at: tuple[int, int] | None = None,
    ) -> int:
        """Record a call with any other verdict.

        Args:
            context: Number of its context.
            verdict: What became of it.
            diffs: How its tensors differed.
            missing_kernel: Which the target lacked.
            times: The reference's and the target's, in microseconds.
            drift: Accumulated error.
            captured: What `keep_inputs` returned.
            at: What `reserve` gave when the call came.
        """
        data = self.data
        with self._lock:
            # A postponed verdict belongs to the step in which its call came.
            seq, step = at or (self._rows.next_seq(), self._rows.step)
            number = data.verdict_id(verdict, missing_kernel)
            data.add_diffs(seq, diffs)
            if captured is not None:
                data.add_capture(seq, captured.file, captured.n_bytes)
                if captured.replaced:
                    data.drop_capture(captured.replaced)
            if at is None:
                self._rows.add(seq, context, number, *times, *drift)
            else:
                self._rows.append((seq, step, context, number, *times, *drift))
            data.flush_if_due()
        return seq

    def reserve(self) -> tuple[int, int]:
        """Number and step of a call whose verdict is recorded later."""
        return self._rows.next_seq(), self._rows.step

    def keep_inputs(
        self, plan: OpPlan, verdict: Verdict, inputs: Any, written: Sequence[torch.Tensor] = (), severity: float = 0.0
    ) -> InputsFile | None:
        """Keep the inputs of a failing call for `verdict` to record; None where they are not kept.

        See `Capturing.keep_inputs`.
        """
        return (
            None if self._capturing is None else self._capturing.keep_inputs(plan, verdict, inputs, written, severity)
        )

    def bytes_for_inputs(self, plan: OpPlan, verdict: Verdict) -> int | None:
        """Bytes that the inputs of a failing call may take; None where they are not wanted."""
        return None if self._capturing is None else self._capturing.bytes_for_inputs(plan, verdict)

    def region(self, name: str, backend: str, n_operators: int, site: str) -> None:
        """Keep what is known of a compiled region: its backend, its size (-1 if unknown), the first line in it."""
        self.data.add_region(name, backend, n_operators, site)

    def add_moment(self, seq: int, times: tuple[int | None, ...]) -> None:
        """Record when the parts of a call ran."""
        self.data.add_moment(seq, times)

    def skip(self, name: str, device: str, reason: str) -> None:
        """Count a call that is not compared."""
        self._skipped[name, device, reason] += 1

    def collect_from(self, collect: Callable[[Counter[tuple[str, str, str]]], None]) -> None:
        """Before writing, call `collect` to add calls that were counted elsewhere, by operator, device, reason."""
        self._collect = collect

    def flush(self) -> None:
        """Write everything that waits."""
        self._flush(counts=True)

    def _flush(self, *, counts: bool) -> None:
        with self._lock:
            self._flushed_at = time.monotonic()
            # The C handler counts for itself, since a call into Python costs more than the count.
            if counts and self._collect is not None:
                self._collect(self._skipped)
            if counts and self._skipped:
                skipped, self._skipped = self._skipped, Counter()
                self.data.add_skipped(skipped)
            self.data.flush()

    def _new_context(self, key: tuple[Any, ...], call: Call) -> int:
        printed, dtypes, shapes = printed_inputs(call.args, call.kwargs)
        module, phase, site = call.origin
        api = "" if self.name_api is None else self.name_api(phase)
        with self._lock:
            if len(self._contexts) >= _MAX_CONTEXTS:
                # Cleared and never replaced: the C handler holds this very dictionary.
                self._contexts.clear()
            number = self.data.context_id(
                call.plan.name,
                printed,
                dtypes,
                shapes,
                module,
                Phase(phase),
                site,
                call.role.device_name,
            )
            self._contexts[key] = number
            if api:
                self.data.add_api(number, api)
        return number


def _python_key(
    index: int, device: torch.device, place: Origin, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """What calls of one context have in common."""
    key: list[Any] = [index, device, *place]
    append = key.append
    for a in args:
        kind = type(a)
        # Shapes without strides: a context is what a reader recognises; `Call.signature` adds the strides.
        if kind in _TENSORS:
            append(a.shape)
            append(a.dtype)
        elif kind in _EXACT:
            append(a)
        # A learning rate changes at each step.
        elif kind is float:
            append(kind)
        else:
            _add_to_key(append, a, kind)
    if kwargs:
        for name, a in kwargs.items():
            append(name)
            _add_to_key(append, a, type(a))
    return tuple(key)


def _add_to_key(append: Callable[[Any], None], a: Any, kind: type) -> None:
    # By type first: to ask whether something is an instance of Tensor takes 0.5 µs where its type is another.
    if kind in _TENSORS:
        append(a.shape)
        append(a.dtype)
    elif kind is int:
        # Small integers are dimensions and flags, which choose a kernel; large ones are counters.
        append(a if -1024 <= a <= 1024 else kind)
    elif kind in _EXACT:
        append(a)
    elif kind is list or kind is tuple:
        append(len(a))
        for v in a[:_MAX_LIST]:
            _add_to_key(append, v, type(v))
    elif kind is not float and isinstance(a, torch.Tensor):
        append(a.shape)
        append(a.dtype)
    else:
        # Floats and large integers change from step to step: they would give each call a new context.
        append(kind)


context_key = native.context_key or _python_key
"""Operator, device, origin, and of the arguments shapes, dtypes and what chooses a kernel."""


def printed_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, tuple[str, ...], str]:
    """Inputs of a call as reports print them, their dtypes, and their shapes."""
    dtypes: dict[str, None] = {}
    shapes: list[str] = []
    printed = [_printed(a, dtypes, shapes) for a in args]
    printed += [f"{name}={_printed(a, dtypes, shapes)}" for name, a in kwargs.items()]
    return ", ".join(printed), tuple(dtypes), " ".join(shapes)


def _printed(a: Any, dtypes: dict[str, None], shapes: list[str]) -> str:
    if isinstance(a, torch.Tensor):
        dtypes[dtype_name(a.dtype)] = None
        text = str(meta(a))
        shapes.append(text[text.index("[") :])
        return text
    if isinstance(a, (list, tuple)):
        inner = [_printed(v, dtypes, shapes) for v in a[:_MAX_LIST]]
        for v in a[_MAX_LIST:_MAX_SHAPES]:  # unprinted, but `shadowrun slowdown` makes the call again
            _printed(v, dtypes, shapes)
        more = [f"… {len(a) - _MAX_LIST} more"] if len(a) > _MAX_LIST else []
        return f"[{', '.join(inner + more)}]"
    if isinstance(a, torch.Generator):
        return "Generator"
    return str(a) if not isinstance(a, str) else repr(a)


# A recorder that shows findings to a `Watch` as they are recorded: for what has to happen while the program runs.

_FINDINGS = (Status.UNSUPPORTED, Status.ERROR, Status.MISMATCH, Status.FALLBACK)


class Watch(Protocol):
    """What is shown findings."""

    def on_finding(self, record: OpRecord) -> None:
        """A call that is a finding was recorded; on the thread that compares."""

    def poll(self) -> None:
        """Called every few dozen calls."""


class WatchingRecorder(Recorder):
    """Shows each verdict that is a finding; a subclass, so that a run without a `Watch` pays nothing.

    Args:
        data, attribution, capturing: As for `Recorder`.
        watch: Is shown the findings.
    """

    def __init__(self, data: DataFile, attribution: Attribution, capturing: Capturing | None, watch: Watch) -> None:
        super().__init__(data, attribution, capturing)
        self._watch = watch
        self._described: dict[int, tuple[str, str, str, Phase, str, str]] = {}

    def _new_context(self, key: tuple[Any, ...], call: Call) -> int:
        number = super()._new_context(key, call)
        module, phase, site = call.origin
        inputs = printed_inputs(call.args, call.kwargs)[0]
        self._described[number] = call.plan.name, inputs, module, Phase(phase), site, call.role.device_name
        return number

    def verdict(
        self,
        context: int,
        verdict: Verdict,
        diffs: tuple[TensorDiff, ...] = (),
        missing_kernel: str = "",
        times: tuple[float, float] = (-1.0, -1.0),
        drift: tuple[float, float] = (-1.0, -1.0),
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """As in `Recorder`; then show it."""
        seq = super().verdict(context, verdict, diffs, missing_kernel, times, drift, *args, **kwargs)
        described = self._described.get(context)
        if described is not None and verdict.status in _FINDINGS and verdict.cause is not Cause.HARNESS:
            op, inputs, module, phase, site, device = described
            call = OpCall(seq, self.step, self.data.info.rank, op, inputs, module, phase, site, device)
            self._watch.on_finding(OpRecord(call, verdict, diffs, missing_kernel, *times, *drift))
        return seq

    def _flush_if_due(self) -> None:
        super()._flush_if_due()
        self._watch.poll()
