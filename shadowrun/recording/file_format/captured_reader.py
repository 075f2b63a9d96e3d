"""Reads the inputs of calls that a recording holds. The file may come from anyone: nothing in it is run or unpickled.

A row of ``captured`` has a call's number and a JSON object:

* ``memories``: digests of contents, one for each storage;
* ``tensors``: ``[memory, offset, dtype, shape, stride, bits, device]`` each: number of the memory (-1 of an empty
  tensor), offset and strides in elements, ``conj`` and ``neg`` for lazy conjugation and negation, type of its device;
* ``args`` and ``kwargs``: the arguments, ``{"tensor": 0}`` for a tensor (`store.captured_inputs`).

Sizes are checked before memory is taken, contents against their digests. Importing this module imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from shadowrun.errors import DataFileError
from shadowrun.recording.file_format.recording_file import open_checked
from shadowrun.store.captured_inputs import check_number, decode_value
from shadowrun.strided import span

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

__all__ = ["CapturedCall", "CapturedFile", "TooLarge"]

# The file may come from anyone: what is read of it is bounded before memory is allocated (docs/security.md).
_MAX_TEXT: Final = 1 << 24
_MAX_MEMORIES: Final = 20_000
_MAX_DIMENSIONS: Final = 64
_MAX_NUMBER: Final = 1 << 62
_INTEGERS: Final = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS: Final = ("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32")
_DTYPES: Final = {*_INTEGERS, *_FLOATS, "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"}


class TooLarge(Exception):  # noqa: N818 - a reason, caught inside
    """The inputs of a call would take more memory than is allowed."""


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """What was kept of a call.

    Attributes:
        args, kwargs: Its arguments before it ran, on the CPU. An argument that is a device is the CPU.
        on_cpu: The tensors among them that lay on the CPU when it was recorded.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    on_cpu: tuple[Any, ...]


