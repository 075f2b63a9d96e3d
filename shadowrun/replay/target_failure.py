"""What happens when the target raises: recorded, answered by the reference, or passed on unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.plan import Action, OpPlan
from shadowrun.platforms.remote import Unsendable, WorkerDied
from shadowrun.platforms.unsupported import classify, limit_of_host
from shadowrun.replay import results
from shadowrun.replay.equivalents import EQUIVALENTS, is_device_specific
from shadowrun.replay.execution import Executor, Ran
from shadowrun.replay.views import view_on_meta
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from shadowrun.config import Config
    from shadowrun.intercept.attribution import Place
    from shadowrun.replay.recorder import Recorder

__all__ = ["TargetFailure"]

_CPU = torch.device("cpu")


class TargetFailure:
    """Classes the target's exceptions, and answers for operators that it lacks."""

    def __init__(self, config: Config, target: Executor, ref: Executor, recorder: Recorder) -> None:
        self._config = config
        self._target = target
        self._ref = ref
        self._recorder = recorder
        # Draws made in the target's stead must not move the user's CPU stream.
        self._rng = torch.Generator().manual_seed(0x5AD0)

    def answer(
        self,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        pristine: Any,
        device: torch.device,
        place: Place,
        error: Exception,
    ) -> Ran | None:
        """Record that the user's own call raised on the target.

        Returns:
            The reference's results as results of the target, or None: the exception goes on.
        """
        recorder = self._recorder
        try:
            context = recorder.context(plan, args, kwargs, place, device)
            if isinstance(error, torch.OutOfMemoryError):
                recorder.verdict(
                    context, Verdict(Status.ERROR, Cause.IMPLEMENTATION, "out of memory", str(error)[:300])
                )
                return None
            if limit_of_host(error):
                recorder.verdict(context, _at_a_limit(error))
                return None
            failure = classify(error)
            if plan.action is Action.VIEW:
                return self._answer_view(plan, args, kwargs, context, failure.message, failure.missing_kernel, error)
            if pristine is None:
                pristine = self._target.to_device(plan, args, kwargs, _CPU, self._config.max_bytes)
            ran = self._run_reference(plan, pristine)
            if ran is None:
                recorder.skip(plan.name, str(device), "invalid call: both platforms raise")
                return None
            if failure.supported:
                verdict = Verdict(Status.ERROR, failure.cause, type(error).__name__, failure.message)
                captured = recorder.keep(plan, verdict, pristine)
                recorder.verdict(context, verdict, times=(ran.ns / 1000, -1.0), captured=captured)
                return None
            self._unsupported(context, plan, error, ran.ns / 1000, pristine)
            if self._config.on_unsupported == "raise":
                return None
            out = results.hand_back(plan, args, kwargs, (ran.args, ran.kwargs, ran.out), device)
        except Exception:  # nothing we could do for the user: he gets his own exception
            return None
        return Ran(args, kwargs, out, 0)

    def attempt(self, context: int, plan: OpPlan, pristine: Any) -> Ran | None:
        """Run a call on the target for a program that runs elsewhere; what it raises is recorded."""
        try:
            return self._target.run_mirrored(plan, pristine[0], pristine[1], self._config.max_bytes)
        except Exception as error:
            failure = classify(error)
            if limit_of_host(error):
                self._recorder.verdict(context, _at_a_limit(error))
            elif isinstance(error, WorkerDied):
                verdict = Verdict(Status.ERROR, Cause.IMPLEMENTATION, str(error), failure.message)
                self._recorder.verdict(context, verdict, captured=self._recorder.keep(plan, verdict, pristine))
            elif isinstance(error, Unsendable):
                self._recorder.verdict(context, Verdict(Status.UNVERIFIED, None, str(error)))
            elif isinstance(error, Warning):
                verdict = Verdict(
                    Status.UNVERIFIED, None, "the replay warned, and warnings are errors here", str(error)[:300]
                )
                self._recorder.verdict(context, verdict)
            elif is_device_specific(plan.name) and plan.name not in EQUIVALENTS:
                verdict = Verdict(Status.UNVERIFIED, None, "an operator of another kind of device", failure.message)
                self._recorder.verdict(context, verdict)
            elif failure.supported:
                verdict = Verdict(Status.ERROR, failure.cause, type(error).__name__, failure.message)
                self._recorder.verdict(context, verdict, captured=self._recorder.keep(plan, verdict, pristine))
            else:
                self._unsupported(context, plan, error, -1.0, pristine)
            return None

    def _unsupported(self, context: int, plan: OpPlan, error: Exception, ref_us: float, pristine: Any) -> None:
        failure = classify(error)
        kernel = failure.missing_kernel or plan.name
        what = "dtype" if failure.cause is Cause.MISSING_DTYPE else "kernel"
        verdict = Verdict(Status.UNSUPPORTED, failure.cause, f"no {what} for this operator", failure.message)
        captured = self._recorder.keep(plan, verdict, pristine)
        self._recorder.verdict(context, verdict, missing_kernel=kernel, times=(ref_us, -1.0), captured=captured)

    def _run_reference(self, plan: OpPlan, pristine: Any) -> Ran | None:
        saved = torch.get_rng_state()
        torch.set_rng_state(self._rng.get_state())
        try:
            return self._ref.run_mirrored(plan, pristine[0], pristine[1], self._config.max_bytes)
        except Exception:
            return None
        finally:
            self._rng.set_state(torch.get_rng_state())
            torch.set_rng_state(saved)

    def _answer_view(
        self,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: int,
        message: str,
        kernel: str,
        error: Exception,
    ) -> Ran | None:
        """A view must alias its input: the form that it should have is laid over the input's own memory."""
        try:
            wanted = view_on_meta(plan, args, kwargs)
        except Exception:
            self._recorder.skip(plan.name, "", "invalid call: both platforms raise")
            return None
        if classify(error).supported:
            verdict = Verdict(Status.ERROR, Cause.IMPLEMENTATION, type(error).__name__, message)
            self._recorder.verdict(context, verdict, captured=self._recorder.keep(plan, verdict, (args, kwargs)))
            return None
        verdict = Verdict(Status.UNSUPPORTED, Cause.MISSING_OPERATOR, "no kernel for this operator", message)
        captured = self._recorder.keep(plan, verdict, (args, kwargs))
        self._recorder.verdict(context, verdict, missing_kernel=kernel or plan.name, captured=captured)
        if self._config.on_unsupported == "raise" or plan.mutated:
            return None
        base = args[0]

        def lay(w: torch.Tensor) -> torch.Tensor:
            view: torch.Tensor = base.as_strided(w.shape, w.stride(), w.storage_offset())
            return view

        out = [lay(w) for w in wanted] if isinstance(wanted, (list, tuple)) else lay(wanted)
        return Ran(args, kwargs, out, 0)


def _at_a_limit(error: Exception) -> Verdict:
    """The verdict on a call that ended at a limit of this process or machine."""
    return Verdict(Status.UNVERIFIED, None, limit_of_host(error), str(error)[:300])
