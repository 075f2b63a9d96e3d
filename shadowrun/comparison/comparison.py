"""`compare()` and the `Comparison` that it returns, which connects all stages."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from shadowrun.analysis import CallReader, Signature
from shadowrun.comparison.active_run import RunHandle, Running, begin, end, prepare_process, running
from shadowrun.comparison.finding_callbacks import FindingWatch, WatchedReplayer
from shadowrun.comparison.output import Output, distributed_rank, run_info
from shadowrun.comparison.steps import Steps
from shadowrun.config import Config, Options
from shadowrun.errors import CallFindingError, ShadowrunWarning, StoppedAtFinding, UsageError
from shadowrun.intercept.api_calls import ApiCalls
from shadowrun.intercept.attribution import Attribution
from shadowrun.intercept.call_sites import site_of
from shadowrun.intercept.dispatch import ShadowMode, dispatch_overhead_ns
from shadowrun.intercept.threads import Threads
from shadowrun.platforms.device import Platform, resolve
from shadowrun.recording.input_capture import Capturing
from shadowrun.recording.recorder import Recorder, WatchingRecorder
from shadowrun.replay.paths.async_path import choose_async
from shadowrun.replay.replayer import Replayer
from shadowrun.run import Run
from shadowrun.schedule.budget import Budget
from shadowrun.schedule.selection import Selection, check_operators
from shadowrun.settings import NEW
from shadowrun.torch_versions import warn_of_untested
from shadowrun.types import Permissions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    from typing_extensions import Unpack

    from shadowrun.compiled.regions.compare_regions import Regions
    from shadowrun.types import OpRecord

__all__ = ["Comparison", "compare", "current"]


_SAMPLED = (
    "Calls that are too large to be judged as a whole were judged by slices of them, those farthest from the reference "
    "among them; their evidence says which."
)

_MAX_EXCEPTION_TEXT = 200


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a comparison is.

    Attributes:
        n_calls: Calls recorded.
        n_found: Findings by kind, of single calls; known issues are not counted.
        overhead: Time so far in units of that without the comparison.
        step: The current step.
        last_step: The last step that is compared; -1 if not known.
        left_s: Seconds until that is over, as fast as so far; -1 if not known.
    """

    n_calls: int
    n_found: Mapping[str, int]
    overhead: float
    step: int
    last_step: int
    left_s: float


