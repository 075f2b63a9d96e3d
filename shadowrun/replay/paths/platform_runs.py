"""Runs of a call on either platform, and the verdicts on what they raise.

What the target raises in the program's own call is answered by the reference or passed on unchanged. What the reference
refuses is either an operator that it lacks, or an invalid call that the target answered: a device that ignores a bad
index, or multiplies what does not fit, returns values that mean nothing. That is a mismatch, but only where the call is
certainly invalid: the message is about an index out of range, or torch's meta kernel, which belongs to no platform,
refuses the inputs too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.plan import Action
from shadowrun.intercept.torchapi import with_isolated_warnings
from shadowrun.operators.cpu_only_ops import EQUIVALENTS
from shadowrun.operators.facts import facts
from shadowrun.operators.vendor_ops import COUNTERPARTS, for_reference
from shadowrun.platforms.unsupported import classify, first_sentence, limit_of_host
from shadowrun.platforms.worker.client import Unsendable, WorkerDied
from shadowrun.replay.call import CallRun, argument
from shadowrun.replay.paths.view_check import view_on_meta
from shadowrun.replay.recompute import NoWideKernel
from shadowrun.torch_private import schema_of
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from shadowrun.config import Config
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.replay.call import Call
    from shadowrun.replay.context import RecordSink
    from shadowrun.replay.copies import Arguments
    from shadowrun.replay.executor import Executor

__all__ = ["PlatformRuns", "inputs_not_copied", "reference_raised", "refused", "return_to_program"]

_CPU = torch.device("cpu")

# Meta kernels see no values, so the text is the only evidence of an index out of range.
_OUT_OF_RANGE = re.compile(
    r"\bind(?:ex|ices)\b.*\bout of (?:range|bounds)|out of bounds|Dimension out of range", re.IGNORECASE | re.DOTALL
)


def reference_raised(error: Exception) -> Verdict:
    """The verdict on a call that the reference cannot run."""
    why = f"the reference cannot run it: {type(error).__name__}"
    if isinstance(error, (Unsendable, WorkerDied, NoWideKernel)):
        # These exceptions are shadowrun's own: their text says more than their type.
        why = f"the reference cannot run it: {error}"
    return Verdict(Status.UNVERIFIED, None, why, str(error)[:300])


def refused(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Verdict:
    """The verdict on a call that the target answered, and the reference did not.

    Args:
        plan: The operator.
        args: Positional inputs, as before the call.
        kwargs: Inputs by name.
        error: What the reference raised.
    """
    if not _is_invalid(plan, args, kwargs, error):
        return reference_raised(error)
    raised = type(error).__name__
    evidence = f"the target answers, and the reference raises {raised}: {first_sentence(str(error), 240)}"
    return Verdict(Status.MISMATCH, Cause.NO_ERROR, f"answered where the reference raises {raised}", evidence, 0.9)


def _is_invalid(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> bool:
    # The failure of a worker or of this machine says nothing on whether the call is valid.
    harness = isinstance(error, (Unsendable, WorkerDied, NoWideKernel, Warning)) or bool(limit_of_host(error))
    if harness or plan.custom or plan.name in COUNTERPARTS or plan.name in EQUIVALENTS or not classify(error).supported:
        return False
    if isinstance(error, IndexError) or _OUT_OF_RANGE.search(str(error)):
        return True
    try:
        view_on_meta(plan, args, kwargs)
    except NotImplementedError:
        return False
    except Exception as meta:
        return "meta" not in str(meta).lower()  # it wants values
    return False


def inputs_not_copied(error: Exception) -> Verdict:
    """The verdict on a call whose inputs cannot be copied."""
    return Verdict(Status.UNVERIFIED, None, f"inputs cannot be copied: {type(error).__name__}", str(error)[:300])


class PlatformRuns:
    """Runs calls on the target and on the reference, records what they raise, and answers for the target's lacks."""

    def __init__(self, config: Config, target: Executor, ref: Executor, recorder: RecordSink) -> None:
        self._config = config
        self._target = target
        self._ref = ref
        self._recorder = recorder
        # Random values drawn for the target must not move the program's CPU stream.
        self._rng = torch.Generator().manual_seed(0x5AD0)

    def answer(self, call: Call, pristine: Arguments | None, error: Exception) -> CallRun | None:
        """Record that the program's own call raised on the target.

        Args:
            call: The call.
            pristine: Its inputs as before it; None where they were not copied.
            error: What it raised.

        Returns:
            The reference's results as results of the target, or None: the exception is the program's.
        """
        plan, args, kwargs = call.plan, call.args, call.kwargs
        recorder = self._recorder
        try:
            context = recorder.context(call)
            if isinstance(error, torch.OutOfMemoryError):
                recorder.verdict(
                    context, Verdict(Status.ERROR, Cause.IMPLEMENTATION, "out of memory", str(error)[:300])
                )
                return None
            if limit_of_host(error):
                recorder.verdict(context, _limit_reached(error))
                return None
            failure = classify(error)
            # The reference's result has memory of its own: it cannot stand for a view.
            if plan.action is Action.VIEW:
                return self._answer_view(call, error)
            if pristine is None:
                # The call raised before it wrote: its arguments still have the values from before.
                pristine = self._target.to_device(plan, args, kwargs, _CPU, self._config.max_bytes)
            ran = self._run_quietly(plan, pristine)
            if ran is None:
                # The program may want this exception (`try`): it is right on both platforms.
                recorder.skip(plan.name, call.role.device_name, "invalid call: both platforms raise")
                return None
            if failure.supported:
                verdict = Verdict(Status.ERROR, failure.cause, type(error).__name__, failure.message)
                captured = recorder.keep_inputs(plan, verdict, pristine)
                recorder.verdict(context, verdict, times=(ran.ns / 1000, -1.0), captured=captured)
                return None
            self._unsupported(call, error, ran.ns / 1000, pristine)
            if self._config.on_unsupported == "raise":
                return None
            out = return_to_program(call, ran)
        # Whatever fails here must not replace the exception that the program would have got.
        except Exception:  # the program gets its own exception
            return None
        return CallRun(args, kwargs, out, 0)

    def run_target(self, call: Call, pristine: Arguments) -> CallRun | None:
        """Run a call on the target for a program that runs elsewhere; None where it raised, which is recorded."""
        try:
            return self._target.run_mirrored(call.plan, *pristine, self._config.max_bytes)
        except Exception as error:
            self.target_raised(call, pristine, error)
            return None

    def target_raised(self, call: Call, pristine: Arguments, error: Exception) -> None:
        """Record what the target raised for a program that runs elsewhere."""
        plan, context = call.plan, call.context
        failure = classify(error)
        if limit_of_host(error):
            self._recorder.verdict(context, _limit_reached(error))
        # A crash of the process is the platform's fault, not a missing kernel.
        elif isinstance(error, WorkerDied):
            verdict = Verdict(Status.ERROR, Cause.IMPLEMENTATION, str(error), failure.message)
            self._recorder.verdict(context, verdict, captured=self._recorder.keep_inputs(plan, verdict, pristine))
        elif isinstance(error, Unsendable):
            self._recorder.verdict(context, Verdict(Status.UNVERIFIED, None, str(error)))
        elif isinstance(error, Warning):
            verdict = Verdict(
                Status.UNVERIFIED, None, "the replay warned, and warnings are errors here", str(error)[:300]
            )
            self._recorder.verdict(context, verdict)
        # No other device has this operator, so its absence on the target is no finding.
        elif facts(plan.name).device_specific and plan.name not in EQUIVALENTS:
            verdict = Verdict(Status.UNVERIFIED, None, "an operator of another kind of device", failure.message)
            self._recorder.verdict(context, verdict)
        elif failure.supported:
            verdict = Verdict(Status.ERROR, failure.cause, type(error).__name__, failure.message)
            self._recorder.verdict(context, verdict, captured=self._recorder.keep_inputs(plan, verdict, pristine))
        else:
            self._unsupported(call, error, -1.0, pristine)

    def run_reference(self, call: Call, pristine: Arguments, *, answered: bool = False) -> CallRun | None:
        """Run a call on the reference; None where it raised, which is recorded.

        Args:
            call: The call, with its context.
            pristine: Its inputs as before it, on the CPU.
            answered: The target ran it.
        """
        plan = call.plan
        try:
            # The CPU lacks a vendor's operators: it computes their defined results by plain ones.
            return self._ref.run_mirrored(for_reference(plan), *pristine, self._config.max_bytes)
        except Exception as error:
            verdict = (
                with_isolated_warnings(refused, (), (plan, *pristine, error)) if answered else reference_raised(error)
            )
            captured = self._recorder.keep_inputs(plan, verdict, pristine)
            self._recorder.verdict(call.context, verdict, captured=captured)
            return None

    def _unsupported(self, call: Call, error: Exception, ref_us: float, pristine: Arguments) -> None:
        plan, failure = call.plan, classify(error)
        # The message may name the out variant that a functional operator calls: that one has to be written.
        kernel = failure.missing_kernel or plan.name
        what = "dtype" if failure.cause is Cause.MISSING_DTYPE else "kernel"
        verdict = Verdict(Status.UNSUPPORTED, failure.cause, f"no {what} for this operator", failure.message)
        captured = self._recorder.keep_inputs(plan, verdict, pristine)
        self._recorder.verdict(call.context, verdict, missing_kernel=kernel, times=(ref_us, -1.0), captured=captured)

    def _run_quietly(self, plan: OpPlan, pristine: Arguments) -> CallRun | None:
        """Run a call on the reference from a random stream of shadowrun's; None where it raises."""
        saved = torch.get_rng_state()
        # The program on the target never draws from the CPU's stream in this call.
        torch.set_rng_state(self._rng.get_state())
        try:
            return self._ref.run_mirrored(plan, *pristine, self._config.max_bytes)
        except Exception:
            return None
        finally:
            self._rng.set_state(torch.get_rng_state())
            torch.set_rng_state(saved)

    def _answer_view(self, call: Call, error: Exception) -> CallRun | None:
        """A view must alias its input: the form that it should have is laid over the input's own memory."""
        plan, args, kwargs, context, failure = call.plan, call.args, call.kwargs, call.context, classify(error)
        try:
            # The meta kernel belongs to no platform: what it refuses too is invalid.
            wanted = view_on_meta(plan, args, kwargs)
        except Exception:
            self._recorder.skip(plan.name, "", "invalid call: both platforms raise")
            return None
        if failure.supported:
            verdict = Verdict(Status.ERROR, Cause.IMPLEMENTATION, type(error).__name__, failure.message)
            self._recorder.verdict(context, verdict, captured=self._recorder.keep_inputs(plan, verdict, (args, kwargs)))
            return None
        verdict = Verdict(Status.UNSUPPORTED, Cause.MISSING_OPERATOR, "no kernel for this operator", failure.message)
        captured = self._recorder.keep_inputs(plan, verdict, (args, kwargs))
        self._recorder.verdict(context, verdict, missing_kernel=failure.missing_kernel or plan.name, captured=captured)
        # An in-place view changes its argument's form, which a new view cannot do for it.
        if self._config.on_unsupported == "raise" or plan.mutated:
            return None
        base = args[0]

        def lay(w: torch.Tensor) -> torch.Tensor:
            # Over the input's own memory, so that writes through the view reach the base.
            view: torch.Tensor = base.as_strided(w.shape, w.stride(), w.storage_offset())
            return view

        out = [lay(w) for w in wanted] if isinstance(wanted, (list, tuple)) else lay(wanted)
        return CallRun(args, kwargs, out, 0)


