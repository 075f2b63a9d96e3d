"""Calls on a device that only one platform has: the inputs are copied to the CPU, and run from there on the other one.

The copies on the CPU are also the inputs of the judge, the oracle and a fallback.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.plan import Action
from shadowrun.intercept.torchapi import with_isolated_warnings
from shadowrun.operators.vendor_ops import for_reference
from shadowrun.replay.call import draws_random, run_own
from shadowrun.replay.context import BUDGET, CUSTOM, ReplayContext
from shadowrun.replay.copies import Arguments, OverBudget, mirror, plan_with_cpu_tensors, tensors_in, written_to
from shadowrun.replay.input_copies import TOO_LARGE, InputCopies, SavedRngStates, are_too_large, run_before_copies
from shadowrun.replay.paths.lazy_device import LazyDevicePath
from shadowrun.replay.paths.platform_runs import PlatformRuns, inputs_not_copied
from shadowrun.replay.paths.view_check import UncomparedCalls
from shadowrun.torch_private import is_zero_tensor

if TYPE_CHECKING:
    from shadowrun.replay.call import Call, CallRun
    from shadowrun.replay.executor import Executor
    from shadowrun.replay.paths.waiting_calls import WaitingCalls

__all__ = ["CrossDevicePath", "RngStates"]

_CPU = torch.device("cpu")
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_NUMBERS = frozenset({bool, int, float, type(None), str})
_N_PROCESSORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class CrossDevicePath:
    """Observes calls on the target (replayed on the reference), on the reference, or on a third device.

    Args:
        context: What the paths share.
        waiting: Calls that the target's process repeats while the program goes on; None: none do.

    Attributes:
        context: As given.
        runs: Runs calls on either platform.
    """

    def __init__(self, context: ReplayContext, waiting: WaitingCalls | None = None) -> None:
        self.context = self._context = context
        self._target, self._ref = context.target, context.ref
        self._max_bytes = context.config.max_bytes
        self.runs = PlatformRuns(context.config, context.target, context.ref, context.recorder)
        # A target in its own process is a CPU too: from the same random state it may draw the same numbers.
        # Everywhere else the generators differ by device, and draws can only be checked for plausibility.
        self._may_draw_the_same = context.target.platform.remote is not None
        self._processes = [e for e in (context.target, context.ref) if e.platform.remote is not None]
        lazy_target, lazy_ref = (e.platform.functionalizes for e in (context.target, context.ref))
        self._uncompared = UncomparedCalls(context.recorder, strides=not (lazy_target or lazy_ref))
        shared = (self.runs, self._uncompared)
        self._lazy_target = LazyDevicePath(context, context.target, *shared) if lazy_target else None
        self._lazy_ref = LazyDevicePath(context, context.ref, *shared) if lazy_ref else None
        self._waiting = waiting
        if waiting is not None:
            waiting.connect(self)

    def observe(self, call: Call) -> CallRun:
        """Run a call for the program and elsewhere, and record the verdict."""
        if not self._processes:
            return self._observe(call)
        if self._waiting is not None:
            own = self._waiting.observe(call)
            if own is not None:
                return own
        try:
            return self._observe(call)
        finally:
            # A call that raised, or is not compared after all, must not keep the program's tensors.
            self._forget_begun()

    def _observe(self, call: Call) -> CallRun:
        context, role = self._context, call.role
        # Meta tensors have no values, and a copy to the CPU raises.
        if role.device.type == "meta":
            context.recorder.skip(call.plan.name, "meta", "meta tensors: no values")
            return run_own(call.plan, call.args, call.kwargs)
        lazy = self._lazy_target if role.on_target else self._lazy_ref if role.on_ref else None
        if lazy is not None:
            return lazy.observe(call)
        if role.on_target:
            call.plan = plan_with_cpu_tensors(call.plan, call.args, call.kwargs)
        copies = self._copy_inputs(call)
        random = call.plan.action is Action.RANDOM
        # The state has to be read before the program's own call moves the stream.
        began = self.rng_states(call) if random and role.device == _CPU else None
        drift = context.drift if not call.reason else None
        if drift is not None:
            # Twins are laid out before the call: it may write to the inputs that they stand for.
            with_isolated_warnings(drift.take_inputs, (), (call,))
        saved = None
        if random and copies.pristine is not None:
            saved = SavedRngStates(self._target.platform if role.on_target else None, call.kwargs)
        if self._processes and copies.pristine is not None and not random:
            self._begin_elsewhere(call, copies.pristine)
        run = self._target.run_user if role.on_target else self._ref.run_user if role.on_ref else run_own
        try:
            # The program's call must not fail for lack of memory that only our copies take.
            restore = self._forget_begun if saved is None else saved.restore
            own = run_before_copies(run, call, copies, restore)
        except Exception as error:
            answer = self.runs.answer(call, copies.pristine, error) if role.on_target else None
            if answer is None:
                raise
            if drift is not None:
                # The chain never ran this call: it continues from the answer.
                drift.reseed(call.plan, answer, answered=True)
            return answer
        self._probe_warnings(call, own, copies)
        try:
            if call.reason:
                self._uncompared.record(call, own)
                return own
            # The results' size is known only now; a replay would allocate as much again.
            if copies.problem is None and are_too_large(call.plan, own.out, self._max_bytes):
                copies.problem = TOO_LARGE
            context.recorder.context(call)
            if copies.problem is not None or copies.pristine is None:
                context.unverified(call, copies.problem or BUDGET, own)
            else:
                self.compare(call, own, copies.pristine, began)
        except Exception as error:
            context.failed("replaying", call, error, own.out)
        return own

    def rng_states(self, call: Call) -> RngStates | None:
        """States that a random call begins with, where the target may draw the same numbers from them."""
        return RngStates(call.kwargs) if self._may_draw_the_same else None

    def compare(self, call: Call, own: CallRun, pristine: Arguments, began: RngStates | None) -> None:
        """Repeat a call, and record the verdict.

        Args:
            call: The call, with its context.
            own: The program's own run.
            pristine: Inputs as before it.
            began: States that a random call began with.
        """
        # Where the call waited it has no arguments any more.
        if draws_random(call.plan, *pristine):
            self._compare_random(call, own, pristine, began)
        else:
            self._compare(call, own, pristine)

    def compare_and_record(self, call: Call, own: CallRun, pristine: Arguments) -> None:
        """Replay a call of the target's that has run, and record the verdict."""
        try:
            self._context.recorder.context(call)
            if call.is_random:
                random = self._context.comparator.compare_and_record_random
                # The reference cannot repeat the draws: they are handed over.
                with_isolated_warnings(random, (), (call, pristine, own))
            else:
                self._compare(call, own, pristine)
        except Exception as error:
            self._context.failed("replaying", call, error, own.out)

    def _copy_inputs(self, call: Call) -> InputCopies:
        """Inputs on the CPU, as before the call; those that lie there are copied too: the call may write to them."""
        copies, plan, args, kwargs = InputCopies(), call.plan, call.args, call.kwargs
        try:
            if not self._context.may_replay(plan):
                copies.problem = CUSTOM
            # A call that is not compared costs no copy.
            elif not call.reason:
                given = (args, kwargs, _CPU, self._max_bytes)
                written = written_to(plan, args, kwargs) if plan.mutated else []
                kept = self._not_copied(call) if not written else None
                if kept and self._are_all(kept, args, kwargs):
                    copies.pristine = args, kwargs
                else:
                    copies.pristine = with_isolated_warnings(mirror, (), given, {"written": written, "kept": kept})
        except OverBudget:
            copies.problem = BUDGET
        except Exception as error:
            copies.problem = inputs_not_copied(error)
        return copies

    def _not_copied(self, call: Call) -> list[torch.Tensor] | None:
        """Inputs that are not copied: the call writes to none, and the target's process gets copies of its own."""
        remote = self._target.platform.remote is not None
        if not remote or call.role.device != _CPU or call.plan.mutated or call.plan.action is Action.RANDOM:
            return None
        given = tensors_in((*call.args, *call.kwargs.values()))
        # A copy begins at 0, and is no view of another kind.
        return [t for t in given if type(t) in _PLAIN and t.layout is torch.strided and not _is_view_of_kind(t)]

    def _are_all(self, kept: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether nothing of a call has to be copied or changed, so that its own arguments will do."""
        found = 0
        for value in (*args, *kwargs.values()):
            kind = type(value)
            found += kind in _PLAIN
            # A list may be changed by the program; a device or dtype follows the copies.
            if kind not in _PLAIN and kind not in _NUMBERS:
                return False
        n_bytes = sum([t.nbytes if t.is_contiguous() else self._max_bytes for t in kept])
        return found == len(kept) and n_bytes < self._max_bytes and not kwargs.get("pin_memory")

    def _forget_begun(self) -> None:
        for executor in self._processes:
            executor.forget_begun()

    def _begin_elsewhere(self, call: Call, pristine: Arguments) -> None:
        """Have the process of the other platform begin the call: it runs while the program's own does."""
        role, plan = call.role, call.plan
        if role.on_ref and not role.on_target and _has_processors(self._target):
            self._target.begin_remote(plan, *pristine)
        elif role.on_target and not role.on_ref and _has_processors(self._ref):
            self._ref.begin_remote(for_reference(plan), *pristine)

    def _probe_warnings(self, call: Call, own: CallRun, copies: InputCopies) -> None:
        fell_back = own.fallback is not None and call.reason == call.plan.reason
        # The probe repeats the call: without copies that is safe only if it writes to nothing.
        if call.role.on_target and (copies.pristine is not None or fell_back):
            probe = (call.plan, own, copies.pristine, self._max_bytes)
            with_isolated_warnings(self._target.probe_warnings, (), probe)

    def _compare(self, call: Call, own: CallRun, pristine: Arguments) -> None:
        role, drift, drifted = call.role, self._context.drift, None
        # The program's own run stands for its platform: a third run would cost time and prove nothing.
        actual = own if role.on_target else self.runs.run_target(call, pristine)
        expected = own if role.on_ref else self.runs.run_reference(call, pristine, answered=actual is not None)
        if drift is not None:
            drifted = with_isolated_warnings(drift.after, (), (call.plan, own))
        if actual is not None and expected is not None:
            runs = (call, pristine, actual, expected, drifted)
            named = {"shared": False, "here": role.device if role.on_target else None}
            with_isolated_warnings(self._context.comparator.compare_and_record, (), runs, named)

    def _compare_random(self, call: Call, own: CallRun, pristine: Arguments, began: RngStates | None) -> None:
        comparator, drift = self._context.comparator, self._context.drift
        drawn = own if call.role.on_target else self._draw_on_target(call, pristine, began)
        if drawn is not None:
            # Equal draws mean that both ran the same generator: the values can be compared in full.
            if began is not None and with_isolated_warnings(self._drew_the_same, (), (call, drawn, own)):
                runs = (call, pristine, drawn, own)
                with_isolated_warnings(comparator.compare_and_record, (), runs, {"shared": False})
            else:
                with_isolated_warnings(comparator.compare_and_record_random, (), (call, pristine, drawn))
        if drift is not None:
            drift.reseed(call.plan, own)

    def _drew_the_same(self, call: Call, drawn: CallRun, own: CallRun) -> bool:
        """Whether the target drew the program's own numbers."""
        pairs = zip(self._target.values(call.plan, drawn), self._ref.values(call.plan, own), strict=False)
        return all(self._context.comparator.equal(a, e) for a, e in pairs)

    def _draw_on_target(self, call: Call, pristine: Arguments, began: RngStates | None) -> CallRun | None:
        """Run a random operator on the target without moving its stream, or from where the program's call began."""
        # The CPU's stream too: a device without a generator (lazy), or one that falls back, draws from it.
        saved = SavedRngStates(self._target.platform, pristine[1])
        try:
            if began is not None:
                began.enter(pristine[1].get("generator"))
            return self.runs.run_target(call, pristine)
        finally:
            saved.restore()


def _has_processors(executor: Executor) -> bool:
    """Whether the program and a platform's process have processors of their own: else they would only share them."""
    here = torch.get_num_threads()
    there = dict(executor.platform.spec.settings).get("threads", here)
    return here + int(there) <= _N_PROCESSORS


def _is_view_of_kind(t: torch.Tensor) -> bool:
    return t.storage_offset() != 0 or t.is_conj() or t.is_neg() or t.is_quantized or is_zero_tensor(t)


class RngStates:
    """States that a random call began with: the CPU's stream, and the generator's that was passed.

    Attributes:
        cpu: State of the CPU's stream.
    """

    def __init__(self, kwargs: dict[str, Any]) -> None:
        generator = kwargs.get("generator")
        self.cpu = torch.get_rng_state()
        self._generator = generator.get_state() if isinstance(generator, torch.Generator) else None

    def enter(self, generator: Any) -> None:
        """Set both, the latter in `generator`."""
        torch.set_rng_state(self.cpu)
        if self._generator is not None:
            generator.set_state(self._generator)
