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
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from shadowrun.config import Config, Options
from shadowrun.errors import NestingError, ShadowrunWarning, UsageError
from shadowrun.intercept import forks, torchapi
from shadowrun.intercept.attribution import Attribution
from shadowrun.intercept.dispatch import ShadowMode, handing_over_ns
from shadowrun.intercept.stretches import Stretches
from shadowrun.intercept.threads import Threads
from shadowrun.intercept.watching import Watching
from shadowrun.platforms.device import Platform, resolve
from shadowrun.replay.budget import Budget
from shadowrun.replay.capturing import Capturing
from shadowrun.replay.drift import DriftChain
from shadowrun.replay.execution import Executor
from shadowrun.replay.recorder import Recorder
from shadowrun.replay.replayer import Replayer, why_not_behind
from shadowrun.replay.run_info import file_of_rank, run_info
from shadowrun.replay.run_info import rank as rank_of_process
from shadowrun.replay.schedule import Selection
from shadowrun.run import Run
from shadowrun.store.claim import Claim
from shadowrun.store.datafile import DataFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from typing_extensions import Unpack

    from shadowrun.compiled.regions import Regions

__all__ = ["Comparison", "compare", "current"]

F = TypeVar("F", bound=Callable[..., Any])

_active: Comparison | None = None
_active_lock = threading.Lock()
_inherited: list[DataFile] = []
_FLUSH_S = 0.5
_KEPT_OUT = (
    "The program entered a dispatch mode of its own in a step that the overhead budget left out, and kept it: "
    "the steps in which it was there were not watched."
)
_FORKED = "This process was forked from one that was being compared; what that recorded is not in here."


