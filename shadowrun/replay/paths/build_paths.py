"""The paths of a comparison, put together from its options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shadowrun.replay.call import Roles, Treatment
from shadowrun.replay.comparator import Comparator
from shadowrun.replay.context import Path, ReplayContext
from shadowrun.replay.drift import Drift
from shadowrun.replay.executor import Executor
from shadowrun.replay.paths.async_path import AsyncPath, choose_async
from shadowrun.replay.paths.cross_device import CrossDevicePath
from shadowrun.replay.paths.pipeline import OrderedSink, Pipeline
from shadowrun.replay.paths.same_device import SameDevicePath
from shadowrun.replay.paths.two_settings import TwoSettingsPath
from shadowrun.replay.paths.waiting_calls import WaitingCalls, can_wait
from shadowrun.replay.repair_trials import RepairTrials
from shadowrun.replay.timeline import TimedPath, TimedSink, Timeline

if TYPE_CHECKING:
    from shadowrun.config import Config
    from shadowrun.platforms.device import Platform
    from shadowrun.replay.context import RecordSink, RunSink
    from shadowrun.replay.postponed_calls import PostponedCalls

__all__ = ["Paths"]

# Each pending job holds copies; a longer queue takes memory and does not make the comparing thread faster.
_MAX_PENDING = 64


class Paths:
    """The paths of a comparison, and what is done to all of them.

    Attributes:
        context: What they share.
        same_device: The path of a device that both platforms share; the C handler is a part of it.
        roles: What devices mean, with the treatment of their calls.
        by_treatment: The path of each treatment that compares.
        timeline: Notes when the parts of each call run; None: not asked.
    """

    def __init__(
        self, config: Config, target: Platform, ref: Platform, recorder: RunSink, postponed: PostponedCalls | None
    ) -> None:
        chosen = choose_async(config, target, ref) if config.asynchronous is not False else None
        copying = None if isinstance(chosen, str) else chosen
        self._pipeline = Pipeline(_MAX_PENDING) if copying is not None else None
        # The calling thread records too (views, fallbacks): without the queue its records would come first.
        self._waiting = WaitingCalls() if can_wait(config, target, ref) else None
        queue = self._pipeline or self._waiting
        sink: RecordSink = recorder if queue is None else OrderedSink(recorder, queue)
        own_sink: RecordSink = recorder
        self.timeline = timeline = Timeline(recorder.add_moment) if config.timeline else None
        if timeline is not None:
            sink, own_sink = TimedSink(sink, timeline), TimedSink(recorder, timeline)
        executors = Executor(target, max_bytes=config.max_bytes), Executor(ref, max_bytes=config.max_bytes)
        # Twins run on executors that detect no fallbacks: the target's detector is for the program's calls.
        drift = Drift(Executor(target), Executor(ref), config.max_bytes) if config.drift else None
        comparator = Comparator(config, *executors, sink, postponed=postponed)
        if drift is not None:
            drift.trials = RepairTrials(Executor(target), Executor(ref), config.max_bytes, lambda: recorder.step)
            comparator.mismatched = drift.suspect
        self.context = context = ReplayContext(config, *executors, sink, comparator, drift, timeline)
        self.same_device = SameDevicePath(context)
        self._comparators = [context.comparator]
        cross_device = CrossDevicePath(context, self._waiting)
        self.by_treatment: dict[Treatment, Path] = {
            Treatment.SAME_DEVICE: self.same_device,
            Treatment.CROSS_DEVICE: cross_device,
        }
        self._two_settings = self._asynchronous = None
        if target.same_device(ref) and target.device.type != "cpu" and drift is None:
            self._two_settings = self.by_treatment[Treatment.TWO_SETTINGS] = TwoSettingsPath(context)
        if copying is not None and self._pipeline is not None:
            # The comparing thread gets the plain sink: through the ordered one it would wait for itself.
            path = AsyncPath(context, cross_device, own_sink, self._pipeline, copying)
            self._asynchronous = self.by_treatment[Treatment.ASYNC] = path
            self._comparators.append(path.comparator)
        if timeline is not None:
            for comparator in self._comparators:
                comparator.timeline = timeline
            self.by_treatment = {kind: TimedPath(path, timeline) for kind, path in self.by_treatment.items()}
        self.roles = Roles(
            target,
            ref,
            shared=Treatment.SAME_DEVICE if self._two_settings is None else Treatment.TWO_SETTINGS,
            apart=Treatment.CROSS_DEVICE if self._asynchronous is None else Treatment.ASYNC,
        )

    @property
    def asynchronous(self) -> bool:
        """Whether calls are compared on another thread."""
        return self._asynchronous is not None

    @property
    def async_compare_ns(self) -> int:
        """Processor time of that thread, in nanoseconds."""
        return 0 if self._pipeline is None else self._pipeline.work_ns

    @property
    def sampled(self) -> bool:
        """Whether a call was too large to be judged as a whole."""
        return any(comparator.sampled for comparator in self._comparators)

    def every_second(self) -> None:
        """Check another operator for effects on memory."""
        for comparator in self._comparators:
            comparator.every_second()

    def check_memory(self, *, always: bool) -> None:
        """Check each call for effects on memory, and not the first of each kind only."""
        for comparator in self._comparators:
            # The asynchronous path has a comparator of its own, so there may be two.
            comparator.effects.always = always

    def forget_verdicts(self) -> None:
        """Have each call judged as if it were the first of its context."""
        for comparator in self._comparators:
            comparator.forget_verdicts()

    def forget(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call that is not compared may write to any of these tensors."""
        if self._asynchronous is not None:
            self._asynchronous.forget(args, kwargs)

    def drain(self) -> None:
        """Have all calls recorded that wait to be compared."""
        if self._pipeline is not None:
            self._pipeline.drain()
        if self._waiting is not None:
            self._waiting.drain()
        if self._two_settings is not None:
            self._two_settings.flush()

    def free_copies(self) -> None:
        """Free the copies of the device's tensors."""
        if self._asynchronous is not None:
            self._asynchronous.stop()

    def stop(self) -> None:
        """Settle, and free what is kept between calls."""
        self.same_device.fast.buffers.clear()
        if self._pipeline is not None:
            self._pipeline.close()
        if self._waiting is not None:
            self._waiting.drain()
        self.free_copies()

    def forked(self) -> None:
        """In a forked child: the other thread does not exist."""
        if self._pipeline is not None:
            self._pipeline.forked()
        if self._waiting is not None:
            self._waiting.forget()