class CapturedFile:
    """The captured inputs in the file of a recording; use it in a ``with`` block.

    Args:
        path: The recording.

    Raises:
        DataFileError: The file is missing, not a recording, of a newer schema, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Schema and value types are checked for the whole file; what follows checks what one call refers to.
        self._connection = open_checked(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def calls(self) -> frozenset[int]:
        """Numbers of the calls whose inputs are kept; of a process that was killed, the last may not be recorded."""
        return frozenset(call for (call,) in self._connection.execute("select call from captured"))

    def load(self, call: int, max_bytes: int) -> CapturedCall | None:
        """Read the inputs of a call.

        Args:
            call: Number in the recording.
            max_bytes: What they may take, and what a tensor would take without its repeated elements.

        Returns:
            The inputs; None where they were not kept.

        Raises:
            DataFileError: They are damaged.
            TooLarge: They take more.
        """
        found = self._parts(call)
        if found is None:
            return None
        try:
            tensors = self._tensors(found, max_bytes)
            args, kwargs = _of_type(found["args"], list), _of_type(found["kwargs"], dict)
            check_number([args, list(kwargs.values())])
            lay_on_cpu = tuple(t for t, row in zip(tensors, found["tensors"], strict=True) if row[-1] == "cpu")
            return CapturedCall(
                tuple(decode_value(a, tensors) for a in args),
                {name: decode_value(a, tensors) for name, a in kwargs.items()},
                lay_on_cpu,
            )
        except (TooLarge, MemoryError):
            raise
        except Exception as error:  # torch raises exceptions of many types for hostile sizes
            raise self._damaged(call, error) from error

    def _parts(self, call: int) -> dict[str, Any] | None:
        try:
            row = self._connection.execute(
                # The length is compared in SQL, so that a huge text never reaches Python. It is that of a blob: SQLite
                # counts the characters of a text up to the first NUL.
                "select case when length(cast(arguments as blob)) <= ? then arguments end from captured where call = ?",
                (_MAX_TEXT, call),
            ).fetchone()
            if row is None:
                return None
            return dict(_of_type(json.loads(row[0] or ""), dict))
        except (sqlite3.Error, ValueError, RecursionError) as error:
            raise self._damaged(call, error) from error

    def _tensors(self, found: dict[str, Any], max_bytes: int) -> list[Any]:
        digests, rows = found["memories"], found["tensors"]
        if type(digests) is not list or type(rows) is not list or max(len(digests), len(rows)) > _MAX_MEMORIES:
            raise ValueError("too many tensors")
        # Sizes first, contents later: the limit holds before any memory is taken.
        sizes = [self._size(digest) for digest in digests]
        if sum(sizes) > max_bytes:
            raise TooLarge(f"{sum(sizes):,} bytes")
        checked = [_checked(row, sizes, max_bytes) for row in rows]
        memories = [self._memory(digest) for digest in digests]
        return [_tensor(row, memories) for row in checked]

    def _size(self, digest: Any) -> int:
        if type(digest) is not str:
            raise ValueError("a digest")
        row = self._connection.execute("select length(bytes) from content where digest = ?", (digest,)).fetchone()
        if row is None:
            raise ValueError(f"no content {digest[:16]}")
        return int(row[0])

    def _memory(self, digest: str) -> Any:
        """A content in memory of its own, aligned as torch aligns it: uint8, (n,)."""
        import torch

        (data,) = self._connection.execute("select bytes from content where digest = ?", (digest,)).fetchone()
        # Contents are shared by all calls with this digest, so a wrong one would be wrong in each of them.
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError(f"the content {digest[:16]} is another")
        # Memory of torch: bytes of Python are aligned in another way, and kernels may branch on alignment.
        memory = torch.empty(len(data), dtype=torch.uint8, device="cpu")
        if data:
            memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return memory

    def _damaged(self, call: int, error: Exception) -> DataFileError:
        text = str(error)[:200] or type(error).__name__
        return DataFileError(
            f"The captured inputs of call {call} in {str(self._path)!r} cannot be read ({text}). Record it again.",
            slug="captured-inputs",
        )


def _of_type(value: Any, kind: type) -> Any:
    # Not `isinstance`: True would pass for 1.
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__}")
    return value


def _checked(row: Any, sizes: list[int], max_bytes: int) -> tuple[Any, ...]:
    """A tensor's row, if the tensor lies in its memory: only numbers are looked at."""
    import torch

    memory, offset, name, shape, stride, bits, device = row
    numbers = [memory, offset, *shape, *stride]
    if not all(type(n) is int and -1 <= n < _MAX_NUMBER for n in numbers) or min([*shape, *stride, offset, 0]) < 0:
        raise ValueError("a size")
    if type(shape) is not list or type(stride) is not list or not len(shape) == len(stride) <= _MAX_DIMENSIONS:
        raise ValueError("a shape")
    if name not in _DTYPES or type(device) is not str or bits not in ("", "conj", "neg", "conjneg"):
        raise ValueError(f"no tensor of {str(name)[:40]}")
    dtype = getattr(torch, name)
    n_elements = math.prod(size for size in shape if size)
    # An empty tensor reads no memory, wherever its offset points.
    is_empty = 0 in shape
    if not is_empty:
        end = offset + span(shape, stride)
        if not 0 <= memory < len(sizes) or end * dtype.itemsize > sizes[memory]:
            raise ValueError("a tensor outside of its memory")
    # An expanded tensor has few bytes, and its copies and results may have any number; so may those of an empty one.
    if n_elements * dtype.itemsize > max_bytes:
        raise TooLarge(f"a tensor of {n_elements:,} elements")
    return -1 if is_empty else memory, offset, dtype, shape, stride, bits


def _tensor(row: tuple[Any, ...], memories: list[Any]) -> Any:
    import torch

    from shadowrun.torch_private import negated_view

    memory, offset, dtype, shape, stride, bits = row
    if memory < 0:
        return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    laid = torch.empty(0, dtype=dtype, device="cpu")
    laid.set_(memories[memory].untyped_storage(), offset, shape, stride)
    laid = laid.conj() if "conj" in bits and dtype.is_complex else laid
    return negated_view(laid) if "neg" in bits else laid
