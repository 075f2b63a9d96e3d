"""Memory: the program's own call goes before what a comparison would like to keep beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.torchapi import unheard
from shadowrun.numerics.bits import Uncomparable, bits_equal
from shadowrun.platforms.unsupported import is_out_of_memory
from shadowrun.replay.execution import to_cpu
from shadowrun.replay.mirror import tensors_in, written_to
from shadowrun.types import Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shadowrun.intercept.plan import OpPlan
    from shadowrun.platforms.device import Platform
    from shadowrun.replay.mirror import Arguments

__all__ = [
    "BYTES_PER_NS",
    "NO_ROOM",
    "TOO_LARGE",
    "Draws",
    "are_too_large",
    "may_run_again",
    "n_bytes",
]

NO_ROOM = Verdict(Status.UNVERIFIED, None, "memory: there was no room for the call beside its copies; it ran without")
TOO_LARGE = Verdict(Status.UNVERIFIED, None, "budget: the results of this call exceed max_bytes")

BYTES_PER_NS = 1000
"""No processor writes as much: a call that took less time than that has no results worth measuring."""


def may_run_again(
    error: BaseException, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], copies: Arguments | None
) -> bool:
    """Whether the program's own call failed for want of memory, which copies take, and has done nothing yet.

    Args:
        error: What it raised.
        plan: The operator.
        args: Positional arguments of the call.
        kwargs: Arguments by name.
        copies: The same, from before it; None where there are none.
    """
    if copies is None or plan.custom or not is_out_of_memory(error):
        return False
    try:
        return not plan.mutated or bool(unheard(_are_untouched, (), (plan, (args, kwargs), copies)))
    except Exception:  # kinds that cannot be told: the exception is the program's
        return False


def _are_untouched(plan: OpPlan, now: Arguments, before: Arguments) -> bool:
    pairs = zip(written_to(plan, *now), written_to(plan, *before), strict=True)
    try:
        return all(a.shape == b.shape and bits_equal(to_cpu(a), to_cpu(b)) for a, b in pairs)
    except Uncomparable:
        return False


def are_too_large(plan: OpPlan, out: Any, max_bytes: int) -> bool:
    """Whether what a call gave takes more than `max_bytes`, so that there shall be no second such."""
    if not plan.fresh or out is None:
        return False
    try:
        new = (out,) if plan.n_returns == 1 else [out[i] for i in plan.fresh]
        return n_bytes(new) > max_bytes
    except (RuntimeError, TypeError, IndexError):  # tensors without memory, results of another form than the schema's
        return False


def n_bytes(values: Iterable[Any]) -> int:
    """Memory that the dense tensors among values take, those in lists included."""
    return sum(t.untyped_storage().nbytes() for t in tensors_in(values) if t.layout is torch.strided)


class Draws:
    """The random streams as a call finds them.

    Args:
        platform: Where it runs.
        kwargs: Its arguments by name.
    """

    def __init__(self, platform: Platform | None, kwargs: dict[str, Any]) -> None:
        generator = kwargs.get("generator")
        self._generator = generator if isinstance(generator, torch.Generator) else None
        self._own = None if self._generator is None else self._generator.get_state()
        self._cpu = torch.get_rng_state()
        self._platform = platform
        self._device = None if platform is None else platform.rng_state()

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self._cpu)
        if self._generator is not None and self._own is not None:
            self._generator.set_state(self._own)
        if self._platform is not None:
            self._platform.set_rng_state(self._device)
