"""What is noted of a call before it runs: the rows of its inputs, its device, and the generator that it draws from.

What no recorded call made becomes a leaf.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from shadowrun.recording.call_results import flat, has_memory
from shadowrun.recording.digests.pending_digests import is_capturing
from shadowrun.recording.model import NONE
from shadowrun.replay.call import draws_random

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shadowrun.intercept.attribution import Origin
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.recording.captured_inputs import CapturedArguments
    from shadowrun.recording.data_flow import DataFlow, Leaf
    from shadowrun.recording.digests.pending_digests import PendingDigest
    from shadowrun.recording.digests.tensor_digest import Packed
    from shadowrun.recording.provenance import Provenance
    from shadowrun.recording.undeclared_writes import Watched

__all__ = ["CPU", "CallInputs", "NewLeaf", "NotedCall"]

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
