"""The target as it is seen from where nobody waits for it: from the comparing thread, and by calls on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shadowrun.intercept import torchapi
from shadowrun.replay.execution import Executor, Ran
from shadowrun.replay.mirror import kept_on_cpu, mirror, move, written_to

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.intercept.plan import OpPlan
    from shadowrun.platforms.streams import Transfers
    from shadowrun.replay.mirror import Arguments
    from shadowrun.replay.pipeline import Pipeline

__all__ = ["Feeding", "HandedOver"]

_T = TypeVar("_T")


@dataclass(slots=True)
class _Fetched(Ran):
    """A run on the target whose results a calling thread has brought over."""

    found: Any = None


class HandedOver(Executor):
    """The target as the comparing thread sees it: a calling thread runs what it wants to know.

    The target has state that belongs to the calling threads: their streams, and the witnesses that watch their calls.
    """

    def __init__(self, target: Executor, pipeline: Pipeline) -> None:
        super().__init__(target.platform)
        self._target = target
        self._pipeline = pipeline

    def run(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], *, mute: bool = True) -> Ran:
        """Run a call on tensors that lie on the target."""
        return self._pipeline.ask(lambda: self._fetched(plan, self._target.run(plan, args, kwargs, mute=mute)))

    def run_mirrored(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], max_bytes: int) -> Ran:
        """Run a call on copies of its inputs."""
        return self._pipeline.ask(lambda: self._fetched(plan, self._target.run_mirrored(plan, args, kwargs, max_bytes)))

    def asked(self, question: Callable[[Executor], _T]) -> _T:
        """Have a calling thread answer a question that runs calls on the target."""
        return self._pipeline.ask(lambda: question(self._target))

    def values(self, plan: OpPlan, ran: Ran) -> list[Any]:
        """Results of a run, on the CPU."""
        return list(ran.found) if isinstance(ran, _Fetched) else super().values(plan, ran)

    def _fetched(self, plan: OpPlan, ran: Ran) -> Ran:
        return _Fetched(ran.args, ran.kwargs, ran.out, ran.ns, ran.fallback, self._target.values(plan, ran))


class Feeding(Executor):
    """The target for calls on the CPU: their inputs are copied to it without waiting either."""

    def __init__(self, target: Executor, transfers: Transfers) -> None:
        super().__init__(target.platform)
        self.witness = target.witness
        self._transfers = transfers

    def to_device(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, max_bytes: int
    ) -> Arguments:
        """Copy inputs to a device."""
        kept, written = kept_on_cpu(plan, args, kwargs), written_to(plan, args, kwargs)
        return mirror(args, kwargs, device, max_bytes, self._feed, written=written, kept=kept)

    def _feed(self, t: torch.Tensor, device: torch.device) -> torch.Tensor:
        dense = t.layout is torch.strided and t.is_contiguous() and not t.is_conj() and not t.is_neg()
        if not dense or t.is_quantized or torchapi.is_zero_tensor(t) or device.type == "cpu":
            return move(t, device)
        host = self._transfers.host(t.numel(), t.dtype)  # torch gives it to nobody else before the copy is over
        host.copy_(t.reshape(-1))
        return host.to(device, non_blocking=True).view(t.shape)
