"""Calls on a target that runs behind its host: compared later, without stopping it.

The calling thread orders the copies that the comparison needs (inputs before the call, results after it) in the
stream, and goes on; the reference runs on another thread when they are there. What needs an answer at once is done at
once, as on any other device: operators that the target lacks, tensors that are no plain memory, the first call of an
operator (a warning of C++ code is heard by running it again).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.plan import Action, OpPlan
from shadowrun.intercept.torchapi import unheard
from shadowrun.replay.across import AcrossPath, is_certain
from shadowrun.replay.ambient import Ambient
from shadowrun.replay.comparing import Comparing, landed_elsewhere
from shadowrun.replay.counterparts import for_reference
from shadowrun.replay.equivalents import EQUIVALENTS
from shadowrun.replay.execution import Ran
from shadowrun.replay.mirror import OverBudget, as_given, copy_mutated, mirror, move, tensors_in, written_to
from shadowrun.replay.refused import refused
from shadowrun.replay.results import argument
from shadowrun.replay.room import may_run_again
from shadowrun.replay.snapshots import Copies, Snapshots, Stale, Unsuitable
from shadowrun.replay.stage import BUDGET, Role, Stage
from shadowrun.replay.stand_ins import Feeding, HandedOver
from shadowrun.replay.target_failure import TargetFailure
from shadowrun.types import Status, Verdict

if TYPE_CHECKING:
    from shadowrun.intercept.attribution import Place
    from shadowrun.platforms.streams import Transfers
    from shadowrun.replay.mirror import Arguments
    from shadowrun.replay.pipeline import Pipeline
    from shadowrun.replay.recorder import Recorder

__all__ = ["BehindPath"]

_CPU = torch.device("cpu")
_READ_NUMBER = "aten::_local_scalar_dense"
_NOT_READ = "reads a number on the CPU: the target would have to be waited for"
_IN_GRAPH = "recorded into a graph of the device: it does not run now"
_WAITING = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_UNSEEN_WRITE = Verdict(
    Status.UNVERIFIED, None, "memory was written to by code that the dispatcher does not see", confidence=1.0
)
_OTHER_SETTINGS = Verdict(Status.UNVERIFIED, None, "the program changed torch's settings while the call waited")


@dataclass(slots=True)
class _Comparison:
    """A call that waits to be compared. It holds copies, and nothing of the program's."""

    path: BehindPath
    plan: OpPlan
    context: int
    copies: Copies
    pristine: Arguments
    actual: Ran
    ambient: Ambient
    expected: Ran | None = None

    def run(self) -> None:
        self.path.compare(self)

    def drop(self, reason: str) -> None:
        self.path.recorder.verdict(self.context, Verdict(Status.UNVERIFIED, None, reason))


