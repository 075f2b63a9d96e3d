"""The fast path of a recording in C: what it is given, and what it is taught of each operator.

It records plain calls on the CPU and leaves others to `CallRecorder`; see native/record_call.c.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from shadowrun.intercept import torchapi
from shadowrun.intercept.plan import Action, OpKind, OpPlan
from shadowrun.native import core
from shadowrun.native.tensors import reads_places
from shadowrun.platforms.torchplatform import below_autograd
from shadowrun.recording import undeclared_writes
from shadowrun.recording.call_results import ITEM, number_form
from shadowrun.recording.data_flow import Leaf
from shadowrun.recording.digests.pending_digests import PendingDigest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from shadowrun.intercept.attribution import Attribution
    from shadowrun.recording.call_results import CallResults
    from shadowrun.recording.data_flow import DataFlow
    from shadowrun.recording.digests.tensor_digest import Packed
    from shadowrun.recording.file_format.block_buffer import BlockBuffer
    from shadowrun.recording.undeclared_writes import UndeclaredWrites
    from shadowrun.schedule.selection import Selection

__all__ = ["NativeCalls", "State", "make_native_calls"]


class State:
    """What the recorder and the fast path in C read and set.

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


class NativeCalls(NamedTuple):
    """The fast path of a recording that has been started.

    Attributes:
        handler: Records calls: `RecordHandler` of native/record_call.c.
        rows: Of their tensors: `TensorRows` of native/record_rows.c.
        results: What schemas say.
        undeclared: Decides which calls it leaves to Python.
    """

    handler: Any
    rows: Any
    results: CallResults
    undeclared: UndeclaredWrites

    def add_operator(self, plan: OpPlan, *, draws_noted: bool) -> None:
        """What the fast path needs to know of an operator; without that it leaves its calls to Python.

        Args:
            plan: The operator.
            draws_noted: The state of the CPU's generator before the first draw is in the provenance.
        """
        assert core is not None
        returns = self.results.returns[plan.index]
        # Python splits composite operators under inference mode.
        if plan.kind is OpKind.PASS or plan.composite or plan.custom or returns.outs:
            return
        # Python notes the state of the generator before the first draw.
        if plan.action is Action.RANDOM and not draws_noted:
            return
        # Arrays of that length lie on C's stack: no call allocates.
        if len(plan.mutated) > core.MAX_WRITTEN or plan.n_returns > core.MAX_RETURNS:
            return
        # Each of its calls is watched, which Python does.
        if self.undeclared.schedule.is_always(plan.index):
            return
        self.handler.add_operator(
            plan.func,
            plan,
            plan.run,
            plan.index,
            undeclared_writes.may_watch(plan),
            plan.n_returns,
            sum(1 << number for number in returns.written),
            sum(1 << number for number in plan.uninitialised),
            returns.has_values,
            returns.is_view,
            bool(plan.mutated),
            tuple(a.position for a in plan.mutated),
            plan.name == ITEM,
            plan.action is Action.RANDOM,
        )


def make_native_calls(
    buffer: BlockBuffer,
    flow: DataFlow,
    results: CallResults,
    undeclared: UndeclaredWrites,
    attribution: Attribution,
    selection: Selection,
    parts: Mapping[str, Callable[..., Any] | object],
    *,
    n_rows: int,
) -> NativeCalls | None:
    """The fast path that fills a buffer; None without the C extension.

    Args:
        buffer: Gets the rows.
        flow: Which row has the values of a tensor.
        results: What schemas say.
        undeclared: Decides which calls are watched.
        attribution: Finds where calls come from.
        selection: What the program wants recorded.
        parts: Other arguments of `RecordHandler`, by name: what it shares with the recorder and what it calls.
        n_rows: See `rows=` of `shadowrun.record`.
    """
    if core is None or not reads_places or attribution.native_origins is None:
        return None
    columns = {name: getattr(buffer, name) for name in ("results", "rungs", "samples", "row_rungs")}

    rows = buffer.native_rows = core.TensorRows(
        storages=flow.storages,
        form=buffer.form,
        digest=_digest_function(buffer, results, n_rows),
        number_form=functools.partial(number_form, buffer),
        leaf=Leaf,
        plain_digests=not n_rows,
        **columns,
    )
    rows.first_row = buffer.n_results
    handler = core.RecordHandler(
        rows=rows,
        selection=selection,
        origins=attribution.native_origins,
        n_modes_below=torchapi.n_modes_below,
        function_mode_on=torchapi.has_function_mode,
        profiler_on=torchapi.profiling,
        device="cpu",
        contexts=buffer.contexts,
        calls=buffer.calls,
        inputs=buffer.inputs,
        new_context=buffer.context,
        schedule=undeclared.schedule,
        device_name=lambda t: sys.intern(t.device.type),
        **parts,
        **columns,
    )
    return NativeCalls(handler, rows, results, undeclared)


def _digest_function(buffer: BlockBuffer, results: CallResults, n_rows: int) -> Callable[[torch.Tensor], Packed | None]:
    """What digests the tensors that C cannot; None where the digest is pending."""

    def digest(t: torch.Tensor) -> Packed | None:
        # Its row comes next. In a mode's handler, an operator meets nothing but autograd.
        found: Packed | PendingDigest | None = None
        if not (n_rows or t.is_cpu):
            with below_autograd():
                found = results.waiting.add_plain(t)
        if found is None:
            found = results.digest(t)
        return buffer.reserve(found) if isinstance(found, PendingDigest) else found

    return digest
