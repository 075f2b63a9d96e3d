"""`compare()`: context manager, decorator, object. The only place where the stages meet."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from shadowrun.config import Config, Options
from shadowrun.errors import NestingError, ShadowrunWarning
from shadowrun.intercept import torchapi
from shadowrun.intercept.attribution import Attribution
from shadowrun.intercept.dispatch import ShadowMode
from shadowrun.intercept.threads import Threads
from shadowrun.platforms.device import Platform, resolve
from shadowrun.platforms.fingerprint import fingerprint, versions
from shadowrun.replay.drift import DriftChain
from shadowrun.replay.execution import Executor
from shadowrun.replay.recorder import Recorder
from shadowrun.replay.replayer import Replayer
from shadowrun.replay.schedule import Selection
from shadowrun.run import Run
from shadowrun.store.datafile import DataFile
from shadowrun.types import RunInfo

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Unpack

__all__ = ["Comparison", "compare", "current"]

F = TypeVar("F", bound=Callable[..., Any])

_active: Comparison | None = None
_active_lock = threading.Lock()
_MAX_NAMES = 5


class Comparison(Run):
    """A comparison of two platforms, running or finished. Made by `compare`; holds what `Run` offers.

    Use it as a context manager, as a decorator, or by `start` and `stop`. It can be started again after a
    stop: records add up. It cannot be nested.
    """

    def __init__(self, config: Config, target: Platform, ref: Platform) -> None:
        self._config = config
        self._target = target
        self._ref = ref
        self._selection = Selection(config)
        self._info = _run_info(config, target, ref)
        # Until it starts, nobody knows which rank of a distributed run this is, and with it the name of the file.
        self._has_file = config.file is None
        super().__init__(DataFile.create(None, self._info, max_records=config.max_records))
        if config.file is not None:
            DataFile.check(config.file, self._info, append=config.append)
        self._attribution = Attribution()
        self._assemble(self._data)
        self._mode: ShadowMode | None = None
        self._thread = 0
        self._step_began = 0.0
        self._stepped = False
        self._began = 0.0
        self._wall_s = 0.0

    # -- running -----------------------------------------------------------------------------------

    def start(self) -> Self:
        """Begin to compare every operator call of this thread, and of threads that start from now on.

        Raises:
            NestingError: A comparison is running already.
            PlatformError: A platform needs a process of its own, which does not start.
            DataFileError: The data file cannot be written.
        """
        global _active  # noqa: PLW0603
        with _active_lock:
            if _active is not None:
                raise NestingError(
                    f"A comparison ({_active.describe()}) is running already: comparisons cannot be nested, since each "
                    "would replay the other's replays. Stop the first, or compare more platforms in runs of their own.",
                    slug="nested-compare",
                )
            _active = self
        try:
            _watch_forks()
            _keep_dynamo_off()
            self._target.start()
            self._ref.start()
            self._find_rank()
            self._attribution.start()
            self._replayer.start()
            self._threads.start()
            ShadowMode.clear_blind()
            self._mode = ShadowMode(self._replayer)
            self._stepped = False
            self._began = self._step_began = time.perf_counter()
            self._thread = threading.get_ident()
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        except BaseException:
            self._mode = None
            self._release()
            raise
        return self

    def stop(self) -> Self:
        """End comparing; what was recorded is written. Does nothing if it is not running."""
        mode, self._mode = self._mode, None
        if mode is None:
            return self
        try:
            if self._thread == threading.get_ident():
                mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            else:
                mode.go_blind()
        finally:
            with self._replayer.between_calls():
                self._release()
            now = time.perf_counter()
            self._wall_s += now - self._began
            if self._recorder.recorded_in_step:
                self._end_step(now)
            self._finish()
        return self

    def step(self) -> None:
        """Mark the end of a training step."""
        now = time.perf_counter()
        self._end_step(now)
        self._stepped = True
        self._step_began = now
        with self._replayer.between_calls(), contextlib.suppress(Exception):
            self._recorder.step += 1
            self._attribution.end_step()
            self._selection.begin_step(self._recorder.step - self._first_step)

    def describe(self) -> str:
        """``sim against cpu``."""
        return f"{self._target} against {self._ref}"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __call__(self, function: F) -> F:
        """Decorate a function: each call is compared, and is a step unless it calls `step` itself."""
        if not callable(function):
            raise TypeError(f"compare(...) decorates functions, not {type(function).__name__}")
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError("compare(...) cannot decorate a coroutine or generator: use `with compare(...)` inside it")

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._mode is not None:  # recursion: the outer call compares already
                return function(*args, **kwargs)
            with self:
                result = function(*args, **kwargs)
                if not self._stepped:
                    self.step()
                return result

        wrapper.run = self  # type: ignore[attr-defined]
        return wrapper  # type: ignore[return-value]

    def __repr__(self) -> str:
        state = "running" if self._mode is not None else "stopped"
        return f"<shadowrun.Comparison {self.describe()}, {state}>"

    # -- inside --------------------------------------------------------------------------------------

    def _assemble(self, data: DataFile) -> None:
        config = self._config
        self._data = data
        self._table = None
        self._recorder = Recorder(data, self._attribution)
        drift = DriftChain(Executor(self._ref), config.max_bytes) if config.drift else None
        self._replayer = Replayer(config, self._target, self._ref, self._recorder, self._selection, drift)
        self._threads = Threads(self._replayer, self._attribution)
        self._first_step = self._recorder.step

    def _find_rank(self) -> None:
        """Which rank this is, and its data file: each rank writes its own."""
        rank, world = _rank()
        self._info = dataclasses.replace(self._info, rank=rank, world_size=world)
        if self._has_file or self._config.file is None:
            return
        config = self._config
        path = _file_of_rank(self._config.file, rank, world)
        self._assemble(DataFile.create(path, self._info, append=config.append, max_records=config.max_records))
        self._has_file = True

    def _notes(self) -> tuple[str, ...]:
        """What a reader should know besides what was known at the beginning."""
        notes = []
        unseen = tuple(self._threads.unseen)
        if unseen:
            names = ", ".join(unseen[:_MAX_NAMES]) + (f", {len(unseen) - _MAX_NAMES} more" * (len(unseen) > _MAX_NAMES))
            which = "1 thread was" if len(unseen) == 1 else f"{len(unseen)} threads were"
            notes.append(
                f"{which} running before the comparison began; operators called there are not compared: {names}."
            )
        rank, world = _rank()
        path = self._data.path
        if world > 1 and path is not None and path == self._config.file:
            notes.append(
                f"This is rank {rank} of {world}, but its group was made after the comparison began: all ranks were "
                "given one name for their data files, and may have overwritten each other's. Begin the comparison "
                "after init_process_group, or give each rank a file of its own."
            )
        return tuple(notes)

    def _sync(self) -> None:
        """Reports read the data file: everything must be in it."""
        with self._replayer.between_calls():
            self._recorder.flush()
            self._update_info()

    def _update_info(self) -> None:
        running = time.perf_counter() - self._began if self._mode is not None else 0.0
        self._info = dataclasses.replace(
            self._info,
            wall_s=self._wall_s + running,
            own_s=self._replayer.own_ns / 1e9,
            complete=self._mode is None and self._wall_s > 0,
        )
        with contextlib.suppress(Exception):
            rank, world = _rank()
            if world > 1:  # else a group that is gone already would be forgotten
                self._info = dataclasses.replace(self._info, rank=rank, world_size=world)
            added = tuple(n for n in self._notes() if n not in self._info.notes)
            self._info = dataclasses.replace(self._info, notes=(*self._info.notes, *added))
        self._data.update_info(self._info)
        self._data.flush()

    def _end_step(self, now: float) -> None:
        with contextlib.suppress(Exception):
            self._recorder.data.add_step(self._recorder.step, self._step_began - self._began, now - self._step_began)

    def _release(self) -> None:
        global _active  # noqa: PLW0603
        self._threads.stop()
        self._replayer.stop()
        self._attribution.stop()
        self._target.stop()
        self._ref.stop()
        with _active_lock:
            if _active is self:
                _active = None

    def _abandon(self) -> None:
        """In a forked child: its operators pass, and nothing of it is recorded."""
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.go_blind()
        self._replayer.forked()
        with contextlib.suppress(Exception):
            self._release()

    def _finish(self) -> None:
        try:
            self._update_info()
            self._recorder.flush()
            self._data.close()
            failure = self._data.failure
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        if failure:
            with contextlib.suppress(ShadowrunWarning):
                warnings.warn(
                    f"shadowrun could not record everything: {failure}. Your program was not affected.",
                    ShadowrunWarning,
                    stacklevel=3,
                )


def compare(target: Any, ref: Any = "cpu", **options: Unpack[Options]) -> Comparison:
    """Run every operator call on a second platform and record what differs.

    Args:
        target: Platform under test: any torch device (``"npu"``, ``"cuda:1"``, ``"sim"``), or the CPU
            with settings (``"cpu[threads=1,mkldnn=off]"``).
        ref: Platform that is trusted.
        **options: The fields of `shadowrun.Config`: on_unsupported, schedule, steps, modules, ops, rtol,
            atol, file, append, drift, max_records, max_bytes, slow_ratio.

    Returns:
        A context manager that is also a decorator and an object with start() and stop(). The user's
        program runs where its tensors live; results, gradients and random streams stay as they are.

    Raises:
        PlatformError: Unknown or absent platform, or a wrong setting.
        UsageError: Unknown or wrong option.
        DataFileError: The data file cannot be written.

    Example:
        >>> import torch, shadowrun
        >>> with shadowrun.compare("cpu[threads=1]", ref="cpu") as run:
        ...     _ = torch.ones(2, 2) @ torch.ones(2, 2)
        >>> run.counts()[shadowrun.Status.MATCH] > 0
        True
    """
    if callable(target) and not isinstance(target, (str, torch.device)):
        raise TypeError('Name the target platform: @shadowrun.compare("npu"), not @shadowrun.compare.')
    config = Config.make(**options)
    return Comparison(config, resolve(target), resolve(ref))


def current() -> Comparison | None:
    """The comparison that is running, for code that has no handle on it (``current().step()``)."""
    return _active


def _run_info(config: Config, target: Platform, ref: Platform) -> RunInfo:
    notes = []
    if str(target) == str(ref):
        notes.append(f"Target and reference are the same platform ({target}): a self-check, which should find nothing.")
    rank, world = _rank()
    return RunInfo(
        target=str(target),
        ref=str(ref),
        target_fingerprint=fingerprint(target),
        ref_fingerprint=fingerprint(ref),
        versions=versions(),
        argv=(Path(sys.argv[0]).name, *sys.argv[1:]) if sys.argv else (),
        config=config.printable(),
        rank=rank,
        world_size=world,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        notes=tuple(notes),
    )


def _rank() -> tuple[int, int]:
    """Rank and size of the run; where the program has not made its group yet, those that torchrun gives it."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and world.isdecimal() and int(rank) < int(world):
        return int(rank), int(world)
    return 0, 1


