"""`shadowrun combine`: several data files, such as those of the ranks of a run, become one.

`choose` finds the files, `merge_infos` makes one `RunInfo` with a note on each difference between the runs, and
`combine_files` writes the new file. SQLite copies the rows (`copy_runs`), so that memory does not grow with the calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import itertools
import json
import os
import re
import sqlite3
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowrun.errors import DataFileError
from shadowrun.store import connect
from shadowrun.store.codec import encode_info, jsonable
from shadowrun.store.combine.combined_runs import SourceRun, are_ranks, greatest_seq, name_runs, ranges
from shadowrun.store.combine.copy_runs import Part, RunCopier
from shadowrun.store.datafile import DataFile
from shadowrun.visible_text import clip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from os import PathLike

    from shadowrun.types import RunInfo

__all__ = [
    "DEFAULT_OUTPUT",
    "CombineResult",
    "check_platforms",
    "choose",
    "combine_files",
    "merge_infos",
    "name_together",
]


DEFAULT_OUTPUT = Path(".shadowrun")
# What SQLite and `combine` itself leave next to a data file if their process is killed.
_NOT_DATA = ("-journal", ".part")
_RANK = re.compile(r"(?P<before>.+)\.\d+(?P<after>\.[^.]*)?")


def choose(given: Iterable[str | PathLike[str]], out: Path | None) -> list[Path]:
    """The files that names, glob patterns and folders stand for, each once; `out` counts only where it is named.

    If a folder has files of ranks, only those count: the others may be combined from them.

    Raises:
        DataFileError: A folder holds no data file, or a pattern fits none.
    """
    chosen: dict[str, Path] = {}
    for name in given:
        path = Path(name)
        if path.is_dir():
            found = _of_folder(path)
        # A file whose name has brackets is that file, not a pattern.
        elif not path.exists() and glob.has_magic(str(path)):
            found = sorted(map(Path, glob.glob(str(path))), key=_natural)  # noqa: PTH207 - may be absolute
        else:
            # By the resolved path: two names of one file would count its calls twice.
            chosen.setdefault(_real(path), path)
            continue
        found = [file for file in found if out is None or _real(file) != _real(out)]
        if not found:
            raise DataFileError(
                f"{str(path)!r} has no data file to combine. Name the files, such as run.*.shadowrun.",
                slug="combine-nothing",
            )
        for file in found:
            chosen.setdefault(_real(file), file)
    return list(chosen.values())


def _real(path: Path) -> str:
    """The path with links followed; not `Path.resolve`, which raises RuntimeError for links that lead to each other."""
    return os.path.realpath(path)


def name_together(paths: Sequence[Path]) -> Path:
    """``run.shadowrun`` for ``run.0.shadowrun``, ``run.1.shadowrun``, …; else the default data file."""
    names = set()
    for path in paths:
        match = _RANK.fullmatch(path.name)
        names.add(path.with_name(match["before"] + (match["after"] or "")) if match else None)
    name = names.pop() if len(names) == 1 else None
    return name or DEFAULT_OUTPUT


def _of_folder(folder: Path) -> list[Path]:
    found = sorted((file for file in folder.iterdir() if _is_data(file)), key=_natural)
    # Next to the files of ranks, `run.shadowrun` is what an earlier `combine` made of them.
    return [file for file in found if _RANK.fullmatch(file.name)] or found


def _is_data(path: Path) -> bool:
    named = path.suffix == ".shadowrun" or path.name == ".shadowrun" or path.name.startswith(".shadowrun.")
    return named and not path.name.endswith(_NOT_DATA) and path.is_file()


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key with which 2 comes before 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]


MAX_VALUES = 4


def check_platforms(files: Sequence[tuple[str, RunInfo]]) -> None:
    """Refuse to combine runs of different platforms: a finding would no longer belong to one target.

    Device indices may differ, as those of ranks do. Versions, fingerprints and options may differ: a note says so.

    Raises:
        DataFileError: Names two files and their platforms.
    """
    name, first = files[0]
    for other, info in files[1:]:
        # Without their indices: each rank has a device of its own, all of one kind.
        if _platforms(info) != _platforms(first):
            a, b = (f"{clip(i.target)} with {clip(i.ref)}" for i in (first, info))
            raise DataFileError(
                f"{name!r} compares {a}, and {other!r} {b}: "
                "only runs of the same platforms can be combined. Make one file for each pair of platforms.",
                slug="combine-platforms",
            )


def merge_infos(sources: Sequence[SourceRun]) -> RunInfo:
    """One `RunInfo` for all runs."""
    infos = [source.info for source in sources]
    first = infos[0]
    # Ranks run at the same time, so the slowest gives the wall time. Other runs ran one after the other.
    if are_ranks(sources):
        slowest = max(infos, key=lambda i: i.wall_s)
        wall_s, own_s, async_compare_s = slowest.wall_s, slowest.own_s, slowest.async_compare_s
    else:
        wall_s, own_s, async_compare_s = (sum(times) for times in zip(*map(_times, infos), strict=True))
    return dataclasses.replace(
        first,
        target=_common(infos, lambda i: i.target),
        ref=_common(infos, lambda i: i.ref),
        target_fingerprint=_same(infos, lambda i: i.target_fingerprint),
        ref_fingerprint=_same(infos, lambda i: i.ref_fingerprint),
        versions=_same(infos, lambda i: i.versions),
        rank=min(i.rank for i in infos),
        world_size=max(i.world_size for i in infos),
        started=min(i.started for i in infos),
        wall_s=wall_s,
        own_s=own_s,
        async_compare_s=async_compare_s,
        complete=all(i.complete for i in infos),
        notes=tuple(_notes(sources)),
        # One exception: when a rank ends, the others raise as well, of a lost connection.
        raised=next((i.raised for i in infos if i.raised), ""),
        # A pattern that one rank never met may be another's: stages of a pipeline have other modules.
        unselected=first.unselected if all(i.unselected for i in infos) else "",
    )


def _times(info: RunInfo) -> tuple[float, float, float]:
    return info.wall_s, info.own_s, info.async_compare_s


def _platforms(info: RunInfo) -> tuple[str, str]:
    return _without_index(info.target), _without_index(info.ref)


def _without_index(platform: str) -> str:
    """``cuda`` for ``cuda:3``."""
    return re.sub(r":\d+$", "", platform)


def _common(infos: Sequence[RunInfo], platform: Callable[[RunInfo], str]) -> str:
    names = {platform(info) for info in infos}
    # `min`, not the first: the name must not depend on the order of the files.
    return names.pop() if len(names) == 1 else _without_index(min(names))


def _same(infos: Sequence[RunInfo], facts: Callable[[RunInfo], dict[str, Any]]) -> dict[str, Any]:
    """The facts that are equal in all runs; the notes name the others, and each source keeps its own."""
    first, *rest = (facts(info) for info in infos)
    return {key: value for key, value in first.items() if all(key in other and other[key] == value for other in rest)}


def _notes(sources: Sequence[SourceRun]) -> Iterator[str]:
    worlds = {source.info.world_size for source in sources}
    if are_ranks(sources):
        missing = set(range(max(worlds))) - {source.info.rank for source in sources}
        if missing:
            which = "rank" if len(missing) == 1 else "ranks"
            yield f"The files of {which} {ranges(missing)} of {max(worlds)} are not among those that were combined."
    elif max(worlds) > 1:
        yield "These files are not each a rank of one run: the runs in it are named by their files."
    # If no run ended, `RunInfo.complete` says it, and a note would repeat it.
    incomplete = [source.number for source in sources if not source.info.complete]
    if incomplete and len(incomplete) < len(sources):
        yield f"Had not ended, or was killed: {name_runs(sources, incomplete)}."
    for what, facts in (
        ("target", lambda i: _facts(i.target_fingerprint)),
        ("reference", lambda i: _facts(i.ref_fingerprint)),
        ("versions", lambda i: i.versions),
        # Where a run is written changes nothing of what it compares.
        ("options", lambda i: {k: v for k, v in i.config.items() if k not in ("file", "append")}),
        ("program", lambda i: {"command line": " ".join(i.argv)}),
    ):
        yield from _differences(what, [facts(source.info) for source in sources], sources)
    texts = Counter(note for source in sources for note in dict.fromkeys(source.info.notes))
    for text, n in texts.items():
        having = [source.number for source in sources if text in source.info.notes]
        yield text if n == len(sources) else f"{name_runs(sources, having).removesuffix(' only')}: {text}"


def _facts(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint without device indices, which always differ between ranks."""
    return {k: _without_index(v) if isinstance(v, str) else v for k, v in fingerprint.items()}


