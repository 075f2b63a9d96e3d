"""Digests of tensors on an accelerator, many at a time: values are copied into one memory there and digested together.

A copy is one launch. The memory is digested when it is full or digests are asked for, with as many launches for
hundreds of tensors as for one; they are fetched with one host sync. Streams keep the order: a copy lies in the stream
of the call that made the values, before whatever overwrites them. Each stream has a memory of its own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import warnings
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from shadowrun.errors import ShadowrunWarning
from shadowrun.platforms.torchplatform import cuda_stream_reader
from shadowrun.recording.digests.digest_operators import (
    GROUP,
    ROW,
    STATISTICS_BYTES,
    Found,
    Packed,
    Parts,
    digest_parts,
    pack_digests,
)
from shadowrun.recording.digests.number_formats import NUMBER_FORMATS, Encoding, NumberFormat
from shadowrun.recording.model import sample_positions
from shadowrun.strided import contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "MEMORY_BYTES",
    "PendingDigest",
    "PendingDigests",
    "digest_method",
    "is_capturing",
    "packed",
    "positions_of_samples",
    "probe_again",
]

Ints = npt.NDArray[np.int64]
_NOTHING: Final[Ints] = np.zeros(0, np.int64)

MEMORY_BYTES: Final = 16 << 20
"""Of a stream: greater tensors are copied in pieces."""
# Each has memory of its own on the host; a program that makes streams as it goes would fill it.
_MAX_STREAMS: Final = 4
# A program with changing shapes has a new kind in each call.
_MAX_KINDS: Final = 10_000
_cuda_stream: Final = cuda_stream_reader()
# Each tensor begins at a multiple of so many bytes, which is a row of any dtype.
_ALIGNMENT: Final = 8 * ROW
_PROBED_ROWS: Final = 40
_WITH_TRITON: Final = frozenset({"cuda", "xpu"})  # ROCm is "cuda"


class _Kind:
    """What tensors of one form have in common; looked up once, since there is little time in a call."""

    __slots__ = ("empty", "form", "n", "n_bytes", "n_rows", "positions", "row_size", "strides")

    def __init__(self, t: torch.Tensor, n_rows: int, n_leading: int, n_parts: int) -> None:
        self.form, self.n, self.n_rows = NUMBER_FORMATS[t.dtype], t.numel(), n_rows
        self.row_size = self.n // n_leading if n_leading else 0
        self.n_bytes = self.n * t.itemsize
        self.positions = positions_of_samples(self.n, n_parts)
        self.strides = t.stride() if t.is_contiguous() else tuple(contiguous_strides(t.shape))
        ladder = 8 * (self.form.mantissa + 1)
        self.empty = bytes(STATISTICS_BYTES), bytes(ladder), bytes(8 * len(self.positions)), bytes(ladder * n_rows)


class PendingDigest:
    """A digest that is not known yet.

    Attributes:
        kind: Of the tensor.
        packed: The digest, once it is known.
    """

    __slots__ = ("_settle", "kind", "packed")

    def __init__(self, kind: _Kind, settle: Callable[[], None]) -> None:
        self.kind = kind
        self.packed: Packed | None = None
        self._settle = settle

    def get(self) -> Packed:
        """Wait for it.

        Raises:
            RuntimeError: The device failed.
        """
        if self.packed is None:
            self._settle()
        if self.packed is None:
            raise RuntimeError("a device failed while tensors on it were digested")
        return self.packed

    @property
    def empty(self) -> Packed:
        """Zeros of the lengths that the digest will have."""
        return self.kind.empty


def packed(digest: Packed | PendingDigest | None) -> Packed | None:
    """A digest, waited for if need be."""
    return digest.get() if isinstance(digest, PendingDigest) else digest


# One launch a tensor and one host sync a block, where each tensor alone took about 50 launches and a sync.
class PendingDigests:
    """Collects digests. Not safe to use from several threads at once.

    Args:
        memory_bytes: Of each stream's memory.
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._memory_bytes = max(memory_bytes, _ALIGNMENT)
        self._memories: dict[Any, _Memory] = {}
        self._kinds: dict[Any, _Kind] = {}

    def add(self, t: torch.Tensor, n_ladders: int, n_leading: int, n_parts: int) -> PendingDigest:
        """Have a tensor digested that lies on an accelerator and has no lazy parts.

        Args:
            t: Real numbers; at least one.
            n_ladders: Indices of the leading dimension that get a ladder each.
            n_leading: Its size.
            n_parts: Of which a number consists: 2 for complex ones, whose parts are in the last dimension.
        """
        key = t.dtype, t.shape, t.stride(), n_ladders, n_parts
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            kind = self._kinds[key] = _Kind(t, n_ladders, n_leading, n_parts)
        return self._memory(t).add(t, kind, self.settle)

    def add_plain(self, t: torch.Tensor) -> PendingDigest | None:
        """The same for a tensor of a form that `add` has met, without rows; None for others."""
        kind = self._kinds.get((t.dtype, t.shape, t.stride(), 0, 1))
        return None if kind is None or t.is_neg() else self._memory(t).add(t, kind, self.settle)

    def _memory(self, t: torch.Tensor) -> _Memory:
        """Memory of the current stream of a tensor's device."""
        # By its handle: an object for the stream is slow to make.
        handle = _cuda_stream(t.get_device()) if _cuda_stream is not None and t.is_cuda else _stream(t.device)
        key = t.device, handle
        memory = self._memories.get(key)
        if memory is None:
            if len(self._memories) >= _MAX_STREAMS:
                self.settle()
                self._memories.clear()
            memory = self._memories[key] = _Memory(t.device, _stream(t.device), self._memory_bytes)
        return memory

    def settle(self) -> None:
        """Wait for all digests, with one host sync for each stream."""
        for memory in self._memories.values():
            memory.settle()

    def clear(self) -> None:
        """Forget what waits, and free memory."""
        self._memories.clear()


