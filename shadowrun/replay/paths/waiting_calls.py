"""Calls of a program on the CPU that another process repeats while the program goes on.

The inputs of a call are copied to memory that both processes share before the program's own run, and its results after
it. The other process compares them there. This one records the call when it finds the answer, at one of the next calls:
a match needs no more, and from anything else the call is put together again and judged as on any other path.

Calls are recorded in their order: what is recorded in the meantime waits behind them (`pipeline.OrderedSink`).
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.plan import Action
from shadowrun.intercept.torchapi import as_in_handler, with_isolated_warnings
from shadowrun.operators.cpu_only_ops import EQUIVALENTS
from shadowrun.operators.vendor_ops import COUNTERPARTS
from shadowrun.platforms import torchplatform
from shadowrun.platforms.worker.ring import DIFFERENT, EQUAL
from shadowrun.platforms.worker.ring_calls import RingCall, Room
from shadowrun.replay.call import CallRun
from shadowrun.replay.copies import mirror, tensors_in, written_to
from shadowrun.replay.paths.pipeline import Job, ThreadLocalState
from shadowrun.types import Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadowrun.config import Config
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.platforms.device import Platform
    from shadowrun.replay.call import Call
    from shadowrun.replay.copies import Arguments
    from shadowrun.replay.paths.cross_device import CrossDevicePath, RngStates

__all__ = ["WaitingCalls", "can_wait"]

_CPU = torch.device("cpu")
_REPLAY, _RANDOM = Action.REPLAY, Action.RANDOM


@dataclass(slots=True)
class _Waiting:
    """A call that waits for its answer. It holds none of the program's tensors."""

    calls: WaitingCalls
    call: Call
    ring_call: RingCall
    own_ns: int
    began: RngStates | None
    thread_state: ThreadLocalState

    def run(self) -> None:
        self.calls.conclude(self)

    def drop(self, reason: str) -> None:
        self.calls.record(self.call, Verdict(Status.UNVERIFIED, None, reason))


