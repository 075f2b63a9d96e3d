"""Rows of a recording on their way to its file: contexts and forms are numbered, rows packed into blocks."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from shadowrun.native import core
from shadowrun.native import tensors as native
from shadowrun.recording.digests.pending_digests import PendingDigest, is_capturing
from shadowrun.recording.file_format.recording_writer import Block
from shadowrun.recording.model import CALL, NONE, RESULT, Context, Form, Kind
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shadowrun.intercept.attribution import Origin
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.recording.digests.tensor_digest import Packed
    from shadowrun.recording.file_format.recording_writer import Writer

__all__ = ["LOOK_EVERY", "BlockBuffer", "LastRow", "placement"]

_MAX_CALLS: Final = 2048
_MAX_RESULTS: Final = 20_000  # a fused optimizer writes to thousands of tensors in one call
_FLUSH_S: Final = 1.0  # what a killed process loses
LOOK_EVERY: Final = 16
"""After so many calls the clock is looked at; `native/record_call.c` has it too."""
# A program with a scalar that changes at each step makes new contexts for ever: after so many, they are forgotten.
_MAX_KNOWN: Final = 50_000

_CALL: Final = struct.Struct("<iiiiHH")
# The columns of a result before those of its digest.
_RESULT: Final = struct.Struct("<iBBBBiq")
# Where a result begins.
_FORM_AND_KIND: Final = struct.Struct("<iB")
_NO_STATISTICS: Final = struct.pack("<6q3d", 0, 0, 0, 0, 0, 0, *[float("nan")] * 3)
assert (_CALL.size, _RESULT.size + len(_NO_STATISTICS)) == (CALL.itemsize, RESULT.itemsize)
_ROW_BYTES: Final = RESULT.itemsize
_MAX_INPUTS: Final = 0xFFFF
_MAX_POSITION: Final = 255
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_MAX_TEXT: Final = 20_000


class LastRow(NamedTuple):
    """What step outputs need to know of a row of results; see `RESULT`."""

    number: int
    kind: int
    n_samples: int
    n_rungs: int


class BlockBuffer:
    """Collects rows and writes them as blocks. Not safe to use from several threads at once.

    Args:
        writer: What blocks go to.
        before_block: Called before each block.

    Attributes:
        writer: What blocks go to.
        calls, inputs, results, rungs, samples, row_rungs: Columns of the block that is being filled: always the same
            objects, since `native/record_call.c` adds to them too.
        contexts: Numbers of contexts by their keys.
        native_rows: Adds rows in C, and has to know where a block begins; None without the C extension.
        n_holding: While it is not 0, no block is written: rows may still get a placement.
    """

    def __init__(self, writer: Writer, before_block: Callable[[], None]) -> None:
        self.writer = writer
        self._before_block = before_block
        self.contexts: dict[tuple[Any, ...], int] = {}
        self.n_holding = 0
        self._n_contexts = 0
        self._forms: dict[tuple[Any, ...], int] = {}
        self._kernels: dict[str, int] = {}
        self._n_forms = 0
        self._flushed_at = time.monotonic()
        self.calls, self.inputs, self.results = bytearray(), bytearray(), bytearray()
        self.rungs, self.samples, self.row_rungs = bytearray(), bytearray(), bytearray()
        self._columns = self.calls, self.inputs, self.results, self.rungs, self.samples, self.row_rungs
        self._of_digests = self.results, self.rungs, self.samples, self.row_rungs
        self._awaited: list[Any] = []
        self.native_rows: Any = None
        self._first_row = self._first_call = 0
        self._written_last = b""
        self.begin_call()

    @property
    def n_calls(self) -> int:
        """Calls so far, of all blocks."""
        return self._first_call + len(self.calls) // _CALL.size

    @property
    def n_results(self) -> int:
        """Rows of results so far, of all blocks: the number of the next one."""
        return self._first_row + len(self.results) // _ROW_BYTES

    def begin_call(self) -> None:
        """The rows from here on belong to the next call."""
        # Only lengths: to drop a call is rare, and a copy of the columns for each call is not.
        self._mark = tuple(map(len, self._columns))

    def drop_call(self) -> None:
        """Remove what was added since `begin_call`, of a call that could not be recorded to its end."""
        if len(self.calls) < self._mark[0]:  # its block has been written
            return
        for column, size in zip(self._columns, self._mark, strict=True):
            del column[size:]
        self.forget_dropped()

    def forget_dropped(self) -> None:
        """Rows at the end of the columns were removed: forget digests that they wait for."""
        while self._awaited and self._awaited[-1][1] >= len(self.results):
            self._awaited.pop()

    def last_call(self) -> list[LastRow]:
        """The rows of the last call, whether it waits or is written."""
        packed = self._rows_of_last_call() if self.calls else self._written_last
        return list(_unpacked(packed, self.n_results - len(packed) // _ROW_BYTES))

    def waiting_calls(self) -> Iterator[list[LastRow]]:
        """The rows of each call that is not written yet, the last one first."""
        end = len(self.results)
        for at in range(len(self.calls) - _CALL.size, -1, -_CALL.size):  # one by one: few are asked for
            begin = end - _CALL.unpack_from(self.calls, at)[4] * _ROW_BYTES
            yield list(_unpacked(bytes(self.results[begin:end]), self._first_row + begin // _ROW_BYTES))
            end = begin

    def _rows_of_last_call(self) -> bytes:
        n_results = _CALL.unpack_from(self.calls, len(self.calls) - _CALL.size)[4]
        return bytes(self.results[len(self.results) - n_results * _ROW_BYTES :])

    def context(self, plan: OpPlan, origin: Origin, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Number of what a call has in common with others."""
        key = _key(plan.index, device, origin, args, kwargs)
        known = self.contexts.get(key)
        if known is not None:
            return known
        module, phase, site = origin
        number, self._n_contexts = self._n_contexts, self._n_contexts + 1
        self.writer.context(number, Context(plan.name, module, phase, site, device, _arguments(plan, args, kwargs)))
        # Forgetting costs a second row with the same text; without a bound, a program that makes a new string for
        # each call would grow without end.
        if len(self.contexts) >= _MAX_KNOWN:
            self.contexts.clear()
        self.contexts[key] = number
        return number

    def form(self, t: torch.Tensor) -> int:
        """Number of a tensor's form."""
        is_strided = t.layout is torch.strided and not t.is_nested
        # A nested or sparse tensor has sizes that differ from call to call, each of which would be a new form.
        key = (t.dtype, t.shape, t.stride()) if is_strided else (t.dtype, t.dim(), str(t.layout), t.is_nested)
        known = self._forms.get(key)
        return self._new_form(key, _form(t, is_strided=is_strided)) if known is None else known

    def form_key(self, number: int) -> tuple[torch.dtype, torch.Size, tuple[int, ...]] | None:
        """dtype, shape and strides of a form; None for other layouts, placements, and what was forgotten."""
        # The latest first: it is asked for after the call that made it.
        key = next((key for key in reversed(self._forms) if self._forms[key] == number), ())
        return (key[0], key[1], key[2]) if len(key) == 3 else None

    def _new_form(self, key: tuple[Any, ...], form: Form) -> int:
        number, self._n_forms = self._n_forms, self._n_forms + 1
        self.writer.form(number, form)
        if len(self._forms) >= _MAX_KNOWN:
            self._forms.clear()
        self._forms[key] = number
        return number

    def place(self, row: int, t: torch.Tensor, text: str) -> Kind | None:
        """Give the row of a local tensor its mesh and placements, unless it has any.

        Returns:
            Its kind; None if it is not the tensor's own row, or is written already.
        """
        at = (row - self._first_row) * _ROW_BYTES
        plain = self.form(t)
        if at < 0 or _FORM_AND_KIND.unpack_from(self.results, at)[0] != plain:
            return None
        kind = Kind(_FORM_AND_KIND.unpack_from(self.results, at)[1])
        key = (plain, text)
        known = self._forms.get(key)
        placed = self._new_form(key, _form(t, is_strided=True)._replace(placement=text)) if known is None else known
        _FORM_AND_KIND.pack_into(self.results, at, placed, kind)
        return kind

    def kernel(self, name: str) -> int:
        """Number of a kernel's name; NONE for an empty one."""
        if not name:
            return NONE
        number = self._kernels.get(name)
        if number is None:
            number = self._kernels[name] = len(self._kernels)
            self.writer.kernel(number, name)
        return number

    def add_result(
        self, kind: Kind, position: int, form: int, digest: Packed | PendingDigest | None, base: int = NONE
    ) -> int:
        """Add a tensor of the next call; a digest that is awaited is filled in before its block is written.

        Returns:
            Its row.
        """
        position = min(position, _MAX_POSITION)
        row_number = self.n_results
        if digest is None:
            self.results += _RESULT.pack(form, kind, position, 0, 0, 0, base) + _NO_STATISTICS
        else:
            if isinstance(digest, PendingDigest):
                digest = self.reserve(digest)
            statistics, rungs, samples, row_rungs = digest
            n_rungs = len(rungs) // 8
            # All ladders of a tensor have the same rungs, so their number follows and is not stored.
            n_rows = len(row_rungs) // len(rungs)
            self.results += _RESULT.pack(form, kind, position, len(samples) // 8, n_rungs, n_rows, base) + statistics
            self.rungs += rungs
            self.samples += samples
            self.row_rungs += row_rungs
        return row_number

    def reserve(self, digest: PendingDigest) -> Packed:
        """Note that the next row is a digest's that is awaited; returns what stands there until it is known."""
        self._awaited.append((digest, *map(len, self._of_digests)))
        return digest.empty

    def _fill_in(self) -> None:
        """Wait for digests."""
        awaited, self._awaited = self._awaited, []
        for digest, *places in awaited:
            # Statistics are the last columns of a row.
            places[0] += _RESULT.size
            for column, at, part in zip(self._of_digests, places, digest.get(), strict=True):
                column[at : at + len(part)] = part

    def add_call(
        self, step: int, context: int, occurrence: int, n_results: int, inputs: Sequence[int], kernel: int = NONE
    ) -> None:
        """Add a call, after its results."""
        # The column has 16 bits.
        inputs = inputs[:_MAX_INPUTS]
        self.calls += _CALL.pack(step, context, occurrence, kernel, n_results, len(inputs))
        self.inputs += struct.pack(f"<{len(inputs)}q", *inputs)

    @property
    def flush_may_be_due(self) -> bool:
        """Whether `flush_if_due` is due: after some calls, or many results."""
        return not len(self.calls) // _CALL.size % LOOK_EVERY or len(self.results) >= _MAX_RESULTS * _ROW_BYTES

    def flush_if_due(self) -> None:
        """Write a block that is full, or that has waited long."""
        if self.n_holding or (self._awaited and is_capturing()):
            return
        is_full = len(self.calls) >= _MAX_CALLS * _CALL.size or len(self.results) >= _MAX_RESULTS * _ROW_BYTES
        if is_full or time.monotonic() - self._flushed_at > _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        self._flushed_at = time.monotonic()
        if not self.calls:
            return
        self._written_last = self._rows_of_last_call()
        # Before the columns are cleared: the properties count what is in them.
        self._first_row, self._first_call = self.n_results, self.n_calls
        if self.native_rows is not None:
            self.native_rows.first_row = self._first_row
        try:
            self._fill_in()
            block = Block(
                # Copies, since a bytearray that numpy looks at cannot be cleared.
                np.frombuffer(bytes(self.calls), CALL),
                np.frombuffer(bytes(self.results), RESULT),
                np.frombuffer(bytes(self.inputs), np.int64),
                *(np.frombuffer(bytes(a), np.uint64) for a in (self.rungs, self.samples, self.row_rungs)),
            )
        finally:
            # A block that cannot be written is lost, and the next must not contain it again.
            for column in self._columns:
                column.clear()
        self._before_block()
        self.writer.block(block)


def _unpacked(rows: bytes, first: int) -> Iterator[LastRow]:
    for k in range(len(rows) // _ROW_BYTES):
        _, kind, _, n_samples, n_rungs, _, _ = _RESULT.unpack_from(rows, k * _ROW_BYTES)
        yield LastRow(first + k, kind, n_samples, n_rungs)


def _python_key(
    index: int, device: str, origin: Origin, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """What calls of one context have in common; `native/contexts.c` has the same."""
    key: list[Any] = [index, device, *origin]
    for a in args:
        _add_to_key(key, a)
    for name, a in kwargs.items():
        key.append(name)
        _add_to_key(key, a)
    return tuple(key)


def _native_key(
    index: int, device: str, origin: Origin, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    assert core is not None
    return core.context_key(index, device, origin, args, kwargs, True)  # type: ignore[no-any-return]


_key = _python_key if native.context_key is None else _native_key


def _add_to_key(key: list[Any], a: Any) -> None:
    kind = type(a)
    if kind is list or kind is tuple:
        key.append(len(a))
        for v in a:
            _add_to_key(key, v)
    elif kind is float:
        # Zeros of both signs are equal and NaNs are not, and each gives other results.
        key.append(a.hex())
    elif kind is complex:
        key.append(repr(a))
    elif kind in _PLAIN or isinstance(a, torch.Tensor):
        # Only that it is a tensor: with its form or identity, each call would be a context of its own.
        key.append(torch.Tensor)
    elif isinstance(a, torch.Generator):
        key.append(torch.Generator)
    else:
        key.append(kind)  # 1 and True are equal
        key.append(a)


def _arguments(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What is no tensor and no default, by the names of the schema, as JSON: ``{"dim": 1, "alpha": 2}``."""
    schema = {a.name: a for a in schema_of(plan.func).arguments}
    given = dict(zip(schema, args, strict=False)) | kwargs
    found = {
        name: _plain(value)
        for name, value in given.items()
        if not isinstance(value, torch.Tensor) and not _is_default(schema.get(name), value)
    }
    text = json.dumps(found)
    # Of longer ones, what a comparison needs: whether they are equal.
    return text if len(text) <= _MAX_TEXT else json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest()})


def _is_default(argument: Any, value: Any) -> bool:
    if argument is None or not argument.has_default_value():
        return False
    # By text: 0.0 and -0.0 are equal, and True and 1.
    return json.dumps(_plain(argument.default_value)) == json.dumps(_plain(value))


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


def placement(t: Any) -> str:
    """Mesh and placements of a DTensor: ``dp=2, tp=4: Replicate(), Shard(dim=0)``."""
    mesh = t.device_mesh
    names = mesh.mesh_dim_names or [str(number) for number in range(mesh.ndim)]
    sizes = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
    return f"{sizes}: {', '.join(map(repr, t.placements))}"


def _form(t: torch.Tensor, *, is_strided: bool) -> Form:
    dtype = str(t.dtype).removeprefix("torch.")
    if is_strided:
        return Form(dtype, tuple(t.shape), tuple(t.stride()))
    if t.is_nested:
        return Form(dtype, (), (), "nested")
    return Form(dtype, tuple(t.shape), (), str(t.layout).removeprefix("torch."))
