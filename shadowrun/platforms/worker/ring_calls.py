"""This process's part of a ring: calls that wait for their worker while the program goes on.

A call is opened before the program's own run of it, with the inputs of that moment, and closed after it, with the
program's results. What cannot wait in a ring is asked for by itself (`client.Worker.call`), and so is a call whose
answer is `REDO`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.platforms.worker.ring import DIFFERENT, N_SLOTS, REDO, Ring, as_text, copy_bytes
from shadowrun.platforms.worker.wire import Unsendable, decode, encode
from shadowrun.strided import span

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FULL", "RingCall", "RingCalls", "Room"]


class Room:
    """There is no room just now; there will be when waiting calls are released."""


FULL = Room()

# Several calls have to fit, or nothing would run at the same time.
_PART = 4
_ALIGNMENT = 64
_LONGEST_TEXT = 1 << 16
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_NUMBERS = frozenset({bool, int, float})
_STRIDED = torch.strided


@dataclass(slots=True)
class RingCall:
    """A call in a ring.

    Attributes:
        name: Of the operator.
        ring: Where it lies.
        kernel_settings: The program's settings that it ran under.
        limit_s: Seconds that it may take.
        number: In the ring, from 1; 0 before it was closed.
        state: What became of it, as in `ring`; 0 before it was answered.
        ns: What its operator took there, in nanoseconds.
        error: Why there is no answer.

    Its tensors lie in the ring, and are valid until it is released.
    """

    name: str
    ring: Ring
    returns: tuple[int, tuple[int, ...]]
    written: list[tuple[str, int]]
    kernel_settings: tuple[Any, ...]
    limit_s: float
    tree: Any = None
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    private: list[int] = field(default_factory=list)
    results: list[tuple[Any, ...]] = field(default_factory=list)
    shift: int = 0
    begin: int = 0
    end: int = 0
    number: int = 0
    state: int = 0
    ns: int = 0
    error: Exception | None = None

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Its inputs as before it, in the ring."""
        memory = [self.ring.storage(at, n) for _, n, at in self.spans]
        args, kwargs, _ = decode(self.tree, memory, [low for low, *_ in self.spans])
        return args, kwargs

    def own(self) -> list[Any]:
        """The program's results: fresh ones, then written arguments; in the ring."""
        return [_value(self.ring, r, 0) for r in self.results]

    def theirs(self) -> list[Any]:
        """The worker's results, in the same order, where they are equal or different."""
        return [_value(self.ring, r, self.shift if self.state == DIFFERENT else 0) for r in self.results]