class BehindPath:
    """Observes the program's calls on a target that runs behind its host.

    Args:
        stage: What the calling threads work with.
        across: The same for calls that cannot wait.
        recorder: Where the comparing thread records.
        pipeline: Does the work behind.
        transfers: Copies from the target.

    Attributes:
        comparing: Compares on the thread behind.
    """

    def __init__(
        self, stage: Stage, across: AcrossPath, recorder: Recorder, pipeline: Pipeline, transfers: Transfers
    ) -> None:
        self._stage = stage
        self._across = across
        self._target = stage.target
        self._ref = stage.ref
        self._max_bytes = stage.config.max_bytes
        self._pipeline = pipeline
        self._transfers = transfers
        self.comparing = Comparing(stage.config, HandedOver(stage.target, pipeline), stage.ref, recorder)
        feeding = Feeding(stage.target, transfers)
        self._elsewhere = TargetFailure(stage.config, feeding, stage.ref, stage.recorder)
        self._snapshots = Snapshots(transfers, self._max_bytes, pipeline.wait_for_oldest)
        self._used = False
        self.recorder = recorder

    def forget(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call goes by that is not compared, and may write to any of its tensors."""
        for t in tensors_in((*args, *kwargs.values())):
            self._snapshots.forget(t)

    def stop(self) -> None:
        """Let go of all copies."""
        self._snapshots.forget_all()

    # -- the calling thread --------------------------------------------------------------------------

    def observe(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], role: Role, place: Place, reason: str
    ) -> Ran:
        """Run a call for the user, and have it compared; `reason` is set where it is not."""
        if not role.on_target:
            return self._observe_on_cpu(plan, args, kwargs, role, place, reason)
        self._used = True
        if self._transfers.capturing():
            self.recorder.skip(plan.name, str(role.device), _IN_GRAPH)
            return self._target.run_user(plan, args, kwargs)
        if reason or (plan.custom and not self._stage.selection.ops_named):
            if plan.mutated or plan.custom:
                self.forget(args, kwargs)
            return self._across.observe(plan, args, kwargs, role, place, reason)
        plan = as_given(plan, args, kwargs)
        copies = Copies()
        try:
            written = written_to(plan, args, kwargs)
            pristine: Arguments | None = unheard(self._snapshots.arguments, (), (copies, args, kwargs, written))
        except Exception:  # no plain memory, or too much of it: the other path says so
            pristine = None
        finally:
            self._snapshots.mark(copies)
        if pristine is None:
            return self._across.observe(plan, args, kwargs, role, place, reason)
        try:
            own = self._target.run_user(plan, args, kwargs)
        except Exception as error:
            copies.wait()
            if plan.action is Action.RANDOM or not may_run_again(error, plan, args, kwargs, pristine):
                answer = self._across.failure.answer(plan, args, kwargs, pristine, role.device, place, error)
                if answer is None:
                    raise
                return answer
            pristine = None
        if pristine is None:  # what waits takes the memory that the call needs
            del copies
            self._pipeline.drain()
            self._snapshots.forget_all()
            return self._across.observe(plan, args, kwargs, role, place, reason)
        if self._target.expects_hearing(plan, args):
            self._hear(plan, own, copies, pristine)
        self._order(plan, args, kwargs, own, copies, pristine, role, place)
        return own

    def _observe_on_cpu(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], role: Role, place: Place, reason: str
    ) -> Ran:
        """A call on the reference: the target repeats it in its stream, and is not waited for.

        A program on a GPU reads many numbers from the CPU (AdamW its steps, twice for each parameter): to read them
        from the GPU as well would wait for it each time.
        """
        why_not = _IN_GRAPH if self._transfers.capturing() else ""
        if plan.name == _READ_NUMBER and self._used and role.on_ref and not reason:
            why_not = _NOT_READ
        if why_not:
            self.recorder.skip(plan.name, str(role.device), why_not)
            return self._ref.run_user(plan, args, kwargs)
        simple = plan.action is Action.REPLAY and not plan.custom and plan.name not in EQUIVALENTS
        if reason or not role.on_ref or not simple or not _WAITING.isdisjoint(plan.func.tags):
            return self._across.observe(plan, args, kwargs, role, place, reason)
        copies = Copies()
        try:
            written = written_to(plan, args, kwargs)
            pristine = unheard(mirror, (), (args, kwargs, _CPU, self._max_bytes, move, written))
        except Exception:  # the other path says why
            return self._across.observe(plan, args, kwargs, role, place, reason)
        own = self._ref.run_user(plan, args, kwargs)
        context = -1
        try:
            context = self._stage.recorder.context(plan, args, kwargs, place, role.device)
            expected = unheard(self._results, (), (plan, own, copies, pristine))
            ran = self._elsewhere.attempt(context, plan, pristine)
            if ran is not None:
                try:
                    actual = unheard(self._results, (), (plan, ran, copies, pristine))
                finally:
                    self._snapshots.mark(copies)
                actual.fallback = ran.fallback
                call = _Comparison(self, plan, context, copies, pristine, actual, Ambient.now(), expected)
                self._pipeline.submit(call)
        except OverBudget:
            self._stage.recorder.verdict(context, BUDGET)
        except Exception as error:
            verdict = self._stage.harness("replaying", plan, error, (*args, *kwargs.values(), own.out))
            self._stage.unverified(context, verdict, plan, None)
        return own

    def _hear(self, plan: OpPlan, own: Ran, copies: Copies, pristine: Arguments) -> None:
        with contextlib.suppress(Stale):
            copies.wait()
            unheard(self._target.hear, (), (plan, own, pristine, self._max_bytes))

    def _order(
        self,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        own: Ran,
        copies: Copies,
        pristine: Arguments,
        role: Role,
        place: Place,
    ) -> None:
        """Order the copies of the results, and hand the call over."""
        context = -1
        try:
            context = self._stage.recorder.context(plan, args, kwargs, place, role.device)
            fallback = own.fallback or landed_elsewhere(plan, own.out, role.device)
            try:
                if own.out is not None and _lies_on_cpu(own.out):
                    # The program's own copy to the host: nobody knows when it is there.
                    self._target.platform.synchronize()
                actual = unheard(self._results, (), (plan, own, copies, pristine))
            finally:
                self._snapshots.mark(copies)
            actual.fallback = fallback
            self._pipeline.submit(_Comparison(self, plan, context, copies, pristine, actual, Ambient.now()))
        except OverBudget:
            self._stage.recorder.verdict(context, BUDGET)
        except Unsuitable:  # it returned what is no plain memory: compared now
            with contextlib.suppress(Stale):
                copies.wait()
                self._across.conclude(plan, args, kwargs, own, pristine, role, place)
        except Exception as error:
            verdict = self._stage.harness("copying the results of", plan, error, (*args, *kwargs.values(), own.out))
            self._stage.unverified(context, verdict, plan, None)

    def _results(self, plan: OpPlan, own: Ran, copies: Copies, pristine: Arguments) -> Ran:
        """The run as it was, with copies in the place of what it returned and wrote to."""
        snapshots, copies.ran = self._snapshots, True
        args, kwargs = list(pristine[0]), dict(pristine[1])
        for a in plan.mutated:
            after = snapshots.again(copies, argument(a, own.args, own.kwargs))
            if a.kwarg_only or a.position >= len(args):
                kwargs[a.name] = after
            else:
                args[a.position] = after
        out: Any = None
        if plan.n_returns == 1:
            out = snapshots.again(copies, own.out) if plan.fresh else None
        elif plan.n_returns:
            wanted = {i for i in plan.fresh if i not in plan.uninitialised}
            out = tuple([snapshots.again(copies, v) if i in wanted else None for i, v in enumerate(own.out)])
        return Ran(tuple(args), kwargs, out, own.ns)

    # -- the comparing thread ------------------------------------------------------------------------

    def compare(self, call: _Comparison) -> None:
        """Run the reference, compare and record."""
        plan = call.plan
        try:
            call.copies.wait()
            if not call.ambient.still_holds():
                self.recorder.verdict(call.context, _OTHER_SETTINGS)
                return
            with call.ambient.entered():
                if plan.action is Action.RANDOM and not is_certain(plan, *call.pristine):
                    unheard(self.comparing.conclude_random, (), (plan, call.context, call.pristine, call.actual))
                    return
                expected = call.expected or self._reference(call)
                if expected is None:
                    return
                if not call.ambient.still_holds():
                    self.recorder.verdict(call.context, _OTHER_SETTINGS)
                    return
                concluded = (plan, call.context, call.pristine, call.actual, expected, None)
                unheard(self.comparing.conclude, (), concluded, {"shared": False})
        except Stale:
            self._snapshots.shares = False
            self.recorder.verdict(call.context, _UNSEEN_WRITE)
        except Exception as error:
            tensors = (*call.pristine[0], *call.pristine[1].values(), call.actual.out)
            self.recorder.verdict(call.context, self._stage.harness("comparing", plan, error, tensors))

    def _reference(self, call: _Comparison) -> Ran | None:
        """Run the reference on the copies themselves; what it writes to is copied, since they serve other calls too."""
        plan, (args, kwargs) = call.plan, call.pristine
        try:
            if plan.mutated:
                args, kwargs = copy_mutated(plan, args, kwargs, self._max_bytes)
            return self._ref.run(for_reference(plan), args, kwargs)
        except Exception as error:
            verdict = refused(plan, *call.pristine, error)
            captured = self.recorder.keep(plan, verdict, call.pristine)
            self.recorder.verdict(call.context, verdict, captured=captured)
            return None


def _lies_on_cpu(out: Any) -> bool:
    return any(t.device.type == "cpu" for t in tensors_in((out,)))
