"""The data file: what a run recorded, streamed to SQLite; reports read nothing else."""

from shadowrun.store.datafile import DataFile

__all__ = ["DataFile"]
