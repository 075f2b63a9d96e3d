"""Keeps inputs of calls in a recording, so that another machine can run the same calls (`shadowrun replay`).

Kept is memory: of each storage that the tensors of a call lie on, the bytes from the first to the last that they use,
once for each content, under its SHA-256. So tensors keep their strides, their alignment and what they share, and a
weight that many calls read is stored once. It is read before the call runs, since the call may write to it.
`captured_reader` has the way back, and the form of the JSON.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sqlite3
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from shadowrun.intercept import torchapi
from shadowrun.intercept.plan import Action, OpPlan
from shadowrun.platforms.backends import FUNCTIONALIZING
from shadowrun.recording.digests.number_formats import NUMBER_FORMATS
from shadowrun.replay.call import draws_random
from shadowrun.store.captured_inputs import NotStorable, encode_value
from shadowrun.store.validation import MAX_VALUE_BYTES
from shadowrun.strided import span
from shadowrun.torch_private import is_zero_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shadowrun.intercept.attribution import Origin
    from shadowrun.recording.file_format.recording_writer import Writer

__all__ = ["ALIGNMENT", "CALLS_EACH", "MAX_TENSORS", "CapturedArguments", "CapturedInputs"]

CALLS_EACH: Final = 2
"""Calls of each signature (place in the program, forms of the tensors, other arguments) whose inputs are kept."""
ALIGNMENT: Final = 64
"""Kernels treat the first elements of unaligned memory apart: memory is kept from a multiple of so many bytes on."""
MAX_TENSORS: Final = 10_000
# One call may take this part of what all may, and repeated signatures only what the first calls leave of it.
_SHARE: Final = 2
# A program with changing shapes makes new signatures for ever.
_MAX_SIGNATURES: Final = 50_000
_MAX_REASONS: Final = 64
# Bytes: what a reader accepts as one value.
_MAX_CONTENT: Final = MAX_VALUE_BYTES - 4096
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_COMPLEX: Final = frozenset({torch.complex32, torch.complex64, torch.complex128})
_WITHOUT_VALUES: Final = frozenset({Action.VIEW, Action.EMPTY, Action.PASS})
_ITEM: Final = "aten::_local_scalar_dense"


class CapturedArguments(NamedTuple):
    """Inputs that are in the file, of a call that has not run yet: its row, as parts of a JSON object."""

    parts: dict[str, Any]


class _Memory(NamedTuple):
    """Bytes of a storage, from `begin` up to `end`."""

    tensor: torch.Tensor
    begin: int
    end: int


class CapturedInputs:
    """Keeps inputs of calls. Not safe to use from several threads at once.

    Args:
        budget: Bytes of inputs in all; with 0, none are kept.

    Attributes:
        writer: The file; None before the recording starts.
        takes_inputs: Whether inputs are wanted, and there is room for some.
        n_calls: Calls whose inputs are kept.
        n_bytes: What they take.
        not_kept: Calls that would have been the first of their kind, by the reason why their inputs are not kept.
    """

    def __init__(self, budget: int) -> None:
        self.writer: Writer | None = None
        self.takes_inputs = budget > 0
        self.n_calls = self.n_bytes = 0
        self.not_kept: Counter[str] = Counter()
        self._budget = budget
        self._known: set[str] = set()
        self._n_seen: dict[tuple[Any, ...], int] = {}

    def keep_inputs(
        self, plan: OpPlan, origin: Origin, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CapturedArguments | None:
        """Keep the inputs of a call that is about to run; never raises.

        Returns:
            What `after` wants; None where nothing was kept.
        """
        if plan.action in _WITHOUT_VALUES or plan.name == _ITEM or draws_random(plan, args, kwargs):
            return None
        try:
            signature = _signature(plan, origin, args, kwargs)
            n = self._n_seen.get(signature, 0)
            if n >= CALLS_EACH or len(self._n_seen) >= _MAX_SIGNATURES:
                return None
            if n and self.n_bytes > self._budget // _SHARE:  # what is left is for signatures that are still to come
                return None
            self._n_seen[signature] = n + 1
            return torchapi.hidden_from_program(self._take, args, kwargs)  # type: ignore[no-any-return]
        except NotStorable as reason:
            self._count(str(reason))
        except Exception as error:  # an unknown kind of tensor: must not raise
            self._count(f"{plan.name}: {type(error).__name__}")
            # The disk is full: the recording itself will say so.
            self.takes_inputs &= not isinstance(error, (sqlite3.Error, OSError))
        return None

    def _count(self, reason: str) -> None:
        known = reason in self.not_kept or len(self.not_kept) < _MAX_REASONS
        self.not_kept[reason if known else "other reasons"] += 1

    def call_recorded(self, number: int, captured: CapturedArguments) -> None:
        """A call whose inputs were kept was recorded.

        Args:
            number: Its number.
            captured: From `before`.
        """
        assert self.writer is not None
        self.writer.captured(number, json.dumps(captured.parts))
        self.n_calls += 1

    def _take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedArguments:
        tensors: list[Any] = []
        parts = {
            "args": [encode_value(_on_cpu(a), tensors) for a in args],
            "kwargs": {name: encode_value(_on_cpu(a), tensors) for name, a in kwargs.items()},
        }
        memories = _memories(tensors)
        if sum(m.end - m.begin for m in memories.values()) > self._budget:
            raise NotStorable("inputs of more bytes than all may take")
        digests, n_bytes = self._write(memories, min(self._budget - self.n_bytes, self._budget // _SHARE))
        self.n_bytes += n_bytes
        self.takes_inputs = self.n_bytes < self._budget
        return CapturedArguments(parts | _described(tensors, memories, digests))

    def _write(self, memories: dict[int, _Memory], most: int) -> tuple[list[str], int]:
        """Write contents that are not in the file; returns all their digests, and the bytes written."""
        assert self.writer is not None
        found = [_content(m) for m in memories.values()]
        digests = [hashlib.sha256(data).hexdigest() for data in found]
        new = {d: data for d, data in zip(digests, found, strict=True) if d not in self._known}
        n_bytes = sum(len(data) for data in new.values())
        if n_bytes > most:
            raise NotStorable("no room left for inputs of this size")
        for digest, data in new.items():
            self.writer.content(digest, "uint8", (len(data),), data)
            self._known.add(digest)
        return digests, n_bytes


def _signature(plan: OpPlan, origin: Origin, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return plan.index, origin, tuple(map(_form, args)), tuple((name, _form(a)) for name, a in kwargs.items())


def _form(a: Any) -> Any:
    if isinstance(a, torch.Tensor):
        if a.is_nested or a.layout is not torch.strided:
            return a.dtype, a.dim(), a.layout, a.is_nested
        return a.dtype, a.shape, a.stride()
    if isinstance(a, (list, tuple)):
        return tuple(map(_form, a))
    return type(a), repr(a)


def _on_cpu(value: Any) -> Any:
    """A device becomes the CPU: the machine that reads it may have another one."""
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _memories(tensors: Iterable[torch.Tensor]) -> dict[int, _Memory]:
    """What tensors occupy, by the identity of their storages.

    Raises:
        NotStorable: One has no memory of its own that could be read, or they are too many or too large.
    """
    found: dict[int, _Memory] = {}
    for number, t in enumerate(tensors):
        if number >= MAX_TENSORS:
            raise NotStorable("too many tensors")
        _check_kind(t)
        if not t.numel():
            continue
        key = torchapi.storage_key(t)
        begin, end = _extent(t)
        known = found.get(key)
        if known is not None:
            begin, end = min(begin, known.begin), max(end, known.end)
        if end - begin > _MAX_CONTENT:
            raise NotStorable(f"a tensor of more than {_MAX_CONTENT:,} bytes")
        found[key] = _Memory(t, begin, end)
    return found


def _check_kind(t: torch.Tensor) -> None:
    # A nested tensor may be of a subclass, and says more by its kind.
    kinds = ((t.is_nested, "a nested tensor"), (t.layout is not torch.strided, f"a tensor of layout {t.layout}"),
             (t.is_quantized, "a quantized tensor"), (t.is_meta, "a meta tensor"),
             (type(t) not in _PLAIN, f"a tensor subclass ({type(t).__name__[:100]})"))  # fmt: skip
    if kind := next((name for found, name in kinds if found), ""):
        raise NotStorable(kind)
    known = t.dtype in NUMBER_FORMATS or t.dtype in _COMPLEX
    if is_zero_tensor(t) or t.device.type in FUNCTIONALIZING or not known:
        raise NotStorable(f"a tensor of {t.dtype} on {t.device.type}")


def _extent(t: torch.Tensor) -> tuple[int, int]:
    """Bytes of the storage that a tensor uses, from an aligned one on."""
    begin = int(t.storage_offset()) * t.element_size()
    return begin - begin % ALIGNMENT, begin + span(t.shape, t.stride()) * t.element_size()


def _content(memory: _Memory) -> bytes:
    t, begin, end = memory
    if t.is_cpu:
        return ctypes.string_at(t.untyped_storage().data_ptr() + begin, end - begin)
    raw = torch.empty(0, dtype=torch.uint8, device=t.device)
    raw.set_(t.untyped_storage(), begin, (end - begin,), (1,))
    data: bytes = raw.cpu().numpy().tobytes()
    return data


def _described(tensors: list[torch.Tensor], memories: dict[int, _Memory], digests: list[str]) -> dict[str, Any]:
    """The tensors as JSON; see `captured_reader`."""
    numbers = {key: number for number, key in enumerate(memories)}
    return {"memories": digests, "tensors": list(_rows(tensors, memories, numbers))}


def _rows(tensors: list[torch.Tensor], memories: dict[int, _Memory], numbers: dict[int, int]) -> Iterator[list[Any]]:
    for t in tensors:
        number, offset = -1, 0
        if t.numel():
            key = torchapi.storage_key(t)
            number = numbers[key]
            # No remainder: every element size divides ALIGNMENT.
            offset = int(t.storage_offset()) - memories[key].begin // t.element_size()
        dtype = str(t.dtype).removeprefix("torch.")
        bits = f"{'conj' * t.is_conj()}{'neg' * t.is_neg()}"
        yield [number, offset, dtype, list(t.shape), list(t.stride()), bits, t.device.type]
