"""The results of a comparison, read from its data file: one run opened, or several combined."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.errors import ShadowrunWarning
from shadowrun.run.run import SLOW_RATIO, Run
from shadowrun.settings import read_settings
from shadowrun.store.combine.combine_files import choose, combine_files
from shadowrun.store.datafile import DataFile

if TYPE_CHECKING:
    from collections.abc import Iterable
    from os import PathLike

__all__ = ["SLOW_RATIO", "Run", "combine", "load"]


def load(
    path: str | PathLike[str],
    *,
    known: str | PathLike[str] | bool | None = None,
    vendor_known: bool = True,
    salvage: bool = False,
) -> Run:
    """Open a data file, also that of a run that is still recording or was killed.

    Args:
        path: The file.
        known: Ledger of known issues: a file, False for none; None looks upward from the working directory.
        vendor_known: False leaves out the known issues that the package of the target's device ships; `known=False`
            does, too.
        salvage: Read the readable part of a damaged file; `Run.info.notes` says what is missing.

    Raises:
        DataFileError: The file is missing, unreadable, not a shadowrun data file, corrupt, or of a newer schema.
        UsageError: The ledger cannot be read.
    """
    lines = read_settings(known).known
    return Run(DataFile.open(Path(path), salvage=salvage), lines, vendor_known=vendor_known and known is not False)


def combine(
    paths: Iterable[str | PathLike[str]] | str | PathLike[str],
    out: str | PathLike[str],
    *,
    append: bool = False,
    force: bool = False,
    ignore_errors: bool = False,
) -> Run:
    """Combine the data files of several runs, such as the ranks of a distributed one, into one file.

    Args:
        paths: Data files, folders of them, or glob patterns such as ``"run.*.shadowrun"``.
        out: Data file to write.
        append: Add to `out` if it exists.
        force: Replace `out` if it exists.
        ignore_errors: Leave out files that cannot be read; `ShadowrunWarning` names them.

    Returns:
        The combined run; `Run.sources` lists its parts.

    Raises:
        DataFileError: A file cannot be read or written, or the runs are of different platforms.
    """
    # A path is iterable too: as a sequence of characters.
    patterns = [paths] if isinstance(paths, str | os.PathLike) else paths
    combined = combine_files(
        choose(patterns, Path(out)), Path(out), append=append, force=force, ignore_errors=ignore_errors
    )
    for problem in combined.skipped:
        warnings.warn(f"left out: {problem}", ShadowrunWarning, stacklevel=2)
    return load(out)