def is_capturing() -> bool:
    """Whether the current stream of CUDA's is being captured: nothing may be launched or waited for."""
    try:
        is_running: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return is_running and torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # the default stream may not even be asked while another thread captures
        return True


def _stream(device: torch.device) -> Any:
    """A device's current stream; None where it has one only."""
    module = torch.cuda if device.type == "cuda" else getattr(torch, device.type, None)
    if hasattr(module, "stream") and hasattr(module, "current_stream"):
        return module.current_stream(device)  # type: ignore[union-attr]
    return None


class _Waiting:
    """Tensors of one dtype whose values lie in a memory or have been digested.

    Attributes:
        awaited: Their digests.
        n_ladders: That these have.
        parts: Of those in the memory: start, size, first element in its tensor, ladder, and positions of sampled
            elements in the tensor.
        digested: Ladder and size of each part that has been digested.
        found: What was found of them.
    """

    __slots__ = ("awaited", "digested", "found", "n_ladders", "parts")

    def __init__(self) -> None:
        self.awaited: list[PendingDigest] = []
        self.n_ladders = 0
        self.parts: list[tuple[int, int, int, int, Ints]] = []
        self.digested: list[tuple[int, int]] = []
        self.found: list[Found] = []


class _Memory:
    """Memory of a stream, and what waits of it."""

    def __init__(self, device: torch.device, stream: Any, n_bytes: int) -> None:
        self._device, self._stream = device, stream
        with torch.inference_mode(False):
            raw = torch.empty(-(-n_bytes // _ALIGNMENT) * _ALIGNMENT, dtype=torch.int8, device=device)
            self._views = {ints: raw.view(ints) for ints in (torch.int8, torch.int16, torch.int32, torch.int64)}
        self._n_bytes = raw.numel()
        self._used = 0
        self._waiting: dict[torch.dtype, _Waiting] = {}

    def add(self, t: torch.Tensor, kind: _Kind, settle: Callable[[], None]) -> PendingDigest:
        form, dtype = kind.form, t.dtype
        waiting = self._waiting.get(dtype)
        if waiting is None:
            waiting = self._waiting[dtype] = _Waiting()
        # As integers: any bit pattern is copied as it is.
        bits = t if dtype is form.ints else t.view(form.ints)
        if kind.n_bytes <= self._n_bytes:
            start = self._take(kind.n_bytes) * 8 // form.width
            self._views[form.ints].as_strided(t.shape, kind.strides, start).copy_(bits)
            waiting.parts.append((start, kind.n, 0, waiting.n_ladders, kind.positions))
        else:
            self._copy_pieces(waiting, form, bits, waiting.n_ladders, kind.positions)
        if kind.n_rows:
            self._copy_rows(waiting, form, bits[: kind.n_rows], waiting.n_ladders + 1)
        waiting.n_ladders += 1 + kind.n_rows
        awaited = PendingDigest(kind, settle)
        waiting.awaited.append(awaited)
        return awaited

    def _copy_pieces(
        self, waiting: _Waiting, form: NumberFormat, bits: torch.Tensor, ladder: int, positions: Ints
    ) -> None:
        """Copy numbers, in the order of a contiguous tensor, in pieces that have room."""
        n, size = bits.numel(), form.width // 8
        flat, at_once = bits.reshape(-1), self._n_bytes // size
        for first in range(0, n, at_once):
            end = min(n, first + at_once)
            start = self._take((end - first) * size) // size
            self._views[form.ints][start : start + end - first].copy_(flat[first:end])
            here = positions[(positions >= first) & (positions < end)]
            waiting.parts.append((start, end - first, first, ladder, here))

    def _copy_rows(self, waiting: _Waiting, form: NumberFormat, bits: torch.Tensor, ladder: int) -> None:
        """Copy each row to a place of its own."""
        n_rows, size = len(bits), form.width // 8
        length = bits.numel() // n_rows
        apart = -(-length // ROW) * ROW
        if n_rows * apart * size > self._n_bytes:
            for k in range(n_rows):
                self._copy_pieces(waiting, form, bits[k], ladder + k, _NOTHING)
            return
        start = self._take(n_rows * apart * size) // size
        self._views[form.ints].as_strided((n_rows, length), (apart, 1), start).copy_(bits.reshape(n_rows, length))
        waiting.parts += [(start + k * apart, length, 0, ladder + k, _NOTHING) for k in range(n_rows)]

    def _take(self, n_bytes: int) -> int:
        """Where so many bytes are free."""
        if self._used + n_bytes > self._n_bytes:
            self._digest()
        at = self._used
        self._used = at + -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        return at

    def _digest(self) -> None:
        """Have all that was copied digested, after which the memory is free: the stream keeps the order."""
        with self._in_stream():
            for dtype, waiting in self._waiting.items():
                if not waiting.parts:
                    continue
                *columns, ladders = np.array([part[:4] for part in waiting.parts], np.int64).T
                samples = np.concatenate(
                    [positions + (start - first) for start, _, first, _, positions in waiting.parts]
                )
                way, form = digest_method(self._device.type, dtype), NUMBER_FORMATS[dtype]
                waiting.found.append(way(self._views[form.ints], dtype, form, Parts(*columns), samples))
                waiting.digested += zip(ladders.tolist(), columns[1].tolist(), strict=True)
                waiting.parts = []
        self._used = 0

    @contextlib.contextmanager
    def _in_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with getattr(torch, self._device.type).stream(self._stream):
            if is_capturing():
                raise RuntimeError("the stream of tensors that wait for their digests is being captured into a graph")
            yield

    def settle(self) -> None:
        """Digest what waits, and fetch all."""
        if not self._waiting:
            return
        waiting = self._waiting
        try:
            self._digest()
            there = [t.reshape(-1) for w in waiting.values() for found in w.found for t in found if not t.is_cpu]
            with self._in_stream():
                # One transfer: each would wait for all that the device has to do.
                fetched = torch.cat(there).cpu() if there else torch.zeros(0, dtype=torch.int64, device="cpu")
        finally:
            # What failed once is not tried again: its digests stay unknown.
            self._waiting, self._used = {}, 0
        numbers = iter(torch.split(fetched, [len(t) for t in there]) if there else ())
        for dtype, w in waiting.items():
            found = [Found(*((t if t.is_cpu else next(numbers).view(t.shape)).numpy() for t in one)) for one in w.found]
            _finish(NUMBER_FORMATS[dtype], w, found)


@functools.lru_cache(maxsize=1024)
def positions_of_samples(n: int, n_parts: int) -> Ints:
    """Positions of the sampled numbers; a complex number has two parts."""
    positions = sample_positions(n // n_parts)
    if n_parts > 1:
        positions = (n_parts * positions[:, None] + np.arange(n_parts)).reshape(-1)
    return positions


def _finish(form: NumberFormat, waiting: _Waiting, found: Sequence[Found]) -> None:
    """Put together what was found, and make digests of it."""
    ladders, part_sizes = np.array(waiting.digested, np.int64).T
    # A pass has sums up to the end of each part. Parts of one ladder come after each other.
    sums = np.concatenate([np.diff(one.sums, axis=0, prepend=0) for one in found])
    sums = np.add.reduceat(sums, np.flatnonzero(np.diff(ladders, prepend=-1)), axis=0)
    of_groups = np.repeat(ladders, -(-part_sizes // GROUP))
    first, ends = np.flatnonzero(np.diff(of_groups, prepend=-1)), np.concatenate([one.ends for one in found])
    squares = np.add.reduceat(np.ascontiguousarray(ends[:, 2:]).view(np.float64), first, axis=0)
    low, high = np.minimum.reduceat(ends[:, 0], first), np.maximum.reduceat(ends[:, 1], first)
    kinds = [a.kind for a in waiting.awaited]
    sizes = np.array([size for kind in kinds for size in (kind.n, *(kind.row_size,) * kind.n_rows)])
    planes = np.ascontiguousarray(sums[:, : form.width]).view(np.uint64)
    statistics, rungs = pack_digests(form, sizes, planes, sums[:, form.width :], low, high, squares)
    samples = np.concatenate([one.samples for one in found]).view(np.uint64) & np.uint64((1 << form.width) - 1)
    of_ladders, of_samples, ladder_bytes, ladder, sample = rungs.tobytes(), samples.tobytes(), rungs.shape[1] * 8, 0, 0
    for awaited, kind in zip(waiting.awaited, kinds, strict=True):
        first_row = (ladder + 1) * ladder_bytes
        after, next_sample = first_row + kind.n_rows * ladder_bytes, sample + len(kind.empty[2])
        awaited.packed = (
            statistics[ladder],
            of_ladders[first_row - ladder_bytes : first_row],
            of_samples[sample:next_sample],
            of_ladders[first_row:after],
        )
        ladder, sample = ladder + 1 + kind.n_rows, next_sample


# -- how a device digests -----------------------------------------------------------------------------


class _DigestMethod(Protocol):
    def __call__(
        self, memory: torch.Tensor, dtype: torch.dtype, form: NumberFormat, parts: Parts, samples: Ints, /
    ) -> Found: ...


_warned: set[str] = set()


def _warn_of_kernel(reason: str) -> None:
    """Once: the recording is the same, and slower."""
    if not _warned:
        _warned.add(reason)
        # The program may have warnings raised as errors.
        with contextlib.suppress(ShadowrunWarning):
            warnings.warn(
                f"shadowrun digests tensors by operators on integers, which is slower than its Triton kernel: {reason}",
                ShadowrunWarning,
                stacklevel=2,
            )


def _by_kernel(device_type: str) -> _DigestMethod:
    if device_type not in _WITH_TRITON or importlib.util.find_spec("triton") is None:
        return digest_parts
    # Only there: the import takes half a second.
    from shadowrun.recording.digests.digest_kernel import digest_parts_by_kernel

    return digest_parts_by_kernel


def _on_host(memory: torch.Tensor, dtype: torch.dtype, form: NumberFormat, parts: Parts, samples: Ints) -> Found:
    return digest_parts(memory.cpu(), dtype, form, parts, samples)


@functools.cache
def _probe(dtype: torch.dtype) -> tuple[torch.Tensor, Parts, Ints, Found]:
    """Known numbers, and what the CPU finds of them."""
    form = NUMBER_FORMATS[dtype]
    least = -(1 << (form.width - 1))
    bits = np.random.default_rng(0).integers(least, -least, _PROBED_ROWS * ROW, f"i{form.width // 8}")
    if dtype is torch.bool:
        bits &= 1
    memory = torch.from_numpy(bits)
    parts = Parts(*np.array([(0, 5, 0), (ROW, (_PROBED_ROWS - 1) * ROW - 3, 2 * ROW)]).T)
    samples = np.array([1, 3, 700])
    return memory, parts, samples, digest_parts(memory, dtype, form, parts, samples)


@functools.cache
def digest_method(device_type: str, dtype: torch.dtype) -> _DigestMethod:
    """The fastest way that digests numbers of a dtype on a device as the CPU does; the last one copies them there."""
    form, (memory, parts, samples, wanted) = NUMBER_FORMATS[dtype], _probe(dtype)
    for find in (_by_kernel, lambda _: digest_parts):
        # A device lacks an operator or a dtype, say; Triton, a compiler.
        try:
            way = find(device_type)
            if _agree(way(memory.to(device_type), dtype, form, parts, samples), wanted):
                return way
            reason = "other digests than on the CPU"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:300]
        if find is _by_kernel and device_type in _WITH_TRITON and form.encoding is not Encoding.CODES:
            _warn_of_kernel(reason)
    return _on_host


def probe_again() -> None:
    """Ask each device anew whether it digests as the CPU does: a flaw may have come since, as the simulated ones do."""
    digest_method.cache_clear()


def _agree(found: Found, wanted: Found) -> bool:
    sums, ends, samples = (t.cpu() for t in found)
    squares, expected = (e[:, 2:].contiguous().view(torch.float64) for e in (ends, wanted.ends))
    exact = (sums, wanted.sums), (samples, wanted.samples), (ends[:, :2], wanted.ends[:, :2])
    return all(torch.equal(f, w) for f, w in exact) and torch.allclose(squares, expected, rtol=1e-9, atol=0)
