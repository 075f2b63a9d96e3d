"""Runs each distinct call of a program again in the same process: repeated, on slices of its batch, in other layouts.

The program's own call runs first and unchanged; all others are made on copies of its inputs, from before the call.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import torch

from shadowrun.intercept import torchapi
from shadowrun.intercept.dispatch import ShadowMode
from shadowrun.intercept.plan import Action, OpPlan
from shadowrun.intercept.untrusted.checked_calls import changed_call
from shadowrun.intercept.user_call import own_call
from shadowrun.numerics.hash_ladder import remaining_precision
from shadowrun.operators.case import Case, flat_results, tensors
from shadowrun.recording.digests.tensor_digest import digest
from shadowrun.replay.call import draws_random
from shadowrun.studies.determinism.stability import Stability
from shadowrun.studies.sweep.batch_arguments import batch_arguments
from shadowrun.studies.sweep.inputs import channels_last, is_plain, transposed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shadowrun.operators.case import Value

__all__ = ["ChangedVariant", "Dimension", "Variants"]

MAX_BYTES: Final = 1 << 30
"""Inputs of a call: with its variants, several times as much is held at once."""


def offset(t: torch.Tensor) -> torch.Tensor:
    """The same values one element behind the start of their memory, where vector loads are not aligned."""
    if not is_plain(t) or not t.is_contiguous() or not t.numel():
        return t
    room = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return room[1:].view(t.shape).copy_(t.detach())


LAYOUTS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "channels_last": channels_last,
    "transposed": transposed,
    "offset": offset,
}


class Dimension:
    """Names of what is varied within the process."""

    REPEATS = "one process"
    SLICES = "batch slice"
    LAYOUTS = "layout"


@dataclass(frozen=True, slots=True)
class ChangedVariant:
    """A variant of a call that gave other bits.

    Attributes:
        op: The operator.
        dimension: One of `Dimension`.
        variant: ``k=1``, ``transposed``, or ``33 repeats``.
        inputs: Of the call, ``float32[2048, 1024], float32[1024, 1024]``.
        bits: Mantissa bits that still agree, and those that the dtype has.
        n_distinct: Results that there were.
    """

    op: str
    dimension: str
    variant: str
    inputs: str
    bits: tuple[int, int]
    n_distinct: int


@dataclass(slots=True)
class Variants:
    """Observes a program's calls, and varies the first of each signature. Use it in a ``with`` block.

    Args:
        n_repeats: How often each call runs again on equal inputs.
        batch_slices: Sizes of the slices from the start of the batch.
        layouts: Whether calls also run in other layouts.

    Attributes:
        found: Outcomes by dimension and operator.
        broken: Each variant that gave other bits.
        left_out: Signatures that were not varied, by reason.
        random: Operators that draw random numbers, which are not varied.
    """

    n_repeats: int
    batch_slices: Sequence[int]
    layouts: bool
    found: dict[str, dict[str, Stability]] = field(default_factory=dict)
    broken: list[ChangedVariant] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    random: set[str] = field(default_factory=set)
    plans: dict[int, OpPlan] = field(default_factory=dict)
    native_handler: Any = None
    run_distributed: None = None
    _seen: set[tuple[Any, ...]] = field(default_factory=set)
    _lock: Any = field(default_factory=threading.RLock)
    _modes: list[ShadowMode] = field(default_factory=list)
    _busy: bool = False

    def __enter__(self) -> Self:
        self._modes.append(ShadowMode(self).__enter__())
        return self

    def __exit__(self, *details: object) -> None:
        kind, error, trace = details
        self._modes.pop().__exit__(kind, error, trace)

    # -- what the mode calls --------------------------------------------------------------------------

    def add_operator(self, plan: OpPlan) -> None:
        """An operator has got its plan."""

    def count(self, name: str, reason: str) -> None:
        """Count a call that has no plan."""
        self.left_out[f"{name}: {reason}"] += 1

    def run_and_count(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that is never varied."""
        return own_call(plan.run, args, kwargs)

    def observe(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call for the program; vary it if it is the first of its signature."""
        # Before the call, which may write to its arguments.
        call = self._copied(plan, args, kwargs)
        out = own_call(plan.run, args, kwargs)
        if call is not None:
            with self._lock:
                self._busy = True
                try:
                    self._vary(call)
                except Exception as error:  # the program's own call has run: nothing of ours may reach it
                    self.left_out[f"{plan.name}: {type(error).__name__}"] += 1
                finally:
                    self._busy = False
        return out

    # -- the variants ---------------------------------------------------------------------------------

    def _copied(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        if draws_random(plan, args, kwargs):
            self.random.add(plan.name)
            return None
        if plan.action not in (Action.REPLAY, Action.RANDOM):
            return None
        with self._lock:
            # A variant of a composite call may reach the mode again.
            if self._busy:
                return None
            given = list(tensors(args, kwargs))
            signature = (plan.name, *map(_form, given), repr(list(_plain_values(args, kwargs))))
            if signature in self._seen:
                return None
            # Before it is varied: a call that fails to be varied would fail each time.
            self._seen.add(signature)
            why = _why_not(plan, given)
            if why:
                self.left_out[f"{plan.name}: {why}"] += 1
                return None
            copy = Case(plan.func, args, kwargs, plan.mutated_names, (), (), (), _unused, _unused)
            with torchapi.as_in_handler():
                return _Call(plan, *copy.fresh_inputs())

    def _vary(self, call: _Call) -> None:
        with torchapi.as_in_handler():
            base = call.run()
            # What does not repeat itself would seem to break by every other change too.
            if not self._repeats(call, base):
                return
            if self.batch_slices:
                self._slice(call, base)
            if self.layouts:
                self._lay_out(call, base)

    def _repeats(self, call: _Call, base: Sequence[Value]) -> bool:
        counts = Counter({_hash(base): 1})
        bits = (0, 0)
        for _ in range(self.n_repeats - 1):
            again = call.run()
            number = _hash(again)
            if number not in counts:
                bits = _agreeing_bits(base, again) if bits == (0, 0) else min(bits, _agreeing_bits(base, again))
            counts[number] += 1
        if self.n_repeats > 1:
            self._note(call, Dimension.REPEATS, f"{self.n_repeats} repeats", counts, bits)
        return len(counts) == 1

    def _slice(self, call: _Call, base: Sequence[Value]) -> None:
        # Slices from the start: others would have another storage offset, which is a change of its own.
        places, n = _batched(call.plan, call.args, call.kwargs)
        for k in self.batch_slices:
            if not places or k >= n:
                continue
            args = tuple(a[:k] if i in places else a for i, a in enumerate(call.args))
            try:
                part = _Call(call.plan, args, call.kwargs).run_changed()
            except Exception as error:
                self.left_out[f"{call.plan.name}: slice of {k}: {type(error).__name__}"] += 1
                continue
            pairs = [
                (whole[:k], p)
                for whole, p in zip(base, part, strict=True)
                if isinstance(whole, torch.Tensor)
                and isinstance(p, torch.Tensor)
                and whole.dim()
                and whole.shape[0] == n
            ]
            if pairs and all(a.shape == b.shape for a, b in pairs):
                self._compare(call, Dimension.SLICES, f"k={k}", [a for a, _ in pairs], [b for _, b in pairs])

    def _lay_out(self, call: _Call, base: Sequence[Value]) -> None:
        for name, change in LAYOUTS.items():
            changed = _changed(call, change)
            if changed is None:
                continue
            try:
                other = changed.run_changed()
            except Exception as error:
                self.left_out[f"{call.plan.name}: {name}: {type(error).__name__}"] += 1
                continue
            # Equal bits are asked for, not rounding: the question is whether a layout chooses another algorithm.
            self._compare(call, Dimension.LAYOUTS, name, base, other)

    def _compare(
        self, call: _Call, dimension: str, variant: str, base: Sequence[Value], other: Sequence[Value]
    ) -> None:
        counts = Counter([_hash(base), _hash(other)])
        bits = _agreeing_bits(base, other) if len(counts) > 1 else (0, 0)
        self._note(call, dimension, variant, counts, bits)

    def _note(self, call: _Call, dimension: str, variant: str, counts: Counter[bytes], bits: tuple[int, int]) -> None:
        of_op = self.found.setdefault(dimension, defaultdict(Stability))[call.plan.name]
        if len(counts) > 1:
            # How many there are of each is what counts, not which hash it was.
            of_op.add_break(Counter(dict(enumerate(counts.values()))), variant)
            self.broken.append(ChangedVariant(call.plan.name, dimension, variant, call.printed(), bits, len(counts)))
        else:
            of_op.n_holds += 1
            if not of_op.n_breaks:
                of_op.n_runs = of_op.mode = max(of_op.n_runs, counts.total())


@dataclass(frozen=True, slots=True)
class _Call:
    """A call and copies of its inputs, which stay as they are."""

    plan: OpPlan
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> tuple[Value, ...]:
        """Run it on fresh copies; all that it computes, in the order of the schema."""
        plan = self.plan
        case = Case(plan.func, self.args, self.kwargs, plan.mutated_names, (), (), (), _unused, _unused)
        args, kwargs = case.fresh_inputs() if plan.mutated else (self.args, self.kwargs)
        out = torchapi.with_isolated_warnings(plan.run, (), args, kwargs)
        return flat_results(plan.func, plan.mutated_names, args, kwargs, out)[1]

    def run_changed(self) -> tuple[Value, ...]:
        """Run it where its inputs were derived from those of the program's call.

        Raises:
            Refused: A kernel would read or write outside of them, and could end the program.
        """
        with changed_call(self.plan.func, self.args, self.kwargs):
            return self.run()

    def printed(self) -> str:
        """``float32[2048, 1024], float32[1024, 1024]``."""
        return ", ".join(
            f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors(self.args, self.kwargs)
        )


def _unused(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> tuple[Value, ...]:
    raise NotImplementedError


def _why_not(plan: OpPlan, given: Sequence[torch.Tensor]) -> str:
    if plan.custom:
        return "no operator of torch's own, and may keep a state"
    if not all(is_plain(t) for t in given):
        return "inputs that are not dense"
    if sum(t.numel() * t.element_size() for t in given) > MAX_BYTES:
        return "inputs larger than 1 GiB"
    return ""


def _form(t: torch.Tensor) -> tuple[Any, ...]:
    if t.layout is not torch.strided or t.is_nested:
        return t.dtype, t.layout, t.device
    return t.dtype, tuple(t.shape), tuple(t.stride()), t.device


def _plain_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    for value in (*args, *kwargs.items()):
        if isinstance(value, (list, tuple)):
            yield [v for v in value if not isinstance(v, torch.Tensor)]
        elif not isinstance(value, torch.Tensor):
            yield value


def _batched(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[int, ...], int]:
    """Places of the arguments with a batch dimension, and the size of the batch; 0 if there is none."""
    if torch.Tag.pointwise not in plan.func.tags:
        return batch_arguments(plan.func, args, kwargs)
    shapes = [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
    if not shapes or any(isinstance(v, torch.Tensor) for v in kwargs.values()):
        return (), 0
    whole = np.broadcast_shapes(*shapes)
    if not whole:
        return (), 0
    n = whole[0]
    # What has fewer dimensions, or size 1, is broadcast over the batch and stays whole.
    places = (
        i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.dim() == len(whole) and (a.shape[0] == n)
    )
    return tuple(places), n


def _changed(call: _Call, change: Callable[[torch.Tensor], torch.Tensor]) -> _Call | None:
    """The call with its inputs in another layout; None where none has one."""
    changes = 0

    def one(t: torch.Tensor) -> torch.Tensor:
        nonlocal changes
        laid = change(t)
        changes += laid is not t
        return laid

    case = Case(call.plan.func, call.args, call.kwargs, (), (), (), (), _unused, _unused)
    args, kwargs = case.fresh_inputs(one)
    # These kernels take the last dimension as dense unseen; what calls them has checked it.
    # Kernels of attention take the last dimension as dense, and do not look: what breaks then is the input's fault.
    unfit = case.facts.attention and any(t.dim() and t.stride(-1) != 1 for t in tensors(args, kwargs))
    return _Call(call.plan, args, kwargs) if changes and not unfit else None


def _hash(values: Sequence[Value]) -> bytes:
    """Of all bits of results, and of their shapes."""
    found = hashlib.blake2b(digest_size=16)
    for value in values:
        if isinstance(value, torch.Tensor):
            # Without strides: a result in another layout with the same values holds.
            found.update(repr((value.dtype, tuple(value.shape))).encode())
            if value.numel():
                plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
                found.update(plain.reshape(-1).view(torch.uint8).numpy().data)
        else:
            found.update(repr(value).encode())
    return found.digest()


def _agreeing_bits(some: Sequence[Value], others: Sequence[Value]) -> tuple[int, int]:
    """Remaining precision of the results that differ most, and the mantissa bits of their dtype."""
    worst: list[tuple[int, int]] = []
    for a, b in zip(some, others, strict=True):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            continue
        x, y = digest(a), digest(b)
        if x is not None and y is not None and len(x.rungs) == len(y.rungs) and x.rungs[0] != y.rungs[0]:
            worst.append((remaining_precision(x.rungs, y.rungs), len(x.rungs) - 1))
    return min(worst, default=(0, 0))
