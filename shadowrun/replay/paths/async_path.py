"""Calls on an asynchronous device: compared later, without a host sync.

The calling thread enqueues the copies that the comparison needs in the device's stream (inputs before the call, results
after it) and continues; another thread runs the reference when the copies have arrived. What needs an answer at once is
done at once, as on any other device: operators that the target lacks, tensors without plain memory, and the first call
of an operator, which runs again so that a warning of its C++ code is detected.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shadowrun.intercept.plan import Action
from shadowrun.intercept.torchapi import with_isolated_warnings
from shadowrun.operators.cpu_only_ops import EQUIVALENTS
from shadowrun.operators.vendor_ops import for_reference
from shadowrun.platforms.streams import async_copies
from shadowrun.replay.call import IN_GRAPH, CallRun, argument
from shadowrun.replay.comparator import Comparator
from shadowrun.replay.context import BUDGET, ReplayContext
from shadowrun.replay.copies import (
    OverBudget,
    copy_mutated,
    kept_on_cpu,
    mirror,
    move,
    plan_with_cpu_tensors,
    tensors_in,
    written_to,
)
from shadowrun.replay.executor import Executor, result_on_other_device
from shadowrun.replay.input_copies import may_run_again
from shadowrun.replay.paths.pipeline import ThreadLocalState
from shadowrun.replay.paths.platform_runs import PlatformRuns, refused
from shadowrun.replay.paths.snapshots import Copies, NotCopyable, Snapshots, StaleCopy
from shadowrun.torch_private import is_zero_tensor
from shadowrun.types import Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.config import Config
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.platforms.device import Platform
    from shadowrun.platforms.streams import AsyncCopies
    from shadowrun.replay.call import Call
    from shadowrun.replay.context import RecordSink
    from shadowrun.replay.copies import Arguments
    from shadowrun.replay.paths.cross_device import CrossDevicePath
    from shadowrun.replay.paths.pipeline import Pipeline
    from shadowrun.replay.timeline import Moment

__all__ = ["AsyncPath", "choose_async"]

_CPU = torch.device("cpu")
# A replay of `.item()` on the target would force a host sync; AdamW reads two numbers for each parameter.
_READ_NUMBER = "aten::_local_scalar_dense"
_NOT_READ = "reads a number on the CPU: on the target that would force a host sync"
# The shape or value of these results depends on data: the target could not return without a host sync.
_SYNCING_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_UNSEEN_WRITE = Verdict(
    Status.UNVERIFIED, None, "memory was written to by code that the dispatcher does not see", confidence=1.0
)
_OTHER_SETTINGS = Verdict(Status.UNVERIFIED, None, "the program changed torch's settings while the call waited")

_T = TypeVar("_T")


@dataclass(slots=True)
class _FetchedCallRun(CallRun):
    """A run on the target whose results a calling thread has copied to the host."""

    host_values: Any = None


class _TargetFromWorker:
    """The target as the comparing thread uses it: a calling thread does what it asks for.

    The target has state that belongs to the calling threads: their streams, and the fallback detector on their calls.
    """

    def __init__(self, target: Executor, pipeline: Pipeline) -> None:
        self._target = target
        self._pipeline = pipeline
        self.platform: Platform = target.platform
        self.device = target.device
        self.to_device = target.to_device

    def run(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRun:
        """Run a call on tensors that lie on the target."""
        # The results are fetched by the same calling thread: a copy in another stream could be early.
        return self._pipeline.run_on_calling_thread(lambda: self._fetched(plan, self._target.run(plan, args, kwargs)))

    def run_mirrored(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], max_bytes: int) -> CallRun:
        """Run a call on copies of its inputs."""
        return self._pipeline.run_on_calling_thread(
            lambda: self._fetched(plan, self._target.run_mirrored(plan, args, kwargs, max_bytes))
        )

    def on_own_thread(self, question: Callable[[Executor], _T]) -> _T:
        """Have a calling thread answer a question that runs calls on the target."""
        return self._pipeline.run_on_calling_thread(lambda: question(self._target))

    def values(self, plan: OpPlan, ran: CallRun) -> list[Any]:
        """Results of a run, on the CPU."""
        return list(ran.host_values) if isinstance(ran, _FetchedCallRun) else self._target.values(plan, ran)

    def _fetched(self, plan: OpPlan, ran: CallRun) -> CallRun:
        values = self._target.values(plan, ran)
        return _FetchedCallRun(ran.args, ran.kwargs, ran.out, ran.ns, ran.fallback, ran.began, values)


@dataclass(slots=True)
class _PendingComparison:
    """A call that waits to be compared. It holds copies, and none of the program's tensors."""

    path: AsyncPath
    call: Call
    random: bool
    copies: Copies
    pristine: Arguments
    actual: CallRun
    thread_state: ThreadLocalState
    expected: CallRun | None = None
    moment: Moment | None = None

    def run(self) -> None:
        timeline = self.path.timeline
        if timeline is None or self.moment is None:
            self.path.compare(self)
            return
        with timeline.noted_for(self.moment):
            self.path.compare(self)
        timeline.finish(self.moment)

    # Each call ends in one status: an interrupt records those that it drops.
    def drop(self, reason: str) -> None:
        self.path.recorder.verdict(self.call.context, Verdict(Status.UNVERIFIED, None, reason))


