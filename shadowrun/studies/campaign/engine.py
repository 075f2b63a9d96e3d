"""Runs a campaign, or its shard: in worker processes of this machine, or as chunks that an executor runs anywhere.

What is missing is what has no row in any shard of the folder, so that every start goes on where the last one ended,
however it ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import signal
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from shadowrun.errors import DataFileError, PlatformError, ShadowrunError
from shadowrun.limits import at_most_free
from shadowrun.store.atomic_write import atomic_write
from shadowrun.studies.campaign.campaign_folder import CHUNK, CampaignFolder
from shadowrun.studies.campaign.chunk_work import Chunk, ChunkWork
from shadowrun.studies.campaign.combine_stores import add_rows
from shadowrun.studies.campaign.executors import NO_PROGRAMS, run_chunk
from shadowrun.studies.campaign.seen_variants import SeenVariants
from shadowrun.studies.campaign.store import CampaignStore
from shadowrun.studies.campaign.worker import ENTRY
from shadowrun.studies.isolation.pool import Limits, Pool
from shadowrun.studies.isolation.process import refuse_without_processes
from shadowrun.studies.isolation.worker_progress import processor_seconds
from shadowrun.studies.shards import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Engine", "Executor", "Future", "Outcome", "Progress", "open_chunks"]

# The row of a start in the table `session` is written this often: after a kill, its times are at most so much behind.
_SAVE_S: Final = 5.0
_LOOK_S: Final = 0.05
# Times that a chunk is given to an executor: its processes may be killed.
_TRIES: Final = 3
# Variants that a table is made for where no number is given.
_UNLIMITED: Final = 1 << 20


class Future(Protocol):
    """What an executor gives for a job."""

    def done(self) -> bool:
        """Whether it has ended."""

    def result(self) -> Any:
        """What the function returned; raises what it raised, or that its process was lost."""


class Executor(Protocol):
    """Anything that runs functions elsewhere: `concurrent.futures`, `dask.distributed.Client`, and others."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future:
        """Run a function of plain values."""


