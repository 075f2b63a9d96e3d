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
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from shadowrun.errors import ShadowrunError, ShadowrunWarning
from shadowrun.intercept import torchapi
from shadowrun.intercept.generated_code import GeneratedCode
from shadowrun.intercept.plan import Action, OpKind, OpPlan
from shadowrun.intercept.user_call import own_call
from shadowrun.native import core
from shadowrun.native.tensors import reads_places
from shadowrun.platforms.backends import FUNCTIONALIZING
from shadowrun.recording import undeclared_writes
from shadowrun.recording.block_buffer import placement
from shadowrun.recording.data_flow import DataFlow, Leaf
from shadowrun.recording.digests import pack
from shadowrun.recording.model import NONE, Kind
from shadowrun.recording.undeclared_writes import UndeclaredWrites
from shadowrun.replay.call import argument, draws_random
from shadowrun.torch_private import is_distributed, is_zero_tensor, local_part, schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shadowrun.intercept.attribution import Attribution, Origin
    from shadowrun.recording.block_buffer import BlockBuffer
    from shadowrun.recording.captured_inputs import CapturedInputs, Taken
    from shadowrun.recording.digests import Packed
    from shadowrun.recording.kernels import KernelTracer
    from shadowrun.recording.provenance import Provenance
    from shadowrun.recording.step_outputs import StepOutputs
    from shadowrun.recording.undeclared_writes import Watched
    from shadowrun.schedule.selection import Selection

__all__ = ["CallRecorder"]

_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_NUMBERS: Final = frozenset({bool, int, float, complex})
_WIDE: Final = {float: torch.float64, complex: torch.complex128}
_FRAMES: Final = 3  # of shadowrun, above `_before`: the search for the program's line skips them
_ITEM: Final = "aten::_local_scalar_dense"
_MAX_ROWS: Final = 0xFFFF
_RAISED: Final = "raised"
_NESTED: Final = "called while another call was being recorded"
_IN_GRAPH: Final = "captured into a graph"


class _Returns(NamedTuple):
    """What an operator's schema says of its results.

    Attributes:
        written: Number of the returns that are arguments which the call writes to.
        outs: Names of keyword arguments that are written to and not read.
        has_values: The results have values that mean something.
        is_view: Results may lie on the memory of an argument.
    """

    written: frozenset[int]
    outs: frozenset[str]
    has_values: bool
    is_view: bool


class _NewLeaf(NamedTuple):
    leaf: Leaf
    position: int
    form: int
    digest: Packed | None


class _Noted:
    """A call that runs."""

    __slots__ = ("device", "first", "inputs", "leaves", "origin", "taken", "watched")

    def __init__(self, origin: Origin, inputs: list[int | Leaf]) -> None:
        self.origin = origin
        self.inputs = inputs
        self.leaves: list[_NewLeaf] = []
        self.first: torch.Tensor | None = None
        self.device = "cpu"
        self.taken: Taken | None = None
        self.watched: tuple[int, list[Watched]] = 0, []