def _differences(what: str, facts: Sequence[dict[str, Any]], sources: Sequence[SourceRun]) -> Iterator[str]:
    for key in dict.fromkeys(key for one in facts for key in one):
        values: dict[str, list[int]] = {}
        for source, one in zip(sources, facts, strict=True):
            values.setdefault(_printed(one.get(key)), []).append(source.number)
        if len(values) > 1:
            shown = [f"{value} ({name_runs(sources, numbers)})" for value, numbers in list(values.items())[:MAX_VALUES]]
            more = f"; {len(values) - MAX_VALUES} more" if len(values) > MAX_VALUES else ""
            yield f"The runs differ in {what}, {key}: {'; '.join(shown)}{more}."


def _printed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(jsonable(value), sort_keys=True)


# A power of ten, so that call 17,000,042 is call 42 of run 17.
MIN_BLOCK = 1000


@dataclass(frozen=True, slots=True)
class CombineResult:
    """Result of `combine_files`.

    Attributes:
        sources: The runs in the new file.
        files: The files that the runs are from.
        n_calls: Number of calls that were recorded one by one.
        skipped: The errors of the files that were left out.
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
) -> CombineResult:
    """Combine data files, which may be combined files themselves, into a new one.

    Args:
        paths: Files to read; none of them is changed.
        out: File to write.
        append: Keep the runs that `out` holds already.
        force: Replace `out` if it exists.
        ignore_errors: Leave out files that are missing, damaged, of a newer schema or not data files.
        progress: Called with the number of runs copied and the number of all runs.

    Raises:
        DataFileError: A file cannot be read or written, no file is left to combine, or the platforms differ;
            or `out` exists, and neither `append` nor `force` is given.
    """
    _check_output(out, may_exist=append or force)
    if append and out.exists():
        paths = [out, *(path for path in paths if _real(path) != _real(out))]
    problems: list[DataFileError] = []
    parts: list[Part] = []
    for path in paths:
        with _collecting(problems, ignore=ignore_errors):
            # Opened and closed here, and once more to copy: a thousand ranks would exceed the limit of open files.
            parts += _parts(path)
    parts = list(_each_once(parts, problems, ignore=ignore_errors))
    if parts:
        check_platforms([(part.run.file, part.run.info) for part in parts])
    # Written under another name and renamed at the end: `out` is never a half-written file.
    new = out.with_name(out.name + ".part")
    try:
        with contextlib.closing(connect.connect_new(new)) as connection:
            combined = _copy(connection, _ordered(parts), problems, progress, ignore=ignore_errors)
        connect.move(new, out)
    except sqlite3.Error as error:
        raise connect.unwritable(out, error) from error
    finally:
        connect.remove(new)
    return combined


def _check_output(out: Path, *, may_exist: bool) -> None:
    connect.check_writable(out)
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
    """The runs; a run that is in two of the files is an error, since its calls would count twice."""
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
    """Ranks by number, other runs in the order given."""
    return sorted(parts, key=lambda p: p.run.info.rank) if are_ranks([part.run for part in parts]) else parts


def _copy(
    connection: sqlite3.Connection,
    parts: list[Part],
    problems: list[DataFileError],
    progress: Callable[[int, int], None] | None,
    *,
    ignore: bool,
) -> CombineResult:
    block = _block(parts)
    copier = RunCopier(connection)
    sources: list[SourceRun] = []
    files: list[Path] = []
    done = 0
    # File by file: a file is opened, and upgraded to the present schema, once for all its runs.
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
    return CombineResult(tuple(sources), tuple(files), n_calls, tuple(problems))


def _block(parts: list[Part]) -> int:
    """Call numbers that each run gets."""
    # A power of ten reads well: 17,000,042 is call 42 of run 17.
    block = MIN_BLOCK
    while any(part.greatest >= block for part in parts):
        block *= 10
    return block
