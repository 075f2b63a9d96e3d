"""Reads recordings, ``.shadowrec``, which anybody may have written; `recording_writer` has the format.

Checked are the schema, each size before memory is taken, and each number that refers to a row. Nothing in the file is
run or unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shadowrun.errors import DataFileError
from shadowrun.recording.file_format.block_reader import Limits, Unpacking, check_rows
from shadowrun.recording.file_format.recording_writer import (
    SCHEMA,
    SCHEMA_VERSION,
    Block,
    is_recording,
)
from shadowrun.recording.model import (
    CALL,
    NONE,
    OUTPUTS_BYTES,
    RESULT,
    Context,
    Form,
    Process,
    Recording,
    output_name,
    width_of,
)
from shadowrun.store import validation
from shadowrun.store.codec import MAX_RANKS, decode_facts
from shadowrun.store.validation import COUNT, SHAPE, TEXT, one_of, text_up_to
from shadowrun.types import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from shadowrun.store.validation import Columns

__all__ = ["in_memory", "open_checked", "read", "read_all"]

_BLOB = "typeof({0}) = 'blob'"
# Reports say a name many times: of megabytes, it would become gigabytes.
_NAME = text_up_to(10_000)
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
    "output": {"result": COUNT, "digest": TEXT},
}
_MIN_UNPACKED_LIMIT: Final = 2**28
# Bytes of unpacked columns for each byte of a block; a recording of nothing but views has 24.
_MAX_UNPACKED_RATIO: Final = 64
_N_PACKED: Final = " + ".join(f"length({column})" for column in _BLOBS)
_MAX_NAMED: Final = 8
# Entries of a fingerprint and of options, at all depths: reports go through them for each output.
_MAX_FACTS: Final = 10_000
# Characters of a pattern of outputs: the time to compile one may grow with the square of its length.
_MAX_PATTERN: Final = 1000
_TIMEOUT_S: Final = 5.0


def in_memory(
    name: str, process: Process, block: Block, contexts: Sequence[Context], forms: Sequence[Form]
) -> Recording:
    """The recording that a `Writer` of one process, one block and no kernels would leave.

    Raises:
        ValueError: A number refers to no row.
    """
    return _joined(name, [process], [[block]], tuple(contexts), tuple(forms), ())


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
    outputs: dict[int, bytes] = {}
    n_contexts = n_forms = n_kernels = n_calls = n_results = 0
    for part in parts:
        call, result, given = part.calls.copy(), part.results.copy(), part.inputs.copy()
        call["context"] += n_contexts
        call["kernel"][call["kernel"] != NONE] += n_kernels
        result["form"] += n_forms
        result["base"][result["base"] != NONE] += n_results
        given[given != NONE] += n_results
        processes += [_placed(p, n_calls + p.first_call, p.n_calls) for p in part.processes]
        outputs |= {n_results + row: data for row, data in part.outputs.items()}
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
        outputs,
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
    unpack = Unpacking(max(_MIN_UNPACKED_LIMIT, _MAX_UNPACKED_RATIO * n_packed))
    blocks: list[list[Block]] = [[] for _ in processes]
    widths = [width_of(form.dtype) for form in forms]
    for number, *columns in connection.execute(
        f"select process, n_calls, n_results, {', '.join(_BLOBS)} from block order by id"  # noqa: S608 - names of ours
    ):
        if number >= len(processes):
            raise ValueError(f"a block of process {number}, which is missing")
        blocks[number].append(unpack.block(*columns, widths=widths))
    recording = _joined(name, processes, blocks, contexts, forms, kernels)
    return dataclasses.replace(recording, outputs=dict(_outputs(connection, recording)))


def _outputs(connection: sqlite3.Connection, recording: Recording) -> Iterator[tuple[int, bytes]]:
    """Results that were kept as they were digested. Of a process that was killed, the last rows may be missing."""
    joined = "from output o join content c on c.digest = o.digest"
    (n_bytes,) = connection.execute(f"select coalesce(sum(length(c.bytes)), 0) {joined}").fetchone()
    if n_bytes > OUTPUTS_BYTES:
        raise ValueError("more results than a recording keeps")
    contents: dict[str, bytes] = {}
    for row, digest, data in connection.execute(f"select o.result, o.digest, c.bytes {joined} order by o.result"):
        if row >= len(recording.results) or not recording.results["n_rungs"][row]:
            continue
        form = recording.form_of(row)
        expected = width_of(form.dtype) * (2 if form.dtype.startswith("complex") else 1) * form.n_elements
        # Memory that something wrote to after the call, unseen, has another name.
        if len(data) == expected and digest == output_name(int(recording.rungs[recording.first_rung[row]]), expected):
            yield row, contents.setdefault(digest, data)


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
    limits = Limits.from_forms(forms)
    calls, results, inputs, described = [], [], [], []
    n_calls = n_results = 0
    for process, own in zip(processes, blocks, strict=True):
        call, result, given = (
            np.concatenate([np.empty(0, dtype), *(getattr(b, column) for b in own)])
            for column, dtype in (("calls", CALL), ("results", RESULT), ("inputs", np.dtype("<i8")))
        )
        check_rows(call, result, given, len(contexts), len(kernels), limits)
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


def _offsets(sizes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def _placed(process: Process, first_call: int, n_calls: int) -> Process:
    return dataclasses.replace(process, first_call=first_call, n_calls=n_calls)


def _damaged(path: Path, error: Exception) -> DataFileError:
    return DataFileError(
        f"The recording {str(path)!r} is damaged, or was not written by shadowrun ({error}). Record it again.",
        slug="data-file-corrupt",
    )