class WaitingCalls:
    """The calls of a comparison that wait, the oldest first, and the records behind them.

    Args:
        path: What runs and compares calls that cannot wait.
    """

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._recording = False
        # Numbers of the plans whose results were lists: their inputs would be copied to the ring for nothing.
        self._of_lists: set[int] = set()
        _all.add(self)

    def connect(self, path: CrossDevicePath) -> None:
        """Set the path that runs and compares calls which cannot wait."""
        self._path = path
        self._context = context = path.context
        self._target, self._ref = context.target, context.ref
        self._max_bytes = context.config.max_bytes
        remote = context.target.platform.remote
        assert remote is not None
        self._worker = remote

    @property
    def idle(self) -> bool:
        """Whether a record needs not wait: nothing does, or it is that of the oldest call."""
        return self._recording or not self._jobs

    def submit(self, job: Job) -> None:
        """Have a record wait for the calls before it."""
        self._jobs.append(job)

    # -- the program's call --------------------------------------------------------------------------

    def observe(self, call: Call) -> CallRun | None:
        """Run a call for the program, and have it compared later; None where it cannot wait, and did not run."""
        self._collect()
        plan = call.plan
        action = plan.action
        if call.reason or plan.custom or not call.role.on_ref or call.role.device != _CPU:
            return None
        if action is not _REPLAY and (action is not _RANDOM or call.kwargs.get("generator") is not None):
            return None
        if plan.name in EQUIVALENTS or plan.name in COUNTERPARTS or plan.index in self._of_lists:
            return None
        began = self._path.rng_states(call) if action is _RANDOM else None
        opened = with_isolated_warnings(self._open, (), (call, None if began is None else began.cpu))
        if opened is None:
            return None
        try:
            own = self._ref.run_user(plan, call.args, call.kwargs)
        except BaseException:
            self._worker.abandon_call(opened)
            raise
        try:
            self._context.recorder.context(call)
            with_isolated_warnings(self._close, (), (call, own, opened, began))
        except Exception as error:
            self._worker.abandon_call(opened)
            self._context.failed("replaying", call, error, own.out)
        return own

    def _open(self, call: Call, rng: torch.Tensor | None) -> RingCall | None:
        plan, args, kwargs = call.plan, call.args, call.kwargs
        written = [(a.name, -1 if a.kwarg_only or a.position >= len(args) else a.position) for a in plan.mutated]
        wanted = plan.fresh if plan.n_returns == 1 else tuple(i for i in plan.fresh if i not in plan.uninitialised)
        while True:
            opened = self._worker.open_call(plan.name, args, kwargs, (plan.n_returns, wanted), written, rng)
            if not isinstance(opened, Room):
                return opened
            if not self._make_room():
                return None

    def _close(self, call: Call, own: CallRun, opened: RingCall, began: RngStates | None) -> None:
        values = own.values(call.plan)
        if _has_list(own, call.plan, opened):
            self._of_lists.add(call.plan.index)
        # A gradient that is not wanted is no value.
        closed: Room | bool = call.plan.index not in self._of_lists and len(values) == len(opened.returns[1]) + len(
            opened.written
        )
        while closed and isinstance(closed := self._worker.close_call(opened, values), Room):
            if not self._make_room():
                closed = False
                break
        if closed:
            # Autograd clones a gradient that has another reference: a waiting call must not be one.
            self._jobs.append(
                _Waiting(self, call.without_arguments(), opened, own.ns, began, ThreadLocalState.current())
            )
            return
        try:
            self._path.compare(call, own, self._inputs(opened, call.plan), began)
        finally:
            self._worker.abandon_call(opened)

    # -- the answer ----------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Record what was answered."""
        jobs, worker = self._jobs, self._worker
        while jobs:
            first = jobs[0]
            if isinstance(first, _Waiting) and not worker.is_answered(first.ring_call):
                return
            self._run_first()

    def _make_room(self) -> bool:
        """Wait for the older half of the calls; False where none waits."""
        if not self._jobs:
            return False
        for _ in range((len(self._jobs) + 1) // 2):
            self._run_first()
        return True

    def _run_first(self) -> None:
        job = self._jobs[0]
        if isinstance(job, _Waiting):
            # An interrupt here leaves the call where it is.
            try:
                self._worker.await_call(job.ring_call)
            except Exception as error:
                job.ring_call.error = error
        self._jobs.popleft()
        self._recording = True
        try:
            job.run()
        finally:
            self._recording = False

    def drain(self) -> None:
        """Record all calls that wait. An interrupt drops them, with a record of each, and is raised again."""
        if not self._jobs:
            return
        try:
            # Where the program calls `step`, its modes are in place.
            with as_in_handler():
                while self._jobs:
                    with_isolated_warnings(self._run_first, (), ())
        except BaseException as error:
            reason = f"{type(error).__name__} while the call waited to be compared"
            jobs, self._jobs = self._jobs, deque()
            self._recording = True
            for job in jobs:
                with contextlib.suppress(Exception):
                    job.drop(reason)
            self._recording = False
            self._worker.forget_calls()
            raise

    def forget(self) -> None:
        """In a forked child: what waits is its parent's."""
        self._jobs.clear()

    def conclude(self, waiting: _Waiting) -> None:
        """Record a call that was answered."""
        call, ring_call, own_ns = waiting.call, waiting.ring_call, waiting.own_ns
        context, comparator = self._context, self._context.comparator
        try:
            slow = comparator.slow_calls.is_slow(ring_call.ns, own_ns)
            if ring_call.state == EQUAL and not slow and call.plan.index not in comparator.suspects:
                context.recorder.match(call.context, own_ns / 1000, ring_call.ns / 1000)
                return
            with self._as_it_was(waiting):
                with_isolated_warnings(self._judge, (), (waiting,))
        except Exception as error:
            context.failed("comparing", call, error)
        finally:
            self._worker.release_call(ring_call)

    def record(self, call: Call, verdict: Verdict) -> None:
        """Record a call that is not compared."""
        self._context.recorder.verdict(call.context, verdict)

    def _judge(self, waiting: _Waiting) -> None:
        call, ring_call, plan = waiting.call, waiting.ring_call, waiting.call.plan
        comparator = self._context.comparator
        times = waiting.own_ns / 1000, ring_call.ns / 1000
        own_values = ring_call.own()
        answered = ring_call.error is None and ring_call.state in (EQUAL, DIFFERENT)
        their_values = ring_call.theirs() if answered else []
        # Most results that differ are within what was found for their context: they need no inputs.
        random = plan.action is _RANDOM
        simple = answered and not random and not comparator.slow_calls.is_slow(ring_call.ns, waiting.own_ns)
        if simple and comparator.record_if_close(call.context, their_values, own_values, times):
            return
        pristine = self._inputs(ring_call, plan)
        own = _run_of(plan, ring_call, pristine, own_values, waiting.own_ns)
        if ring_call.error is not None:
            self._path.runs.target_raised(call, pristine, ring_call.error)
        elif answered and not random:
            actual = _run_of(plan, ring_call, pristine, their_values, ring_call.ns)
            comparator.compare_and_record(call, pristine, actual, own, shared=False)
        else:
            self._path.compare(call, own, pristine, waiting.began)

    def _inputs(self, ring_call: RingCall, plan: OpPlan) -> Arguments:
        args, kwargs = ring_call.inputs()
        # Nothing writes to inputs as before the call. Offsets are the program's affair: they are those of the ring.
        if not any(t.storage_offset() for t in tensors_in((*args, *kwargs.values()))):
            return args, kwargs
        return mirror(args, kwargs, _CPU, self._max_bytes, written=written_to(plan, args, kwargs))

    @contextlib.contextmanager
    def _as_it_was(self, waiting: _Waiting) -> Iterator[None]:
        """Modes and settings of the program's call."""
        now = torchplatform.kernel_settings()
        then = waiting.ring_call.kernel_settings[:-1]
        try:
            if now != then:
                torchplatform.set_kernel_settings(then)
            with waiting.thread_state.entered():
                yield
        finally:
            if now != then:
                torchplatform.set_kernel_settings(now)


def _has_list(own: CallRun, plan: OpPlan, opened: RingCall) -> bool:
    """Whether a result is a list (`_foreach_sqrt`), whose tensors would be taken for several results."""
    fresh = (own.out,) if plan.n_returns == 1 else own.out
    return any(isinstance(fresh[i], (list, tuple)) for i in opened.returns[1])


def _run_of(plan: OpPlan, ring_call: RingCall, pristine: Arguments, values: list[Any], ns: int) -> CallRun:
    """A run of a call, from its results."""
    args, kwargs = list(pristine[0]), dict(pristine[1])
    n_returns, wanted = ring_call.returns
    fresh: list[Any] = [None] * n_returns
    for i, value in zip(wanted, values, strict=False):
        fresh[i] = value
    for (name, position), value in zip(ring_call.written, values[len(wanted) :], strict=True):
        if position >= 0:
            args[position] = value
        elif name in kwargs:
            kwargs[name] = value
    out = fresh[0] if plan.n_returns == 1 else tuple(fresh)
    return CallRun(tuple(args), kwargs, out, ns)


def can_wait(config: Config, target: Platform, ref: Platform) -> bool:
    """Whether calls can wait: each result, its cost or its time is not needed at once."""
    if target.remote is None or ref.remote is not None or not ref.has_program_settings or ref.device != _CPU:
        return False
    return not (config.drift or config.stop_on or config.timeline or config.asynchronous is False) and (
        config.budget is None
    )


# Weak: a comparison that is forgotten is freed at once and not at the end of the process.
_all: weakref.WeakSet[WaitingCalls] = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    """A program that never stopped its comparison has its last records written."""
    for calls in list(_all):
        with contextlib.suppress(Exception):
            calls.drain()
