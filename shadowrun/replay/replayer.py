"""The observer of the dispatch mode: takes each call through the path that its treatment names, one at a time."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any

from shadowrun.errors import StoppedAtFinding
from shadowrun.intercept import torch_operators, torchapi
from shadowrun.intercept.attribution import NOWHERE
from shadowrun.intercept.dispatch import ShadowMode, plan_of
from shadowrun.intercept.patches import GraphCaptures, SubclassConstructor
from shadowrun.intercept.plan import OpKind
from shadowrun.intercept.torchapi import with_isolated_warnings
from shadowrun.intercept.user_call import own_call
from shadowrun.replay.call import OVER_BUDGET, Call, CallRun, Treatment, TreatmentPolicy
from shadowrun.replay.executor import WarningFilter
from shadowrun.replay.paths.build_paths import Paths
from shadowrun.replay.paths.native_handler import NativeHandler, PassThrough
from shadowrun.replay.postponed_calls import PostponedCalls

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.config import Config
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.platforms.device import Platform
    from shadowrun.replay.context import RunSink
    from shadowrun.schedule.budget import Budget
    from shadowrun.schedule.selection import Selection

__all__ = ["CallLock", "Replayer"]

_clock = time.perf_counter_ns
# A call that waits for this thread would hold the lock for ever: after this time the thread runs without it.
_PATIENCE_S = 10.0
_WAITED = "another thread's call took too long"
_COUNT, _RECORD, _RUN, _SAME_DEVICE = Treatment.COUNT, Treatment.RECORD, Treatment.RUN, Treatment.SAME_DEVICE


class CallLock:
    """Lets no thread begin a call while it is held. Entered without the lock where another call takes too long.

    A class, since generators that are context managers take 6 µs, twice in each training step.

    Args:
        replayer: Whose lock it takes.
        settle: Called first. An interrupt in it is raised at the end, unless the body raises.
    """

    __slots__ = ("_got", "_interrupt", "_replayer", "_settle")

    def __init__(self, replayer: Replayer, settle: Callable[[], None] | None = None) -> None:
        self._replayer = replayer
        self._settle = settle
        self._interrupt: BaseException | None = None

    def __enter__(self) -> None:
        # Without the lock after a while: a deadlock must not come from shadowrun.
        self._got = self._replayer.hold_calls()
        if self._settle is not None:
            try:
                self._settle()
            # An interrupt while calls are drained must not skip the body.
            except BaseException as error:
                self._interrupt = error

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._got:
            self._replayer.lock.release()
        if self._interrupt is not None and error is None:
            raise self._interrupt


class Replayer:
    """Runs each call for the user and once more elsewhere, compares, and records one verdict.

    One call at a time, whatever the thread: settings of the CPU and the random stream belong to the process, and two
    threads may share their tensors. Collectives and custom operators may wait for another thread and take no lock.

    Attributes:
        lock: Held for the length of a call.
        plans: Plans by the id of their operator.
        native_handler: The C handler; None without the part in C.
        policy: Decides what is done with each call.
        take_held: See `Comparator.take_held`.
        timeline: See `Paths.timeline`.
    """

    run_distributed: None = None

    def __init__(
        self,
        config: Config,
        target: Platform,
        ref: Platform,
        recorder: RunSink,
        selection: Selection,
        budget: Budget | None = None,
    ) -> None:
        self._postponed = None if budget is None else PostponedCalls(lambda: budget.postpones, budget.fill_step)
        self._paths = paths = Paths(config, target, ref, recorder, self._postponed)
        self._context, self.take_held = paths.context, paths.context.comparator.take_held
        self._by_treatment, self._same_device = paths.by_treatment, paths.by_treatment[_SAME_DEVICE]
        self.timeline = paths.timeline
        self._roles = paths.roles
        self._recorder = recorder
        self._budget = budget
        self._drift = paths.context.drift
        self._replays = config.replay
        self.policy = TreatmentPolicy(recorder, selection, replays=config.replay, budget=budget)
        recorder.every_second = paths.every_second
        attribution, comparator, cpu = recorder.attribution, paths.context.comparator, paths.roles.cpu
        self._pass_through = None
        # Where the program's own run is the target's, even a call that is not compared is checked.
        if budget is not None and (cpu.shared or not cpu.on_target):
            self._pass_through = PassThrough(budget, selection, lambda: self._handler.own_ns, lambda: self.lock)
        path, pass_through = paths.same_device, self._pass_through
        self._handler = NativeHandler(recorder, selection, attribution, comparator, path, cpu, pass_through)
        self.native_handler = self._handler.handler
        self._warnings = WarningFilter()
        # Torch cannot construct a tensor subclass by its old constructor under a dispatch mode.
        self._constructor = SubclassConstructor()
        accelerator = target if target.device.type != "cpu" else ref
        self._graph_captures = GraphCaptures(accelerator.device.type, self._before_capture, self._after_capture)
        self.plans: dict[int, OpPlan] = {}
        self._ending = ""
        self._program_thread = 0
        self._own_ns = 0
        self._make_locks()

    def _make_locks(self) -> None:
        # Re-entrant: a hook of the program, or a custom operator, may call operators inside a call.
        self.lock = threading.RLock()
        # A busy thread would reacquire the lock before a waiting one wakes: the gate makes it queue.
        self._gate = threading.Lock()
        self._handler.guard(self.lock, self._gate)

    # -- the comparison begins and ends --------------------------------------------------------------

    def start(self) -> None:
        """Filter warnings, detect fallbacks, and begin new drift chains."""
        self._ending, self._program_thread = "", threading.get_ident()
        self._warnings.start()  # first: the detector must get warnings of replays, which this filter drops
        self._context.target.fallback_detector.start()
        self._constructor.start()
        if self._drift is not None:
            # What the program did between two blocks was not observed, so the twins may be stale.
            self._drift.clear()
        self.policy.running = True
        self.policy.in_graph = False  # the block before may have ended within a capture, whose end it did not see
        self._graph_captures.start()
        roles, cpu, config = self._roles, self._roles.cpu, self._context.config
        if self._pass_through is not None:
            self._handler.pass_on()
            # Not in the first step, which should not take much longer than the others.
            for func in torch_operators.common_operators(ShadowMode):
                plan_of(func, self)
        if not roles.all_cpu:
            return
        if not self._replays:
            self._handler.record()
        # A budget, a timeline, and an exception at the very call need each call in Python.
        elif not (self._budget or config.stop_on or config.timeline) and cpu.shared and (cpu.on_target or cpu.on_ref):
            replaying = self._context.ref if cpu.on_target else self._context.target
            # The C handler sets no platform settings: a replay under other settings goes through Python.
            if replaying.plain:
                if self._drift is not None:
                    self._handler.follow(self._drift)
                self._handler.compare()

    def stop(self) -> None:
        """End all that. Calls of other threads are only run from here on."""
        # First: calls of other threads that begin now are only run.
        self.policy.running = False
        self._handler.stop()
        self._graph_captures.stop()
        self._paths.stop()
        self._context.target.fallback_detector.stop()
        self._constructor.stop()
        self._warnings.stop()

    def forked(self) -> None:
        """In a forked child: threads that waited here, or were in a call, do not exist."""
        self._make_locks()
        self._paths.forked()
        if self._postponed is not None:
            self._postponed.forget()

    def _before_capture(self) -> None:
        try:
            # No thread may query an event while a graph is captured, so all jobs end before.
            with self.between_calls():
                # Page-locked memory must not be freed during a capture: torch's allocator would query an event.
                self._paths.free_copies()
        finally:
            self.policy.in_graph = True

    def _after_capture(self) -> None:
        self.policy.in_graph = False

    def end_program(self, why: str) -> None:
        """End the program at its next operator call: raise `StoppedAtFinding` there, and compare nothing any more.

        Not at the call in hand, which may be compared on another thread, or be in C.
        """
        self._ending = why
        self._handler.stop()

    def _end_here(self) -> None:
        # Once: what the program does on its way out, such as saving its state, must work.
        if self._program_thread and (threading.get_ident() == self._program_thread or torchapi.autograd_node()):
            self._program_thread = 0
            raise StoppedAtFinding(f"shadowrun: {self._ending}")

    def charge_passed(self) -> None:
        """Count the time of calls that were passed on, before the budget is asked about a step."""
        if self._pass_through is not None:
            self._pass_through.charge()

    @property
    def has_postponed(self) -> bool:
        """Whether calls wait to be judged."""
        return bool(self._postponed)

    def judge_postponed(self, max_ns: float = math.inf) -> None:
        """Judge calls that wait, for so long or to the last; the caller holds the lock."""
        began = _clock()
        try:
            if self._postponed is not None:
                # The judge's replays may warn: the program has not called anything here.
                with_isolated_warnings(self._postponed.judge_for, (), (max_ns,), {})
        finally:
            self._own_ns += _clock() - began

    # -- what it cost and found ----------------------------------------------------------------------

    @property
    def own_ns(self) -> int:
        """Nanoseconds spent here and not in the user's own operators."""
        return self._own_ns + self._handler.own_ns

    def add_own_ns(self, ns: int) -> None:
        """Add to `own_ns`."""
        self._own_ns += ns

    @property
    def async_compare_ns(self) -> int:
        """Processor time of the thread that compares asynchronously, in nanoseconds; no part of `own_ns`."""
        return self._paths.async_compare_ns

    def repairs(self) -> dict[str, Any]:
        """What was measured by `RepairTrials`; nothing without ``drift``."""
        return {} if self._drift is None or self._drift.trials is None else self._drift.trials.found()

    @property
    def sampled(self) -> bool:
        """Whether a call was too large to be judged as a whole."""
        return self._paths.sampled

    @property
    def runs_on_target(self) -> bool:
        """Whether the program was seen on the target: what that lacks is answered, so each call must be observed."""
        return self._roles.runs_on_target

    def check_memory(self, *, always: bool) -> None:
        """Check each call for effects on memory, and not the first of each kind only."""
        self._paths.check_memory(always=always)

    def forget_verdicts(self) -> None:
        """Have each call judged as if it were the first of its context: where another program begins."""
        self._paths.forget_verdicts()

    # -- the lock ------------------------------------------------------------------------------------

    def hold_calls(self) -> bool:
        """Take the lock; False where a call takes too long.

        A thread that calls one operator after another would take it again at once: a waiting thread closes the gate.
        """
        # A call inside a call (a hook, a custom operator) holds the lock already: the gate would be a deadlock.
        if self.lock._is_owned():  # type: ignore[attr-defined]
            return self.lock.acquire()
        # Only one thread waits for the lock at a time; the others wait for the gate.
        if not self._gate.acquire(timeout=_PATIENCE_S):
            return False
        try:
            return self.lock.acquire(timeout=_PATIENCE_S)
        finally:
            self._gate.release()

    def between_calls(self) -> CallLock:
        """Hold the lock, and have all calls recorded that wait to be compared.

        Entered in any case, even where a call takes too long. An interrupt in a comparison is raised at the end.
        """
        return CallLock(self, self._paths.drain)

    # -- calls ---------------------------------------------------------------------------------------

    def add_operator(self, plan: OpPlan) -> None:
        """Teach the C handler a new operator."""
        self._handler.add_operator(plan)

    def count(self, name: str, reason: str) -> None:
        """Count a call that has no plan."""
        with CallLock(self):
            self._recorder.skip(name, "", reason)

    def run_and_count(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that is never compared, and count it."""
        # The uncontended case takes no gate: one lock less for each call.
        got = (not self._gate.locked() and self.lock.acquire(False)) or self.hold_calls()
        try:
            if self.policy.running:
                self._recorder.skip(plan.name, "", plan.reason or "fake or traced tensors")
                # A call that is not compared may still write: kept copies of its arguments would be stale.
                self._paths.forget(args, kwargs)
        finally:
            if got:
                self.lock.release()
        return own_call(plan.run, args, kwargs)

    def observe(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call for the user, then elsewhere, and record the verdict."""
        if self._ending:
            self._end_here()
            return own_call(plan.run, args, kwargs)
        if not self._replays:
            self._record_only(plan, args, kwargs)
            return own_call(plan.run, args, kwargs)
        # Custom operators may wait for another thread: under the lock that would be a deadlock.
        if plan.custom and not self._context.may_replay(plan):
            return self._observe(plan, args, kwargs)
        lock = self.lock
        # The program's call has to run in any case: without the lock it is counted and not compared.
        if (self._gate.locked() or not lock.acquire(False)) and not self.hold_calls():
            self._recorder.skip(plan.name, "", _WAITED)
            return own_call(plan.run, args, kwargs)
        try:
            if self._budget is not None:
                return self._observe_within(self._budget, plan, args, kwargs)
            return self._observe(plan, args, kwargs)
        finally:
            lock.release()

    def _observe_within(self, budget: Budget, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `_observe`, of what the overhead budget allows."""
        entered = _clock()
        own_ns, pass_through = self._own_ns, self._pass_through
        # Asked before the call: what this call costs is known only when it is over.
        exhausted = budget.exhausted(entered) if pass_through is None else pass_through.exhausted(entered)
        try:
            return self._observe(plan, args, kwargs, OVER_BUDGET if exhausted else "")
        finally:
            budget.spend(_clock(), self._own_ns - own_ns)

    def _observe(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str = "") -> Any:
        entered = _clock()
        call = Call(plan, args, kwargs, self._roles.role_of(args, kwargs), NOWHERE, reason)
        treatment = self.policy.treatment(call)
        if treatment is _RUN:
            return own_call(plan.run, args, kwargs)
        drift = self._drift
        # The most frequent treatment of a selective comparison: it enters no path.
        if treatment is _COUNT:
            self._recorder.skip(plan.name, call.role.device_name, call.reason)
            self._own_ns += _clock() - entered
            out = own_call(plan.run, args, kwargs)
            # What is captured does not run now, and no copy of it can be made.
            if drift is not None and plan.kind is not OpKind.NO_VALUES and not self.policy.in_graph:
                # An unobserved call leaves twins with old values: they are made again from the program's.
                drift.reseed(plan, CallRun(args, kwargs, out, 0))
            return out
        # The members of an enum are hashed in Python.
        path = self._same_device if treatment is _SAME_DEVICE else self._by_treatment[treatment]
        ran = path.observe(call)
        if drift is not None and call.reason and plan.kind is not OpKind.NO_VALUES:
            drift.reseed(plan, ran)
        # The program's own run is no overhead.
        own_ns = _clock() - entered - ran.ns
        self._own_ns += own_ns
        if self._budget is not None and not call.reason:
            self._budget.verified(call.signature, own_ns)
        return ran.out

    def _record_only(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call that is not to be compared; it runs when the lock is released again."""
        got = (not self._gate.locked() and self.lock.acquire(False)) or self.hold_calls()
        entered = _clock()
        call = None
        try:
            call = Call(plan, args, kwargs, self._roles.role_of(args, kwargs))
            treatment = self.policy.treatment(call)
            if treatment is _COUNT:
                self._recorder.skip(plan.name, call.role.device_name, call.reason)
            elif treatment is _RECORD:
                self._recorder.record_only(self._recorder.context(call))
        except Exception as error:
            failed = call or Call(plan, args, kwargs, self._roles.cpu)
            self._paths.same_device.verdicts.not_recorded(failed, error)
        finally:
            self._own_ns += _clock() - entered
            if got:
                self.lock.release()
