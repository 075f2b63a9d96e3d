"""The output of a comparison: its data file, the lock on the file name, and the `RunInfo` in the file.

In a distributed run, each rank writes one file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.platforms.fingerprint import fingerprint, versions
from shadowrun.store.datafile import DataFile
from shadowrun.store.lock import FileLock
from shadowrun.types import RunInfo

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shadowrun.config import Config
    from shadowrun.platforms.device import Platform

__all__ = ["Output", "distributed_rank", "file_of_rank", "run_info"]


def run_info(config: Config, target: Platform, ref: Platform) -> RunInfo:
    """Description of a run, as far as it is known before the start."""
    notes = []
    if str(target) == str(ref):
        notes.append(f"Target and reference are the same platform ({target}): a self-check, which should find nothing.")
    facts = {platform: fingerprint(platform) for platform in (target, ref)}
    notes += [f"{platform}: {f['without_effect']}." for platform, f in facts.items() if f.get("without_effect")]
    number, world = distributed_rank()
    return RunInfo(
        target=str(target),
        ref=str(ref),
        target_fingerprint=facts[target],
        ref_fingerprint=facts[ref],
        versions=versions(),
        argv=(Path(sys.argv[0]).name, *sys.argv[1:]) if sys.argv else (),
        config=config.printable(),
        rank=number,
        world_size=world,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        notes=tuple(notes),
    )


def distributed_rank() -> tuple[int, int]:
    """Rank and world size: of the process group, or of torchrun's environment before the program makes its group."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    number, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if number.isdecimal() and world.isdecimal() and int(number) < int(world):
        return int(number), int(world)
    return 0, 1


def file_of_rank(path: Path, number: int, world: int) -> Path:
    """``run.1.shadowrun`` for ``run.shadowrun``: one file for each rank of a distributed run."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}") if world > 1 else path


# Data files of parent processes, kept so that no destructor closes them: SQLite forbids that in a forked child.
_inherited: list[DataFile] = []
_FORKED = "This process was forked from one that was being compared; what that recorded is not in here."


class Output:
    """The data file of a comparison.

    Args:
        config: Has the file name, and whether to append.
        info: Description of the run before the start.

    Attributes:
        data: In memory until the comparison starts, since the file name depends on the rank, which is unknown before.

    Raises:
        DataFileError: The file could not be written.
    """

    def __init__(self, config: Config, info: RunInfo) -> None:
        self._config = config
        self._info = info
        self._has_file = config.file is None
        self._claim: FileLock | None = None
        self._pid = os.getpid()
        self.data = DataFile.create(None, info, max_records=config.max_records)
        if config.file is not None:
            # Now, so that `compare()` refuses a file before the program has run.
            DataFile.check(config.file, info, append=config.append)

    def open(self) -> None:
        """Find the rank, and open its data file: each rank writes one.

        Raises:
            DataFileError: The file cannot be written.
        """
        rank, world = distributed_rank()
        self._info = dataclasses.replace(self._info, rank=rank, world_size=world)
        config = self._config
        if self._has_file or config.file is None:
            if self._claim is not None:
                self._claim.renew()
            return
        # The lock before the file: another process may be writing to that name.
        claim = FileLock(file_of_rank(config.file, rank, world))
        try:
            self.data = DataFile.create(claim.path, self._info, append=config.append, max_records=config.max_records)
        except BaseException:
            claim.release()
            raise
        self._claim = claim
        self._has_file = True

    def follow_rank(self) -> None:
        """Rename the file if the program has made its process group since the start, and the rank is known now."""
        if self._claim is None:
            return
        try:  # noqa: SIM105 - called for each step; its object costs more
            self._take_name_of_rank(self._claim)
        except Exception:  # noqa: S110 - the file keeps its name
            pass

    def _take_name_of_rank(self, claim: FileLock) -> None:
        if not claim.held or self._config.file is None:
            return
        rank, world = distributed_rank()
        if world < 2:
            return
        wanted = file_of_rank(self._config.file, rank, world)
        # `move` would replace the file that was to be appended to.
        if wanted == claim.wanted or (self._config.append and wanted.exists()):
            return
        other = FileLock(wanted)
        try:
            self.data.move(other.path)
        except BaseException:
            other.release()
            raise
        claim.release()
        self._claim = other

    def update(self, notes: Iterable[str], **facts: Any) -> None:
        """Write the `RunInfo`.

        Args:
            notes: Notes to add to those from before the start.
            **facts: Fields of `RunInfo`.
        """
        self._info = dataclasses.replace(self._info, **facts)
        with contextlib.suppress(Exception):
            rank, world = distributed_rank()
            if world > 1:  # a program may destroy its process group before the end: keep the rank from before
                self._info = dataclasses.replace(self._info, rank=rank, world_size=world)
                self.follow_rank()
        # Called for each report: a note must not be added twice.
        earlier = self._info.notes
        added = tuple(note for note in (*notes, *self._notes()) if note not in earlier)
        self._info = dataclasses.replace(self._info, notes=(*earlier, *added))
        self.data.update_info(self._info)
        self.data.flush()

    def _notes(self) -> tuple[str, ...]:
        claim = self._claim
        if claim is None or not claim.contested:
            return ()
        note = (
            f"Another process was writing {claim.wanted.name}, or it is the file of the process that this one was "
            f"forked from: this run is in {claim.path.name}."
        )
        return (note,)

    def close(self) -> None:
        """Close the file, and release its lock."""
        self.data.close()
        self.release()

    def release(self) -> None:
        """Release the lock on the file."""
        if self._claim is not None:
            self._claim.release()

    def detach_in_child(self) -> None:
        """In a forked child, record into memory: the file of the parent is not touched, not even closed."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        _inherited.append(self.data)
        self._has_file = self._config.file is None
        # Not released: the lock is the parent's.
        self._claim = None
        self._info = dataclasses.replace(self._info, wall_s=0.0, own_s=0.0, complete=False, notes=(_FORKED,))
        self.data = DataFile.create(None, self._info, max_records=self._config.max_records)