class Comparison(RunHandle, Run):
    """A comparison of two platforms, running or finished. Made by `compare`; holds what `Run` offers.

    Use it as a context manager, as a decorator, or by `start` and `stop`. It can be started again after a
    stop: records add up. It cannot be nested.

    Attributes:
        gives_way: Whether it stops where the program begins a comparison or recording of its own, which fails without.
    """

    _made_by = "compare"

    def __init__(self, config: Config, target: Platform, ref: Platform) -> None:
        self._config = config
        self._target = target
        self._ref = ref
        target.set_timeout(config.call_limit_s)
        ref.set_timeout(config.call_limit_s)
        self._selection = Selection(config)
        self._output = Output(config, run_info(config, target, ref))
        super().__init__(self._output.data, config.known, vendor_known=config.vendor_known)
        self._attribution = Attribution()
        wants_watch = config.fail_fast or config.stop_on or config.on_finding
        self._watch: FindingWatch | None = self._new_watch() if wants_watch else None
        self._assemble()
        self._mode: ShadowMode | None = None
        self._marks_steps = False
        self._raised = ""
        self._left_out = False
        self.gives_way = False
        self._after_steps: list[Callable[[Comparison], object]] = []

    def _allowed_by_process(self) -> Permissions:
        # An appended file has records of earlier runs, perhaps of another person: they may not name modules.
        return Permissions((str(self._target.spec), str(self._ref.spec)), modules=not self._config.append)

    # -- running -----------------------------------------------------------------------------------

    def start(self) -> Self:
        """Begin to compare every operator call of this thread, and of threads that start from now on.

        Raises:
            NestingError: A comparison is running already.
            PlatformError: A platform runs in another process, which does not start.
            DataFileError: The data file cannot be written.
        """
        self._left_out = self._is_left_out()
        if self._left_out:
            return self
        began_ns = time.perf_counter_ns()
        stop_for_another = self._stop_for_another if self.gives_way else None
        begin(Running(self, f"A comparison ({self.describe()})", self._held, self._stop_in_child, stop_for_another))
        try:
            self._restart_in_child()
            prepare_process()
            # Before the file is opened: a worker process that does not start leaves no file.
            self._target.start()
            self._ref.start()
            self._output.open()
            self._reassemble()
            self._steps.start_detection(None if self._marks_steps else self._end_step)
            self._attribution.start()
            self._replayer.start()
            if self._watch is not None:
                self._watch.start()
            self._threads.start()
            if self._regions is not None:
                self._regions.start()
            ShadowMode.clear_detached()
            self._mode = ShadowMode(self._replayer)
            if self._api is not None:
                self._api.enter()
            # Last: from here on, calls of this thread are intercepted.
            self._steps.begin(self._mode, began_ns)
            if self._replayer.timeline is not None:
                self._replayer.timeline.zero_ns = self._steps.zero_ns
        except BaseException:
            self._mode = None
            self._release()
            self._output.release()
            raise
        return self

    def stop(self) -> Self:
        """End the comparison, and write its records. Does nothing if it is not running."""
        self._end_block()
        for platform in (self._target, self._ref):
            platform.stop()  # also after `pause`, which lets worker processes wait
        return self

    def pause(self) -> None:
        """Compare nothing until `start`, such as during an evaluation: as `stop`, but worker processes wait."""
        self._end_block(keep_workers=True)

    @property
    def running(self) -> bool:
        """Whether operator calls are compared now."""
        return self._mode is not None

    @property
    def left_out(self) -> bool:
        """Whether this rank is not among `Config.ranks`, so that the program runs plain."""
        return self._left_out

    def _is_left_out(self) -> bool:
        ranks = self._config.ranks
        if ranks is None:
            return False
        rank, world = distributed_rank()
        return world > 1 and rank not in ranks

    def progress(self) -> Progress:
        """How far it is; costs no look at the records."""
        own_s, wall_s = self._replayer.own_ns / 1e9, self._steps.wall_s
        overhead = wall_s / (wall_s - own_s) if 0 < own_s < wall_s else 1.0
        found = {} if self._watch is None else dict(self._watch.n_found)
        data, steps, step = self._output.data, self._config.steps, self._recorder.step
        last = max(steps) if steps else -1
        left_s = (last + 1 - step) * wall_s / step if 0 < step <= last else -1.0
        return Progress(data.n_records + len(data.rows), found, overhead, step, last, left_s)

    def follow(self, function: Callable[[], None]) -> None:
        """Have a function called at most four times a second, while calls are recorded; to be asked for before `start`.

        Its exceptions are ignored.
        """
        self._watch = self._watch or self._new_watch()
        self._watch.on_tick = function
        self._assemble()

    @property
    def step_number(self) -> int:
        """Number of the current step: that of the records that come now."""
        return self._recorder.step

    def after_step(self, function: Callable[[Comparison], object]) -> None:
        """Have a function called with this comparison at the end of each step, and after each `stop` or `pause`.

        Its exceptions are ignored.
        """
        self._after_steps.append(function)

    def _call_after_step(self) -> None:
        for function in self._after_steps:
            with contextlib.suppress(Exception):
                function(self)

    def _end_block(self, *, keep_workers: bool = False) -> None:
        began_ns = time.perf_counter_ns()
        mode, self._mode = self._mode, None
        if mode is None:
            return
        self._threads.find_untracked()
        # The mode leaves the stack first: the calls below must not be intercepted.
        try:
            self._steps.leave()
        finally:
            with self._replayer.between_calls():
                self._judge_postponed()
                self._release(keep_workers=keep_workers)
            self._steps.finish()
            if self._watch is not None:
                self._watch.deliver()
            self._finish()
            self._call_after_step()
            if self._budget is not None:
                self._budget.spend_on_step(began_ns, time.perf_counter_ns())

    def _end_step(self) -> None:
        if self._left_out:
            return
        self._end_this_step()
        if self._watch is not None:
            self._watch.deliver()
            self._watch.poll()
        if self._after_steps:
            self._call_after_step()
        # The rank may be known only now: the program makes its process group inside the block.
        if self._config.ranks is not None and self._is_left_out() and self._can_leave:
            self._left_out = True
            self.stop()

    def _end_this_step(self) -> None:
        steps = self._steps
        # Fast paths for unwatched steps: in a short step, each microsecond counts against the budget.
        if steps.end_and_record_later():
            return
        began_ns = time.perf_counter_ns()
        if self._budget is not None and steps.end_if_unwatched(began_ns):
            return
        self._threads.find_untracked_if_new()
        if self._config.file is not None:
            self._output.follow_rank()
        steps.end(began_ns)

    def describe(self) -> str:
        """``sim against cpu``."""
        return f"{self._target} against {self._ref}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._raised = "" if error is None else _describe(error)
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self._mode is not None else "stopped"
        return f"<shadowrun.Comparison {self.describe()}, {state}>"

    # -- inside --------------------------------------------------------------------------------------

    def _assemble(self) -> None:
        """Make the parts that depend on the data file."""
        config, data = self._config, self._output.data
        capturing = Capturing(data, config.captured_bytes) if config.captured_bytes else None
        watch = self._watch
        self._recorder = (
            Recorder(data, self._attribution, capturing)
            if watch is None
            else WatchingRecorder(data, self._attribution, capturing, watch)
        )
        self._budget = None if config.budget is None else Budget(config.budget, dispatch_overhead_ns())
        replayer = WatchedReplayer if config.stop_on or config.on_finding else Replayer
        self._replayer = replayer(config, self._target, self._ref, self._recorder, self._selection, self._budget)
        if watch is not None:
            watch.end_program = self._replayer.end_program
            if isinstance(self._replayer, WatchedReplayer):
                self._replayer.watch = watch
        self._api = ApiCalls(self._attribution) if config.api else None
        self._recorder.name_api = None if self._api is None else self._api.name_of_call
        self._threads = Threads(self._replayer, self._attribution)
        self._regions = self._compiled_regions() if config.compiled else None
        self._steps = Steps(self._recorder, self._replayer, self._selection, self._budget)
        self._data, self._calls = data, CallReader(data)

    def _reassemble(self) -> None:
        """Make them again if the data file has changed."""
        if self._data is not self._output.data:
            self._assemble()

    def _new_watch(self) -> FindingWatch:
        config = self._config

        def is_known(record: OpRecord) -> bool:
            call = record.call
            return self.excuse(str(record.verdict.status), call.op, (call.module,)) is not None

        return FindingWatch(is_known, self._ends_program, config.stop_on, config.on_finding)

    def _ends_program(self, record: OpRecord) -> bool:
        """Whether a finding ends the program: see `Config.fail_fast`."""
        wanted, before, call = self._config.fail_fast, self.baseline, record.call
        kind, cause = str(record.verdict.status), str(record.verdict.cause or "")
        signature = Signature(kind, call.op, call.module, str(call.phase), cause)
        is_new = before is not None and signature not in before.findings
        return kind in wanted or (NEW in wanted and is_new)

    def _compiled_regions(self) -> Regions:
        from shadowrun.compiled.regions.compare_regions import Regions  # imports Dynamo, 2 s

        return Regions(self._recorder, self._replayer, self._config.max_bytes)

    def _sync(self) -> None:
        """Write everything to the data file, which reports read."""
        # A forked child that asks for a report has records of its own only.
        self._restart_in_child()
        with self._replayer.between_calls():
            self._judge_postponed()
            self._recorder.flush()
            self._update_info()

    def _update_info(self) -> None:
        notes: tuple[str, ...] = ()
        with contextlib.suppress(Exception):
            notes = (*self._threads.untracked.notes(), *self._steps.notes())
            notes += (_SAMPLED,) if self._replayer.sampled else ()
            notes += self._watch.notes if self._watch is not None else ()
        wall_s = self._steps.wall_s
        self._output.update(
            notes,
            wall_s=wall_s,
            own_s=self._replayer.own_ns / 1e9,
            async_compare_s=self._replayer.async_compare_ns / 1e9,
            repairs=self._replayer.repairs(),
            budget={} if self._budget is None else dataclasses.asdict(self._budget.report()),
            complete=self._mode is None and wall_s > 0,
            raised=self._raised,
            unselected=self._selection.unmatched(),
        )

    def _judge_postponed(self) -> None:
        """Judge all postponed calls, beyond the budget: the program has ended, or wants a report."""
        began_ns = time.perf_counter_ns()
        self._replayer.judge_postponed()
        if self._budget is not None and self._mode is not None:
            self._budget.spend_on_step(began_ns, time.perf_counter_ns())

    def _release(self, *, keep_workers: bool = False) -> None:
        if self._api is not None:
            self._api.leave()
        if self._regions is not None:
            self._regions.stop()
        self._threads.stop()
        self._replayer.stop()
        self._attribution.stop()
        self._steps.release()
        # After the replayer, whose last jobs run on them.
        if not keep_workers:
            self._target.stop()
            self._ref.stop()
        end(self)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Held during a fork: no call is in progress, and no transaction is open."""
        with self._replayer.between_calls(), self._data.without_transaction():
            yield

    def _stop_in_child(self) -> None:
        """Stop comparing in a forked child; nothing of it is recorded."""
        mode, self._mode = self._mode, None
        if mode is not None:
            self._steps.stop_in_child(mode)
        # First: the locks that `_release` takes may be held by threads that the child does not have.
        self._replayer.forked()
        self._output.release()
        with contextlib.suppress(Exception):
            self._release()

    def _stop_for_another(self) -> None:
        """Stop for another comparison, where the mode can leave the stack."""
        if self._can_leave:
            self.stop()

    @property
    def _can_leave(self) -> bool:
        """Whether the mode can leave the stack here."""
        return self._steps.watching is not None and self._steps.watching.can_leave

    def _restart_in_child(self) -> None:
        self._output.detach_in_child()
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


def _describe(error: BaseException) -> str:
    """An exception in one line, with the innermost line of user code; empty for a normal exit."""
    if isinstance(error, (StoppedAtFinding, CallFindingError)):  # the findings say why
        return type(error).__name__
    if isinstance(error, (GeneratorExit, SystemExit)) and (isinstance(error, GeneratorExit) or not error.code):
        return ""
    try:
        lines = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        site = site_of(error.__traceback__)
    except Exception:  # `__str__` of a user's exception class may raise
        return type(error).__name__
    return f"{text[:_MAX_EXCEPTION_TEXT]} ({site})" if site else text[:_MAX_EXCEPTION_TEXT]


def compare(target: Any, ref: Any = "cpu", **options: Unpack[Options]) -> Comparison:
    """Run every operator call on a second platform and record what differs.

    Args:
        target: Platform under test: any torch device (``"npu"``, ``"cuda:1"``, ``"sim"``), or the CPU
            with settings (``"cpu[threads=1,mkldnn=off]"``).
        ref: Trusted platform.
        **options: The fields of `shadowrun.Config`: on_unsupported, schedule, steps, modules, ops, rtol,
            atol, tolerance, known, settings, file, append, replay, drift, max_records, max_bytes, slow_ratio,
            call_limit_s, budget, asynchronous, compiled, capture, fail_fast, api, timeline, stop_on,
            on_finding, ranks.

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
    config = Config.from_options(**options)
    check_operators(config.ops or ())
    warn_of_untested(stacklevel=2)
    platforms = resolve(target, for_comparison=True), resolve(ref, for_comparison=True)
    if config.asynchronous and isinstance(why_not := choose_async(config, *platforms), str):
        raise UsageError(f"asynchronous=True: {why_not}; omit the option.", slug="bad-option")
    return Comparison(config, *platforms)


def current() -> Comparison | None:
    """The comparison that is running, for code that has no handle on it (``current().step()``)."""
    found: Comparison | None = running()
    return found