class _State:
    """What the fast path in C reads and sets too.

    Attributes:
        running: Calls are recorded now.
        busy: A call is being recorded, by the thread that has the lock.
        step: The current training step.
        has_recorded: There are calls of that step.
        unseen: Code runs that calls no operators; memory may be written to at any time.
        watching: A call runs whose memory is watched; others are to be seen by `UndeclaredWrites`.
    """

    __slots__ = ("busy", "has_recorded", "running", "step", "unseen", "watching")

    def __init__(self) -> None:
        self.running = self.busy = self.has_recorded = self.unseen = self.watching = False
        self.step = 0


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
        self._first_call_on = first_call_on
        self._captured = captured
        self._outputs = outputs
        self.plans: dict[int, OpPlan] = {}
        self.native_handler: Any = None
        self._state = _State()
        self.skipped: Counter[str] = Counter()
        self.failure = ""
        self._buffer: BlockBuffer | None = None
        self._returns: dict[int, _Returns] = {}
        self._devices: dict[torch.device, str] = {}
        self._flow = DataFlow()
        self._undeclared = UndeclaredWrites()
        self._generated = GeneratedCode(self._enter_generated, self._leave_generated)
        self._n_generated = 0
        self._occurrences: dict[tuple[int, str, str], int] = {}
        self._warned = self._has_graphs = False
        self.lock = threading.RLock()

    def start(self, buffer: BlockBuffer) -> None:
        """Record into a buffer from here on."""
        self._buffer = buffer
        self._captured.writer = buffer.writer
        # What the program did between two blocks was not observed.
        self._flow.clear()
        self._n_generated, self._state.unseen = 0, False
        self._generated.start()
        if self._kernels is not None:
            self._kernels.start()
        self.native_handler = self._make_native_handler(buffer)
        self._undeclared.samples = self.native_handler is None
        self._state.running = True

    def _make_native_handler(self, buffer: BlockBuffer) -> Any:
        """What records plain calls on the CPU in C; None without the C extension."""
        # Kernels are found out by Python.
        if self._kernels is not None or core is None or not reads_places or self.attribution.native_origins is None:
            return None
        if self._captured.takes_inputs:  # each call is looked at by Python before it runs
            return None
        columns = ("results", "rungs", "samples", "row_rungs")
        columns_of_results = {name: getattr(buffer, name) for name in columns}
        buffer.native_rows = core.TensorRows(
            storages=self._flow.storages,
            form=buffer.form,
            digest=self._digest,
            leaf=Leaf,
            plain_digests=not self._n_rows,
            **columns_of_results,
        )
        buffer.native_rows.first_row = buffer.n_results
        handler = core.CallRows(
            rows=buffer.native_rows,
            state=self._state,
            selection=self._selection,
            origins=self.attribution.native_origins,
            n_modes_below=torchapi.n_modes_below,
            function_mode_on=torchapi.has_function_mode,
            profiler_on=torchapi.profiling,
            acquire=self.lock.acquire,
            release=self.lock.release,
            device=_CPU.type,
            contexts=buffer.contexts,
            occurrences=self._occurrences,
            calls=buffer.calls,
            inputs=buffer.inputs,
            new_context=buffer.context,
            conclude=self._conclude,
            raised=self._raised,
            failed=self._dropped,
            look=self._look,
            n_sampled=undeclared_writes.ALL,
            **columns_of_results,
        )
        for plan in self.plans.values():
            self._teach(handler, buffer.native_rows, plan)
        return handler

    def _teach(self, handler: Any, rows: Any, plan: OpPlan) -> None:
        """What the fast path needs to know of an operator; it leaves others to Python."""
        assert core is not None
        returns = self._returns[plan.index]
        # Python splits composite operators under inference mode.
        if plan.kind is OpKind.PASS or plan.composite or plan.custom or returns.outs:
            return
        if plan.action is Action.RANDOM:  # the state of its generator is noted before the first draw
            return
        if len(plan.mutated) > core.MAX_WRITTEN_ROWS or plan.n_returns > core.MAX_RETURNS:
            return
        if self._undeclared.wants_all(plan):
            return
        rows.learn(
            plan.index,
            plan.n_returns,
            sum(1 << number for number in returns.written),
            sum(1 << number for number in plan.uninitialised),
            returns.has_values,
            returns.is_view,
            bool(plan.mutated),
            tuple(a.position for a in plan.mutated),
        )
        # A recording that is started again does not watch the first calls again.
        handler.learn(plan.func, plan, plan.run, plan.index, self._undeclared.calls_before(plan))

    def _forget_native(self, plan: OpPlan) -> None:
        """Have all calls of an operator come to Python, which watches each."""
        if self.native_handler is not None:
            self.native_handler.forget(plan.func)

    def stop(self) -> None:
        """Only run calls from here on."""
        self._keep_outputs()
        self._state.running = False
        self._generated.stop()
        self.native_handler = None
        if self._buffer is not None:
            self._buffer.native_rows = None
        self._flow.clear()
        if self._kernels is not None:
            self._kernels.stop()

    def forked(self) -> None:
        """In a forked child: the thread that held the lock may not exist."""
        self.lock = threading.RLock()
        if self.native_handler is not None:
            self.native_handler.guard(self.lock.acquire, self.lock.release)
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

    def between_calls(self) -> AbstractContextManager[Any]:
        """Hold the lock: no call is being recorded."""
        return self.lock

    # -- calls ---------------------------------------------------------------------------------------

    def learn(self, plan: OpPlan) -> None:
        """An operator has got its plan."""
        schema = schema_of(plan.func)
        written = (i for i, r in enumerate(schema.returns) if r.alias_info is not None and r.alias_info.is_write)
        self._returns[plan.index] = _Returns(
            frozenset(written) if plan.mutated else frozenset(),
            frozenset(a.name for a in plan.mutated if a.kwarg_only),
            plan.action is not Action.EMPTY,
            plan.action is Action.VIEW,
        )
        if self.native_handler is not None and self._buffer is not None:
            self._teach(self.native_handler, self._buffer.native_rows, plan)

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
                self._undeclared.ended()
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
                for t in _flat((*args, *kwargs.values(), out)):
                    if isinstance(t, torch.Tensor) and is_distributed(type(t)):
                        self._place(buffer, t, placement(t))
        finally:
            buffer.n_holding -= 1
        return out

    def _place(self, buffer: BlockBuffer, t: torch.Tensor, text: str) -> None:
        local = local_part(t)
        is_known = self.running and _has_memory(local)
        row = self._flow.row_of(local, buffer.form(local)) if is_known else None
        number = row.row if isinstance(row, Leaf) else row
        kind = None if number is None else buffer.place(number, local, text)
        if kind is Kind.LEAF or isinstance(t, torch.nn.Parameter):
            self._provenance.add_placement(t, text, self.attribution.modules())

    def _before(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Noted | None:
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

    def _noted(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Noted | None:
        selection = self._selection
        if not selection.everything and (reason := selection.unwanted(plan)):
            self.attribution.note_origin(_FRAMES + 1)  # its backward may be recorded
            self._skip(reason, plan, args, kwargs)
            return None
        origin = self.attribution.find_origin(_FRAMES + 1)
        if not selection.everything and (reason := selection.reason_to_skip(plan, origin)):
            self._skip(reason, plan, args, kwargs)
            return None
        if self._is_captured(args):
            self._has_graphs = True
            self._skip(_IN_GRAPH, plan, args, kwargs)
            return None
        noted = _Noted(origin, [])
        if plan.action is Action.RANDOM:
            self._note_draw(plan, args, kwargs)
        outs = self._returns[plan.index].outs
        for a in args:
            self._note_inputs(noted, a)
        for name, a in kwargs.items():
            if name not in outs:
                self._note_inputs(noted, a)
        self._note_device(noted, kwargs)
        alone = self.native_handler is None or not self.native_handler.n_running
        noted.watched = self._undeclared.before(plan, args, kwargs, alone=alone)
        if noted.watched[1]:
            self._state.watching = True
        if self._captured.takes_inputs:
            noted.taken = self._captured.before(plan, origin, args, kwargs)
        return noted

    def _note_draw(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the state of the default generator that a call draws from."""
        if kwargs.get("generator") is None and draws_random(plan, args, kwargs):
            wanted = kwargs.get("device")
            first = next((t.device for t in _flat(args) if isinstance(t, torch.Tensor)), _CPU)
            self._provenance.add_draw(wanted if isinstance(wanted, torch.device) else first)

    def _note_inputs(self, noted: _Noted, a: Any) -> None:
        kind = type(a)
        if kind is list or kind is tuple:
            for v in a:
                self._note_inputs(noted, v)
        elif kind in _PLAIN or isinstance(a, torch.Tensor):
            if noted.first is None or (noted.first.is_cpu and not a.is_cpu):
                noted.first = a
            noted.inputs.append(self._input(noted, a))

    def _input(self, noted: _Noted, t: torch.Tensor) -> int | Leaf:
        if not _has_memory(t):
            return NONE
        # A graph that is replayed and code that Inductor compiled write to memory, and nothing counts it.
        unseen = self._state.unseen or (self._has_graphs and t.is_cuda)
        buffer = self._buffer
        assert buffer is not None
        form = buffer.form(t)
        row = None if unseen else self._flow.row_of(t, form)
        if row is not None:
            return row
        # What such code returned is no input of the program.
        unseen = unseen or self._flow.is_unseen(t)
        leaf = self._flow.leaf(t, form)
        found = self._digest(t)
        noted.leaves.append(_NewLeaf(leaf, len(noted.inputs), form, found))
        self._provenance.add(t, found, self.attribution.modules(), only_named=unseen)
        return leaf

    def _note_device(self, noted: _Noted, kwargs: dict[str, Any]) -> None:
        """Where the call runs: a tensor of an accelerator decides, then `device=` of a factory."""
        first = noted.first
        wanted = kwargs.get("device") if first is None or first.is_cpu else None
        device = wanted if isinstance(wanted, torch.device) else _CPU if first is None else first.device
        name = self._devices.get(device)
        if name is None:
            name = self._devices[device] = device.type
            self._first_call_on(device)
        noted.device = name
        noted.first = None  # the program's tensor must not be held while its call runs

    def _after(self, noted: _Noted, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
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
        self, buffer: BlockBuffer, noted: _Noted, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        first_row = buffer.n_results
        for new in noted.leaves:
            new.leaf.row = buffer.add_result(Kind.LEAF, new.position, new.form, new.digest)
        inputs = [row.row if isinstance(row, Leaf) else row for row in noted.inputs]
        base = inputs[0] if inputs else NONE
        self._add_results(buffer, plan, args, kwargs, out, base)
        for written in self._undeclared.found(plan, args, kwargs, noted.watched):
            self._forget_native(plan)
            base = self._flow.written(written.tensor, buffer.form(written.tensor), buffer.n_results)
            form = buffer.form(written.memory)
            buffer.add_result(Kind.OVERWRITTEN, written.argument, form, written.digest, base)
        n_results = buffer.n_results - first_row
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
        if noted.taken is not None:
            self._captured.after(buffer.n_calls - 1, noted.taken)
        if buffer.is_to_be_looked_at:
            self._look()

    def _look(self) -> None:
        """After some calls: write what has waited long enough, and forget what was freed."""
        self._flow.purge()
        if self._buffer is not None:
            self._buffer.flush_at_times()

    # -- what the fast path in C leaves to Python -------------------------------------------------------

    def _conclude(
        self,
        origin: Origin,
        inputs: list[int | Leaf],
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> None:
        """A call that has run returned something else than plain tensors."""
        self._after(_Noted(origin, inputs), plan, args, kwargs, out)

    def _raised(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The program's call raised: what it has written to until then is not known."""
        self._skip(_RAISED, plan, args, kwargs)

    def _dropped(self, plan: OpPlan, error: BaseException) -> None:
        """A call that has run could not be recorded, and its rows were removed."""
        self._flow.clear()
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
            self._n_generated = max(0, self._n_generated - 1)
            self._state.unseen = self._n_generated > 0
            self._note_unseen((out,))
            if not self._state.unseen:
                self._flow.end_unseen()

    def _note_unseen(self, values: Sequence[Any]) -> None:
        for value in _flat(values):
            if isinstance(value, torch.Tensor) and _has_memory(value):
                self._flow.unseen(value)

    # -- rows ------------------------------------------------------------------------------------------

    def _add_results(
        self, buffer: BlockBuffer, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, base: int
    ) -> None:
        """Add the rows of what a call returned and wrote to."""
        returns, n_known = self._returns[plan.index], buffer.n_results
        for position, (number, value) in enumerate(_results(out, plan.n_returns)):
            if number not in returns.written:
                has_values = returns.has_values and number not in plan.uninitialised
                self._add_result(buffer, plan, position, value, base, n_known, has_values=has_values)
        position = 0
        for mutated in plan.mutated:
            for value in _flat(argument(mutated, args, kwargs)):
                if returns.is_view:  # `t_`: the form of the tensor changes, and no value
                    self._add_result(buffer, plan, position, value, base, n_known, has_values=False)
                else:
                    self._add_written(buffer, position, value, has_values=returns.has_values)
                position += 1

    def _add_result(
        self, buffer: BlockBuffer, plan: OpPlan, position: int, value: Any, base: int, n_known: int, *, has_values: bool
    ) -> None:
        returns = self._returns[plan.index]
        if plan.name == _ITEM and base != NONE:  # the value is that of its tensor
            t = torch.empty((), dtype=_WIDE.get(type(value), torch.int64), device="cpu")
            buffer.add_result(Kind.VIEW, position, buffer.form(t), None, base)
        elif type(value) in _NUMBERS:
            # On the CPU: the program may have set another default device.
            t = torch.tensor(value, dtype=_WIDE.get(type(value)), device="cpu")
            buffer.add_result(Kind.RESULT, position, buffer.form(t), self._digest(t))
        elif isinstance(value, torch.Tensor):
            form = buffer.form(value)
            if not _has_memory(value):
                buffer.add_result(Kind.RESULT, position, form, None)
            elif returns.is_view and self._flow.viewed(value, form, buffer.n_results, counts=bool(plan.mutated)):
                buffer.add_result(Kind.VIEW, position, form, None, base)
            else:
                found = self._digest(value) if has_values or returns.is_view else None
                known = None if returns.is_view else self._flow.row_of(value, form)
                row = known.row if isinstance(known, Leaf) else known
                if row is None or row >= n_known:  # not in the memory of a tensor that was there before the call
                    self._flow.made(value, form, buffer.add_result(Kind.RESULT, position, form, found))
                else:
                    self._flow.written(value, form, buffer.n_results)
                    buffer.add_result(Kind.RESULT, position, form, found, row)

    def _add_written(self, buffer: BlockBuffer, position: int, value: Any, *, has_values: bool) -> None:
        if not isinstance(value, torch.Tensor):
            return
        form = buffer.form(value)
        if not _has_memory(value):
            buffer.add_result(Kind.WRITTEN, position, form, None)
            return
        found = self._digest(value) if has_values else None
        base = self._flow.written(value, form, buffer.n_results)
        buffer.add_result(Kind.WRITTEN, position, form, found, base)

    def _digest(self, t: torch.Tensor) -> Packed | None:
        n_rows = self._n_rows
        if n_rows:
            # A batch of one: its rows are those of what is in it.
            while t.dim() > 1 and t.shape[0] == 1:
                t = t[0]
            n_rows = n_rows if t.dim() > 1 else 0
        return pack(t, n_rows)

    def _is_captured(self, args: tuple[Any, ...]) -> bool:
        """Whether a CUDA graph is being captured: no value can be fetched then."""
        first = next(_flat(args), None)
        return isinstance(first, torch.Tensor) and first.is_cuda and torch.cuda.is_current_stream_capturing()

    def _skip(
        self,
        reason: str,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[_NewLeaf] = (),
    ) -> None:
        """Count a call that is not recorded, and forget what it may write to."""
        with self.lock, suppress(Exception):
            self.skipped[reason] += 1
            if plan.mutated or plan.custom or plan.action is Action.PASS or leaves:
                for value in (*args, *kwargs.values()):
                    for t in _flat(value):
                        if isinstance(t, torch.Tensor) and _has_memory(t):
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
            with suppress(ShadowrunWarning):
                warnings.warn(
                    f"shadowrun failed while recording {text}. {what}; your program continues unchanged. "
                    "Please report it.",
                    ShadowrunWarning,
                    stacklevel=2,
                )


_CPU: Final = torch.device("cpu")


def _has_memory(t: torch.Tensor) -> bool:
    """Whether a tensor lies on a storage of its own device."""
    if t.layout is not torch.strided or t.is_nested or t.is_meta or is_zero_tensor(t):
        return False
    return t.is_cpu or t.device.type not in FUNCTIONALIZING


def _results(out: Any, n_returns: int) -> Iterator[tuple[int, Any]]:
    """Results with the numbers of their returns; lists are taken apart."""
    returned = (out,) if n_returns == 1 else out if isinstance(out, (list, tuple)) else ()
    for number, value in enumerate(returned):
        for v in _flat(value):
            yield number, v


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for v in value:
            yield from _flat(v)
    elif value is not None:
        yield value
