"""The observer of a recording: the program's call runs once, then its tensors are digested and written as rows.

Inputs are looked up before the call, since it may write to them; results are digested after it. Between the two no lock
is held: a collective or a custom operator may wait for another thread.
"""

from __future__ import annotations

import sqlite3
import threading
import warnings
from collections import Counter
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.errors import ShadowrunError, ShadowrunWarning
from shadowrun.intercept.plan import Action, OpPlan
from shadowrun.intercept.torch_compiler import GeneratedCode
from shadowrun.intercept.user_call import own_call
from shadowrun.recording.call_results import (
    CPU,
    CallInputs,
    CallResults,
    NewLeaf,
    NotedCall,
    flat,
    has_memory,
    tensors_with_memory,
)
from shadowrun.recording.data_flow import DataFlow, Leaf
from shadowrun.recording.digests.pending_digests import PendingDigests, is_capturing, probe_again
from shadowrun.recording.file_format.block_buffer import placement
from shadowrun.recording.model import NONE, Kind
from shadowrun.recording.native_calls import NativeCalls, State, make_native_calls
from shadowrun.recording.undeclared_writes import UndeclaredWrites
from shadowrun.torch_private import is_distributed, local_part

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shadowrun.intercept.attribution import Attribution, Origin
    from shadowrun.recording.captured_inputs import CapturedInputs
    from shadowrun.recording.file_format.block_buffer import BlockBuffer
    from shadowrun.recording.kernel_tracer import KernelTracer
    from shadowrun.recording.provenance import Provenance
    from shadowrun.recording.step_outputs import StepOutputs
    from shadowrun.schedule.selection import Selection

__all__ = ["CallRecorder"]

_FRAMES: Final = 3  # of shadowrun, above `_before`: the search for the program's line skips them
_MAX_ROWS: Final = 0xFFFF
_RAISED: Final = "raised"
_NESTED: Final = "called while another call was being recorded"
_IN_GRAPH: Final = "captured into a graph"