class Comparison(Run):
    """A comparison of two platforms, running or finished. Made by `compare`; holds what `Run` offers.

    Use it as a context manager, as a decorator, or by `start` and `stop`. It can be started again after a
    stop: records add up. It cannot be nested.
    """

    def __init__(self, config: Config, target: Platform, ref: Platform) -> None:
        self._config = config
        self._target = target
        self._ref = ref
        target.limit(config.call_limit_s)
        ref.limit(config.call_limit_s)
        self._selection = Selection(config)
        self._info = run_info(config, target, ref)
        # Until it starts, nobody knows which rank of a distributed run this is, and with it the name of the file.
        self._has_file = config.file is None
        self._claim: Claim | None = None
        super().__init__(DataFile.create(None, self._info, max_records=config.max_records), config.known)
        if config.file is not None:
            DataFile.check(config.file, self._info, append=config.append)
        self._attribution = Attribution()
        self._assemble(self._data)
        self._mode: ShadowMode | None = None
        self._watching: Watching | None = None
        self._stretches: Stretches | None = None
        self._flushed_at = 0.0
        self._step_began = 0.0
        self._stepped = False
        self._began = 0.0
        self._wall_s = 0.0
        self._pid = os.getpid()

    # -- running -----------------------------------------------------------------------------------

    def start(self) -> Self:
        """Begin to compare every operator call of this thread, and of threads that start from now on.

        Raises:
            NestingError: A comparison is running already.
            PlatformError: A platform needs a process of its own, which does not start.
            DataFileError: The data file cannot be written.
        """
        global _active  # noqa: PLW0603
        began_ns = time.perf_counter_ns()
        with _active_lock:
            if _active is not None:
                raise NestingError(
                    f"A comparison ({_active.describe()}) is running already: comparisons cannot be nested, since each "
                    "would replay the other's replays. Stop the first, or compare more platforms in runs of their own.",
                    slug="nested-compare",
                )
            _active = self
        try:
            self._disinherit()
            _watch_forks()
            _keep_dynamo_off()
            self._target.start()
            self._ref.start()
            self._find_rank()
            if self._budget is not None:
                self._stretches = Stretches(self._begin_stretch)
                self._stretches.start()
            self._attribution.start()
            self._replayer.start()
            self._threads.start()
            if self._regions is not None:
                self._regions.start()
            ShadowMode.clear_blind()
            self._mode = ShadowMode(self._replayer)
            self._stepped = False
            self._began = self._step_began = time.perf_counter()
            self._watching = Watching(self._mode, self._attribution)
            self._watching.begin()
            if self._budget is not None:
                self._budget.start(began_ns)
                self._budget.watched = self._watching.turn(self._budget.watched)
                self._budget.spend_on_step(began_ns, time.perf_counter_ns())
        except BaseException:
            self._mode = None
            self._release()
            if self._claim is not None:
                self._claim.release()
            raise
        return self

    def stop(self) -> Self:
        """End comparing; what was recorded is written. Does nothing if it is not running."""
        began_ns = time.perf_counter_ns()
        mode, self._mode = self._mode, None
        if mode is None:
            return self
        self._threads.look()
        try:
            if self._watching is not None:
                self._watching.end()
        finally:
            with self._replayer.between_calls():
                self._release()
            now = time.perf_counter()
            self._wall_s += now - self._began
            if self._recorder.recorded_in_step:
                self._end_step(now)
            self._finish()
            if self._budget is not None:
                self._budget.spend_on_step(began_ns, time.perf_counter_ns())
        return self

    def step(self) -> None:
        """Mark the end of a training step."""
        began_ns = time.perf_counter_ns()
        now = time.perf_counter()
        budget = self._budget
        if self._stretches is not None:
            self._end_stretches()
        if budget is not None and not budget.watched and self._replayer.lock.acquire(False):
            try:
                self._pass_step(budget, began_ns, now)
            finally:
                self._replayer.lock.release()
            return
        self._threads.look_again()
        if self._claim is not None:
            with contextlib.suppress(Exception):
                self._take_name_of_rank()
        self._end_step(now)
        with self._replayer.between_calls():
            try:
                self._attribution.end_step()
                self._begin_step(now)
                if budget is not None:
                    self._watch(budget, began_ns)
            except Exception:  # noqa: S110 - a step that is not counted right is not worth the user's program
                pass

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
        capturing = Capturing(data, config.captured_bytes) if config.captured_bytes else None
        self._recorder = Recorder(data, self._attribution, capturing)
        drift = DriftChain(Executor(self._ref), config.max_bytes) if config.drift else None
        self._budget = None if config.budget is None else Budget(config.budget, handing_over_ns())
        self._replayer = Replayer(config, self._target, self._ref, self._recorder, self._selection, drift, self._budget)
        self._threads = Threads(self._replayer, self._attribution)
        self._regions = self._compiled_regions() if config.compiled else None
        self._first_step = self._recorder.step

    def _compiled_regions(self) -> Regions:
        from shadowrun.compiled.regions import Regions  # imports Dynamo, 2 s

        return Regions(self._recorder, self._selection, self._replayer, self._config.max_bytes)

    def _find_rank(self) -> None:
        """Which rank this is, and its data file: each rank writes its own."""
        rank, world = rank_of_process()
        self._info = dataclasses.replace(self._info, rank=rank, world_size=world)
        config = self._config
        if self._has_file or config.file is None:
            if self._claim is not None:
                self._claim.renew()
            return
        claim = Claim(file_of_rank(config.file, rank, world))
        try:
            data = DataFile.create(claim.path, self._info, append=config.append, max_records=config.max_records)
        except BaseException:
            claim.release()
            raise
        self._claim = claim
        self._assemble(data)
        self._has_file = True

    def _begin_step(self, now: float) -> None:
        self._stepped = True
        self._step_began = now
        self._recorder.step += 1
        self._selection.begin_step(self._recorder.step - self._first_step)

    def _begin_stretch(self) -> None:
        """The program called its module again, and never told of a step: the time between stands for one."""
        began_ns = time.perf_counter_ns()
        budget, watching = self._budget, self._watching
        if self._stepped or budget is None or watching is None:
            return
        if not watching.can_turn:
            watching.kept_out = watching.kept_out or not watching.on
            return
        if self._replayer.lock.acquire(False):
            try:
                self._watch(budget, began_ns, is_stretch=True)
            except Exception:  # noqa: S110 - what is watched is not worth the user's program
                pass
            finally:
                self._replayer.lock.release()

    def _end_stretches(self) -> None:
        """The program tells of steps: what stood for them is done."""
        stretches, self._stretches = self._stretches, None
        if stretches is None:
            return
        follows = self._watching is not None and self._watching.on
        self._attribution.stop()  # its wrapper lies around ours
        stretches.stop()
        if follows and self._mode is not None:
            self._attribution.start()

    def _pass_step(self, budget: Budget, began_ns: int, now: float) -> None:
        """A step is over that nobody watched: for a small step, each microsecond counts."""
        try:
            self._recorder.data.add_step(self._recorder.step, self._step_began - self._began, now - self._step_began)
            self._begin_step(now)
            if now - self._flushed_at > _FLUSH_S:  # no call does it meanwhile
                self._flushed_at = now
                self._recorder.flush()
            self._watch(budget, began_ns)
        except Exception:  # noqa: S110 - a step's row is not worth the user's program
            pass

    def _watch(self, budget: Budget, began_ns: int, *, is_stretch: bool = False) -> None:
        """Have the coming step watched, or left out."""
        watching = self._watching
        if watching is None or self._mode is None:
            return
        # Calls on the target have to be answered; a mode that the user has put above ours keeps ours where it is.
        must = self._replayer.answers or (watching.on and not watching.can_leave)
        may = self._selection.compares_step
        wanted = budget.end_step(began_ns, must_watch=must, may_watch=may, is_stretch=is_stretch)
        if wanted is not watching.on:
            budget.watched = watching.turn(wanted)
        budget.spend_on_step(began_ns, time.perf_counter_ns())

    def _take_name_of_rank(self) -> None:
        """The group may have been made after the comparison began: the file gets the name that it should have."""
        if self._claim is None or not self._claim.held or self._config.file is None:
            return
        rank, world = rank_of_process()
        if world < 2:
            return
        wanted = file_of_rank(self._config.file, rank, world)
        if wanted == self._claim.wanted or (self._config.append and wanted.exists()):
            return
        claim = Claim(wanted)
        try:
            self._data.move(claim.path)
        except BaseException:
            claim.release()
            raise
        self._claim.release()
        self._claim = claim

    def _notes(self) -> tuple[str, ...]:
        """What a reader should know besides what was known at the beginning."""
        notes = list(self._threads.unseen.notes())
        if self._watching is not None and self._watching.kept_out:
            notes.append(_KEPT_OUT)
        if self._claim is not None and self._claim.contested:
            notes.append(
                f"Another process was writing {self._claim.wanted.name}, or it is the file of the process that this "
                f"one was forked from: this run is in {self._claim.path.name}."
            )
        return tuple(notes)

    def _sync(self) -> None:
        """Reports read the data file: everything must be in it."""
        self._disinherit()
        with self._replayer.between_calls():
            self._recorder.flush()
            self._update_info()

    def _update_info(self) -> None:
        running = time.perf_counter() - self._began if self._mode is not None else 0.0
        self._info = dataclasses.replace(
            self._info,
            wall_s=self._wall_s + running,
            own_s=self._replayer.own_ns / 1e9,
            behind_s=self._replayer.behind_ns / 1e9,
            budget={} if self._budget is None else dataclasses.asdict(self._budget.report()),
            complete=self._mode is None and self._wall_s > 0,
        )
        with contextlib.suppress(Exception):
            rank, world = rank_of_process()
            if world > 1:  # else a group that is gone already would be forgotten
                self._info = dataclasses.replace(self._info, rank=rank, world_size=world)
                self._take_name_of_rank()
            added = tuple(n for n in self._notes() if n not in self._info.notes)
            self._info = dataclasses.replace(self._info, notes=(*self._info.notes, *added))
        self._data.update_info(self._info)
        self._data.flush()

    def _end_step(self, now: float) -> None:
        try:  # noqa: SIM105 - its object costs more than the rest
            self._recorder.data.add_step(self._recorder.step, self._step_began - self._began, now - self._step_began)
        except Exception:  # noqa: S110 - as in `step`
            pass

    def _release(self) -> None:
        global _active  # noqa: PLW0603
        if self._regions is not None:
            self._regions.stop()
        self._threads.stop()
        self._replayer.stop()
        self._attribution.stop()
        self._end_stretches()
        self._target.stop()
        self._ref.stop()
        with _active_lock:
            if _active is self:
                _active = None

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """While the process forks: no call is half done, and no transaction is open."""
        with self._replayer.between_calls(), self._data.at_rest():
            yield

    def _abandon(self) -> None:
        """In a forked child: its operators pass, and nothing of it is recorded."""
        mode, self._mode = self._mode, None
        if mode is not None and self._watching is not None:
            if self._watching.can_leave:
                self._watching.end()
            else:
                mode.go_blind()
        self._replayer.forked()
        if self._claim is not None:
            self._claim.release()
        with contextlib.suppress(Exception):
            self._release()

    def _disinherit(self) -> None:
        """In a forked child, what was recorded is its parent's: nothing of it is touched, not even closed."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        _inherited.append(self._data)
        self._has_file = self._config.file is None
        self._claim = None
        self._wall_s = 0.0
        self._info = dataclasses.replace(self._info, wall_s=0.0, own_s=0.0, complete=False, notes=(_FORKED,))
        self._assemble(DataFile.create(None, self._info, max_records=self._config.max_records))

    def _finish(self) -> None:
        try:
            self._update_info()
            self._recorder.flush()
            self._data.close()
            if self._claim is not None:
                self._claim.release()
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
            atol, tolerance, known, settings, file, append, replay, drift, max_records, max_bytes, slow_ratio,
            call_limit_s, asynchronous, compiled, capture.

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
    platforms = resolve(target), resolve(ref)
    why_not = why_not_behind(config, *platforms) if config.asynchronous else ""
    if why_not:
        raise UsageError(f"asynchronous=True: {why_not}; leave it away.", slug="bad-option")
    return Comparison(config, *platforms)


def current() -> Comparison | None:
    """The comparison that is running, for code that has no handle on it (``current().step()``)."""
    return _active


_watching_forks = False


def _watch_forks() -> None:
    """A forked child (a worker of a DataLoader) is another program: it is not compared, and waits for no lock."""
    global _watching_forks  # noqa: PLW0603 - hooks of the process cannot be taken away again
    if not _watching_forks:
        _watching_forks = True
        forks.watch(lambda: _active._held() if _active is not None else None, _begin_child)


def _begin_child() -> None:
    global _active_lock  # noqa: PLW0603
    _active_lock = threading.Lock()
    ShadowMode.forked()
    if _active is not None:
        _active._abandon()


_told_dynamo = False


def _keep_dynamo_off() -> None:
    """Once Dynamo is loaded it may compile our handlers; telling it loads it, so only then."""
    global _told_dynamo  # noqa: PLW0603 - Dynamo's table is process-wide
    if not _told_dynamo and "torch._dynamo" in sys.modules:
        torchapi.skip_compilation_of("shadowrun")
        _told_dynamo = True
