"""Rows of a recording on their way to its file: contexts and forms are numbered, rows packed into blocks."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from shadowrun.recording.model import CALL, NONE, RESULT, Context, Form, Kind
from shadowrun.recording.recording_file import Block

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shadowrun.intercept.attribution import Origin
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.recording.digests import Packed
    from shadowrun.recording.recording_file import Writer

__all__ = ["BlockBuffer"]

_MAX_CALLS: Final = 2000
_MAX_RESULTS: Final = 20_000  # a fused optimizer writes to thousands of tensors in one call
_FLUSH_S: Final = 1.0
_LOOK_AT_CLOCK: Final = 63
_MAX_KNOWN: Final = 50_000
"""A program with a scalar that changes at each step makes new contexts for ever: after so many, they are forgotten."""

_CALL: Final = struct.Struct("<iiiiHH")
_RESULT: Final = struct.Struct("<iBBBBiq")
"""The columns of a result before those of its digest."""
_NO_STATISTICS: Final = struct.pack("<6q3d", 0, 0, 0, 0, 0, 0, *[float("nan")] * 3)
assert (_CALL.size, _RESULT.size + len(_NO_STATISTICS)) == (CALL.itemsize, RESULT.itemsize)
_MAX_INPUTS: Final = 0xFFFF
_MAX_POSITION: Final = 255
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_MAX_TEXT: Final = 20_000


class BlockBuffer:
    """Collects rows and writes them as blocks. Not safe to use from several threads at once.

    Args:
        writer: What blocks go to.
        before_block: Called before each block.

    Attributes:
        writer: What blocks go to.
        n_calls, n_results: Rows so far, of all blocks.
    """

    def __init__(self, writer: Writer, before_block: Callable[[], None]) -> None:
        self.writer = writer
        self._before_block = before_block
        self.n_calls = self.n_results = 0
        self._contexts: dict[tuple[Any, ...], int] = {}
        self._n_contexts = 0
        self._forms: dict[tuple[Any, ...], int] = {}
        self._kernels: dict[str, int] = {}
        self._n_forms = 0
        self._flushed_at = time.monotonic()
        self._clear()

    def _clear(self) -> None:
        self._n_block_calls = self._n_block_results = 0
        self._calls, self._results = bytearray(), bytearray()
        self._inputs: list[int] = []
        self._rungs, self._samples, self._row_rungs = bytearray(), bytearray(), bytearray()
        self._mark = (0, 0, 0, 0, 0)

    def begin_call(self) -> None:
        """The rows from here on belong to the next call."""
        self._mark = (
            *(self._n_block_results, len(self._inputs)),
            *(len(self._rungs), len(self._samples), len(self._row_rungs)),
        )

    def drop_call(self) -> None:
        """Remove what was added since `begin_call`, of a call that could not be recorded to its end."""
        n_results, n_inputs, n_rungs, n_samples, n_row_rungs = self._mark
        if self._n_block_results < n_results:  # its block has been written
            return
        self.n_results -= self._n_block_results - n_results
        self._n_block_results = n_results
        del (
            self._results[n_results * RESULT.itemsize :],
            self._inputs[n_inputs:],
            self._calls[self._n_block_calls * _CALL.size :],
        )
        del self._rungs[n_rungs:], self._samples[n_samples:], self._row_rungs[n_row_rungs:]

    def context(self, plan: OpPlan, origin: Origin, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Number of what a call has in common with others."""
        key: list[Any] = [plan.index, device, *origin]
        for a in args:
            if type(a) not in _PLAIN:
                _add_to_key(key, a)
        for name, a in kwargs.items():
            if type(a) not in _PLAIN:
                key.append(name)
                _add_to_key(key, a)
        known = self._contexts.get(tuple(key))
        if known is not None:
            return known
        module, phase, site = origin
        number, self._n_contexts = self._n_contexts, self._n_contexts + 1
        self.writer.context(number, Context(plan.name, module, phase, site, device, _arguments(args, kwargs)))
        if len(self._contexts) >= _MAX_KNOWN:
            self._contexts.clear()
        self._contexts[tuple(key)] = number
        return number

    def form(self, t: torch.Tensor) -> int:
        """Number of a tensor's form."""
        is_strided = t.layout is torch.strided and not t.is_nested
        key = (t.dtype, t.shape, t.stride()) if is_strided else (t.dtype, t.dim(), str(t.layout), t.is_nested)
        known = self._forms.get(key)
        if known is not None:
            return known
        number, self._n_forms = self._n_forms, self._n_forms + 1
        self.writer.form(number, _form(t, is_strided=is_strided))
        if len(self._forms) >= _MAX_KNOWN:
            self._forms.clear()
        self._forms[key] = number
        return number

    def kernel(self, name: str) -> int:
        """Number of a kernel's name; NONE for an empty one."""
        if not name:
            return NONE
        number = self._kernels.get(name)
        if number is None:
            number = self._kernels[name] = len(self._kernels)
            self.writer.kernel(number, name)
        return number

    def add_result(self, kind: Kind, position: int, form: int, digest: Packed | None, base: int = NONE) -> int:
        """Add a tensor of the next call.

        Returns:
            Its row.
        """
        position = min(position, _MAX_POSITION)
        if digest is None:
            self._results += _RESULT.pack(form, kind, position, 0, 0, 0, base) + _NO_STATISTICS
        else:
            statistics, rungs, samples, row_rungs = digest
            n_rungs = len(rungs) // 8
            n_rows = len(row_rungs) // len(rungs)
            self._results += _RESULT.pack(form, kind, position, len(samples) // 8, n_rungs, n_rows, base) + statistics
            self._rungs += rungs
            self._samples += samples
            self._row_rungs += row_rungs
        row_number = self.n_results
        self.n_results = row_number + 1
        self._n_block_results += 1
        return row_number

    def add_call(
        self, step: int, context: int, occurrence: int, n_results: int, inputs: Sequence[int], kernel: int = NONE
    ) -> int:
        """Add a call, after its results.

        Returns:
            Its number.
        """
        inputs = inputs[:_MAX_INPUTS]
        self._calls += _CALL.pack(step, context, occurrence, kernel, n_results, len(inputs))
        self._inputs += inputs
        number, self.n_calls = self.n_calls, self.n_calls + 1
        self._n_block_calls += 1
        is_full = self._n_block_calls >= _MAX_CALLS or self._n_block_results >= _MAX_RESULTS
        if is_full or (not number & _LOOK_AT_CLOCK and time.monotonic() - self._flushed_at > _FLUSH_S):
            self.flush()
        return number

    def flush(self) -> None:
        """Write what waits."""
        self._flushed_at = time.monotonic()
        if not self._n_block_calls:
            return
        block = Block(
            np.frombuffer(self._calls, CALL),
            np.frombuffer(self._results, RESULT),
            np.array(self._inputs, np.int64),
            *(np.frombuffer(a, np.uint64) for a in (self._rungs, self._samples, self._row_rungs)),
        )
        # First: a block that cannot be written is lost, and the next must not contain it again.
        self._clear()
        self._before_block()
        self.writer.block(block)


def _add_to_key(key: list[Any], a: Any) -> None:
    kind = type(a)
    if kind is list or kind is tuple:
        key.append(len(a))
        for v in a:
            if type(v) not in _PLAIN:
                _add_to_key(key, v)
    elif kind is float:
        # Zeros of both signs are equal and NaNs are not, and each gives other results.
        key.append(a.hex())
    elif kind is complex:
        key.append(repr(a))
    elif isinstance(a, torch.Tensor):
        key.append(kind)
    elif isinstance(a, torch.Generator):
        key.append(torch.Generator)
    else:
        key.append(kind)  # 1 and True are equal
        key.append(a)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What is no tensor, as JSON: ``[{"tensor": null}, 1, {"alpha": 2}]``."""
    found: list[Any] = [_plain(a) for a in args]
    if kwargs:
        found.append({name: _plain(a) for name, a in kwargs.items()})
    text = json.dumps(found)
    return text if len(text) <= _MAX_TEXT else json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest()})


def _plain(a: Any) -> Any:
    if a is None or isinstance(a, (bool, int, str)):
        return a
    if isinstance(a, float):
        # JSON has no infinity and no NaN.
        return a if a - a == 0 else str(a)
    if isinstance(a, (list, tuple)):
        return [_plain(v) for v in a]
    if isinstance(a, torch.Tensor):
        return {"tensor": None}
    return "Generator" if isinstance(a, torch.Generator) else str(a)


def _form(t: torch.Tensor, *, is_strided: bool) -> Form:
    dtype = str(t.dtype).removeprefix("torch.")
    if is_strided:
        return Form(dtype, tuple(t.shape), tuple(t.stride()))
    if t.is_nested:
        return Form(dtype, (), (), "nested")
    return Form(dtype, tuple(t.shape), (), str(t.layout).removeprefix("torch."))
