"""A recorder that shows findings to a `Watch` as they are recorded: for what has to happen while the program runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from shadowrun.recording.recorder import Recorder, printed_inputs
from shadowrun.types import Cause, OpCall, OpRecord, Phase, Status

if TYPE_CHECKING:
    from shadowrun.intercept.attribution import Attribution
    from shadowrun.recording.capturing import Capturing
    from shadowrun.replay.call import Call
    from shadowrun.store import DataFile
    from shadowrun.types import TensorDiff, Verdict

__all__ = ["Watch", "WatchingRecorder"]

_FINDINGS = (Status.UNSUPPORTED, Status.ERROR, Status.MISMATCH, Status.FALLBACK)


class Watch(Protocol):
    """What is shown findings."""

    def saw(self, record: OpRecord) -> None:
        """A call that is a finding was recorded; on the thread that compares."""

    def tick(self) -> None:
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
            self._watch.saw(OpRecord(call, verdict, diffs, missing_kernel, *times, *drift))
        return seq

    def _flush_if_due(self) -> None:
        super()._flush_if_due()
        self._watch.tick()
