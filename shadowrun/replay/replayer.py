"""Runs each call for the user and once more elsewhere, compares, and records one verdict.

Two paths. Where both platforms share the device of the call (the CPU under other settings), inputs are
used as they are and only what the call writes to is copied. Else all inputs are mirrored to the CPU first,
which is also what the judge, the oracle and a fallback work on.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.errors import ShadowrunWarning
from shadowrun.intercept.plan import Action, OpPlan
from shadowrun.replay.comparing import Comparing
from shadowrun.replay.execution import Executor, Ran
from shadowrun.replay.mirror import OverBudget, copy_mutated, mirror
from shadowrun.replay.target_failure import TargetFailure
from shadowrun.replay.views import ViewCheck
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from shadowrun.config import Config
    from shadowrun.intercept.attribution import Place
    from shadowrun.platforms.device import Platform
    from shadowrun.replay.drift import DriftChain
    from shadowrun.replay.recorder import Recorder
    from shadowrun.replay.schedule import Selection

__all__ = ["Replayer"]

_CPU = torch.device("cpu")
_clock = time.perf_counter_ns
_FRAMES = 2  # from `Recorder.place` to the mode's handler
_CUSTOM = "custom operator: a replay could repeat its side effects; name it in ops= to allow it"
_BUDGET = "budget: the copies of this call exceed max_bytes"


@dataclass(frozen=True, slots=True)
class Role:
    """What a device means to this comparison.

    Attributes:
        device: Where the user's call runs.
        on_target, on_ref: That is the target, the reference; neither: both are replayed.
        shared: Both platforms are this device, under settings of their own.
    """

    device: torch.device
    on_target: bool
    on_ref: bool
    shared: bool


class Replayer:
    """The observer behind the dispatch mode.

    Attributes:
        own_ns: Nanoseconds spent here and not in the user's own operators.
    """

    def __init__(
        self,
        config: Config,
        target: Platform,
        ref: Platform,
        recorder: Recorder,
        selection: Selection,
        drift: DriftChain | None,
    ) -> None:
        self._config = config
        self._target = Executor(target)
        self._ref = Executor(ref)
        self._recorder = recorder
        self._selection = selection
        self._drift = drift
        self._comparing = Comparing(config, self._target, self._ref, recorder)
        self._failure = TargetFailure(config, self._target, self._ref, recorder)
        self._views = ViewCheck(recorder, strides=not (target.functionalizes or ref.functionalizes))
        self._roles: dict[torch.device, Role] = {}
        self._max_bytes = config.max_bytes
        self._warned = False
        self.own_ns = 0

    def start(self) -> None:
        """Put the witnesses of fallback in place."""
        self._target.witness.start()

    def stop(self) -> None:
        """Take them away."""
        self._target.witness.stop()

    def count(self, name: str, reason: str) -> None:
        """Count a call that has no plan."""
        self._recorder.skip(name, "", reason)

    def pass_by(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that is not compared, and count it."""
        self._recorder.skip(plan.name, "", plan.reason or "fake or traced tensors")
        return plan.func(*args, **kwargs)

    def observe(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call for the user, then elsewhere, and record the verdict."""
        entered = _clock()
        role = self._role(args, kwargs)
        place = self._recorder.place(_FRAMES)
        reason = self._selection.reason_to_skip(plan, place)
        if not reason and (plan.action is Action.VIEW or plan.action is Action.EMPTY):
            reason = plan.reason
        if reason and (role.shared or not role.on_target):
            self._recorder.skip(plan.name, str(role.device), reason)
            self.own_ns += _clock() - entered
            return plan.func(*args, **kwargs)
        observe = self._observe_shared if role.shared else self._observe_across
        ran = observe(plan, args, kwargs, role, place, reason)
        self.own_ns += _clock() - entered - ran.ns
        return ran.out

    def _role(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Role:
        device = _CPU
        for a in args:
            if isinstance(a, torch.Tensor):
                device = a.device
            elif (kind := type(a)) is list or kind is tuple:
                device = next((t.device for t in a if isinstance(t, torch.Tensor)), device)
            else:
                continue
            if device is not _CPU and device.type != "cpu":
                break
        if kwargs and device.type == "cpu":
            wanted = kwargs.get("device")
            if wanted is not None:
                device = wanted
            else:
                device = next((t.device for t in kwargs.values() if isinstance(t, torch.Tensor)), device)
        role = self._roles.get(device)
        if role is None:
            target, ref = self._target.platform, self._ref.platform
            on_target = target.is_ambient and target.same_device(device)
            role = self._roles[device] = Role(
                device,
                on_target=on_target,
                on_ref=not on_target and ref.is_ambient and ref.same_device(device),
                shared=target.same_device(device) and ref.same_device(device),
            )
        return role

    # -- one device under two settings ---------------------------------------------------------------

    def _observe_shared(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], role: Role, place: Place, reason: str
    ) -> Ran:
        del reason
        recorder = self._recorder
        problem: Verdict | None = None
        pristine = (args, kwargs)
        generator = state = None
        context = -1
        try:
            context = recorder.context(plan, args, kwargs, place, role.device)
            if plan.custom and not self._selection.ops_named:
                problem = Verdict(Status.UNVERIFIED, None, _CUSTOM)
            elif plan.mutated:
                pristine = copy_mutated(plan, args, kwargs, self._max_bytes)
            if (plan.action is Action.RANDOM or plan.custom) and problem is None:
                generator = _generator(role.device, kwargs)
                state = generator.get_state()
        except OverBudget:
            problem = Verdict(Status.UNVERIFIED, None, _BUDGET)
        except Exception as error:
            problem = self._harness("copying the inputs of", plan, error)
        drift = self._drift
        if drift is not None:
            drift.before(plan, args, kwargs)
        start = _clock()
        out = plan.func(*args, **kwargs)
        own = Ran(args, kwargs, out, _clock() - start)
        if problem is not None:
            self._unverified(context, problem, plan, own)
            return own
        try:
            after = generator.get_state() if generator is not None else None

            def again(executor: Executor) -> Ran:
                if generator is not None and state is not None:
                    generator.set_state(state)
                if not plan.mutated:
                    return executor.run(plan, args, kwargs)
                return executor.run(plan, *copy_mutated(plan, *pristine, self._max_bytes))

            try:
                actual = own if role.on_target else again(self._target)
                expected = own if role.on_ref else again(self._ref)
                drifted = drift.after(plan, args, kwargs, out, generator, state) if drift is not None else None
            finally:
                if generator is not None and after is not None:
                    generator.set_state(after)
            rng = (generator, state) if generator is not None and state is not None else None
            self._comparing.conclude(plan, context, pristine, actual, expected, drifted, shared=True, rng=rng)
        except Exception as error:
            self._unverified(context, self._harness("replaying", plan, error), plan, None)
        return own

    # -- two devices -----------------------------------------------------------------------------------

    def _observe_across(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], role: Role, place: Place, reason: str
    ) -> Ran:
        recorder = self._recorder
        problem: Verdict | None = None
        pristine: Any = None
        try:
            if plan.custom and not self._selection.ops_named:
                problem = Verdict(Status.UNVERIFIED, None, _CUSTOM)
            elif not reason:
                pristine = self._mirrored(args, kwargs, role)
        except OverBudget:
            problem = Verdict(Status.UNVERIFIED, None, _BUDGET)
        except Exception as error:
            problem = Verdict(Status.UNVERIFIED, None, f"inputs cannot be copied: {type(error).__name__}", str(error)[:300])
        drift = self._drift if not reason else None
        if drift is not None:
            drift.before(plan, args, kwargs)
        if role.on_target:
            try:
                own = self._target.run_user(plan, args, kwargs)
            except Exception as error:
                answer = self._failure.answer(plan, args, kwargs, pristine, role.device, place, error)
                if answer is None:
                    raise
                if drift is not None:
                    drift.reseed(plan, args, kwargs, answer.out)
                return answer
        else:
            own = self._ref.run_user(plan, args, kwargs) if role.on_ref else _plainly(plan, args, kwargs)
        try:
            if reason:
                if plan.action is Action.VIEW:
                    self._views.check(plan, args, kwargs, own.out, place, role.device)
                recorder.skip(plan.name, str(role.device), reason)
                return own
            context = recorder.context(plan, args, kwargs, place, role.device)
            if problem is not None:
                self._unverified(context, problem, plan, own)
                return own
            if plan.action is Action.RANDOM and not _is_certain(plan, args, kwargs):
                drawn = own if role.on_target else self._draw(context, plan, pristine)
                if drawn is not None:
                    self._comparing.conclude_random(plan, context, pristine, drawn)
                if drift is not None:
                    drift.reseed(plan, args, kwargs, own.out)
                return own
            actual = own if role.on_target else self._failure.attempt(context, plan, pristine)
            expected = own if role.on_ref else self._reference(context, plan, pristine)
            drifted = drift.after(plan, args, kwargs, own.out, None, None) if drift is not None else None
            if actual is not None and expected is not None:
                self._comparing.conclude(
                    plan, context, pristine, actual, expected, drifted, shared=False,
                    here=role.device if role.on_target else None,
                )  # fmt: skip
        except Exception as error:
            context = recorder.context(plan, (), {}, place, role.device)
            self._unverified(context, self._harness("replaying", plan, error), plan, None)
        return own

    def _mirrored(self, args: tuple[Any, ...], kwargs: dict[str, Any], role: Role) -> Any:
        """Inputs on the CPU, as before the call; those that lie there are copied too: the call may write to them."""
        for executor in (self._target, self._ref):
            if executor.platform.functionalizes and executor.platform.same_device(role.device):
                return executor.to_device(args, kwargs, _CPU, self._max_bytes)
        return mirror(args, kwargs, _CPU, self._max_bytes)

    def _reference(self, context: int, plan: OpPlan, pristine: Any) -> Ran | None:
        try:
            return self._ref.run_mirrored(plan, pristine[0], pristine[1], self._max_bytes)
        except Exception as error:
            why = f"the reference cannot run it: {type(error).__name__}"
            self._recorder.verdict(context, Verdict(Status.UNVERIFIED, None, why, str(error)[:300]))
            return None

    def _draw(self, context: int, plan: OpPlan, pristine: Any) -> Ran | None:
        """Run a random operator on the target without moving its stream."""
        platform = self._target.platform
        # Also the CPU's: a device without a generator of its own (lazy), or one that falls back, draws there.
        state, cpu_state = platform.rng_state(), torch.get_rng_state()
        try:
            return self._failure.attempt(context, plan, pristine)
        finally:
            platform.set_rng_state(state)
            torch.set_rng_state(cpu_state)

    def _unverified(self, context: int, verdict: Verdict, plan: OpPlan, own: Ran | None) -> None:
        try:
            if context >= 0:
                self._recorder.verdict(context, verdict)
            else:
                self._recorder.skip(plan.name, "", verdict.explanation)
            if self._drift is not None and own is not None:
                self._drift.reseed(plan, own.args, own.kwargs, own.out)
        except Exception as error:
            self._harness("recording", plan, error)

    def _harness(self, doing: str, plan: OpPlan, error: Exception) -> Verdict:
        """An internal failure: a record and one warning, never an exception in the user's program."""
        text = f"{doing} {plan.name}: {type(error).__name__}: {error}"[:500]
        if not self._warned:
            self._warned = True
            try:
                warnings.warn(
                    f"shadowrun failed while {text}. Your program goes on unchanged; the call is recorded as "
                    "ERROR (harness), and later failures only so. Please report it.",
                    ShadowrunWarning,
                    stacklevel=4,
                )
            except ShadowrunWarning:  # warnings are errors here: still none of the user's business
                pass
        return Verdict(Status.ERROR, Cause.HARNESS, type(error).__name__, text)


def _plainly(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ran:
    start = _clock()
    out = plan.func(*args, **kwargs)
    return Ran(args, kwargs, out, _clock() - start)


def _generator(device: torch.device, kwargs: dict[str, Any]) -> torch.Generator:
    given = kwargs.get("generator")
    if isinstance(given, torch.Generator):
        return given
    if device.type == "cpu":
        return torch.default_generator
    generators: Any = getattr(torch, device.type).default_generators
    generator: torch.Generator = generators[device.index or 0]
    return generator


def _is_certain(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a random operator draws nothing in this call (attention with dropout 0)."""
    if plan.dropout < 0:
        return False
    p = args[plan.dropout] if plan.dropout < len(args) else kwargs.get("dropout_p", 0.0)
    return not p