class Outcome(enum.Enum):
    """How a start ended."""

    COMPLETE = "complete"
    TIME = "time is over"
    STOPPED = "stopped"
    INCOMPLETE = "some chunks failed"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a start is.

    Attributes:
        n_done: Variants that are settled, those of earlier starts too.
        n: Variants of this shard; None without limit.
        n_now: Variants that this start settled.
        n_findings: Findings of this start.
        wall_s: Seconds since its beginning.
    """

    n_done: int
    n: int | None
    n_now: int
    n_findings: int
    wall_s: float


class Engine:
    """Runs what is missing of a campaign.

    Args:
        folder: The campaign.
        jobs: Worker processes; chunks in flight with an executor.
        shard: The part that this process runs.
        minutes: Stop after so long; None for no limit.
        reset_command: Brings a lost device back.
        on_progress: Called several times a second.
        entry: The worker's function; tests have another.
    """

    def __init__(
        self,
        folder: CampaignFolder,
        *,
        jobs: int = 1,
        threads: int = 1,
        shard: Shard = Shard(),  # noqa: B008 - frozen
        minutes: float | None = None,
        reset_command: Sequence[str] = (),
        on_progress: Callable[[Progress], None] = lambda _: None,
        entry: str = ENTRY,
    ) -> None:
        self._folder, self._settings = folder, folder.settings
        self._jobs, self._threads, self._shard = jobs, threads, shard
        self._ends = None if minutes is None else time.monotonic() + 60 * minutes
        self._reset_command = tuple(reset_command)
        self._on_progress, self._entry = on_progress, entry
        self._began = self._saved = time.monotonic()
        self._n_before = 0
        self._session = 0
        self._is_stopped = False

    def run(self, executor: Executor | None = None) -> Outcome:
        """Run it; returns when all is run, time is over, or after Ctrl-C.

        Raises:
            DataFileError: A store cannot be read or written, is of another campaign, or is written by another process.
            PlatformError: A platform is absent or its device is lost; what was run is kept.
        """
        refuse_without_processes("campaign")
        self._folder.check_programs()
        # Opened before anything is computed: the lock of the file refuses a second process that would run the same
        # shard.
        store = CampaignStore.begin(self._folder.shard(self._shard), self._folder.info())
        cpu_s = _cpu_s()
        try:
            with self._interrupts_noted(), tempfile.TemporaryDirectory(prefix="shadowrun-") as scratch:
                claims = self._claims(Path(scratch))
                settled = self._settled()
                chunks = iter(open_chunks(settled, self._settings.n, self._shard, len(self._settings.shown_targets)))
                with store.written():
                    self._session = store.add_session(datetime.now(UTC).isoformat(timespec="seconds"), self._jobs)
                work = ChunkWork(
                    # A compiled target has a number of its own, though it runs on the platform of another.
                    *(store, chunks, len(self._settings.shown_targets), self._is_over),
                    lambda: self._saved_rows(store, work.n_variants, work.n_findings, cpu_s),
                )
                try:
                    if executor is None:
                        return self._run_here(work, claims)
                    return self._run_elsewhere(executor, store, chunks, cpu_s)
                except KeyboardInterrupt:
                    return Outcome.STOPPED
                finally:
                    with contextlib.suppress(DataFileError):  # keep the first exception
                        work.save()
                        self._save_session(store, work.n_variants, cpu_s)
        finally:
            store.close()

    # -- in processes of this machine ------------------------------------------------------------------

    def _run_here(self, work: ChunkWork, claims: Path) -> Outcome:
        settings = self._worker_settings() | {"claims": str(claims)}
        # More than the machine has free would be no limit: the system would kill processes first.
        limits = Limits(self._settings.timeout_s, at_most_free(self._settings.memory_bytes))
        pool = Pool(self._entry, settings, self._jobs, limits, work, self._reset_command)
        with contextlib.closing(pool):
            pool.run()
        return self._outcome()

    def _worker_settings(self) -> dict[str, Any]:
        more = {"n_claims": self._settings.n or _UNLIMITED}
        return self._settings.for_workers(self._folder.programs.absolute(), self._threads) | more

    def _claims(self, scratch: Path) -> Path:
        """A table of the variants that were met in earlier starts."""
        path = scratch / "claims"
        table = SeenVariants(path, self._settings.n or _UNLIMITED)
        for shard in self._folder.shards():
            with contextlib.closing(self._opened(shard)) as store:
                # Of all shards, not only of this one: what another machine has run already is not run here.
                for identity, number in store.identities():
                    table.mark_seen(identity, number)
        table.close()
        return path

    def _settled(self) -> dict[int, int]:
        """Settled targets by variant, from all shards."""
        settled: dict[int, int] = {}
        for shard in self._folder.shards():
            with contextlib.closing(self._opened(shard)) as store:
                for number, n in store.settled_targets():
                    # Two shards may have the same variant: a chunk may have been run on two machines.
                    settled[number] = max(n, settled.get(number, 0))
        n_targets = len(self._settings.shown_targets)
        self._n_before = sum(
            # Of this shard only: the progress that is shown is its own.
            n >= n_targets and number // CHUNK % self._shard.of == self._shard.index
            for number, n in settled.items()
        )
        return settled

    def _opened(self, path: Path) -> CampaignStore:
        store = CampaignStore.open(path)
        if store.info.campaign != self._settings.campaign:
            store.close()
            from shadowrun.studies.campaign.store import other_campaign

            raise other_campaign(path)
        return store

    # -- elsewhere ---------------------------------------------------------------------------------------

    def _run_elsewhere(
        self, executor: Executor, store: CampaignStore, chunks: Iterator[Chunk], cpu_s: float
    ) -> Outcome:
        job = {
            "entry": self._entry,
            "settings": self._worker_settings(),
            "info": dataclasses.asdict(self._folder.info()),
            "limits": [self._settings.timeout_s, self._settings.memory_bytes],
            "digest": self._settings.programs,
            "reset_command": self._reset_command,
        }
        remote = _Submitted(executor, job, self._folder.programs)
        n_variants = n_findings = n_failed = 0
        # SQLite opens files only: the bytes of a chunk go to a file next to the store before their rows are added.
        part = store.path.with_name(f"{store.path.name}.chunk")
        try:
            while not self._is_over():
                # No more than `--jobs` in flight: an executor may have a queue without end, and what lies in it is
                # lost with Ctrl-C.
                while len(remote.flying) < self._jobs and (chunk := next(chunks, None)) is not None:
                    remote.submit(chunk)
                if not remote.flying:
                    break
                for chunk, result in remote.ended():
                    if result is None:
                        n_failed += 1
                        continue
                    with atomic_write(part) as file:
                        file.write(result)
                    n_findings += add_rows(store, part)
                    n_variants += chunk.stop - chunk.start
                self._saved_rows(store, n_variants, n_findings, cpu_s)
                time.sleep(_LOOK_S)
        finally:
            part.unlink(missing_ok=True)
            self._save_session(store, n_variants, cpu_s)
        return self._outcome(n_failed)

    # -- progress ------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        return self._is_stopped or (self._ends is not None and time.monotonic() > self._ends)

    def _outcome(self, n_failed: int = 0) -> Outcome:
        if self._is_stopped:
            return Outcome.STOPPED
        if self._is_over():
            return Outcome.TIME
        return Outcome.INCOMPLETE if n_failed else Outcome.COMPLETE

    @contextlib.contextmanager
    def _interrupts_noted(self) -> Iterator[None]:
        """Ctrl-C ends the loops, and a second one what they do: an exception could come amid a transaction."""
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(*_: Any) -> None:
            self._is_stopped = True
            signal.signal(signal.SIGINT, before)

        signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _saved_rows(self, store: CampaignStore, n_variants: int, n_findings: int, cpu_s: float) -> None:
        now = time.monotonic()
        if now - self._saved > _SAVE_S:
            self._saved = now
            self._save_session(store, n_variants, cpu_s)
        n = _n_of(self._settings.n, self._shard) if self._settings.n else None
        self._on_progress(Progress(self._n_before + n_variants, n, n_variants, n_findings, now - self._began))

    def _save_session(self, store: CampaignStore, n_variants: int, cpu_s: float) -> None:
        with store.written():
            store.set_session(self._session, n_variants, time.monotonic() - self._began, _cpu_s() - cpu_s)


class _Submitted:
    """Chunks that an executor has.

    Args:
        executor: The executor.
        job: First argument of `run_chunk`.
        programs: File with the programs.

    Attributes:
        flying: Chunks with their futures and the number of tries.
    """

    def __init__(self, executor: Executor, job: dict[str, Any], programs: Path) -> None:
        self._executor, self._job, self._programs = executor, job, programs
        self._content: bytes | None = None
        self.flying: deque[tuple[Chunk, Future, int]] = deque()

    def submit(self, chunk: Chunk, tries: int = 1) -> None:
        """Give a chunk to the executor."""
        args = (self._job, chunk.start, chunk.stop, chunk.target, self._content)
        self.flying.append((chunk, self._executor.submit(run_chunk, *args), tries))

    def ended(self) -> Iterable[tuple[Chunk, bytes | None]]:
        """Chunks that have ended, with the store; None for those that are given up.

        Raises:
            ShadowrunError: One cannot run there, for example because a platform is absent.
        """
        # Futures are asked in turn, not waited for: executors have no wait in common, and one that hangs must not
        # hold up the others.
        for _ in range(len(self.flying)):
            chunk, future, tries = self.flying.popleft()
            if not future.done():
                self.flying.append((chunk, future, tries))
                continue
            try:
                result = future.result()
            except ShadowrunError:
                raise
            except Exception:  # its process was killed, or its machine is gone
                if tries < _TRIES:
                    self.submit(chunk, tries + 1)
                else:
                    yield chunk, None
                continue
            # The programs are sent once a machine has asked for them: a job is small without them.
            if result == NO_PROGRAMS:
                if self._content is not None and tries >= _TRIES:
                    raise PlatformError(
                        "The executor loses arguments of its jobs: a chunk that had the programs came back without. "
                        "Give its workers the folder of the campaign.",
                        slug="campaign-executor",
                    )
                self._content = self._programs.read_bytes()
                self.submit(chunk, tries + 1)
            else:
                yield chunk, result


def open_chunks(settled: dict[int, int], n: int, shard: Shard, n_targets: int) -> Iterator[Chunk]:
    """Chunks of the variants that have no outcome yet.

    Args:
        settled: Settled targets by variant; emptied as it is read.
        n: Number of variants; 0 for no limit.
        shard: Which chunks.
        n_targets: Number of targets.
    """
    for start in itertools.count(shard.index * CHUNK, shard.of * CHUNK):
        if n and start >= n:
            return
        stop = min(start + CHUNK, n) if n else start + CHUNK
        begin = None
        for number in range(start, stop):
            done = settled.pop(number, 0)
            # A variant that lacks some of its targets is a chunk of its own.
            if done and begin is not None:
                yield Chunk(begin, number)
                begin = None
            if 0 < done < n_targets:
                yield Chunk(number, number + 1, done)
            elif not done and begin is None:
                begin = number
        if begin is not None:
            yield Chunk(begin, stop)


def _n_of(n: int, shard: Shard) -> int:
    """Variants of a shard."""
    starts = range(shard.index * CHUNK, n, shard.of * CHUNK)  # not to be walked through: a file may say any number
    return len(starts) * CHUNK - max(0, starts[-1] + CHUNK - n) if starts else 0


def _cpu_s() -> float:
    """Processor time of this process and its children, so far."""
    import resource  # absent on Windows, where `refuse_without_processes` has raised

    # Workers that still run are in neither: Linux lists them below.
    own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    total = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    with contextlib.suppress(OSError):  # macOS: children that run are counted when they have ended
        for children in Path("/proc/self/task").glob("*/children"):
            total += sum(processor_seconds(int(pid)) for pid in children.read_text(encoding="ascii").split())
    return total
