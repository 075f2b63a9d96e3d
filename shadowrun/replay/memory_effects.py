"""Memory effects: what an operator's schema promises of memory, held against what the target does with it.

Values do not show them: a kernel may overwrite an input, write outside the view that it was given, or return its
input's memory as a new result, and each of its results is right. So the target runs the call once more on new copies,
laid out with guard memory around them. What the reference does too (an operator that writes to an argument without
saying so, one that may return its input) is no finding: it gets the same copies before anything is recorded.

The first calls of each signature are looked at, and later ones ever more seldom: an effect on memory follows from the
kernel and the forms of its inputs, seldom from values.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.intercept.plan import Action, OpPlan
from shadowrun.intercept.torchapi import storage_key
from shadowrun.numerics.diff import diff
from shadowrun.platforms.backends import FUNCTIONALIZING
from shadowrun.replay.copies import kept_on_cpu, mirror, tensors_in, written_to
from shadowrun.strided import span
from shadowrun.torch_private import is_zero_tensor, schema_of
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadowrun.intercept.plan import Argument
    from shadowrun.replay.call import CallRun
    from shadowrun.replay.copies import Arguments
    from shadowrun.replay.executor import CallRunner
    from shadowrun.types import TensorDiff

__all__ = [
    "GUARD_BYTES",
    "OVERWRITTEN",
    "Looked",
    "MemoryEffects",
    "bytes_of",
    "is_plain",
    "is_power",
    "look_for_effects",
]

GUARD_BYTES: Final = 256
"""On either side of a copy; a multiple of the alignment that torch gives memory, so that kernels take the same path."""
OVERWRITTEN: Final = "input overwritten"
_ALIGNMENT: Final = 64
_GUARD: Final = 0x3F  # as float 0.75: any arithmetic on it shows
# Calls of one signature that are always looked at.
_FIRST: Final = 2
# Later, those whose number is a power of this.
_RARER: Final = 8
# Between two looks that are due by the clock, at least so many seconds, and so many times as long as the last one took:
# they cost at most one percent of the time.
_REST_S: Final = 1.0
_REST: Final = 100.0
# A program with changing shapes makes new signatures for ever.
_MAX_SIGNATURES: Final = 50_000
# For the copies of one call, of which three of this size exist at once: the program may need the rest of the memory.
_MAX_BYTES: Final = 64 << 20
_CPU = torch.device("cpu")
_WITHOUT_MEMORY = FUNCTIONALIZING | {"meta"}

Looked = tuple[Verdict, tuple["TensorDiff", ...]]


class MemoryEffects:
    """Decides which calls are looked at.

    Args:
        target: The target.
        ref: The reference.
        max_bytes: Bytes that the copies of one call may take.
        spares_first: The first comparison of a context comes without a look: under a budget, a look would nearly
            double the longest call of a step.

    Attributes:
        newest: Greatest number of a context that was asked about: calls of a newer one are new.
        due: Numbers of the plans whose next call is looked at, whatever the shortcuts.
        always: Each call is looked at.
    """

    def __init__(self, target: CallRunner, ref: CallRunner, max_bytes: int, *, spares_first: bool = False) -> None:
        self._target, self._ref = target, ref
        self._spared = int(spares_first)
        self._max_bytes = min(max_bytes, _MAX_BYTES)
        # Lazy tensors have no memory to look at, and a worker's memory is never the program's.
        self._able = not any(e.platform.functionalizes or e.platform.remote is not None for e in (target, ref))
        self._contexts: dict[int, int] = {}
        self._signatures: dict[Any, int] = {}
        self._known: dict[int, None] = {}
        self._next_at = 0.0
        self.newest = -1
        self.due: set[int] = set()
        self.always = False

    def next_due(self) -> int | None:
        """Number of an operator whose next call is to be looked at, in turn and seldom enough to cost nothing."""
        if not self._known or self.due or time.monotonic() < self._next_at:
            return None
        index = next(iter(self._known))
        # In turn, so that no operator is looked at twice before all others were.
        self._known[index] = self._known.pop(index)  # to the end of the queue
        self.due.add(index)
        return index

    def may_be_due(self, plan: OpPlan, context: int) -> bool:
        """Whether a call may have to be looked at that a shortcut would pass by."""
        return context > self.newest or self.always or plan.index in self.due

    def is_due(self, plan: OpPlan, context: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call is to be looked at."""
        # A program with changing shapes makes new contexts for ever.
        if len(self._contexts) > _MAX_SIGNATURES:
            self._contexts.clear()
        n = self._contexts[context] = self._contexts.get(context, -self._spared) + 1
        if not self.always and n > 0:
            self.newest = max(self.newest, context)
        # A second run of a random call would draw.
        if not self._able or plan.action is not Action.REPLAY:
            return False
        if self.always:
            return True
        if plan.index in self.due:
            self.due.discard(plan.index)
            return True
        self._known.setdefault(plan.index)
        if n < 1:
            return False
        # A context that was seen has its signature counted; only the rare later looks are left.
        if n > _FIRST:
            return n % _RARER == 0 and is_power(n, _RARER)
        if len(self._signatures) > _MAX_SIGNATURES:
            self._signatures.clear()
        try:
            signature = (plan.index, *[_form(a) for a in args], *[_form(a) for a in kwargs.values()])
            seen = self._signatures[signature] = self._signatures.get(signature, 0) + 1
        # Sparse and nested tensors raise on `stride` or `storage_offset`.
        except (RuntimeError, NotImplementedError, TypeError):  # a kind of tensor without memory
            return False
        return seen <= _FIRST

    def check(self, plan: OpPlan, pristine: Arguments) -> Looked | None:
        """A verdict on what the target does with memory in this call; None where there is nothing to say."""
        begun = time.monotonic()
        try:
            return look_for_effects(plan, pristine, self._target, self._ref, self._max_bytes)
        finally:
            ended = time.monotonic()
            self._next_at = ended + max(_REST_S, _REST * (ended - begun))