class AsyncPath:
    """Observes the program's calls on an asynchronous target.

    Args:
        context: What the calling threads work with.
        cross_device: Observes the calls that cannot wait.
        recorder: Where the comparing thread records.
        pipeline: Runs the comparisons on another thread.
        transfers: Copies from the target.

    Attributes:
        comparator: Compares on that thread.
        recorder: As given.
        timeline: As of the context.
    """

    def __init__(
        self,
        context: ReplayContext,
        cross_device: CrossDevicePath,
        recorder: RecordSink,
        pipeline: Pipeline,
        transfers: AsyncCopies,
    ) -> None:
        self._context = context
        self._cross_device = cross_device
        self._target = context.target
        self._ref = context.ref
        self._max_bytes = context.config.max_bytes
        self._pipeline = pipeline
        self._transfers = transfers
        from_worker = _TargetFromWorker(context.target, pipeline)
        self.comparator = Comparator(context.config, from_worker, context.ref, recorder)
        # The shared detector is the only one that is started: another would see no fallback.
        from_host = Executor(self._target.platform, self._target.fallback_detector, self._copy_from_host)
        self._from_host = PlatformRuns(context.config, from_host, context.ref, context.recorder)
        self._snapshots = Snapshots(transfers, self._max_bytes, pipeline.wait_for_oldest)
        # Numbers are skipped only once the program has used the target: a pure CPU program has nothing to sync.
        self._target_in_use = False
        self.timeline = context.timeline
        self.recorder = recorder

    def forget(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Use no more copies of a call's tensors: it is not compared, and may write to any of them."""
        for t in tensors_in((*args, *kwargs.values())):
            self._snapshots.forget(t)

    def stop(self) -> None:
        """Free all copies."""
        self._snapshots.forget_all()

    # -- the calling thread --------------------------------------------------------------------------

    def observe(self, call: Call) -> CallRun:
        """Run a call for the program, and have it compared."""
        if not call.role.on_target:
            return self._observe_on_cpu(call)
        self._target_in_use = True
        # A captured call does not run now, so there are no values to copy; an event query would fail the capture.
        if self._transfers.is_capturing():
            self.recorder.skip(call.plan.name, call.role.device_name, IN_GRAPH)
            return self._target.run_user(call.plan, call.args, call.kwargs)
        if call.reason or not self._context.may_replay(call.plan):
            # The call is not copied, yet it may write: a kept copy of what it writes to would be a false mismatch.
            if call.plan.mutated or call.plan.custom:
                self.forget(call.args, call.kwargs)
            return self._cross_device.observe(call)
        # Kernels read some arguments through host pointers; a replay with a device copy in their place ended the
        # process.
        plan = call.plan = plan_with_cpu_tensors(call.plan, call.args, call.kwargs)
        copies = Copies()
        try:
            inputs = (copies, call.args, call.kwargs, written_to(plan, call.args, call.kwargs))
            # The copies are enqueued before the launch: the stream's order makes them the values before the call.
            pristine: Arguments | None = with_isolated_warnings(self._snapshots.arguments, (), inputs)
        except Exception:  # no plain memory, or too much of it: the other path records why
            pristine = None
        finally:
            self._snapshots.mark_ordered(copies)
        if pristine is None:
            return self._cross_device.observe(call)
        try:
            own = self._target.run_user(plan, call.args, call.kwargs)
        except Exception as error:
            copies.wait()
            # A second run of a random call would draw from a stream that the first run has moved.
            if plan.action is Action.RANDOM or not may_run_again(error, call, pristine):
                answer = self._cross_device.runs.answer(call, pristine, error)
                if answer is None:
                    raise
                return answer
            pristine = None
        if pristine is None:  # the copies of pending calls take the memory that this call needs
            del copies, inputs
            # Draining frees page-locked and device memory of all pending calls, not only of this one.
            self._pipeline.drain()
            self._snapshots.forget_all()
            return self._cross_device.observe(call)
        # C++ warnings of the program's own call come after it returns, so the first call of each kind runs again.
        if self._target.needs_warning_probe(plan, call.args):
            with contextlib.suppress(StaleCopy):
                copies.wait()
                probe = (plan, own, pristine, self._max_bytes)
                with_isolated_warnings(self._target.probe_warnings, (), probe)
        self._submit(call, own, copies, pristine)
        return own

    def _observe_on_cpu(self, call: Call) -> CallRun:
        """Observe a call on the reference, which the target repeats in its stream without a host sync."""
        # A program on a GPU reads many numbers from the CPU (AdamW its steps, twice for each parameter): to read them
        # from the GPU as well would sync each time.
        plan, role = call.plan, call.role
        why_not = IN_GRAPH if self._transfers.is_capturing() else ""
        if plan.name == _READ_NUMBER and self._target_in_use and role.on_ref and not call.reason:
            why_not = _NOT_READ
        if why_not:
            self.recorder.skip(plan.name, role.device_name, why_not)
            return self._ref.run_user(plan, call.args, call.kwargs)
        # Random and custom operators, and those with an equivalent, need the checks of the cross-device path.
        simple = plan.action is Action.REPLAY and not plan.custom and plan.name not in EQUIVALENTS
        if call.reason or not role.on_ref or not simple or not _SYNCING_TAGS.isdisjoint(plan.func.tags):
            return self._cross_device.observe(call)
        copies = Copies()
        try:
            written = written_to(plan, call.args, call.kwargs)
            given = (call.args, call.kwargs, _CPU, self._max_bytes, move, written)
            pristine = with_isolated_warnings(mirror, (), given)
        except Exception:  # the other path records why
            return self._cross_device.observe(call)
        # The program's own call comes first and runs once: what follows can only lose the comparison.
        own = self._ref.run_user(plan, call.args, call.kwargs)
        try:
            self._context.recorder.context(call)
            expected = with_isolated_warnings(self._copy_results, (), (plan, own, copies, pristine))
            ran = self._from_host.run_target(call, pristine)
            if ran is not None:
                try:
                    actual = with_isolated_warnings(self._copy_results, (), (plan, ran, copies, pristine))
                finally:
                    self._snapshots.mark_ordered(copies)
                # `_copy_results` makes a new `CallRun` without the evidence, which the detector found on this thread.
                actual.fallback = ran.fallback
                self._pipeline.submit(self._pending(call, copies, pristine, actual, expected))
        except OverBudget:
            self._context.recorder.verdict(call.context, BUDGET)
        except Exception as error:
            self._context.failed("replaying", call, error, own.out)
        return own

    def _submit(self, call: Call, own: CallRun, copies: Copies, pristine: Arguments) -> None:
        """Enqueue the copies of the results, and hand the call over."""
        plan, device = call.plan, call.role.device
        try:
            # The context needs the arguments' shapes and the Python stack: both exist only while the call is under way.
            self._context.recorder.context(call)
            fallback = own.fallback or result_on_other_device(plan, own.out, device)
            try:
                if own.out is not None and _lies_on_cpu(own.out):
                    # The program's own copy to the host, of which no event says when it has arrived.
                    self._target.platform.synchronize()
                actual = with_isolated_warnings(self._copy_results, (), (plan, own, copies, pristine))
            finally:
                self._snapshots.mark_ordered(copies)
            actual.fallback = fallback
            self._pipeline.submit(self._pending(call, copies, pristine, actual))
        except OverBudget:
            self._context.recorder.verdict(call.context, BUDGET)
        except NotCopyable:  # a result without plain memory: compared now
            with contextlib.suppress(StaleCopy):
                copies.wait()
                self._cross_device.compare_and_record(call, own, pristine)
        except Exception as error:
            self._context.failed("copying the results of", call, error, own.out)

    def _pending(
        self, call: Call, copies: Copies, pristine: Arguments, actual: CallRun, expected: CallRun | None = None
    ) -> _PendingComparison:
        thread_state, random, timeline = ThreadLocalState.current(), call.is_random, self._context.timeline
        moment = None if timeline is None else timeline.hand_over()
        bare = call.without_arguments()
        return _PendingComparison(self, bare, random, copies, pristine, actual, thread_state, expected, moment)

    def _copy_results(self, plan: OpPlan, own: CallRun, copies: Copies, pristine: Arguments) -> CallRun:
        """The run, with copies in place of what it returned and wrote to."""
        snapshots, copies.ran = self._snapshots, True
        # Unwritten arguments are those copied before the call: a second copy of them would cost a transfer.
        args, kwargs = list(pristine[0]), dict(pristine[1])
        for a in plan.mutated:
            # A kept copy of its storage has the values from before the call.
            after = snapshots.copy_again(copies, argument(a, own.args, own.kwargs))
            if a.kwarg_only or a.position >= len(args):
                kwargs[a.name] = after
            else:
                args[a.position] = after
        out: Any = None
        if plan.n_returns == 1:
            out = snapshots.copy_again(copies, own.out) if plan.fresh else None
        elif plan.n_returns:
            # Uninitialised results are never compared, so copying them would only take memory.
            wanted = {i for i in plan.fresh if i not in plan.uninitialised}
            out = tuple([snapshots.copy_again(copies, v) if i in wanted else None for i, v in enumerate(own.out)])
        return CallRun(tuple(args), kwargs, out, own.ns, None, own.began)

    def _copy_from_host(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, max_bytes: int
    ) -> Arguments:
        """Copy the inputs of a call on the CPU to the target, without a host sync."""
        kept, written = kept_on_cpu(plan, args, kwargs), written_to(plan, args, kwargs)
        return mirror(args, kwargs, device, max_bytes, self._copy_tensor_from_host, written=written, kept=kept)

    def _copy_tensor_from_host(self, t: torch.Tensor, device: torch.device) -> torch.Tensor:
        dense = t.layout is torch.strided and t.is_contiguous() and not t.is_conj() and not t.is_neg()
        # A page-locked buffer holds plain elements only; other layouts take the blocking copy.
        if not dense or t.is_quantized or is_zero_tensor(t) or device.type == "cpu":
            return move(t, device)
        host = self._transfers.host(t.numel(), t.dtype)  # torch reuses this memory only when the copy is over
        host.copy_(t.reshape(-1))
        return host.to(device, non_blocking=True).view(t.shape)

    # -- the comparing thread ------------------------------------------------------------------------

    def compare(self, pending: _PendingComparison) -> None:
        """Run the reference, compare and record."""
        call, thread_state, comparator = pending.call, pending.thread_state, self.comparator
        try:
            # The event is waited for on this thread, so that the program never waits for it.
            pending.copies.wait()
            # Default dtype and deterministic mode belong to the process and cannot be set for this thread alone.
            if not thread_state.still_holds():
                self.recorder.verdict(call.context, _OTHER_SETTINGS)
                return
            with thread_state.entered():
                if pending.random:
                    # The host's generator cannot continue the device's stream, so only the distribution of the draws is
                    # checked.
                    drawn = (call, pending.pristine, pending.actual)
                    with_isolated_warnings(comparator.compare_and_record_random, (), drawn)
                    return
                expected = pending.expected or self._run_reference(pending)
                if expected is None:
                    return
                # The program may have changed them while the reference ran: its result is then of neither setting.
                if not thread_state.still_holds():
                    self.recorder.verdict(call.context, _OTHER_SETTINGS)
                    return
                runs = (call, pending.pristine, pending.actual, expected)
                with_isolated_warnings(comparator.compare_and_record, (), runs, {"shared": False})
        except StaleCopy:
            # One unseen writer (Triton, an extension) means more will come: from here on each call gets new copies.
            self._snapshots.shares = False
            self.recorder.verdict(call.context, _UNSEEN_WRITE)
        except Exception as error:
            tensors = (*pending.pristine[0], *pending.pristine[1].values(), pending.actual.out)
            verdict = self._context.internal_error("comparing", call.plan, error, tensors)
            self.recorder.verdict(call.context, verdict)

    def _run_reference(self, pending: _PendingComparison) -> CallRun | None:
        """Run the reference on the copies, except for what it writes to: the copies serve other calls too."""
        call, plan, (args, kwargs) = pending.call, pending.call.plan, pending.pristine
        try:
            if plan.mutated:
                args, kwargs = copy_mutated(plan, args, kwargs, self._max_bytes)
            return self._ref.run(for_reference(plan), args, kwargs)
        except Exception as error:
            verdict = refused(plan, *pending.pristine, error)
            captured = self.recorder.keep_inputs(plan, verdict, pending.pristine)
            self.recorder.verdict(call.context, verdict, captured=captured)
            return None


def _lies_on_cpu(out: Any) -> bool:
    return any(t.device.type == "cpu" for t in tensors_in((out,)))


def choose_async(config: Config, target: Platform, ref: Platform) -> AsyncCopies | str:
    """Copies by which calls can be compared later, on another thread; or the reason why they cannot.

    The accumulated error and the overhead budget need each result, or its cost, at once. A reference with settings of
    this process would have the program run under them.
    """
    # Each call of a chain takes the results of the call before it.
    if config.drift:
        return "drift=True needs each result at once"
    if config.stop_on:
        return "stop_on= raises at the call itself"
    if config.budget is not None:
        return "budget= needs to know at once what a call took"
    if ref.device.type != "cpu" or not (ref.has_program_settings or ref.remote is not None):
        return f"the reference {ref} cannot run while the program runs: its settings belong to the process"
    return async_copies(target) or f"calls on {target} have ended when they return"