def _limit_reached(error: Exception) -> Verdict:
    """The verdict on a call that ended at a limit of this process or machine."""
    return Verdict(Status.UNVERIFIED, None, limit_of_host(error), str(error)[:300])


def return_to_program(call: Call, ran: CallRun) -> Any:
    """Return the results of a run elsewhere as the program's device would: fresh ones moved, mutated ones written.

    Args:
        call: The program's own call.
        ran: The run elsewhere.
    """
    plan = call.plan
    for a in plan.mutated:
        written, computed = argument(a, call.args, call.kwargs), argument(a, ran.args, ran.kwargs)
        pairs = zip(written, computed, strict=True) if isinstance(written, (list, tuple)) else ((written, computed),)
        for to, by in pairs:
            # A list of optional tensors may have None in it.
            if to is not None:
                if to.shape != by.shape:
                    to.resize_(by.shape)
                to.copy_(by)
    returns = schema_of(plan.func).returns
    if not returns:
        return None
    results = (ran.out,) if len(returns) == 1 else ran.out
    handed = []
    for declared, value in zip(returns, results, strict=True):
        # The program expects its own argument back, not a copy of it.
        if declared.alias_info is not None and declared.alias_info.is_write:
            handed.append(_aliased(call, declared.alias_info.before_set))
        else:
            handed.append(_moved(value, call.role.device))
    return handed[0] if len(returns) == 1 else tuple(handed)


def _aliased(call: Call, alias_set: set[str]) -> Any:
    schema = schema_of(call.plan.func).arguments
    for a in call.plan.mutated:
        info = schema[a.position].alias_info
        if info is not None and info.before_set & alias_set:
            return argument(a, call.args, call.kwargs)
    raise LookupError(f"{call.plan.name}: no argument for a returned alias")


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        moved = value.to(device)
        # What a worker process returned may lie in memory that it shares, and that cannot grow.
        return moved.clone() if moved is value else moved
    if isinstance(value, (list, tuple)):
        return [_moved(v, device) for v in value]
    return value
