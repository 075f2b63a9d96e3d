"""The file of a recording, ``.shadowrec``: an SQLite database with its calls as packed columns, in blocks.

A block is written in one transaction: a process that is killed loses the calls since its last block. Readers check the
schema, each size before memory is taken, and each number that refers to a row. Nothing in the file is run or unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sqlite3
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shadowrun.errors import DataFileError
from shadowrun.limits import head
from shadowrun.recording.model import CALL, N_SAMPLES, NONE, RESULT, Context, Form, Kind, Process, Recording, n_rungs
from shadowrun.store import connect, validation
from shadowrun.store.codec import MAX_RANKS, decode_facts, jsonable
from shadowrun.store.validation import COUNT, SHAPE, TEXT, one_of
from shadowrun.types import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from shadowrun.store.validation import Columns

__all__ = ["SUFFIX", "Block", "Writer", "in_memory", "is_recording", "open_checked", "read", "read_all"]

SUFFIX: Final = ".shadowrec"
APPLICATION_ID: Final = 0x73687263  # "shrc"
SCHEMA_VERSION: Final = 2
SCHEMA: Final = """
create table process (id integer primary key, info text not null);
create table context (
    id integer primary key, op text not null, module text not null, phase text not null, site text not null,
    device text not null, arguments text not null
);
create table form (
    id integer primary key, dtype text not null, shape text not null, stride text not null, layout text not null,
    placement text not null
);
create table kernel (id integer primary key, name text not null);
create table block (
    id integer primary key, process integer not null references process (id), n_calls integer not null,
    n_results integer not null, calls blob not null, results blob not null, inputs blob not null, rungs blob not null,
    samples blob not null, sample_tops blob not null, row_rungs blob not null
);
create table content (digest text primary key, dtype text not null, shape text not null, bytes blob not null);
create table captured (call integer primary key, arguments text not null);
"""

_BLOB = "typeof({0}) = 'blob'"
_NAME = f"{TEXT} and length({{0}}) <= 10000"
"""Reports say a name many times: of megabytes, it would become gigabytes."""
_BLOBS: Final = ("calls", "results", "inputs", "rungs", "samples", "sample_tops", "row_rungs")
_COLUMNS: Columns = {
    "process": {"id": COUNT, "info": TEXT},
    "context": {
        **dict.fromkeys(("op", "module", "site", "device"), _NAME),
        "arguments": TEXT,
        "id": COUNT,
        "phase": one_of(*Phase),
    },
    "form": {"id": COUNT, **dict.fromkeys(("dtype", "layout", "placement"), _NAME), "shape": SHAPE, "stride": SHAPE},
    "kernel": {"id": COUNT, "name": TEXT},
    "block": {
        **dict.fromkeys(("id", "process", "n_calls", "n_results"), COUNT),
        **dict.fromkeys(_BLOBS, _BLOB),
    },
    "content": {"digest": TEXT, "dtype": TEXT, "shape": SHAPE, "bytes": _BLOB},
    "captured": {"call": COUNT, "arguments": TEXT},
}
MAX_CALLS_PER_BLOCK: Final = 1 << 16
_MAX_RESULTS_PER_BLOCK: Final = 1 << 22  # a fused optimizer writes to thousands of tensors in one call
_MIN_UNPACKED_LIMIT: Final = 2**28
_MAX_UNPACKED_RATIO: Final = 64
"""Bytes of unpacked columns for each byte of a block; a recording of nothing but views has 24."""
_MAX_PENDING_BYTES: Final = 1 << 22
_N_PACKED: Final = " + ".join(f"length({column})" for column in _BLOBS)
_MAX_NAMED: Final = 8
_MAX_ELEMENTS: Final = 2**63 - 1
_MAX_FACTS: Final = 10_000
"""Entries of a fingerprint and of options, at all depths: reports go through them for each output."""
_MAX_PATTERN: Final = 1000
"""Characters of a pattern of outputs: the time to compile one may grow with the square of its length."""
_BELOW_2_31: Final = {"calls": ("step", "occurrence"), "results": ("n_rows",)}
_COUNTS_OF_ELEMENTS: Final = ("n_nan", "n_pos_inf", "n_neg_inf", "n_zero", "n_neg_zero", "n_subnormal")
_TIMEOUT_S: Final = 5.0
_WHAT: Final = "recording"
_COMPRESSION: Final = 1  # level 6 takes five times as long for a tenth less


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Consecutive calls of one process. `inputs` and `base` count rows from the first row of the process.

    Attributes:
        calls, results: Of `CALL` and `RESULT`.
        inputs: Row numbers, int64.
        rungs, samples, row_rungs: uint64, see `Recording`.
    """

    calls: npt.NDArray[Any]
    results: npt.NDArray[Any]
    inputs: npt.NDArray[np.int64]
    rungs: npt.NDArray[np.uint64]
    samples: npt.NDArray[np.uint64]
    row_rungs: npt.NDArray[np.uint64]


