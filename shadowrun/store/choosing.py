"""Which data files to combine, and what to call the result."""

from __future__ import annotations

import glob
import re
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.errors import DataFileError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from os import PathLike

__all__ = ["DEFAULT_OUTPUT", "choose", "name_together"]

DEFAULT_OUTPUT = Path(".shadowrun")
_NOT_DATA = ("-journal", ".part")
_RANK = re.compile(r"(?P<before>.+)\.\d+(?P<after>\.[^.]*)?")


def choose(given: Iterable[str | PathLike[str]], out: Path | None) -> list[Path]:
    """The files meant by names, glob patterns and folders, each once; `out` is meant only by its own name.

    Of a folder where there are files of ranks, only those are meant: the others may be made of them.

    Raises:
        DataFileError: A folder holds no data file, or a pattern fits none.
    """
    chosen: dict[Path, Path] = {}
    for name in given:
        path = Path(name)
        if path.is_dir():
            found = _of_folder(path)
        elif not path.exists() and glob.has_magic(str(path)):
            found = sorted(map(Path, glob.glob(str(path))), key=_natural)  # noqa: PTH207 - may be absolute
        else:
            chosen.setdefault(path.resolve(), path)
            continue
        found = [file for file in found if out is None or file.resolve() != out.resolve()]
        if not found:
            raise DataFileError(
                f"{str(path)!r} has no data file to combine. Name the files, such as run.*.shadowrun.",
                slug="combine-nothing",
            )
        for file in found:
            chosen.setdefault(file.resolve(), file)
    return list(chosen.values())


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
    return [file for file in found if _RANK.fullmatch(file.name)] or found


def _is_data(path: Path) -> bool:
    named = path.suffix == ".shadowrun" or path.name == ".shadowrun" or path.name.startswith(".shadowrun.")
    return named and not path.name.endswith(_NOT_DATA) and path.is_file()


def _natural(path: Path) -> list[tuple[int, str]]:
    """Order in which 2 comes before 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]
