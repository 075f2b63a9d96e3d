"""`compare()`: context manager, decorator, object; it puts the stages together."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from shadowrun.comparison import running
from shadowrun.comparison.output import Output
from shadowrun.comparison.running import Running
from shadowrun.comparison.steps import Steps
from shadowrun.config import Config, Options
from shadowrun.errors import ShadowrunWarning, UsageError
from shadowrun.intercept.attribution import Attribution
from shadowrun.intercept.dispatch import ShadowMode, handing_over_ns
from shadowrun.intercept.sites import site_of
from shadowrun.intercept.threads import Threads
from shadowrun.platforms.device import Platform, resolve
from shadowrun.platforms.torchnames import warn_of_untested
from shadowrun.replay.budget import Budget
from shadowrun.replay.capturing import Capturing
from shadowrun.replay.drift import Drift
from shadowrun.replay.execution import Executor
from shadowrun.replay.recorder import Recorder
from shadowrun.replay.replayer import Replayer, why_not_behind
from shadowrun.replay.run_info import run_info
from shadowrun.replay.schedule import Selection, check_operators
from shadowrun.run import Run
from shadowrun.types import Allowed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from typing_extensions import Unpack

    from shadowrun.compiled.regions import Regions

__all__ = ["Comparison", "compare", "current"]

_SAMPLED = (
    "Calls that are too large to be judged as a whole were judged by slices of them, those farthest from the reference "
    "among them; their evidence says which."
)

F = TypeVar("F", bound=Callable[..., Any])
_MOST_TOLD = 200


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
        self._output = Output(config, run_info(config, target, ref))
        super().__init__(self._output.data, config.known)
        self._attribution = Attribution()
        self._assemble()
        self._mode: ShadowMode | None = None
        self._marks_steps = False
        self._raised = ""

    def _own(self) -> Allowed:
        # What was in a file before this run may be somebody else's.
        return Allowed((str(self._target.spec), str(self._ref.spec)), modules=not self._config.append)

    # -- running -----------------------------------------------------------------------------------

    def start(self) -> Self:
        """Begin to compare every operator call of this thread, and of threads that start from now on.

        Raises:
            NestingError: A comparison is running already.
            PlatformError: A platform needs a process of its own, which does not start.
            DataFileError: The data file cannot be written.
        """
        began_ns = time.perf_counter_ns()
        running.begin(Running(self, self.describe(), self._held, self._abandon))
        try:
            self._disinherit()
            running.prepare_process()
            self._target.start()
            self._ref.start()
            self._output.open()
            self._reassemble()
            self._steps.listen(None if self._marks_steps else self._end_step)
            self._attribution.start()
            self._replayer.start()
            self._threads.start()
            if self._regions is not None:
                self._regions.start()
            ShadowMode.clear_blind()
            self._mode = ShadowMode(self._replayer)
            self._steps.begin(self._mode, began_ns)
        except BaseException:
            self._mode = None
            self._release()
            self._output.release()
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
            self._steps.leave()
        finally:
            with self._replayer.between_calls():
                self._release()
            self._steps.finish()
            self._finish()
            if self._budget is not None:
                self._budget.spend_on_step(began_ns, time.perf_counter_ns())
        return self

    def step(self) -> None:
        """Mark the end of a training step.

        A program that never does has a step for each of its optimizer's.
        """
        if not self._steps.told:
            self._marks_steps = True
            self._steps.mark()
        self._end_step()

    def _end_step(self) -> None:
        steps = self._steps
        if steps.rests():
            return
        began_ns = time.perf_counter_ns()
        if self._budget is not None and steps.end_unwatched(began_ns):
            return
        self._threads.look_again()
        if self._config.file is not None:
            self._output.follow_rank()
        steps.end(began_ns)

    def describe(self) -> str:
        """``sim against cpu``."""
        return f"{self._target} against {self._ref}"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._raised = "" if error is None else _told(error)
        self.stop()

    def __call__(self, function: F) -> F:
        """Decorate a function: each call is compared, and is a step unless it calls `step` itself."""
        if not callable(function):
            raise TypeError(f"compare(...) decorates functions, not {type(function).__name__}")
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError("compare(...) cannot decorate a coroutine or generator: use `with compare(...)` inside it")

        self._marks_steps = True

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._mode is not None:  # recursion: the outer call compares already
                return function(*args, **kwargs)
            with self:
                result = function(*args, **kwargs)
                if not self._steps.told:
                    self.step()
                return result

        wrapper.run = self  # type: ignore[attr-defined]
        return wrapper  # type: ignore[return-value]

    def __repr__(self) -> str:
        state = "running" if self._mode is not None else "stopped"
        return f"<shadowrun.Comparison {self.describe()}, {state}>"

    # -- inside --------------------------------------------------------------------------------------

    def _assemble(self) -> None:
        """Make what writes to the data file."""
        config, data = self._config, self._output.data
        capturing = Capturing(data, config.captured_bytes) if config.captured_bytes else None
        self._recorder = Recorder(data, self._attribution, capturing)
        drift = Drift(Executor(self._target), Executor(self._ref), config.max_bytes) if config.drift else None
        self._budget = None if config.budget is None else Budget(config.budget, handing_over_ns())
        self._replayer = Replayer(config, self._target, self._ref, self._recorder, self._selection, drift, self._budget)
        self._threads = Threads(self._replayer, self._attribution)
        self._regions = self._compiled_regions() if config.compiled else None
        self._steps = Steps(self._recorder, self._replayer, self._selection, self._budget)
        self._data, self._table = data, None

    def _reassemble(self) -> None:
        """Make it anew where there is another data file."""
        if self._data is not self._output.data:
            self._assemble()

    def _compiled_regions(self) -> Regions:
        from shadowrun.compiled.regions import Regions  # imports Dynamo, 2 s

        return Regions(self._recorder, self._selection, self._replayer, self._config.max_bytes)

    def _sync(self) -> None:
        """Reports read the data file: everything must be in it."""
        self._disinherit()
        with self._replayer.between_calls():
            self._recorder.flush()
            self._update_info()

    def _update_info(self) -> None:
        notes: tuple[str, ...] = ()
        with contextlib.suppress(Exception):
            notes = (*self._threads.unseen.notes(), *self._steps.notes())
            notes += (_SAMPLED,) if self._replayer.sampled else ()
        wall_s = self._steps.wall_s
        self._output.update(
            notes,
            wall_s=wall_s,
            own_s=self._replayer.own_ns / 1e9,
            behind_s=self._replayer.behind_ns / 1e9,
            budget={} if self._budget is None else dataclasses.asdict(self._budget.report()),
            complete=self._mode is None and wall_s > 0,
            raised=self._raised,
            unselected=self._selection.unmatched(),
        )

    def _release(self) -> None:
        if self._regions is not None:
            self._regions.stop()
        self._threads.stop()
        self._replayer.stop()
        self._attribution.stop()
        self._steps.release()
        self._target.stop()
        self._ref.stop()
        running.end(self)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """While the process forks: no call is half done, and no transaction is open."""
        with self._replayer.between_calls(), self._data.at_rest():
            yield

    def _abandon(self) -> None:
        """In a forked child: its operators pass, and nothing of it is recorded."""
        mode, self._mode = self._mode, None
        if mode is not None:
            self._steps.abandon(mode)
        self._replayer.forked()
        self._output.release()
        with contextlib.suppress(Exception):
            self._release()

    def _disinherit(self) -> None:
        self._output.disinherit()
        self._reassemble()

    def _finish(self) -> None:
        try:
            self._update_info()
            self._recorder.flush()
            self._output.close()
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


def _told(error: BaseException) -> str:
    """An exception in one line, with the user's line that it came through last; empty for an ordinary end."""
    if isinstance(error, (GeneratorExit, SystemExit)) and (isinstance(error, GeneratorExit) or not error.code):
        return ""
    try:
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        site = site_of(error.__traceback__)
    except Exception:  # of the program's own class
        return type(error).__name__
    return f"{text[:_MOST_TOLD]} ({site})" if site else text[:_MOST_TOLD]


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
    check_operators(config.ops or ())
    warn_of_untested(stacklevel=2)
    platforms = resolve(target), resolve(ref)
    why_not = why_not_behind(config, *platforms) if config.asynchronous else ""
    if why_not:
        raise UsageError(f"asynchronous=True: {why_not}; leave it away.", slug="bad-option")
    return Comparison(config, *platforms)


def current() -> Comparison | None:
    """The comparison that is running, for code that has no handle on it (``current().step()``)."""
    found: Comparison | None = running.comparison()
    return found