def look_for_effects(
    plan: OpPlan, pristine: Arguments, target: CallRunner, ref: CallRunner, max_bytes: int
) -> Looked | None:
    """Run a call on guarded copies on the target, and where that shows something, on the reference.

    Args:
        plan: The operator.
        pristine: Inputs as before the call, on the CPU or on the target's device.
        target: The target.
        ref: The reference.
        max_bytes: Bytes that the copies may take.

    Returns:
        A mismatch and how the argument differs from what it was; None if nothing is found or could be checked.
    """
    try:
        # The target may be asynchronous: its streams belong to the calling thread.
        found = target.on_own_thread(lambda executor: list(_effects(plan, pristine, executor, max_bytes)))
        if not found:
            return None
        # An operator that breaks its schema on the reference too is torch's defect, not the device's.
        usual = {effect.key for effect in _effects(plan, pristine, ref, max_bytes)}
    except Exception:  # what it raises, and what cannot be copied, the comparison of values says
        return None
    # By kind and argument: the exact bytes may differ between two correct devices.
    unusual = [effect for effect in found if effect.key not in usual]
    if not unusual:
        return None
    first = unusual[0]
    evidence = "; ".join(effect.evidence for effect in unusual)
    verdict = Verdict(Status.MISMATCH, Cause.MEMORY_EFFECTS, first.explanation, evidence[:600], 0.95)
    return verdict, tuple(effect.diff for effect in unusual if effect.diff is not None)


@dataclass(frozen=True, slots=True)
class _Effect:
    """Something that a run did to memory and that the schema does not allow."""

    explanation: str
    names: tuple[str, ...]
    evidence: str
    diff: TensorDiff | None = None

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        return self.explanation, self.names


def _effects(plan: OpPlan, pristine: Arguments, executor: CallRunner, max_bytes: int) -> Iterator[_Effect]:
    blocks = _blocks(plan, pristine, executor.device, max_bytes)
    if blocks is None:
        return
    copies = {i: t for block in blocks for i, t in block.copies.items()}
    args, kwargs = mirror(*pristine, executor.device, max_bytes, lambda t, _: copies[id(t)])
    ran = executor.run(plan, args, kwargs)
    for block in blocks:
        yield from block.changes()
    yield from _shared_memory(plan, ran, blocks)
    yield from _not_returned(plan, ran)


