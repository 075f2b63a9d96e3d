"""Memory of a comparison: bounds, the program's call before any copy, and buffers for small copies.

A call of the program that runs out of memory runs again without its copies. Small copies lie in buffers that are used
again: an allocation by torch takes a microsecond, as long as many of the operators themselves, and moving a few bytes
a third of that. The buffers take `_MAX_BUFFER_BYTES` bytes at most; larger tensors get new memory each time, since
moving them takes longer than allocating.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.torchapi import with_isolated_warnings
from shadowrun.numerics.bits import Uncomparable, bits_equal
from shadowrun.platforms.unsupported import is_out_of_memory
from shadowrun.replay.copies import tensors_in, written_to
from shadowrun.replay.executor import to_cpu
from shadowrun.types import Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shadowrun.intercept.plan import OpPlan
    from shadowrun.platforms.device import Platform
    from shadowrun.replay.call import Call, CallRun
    from shadowrun.replay.copies import Arguments

__all__ = [
    "BYTES_PER_NS",
    "NO_ROOM",
    "TOO_LARGE",
    "CopyBuffer",
    "CopyBuffers",
    "InputCopies",
    "SavedRngStates",
    "are_too_large",
    "may_run_again",
    "n_bytes",
    "run_before_copies",
]


# A program that fits in memory without shadowrun must fit with it.
NO_ROOM = Verdict(Status.UNVERIFIED, None, "memory: the call did not fit next to copies of its inputs; it ran without")
TOO_LARGE = Verdict(Status.UNVERIFIED, None, "budget: the results of this call exceed max_bytes")

BYTES_PER_NS = 1000
"""No processor writes as much: a call that took less time than that has no results worth measuring."""


@dataclass(slots=True)
class InputCopies:
    """Copies of a call's inputs, from before it.

    Attributes:
        pristine: The copies; None where there are none.
        problem: Why the call cannot be compared.
    """

    pristine: Arguments | None = None
    problem: Verdict | None = None


def run_before_copies(
    run: Callable[[OpPlan, tuple[Any, ...], dict[str, Any]], CallRun],
    call: Call,
    copies: InputCopies,
    restore: Callable[[], None] | None = None,
) -> CallRun:
    """Run the program's own call; if it runs out of memory, let go of the copies and run it again.

    Args:
        run: Runs it.
        call: The call.
        copies: Emptied where the call needs their memory; nothing else may hold them.
        restore: Called before the second run, to undo what the first did to random streams.
    """
    while True:
        try:
            return run(call.plan, call.args, call.kwargs)
        except Exception as error:
            if not may_run_again(error, call, copies.pristine):
                raise
            copies.pristine, copies.problem = None, NO_ROOM
        # Past the handler: the exception held the frames that held the memory.
        if restore is not None:
            restore()


def may_run_again(error: BaseException, call: Call, copies: Arguments | None) -> bool:
    """Whether the program's own call ran out of memory, of which copies take some, and has done nothing yet.

    Args:
        error: What it raised.
        call: The call.
        copies: Its arguments from before it; None where there are no copies.
    """
    plan = call.plan
    # A custom operator may have done something outside of torch before it failed.
    if copies is None or plan.custom or not is_out_of_memory(error):
        return False
    now = call.args, call.kwargs
    try:
        # A call that wrote half of its argument cannot be repeated.
        return not plan.mutated or bool(with_isolated_warnings(_are_untouched, (), (plan, now, copies)))
    except Exception:  # kinds that cannot be compared: the exception is the program's
        return False


def _are_untouched(plan: OpPlan, now: Arguments, before: Arguments) -> bool:
    pairs = zip(written_to(plan, *now), written_to(plan, *before), strict=True)
    try:
        # By bits: NaN in the argument would make it unequal to itself.
        return all(a.shape == b.shape and bits_equal(to_cpu(a), to_cpu(b)) for a, b in pairs)
    except Uncomparable:
        return False


def are_too_large(plan: OpPlan, out: Any, max_bytes: int) -> bool:
    """Whether the results of a call take more than `max_bytes`: then it is not replayed."""
    if not plan.fresh or out is None:
        return False
    try:
        new = (out,) if plan.n_returns == 1 else [out[i] for i in plan.fresh]
        return n_bytes(new) > max_bytes
    except (RuntimeError, TypeError, IndexError):  # tensors without memory, results of another form than the schema's
        return False


def n_bytes(values: Iterable[Any]) -> int:
    """Memory that the dense tensors among values take, those in lists included."""
    # The whole storage: a view keeps all of it alive.
    return sum(t.untyped_storage().nbytes() for t in tensors_in(values) if t.layout is torch.strided)


class SavedRngStates:
    """The random streams as a call finds them.

    Args:
        platform: Where it runs.
        kwargs: Its arguments by name.
    """

    def __init__(self, platform: Platform | None, kwargs: dict[str, Any]) -> None:
        generator = kwargs.get("generator")
        self._generator = generator if isinstance(generator, torch.Generator) else None
        self._own = None if self._generator is None else self._generator.get_state()
        # A device without a generator, or one that falls back, draws from the CPU's stream.
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


Form = tuple[torch.dtype, torch.Size] | tuple[torch.dtype, torch.Size, int]

_CPU = torch.device("cpu")
# Above this, moving the bytes takes longer than allocating, so a kept buffer saves nothing.
_MAX_TENSOR_BYTES = 256 << 10
# Buffers stay allocated between steps: the bound is part of the stated memory.
_MAX_BUFFER_BYTES = 4 << 20
# Buffers of small forms take little memory, and yet a dict of them must not grow with changing shapes.
_MAX_FORMS = 1000
# Their bytes are not all that there is to them, or equal bits are not what is asked.
_NOT_PLAIN = frozenset(
    {
        *(torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4),
        *(torch.complex32, torch.complex64, torch.complex128),
    }
)


@dataclass(slots=True, eq=False)
class CopyBuffer:
    """Two contiguous tensors of one form.

    Attributes:
        before: For the values before the call.
        before_at: Its address.
        work: For the replay to write to.
        work_at: Its address.
        n_bytes: Of each.
        form: Its key in `CopyBuffers`.
    """

    before: torch.Tensor
    before_at: int
    work: torch.Tensor
    work_at: int
    n_bytes: int
    form: Form


class CopyBuffers:
    """Buffers by dtype and shape; a call that writes to several tensors has numbers for those after the first.

    Args:
        max_bytes: Bound of the copies of one call.

    Attributes:
        by_form: The buffers that are kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.by_form: dict[Form, CopyBuffer] = {}
        self._max_bytes = max_bytes
        self._held = 0

    def make(self, t: torch.Tensor, number: int = 0) -> CopyBuffer | None:
        """A buffer for a tensor on the CPU, kept if it is small; None where the tensor is too large or not plain."""
        form: Form = (t.dtype, t.shape, number) if number else (t.dtype, t.shape)
        n_bytes = t.nbytes
        if not 0 < n_bytes <= self._max_bytes or t.dtype in _NOT_PLAIN:
            return None
        # A large buffer serves this call and is not kept.
        if n_bytes > _MAX_TENSOR_BYTES:
            return with_isolated_warnings(_make, (), (t, form))  # type: ignore[no-any-return]
        if self._held + 2 * n_bytes > _MAX_BUFFER_BYTES or len(self.by_form) >= _MAX_FORMS:
            self.clear()
        buffer: CopyBuffer = with_isolated_warnings(_make, (), (t, form))
        self.by_form[form] = buffer
        self._held += 2 * n_bytes
        return buffer

    def drop(self, buffer: CopyBuffer) -> None:
        """Keep a buffer no longer: the next call of its form gets another."""
        # `clear` may have dropped it before.
        if self.by_form.get(buffer.form) is buffer:
            del self.by_form[buffer.form]
            self._held -= 2 * buffer.n_bytes

    def clear(self) -> None:
        """Free all buffers."""
        self.by_form.clear()
        self._held = 0


def _make(t: torch.Tensor, form: Form) -> CopyBuffer:
    before, work = _two_like(t)
    return CopyBuffer(before, before.data_ptr(), work, work.data_ptr(), t.nbytes, form)


def _two_like(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if torch.is_inference_mode_enabled():  # a tensor made outside of it may be written to in either mode
        with torch.inference_mode(False):
            return _two_like(t)
    shape, dtype = t.shape, t.dtype
    return torch.empty(shape, dtype=dtype, device=_CPU), torch.empty(shape, dtype=dtype, device=_CPU)
