"""A program while it is mutated: graph, how it will be run, and what its calls compute."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Protocol

import torch

from shadowrun.studies.campaign.variants.tracing import Invalid, Trace, Values, info, trace
from shadowrun.studies.zoo.graph import Graph, Ref, refs_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Draft", "Execution", "HasGraph", "Library"]

# Traces of programs that a library keeps.
_KEPT: Final = 256


class HasGraph(Protocol):
    """A program."""

    @property
    def id(self) -> str:
        """First hexadecimal digits of the graph's identity."""

    @property
    def graph(self) -> Graph:
        """What it computes."""


@dataclass(frozen=True, slots=True)
class Execution:
    """How a variant is run.

    Attributes:
        backward: Also compute the gradients of the inputs that require them, of the sum of each floating result.
        autocast: Dtype of `torch.autocast`, ``bfloat16`` or ``float16``; empty for none.
        train: True or False where the calls of the graph were switched to training or evaluation; None: as captured.
        batch_slice: Items that were kept of the batch; the graph's inputs already have this size. 0: all.
        compile: Backend of `torch.compile` and options: ``inductor``, ``inductor:dynamic``; empty for eager.
        threads: Threads of the CPU; 0: as they are.
        metamorphic: Relation that is checked as well, without a reference; empty for none. See `metamorphic`.
    """

    backward: bool = False
    autocast: str = ""
    train: bool | None = None
    batch_slice: int = 0
    compile: str = ""
    threads: int = 0
    metamorphic: str = ""


class Library:
    """The programs of a campaign, and the traces of those used last.

    Args:
        programs: By id.
    """

    def __init__(self, programs: Mapping[str, HasGraph]) -> None:
        self._programs = programs
        self.ids = sorted(programs)
        self.values = Values()
        self._drafts: OrderedDict[str, Draft] = OrderedDict()

    def draft(self, program: str) -> Draft:
        """A program, not mutated yet.

        Raises:
            Invalid: There is no such program.
        """
        found = self._drafts.get(program)
        if found is None:
            if program not in self._programs:
                raise Invalid(f"no program {program}")
            found = self._drafts[program] = Draft(self._programs[program].graph, Execution(), self)
            if len(self._drafts) > _KEPT:
                self._drafts.popitem(last=False)
        else:
            # Least recently used first: mutators draw programs at random, and some far more often than others.
            self._drafts.move_to_end(program)
        return found


class Draft:
    """A program while it is mutated.

    Args:
        graph: Its graph.
        execution: How it will be run.
        library: The other programs.
        before: The draft that it was made from.

    Attributes:
        graph, execution, library: As given.
    """

    def __init__(self, graph: Graph, execution: Execution, library: Library, before: Draft | None = None) -> None:
        self.graph = graph
        self.execution = execution
        self.library = library
        self._before = before

    @cached_property
    def trace(self) -> Trace:
        """What its calls compute.

        Raises:
            Invalid: They do not run.
        """
        base = self._before
        self._before = None  # a chain of drafts would keep all of their values
        known = base.__dict__.get("trace") if base is not None else None
        return trace(self.graph, self.library.values, known)

    def changed(self, graph: Graph | None = None, execution: Execution | None = None) -> Draft:
        """The draft after a mutation."""
        same = graph is None or graph is self.graph
        out = Draft(graph or self.graph, execution or self.execution, self.library, self)
        if same and "trace" in self.__dict__:
            out.__dict__["trace"] = self.trace
        return out

    def traced(self, known: Trace, execution: Execution | None = None) -> Draft:
        """The draft after a mutation that has run the new graph already."""
        out = Draft(known.graph, execution or self.execution, self.library)
        out.__dict__["trace"] = known
        return out

    def tensors(self) -> Iterator[tuple[Ref, torch.Tensor]]:
        """Inputs and results that are tensors, in order."""
        known = self.trace
        for k, t in enumerate(known.inputs):
            yield Ref(-1 - k), t
        for at, value in enumerate(known.values):
            if isinstance(value, torch.Tensor):
                yield Ref(at), value
            elif isinstance(value, (list, tuple)):
                yield from ((Ref(at, n), t) for n, t in enumerate(value) if isinstance(t, torch.Tensor))

    @cached_property
    def uses(self) -> dict[Ref, list[int]]:
        """Numbers of the calls that read a value; the graph's results count as a call after the last."""
        found: dict[Ref, list[int]] = {}
        for at, node in enumerate(self.graph.nodes):
            for ref in node.refs():
                found.setdefault(ref, []).append(at)
        for ref in self.graph.outputs:
            found.setdefault(ref, []).append(len(self.graph.nodes))
        return found

    @cached_property
    def index_sources(self) -> frozenset[int]:
        """Numbers of the calls and inputs that decide indices, or become integers: their values must stay."""
        found: set[int] = set()
        known = self.trace
        # From the last call to the first: what decides an index is known before the calls that it comes from.
        for at in range(len(self.graph.nodes) - 1, -1, -1):
            node = self.graph.nodes[at]
            about = info(node.op)
            becomes = about.casts and isinstance(known.values[at], torch.Tensor) and _is_integer(known.values[at])
            # Behind a bounded operator, as argmax or a comparison, any value gives a valid index.
            if (at in found or becomes) and not about.bounded:
                found.update(r.node for r in node.refs())
            for i in about.indices:
                if i < len(node.args):
                    found.update(r.node for r in refs_in(node.args[i]))
        return frozenset(found)


def _is_integer(t: torch.Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)
