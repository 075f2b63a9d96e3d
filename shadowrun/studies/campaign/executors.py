"""What a chunk of a campaign is as a job, and who runs it.

Executors by name: ``dask://host:8786``, ``dask://`` for this machine, ``module:factory`` for any other.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shadowrun.errors import DataFileError, UsageError
from shadowrun.limits import at_most_free
from shadowrun.store.codec import decode_facts
from shadowrun.studies.campaign.campaign_folder import digest_of
from shadowrun.studies.campaign.chunk_work import Chunk, ChunkWork
from shadowrun.studies.campaign.store import CampaignStore
from shadowrun.studies.campaign.tables import CampaignInfo
from shadowrun.studies.isolation.pool import Limits, Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.studies.campaign.engine import Executor, Future

__all__ = ["NO_PROGRAMS", "executor_named", "run_chunk"]

# A chunk as a job of an executor: a function of plain values that gives the bytes of a store.
#
# It may run in any process of any machine that has the same packages, and as often as the executor likes: the result
# depends on the chunk alone. The process of the executor keeps its worker processes for the next chunk.

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
    with contextlib.suppress(DataFileError):
        return digest_of(path) == digest
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


_DASK: Final = "dask://"


@contextlib.contextmanager
def executor_named(name: str, jobs: int) -> Iterator[Executor]:
    """An executor; what was started for it ends with the block.

    Args:
        name: As `--executor` has it.
        jobs: Processes of ``dask://``.

    Raises:
        UsageError: There is no such module, function or scheduler, or what the function made has no `submit`.
    """
    if name.startswith(_DASK):
        with _dask(name, jobs) as executor:
            yield executor
        return
    made = _made(name)
    try:
        yield made
    finally:
        # Of `concurrent.futures`, and of anything that has to be ended.
        ends: Callable[[], Any] | None = getattr(made, "shutdown", None) or getattr(made, "close", None)
        if ends is not None:
            ends()


def _made(name: str) -> Executor:
    module, colon, function = name.partition(":")
    if not (colon and module and function.isidentifier()):
        raise _bad(name, "use dask://HOST:PORT, dask://, or MODULE:FUNCTION")
    sys.path.append(os.getcwd())  # noqa: PTH109 - last, so that a file here shadows no installed module
    try:
        made = getattr(importlib.import_module(module), function)()
    except Exception as error:
        raise _bad(name, f"{type(error).__name__}: {error}") from error
    finally:
        sys.path.pop()
    if not callable(getattr(made, "submit", None)):
        raise _bad(name, f"what it returns, a {type(made).__name__}, has no method submit(function, *args)")
    executor: Executor = made
    return executor


@contextlib.contextmanager
def _dask(name: str, jobs: int) -> Iterator[Executor]:
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError as error:
        raise _bad(name, f"{error}; pip install -c constraints.txt -e '.[dask]'") from error
    address = name.removeprefix(_DASK)
    with contextlib.ExitStack() as stack:
        try:
            if address:
                cluster: Any = f"tcp://{address}"
            else:
                # Threads of one process would share its kernels' state; our own processes run the variants anyway.
                cluster = stack.enter_context(
                    distributed.LocalCluster(n_workers=jobs, threads_per_worker=1, dashboard_address=None)
                )
            client = stack.enter_context(distributed.Client(cluster, timeout="20s"))
        except (OSError, ValueError) as error:
            raise _bad(name, f"{type(error).__name__}: {error}") from error
        yield _Dask(client)


class _Dask:
    """Jobs of Dask that are run, not looked up: to Dask, a function of the same arguments has the same result.

    Args:
        client: A `distributed.Client`.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future:
        """Run a function somewhere."""
        future: Future = self._client.submit(function, *args, pure=False)
        return future


def _bad(name: str, why: str) -> UsageError:
    return UsageError(f"--executor {name!r} cannot be used: {why}.", slug="campaign-executor")