class CallRecorder:
    """Records each call of the program that is selected.

    Args:
        attribution: Finds where a call comes from.
        selection: What the program wants recorded.
        provenance: Gets the leaves.
        n_rows: See `rows=` of `shadowrun.record`.
        first_call_on: Called before the first call on each device, with its name.
        captured: Keeps inputs of calls, where that is wanted.
        outputs: Keeps the results of each step's last call.
        kernels: See `kernels=` of `shadowrun.record`.

    Attributes:
        plans: Plans by the id of their operator.
        native_handler: Records plain calls on the CPU in C, from `start` to `stop`; None without the C extension.
        skipped: Calls that were not recorded, by reason.
        failure: Why nothing more is recorded; empty while all is well.
    """

    def __init__(
        self,
        attribution: Attribution,
        selection: Selection,
        provenance: Provenance,
        n_rows: int,
        first_call_on: Callable[[torch.device], None],
        captured: CapturedInputs,
        outputs: StepOutputs,
        kernels: KernelTracer | None = None,
    ) -> None:
        self.attribution = attribution
        self._kernels = kernels
        self._selection = selection
        self._provenance = provenance
        self._n_rows = n_rows
        self._captured = captured
        self._outputs = outputs
        self.plans: dict[int, OpPlan] = {}
        self._native: NativeCalls | None = None
        self.native_handler: Any = None
        self._state = State()
        self.skipped: Counter[str] = Counter()
        self.failure = ""
        self._buffer: BlockBuffer | None = None
        self._flow, self._waiting = DataFlow(), PendingDigests()
        self._results = CallResults(self._flow, self._waiting, n_rows)
        self._inputs = CallInputs(
            *(self._flow, provenance, self._results.digest, attribution.modules, first_call_on),
            unseen=lambda: self._state.unseen,
        )
        self._undeclared = UndeclaredWrites(self._waiting)
        self._generated = GeneratedCode(self._enter_generated, self._leave_generated)
        self._n_generated = 0
        self._occurrences: dict[tuple[int, str, str], int] = {}
        self._warned = False
        # A thread may come back while it holds it: the garbage collector runs code of the program inside ours.
        self.lock = threading.RLock()

    def start(self, buffer: BlockBuffer) -> None:
        """Record into a buffer from here on."""
        self._buffer = buffer
        self._captured.writer = buffer.writer
        # What the program did between two blocks was not observed.
        self._flow.clear()
        # A simulated device may have got a flaw since then: it must not digest its own faults.
        probe_again()
        self._n_generated, self._state.unseen = 0, False
        self._generated.start()
        if self._kernels is not None:
            self._kernels.start()
        self._native = self._make_native(buffer)
        self.native_handler = None if self._native is None else self._native.handler
        for plan in self.plans.values():
            self._add_to_native(plan)
        self._state.running = True

    def _make_native(self, buffer: BlockBuffer) -> NativeCalls | None:
        # Kernels are found out by Python, and inputs are kept by Python before a call runs.
        if self._kernels is not None or self._captured.takes_inputs:
            return None
        parts = {
            "state": self._state,
            "acquire": self.lock.acquire,
            "release": self.lock.release,
            "occurrences": self._occurrences,
            "conclude": self._conclude,
            "raised": self._raised,
            "failed": self._dropped,
            "flush": self._flush_and_forget,
            "may_record": lambda: not (self._inputs.has_graphs or is_capturing()),
        }
        return make_native_calls(
            *(buffer, self._flow, self._results, self._undeclared, self.attribution, self._selection, parts),
            n_rows=self._n_rows,
        )

    def _add_to_native(self, plan: OpPlan) -> None:
        if self._native is not None:
            self._native.add_operator(plan, draws_noted=self._provenance.has_draw(CPU))

    def stop(self) -> None:
        """Only run calls from here on."""
        self._keep_outputs()
        self._state.running = False
        self._generated.stop()
        self._native = self.native_handler = None
        if self._buffer is not None:
            self._buffer.native_rows = None
        self._flow.clear()
        if self._kernels is not None:
            self._kernels.stop()

    def forked(self) -> None:
        """In a forked child: the thread that held the lock may not exist."""
        self.lock = threading.RLock()
        if self._native is not None:
            # It has the methods of the lock of before.
            self._native.handler.guard(self.lock.acquire, self.lock.release)
        self._state.running = False
        if self._kernels is not None:
            self._kernels.forked()

    # -- steps ---------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The current training step."""
        return self._state.step

    @step.setter
    def step(self, step: int) -> None:
        self._keep_outputs()
        self._state.step = step
        # They are parts of keys: counted by step, a call more in one step leaves the keys of later steps as they are.
        self._occurrences.clear()
        self._state.has_recorded = False

    def _keep_outputs(self) -> None:
        """The step has ended: keep what its last call made."""
        state, buffer = self._state, self._buffer
        if state.running and state.has_recorded and self._outputs.wanted and buffer is not None:
            with self.lock:
                if not state.busy:
                    self._outputs.end_step(buffer, self._flow)

    @property
    def recorded_in_step(self) -> bool:
        """Whether the current step has calls."""
        return self._state.has_recorded

    @property
    def running(self) -> bool:
        """Whether calls are recorded now."""
        return self._state.running

    def add_step(self, step: int, began_s: float, took_s: float) -> None:
        """A step has ended; its times are no part of a recording."""

    def flush(self) -> None:
        """Write what waits."""
        with self.lock:
            if self._buffer is not None:
                self._buffer.flush()
            if not self.running:
                self._waiting.clear()

    def between_calls(self) -> AbstractContextManager[Any]:
        """Hold the lock: no call is being recorded."""
        return self.lock

    # -- calls ---------------------------------------------------------------------------------------

    def add_operator(self, plan: OpPlan) -> None:
        """An operator has got its plan."""
        self._results.add_operator(plan)
        self._add_to_native(plan)

    def count(self, name: str, reason: str) -> None:
        """Count a call that has no plan."""
        with self.lock:
            self.skipped[f"{name}: {reason}"] += 1

    def run_and_count(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that is never recorded, and count it."""
        if self.running:
            self._skip(plan.reason or "fake or traced tensors", plan, args, kwargs)
        return own_call(plan.run, args, kwargs)

    def observe(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call for the program, and record it."""
        noted = self._before(plan, args, kwargs) if self.running else None
        if noted is None:
            return own_call(plan.run, args, kwargs)
        done, kernels = False, self._kernels
        try:
            if kernels is None:
                out = own_call(plan.run, args, kwargs)
            else:
                out = kernels.run(noted.device, plan.run, args, kwargs)
            done = True
        finally:
            with self.lock:
                self._undeclared.end_call()
                if noted.watched[1]:
                    self._state.watching = False
            if not done:  # what it has written to until then is not known
                noted.first = None
                self._skip(_RAISED, plan, args, kwargs, noted.leaves)
        self._after(noted, plan, args, kwargs, out)
        return out

    def run_distributed(self, call: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call with DTensors; the rows of their local tensors get mesh and placements."""
        buffer = self._buffer
        if not self.running or buffer is None:
            return call()
        buffer.n_holding += 1
        try:
            out = call()
            with self.lock, suppress(Exception):
                for t in flat((*args, *kwargs.values(), out)):
                    if isinstance(t, torch.Tensor) and is_distributed(type(t)):
                        self._place(buffer, t, placement(t))
        finally:
            buffer.n_holding -= 1
        return out

    def _place(self, buffer: BlockBuffer, t: torch.Tensor, text: str) -> None:
        local = local_part(t)
        is_known = self.running and has_memory(local)
        row = self._flow.row_of(local, buffer.form(local)) if is_known else None
        number = row.row if isinstance(row, Leaf) else row
        kind = None if number is None else buffer.place(number, local, text)
        if kind is Kind.LEAF or isinstance(t, torch.nn.Parameter):
            self._provenance.add_placement(t, text, self.attribution.modules())

    def _before(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NotedCall | None:
        """Find the rows of the inputs; None for a call that is not recorded."""
        with self.lock:
            if self._state.busy:  # the garbage collector may run code of the program inside ours
                self.skipped[_NESTED] += 1
                return None
            self._state.busy = True
            try:
                return self._noted(plan, args, kwargs)
            except Exception as error:
                self._flow.clear()  # it may have leaves that no call will record
                self._failed(plan, error)
                return None
            finally:
                self._state.busy = False

    def _noted(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NotedCall | None:
        selection = self._selection
        if not selection.everything and (reason := selection.unwanted(plan)):
            self.attribution.note_origin(_FRAMES + 1)  # its backward may be recorded
            self._skip(reason, plan, args, kwargs)
            return None
        origin = self.attribution.find_origin(_FRAMES + 1)
        if not selection.everything and (reason := selection.reason_to_skip(plan, origin)):
            self._skip(reason, plan, args, kwargs)
            return None
        # Its kernels run when the graph is replayed: there are no values now.
        if self._inputs.is_for_graph(args, kwargs):
            self._skip(_IN_GRAPH, plan, args, kwargs)
            return None
        noted = NotedCall(origin, [])
        if plan.action is Action.RANDOM:
            self._note_draw(plan, args, kwargs)
        outs, inputs, buffer = self._results.returns[plan.index].outs, self._inputs, self._buffer
        assert buffer is not None
        for a in args:
            inputs.note(noted, a, buffer.form)
        for name, a in kwargs.items():
            # What `out=` is given is a result.
            if name not in outs:
                inputs.note(noted, a, buffer.form)
        inputs.note_device(noted, kwargs)
        # Calls that C runs on other threads do not come here.
        alone = self._native is None or not self._native.handler.n_running
        noted.watched = self._undeclared.begin_call(plan, args, kwargs, alone=alone)
        if noted.watched[1]:
            self._state.watching = True
        if self._captured.takes_inputs:
            noted.captured = self._captured.keep_inputs(plan, origin, args, kwargs)
        return noted

    def _note_draw(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # From the second draw on, C records random calls: the state of the generator has been noted.
        if self._inputs.note_draw(plan, args, kwargs):
            for known in self.plans.values():
                if known.action is Action.RANDOM:
                    self._add_to_native(known)

    def _after(self, noted: NotedCall, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record a call that has run."""
        with self.lock:
            buffer = self._buffer
            if self._state.busy or not self.running or buffer is None:
                return
            self._state.busy = True
            done = False
            try:
                buffer.begin_call()
                self._add(buffer, noted, plan, args, kwargs, out)
                done = True
            except Exception as error:
                self._failed(plan, error)
            finally:
                if not done:  # an interrupt too: half a call must not stay in the buffer, nor its rows be referred to
                    buffer.drop_call()
                    self._flow.clear()
                self._state.busy = False

    def _add(
        self,
        buffer: BlockBuffer,
        noted: NotedCall,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> None:
        first_row = buffer.n_results
        for new in noted.leaves:
            new.leaf.row = buffer.add_result(Kind.LEAF, new.position, new.form, new.digest)
        inputs = [row.row if isinstance(row, Leaf) else row for row in noted.inputs]
        base = inputs[0] if inputs else NONE
        self._results.add(buffer, plan, args, kwargs, out, base)
        for written in self._undeclared.writes_of(plan, args, kwargs, noted.watched):
            if self._native is not None:  # Python watches each of its calls
                self._native.handler.remove_operator(plan.func)
            base = self._flow.note_write(written.tensor, buffer.form(written.tensor), buffer.n_results)
            form = buffer.form(written.memory)
            buffer.add_result(Kind.OVERWRITTEN, written.argument, form, written.digest, base)
        n_results = buffer.n_results - first_row
        # The column has 16 bits.
        if n_results > _MAX_ROWS:
            raise OverflowError(f"{n_results} tensors in one call of {plan.name}")
        module, phase, _ = noted.origin
        key = plan.index, module, phase
        occurrence = self._occurrences.get(key, 0)
        self._occurrences[key] = occurrence + 1
        context = buffer.context(plan, noted.origin, noted.device, args, kwargs)
        self._state.has_recorded = True
        kernel = NONE if self._kernels is None else buffer.kernel(self._kernels.name)
        buffer.add_call(self._state.step, context, occurrence, n_results, inputs, kernel)
        if noted.captured is not None:
            self._captured.call_recorded(buffer.n_calls - 1, noted.captured)
        if buffer.flush_may_be_due:
            self._flush_and_forget()

    def _flush_and_forget(self) -> None:
        """After some calls: write what has waited long enough, and forget what was freed."""
        self._flow.purge()
        if self._buffer is not None:
            self._buffer.flush_if_due()

    # -- what the fast path in C leaves to Python -------------------------------------------------------

    def _conclude(
        self,
        origin: Origin,
        inputs: list[int | Leaf],
        device: str,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> None:
        """A call that has run returned something else than plain tensors."""
        noted = NotedCall(origin, inputs)
        noted.device = device
        self._after(noted, plan, args, kwargs, out)

    def _raised(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The program's call raised: what it has written to until then is not known."""
        self._skip(_RAISED, plan, args, kwargs)

    def _dropped(self, plan: OpPlan, error: BaseException) -> None:
        """A call that has run could not be recorded, and its rows were removed."""
        self._flow.clear()
        if self._buffer is not None:
            self._buffer.forget_dropped()
        if isinstance(error, Exception):
            self._failed(plan, error)

    # -- code that calls no operators ------------------------------------------------------------------

    def _enter_generated(self, args: Sequence[Any]) -> None:
        """Generated code is about to run: it may write to its arguments."""
        with self.lock, suppress(Exception):
            self._n_generated += 1
            self._state.unseen = True
            self._flow.begin_unseen()
            self._note_unseen(args)

    def _leave_generated(self, out: Any) -> None:
        """Generated code has run."""
        with self.lock, suppress(Exception):
            # The code may have been running when the recording started.
            self._n_generated = max(0, self._n_generated - 1)
            self._state.unseen = self._n_generated > 0
            self._note_unseen((out,))
            if not self._state.unseen:
                self._flow.end_unseen()

    def _note_unseen(self, values: Sequence[Any]) -> None:
        for t in tensors_with_memory(values):
            self._flow.note_unseen(t)

    # -- what is left out ------------------------------------------------------------------------------

    def _skip(
        self,
        reason: str,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[NewLeaf] = (),
    ) -> None:
        """Count a call that is not recorded, and forget what it may write to."""
        with self.lock, suppress(Exception):
            self.skipped[reason] += 1
            # Others write to nothing. A leaf that no recorded call has must not be referred to later.
            if plan.mutated or plan.custom or plan.action is Action.PASS or leaves:
                for t in tensors_with_memory((*args, *kwargs.values())):
                    self._flow.forget(t)
                    if plan.action is Action.PASS:
                        self._undeclared.leave_out(t)

    def _failed(self, plan: OpPlan, error: Exception) -> None:
        """An internal failure: one warning, and no exception in the program."""
        self.skipped["failure of shadowrun"] += 1
        text = f"{plan.name}: {type(error).__name__}: {error}"[:500]
        if isinstance(error, (sqlite3.Error, OSError, ShadowrunError)):  # the disk is full, say: it will not get better
            self.failure, self._state.running = text, False
        if not self._warned:
            self._warned = True
            what = "The recording ends here" if self.failure else "The call is not in the recording"
            # The program may have warnings raised as errors.
            with suppress(ShadowrunWarning):
                warnings.warn(
                    f"shadowrun failed while recording {text}. {what}; your program continues unchanged. "
                    "Please report it.",
                    ShadowrunWarning,
                    stacklevel=2,
                )