class Writer:
    """Writes one process's recording. Not safe to use from several threads at once.

    Args:
        path: A recording that exists is replaced.
        process: As known at the start; `finish` replaces it.

    Raises:
        DataFileError: The file cannot be written, or is not a recording.
    """

    def __init__(self, path: Path, process: Process) -> None:
        self.path = path
        self._pending: list[tuple[str, tuple[Any, ...]]] = []
        self._n_pending_bytes = 0
        self._widths: list[int] = []
        _clear(path)
        try:
            # It may hold inputs and results of the program: for this user only.
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as error:
            raise connect.unwritable(path, error, _WHAT) from error
        self._connect("rw")
        try:
            numbers = f"pragma application_id = {APPLICATION_ID}; pragma user_version = {SCHEMA_VERSION};"
            self._connection.executescript("begin;" + numbers + SCHEMA + "commit;")
            self._write(("insert into process values (0, ?)", (_encode(process),)))
        except sqlite3.Error as error:
            raise connect.unwritable(path, error, _WHAT) from error

    def _connect(self, mode: str) -> None:
        address = f"{self.path.absolute().as_uri()}?mode={mode}"
        try:
            self._connection = sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False)
            # As data files: one file to copy, and whole after `kill -9`.
            self._connection.execute("pragma journal_mode = delete")
            self._connection.execute("pragma synchronous = off")
        except sqlite3.Error as error:
            raise connect.unwritable(self.path, error, _WHAT) from error

    def context(self, number: int, context: Context) -> None:
        """Add a context; it is written in one transaction with the next block."""
        self._pending.append(("insert into context values (?, ?, ?, ?, ?, ?, ?)", (number, *map(str, context))))

    def form(self, number: int, form: Form) -> None:
        """Add a form, as a context; forms come in the order of their numbers."""
        self._widths.append(_width(form.dtype))
        row = (number, form.dtype, json.dumps(form.shape), json.dumps(form.stride), form.layout, form.placement)
        self._pending.append(("insert into form values (?, ?, ?, ?, ?, ?)", row))

    def kernel(self, number: int, name: str) -> None:
        """Add a kernel, as a context."""
        self._pending.append(("insert into kernel values (?, ?)", (number, name)))

    def block(self, block: Block) -> None:
        """Write calls."""
        blobs = (zlib.compress(a.tobytes(), _COMPRESSION) for a in (block.calls, block.results, block.inputs))
        # Hashes and mantissas are random bits: compression would take time and save nothing.
        samples, tops = _split(block.samples, block.results, self._widths)
        digests = block.rungs.tobytes(), samples, zlib.compress(tops, _COMPRESSION), block.row_rungs.tobytes()
        row = (len(block.calls), len(block.results), *blobs, *digests)
        self._write(("insert into block values (null, 0, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row))

    def content(self, digest: str, dtype: str, shape: Sequence[int], data: bytes) -> None:
        """Keep the bytes of a tensor, once for each digest; they are written with the next block, or soon if large."""
        row = (digest, dtype, json.dumps(shape), data)
        self._pending.append(("insert or ignore into content values (?, ?, ?, ?)", row))
        self._n_pending_bytes += len(data)
        if self._n_pending_bytes > _MAX_PENDING_BYTES:
            self._write()

    def captured(self, call: int, arguments: str) -> None:
        """Keep the arguments of a call, as JSON that refers to contents by digest; it is written with the next block.

        A process that is killed may leave it without its call.
        """
        self._pending.append(("insert or replace into captured values (?, ?)", (call, arguments)))

    def describe(self, process: Process) -> None:
        """Replace the description of the process."""
        self._write(("update process set info = ? where id = 0", (_encode(process),)))

    def finish(self, process: Process) -> None:
        """Write the final description of the process, and close."""
        self.describe(process)
        self._connection.close()

    def resume(self) -> None:
        """Go on with the recording after `finish`.

        Raises:
            DataFileError: The file is not there any more, or cannot be written.
        """
        self._connect("rw")

    def move(self, path: Path) -> None:
        """Rename the file; between `finish` and `resume`."""
        _clear(path)
        self.path = self.path.rename(path)

    def _write(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        """In one transaction, after what waits for the next block."""
        self._connection.execute("begin immediate")
        try:
            for sql, row in (*self._pending, *statements):
                self._connection.execute(sql, row)
        except BaseException:
            self._connection.execute("rollback")
            raise
        self._connection.execute("commit")
        self._pending.clear()
        self._n_pending_bytes = 0


def in_memory(
    name: str, process: Process, block: Block, contexts: Sequence[Context], forms: Sequence[Form]
) -> Recording:
    """The recording that a `Writer` of one process, one block and no kernels would leave.

    Raises:
        ValueError: A number refers to no row.
    """
    return _joined(name, [process], [[block]], tuple(contexts), tuple(forms), ())


def is_recording(path: Path) -> bool:
    """Whether a file has the header of a recording."""
    start = head(path, 72)
    return start.startswith(b"SQLite format 3\0") and start[68:] == APPLICATION_ID.to_bytes(4, "big")


def read(path: Path) -> Recording:
    """Read a recording; imports no torch.

    Raises:
        DataFileError: The file is missing, not a recording, of a newer schema, or damaged.
    """
    with contextlib.closing(open_checked(path)) as connection:
        try:
            return _read(connection, path.name)
        except (sqlite3.Error, ValueError, UnicodeError, zlib.error, RecursionError) as error:
            raise _damaged(path, error) from error


def open_checked(path: Path) -> sqlite3.Connection:
    """Open a recording to read, after its schema, its pages and the values of its columns were checked.

    Raises:
        DataFileError: The file is missing, not a recording, of a newer schema, or damaged.
    """
    connection = _open(path)
    try:
        validation.check(connection, SCHEMA)
        validation.check_values(connection, _COLUMNS)
    except (sqlite3.Error, ValueError, UnicodeError) as error:
        connection.close()
        raise _damaged(path, error) from error
    return connection


def read_all(paths: Sequence[Path], name: str = "") -> Recording:
    """Read the files of several ranks as one recording, in the order of their ranks.

    Args:
        paths: At least one.
        name: What reports call it; that of the first file by default.

    Raises:
        DataFileError: A file cannot be read, or two are of one rank.
    """
    parts = [read(path) for path in paths]
    if len(parts) == 1:
        return parts[0]
    parts.sort(key=lambda part: [process.rank for process in part.processes])
    # Counted, and named in part: a file may have a hundred thousand processes.
    ranks = Counter(process.rank for part in parts for process in part.processes)
    if twice := sorted(rank for rank, n in ranks.items() if n > 1)[:_MAX_NAMED]:
        raise DataFileError(
            f"{', '.join(part.name for part in parts)} are not the ranks of one run: several are of rank "
            f"{', '.join(map(str, twice))}. Compare recordings of one rank one by one.",
            slug="data-file-ranks",
        )
    return _united(name or parts[0].name, parts)


def _united(name: str, parts: Sequence[Recording]) -> Recording:
    """Several recordings in one; numbers of rows, contexts, forms and kernels count through."""
    calls, results, inputs, processes = [], [], [], []
    n_contexts = n_forms = n_kernels = n_calls = n_results = 0
    for part in parts:
        call, result, given = part.calls.copy(), part.results.copy(), part.inputs.copy()
        call["context"] += n_contexts
        call["kernel"][call["kernel"] != NONE] += n_kernels
        result["form"] += n_forms
        result["base"][result["base"] != NONE] += n_results
        given[given != NONE] += n_results
        processes += [_placed(p, n_calls + p.first_call, p.n_calls) for p in part.processes]
        calls.append(call)
        results.append(result)
        inputs.append(given)
        n_contexts, n_forms = n_contexts + len(part.contexts), n_forms + len(part.forms)
        n_kernels += len(part.kernels)
        n_calls, n_results = n_calls + len(call), n_results + len(result)
    call, result = np.concatenate(calls), np.concatenate(results)
    return Recording(
        name,
        tuple(processes),
        tuple(context for part in parts for context in part.contexts),
        tuple(form for part in parts for form in part.forms),
        tuple(kernel for part in parts for kernel in part.kernels),
        call,
        result,
        _offsets(call["n_results"]),
        np.concatenate(inputs),
        _offsets(call["n_inputs"]),
        np.concatenate([part.rungs for part in parts]),
        _offsets(result["n_rungs"]),
        np.concatenate([part.samples for part in parts]),
        _offsets(result["n_samples"]),
        np.concatenate([part.row_rungs for part in parts]),
        _offsets(result["n_rungs"].astype(np.int64) * result["n_rows"]),
    )


def _open(path: Path) -> sqlite3.Connection:
    if not path.exists():
        raise DataFileError(
            f"There is no recording {str(path)!r}. Make one with `shadowrun record -o FILE script.py`.",
            slug="data-file-missing",
        )
    if not path.is_file() or not is_recording(path):
        raise DataFileError(
            f"{str(path)!r} is not a recording: `shadowrun record -o FILE script.py` writes one.",
            slug="data-file-not-ours",
        )
    try:
        connection, version = validation.connect_and_recover(path, _TIMEOUT_S)
    except (sqlite3.Error, UnicodeError, OSError) as error:
        raise _damaged(path, error) from error
    if version < SCHEMA_VERSION:
        connection.close()
        raise DataFileError(
            f"{str(path)!r} was written by schema {version}; this shadowrun reads {SCHEMA_VERSION}: record it again.",
            slug="data-file-older",
        )
    if version > SCHEMA_VERSION:
        connection.close()
        raise DataFileError(
            f"{str(path)!r} was written by schema {version}; this shadowrun reads up to {SCHEMA_VERSION}: "
            "upgrade shadowrun.",
            slug="data-file-newer",
        )
    return connection


def _read(connection: sqlite3.Connection, name: str) -> Recording:
    processes = [_process(info) for (info,) in connection.execute("select info from process order by id")]
    if not processes:
        raise ValueError("it is of no process")
    contexts = tuple(
        Context(op, module, Phase(phase), site, device, arguments)
        for _, op, module, phase, site, device, arguments in _numbered(connection, "context")
    )
    forms = tuple(
        Form(dtype, tuple(json.loads(shape)), tuple(json.loads(stride)), layout, placement)
        for _, dtype, shape, stride, layout, placement in _numbered(connection, "form")
    )
    kernels = tuple(kernel for _, kernel in _numbered(connection, "kernel"))
    (n_packed,) = connection.execute(f"select coalesce(sum({_N_PACKED}), 0) from block").fetchone()  # noqa: S608 - a constant
    unpack = _Unpacking(max(_MIN_UNPACKED_LIMIT, _MAX_UNPACKED_RATIO * n_packed))
    blocks: list[list[Block]] = [[] for _ in processes]
    widths = [_width(form.dtype) for form in forms]
    for number, *columns in connection.execute(
        f"select process, n_calls, n_results, {', '.join(_BLOBS)} from block order by id"  # noqa: S608 - names of ours
    ):
        if number >= len(processes):
            raise ValueError(f"a block of process {number}, which is missing")
        blocks[number].append(unpack.block(*columns, widths=widths))
    return _joined(name, processes, blocks, contexts, forms, kernels)


def _process(info: str) -> Process:
    process = decode_facts(Process, info)
    if not 0 <= process.rank < MAX_RANKS:
        raise ValueError(f"rank {process.rank}")
    if _n_entries(process.fingerprint) + _n_entries(process.options) > _MAX_FACTS:
        raise ValueError("a fingerprint or options of too many entries")
    outputs = process.options.get("outputs", ())
    if isinstance(outputs, list) and any(len(str(pattern)) > _MAX_PATTERN for pattern in outputs):
        raise ValueError("a pattern of outputs that is too long")
    return process


def _n_entries(value: Any) -> int:
    """Entries at all depths; `decode_facts` has checked the depth."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return len(parts) + sum(map(_n_entries, parts))


def _numbered(connection: sqlite3.Connection, table: str) -> list[tuple[Any, ...]]:
    rows = connection.execute(f"select * from {table} order by id").fetchall()  # noqa: S608 - names of ours
    if [row[0] for row in rows] != list(range(len(rows))):
        raise ValueError(f"the rows of {table} are not numbered from 0")
    return rows


class _Unpacking:
    """Unpacks blocks, up to a number of bytes in all: a kilobyte may stand for a megabyte of zeros.

    Args:
        most: Bytes.
    """

    def __init__(self, most: int) -> None:
        self._left = most

    def block(
        self,
        n_calls: int,
        n_results: int,
        calls: bytes,
        results: bytes,
        inputs: bytes,
        rungs: bytes,
        samples: bytes,
        sample_tops: bytes,
        rows: bytes,
        *,
        widths: Sequence[int],
    ) -> Block:
        if n_calls > MAX_CALLS_PER_BLOCK or n_results > _MAX_RESULTS_PER_BLOCK:
            raise ValueError(f"a block of {n_calls} calls and {n_results} results")
        call = self._inflated(calls, CALL, n_calls)
        result = self._inflated(results, RESULT, n_results)
        n_inputs = int(call["n_inputs"].sum(dtype=np.int64))
        return Block(
            call,
            result,
            self._inflated(inputs, np.dtype("<i8"), n_inputs),
            _plain(rungs, int(result["n_rungs"].sum(dtype=np.int64))),
            self._samples(samples, sample_tops, result, widths),
            _plain(rows, int((result["n_rungs"].astype(np.int64) * result["n_rows"]).sum())),
        )

    def _samples(
        self, lower: bytes, tops: bytes, results: npt.NDArray[Any], widths: Sequence[int]
    ) -> npt.NDArray[np.uint64]:
        """What `_split` took apart."""
        _within(results["form"], 0, len(widths), "a form")
        n = int(results["n_samples"].sum(dtype=np.int64))
        self._take(8 * n)
        of_samples = np.repeat(np.array(widths, np.uint8)[results["form"]], results["n_samples"])
        expected = int(of_samples.sum(dtype=np.int64)) - int(np.count_nonzero(of_samples))
        if len(lower) != expected:
            raise ValueError(f"{len(lower)} bytes of samples where the rows say {expected}")
        columns = np.zeros((n, 8), "u1")
        columns[np.arange(1, 9, dtype=np.uint8) < of_samples[:, None]] = np.frombuffer(lower, "u1")
        there = np.flatnonzero(of_samples)
        columns[there, of_samples[there] - 1] = self._inflated(tops, np.dtype("u1"), len(there))
        return columns.reshape(-1).view("<u8")

    def _take(self, n_bytes: int) -> None:
        """Bounded before memory is taken."""
        self._left -= n_bytes
        if self._left < 0:
            raise ValueError("its columns are far larger than the file")

    def _inflated(self, data: bytes, dtype: np.dtype[Any], n: int) -> npt.NDArray[Any]:
        expected = n * dtype.itemsize
        self._take(expected)
        stream = zlib.decompressobj()
        content = stream.decompress(data, expected + 1)
        if len(content) != expected or stream.unconsumed_tail:
            raise ValueError(f"a block whose columns are not {expected} bytes")
        return np.frombuffer(content, dtype)


def _width(dtype: str) -> int:
    """Bytes of a real number of a dtype."""
    digits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())
    bits = int(digits) if 0 < len(digits) < 4 else 8 if dtype == "bool" else 64
    return min(8, bits // (16 if dtype.startswith("complex") else 8))


def _split(samples: npt.NDArray[np.uint64], results: npt.NDArray[Any], widths: Sequence[int]) -> tuple[bytes, bytes]:
    """Samples at the width of their dtypes, most of which are float32: their lower bytes, and the top byte of each.

    Top bytes have the sign and most of the exponent, and take a third when they are compressed. The rest is random.
    """
    _within(results["form"], 0, len(widths), "a form")
    of_results = np.array(widths, np.int64)[results["form"]]
    ends = np.cumsum(results["n_samples"], dtype=np.int64)
    # Few: nearly all results of a block are of one dtype.
    last = np.append(np.flatnonzero(np.diff(of_results)), len(results) - 1) if len(results) else np.empty(0, np.int64)
    columns = samples.astype("<u8").view("u1").reshape(-1, 8)
    lower, tops, start = [], [], 0
    for end, width in zip(ends[last].tolist(), of_results[last].tolist(), strict=True):
        lower.append(columns[start:end, : max(width - 1, 0)].tobytes())
        tops.append(columns[start:end, max(width - 1, 0) : width].tobytes())
        start = end
    return b"".join(lower), b"".join(tops)


def _plain(data: bytes, n: int) -> npt.NDArray[np.uint64]:
    if len(data) != 8 * n:
        raise ValueError(f"{len(data)} bytes of digests where the rows say {8 * n}")
    return np.frombuffer(data, np.dtype("<u8"))


def _joined(
    name: str,
    processes: Sequence[Process],
    blocks: Sequence[Sequence[Block]],
    contexts: tuple[Context, ...],
    forms: tuple[Form, ...],
    kernels: tuple[str, ...],
) -> Recording:
    """All blocks in one, those of each process together; row numbers count from the start of the recording."""
    # Once and not for each process: a file may have a hundred thousand of both.
    limits = _Limits.of(forms)
    calls, results, inputs, described = [], [], [], []
    n_calls = n_results = 0
    for process, own in zip(processes, blocks, strict=True):
        call, result, given = (
            np.concatenate([np.empty(0, dtype), *(getattr(b, column) for b in own)])
            for column, dtype in (("calls", CALL), ("results", RESULT), ("inputs", np.dtype("<i8")))
        )
        _check(call, result, given, len(contexts), len(kernels), limits)
        result["base"][result["base"] != NONE] += n_results
        given[given != NONE] += n_results
        described.append(_placed(process, n_calls, len(call)))
        calls.append(call)
        results.append(result)
        inputs.append(given)
        n_calls, n_results = n_calls + len(call), n_results + len(result)
    call, result = np.concatenate([np.empty(0, CALL), *calls]), np.concatenate([np.empty(0, RESULT), *results])
    every = [b for own in blocks for b in own]
    return Recording(
        name,
        tuple(described),
        contexts,
        forms,
        kernels,
        call,
        result,
        _offsets(call["n_results"]),
        np.concatenate([np.empty(0, np.int64), *inputs]),
        _offsets(call["n_inputs"]),
        np.concatenate([np.empty(0, np.uint64), *(b.rungs for b in every)]),
        _offsets(result["n_rungs"]),
        np.concatenate([np.empty(0, np.uint64), *(b.samples for b in every)]),
        _offsets(result["n_samples"]),
        np.concatenate([np.empty(0, np.uint64), *(b.row_rungs for b in every)]),
        _offsets(result["n_rungs"].astype(np.int64) * result["n_rows"]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Limits:
    """What a tensor of each form has at most: (n_forms,) each.

    Attributes:
        rungs: Rungs of its ladder.
        rows: Ladders of rows.
        samples: Sampled numbers.
        elements: Real numbers.
    """

    rungs: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    elements: npt.NDArray[np.int64]

    @classmethod
    def of(cls, forms: Sequence[Form]) -> _Limits:
        """Of forms.

        Raises:
            ValueError: A size is negative, or no tensor has so many elements.
        """
        rows = []
        for form in forms:
            if min(form.shape, default=0) < 0 or form.n_elements > _MAX_ELEMENTS:
                raise ValueError("a shape that no tensor has")
            n_parts = 2 if form.dtype.startswith("complex") else 1
            n_samples = n_parts * min(N_SAMPLES, form.n_elements)
            # A layout whose shape is not recorded has no values either.
            # Leading dimensions of size 1 are skipped where rows are digested.
            n_rows = next((size for size in form.shape if size != 1), 1) if form.shape else 0
            n_elements = min(_MAX_ELEMENTS, n_parts * form.n_elements)
            rows.append((n_rungs(form.dtype), min(n_rows, 2**31), n_samples, n_elements))
        columns = np.array(rows, np.int64).reshape(-1, 4)
        return cls(columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3])


def _check(
    calls: npt.NDArray[Any],
    results: npt.NDArray[Any],
    inputs: npt.NDArray[np.int64],
    n_contexts: int,
    n_kernels: int,
    limits: _Limits,
) -> None:
    """Refuse numbers that refer to no row, and more rungs, rows, samples and elements than forms have."""
    _within(calls["context"], 0, n_contexts, "a context")
    _within(calls["kernel"], NONE, n_kernels, "a kernel")
    for array, table in ((calls, "calls"), (results, "results")):
        for column in _BELOW_2_31[table]:
            _within(array[column], 0, 2**31 - 1, f"{column} of {table}")
    _within(results["form"], 0, len(limits.rungs), "a form")
    _within(results["kind"], 0, len(Kind), "a kind")
    form = results["form"]
    if not ((results["n_rungs"] == 0) | (results["n_rungs"] == limits.rungs[form])).all():
        raise ValueError("a ladder of a length that its dtype does not have")
    _within(results["n_rows"], 0, np.where(results["n_rungs"] > 0, limits.rows[form], 0) + 1, "a row")
    _within(results["n_samples"], 0, limits.samples[form] + 1, "a sample")
    for column in _COUNTS_OF_ELEMENTS:
        # Not `< n + 1`, which may be beyond 63 bits.
        if not ((results[column] >= 0) & (results[column] <= limits.elements[form])).all():
            raise ValueError(f"{column} of more elements than there are")
    if int(calls["n_results"].sum(dtype=np.int64)) != len(results):
        raise ValueError("results that belong to no call")
    # A base comes before its view, so that to follow bases ends.
    _within(results["base"], NONE, np.arange(len(results)), "the base of a view")
    _within(inputs, NONE, len(results), "an input")


def _within(column: npt.NDArray[Any], least: int, end: Any, what: str) -> None:
    if len(column) and not ((column >= least) & (column < end)).all():
        raise ValueError(f"{what} that there is not")


def _offsets(sizes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def _encode(process: Process) -> str:
    return json.dumps(jsonable(dataclasses.asdict(process)), allow_nan=False)


def _placed(process: Process, first_call: int, n_calls: int) -> Process:
    return dataclasses.replace(process, first_call=first_call, n_calls=n_calls)


def _clear(path: Path) -> None:
    """Remove a former recording; refuse to replace anything else."""
    connect.check_folder(path, _WHAT)
    if path.is_symlink() or (path.exists() and not path.is_file()) or not _is_ours(path):
        raise DataFileError(
            f"Cannot write the recording {str(path)!r}: it exists and is no recording. Choose another name.",
            slug="data-file-unwritable",
        )
    try:
        connect.remove(path)
    except OSError as error:
        raise connect.unwritable(path, error, _WHAT) from error


def _is_ours(path: Path) -> bool:
    """Whether nothing can be lost with a file: it is a recording, empty, or not there."""
    return not path.exists() or not path.stat().st_size or is_recording(path)


def _damaged(path: Path, error: Exception) -> DataFileError:
    return DataFileError(
        f"The recording {str(path)!r} is damaged, or was not written by shadowrun ({error}). Record it again.",
        slug="data-file-corrupt",
    )
