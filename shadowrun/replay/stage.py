"""What the two paths of a call share: platforms, recorder, drift, and what to do when we fail ourselves."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.errors import ShadowrunWarning
from shadowrun.platforms.unsupported import limit_of_host
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shadowrun.config import Config
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.replay.comparing import Comparing
    from shadowrun.replay.drift import Drift
    from shadowrun.replay.execution import Executor, Ran
    from shadowrun.replay.recorder import Recorder
    from shadowrun.replay.schedule import Selection

__all__ = ["BUDGET", "CUSTOM", "ONE_MEMORY", "Role", "Stage"]

CUSTOM = Verdict(
    Status.UNVERIFIED, None, "custom operator: a replay could repeat its side effects; name it in ops= to allow it"
)
BUDGET = Verdict(Status.UNVERIFIED, None, "budget: the copies of this call exceed max_bytes")

ONE_MEMORY = Verdict(Status.UNVERIFIED, None, "it reads the memory that it writes to by a tensor on another storage")


@dataclass(frozen=True, slots=True)
class Role:
    """What a device means to this comparison.

    Attributes:
        device: Where the user's call runs.
        on_target, on_ref: That is the target, the reference; neither: both are replayed.
        shared: Both platforms are this device, under settings of their own.
    """

    device: torch.device
    on_target: bool
    on_ref: bool
    shared: bool


@dataclass(slots=True)
class Stage:
    """The parts of a running comparison."""

    config: Config
    target: Executor
    ref: Executor
    recorder: Recorder
    selection: Selection
    comparing: Comparing
    drift: Drift | None
    _warned: bool = field(default=False)

    def unverified(self, context: int, verdict: Verdict, plan: OpPlan, own: Ran | None) -> None:
        """Record a call that could not be compared; drift goes on from the user's values."""
        try:
            if context >= 0:
                self.recorder.verdict(context, verdict)
            else:
                self.recorder.skip(plan.name, "", verdict.explanation)
            if self.drift is not None and own is not None:
                self.drift.reseed(plan, own.args, own.kwargs, own.out)
        except Exception as error:
            self.harness("recording", plan, error)

    def harness(self, doing: str, plan: OpPlan, error: Exception, tensors: Iterable[Any] = ()) -> Verdict:
        """An internal failure: a record and one warning, never an exception in the user's program.

        Calls with tensors of a kind that cannot be replayed are no failure but UNVERIFIED.
        """
        kind = ""
        with contextlib.suppress(Exception):
            kind = _odd_kind(tensors)
        if kind:
            return Verdict(Status.UNVERIFIED, None, kind, f"{type(error).__name__}: {error}"[:300])
        if isinstance(error, Warning):  # the user's filters make errors of warnings, and only the replay gave one
            return Verdict(Status.UNVERIFIED, None, f"the replay raised a {type(error).__name__}", str(error)[:300])
        if limit := limit_of_host(error):
            return Verdict(Status.UNVERIFIED, None, limit, f"{type(error).__name__}: {error}"[:300])
        text = f"{doing} {plan.name}: {type(error).__name__}: {error}"[:500]
        if not self._warned:
            self._warned = True
            # Where warnings are errors, ours still is none of the user's business.
            with contextlib.suppress(ShadowrunWarning):
                warnings.warn(
                    f"shadowrun failed while {text}. Your program goes on unchanged; the call is recorded as "
                    "ERROR (harness), and later failures only so. Please report it.",
                    ShadowrunWarning,
                    stacklevel=2,  # a line of ours, whichever way led here
                )
        return Verdict(Status.ERROR, Cause.HARNESS, type(error).__name__, text)


def _odd_kind(tensors: Iterable[Any]) -> str:
    """What is special about the first special tensor; empty if all are plain."""
    for t in tensors:
        if isinstance(t, (list, tuple)):
            found = _odd_kind(t)
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
