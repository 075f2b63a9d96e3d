"""A recorder for the calling threads, where other calls are still being compared behind them.

What they record waits for its turn, so that records come in the order of the calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shadowrun.replay.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shadowrun.intercept.attribution import Place
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.replay.capturing import Kept
    from shadowrun.replay.pipeline import Pipeline
    from shadowrun.types import TensorDiff, Verdict

__all__ = ["OrderedRecorder"]

_NUMBER_UNKNOWN = -1


class _Note:
    """A record that waits."""

    __slots__ = ("_args", "_record")

    def __init__(self, record: Any, *args: Any) -> None:
        self._record = record
        self._args = args

    def run(self) -> None:
        self._record(*self._args)

    def drop(self, reason: str) -> None:  # noqa: ARG002 - it costs nothing: nothing is lost
        self.run()


class OrderedRecorder(Recorder):
    """Hands on to another recorder, in turn.

    Args:
        recorder: The one that writes.
        pipeline: What goes before.
    """

    def __init__(self, recorder: Recorder, pipeline: Pipeline) -> None:  # the state is the other's
        self._behind = recorder
        self._pipeline = pipeline

    def place(self, depth: int) -> Place:
        """See `Recorder.place`."""
        return self._behind.place(depth + 1)

    def place_silently(self, depth: int) -> None:
        """See `Recorder.place_silently`."""
        self._behind.place_silently(depth + 1)

    def context(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place, device: torch.device
    ) -> int:
        """See `Recorder.context`: a call that waits has its place already."""
        return self._behind.context(plan, args, kwargs, place, device)

    def match(self, context: int, ref_us: float, target_us: float, drift: tuple[float, float] = (-1.0, -1.0)) -> int:
        """Record a bit-identical call, in turn; its number is not known yet."""
        if self._pipeline.idle:
            return self._behind.match(context, ref_us, target_us, drift)
        self._pipeline.submit(_Note(self._behind.match, context, ref_us, target_us, drift))
        return _NUMBER_UNKNOWN

    def verdict(
        self,
        context: int,
        verdict: Verdict,
        diffs: tuple[TensorDiff, ...] = (),
        missing_kernel: str = "",
        times: tuple[float, float] = (-1.0, -1.0),
        drift: tuple[float, float] = (-1.0, -1.0),
        captured: Kept | None = None,
    ) -> int:
        """Record any other verdict, in turn; its number is not known yet."""
        if self._pipeline.idle:
            return self._behind.verdict(context, verdict, diffs, missing_kernel, times, drift, captured)
        note = _Note(self._behind.verdict, context, verdict, diffs, missing_kernel, times, drift, captured)
        self._pipeline.submit(note)
        return _NUMBER_UNKNOWN

    def keep(
        self, plan: OpPlan, verdict: Verdict, inputs: Any, written: Sequence[torch.Tensor] = (), severity: float = 0.0
    ) -> Kept | None:
        """See `Recorder.keep`: the inputs are there now."""
        return self._behind.keep(plan, verdict, inputs, written, severity)

    def room(self, plan: OpPlan, verdict: Verdict) -> int | None:
        """See `Recorder.room`."""
        return self._behind.room(plan, verdict)

    def skip(self, name: str, device: str, reason: str) -> None:
        """See `Recorder.skip`: what is only counted has no turn."""
        self._behind.skip(name, device, reason)

    def flush(self) -> None:
        """See `Recorder.flush`."""
        self._behind.flush()
