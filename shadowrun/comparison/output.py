"""Where a comparison is recorded: its data file, the right to that file's name, and what the file says of the run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import TYPE_CHECKING, Any

from shadowrun.replay.run_info import file_of_rank
from shadowrun.replay.run_info import rank as rank_of_process
from shadowrun.store.claim import Claim
from shadowrun.store.datafile import DataFile

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shadowrun.config import Config
    from shadowrun.types import RunInfo

__all__ = ["Output"]

_inherited: list[DataFile] = []
_FORKED = "This process was forked from one that was being compared; what that recorded is not in here."


class Output:
    """The data file of a comparison.

    Args:
        config: Names the file, and says whether it is added to.
        info: What the run is, as far as that is known before it starts.

    Attributes:
        data: In memory until the comparison starts: nobody knows before which rank of a distributed run this is, and
            with it the name of the file.

    Raises:
        DataFileError: The file could not be written.
    """

    def __init__(self, config: Config, info: RunInfo) -> None:
        self._config = config
        self._info = info
        self._has_file = config.file is None
        self._claim: Claim | None = None
        self._pid = os.getpid()
        self.data = DataFile.create(None, info, max_records=config.max_records)
        if config.file is not None:
            DataFile.check(config.file, info, append=config.append)

    def open(self) -> None:
        """Find out which rank this is, and take its data file: each rank writes its own.

        Raises:
            DataFileError: It cannot be written.
        """
        rank, world = rank_of_process()
        self._info = dataclasses.replace(self._info, rank=rank, world_size=world)
        config = self._config
        if self._has_file or config.file is None:
            if self._claim is not None:
                self._claim.renew()
            return
        claim = Claim(file_of_rank(config.file, rank, world))
        try:
            self.data = DataFile.create(claim.path, self._info, append=config.append, max_records=config.max_records)
        except BaseException:
            claim.release()
            raise
        self._claim = claim
        self._has_file = True

    def follow_rank(self) -> None:
        """The group may have been made after the comparison began: the file gets the name that it should have."""
        if self._claim is None:
            return
        try:  # noqa: SIM105 - called for each step; its object costs more
            self._take_name_of_rank(self._claim)
        except Exception:  # noqa: S110 - the file keeps the name that it has
            pass

    def _take_name_of_rank(self, claim: Claim) -> None:
        if not claim.held or self._config.file is None:
            return
        rank, world = rank_of_process()
        if world < 2:
            return
        wanted = file_of_rank(self._config.file, rank, world)
        if wanted == claim.wanted or (self._config.append and wanted.exists()):
            return
        other = Claim(wanted)
        try:
            self.data.move(other.path)
        except BaseException:
            other.release()
            raise
        claim.release()
        self._claim = other

    def update(self, notes: Iterable[str], **facts: Any) -> None:
        """Write what the run is.

        Args:
            notes: What a reader should know besides what was known at the beginning.
            **facts: Fields of `RunInfo`.
        """
        self._info = dataclasses.replace(self._info, **facts)
        with contextlib.suppress(Exception):
            rank, world = rank_of_process()
            if world > 1:  # else a group that is gone already would be forgotten
                self._info = dataclasses.replace(self._info, rank=rank, world_size=world)
                self.follow_rank()
        told = self._info.notes
        added = tuple(note for note in (*notes, *self._notes()) if note not in told)
        self._info = dataclasses.replace(self._info, notes=(*told, *added))
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
        """Close the file, and let others write it."""
        self.data.close()
        self.release()

    def release(self) -> None:
        """Let others write the file."""
        if self._claim is not None:
            self._claim.release()

    def disinherit(self) -> None:
        """In a forked child, what was recorded is its parent's: nothing of it is touched, not even closed."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        _inherited.append(self.data)
        self._has_file = self._config.file is None
        self._claim = None
        self._info = dataclasses.replace(self._info, wall_s=0.0, own_s=0.0, complete=False, notes=(_FORKED,))
        self.data = DataFile.create(None, self._info, max_records=self._config.max_records)
