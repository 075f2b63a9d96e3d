"""A chunk as a job of an executor: a function of plain values that gives the bytes of a store.

It may run in any process of any machine that has the same packages, and as often as the executor likes: the result
depends on the chunk alone. The process of the executor keeps its worker processes for the next chunk.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import tempfile
import threading
from pathlib import Path
from typing import Any

from shadowrun.limits import at_most_free
from shadowrun.store.codec import decode_facts
from shadowrun.studies.campaign.store import CampaignStore
from shadowrun.studies.campaign.tables import CampaignInfo
from shadowrun.studies.campaign.work import Chunk, ChunkWork
from shadowrun.studies.isolation.pool import Limits, Pool

__all__ = ["NO_PROGRAMS", "run_chunk"]

NO_PROGRAMS = b"programs"
"""Answer of a machine that does not see the folder: it needs the content of the file with the programs."""
_idle: list[_Kept] = []
# Executors such as Dask may run two jobs of one process in threads.
_lock = threading.Lock()


def run_chunk(job: dict[str, Any], start: int, stop: int, target: int, programs: bytes | None = None) -> bytes:
    """Run a chunk.

    Args:
        job: entry, settings, info, limits and digest of the programs, of `Engine`.
        start: First recipe.
        stop: Recipe after the last.
        target: First target of the first recipe.
        programs: Content of the file with the programs, where this machine does not see it.

    Returns:
        The bytes of a store, or `NO_PROGRAMS`.

    Raises:
        ShadowrunError: A platform is absent.
    """
    if programs is None and not _is_there(Path(job["settings"]["programs"]), job["digest"]):
        return NO_PROGRAMS
    kept = _kept_for(job, programs)
    try:
        result = kept.run(Chunk(start, stop, target))
    # Also Ctrl-C and a cancelled job: the state of its worker process is unknown then.
    except BaseException:
        kept.close()
        raise
    with _lock:
        _idle.append(kept)
    return result


def _is_there(path: Path, digest: str) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32] == digest
    return False


def _kept_for(job: dict[str, Any], programs: bytes | None) -> _Kept:
    # A worker process has platforms, flaws and programs loaded: it serves any chunk of the same job.
    key = json.dumps(job, sort_keys=True)
    with _lock:
        for kept in list(_idle):
            # A worker of an executor serves one campaign after another.
            _idle.remove(kept)
            if kept.key == key:
                return kept
            kept.close()
    return _Kept(key, job, programs)


class _Kept:
    """A worker process that is kept between chunks.

    Attributes:
        key: The job that it was started for.
    """

    def __init__(self, key: str, job: dict[str, Any], programs: bytes | None) -> None:
        self.key = key
        self._folder = tempfile.TemporaryDirectory(prefix="shadowrun-")
        folder = Path(self._folder.name)
        settings = dict(job["settings"])
        settings["claims"] = str(folder / "claims")
        if programs is not None:
            settings["programs"] = str(folder / "programs")
            Path(settings["programs"]).write_bytes(programs)
        self._info = decode_facts(CampaignInfo, json.dumps(job["info"]))
        self._store = folder / "chunk"
        seconds, n_bytes = job["limits"]
        limits = Limits(seconds, at_most_free(n_bytes))
        self._pool: Pool[Chunk] = Pool(job["entry"], settings, 1, limits, None, job["reset_command"])

    def run(self, chunk: Chunk) -> bytes:
        """The rows of a chunk."""
        # The last chunk's: a store holds the rows of one chunk, since its bytes are the answer.
        self._store.unlink(missing_ok=True)
        store = CampaignStore.begin(self._store, self._info)
        try:
            work = ChunkWork(store, iter([chunk]), len(self._info.targets))
            self._pool.work = work
            self._pool.run()
            work.save()
        finally:
            store.close()
        return self._store.read_bytes()

    def close(self) -> None:
        """End the worker process."""
        self._pool.close()
        self._folder.cleanup()


def _end_all() -> None:
    with _lock:
        while _idle:
            _idle.pop().close()


# Processes that are kept outlive a job, and must not outlive the executor's process.
atexit.register(_end_all)
