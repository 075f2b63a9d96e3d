"""Programs, and the file of a zoo: xz-compressed lines of JSON, first a header, then stages and programs.

A zoo may come from anyone. Reading one takes memory in proportion to its limits, not to what a bomb unpacks to.
Each program is checked (`graph.from_json`) when it is first used, so that a process that needs few programs of a large
zoo starts at once.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shadowrun.errors import DataFileError, brief
from shadowrun.store.atomic_write import atomic_write
from shadowrun.store.plain_json import NotStorable
from shadowrun.studies.zoo.graph import Graph, from_json, to_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

__all__ = ["DEFAULT_FILE", "Program", "Stage", "Zoo", "program_of", "read_zoo", "unique", "write_zoo"]

DEFAULT_FILE: Final = ".shadowzoo"
_FORMAT: Final = "shadowrun zoo"
_VERSION: Final = 1
# Of all lines, unpacked.
_MAX_BYTES: Final = 1 << 31
_LEAST_BYTES: Final = 1 << 26
# Bytes of lines for each of the file; zoos have some 30. More than `_LEAST_BYTES` must keep it.
_RATIO: Final = 200
# Bytes of lines that are no programs: these are parsed at once.
_MAX_STAGES: Final = 1 << 26
_MAX_LINE: Final = 1 << 25
# Of the decoder; what `write_zoo` writes needs 9 MiB.
_MAX_MEMORY: Final = 1 << 27
_MAX_PROGRAMS: Final = 1_000_000
_N_DIGITS: Final = 12
_MAX_TEXT: Final = 400


@dataclass(frozen=True, slots=True)
class Program:
    """A graph with its name and origin.

    Attributes:
        id: First 12 hexadecimal digits of the graph's identity.
        name: What its source calls it: ``bert/BertForMaskedLM forward``.
        source: Name of the source: ``transformers``, ``modules``, ``subgraphs``, …
        graph: The program.
        made_from: Ids of the programs that it was cut from.
        count: How often it was found there.
    """

    id: str
    name: str
    source: str
    graph: Graph
    made_from: tuple[str, ...] = ()
    count: int = 1


@dataclass(frozen=True, slots=True)
class Stage:
    """How many came into a step of the making of a zoo, and how many came out.

    Attributes:
        source: Name of the source.
        name: The step.
        n_in: What came in.
        n_out: What came out; a step may make several of one.
        left_out: What did not come out, each with its reason.
    """

    source: str
    name: str
    n_in: int
    n_out: int
    left_out: tuple[tuple[str, str], ...] = ()


def program_of(name: str, source: str, graph: Graph, made_from: tuple[str, ...] = (), count: int = 1) -> Program:
    """A program, with the id that its graph gives it."""
    return Program(graph.identity()[:_N_DIGITS], name, source, graph, made_from, count)


def unique(programs: Iterable[Program], known: Iterable[str] = ()) -> tuple[list[Program], tuple[tuple[str, str], ...]]:
    """The first program of each id, and the names of the others with the reason why they are left out.

    Args:
        programs: Programs of one source.
        known: Ids that are taken.
    """
    names = dict.fromkeys(known, "another of the zoo")
    kept: list[Program] = []
    left_out: list[tuple[str, str]] = []
    for program in programs:
        if program.id in names:
            left_out.append((program.name, f"the same graph as {names[program.id]}"))
        else:
            names[program.id] = program.name
            kept.append(program)
    return kept, tuple(left_out)


class Zoo:
    """A zoo as it was read.

    Attributes:
        programs: By id, in the order of the file. A program is checked when it is first looked up, which raises
            `DataFileError` where it is none.
        stages: Counts of what came in and out of each step of its making.
    """

    def __init__(self, programs: Mapping[str, Program], stages: Sequence[Stage]) -> None:
        self.programs = programs
        self.stages = tuple(stages)

    @property
    def digest(self) -> str:
        """Hash of the ids of all programs: 16 hexadecimal digits. Two zoos with one digest have the same programs."""
        return hashlib.blake2b(" ".join(sorted(self.programs)).encode(), digest_size=8).hexdigest()


class _Lines(Mapping[str, Program]):
    """Programs that are lines of text until they are used."""

    def __init__(self, path: Path, rows: dict[str, bytes]) -> None:
        self._path = path
        self._rows = rows
        self._made: dict[str, Program] = {}

    def __getitem__(self, key: str) -> Program:
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = _program(self._path, key, self._rows[key])
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def write_zoo(path: Path, programs: Iterable[Program], stages: Iterable[Stage]) -> None:
    """Write a zoo, atomically; one that exists is replaced.

    Raises:
        DataFileError: The file cannot be written, or it exists and is no zoo.
    """
    if path.exists() and (not path.is_file() or _header(path) is None):
        raise DataFileError(
            f"{str(path)!r} exists and is no zoo; it is not replaced. Give another file.", slug="zoo-file"
        )
    try:
        with atomic_write(path) as new, lzma.open(new, "wb", preset=3) as file:
            for row in _rows(programs, stages):
                file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
    except OSError as error:
        raise DataFileError(
            f"The zoo {str(path)!r} cannot be written ({error.strerror or error}).", slug="zoo-file"
        ) from error


def _rows(programs: Iterable[Program], stages: Iterable[Stage]) -> Iterator[Any]:
    yield {"format": _FORMAT, "version": _VERSION}
    for s in stages:
        yield ["stage", s.source, s.name, s.n_in, s.n_out, s.left_out]
    for p in programs:
        yield ["program", p.id, p.name, p.source, p.made_from, p.count, to_json(p.graph)]


def read_zoo(path: Path) -> Zoo:
    """Read a zoo; it may come from anyone.

    Raises:
        DataFileError: The file is missing, damaged, too large, of a newer version, or no zoo.
    """
    if not path.is_file():
        raise DataFileError(
            f"There is no zoo {str(path)!r}. Make one with `shadowrun zoo add modules`, or name it with --zoo.",
            slug="zoo-missing",
        )
    header = _header(path)
    if header is None:
        raise DataFileError(f"{str(path)!r} is no zoo that `shadowrun zoo` wrote.", slug="zoo-file")
    if header.get("version") != _VERSION:
        raise DataFileError(
            f"The zoo {str(path)!r} has version {brief(header.get('version'))}; this shadowrun reads {_VERSION}. "
            "Make it again with `shadowrun zoo add`.",
            slug="zoo-file",
        )
    try:
        rows, stages = _read(path)
    except (lzma.LZMAError, EOFError, OSError, ValueError, TypeError, RecursionError) as error:
        raise DataFileError(
            f"The zoo {str(path)!r} is damaged ({type(error).__name__}: {brief(str(error))}). Make it again.",
            slug="zoo-file",
        ) from error
    return Zoo(_Lines(path, rows), stages)


def _read(path: Path) -> tuple[dict[str, bytes], list[Stage]]:
    """Lines of the programs by id, and stages."""
    stages: list[Stage] = []
    rows: dict[str, bytes] = {}
    lines = _lines(path)
    next(lines)
    n_bytes = 0
    for line in lines:
        # The head of a row shows what it is: graphs are parsed when they are used.
        if line.startswith(b'["program","'):
            key = line[12 : 12 + _N_DIGITS].decode("ascii")
            # Raises where the id is no hexadecimal number, which is damage.
            if int(key, 16) >= 0 and len(rows) < _MAX_PROGRAMS:
                rows[key] = line
        else:
            n_bytes += len(line)
            if n_bytes > _MAX_STAGES:
                raise ValueError("it is too large")
            stages.append(_stage(json.loads(line)))
    return rows, stages


def _header(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(next(_lines(path)))
    except (lzma.LZMAError, EOFError, OSError, ValueError, StopIteration, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("format") == _FORMAT else None


def _lines(path: Path) -> Iterator[bytes]:
    """Lines of the file, unpacked piece by piece.

    Raises:
        ValueError: A line, or all of them, are too long; the file ends within a line.
    """
    # The header of the file names the size of its dictionary, which is taken before anything is unpacked.
    decoder = lzma.LZMADecompressor(memlimit=_MAX_MEMORY)
    rest, total = b"", 0
    most = min(_MAX_BYTES, _LEAST_BYTES + _RATIO * path.stat().st_size)
    with path.open("rb") as file:
        while not decoder.eof:
            packed = file.read(1 << 16) if decoder.needs_input else b""
            if decoder.needs_input and not packed:
                raise EOFError("it ends early")
            # At most 1 MiB of output at a time: 64 KiB of input may unpack to hundreds of MiB.
            piece = decoder.decompress(packed, max_length=1 << 20)
            total += len(piece)
            *lines, rest = (rest + piece).split(b"\n")
            if total > most or len(rest) > _MAX_LINE or any(len(line) > _MAX_LINE for line in lines):
                raise ValueError("it is too large")
            yield from lines
    if rest:
        raise ValueError("its last line is not whole")


def _stage(row: Any) -> Stage:
    kind, source, name, n_in, n_out, left_out = row
    if kind != "stage" or not all(type(n) is int and 0 <= n < 1 << 63 for n in (n_in, n_out)):
        raise ValueError(f"{brief(row)} is no stage")
    pairs = tuple((_text(what), _text(why)) for what, why in left_out)
    return Stage(_text(source), _text(name), n_in, n_out, pairs)


def _program(path: Path, key: str, line: bytes) -> Program:
    try:
        _, number, name, source, made_from, count, data = json.loads(line)
        graph = from_json(data)
        made = program_of(_text(name), _text(source), graph, tuple(_text(m) for m in made_from), int(count))
    except (ValueError, TypeError, OverflowError, RecursionError, NotStorable) as error:
        raise DataFileError(
            f"The program {key} of the zoo {str(path)!r} cannot be used: {brief(str(error))}. Make the zoo again.",
            slug="zoo-program",
        ) from error
    # The id is the hash of the graph: a file cannot give one program the name of another.
    if number != key or made.id != key:
        raise DataFileError(
            f"The program {key} of the zoo {str(path)!r} is another one, {made.id}. Make the zoo again.",
            slug="zoo-program",
        )
    return made


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{brief(value)} is no text")
    return value[:_MAX_TEXT]
