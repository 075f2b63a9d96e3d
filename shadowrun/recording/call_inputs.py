"""Rows of a call's inputs, which are looked up before it runs; what no recorded call made becomes a leaf."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from shadowrun.recording.call_results import has_memory
from shadowrun.recording.model import NONE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shadowrun.intercept.attribution import Origin
    from shadowrun.recording.captured_inputs import CapturedArguments
    from shadowrun.recording.data_flow import DataFlow, Leaf
    from shadowrun.recording.digests import Packed
    from shadowrun.recording.provenance import Provenance
    from shadowrun.recording.undeclared_writes import Watched
    from shadowrun.recording.waiting_digests import Awaited

__all__ = ["CallInputs", "NewLeaf", "NotedCall"]

_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})


class NewLeaf(NamedTuple):
    """A tensor that no recorded call made, at its first use."""

    leaf: Leaf
    position: int
    form: int
    digest: Packed | Awaited | None


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
        unseen: Whether code runs that calls no operators; memory may be written to at any time.

    Attributes:
        has_graphs: The program has captured a CUDA graph.
    """

    def __init__(
        self,
        flow: DataFlow,
        provenance: Provenance,
        digest: Callable[[torch.Tensor], Packed | Awaited | None],
        modules: Callable[[], Iterable[tuple[str, torch.nn.Module]]],
        unseen: Callable[[], bool],
    ) -> None:
        self._flow, self._provenance = flow, provenance
        self._digest, self._modules, self.unseen = digest, modules, unseen
        self.has_graphs = False

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
