"""The observer behind the dispatch mode: decides what a call's device means, and which path the call takes."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.graphs import Recordings
from shadowrun.intercept.own_call import own_call
from shadowrun.platforms.streams import transfers
from shadowrun.replay.across import AcrossPath
from shadowrun.replay.behind import BehindPath
from shadowrun.replay.comparing import Comparing
from shadowrun.replay.execution import Executor
from shadowrun.replay.on_device import OnDevicePath
from shadowrun.replay.ordered import OrderedRecorder
from shadowrun.replay.pipeline import Pipeline
from shadowrun.replay.quick import Quick
from shadowrun.replay.shared import SharedPath
from shadowrun.replay.short import ShortWay
from shadowrun.replay.stage import Role, Stage
from shadowrun.replay.turn import Turn
from shadowrun.replay.warned import WarningFilter

if TYPE_CHECKING:
    from shadowrun.config import Config
    from shadowrun.intercept.attribution import Place
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.platforms.device import Platform
    from shadowrun.replay.budget import Budget
    from shadowrun.replay.drift import Drift
    from shadowrun.replay.recorder import Recorder
    from shadowrun.replay.schedule import Selection
    from shadowrun.replay.short import ShortWay

__all__ = ["Replayer", "why_not_behind"]

_CPU = torch.device("cpu")
_clock = time.perf_counter_ns
_FRAMES = 3  # from `Recorder.place` to the mode's handler
_FEWER = 2  # from `Attribution.place` to it, where `observe` itself asks
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_PATIENCE_S = 10.0
_MOST_WAITING = 64
_OVER_BUDGET = "overhead budget"
_WAITED = "another thread's call took too long"


class Replayer:
    """Runs each call for the user and once more elsewhere, compares, and records one verdict.

    One call at a time, whatever the thread: settings of the CPU and the random stream belong to the process, and two
    threads may share their tensors. Collectives and custom operators may wait for another thread and are not held up.

    Attributes:
        lock: Held for the length of a call.
        plans: Plans by the id of their operator.
        quick: The compiled handler, None if there is none.
    """

    def __init__(
        self,
        config: Config,
        target: Platform,
        ref: Platform,
        recorder: Recorder,
        selection: Selection,
        drift: Drift | None,
        budget: Budget | None = None,
    ) -> None:
        self._target = Executor(target)
        self._ref = Executor(ref)
        self._recorder = recorder
        self._attribution = recorder.attribution
        self._selection = selection
        self._drift = drift
        self._budget = budget
        possible = config.asynchronous is not False and not why_not_behind(config, target, ref)
        copying = transfers(target) if possible else None
        self._pipeline = Pipeline(_MOST_WAITING) if copying is not None else None
        told = recorder if self._pipeline is None else OrderedRecorder(recorder, self._pipeline)
        comparing = Comparing(config, self._target, self._ref, told)
        stage = Stage(config, self._target, self._ref, told, selection, comparing, drift)
        self._stage = stage
        one_device = target.same_device(ref) and target.device.type != "cpu"
        self._on_device = OnDevicePath(stage) if one_device and drift is None else None
        shared = SharedPath(stage)
        self._shared = self._on_device or shared
        self._shortest = shared.short
        self._across = AcrossPath(stage)
        self._behind = None
        if copying is not None and self._pipeline is not None:
            self._behind = BehindPath(stage, self._across, recorder, self._pipeline, copying)
        self._comparings = (comparing,) if self._behind is None else (comparing, self._behind.comparing)
        self._roles: dict[torch.device, Role] = {}
        self._cpu_role = self._role_of(_CPU)
        self._all_cpu = target.device.type == ref.device.type == "cpu"
        self._short: ShortWay | None = None
        self._replays = config.replay
        self._warnings = WarningFilter()
        self.plans: dict[int, OpPlan] = {}
        self._own_ns = 0
        self.lock = threading.RLock()
        self._gate = threading.Lock()
        self._running = False
        self._switch = Quick(recorder, selection, self._attribution, comparing, shared, self._cpu_role)
        self._switch.guard(self.lock, self._gate)
        self.quick = self._switch.handler
        self._recordings = Recordings(target.device.type, self._before_recording)

    @property
    def own_ns(self) -> int:
        """Nanoseconds spent here and not in the user's own operators."""
        return self._own_ns + self._switch.own_ns

    def spend(self, ns: int) -> None:
        """Add nanoseconds to `own_ns`."""
        self._own_ns += ns

    def look_at_memory(self, *, always: bool) -> None:
        """Look at what each call does to memory, not at the first of each kind only."""
        for comparing in self._comparings:
            comparing.effects.always = always

    @property
    def sampled(self) -> bool:
        """Whether a call was too large to be judged as a whole."""
        return any(comparing.sampled for comparing in self._comparings)

    def start(self) -> None:
        """Watch warnings, put the witnesses of fallback in place, and begin a new drift chain."""
        self._warnings.start()  # first: the witness hears what replays warn of, the user does not
        self._target.witness.start()
        if self._drift is not None:
            self._drift.clear()
        self._running = True
        if self._behind is not None:
            self._recordings.start()
        role = self._cpu_role
        simple = self._drift is None and self._budget is None
        if simple and self._all_cpu and role.shared and (role.on_target or role.on_ref):
            self._short = self._shortest
            if (self._ref if role.on_target else self._target).plain:
                self._switch.compare()
        if not self._replays and self._all_cpu:
            self._switch.record()

    def stop(self) -> None:
        """Take them away. Calls of threads that go on only pass from here on."""
        self._running = False
        self._short = None
        self._switch.stop()
        self._shortest.clear()
        if self._pipeline is not None and self._behind is not None:
            self._recordings.stop()
            self._pipeline.close()
            self._behind.stop()
        self._target.witness.stop()
        self._warnings.stop()

    def count(self, name: str, reason: str) -> None:
        """Count a call that has no plan."""
        with Turn(self):
            self._recorder.skip(name, "", reason)

    def pass_by(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that is not compared, and count it."""
        got = (not self._gate.locked() and self.lock.acquire(False)) or self.take_turn()
        try:
            if self._running:
                self._recorder.skip(plan.name, "", plan.reason or "fake or traced tensors")
                if self._behind is not None:
                    self._behind.forget(args, kwargs)
        finally:
            if got:
                self.lock.release()
        return own_call(plan.run, args, kwargs)

    def take_turn(self) -> bool:
        """Take the lock; False where a call takes too long.

        A thread that calls one operator after another would never let go of it for long: who waits closes a gate.
        """
        if self.lock._is_owned():  # type: ignore[attr-defined]
            return self.lock.acquire()
        if not self._gate.acquire(timeout=_PATIENCE_S):
            return False
        try:
            return self.lock.acquire(timeout=_PATIENCE_S)
        finally:
            self._gate.release()

    def forked(self) -> None:
        """In a forked child: who waited here, or was in a call that took too long, is not there any more."""
        self.lock = threading.RLock()
        self._gate = threading.Lock()
        self._switch.guard(self.lock, self._gate)
        if self._pipeline is not None:
            self._pipeline.forked()

    def between_calls(self) -> Turn:
        """Let no thread begin a call meanwhile, and have all calls compared that wait to be.

        Goes on all the same where a call takes too long. An interrupt while calls are compared comes at the end.
        """
        return Turn(self, self._settle)

    def _settle(self) -> None:
        if self._pipeline is not None:
            self._pipeline.drain()
        if self._on_device is not None:
            self._on_device.flush()

    def _before_recording(self) -> None:
        with self.between_calls():
            if self._behind is not None:
                self._behind.stop()

    def observe(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call for the user, then elsewhere, and record the verdict."""
        lock = self.lock
        if not self._replays:
            self._record(plan, args, kwargs)
            return own_call(plan.run, args, kwargs)
        if plan.custom and not self._selection.ops_named:
            return self._observe(plan, args, kwargs)
        if (self._gate.locked() or not lock.acquire(False)) and not self.take_turn():
            self._recorder.skip(plan.name, "", _WAITED)
            return own_call(plan.run, args, kwargs)
        try:
            if args and (short := self._short) is not None:
                first = args[0]
                if type(first) in _PLAIN and first.is_cpu:
                    everything = self._selection.everything
                    if plan.short and everything:
                        entered = _clock()
                        way = short.in_place if plan.mutated else short.fresh
                        done = way(plan, args, kwargs, self._cpu_role, self._attribution.place(_FEWER))
                        if done is not None:
                            out, ns = done
                            self._own_ns += _clock() - entered - ns
                            return out
                        return self._observe(plan, args, kwargs)
                    reason = plan.reason if plan.silent else "" if everything else self._selection.unwanted(plan)
                    if reason:
                        entered = _clock()
                        self._attribution.note(_FEWER)  # its backward may be compared
                        self._recorder.skip(plan.name, "cpu", reason)
                        self._own_ns += _clock() - entered
                        return own_call(plan.run, args, kwargs)
            elif self._budget is not None:
                return self._observe_within(self._budget, plan, args, kwargs)
            return self._observe(plan, args, kwargs)
        finally:
            lock.release()

    @property
    def behind_ns(self) -> int:
        """Processor time of the thread that compares behind the program, in nanoseconds; no part of `own_ns`."""
        return 0 if self._pipeline is None else self._pipeline.work_ns

    @property
    def answers(self) -> bool:
        """Whether the program was seen on the target: what that lacks is answered, so each call must be seen."""
        return any(role.on_target and not role.shared for role in self._roles.values())

    def _observe_within(self, budget: Budget, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `_observe`, of what the overhead budget allows."""
        entered = _clock()
        own_ns = self._own_ns
        over = budget.exhausted(entered)
        try:
            return self._observe(plan, args, kwargs, _OVER_BUDGET if over else "")
        finally:
            budget.spend(_clock(), self._own_ns - own_ns)

    def _record(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call that is not to be compared; nobody else waits while it runs."""
        got = (not self._gate.locked() and self.lock.acquire(False)) or self.take_turn()
        entered = _clock()
        try:
            if not self._running:
                return
            recorder = self._recorder
            if plan.silent:
                self._attribution.note(_FRAMES)
                recorder.skip(plan.name, "cpu", plan.reason)
                return
            place = self._attribution.place(_FRAMES)
            if self._all_cpu and args and type(first := args[0]) in _PLAIN and first.is_cpu:
                device = _CPU
            else:
                device = self._role(args, kwargs).device
            if not self._selection.everything:
                reason = self._selection.reason_to_skip(plan, place)
                if reason:
                    recorder.skip(plan.name, str(device), reason)
                    return
            recorder.seen(recorder.context(plan, args, kwargs, place, device))
        except Exception as error:
            self._shortest.ending.unrecorded(plan, args, kwargs, error)
        finally:
            self._own_ns += _clock() - entered
            if got:
                self.lock.release()

    def _observe(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], unwanted: str = "") -> Any:
        if not self._running:
            return own_call(plan.run, args, kwargs)
        entered = _clock()
        role = self._role(args, kwargs)
        if unwanted and (role.shared or not role.on_target):
            self._recorder.place_silently(_FRAMES)  # its backward may be compared
            self._recorder.skip(plan.name, "", unwanted)
            self._own_ns += _clock() - entered
            return own_call(plan.run, args, kwargs)
        silent = plan.silent
        if silent and role.shared:
            self._recorder.place_silently(_FRAMES)
            self._recorder.skip(plan.name, "cpu", plan.reason)
            self._own_ns += _clock() - entered
            return own_call(plan.run, args, kwargs)
        place = self._recorder.place(_FRAMES)
        reason = plan.reason if silent else ""
        if not self._selection.everything:
            reason = self._selection.reason_to_skip(plan, place) or reason
        signature = None
        if self._budget is not None and not reason:
            signature, reason = self._signature(plan, args, kwargs, role, place), unwanted
            if not reason and not self._budget.wants(signature):
                reason = _OVER_BUDGET
        if reason and (role.shared or not role.on_target):
            self._recorder.skip(plan.name, str(role.device), reason)
            self._own_ns += _clock() - entered
            out = own_call(plan.run, args, kwargs)
            if self._drift is not None and not silent:
                self._drift.reseed(plan, args, kwargs, out)
            return out
        if role.shared:
            out, ns = self._shared.observe(plan, args, kwargs, role, place)
        else:
            ran = (self._behind or self._across).observe(plan, args, kwargs, role, place, reason)
            out, ns = ran.out, ran.ns
            if self._drift is not None and reason and not silent:
                self._drift.reseed(plan, args, kwargs, out)
        own_ns = _clock() - entered - ns
        self._own_ns += own_ns
        if self._budget is not None and not reason:
            self._budget.verified(signature, own_ns)
        return out

    def _signature(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], role: Role, place: Place
    ) -> tuple[Any, ...]:
        """What a call has in common with others that need not be verified again: context and strides."""
        try:
            context = self._recorder.context(plan, args, kwargs, place, role.device)
            strides = [a.stride() for a in args if type(a) in _PLAIN and a.layout is torch.strided]
        except Exception:  # tensors without strides: the operator stands for all its calls
            return plan.index, place
        return context, *strides

    def _role(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Role:
        if self._all_cpu and args and type(args[0]) in _PLAIN and args[0].is_cpu:
            return self._cpu_role
        device = _CPU
        for a in args:
            if isinstance(a, torch.Tensor):
                device = a.device
            elif (kind := type(a)) is list or kind is tuple:
                device = next((t.device for t in a if isinstance(t, torch.Tensor)), device)
            else:
                continue
            if device.type != "cpu":
                break
        if kwargs and device.type == "cpu":
            wanted = kwargs.get("device")
            if wanted is not None:
                device = wanted
            else:
                device = next((t.device for t in kwargs.values() if isinstance(t, torch.Tensor)), device)
        return self._roles.get(device) or self._role_of(device)

    def _role_of(self, device: torch.device) -> Role:
        target, ref = self._target.platform, self._ref.platform
        on_target = target.is_ambient and target.same_device(device)
        role = self._roles[device] = Role(
            device,
            on_target=on_target,
            on_ref=not on_target and ref.is_ambient and ref.same_device(device),
            shared=target.same_device(device) and ref.same_device(device),
        )
        return role


def why_not_behind(config: Config, target: Platform, ref: Platform) -> str:
    """Why calls cannot be compared later, on another thread; empty where they can.

    The accumulated error and the overhead budget need to know at once. A reference with settings that belong to this
    process would have the program run under them.
    """
    if config.drift:
        return "drift=True needs each result at once"
    if config.budget is not None:
        return "budget= needs to know at once what a call took"
    if ref.device.type != "cpu" or not (ref.is_ambient or ref.remote is not None):
        return f"the reference {ref} does not run beside the program"
    if transfers(target) is None:
        return f"calls on {target} have ended when they return"
    return ""