def _file_of_rank(path: Path, rank: int, world: int) -> Path:
    """``run.1.shadowrun`` for ``run.shadowrun``: one file for each rank of a distributed run."""
    return path.with_name(f"{path.stem}.{rank}{path.suffix}") if world > 1 else path


_watching_forks = False


def _watch_forks() -> None:
    """A forked child (a worker of a DataLoader) is another program: it is not compared, and waits for no lock."""
    global _watching_forks  # noqa: PLW0603 - hooks of the process cannot be taken away again
    if _watching_forks or not hasattr(os, "register_at_fork"):
        return
    _watching_forks = True
    held: list[threading.RLock] = []

    def before() -> None:
        comparison = _active
        if comparison is not None and comparison._replayer.take_turn():
            held.append(comparison._replayer.lock)

    def after() -> None:
        while held:
            held.pop().release()

    def in_child() -> None:
        after()
        comparison = _active
        if comparison is not None:
            comparison._abandon()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)


_told_dynamo = False


def _keep_dynamo_off() -> None:
    """Once Dynamo is loaded it may compile our handlers; telling it loads it, so only then."""
    global _told_dynamo  # noqa: PLW0603 - Dynamo's table is process-wide
    if not _told_dynamo and "torch._dynamo" in sys.modules:
        torchapi.skip_compilation_of("shadowrun")
        _told_dynamo = True
