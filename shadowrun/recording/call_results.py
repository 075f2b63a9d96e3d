"""Rows of a call: what is noted of its inputs before it runs, and what it returned and wrote to.

Of an input, the row that has its values, its device, and the generator that the call draws from; what no recorded call
made becomes a leaf. Of a result, its form, its digest, and the tensor whose memory it lies in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from shadowrun.intercept.plan import Action, OpPlan
from shadowrun.platforms.backends import FUNCTIONALIZING
from shadowrun.recording.data_flow import DataFlow, Leaf
from shadowrun.recording.digests.pending_digests import is_capturing
from shadowrun.recording.digests.tensor_digest import digest_when_settled
from shadowrun.recording.model import NONE, Kind
from shadowrun.replay.call import argument, draws_random
from shadowrun.torch_private import is_zero_tensor, schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shadowrun.intercept.attribution import Origin
    from shadowrun.recording.captured_inputs import CapturedArguments
    from shadowrun.recording.digests.pending_digests import PendingDigest, PendingDigests
    from shadowrun.recording.digests.tensor_digest import Packed
    from shadowrun.recording.file_format.block_buffer import BlockBuffer
    from shadowrun.recording.provenance import Provenance
    from shadowrun.recording.undeclared_writes import Watched

__all__ = [
    "CPU",
    "ITEM",
    "CallInputs",
    "CallResults",
    "NewLeaf",
    "NotedCall",
    "ReturnSchema",
    "flat",
    "has_memory",
    "number_form",
    "returned_values",
    "tensors_with_memory",
]

CPU: Final = torch.device("cpu")
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})


class NewLeaf(NamedTuple):
    """A tensor that no recorded call made, at its first use."""

    leaf: Leaf
    position: int
    form: int
    digest: Packed | PendingDigest | None


class NotedCall:
    """A call that runs."""

    __slots__ = ("captured", "device", "first", "inputs", "leaves", "origin", "watched")

    def __init__(self, origin: Origin, inputs: list[int | Leaf]) -> None:
        self.origin = origin
        self.inputs = inputs
        self.leaves: list[NewLeaf] = []
        self.first: torch.Tensor | None = None
        self.device = "cpu"
        self.captured: CapturedArguments | None = None
        self.watched: tuple[int, list[Watched]] = 0, []


class CallInputs:
    """Finds the rows of inputs. Not safe to use from several threads at once.

    Args:
        flow: Which row has the values of a tensor.
        provenance: Gets the leaves.
        digest: Of a tensor.
        modules: All modules that the program called, with their paths.
        first_call_on: Called before the first call on each device, with its name.
        unseen: Whether code runs that calls no operators; memory may be written to at any time.

    Attributes:
        has_graphs: The program has captured a CUDA graph.
    """

    def __init__(
        self,
        flow: DataFlow,
        provenance: Provenance,
        digest: Callable[[torch.Tensor], Packed | PendingDigest | None],
        modules: Callable[[], Iterable[tuple[str, torch.nn.Module]]],
        first_call_on: Callable[[torch.device], None],
        *,
        unseen: Callable[[], bool],
    ) -> None:
        self._flow, self._provenance = flow, provenance
        self._digest, self._modules, self.unseen = digest, modules, unseen
        self._first_call_on = first_call_on
        self._devices: dict[torch.device, str] = {}
        self.has_graphs = False

    def is_for_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is captured into a CUDA graph: its kernels run, and it has values, when that is replayed."""
        if not is_capturing():
            return False
        wanted = kwargs.get("device")
        on_cuda = isinstance(wanted, torch.device) and wanted.type == "cuda"
        on_cuda = on_cuda or any(isinstance(a, torch.Tensor) and a.is_cuda for a in flat((*args, *kwargs.values())))
        self.has_graphs = self.has_graphs or on_cuda
        return on_cuda

    def note_draw(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Note the state of the default generator that a call draws from; whether it is the first draw on the CPU."""
        if kwargs.get("generator") is not None or not draws_random(plan, args, kwargs):
            return False
        wanted = kwargs.get("device")
        first = next((t.device for t in flat(args) if isinstance(t, torch.Tensor)), CPU)
        device = wanted if isinstance(wanted, torch.device) else first
        is_first = not self._provenance.has_draw(device)
        self._provenance.add_draw(device)
        return is_first and device == CPU

    def note_device(self, noted: NotedCall, kwargs: dict[str, Any]) -> None:
        """Where the call runs: a tensor of an accelerator decides, then `device=` of a factory."""
        first = noted.first
        wanted = kwargs.get("device") if first is None or first.is_cpu else None
        device = wanted if isinstance(wanted, torch.device) else CPU if first is None else first.device
        name = self._devices.get(device)
        if name is None:
            name = self._devices[device] = device.type
            self._first_call_on(device)
        noted.device = name
        noted.first = None  # the program's tensor must not be held while its call runs

    def note(self, noted: NotedCall, a: Any, form: Callable[[torch.Tensor], int]) -> None:
        """Note the rows of the tensors in an argument; `form`: the number of a tensor's form."""
        kind = type(a)
        if kind is list or kind is tuple:
            for v in a:
                self.note(noted, v, form)
        elif kind in _PLAIN or isinstance(a, torch.Tensor):
            # A call with tensors on both is the accelerator's: the CPU's are numbers, or indices of it.
            if noted.first is None or (noted.first.is_cpu and not a.is_cpu):
                noted.first = a
            noted.inputs.append(self._row(noted, a, form))

    def _row(self, noted: NotedCall, t: torch.Tensor, form_of: Callable[[torch.Tensor], int]) -> int | Leaf:
        if not has_memory(t):
            return NONE
        # A graph that is replayed and code that Inductor compiled write to memory, and nothing counts it.
        unseen = self.unseen() or (self.has_graphs and t.is_cuda)
        form = form_of(t)
        row = None if unseen else self._flow.row_of(t, form)
        if row is not None:
            return row
        # What such code returned is no input of the program.
        unseen = unseen or self._flow.is_unseen(t)
        leaf = self._flow.leaf(t, form)
        found = self._digest(t)
        noted.leaves.append(NewLeaf(leaf, len(noted.inputs), form, found))
        self._provenance.add(t, found, self._modules(), only_named=unseen)
        return leaf


_NUMBERS: Final = frozenset({bool, int, float, complex})
_WIDE: Final = {float: torch.float64, complex: torch.complex128}
ITEM: Final = "aten::_local_scalar_dense"
"""The operator that returns the number of a tensor."""


class ReturnSchema(NamedTuple):
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


class CallResults:
    """Adds rows to a buffer. `native/record_rows.c` does the same for plain tensors on the CPU.

    Args:
        flow: Which row has the values of a tensor.
        waiting: Has the digests of tensors on accelerators.
        n_rows: See `rows=` of `shadowrun.record`.

    Attributes:
        returns: By number of the operator.
        waiting: See above.
    """

    def __init__(self, flow: DataFlow, waiting: PendingDigests, n_rows: int) -> None:
        self._flow, self.waiting = flow, waiting
        self._n_rows = n_rows
        self.returns: dict[int, ReturnSchema] = {}

    def add_operator(self, plan: OpPlan) -> None:
        """Read the schema of an operator."""
        schema = schema_of(plan.func)
        written = (i for i, r in enumerate(schema.returns) if r.alias_info is not None and r.alias_info.is_write)
        self.returns[plan.index] = ReturnSchema(
            frozenset(written) if plan.mutated else frozenset(),
            frozenset(a.name for a in plan.mutated if a.kwarg_only),
            plan.action is not Action.EMPTY,
            plan.action is Action.VIEW,
        )

    def add(
        self, buffer: BlockBuffer, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, base: int
    ) -> None:
        """Add the rows of what a call returned and wrote to."""
        returns, n_known = self.returns[plan.index], buffer.n_results
        for position, (number, value) in enumerate(returned_values(out, plan.n_returns)):
            if number not in returns.written:
                has_values = returns.has_values and number not in plan.uninitialised
                self._add_result(buffer, plan, position, value, base, n_known, has_values=has_values)
        position = 0
        for mutated in plan.mutated:
            for value in flat(argument(mutated, args, kwargs)):
                if returns.is_view:  # `t_`: the form of the tensor changes, and no value
                    self._add_result(buffer, plan, position, value, base, n_known, has_values=False)
                else:
                    self._add_written(buffer, position, value, has_values=returns.has_values)
                position += 1

    def _add_result(
        self, buffer: BlockBuffer, plan: OpPlan, position: int, value: Any, base: int, n_known: int, *, has_values: bool
    ) -> None:
        returns = self.returns[plan.index]
        if plan.name == ITEM and base != NONE:  # the value is that of its tensor
            buffer.add_result(Kind.VIEW, position, number_form(buffer, value), None, base)
        elif type(value) in _NUMBERS:
            # On the CPU: the program may have set another default device.
            t = torch.tensor(value, dtype=_WIDE.get(type(value)), device="cpu")
            buffer.add_result(Kind.RESULT, position, buffer.form(t), self.digest(t))
        elif isinstance(value, torch.Tensor):
            form = buffer.form(value)
            if not has_memory(value):
                buffer.add_result(Kind.RESULT, position, form, None)
            elif returns.is_view and self._flow.note_view(value, form, buffer.n_results, counts=bool(plan.mutated)):
                buffer.add_result(Kind.VIEW, position, form, None, base)
            else:
                found = self.digest(value) if has_values or returns.is_view else None
                known = None if returns.is_view else self._flow.row_of(value, form)
                row = known.row if isinstance(known, Leaf) else known
                if row is None or row >= n_known:  # not in the memory of a tensor that was there before the call
                    self._flow.note_result(value, form, buffer.add_result(Kind.RESULT, position, form, found))
                else:
                    self._flow.note_write(value, form, buffer.n_results)
                    buffer.add_result(Kind.RESULT, position, form, found, row)

    def _add_written(self, buffer: BlockBuffer, position: int, value: Any, *, has_values: bool) -> None:
        if not isinstance(value, torch.Tensor):
            return
        form = buffer.form(value)
        if not has_memory(value):
            buffer.add_result(Kind.WRITTEN, position, form, None)
            return
        found = self.digest(value) if has_values else None
        base = self._flow.note_write(value, form, buffer.n_results)
        buffer.add_result(Kind.WRITTEN, position, form, found, base)

    def digest(self, t: torch.Tensor) -> Packed | PendingDigest | None:
        """Digest a tensor, with the ladders of rows that are wanted."""
        n_rows = self._n_rows
        if n_rows:
            # A batch of one: its rows are those of what is in it.
            while t.dim() > 1 and t.shape[0] == 1:
                t = t[0]
            n_rows = n_rows if t.dim() > 1 else 0
        return digest_when_settled(t, n_rows, self.waiting)


def number_form(buffer: BlockBuffer, value: Any) -> int:
    """Number of the form of a tensor that has a number for its only element."""
    return buffer.form(torch.empty((), dtype=_WIDE.get(type(value), torch.int64), device="cpu"))


def has_memory(t: torch.Tensor) -> bool:
    """Whether a tensor lies on a storage of its own device."""
    if t.layout is not torch.strided or t.is_nested or t.is_meta or is_zero_tensor(t):
        return False
    return t.is_cpu or t.device.type not in FUNCTIONALIZING


def returned_values(out: Any, n_returns: int) -> Iterator[tuple[int, Any]]:
    """Results with the numbers of their returns; lists are taken apart."""
    returned = (out,) if n_returns == 1 else out if isinstance(out, (list, tuple)) else ()
    for number, value in enumerate(returned):
        for v in flat(value):
            yield number, v


def flat(value: Any) -> Iterator[Any]:
    """A value, or what is in its lists and tuples, without None."""
    if isinstance(value, (list, tuple)):
        for v in value:
            yield from flat(v)
    elif value is not None:
        yield value


def tensors_with_memory(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of `flat` that lie on a storage of their own device."""
    return (t for t in flat(value) if isinstance(t, torch.Tensor) and has_memory(t))
