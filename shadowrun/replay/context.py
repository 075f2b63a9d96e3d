"""What the paths of a comparison share: the `Path` and `RecordSink` protocols, both platforms, internal failures."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shadowrun.errors import ShadowrunWarning
from shadowrun.platforms.unsupported import limit_of_host
from shadowrun.replay.recompute import NoWideKernel
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Sequence

    from shadowrun.config import Config
    from shadowrun.intercept.attribution import Attribution
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.replay.call import Call, CallRun
    from shadowrun.replay.comparator import Comparator
    from shadowrun.replay.drift import Drift
    from shadowrun.replay.executor import Executor
    from shadowrun.replay.timeline import Timeline
    from shadowrun.types import TensorDiff

__all__ = [
    "BUDGET",
    "CUSTOM",
    "NO_CONTEXT",
    "NO_DRIFT",
    "NO_ERROR",
    "NO_TIMES",
    "ONE_MEMORY",
    "SLOW",
    "InputsFile",
    "Path",
    "RecordSink",
    "ReplayContext",
    "RunSink",
]

# An object of its own, so that `Capturing` recognises it by identity: a slow call is no fault.
SLOW = Verdict(Status.MATCH, Cause.SLOW)
"""Stands for a call that was right and far slower on the target."""

NO_CONTEXT = -1
"""The number of a context that is not known."""

NO_TIMES = NO_DRIFT = (-1.0, -1.0)
NO_ERROR = (0.0, 0.0)
"""The accumulated error where all values are equal."""


@dataclass(frozen=True, slots=True)
class InputsFile:
    """Inputs that were kept.

    Attributes:
        file: Name of the file.
        n_bytes: Its size.
        replaced: Name of a file that they took the place of; empty where there is none.
    """

    file: str
    n_bytes: int
    replaced: str = ""


class RecordSink(Protocol):
    """Where each path of a call puts what became of it. Implemented by `recording.recorder.Recorder`."""

    def context(self, call: Call) -> int:
        """Number of the call's context (operator, forms of the inputs, module, phase, line, device), also set there."""

    def match(self, context: int, ref_us: float, target_us: float, drift: tuple[float, float] = NO_DRIFT) -> int:
        """Record a bit-identical call."""

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
            at: What `reserve` returned, for a call that was judged later; None for the next number.
        """

    def reserve(self) -> tuple[int, int]:
        """Reserve a number and the step of a call whose verdict comes later."""

    def keep_inputs(
        self, plan: OpPlan, verdict: Verdict, inputs: Any, written: Sequence[torch.Tensor] = (), severity: float = 0.0
    ) -> InputsFile | None:
        """Keep the inputs of a failing call for `verdict` to record; None where they are not kept."""

    def bytes_for_inputs(self, plan: OpPlan, verdict: Verdict) -> int | None:
        """Bytes that the inputs of a failing call may take; None where they are not wanted."""

    def skip(self, name: str, device: str, reason: str) -> None:
        """Count a call that is not compared."""

    def flush(self) -> None:
        """Write everything that waits."""


class RunSink(RecordSink, Protocol):
    """The sink of a whole run: what its observer needs in addition.

    Attributes:
        attribution: Finds where a call comes from.
        every_second: Called about once a second, while calls are recorded.
    """

    attribution: Attribution
    every_second: Callable[[], None] | None

    @property
    def step(self) -> int:
        """The current training step."""

    def record_only(self, context: int) -> None:
        """Record a call that is only recorded."""

    def add_moment(self, seq: int, times: tuple[int | None, ...]) -> None:
        """Record when the parts of a call ran."""

    def collect_from(self, collect: Callable[[Counter[tuple[str, str, str]]], None]) -> None:
        """Before writing, call `collect` to add calls that were counted elsewhere, by operator, device, reason."""

    def native_parts(self) -> dict[str, Any]:
        """What the native handler writes to, by its names; none of it is ever replaced by another object."""


# A custom operator may send, count or write files: only the user can know that a second run is harmless.
CUSTOM = Verdict(
    Status.UNVERIFIED, None, "custom operator: a replay could repeat its side effects; name it in ops= to allow it"
)
BUDGET = Verdict(Status.UNVERIFIED, None, "budget: the copies of this call exceed max_bytes")
ONE_MEMORY = Verdict(Status.UNVERIFIED, None, "it reads the memory that it writes to by a tensor on another storage")


class Path(Protocol):
    """One way to observe the calls of a device. `Treatment` names them."""

    def observe(self, call: Call) -> CallRun:
        """Run a call for the program, once more elsewhere, and record the verdict.

        Returns:
            The program's own run; its time is not part of the overhead.
        """
        ...


@dataclass(slots=True)
class ReplayContext:
    """The parts of a running comparison."""

    config: Config
    target: Executor
    ref: Executor
    recorder: RecordSink
    comparator: Comparator
    drift: Drift | None
    timeline: Timeline | None = None
    _warned: bool = field(default=False)

    def may_replay(self, plan: OpPlan) -> bool:
        """Whether an operator may run a second time: custom ones only where the user named operators in `ops=`."""
        return not plan.custom or self.config.ops is not None

    def unverified(self, call: Call, verdict: Verdict, own: CallRun | None = None) -> None:
        """Record a call that could not be compared.

        Args:
            call: The call; without a context it is only counted.
            verdict: Why it could not.
            own: The program's own run, from whose values the drift chains continue.
        """
        try:
            # A verdict row refers to a context; a call without one can still be counted, and is never lost.
            if call.context != NO_CONTEXT:
                self.recorder.verdict(call.context, verdict)
            else:
                self.recorder.skip(call.plan.name, "", verdict.explanation)
            if self.drift is not None and own is not None:
                # The chain has not run this call: its twins would be stale from here on.
                self.drift.reseed(call.plan, own)
        except Exception as error:
            self.internal_error("recording", call.plan, error)

    def failed(self, doing: str, call: Call, error: Exception, out: Any = None) -> None:
        """Record a call that could not be compared since something of shadowrun failed.

        Args:
            doing: What failed, as in "replaying".
            call: The call.
            error: The exception.
            out: What the program's own run returned.
        """
        verdict = self.internal_error(doing, call.plan, error, (*call.tensors, out))
        # Whatever made the call fail may fail here too, and the program must not see either.
        with contextlib.suppress(Exception):
            self.recorder.context(call)
        if call.context == NO_CONTEXT and not call.role.shared:  # a nested tensor, say, has no form to record
            call = call.without_arguments()
            with contextlib.suppress(Exception):
                self.recorder.context(call)
        self.unverified(call, verdict)

    def internal_error(self, doing: str, plan: OpPlan, error: Exception, tensors: Iterable[Any] = ()) -> Verdict:
        """The verdict on an internal failure, which gives one warning and no exception in the user's program.

        Calls with tensors of a kind that cannot be replayed are no failure but UNVERIFIED.
        """
        kind = ""
        with contextlib.suppress(Exception):
            kind = _unsupported_kind(tensors)
        if kind:
            return Verdict(Status.UNVERIFIED, None, kind, f"{type(error).__name__}: {error}"[:300])
        if isinstance(error, NoWideKernel):
            return Verdict(Status.UNVERIFIED, None, str(error))
        # `-W error` turns the replay's warnings into exceptions.
        if isinstance(error, Warning):  # the user's filters make errors of warnings, and only the replay gave one
            return Verdict(Status.UNVERIFIED, None, f"the replay raised a {type(error).__name__}", str(error)[:300])
        # Too little memory or a full stack is no fault of a platform, and no bug of shadowrun.
        if limit := limit_of_host(error):
            return Verdict(Status.UNVERIFIED, None, limit, f"{type(error).__name__}: {error}"[:300])
        # Messages of the dispatcher reach 10 KB, and one is stored for each call.
        text = f"{doing} {plan.name}: {type(error).__name__}: {error}"[:500]
        if not self._warned:
            self._warned = True
            # Filters that turn warnings into errors must not raise this one in the user's program.
            with contextlib.suppress(ShadowrunWarning):
                warnings.warn(
                    f"shadowrun failed while {text}. Your program continues unchanged; the call is recorded as "
                    "ERROR (harness), and later failures only so. Please report it.",
                    ShadowrunWarning,
                    stacklevel=2,  # a line of this package, whichever path led here
                )
        return Verdict(Status.ERROR, Cause.HARNESS, type(error).__name__, text)


def _unsupported_kind(tensors: Iterable[Any]) -> str:
    """The kind of the first tensor that cannot be replayed; empty if all can."""
    for t in tensors:
        if isinstance(t, (list, tuple)):
            found = _unsupported_kind(t)
        elif not isinstance(t, torch.Tensor):
            continue
        elif t.is_nested:
            found = "nested tensor"
        elif t.is_meta:
            found = "meta tensor: no values"
        elif t.is_quantized:
            found = "quantized tensor"
        elif t.layout is not torch.strided:
            found = f"{str(t.layout).removeprefix('torch.')} layout"
        elif type(t) not in (torch.Tensor, torch.nn.Parameter):
            found = f"tensor subclass {type(t).__name__}"
        else:
            continue
        if found:
            return found
    return ""