class _Block:
    """The memory of one storage, of what a call uses of it, copied between guards.

    Args:
        given: Names and tensors that lie in it, and whether the call may write to them.
        device: Where the copy is to lie.
    """

    def __init__(self, given: list[tuple[str, torch.Tensor, bool]], device: torch.device) -> None:
        self._given = given
        extents = [bytes_of(t) for _, t, _ in given]
        # Kernels branch on alignment: the copy begins at the same place of a cache line.
        start = min(a for a, _ in extents) // _ALIGNMENT * _ALIGNMENT
        end = max(b for _, b in extents)
        self._shift = GUARD_BYTES - start
        self._before = torch.full((end - start + 2 * GUARD_BYTES,), _GUARD, dtype=torch.uint8)
        first = given[0][1]
        raw = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
        end = min(end, raw.numel())
        self._before[GUARD_BYTES : GUARD_BYTES + end - start].copy_(raw[start:end])
        # The comparison happens on the host, so a wrong device cannot vouch for itself.
        self._memory = self._before.to(device, copy=True)
        self.copies = {id(t): self._laid(self._memory, t) for _, t, _ in given}
        self._forms = {i: _geometry(t) for i, t in self.copies.items()}
        self.at = self._memory.data_ptr()
        self.n_bytes = self._memory.numel()

    def name_at(self, address: int) -> str:
        """The tensor that lies at an address; empty if none does."""
        for name, t, _ in self._given:
            begin, end = bytes_of(t)
            if self.at + self._shift + begin <= address < self.at + self._shift + end:
                return name
        return ""

    def offset(self, name: str, address: int) -> int:
        """Bytes from a tensor's first element to an address."""
        t = next(t for n, t, _ in self._given if n == name)
        return address - self.at - self._shift - bytes_of(t)[0]

    def changes(self) -> Iterator[_Effect]:
        """What the call wrote where it may not."""
        if any(_geometry(t) != self._forms[i] for i, t in self.copies.items()) or self._memory.data_ptr() != self.at:
            return  # it was resized: what lies here now is the operator's own affair
        after = self._memory.cpu()
        allowed = self._before.clone()
        for _, t, written in self._given:
            if written:
                self._raw_view(allowed, t).copy_(self._raw_view(after, t))
        if torch.equal(allowed, after):
            return
        wrong = (allowed != after).nonzero().view(-1)
        for name, t, written in self._given:
            begin, end = (n + self._shift for n in bytes_of(t))
            here = wrong[(wrong >= begin) & (wrong < end)]
            if not written and here.numel():
                before_t, after_t = self._laid(self._before, t), self._laid(after, t)
                first, last = int(here[0]) - begin, int(here[-1]) - begin
                evidence = f"{name} is not mutated by the schema, and its bytes {first} to {last} changed"
                yield _Effect(OVERWRITTEN, (name,), evidence, diff(name, after_t, before_t))
                wrong = wrong[(wrong < begin) | (wrong >= end)]
        if wrong.numel():
            name, t, _ = next((g for g in self._given if g[2]), self._given[0])
            begin = bytes_of(t)[0] + self._shift
            first, last = int(wrong[0]) - begin, int(wrong[-1]) - begin
            evidence = (
                f"{wrong.numel()} bytes outside the elements of {name} changed, {first} to {last} from its first one "
                f"(the elements end at {bytes_of(t)[1] - bytes_of(t)[0]})"
            )
            around = diff(f"memory around {name}", self._flat(after, t), self._flat(allowed, t))
            yield _Effect("memory outside the argument written", (name,), evidence, around)

    def _laid(self, memory: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        offset = t.storage_offset() + self._shift // t.element_size()
        laid = torch.empty(0, dtype=t.dtype, device=memory.device)
        laid.set_(memory.untyped_storage(), offset, t.size(), t.stride())
        return laid.conj() if t.is_conj() else laid

    def _flat(self, memory: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """All of the memory, as numbers like the tensor's."""
        whole = memory.numel() // t.element_size()
        flat: torch.Tensor = torch.empty(0, dtype=t.dtype).set_(memory.untyped_storage(), 0, (whole,), (1,))
        return flat

    def _raw_view(self, memory: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """The tensor's elements as bytes, so that they are copied as they are."""
        laid = self._laid(memory, t.conj() if t.is_conj() else t)
        size = t.element_size()
        raw = torch.empty(0, dtype=torch.uint8)
        strides = (*[s * size for s in laid.stride()], 1)
        return raw.set_(memory.untyped_storage(), laid.storage_offset() * size, (*laid.size(), size), strides)


def _blocks(plan: OpPlan, pristine: Arguments, device: torch.device, max_bytes: int) -> list[_Block] | None:
    """Guarded copies of all tensors of a call; None where one of them is no plain memory, or they take too much."""
    args, kwargs = pristine
    written = {id(t) for t in written_to(plan, args, kwargs)}
    kept = {id(t) for t in kept_on_cpu(plan, args, kwargs)}
    by_storage: dict[tuple[int, bool], list[tuple[str, torch.Tensor, bool]]] = {}
    n_bytes, seen = 0, set[int]()
    for name, t in _named_tensors(plan, args, kwargs):
        if id(t) in seen:
            continue
        seen.add(id(t))
        if not is_plain(t):
            return None
        begin, end = bytes_of(t)
        n_bytes += end - begin + 2 * GUARD_BYTES
        by_storage.setdefault((storage_key(t), id(t) in kept), []).append((name, t, id(t) in written))
    # The bound counts all of them, since all live at once.
    if 3 * n_bytes > max_bytes:  # before, after and what is allowed
        return None
    return [_Block(given, _CPU if on_cpu else device) for (_, on_cpu), given in by_storage.items()]


def _shared_memory(plan: OpPlan, ran: CallRun, blocks: list[_Block]) -> Iterator[_Effect]:
    """New results that lie in the memory of an input or of each other."""
    results = _new_results(plan, ran.out)
    for label, t in results:
        at = t.data_ptr()
        for block in blocks:
            name = block.name_at(at) if block.at <= at < block.at + block.n_bytes else ""
            if name:
                first = block.offset(name, at)
                begin, end = bytes_of(t)
                evidence = f"{label} lies in the memory of {name} (its bytes {first} to {first + end - begin - 1})"
                yield _Effect("result shares memory with an input", (label, name), evidence)
    for i, (label, t) in enumerate(results):
        for other, u in results[i + 1 :]:
            shared = _common_bytes(t, u)
            if shared:
                evidence = f"{label} and {other} share {shared} bytes of memory"
                yield _Effect("results share memory", (label, other), evidence)


def _not_returned(plan: OpPlan, ran: CallRun) -> Iterator[_Effect]:
    """Arguments that the schema says are written to and returned, in whose place another tensor came back."""
    schema = schema_of(plan.func)
    returned = (ran.out,) if plan.n_returns == 1 else ran.out or ()
    for i, (declared, value) in enumerate(zip(schema.returns, returned, strict=False)):
        info = declared.alias_info
        if info is None or not info.is_write or not isinstance(value, torch.Tensor) or not value.numel():
            continue
        for a in plan.mutated:
            alias = schema.arguments[a.position].alias_info
            if alias is None or not alias.before_set & info.before_set:
                continue
            given = _argument(a, ran)
            if isinstance(given, torch.Tensor) and given.data_ptr() != value.data_ptr():
                evidence = f"the schema says that output {i} is {a.name}, and it lies in other memory"
                yield _Effect("argument not returned", (f"output {i}", a.name), evidence)


def _argument(a: Argument, ran: CallRun) -> Any:
    return ran.kwargs.get(a.name) if a.kwarg_only or a.position >= len(ran.args) else ran.args[a.position]


def _new_results(plan: OpPlan, out: Any) -> list[tuple[str, torch.Tensor]]:
    """Results that the schema gives no alias, with their names; without those that only the backward reads."""
    returned = (out,) if plan.n_returns == 1 else out or ()
    found: list[tuple[str, torch.Tensor]] = []
    for i in plan.fresh:
        if plan.n_returns > 1 and i in plan.uninitialised:
            continue
        value = returned[i]
        several = isinstance(value, (list, tuple))
        for k, t in enumerate(value if several else (value,)):
            if isinstance(t, torch.Tensor) and is_plain(t) and t.numel():
                found.append((f"output {i}[{k}]" if several else f"output {i}", t))
    return found


def _named_tensors(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    names = [a.name for a in schema_of(plan.func).arguments]
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}[{k}]", t) for k, t in enumerate(value) if isinstance(t, torch.Tensor))


def is_plain(t: torch.Tensor) -> bool:
    """Whether a tensor lies in memory that has its values as they are."""
    strided = t.layout is torch.strided and not t.is_nested and not t.is_quantized
    # A negated view shows other values than its bytes, and a symbolic zero has none.
    return strided and not t.is_neg() and not is_zero_tensor(t) and t.device.type not in _WITHOUT_MEMORY


def bytes_of(t: torch.Tensor) -> tuple[int, int]:
    """Where its elements begin and end in its storage, in bytes."""
    begin = int(t.storage_offset()) * t.element_size()
    return begin, begin + span(t.shape, t.stride()) * t.element_size()


def _geometry(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.storage_offset(), t.data_ptr()


def _common_bytes(a: torch.Tensor, b: torch.Tensor) -> int:
    """Bytes that two tensors have in common: interleaved ones have none, though their extents overlap."""
    if storage_key(a) != storage_key(b) or a.element_size() != b.element_size():
        return 0
    (first, end), (first_b, end_b) = bytes_of(a), bytes_of(b)
    if max(first, first_b) >= min(end, end_b):
        return 0
    size, start = a.element_size(), min(first, first_b) // a.element_size()
    taken = torch.zeros(max(end, end_b) // size - start, dtype=torch.bool)
    taken.as_strided(a.shape, a.stride(), a.storage_offset() - start).fill_(True)
    return int(taken.as_strided(b.shape, b.stride(), b.storage_offset() - start).sum()) * size


def _form(a: Any) -> Any:
    if isinstance(a, torch.Tensor):
        return a.dtype, a.shape, a.stride(), a.storage_offset()
    if isinstance(a, (list, tuple)):
        # A fused optimizer passes hundreds of tensors: a few of them stand for the form of the call.
        return len(a), *[_form(v) for v in list(tensors_in(a))[:_RARER]]
    return type(a)


def is_power(n: int, base: int) -> bool:
    """Whether a positive number is a power of another."""
    while n % base == 0:
        n //= base
    return n == 1