class RingCalls:
    """The calls that wait in the ring of one worker process.

    Args:
        ring: The memory.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._n_closed = 0
        # Those that were handed over and not answered, the oldest first.
        self._waiting: deque[RingCall] = deque()
        self._n_kept = 0
        self._opened: RingCall | None = None

    def oldest(self) -> RingCall | None:
        """The oldest call without an answer: the one that the worker runs, if it runs any."""
        waiting = self._waiting
        answered = self.ring.answered
        while waiting and waiting[0].number <= answered:
            call = waiting.popleft()
            call.state, call.ns = self.ring.answer(call.number)
        return waiting[0] if waiting else None

    @property
    def n_waiting(self) -> int:
        """How many had no answer when `oldest` was called last."""
        return len(self._waiting)

    def open(self, call: RingCall, args: tuple[Any, ...], kwargs: dict[str, Any], rng: Any) -> Room | bool:
        """Copy the inputs of a call; `close` or `abandon` comes next.

        Args:
            call: The call.
            args: Positional inputs, on the CPU.
            kwargs: Inputs by name.
            rng: State for the worker's CPU generator, or None.

        Returns:
            Whether it can be in a ring, or `FULL` where it has to wait for room.
        """
        # The program called an operator inside a call (a hook): their memory would be released in another order.
        if self._opened is not None:
            return False
        try:
            tree, regions = encode((args, kwargs, rng))
        except Unsendable:
            return False
        private = _regions_of(tree, call.written)
        if private is None:
            return False
        end, places = 0, []
        for r in regions:
            # Kernels may branch on alignment: memory starts at the same offset in a cache line.
            at = end + (r.address % _ALIGNMENT if r.size else 0)
            places.append(at)
            end = -(-(at + r.size) // _ALIGNMENT) * _ALIGNMENT
        ring = self.ring
        if end > ring.size // _PART:
            return False
        call.begin = ring.head
        at = ring.take(end) if self._n_kept < N_SLOTS else -1
        if at < 0:
            return FULL
        for r, place in zip(regions, places, strict=True):
            if r.size:
                copy_bytes(ring.address + at + place, r.address, r.size)
        call.spans = [(r.low, r.size, at + place) for r, place in zip(regions, places, strict=True)]
        call.tree, call.private = tree, private
        self._opened = call
        return True

    def close(self, call: RingCall, values: Sequence[Any], changed: tuple[Any, ...] | None) -> Room | bool:
        """Hand over a call.

        Args:
            call: Which `open` accepted.
            values: The program's results: fresh ones, then written arguments.
            changed: The program's settings where they have changed since the last call.

        Returns:
            Whether it was handed over; False: it cannot be in a ring, and is to be abandoned.
        """
        ring = self.ring
        forms: list[tuple[int, Any]] = []
        end = 0
        for v in values:
            if type(v) in _NUMBERS:
                forms.append((-1, 0))
                continue
            if type(v) not in _PLAIN or v.layout is not _STRIDED or v.is_conj() or v.is_neg() or not v.is_cpu:
                return False
            n = v.nbytes if v.is_contiguous() else v.element_size() * span(v.shape, v.stride())
            forms.append((end, n))
            end = -(-(end + n) // _ALIGNMENT) * _ALIGNMENT
        if end > ring.size // _PART:
            return False
        at = ring.take(2 * end + _LONGEST_TEXT)
        if at < 0:
            return FULL
        call.shift = end
        for v, (place, n) in zip(values, forms, strict=True):
            if place < 0:
                call.results.append((v,))
                continue
            call.results.append((at + place, n, str(v.dtype)[6:], tuple(v.shape), v.stride()))
            copy_bytes(ring.address + at + place, v.data_ptr(), n)
        head = (call.name, call.returns, call.written, call.tree, call.spans, call.private, call.results, end)
        text = as_text((*head, encode(changed)[0]))
        if len(text) > _LONGEST_TEXT:
            return False
        call.end = ring.give_back(_LONGEST_TEXT - len(text))
        self._n_closed += 1
        call.number = self._n_closed
        self._opened = None
        self._n_kept += 1
        self._waiting.append(call)
        ring.put(call.number, text, at + 2 * end)
        return True

    def abandon(self, call: RingCall) -> None:
        """Forget a call that was opened and not closed; its inputs must have been read."""
        if self._opened is call:
            self._opened = None
            self.ring.take_back(call.begin)

    def release(self, call: RingCall) -> None:
        """Have the memory of a call used again; the calls before it are released already."""
        self._n_kept -= 1
        self.ring.release(call.end)

    def fail(self, error: Exception) -> None:
        """The worker has ended: the call that it ran has no answer, and those after it come again by themselves."""
        first = self.oldest()
        if first is not None:
            first.error = error
        for call in self._waiting:
            call.state = REDO
        self._waiting.clear()


def _regions_of(tree: Any, written: Sequence[tuple[str, int]]) -> list[int] | None:
    """Numbers of the regions that a call writes to; None where a written argument is no tensor."""
    found = []
    _, ((_, args), kwargs, _) = tree
    for name, position in written:
        node = args[position] if position >= 0 else kwargs.get(name)
        if type(node) is not tuple or node[0] != "tensor":
            return None
        found.append(node[1])
    return found


def _value(ring: Ring, result: tuple[Any, ...], shift: int) -> Any:
    if len(result) == 1:
        return result[0]
    at, n, dtype, shape, stride = result
    tree = ("tensor", 0, dtype, shape, stride, 0, False, False)
    return decode(tree, [ring.storage(at + shift, n)], [0])
