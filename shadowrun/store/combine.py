"""Many data files into one: rows are copied by SQLite itself, so that memory does not grow with the calls."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.errors import DataFileError
from shadowrun.store import opening
from shadowrun.store.codec import encode_info
from shadowrun.store.copying import Copier, Part
from shadowrun.store.datafile import DataFile
from shadowrun.store.merging import check_platforms, merge_infos
from shadowrun.store.sources import SourceRun, are_ranks, greatest_seq

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

__all__ = ["Combined", "combine_files"]

MIN_BLOCK = 1000


@dataclass(frozen=True, slots=True)
class Combined:
    """What was combined.

    Attributes:
        sources: The runs in the new file.
        files: The files that they are from.
        n_calls: How many calls were recorded in them one by one.
        skipped: What is wrong with the files that were left out.
    """

    sources: tuple[SourceRun, ...]
    files: tuple[Path, ...]
    n_calls: int
    skipped: tuple[DataFileError, ...]


def combine_files(
    paths: Iterable[Path],
    out: Path,
    *,
    append: bool = False,
    force: bool = False,
    ignore_errors: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Combined:
    """Combine data files, which may be combined ones themselves, into a new one that appears only once it is whole.

    Args:
        paths: Files to read; none of them is changed.
        out: File to write.
        append: Keep what `out` holds already.
        force: Replace `out` if it exists.
        ignore_errors: Leave out files that are missing, damaged, newer or not ours, instead of refusing.
        progress: Called with the number of runs copied and that of all.

    Raises:
        DataFileError: A file cannot be read or written, nothing is left to combine, or the platforms differ;
            or `out` exists and is neither to be kept nor to be replaced.
    """
    _check_output(out, may_exist=append or force)
    if append and out.exists():
        paths = [out, *(path for path in paths if path.resolve() != out.resolve())]
    problems: list[DataFileError] = []
    parts: list[Part] = []
    for path in paths:
        with _collecting(problems, ignore=ignore_errors):
            parts += _parts(path)
    parts = list(_each_once(parts, problems, ignore=ignore_errors))
    if parts:
        check_platforms([(part.run.file, part.run.info) for part in parts])
    new = out.with_name(out.name + ".part")
    try:
        with contextlib.closing(opening.connect_new(new)) as connection:
            combined = _copy(connection, _ordered(parts), problems, progress, ignore=ignore_errors)
        opening.move(new, out)
    except sqlite3.Error as error:
        raise opening.unwritable(out, error) from error
    finally:
        opening.remove(new)
    return combined


def _check_output(out: Path, *, may_exist: bool) -> None:
    opening.check_writable(out)
    if out.exists() and not may_exist:
        raise DataFileError(
            f"{str(out)!r} exists. Give --force to replace it, --append to add to it, or -o FILE for another name.",
            slug="combine-exists",
        )


@contextlib.contextmanager
def _collecting(problems: list[DataFileError], *, ignore: bool) -> Iterator[None]:
    try:
        yield
    except DataFileError as error:
        if not ignore:
            raise
        problems.append(error)


def _parts(path: Path) -> list[Part]:
    """The runs in a file."""
    data = DataFile.open(path)
    try:
        block = data.block
        runs = data.sources or (SourceRun(0, path.name, data.info, 0),)
        return [Part(path, run, run.first_seq + block, greatest_seq(data, run.first_seq, block)) for run in runs]
    finally:
        data.connection.close()


def _each_once(parts: list[Part], problems: list[DataFileError], *, ignore: bool) -> Iterator[Part]:
    """The runs without those that are in one of the other files as well: their calls would count twice."""
    seen: dict[tuple[str, str], Path] = {}
    for part in parts:
        other = seen.setdefault((part.run.file, encode_info(part.run.info)), part.path)
        if other is part.path:
            yield part
            continue
        with _collecting(problems, ignore=ignore):
            raise DataFileError(
                f"The run {part.run.file!r} is in {str(other)!r} and in {str(part.path)!r}: its calls would count "
                "twice. Leave out one of the two.",
                slug="combine-twice",
            )


def _ordered(parts: list[Part]) -> list[Part]:
    """Ranks by number, other runs as they were given."""
    return sorted(parts, key=lambda p: p.run.info.rank) if are_ranks([part.run for part in parts]) else parts


def _copy(
    connection: sqlite3.Connection,
    parts: list[Part],
    problems: list[DataFileError],
    progress: Callable[[int, int], None] | None,
    *,
    ignore: bool,
) -> Combined:
    block = _block(parts)
    copier = Copier(connection)
    sources: list[SourceRun] = []
    files: list[Path] = []
    done = 0
    for path, same in itertools.groupby(parts, key=lambda part: part.path):
        runs = list(same)
        with _collecting(problems, ignore=ignore):
            sources += copier.copy(runs, len(sources), block)
            files.append(path)
        done += len(runs)
        if progress is not None:
            progress(done, len(parts))
    if not sources:
        raise DataFileError(
            "None of these files can be read, so there is nothing to combine.", slug="combine-nothing"
        ) from (problems[0] if problems else None)
    copier.finish(sources, encode_info(merge_infos(sources)))
    (n_calls,) = connection.execute("select count(*) from call").fetchone()
    return Combined(tuple(sources), tuple(files), n_calls, tuple(problems))


def _block(parts: list[Part]) -> int:
    """A power of ten that no run has more calls than, so that 17,000,042 is call 42 of run 17."""
    block = MIN_BLOCK
    while any(part.greatest >= block for part in parts):
        block *= 10
    return block
