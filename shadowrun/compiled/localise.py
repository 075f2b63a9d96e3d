"""Which nodes of a graph are wrong once compiled, with the user's lines.

1. *Alone*: each node by itself on what eager gave to it, in one graph: names all wrong nodes, and none that only
   hands on what another did. One compilation.
2. *In the graph*: all intermediate values become results; the first that deviates. One compilation.
3. *Bisection*, where both are clean because the fault needs its neighbours: the shortest prefix of which any value
   that is needed later deviates. A compilation for each halving. (With the last node as the only result, prefixes
   are not monotone, and blame falls on a node before or behind.)
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shadowrun.compiled.backend import Case, Region, judge_probe
from shadowrun.compiled.graph import operator_name, place
from shadowrun.compiled.probes import Probe, alone, computed, intermediates, prefix, recorded
from shadowrun.compiled.snapshot import undisturbed_draws
from shadowrun.types import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.compiled.judging import Errors, Judged

__all__ = ["ALONE", "KEPT", "TOGETHER", "WITHIN", "Culprit", "Localised", "localise"]

ALONE, WITHIN, TOGETHER = "alone", "within the graph", "together with nodes before it"
KEPT = "in the elements that it kept"


@dataclass(frozen=True, slots=True)
class Culprit:
    """A node that is wrong once compiled, or fails.

    Attributes:
        node: Its name in the graph.
        op: ``aten.relu.default``.
        site: The user's line; of a backward node, that of its forward node.
        module: Path of the module.
        how: Wrong ``alone``, ``within the graph``, only ``together with nodes before it``, or, of a dropout, ``in the
            elements that it kept``.
        evidence: The figures.
        errors: How far its result and eager's are from the float64 result; None where that is not known.
    """

    node: str
    op: str
    site: str
    module: str
    how: str
    evidence: str
    errors: Errors | None = None


@dataclass(frozen=True, slots=True)
class Localised:
    """What was found, and what it cost.

    Attributes:
        culprits: In the order of the graph.
        complete: The search came to its end; else `note` has the best answer.
        seconds: Time it took.
        n_compiled: Graphs compiled for it.
        note: What a reader should know.
    """

    culprits: tuple[Culprit, ...]
    complete: bool
    seconds: float
    n_compiled: int
    note: str = ""


class _OutOfTime(Exception):  # noqa: N818 - no error
    pass


def localise(
    region: Region,
    case: Case,
    compiler: Callable[..., Any],
    *,
    until: float = float("inf"),
    tell: Callable[[str, int, int], None] = lambda _what, _done, _of: None,
) -> Localised:
    """Find the nodes of a region that are wrong.

    Args:
        region: It.
        case: The call to find it by.
        compiler: What compiled it.
        until: `time.perf_counter()` at which no further compilation begins.
        tell: Told what is being done, and how many compilations of at most how many are done.
    """
    with undisturbed_draws():
        search = _Search(region, case, compiler, until, tell)
        try:
            return search.run()
        except _OutOfTime:
            return search.ended((), complete=False, note=f"Out of time; {search.best}")


class _Search:
    def __init__(self, region: Region, case: Case, compiler: Any, until: float, tell: Any) -> None:
        self._graph = case.graph
        self._snapshot, self._judged = case.snapshot, case.judged
        self._compiler = compiler
        self._until, self._tell = until, tell
        self._began = time.perf_counter()
        self._n = 0
        self._refused: list[str] = []
        self._values = recorded(self._graph, case.snapshot)
        self._nodes = computed(self._graph.module.graph, self._values)
        self._named = {n.name: n for n in self._nodes}
        self._most = 3 + len(self._nodes).bit_length()
        outputs = sorted({j.diff.name for j in case.judged if j.verdict.status is Status.MISMATCH})
        self.best = f"the wrong results of {region.name} are {', '.join(outputs)}."

    def run(self) -> Localised:
        if dropped := tuple(self._dropped()):
            return self.ended(dropped)
        found = self._deviating("each node alone", alone(self._graph, self._snapshot, self._values, self._nodes))
        if found:
            return self.ended(tuple(self._culprit(name, j, ALONE) for name, j in found.items()))
        whole = intermediates(self._graph, self._snapshot, self._values)
        found = self._deviating("all intermediate values", whole)
        if found:
            name, judged = next(iter(found.items()))
            return self.ended((self._culprit(name, judged, WITHIN),))
        return self._bisect()

    def _dropped(self) -> Iterator[Culprit]:
        """Dropouts whose scale is wrong: that was seen by what else they drew."""
        wrong = {j.diff.name: j for j in self._judged if j.verdict.status is Status.MISMATCH}
        for node in self._nodes:
            source = node.meta.get("of")
            if source is not None and source.name in wrong:
                site, module = place(source)
                found = wrong[source.name]
                yield Culprit(
                    node.name, operator_name(source), site, module, KEPT, found.verdict.evidence, found.errors
                )

    def ended(self, culprits: tuple[Culprit, ...], *, complete: bool = True, note: str = "") -> Localised:
        return Localised(culprits, complete, time.perf_counter() - self._began, self._n, note)

    def _bisect(self) -> Localised:
        good, bad = 0, len(self._nodes)
        worst: Judged | None = None
        while bad - good > 1 or worst is None:
            middle = bad if worst is None else (good + bad) // 2
            probe = prefix(self._graph, self._snapshot, self._values, self._nodes[:middle])
            found = self._deviating(f"the first {middle} of {len(self._nodes)} nodes", probe)
            if found:
                bad, worst = middle, next(iter(found.values()))
                first, last = self._nodes[good].name, self._nodes[bad - 1].name
                self.best = f"the fault is between {first} and {last}."
            elif worst is None:
                failed = f"; not compiled: {', '.join(self._refused)}" if self._refused else ""
                return self.ended((), note=f"No probe shows it (the graph as a whole does){failed}; {self.best}")
            else:
                good = middle
        return self.ended((self._culprit(self._nodes[bad - 1].name, worst, TOGETHER),))

    def _deviating(self, what: str, probe: Probe) -> dict[str, Judged]:
        """Nodes that deviate in a probe, in the order of the graph, each with its worst result."""
        if time.perf_counter() >= self._until:
            raise _OutOfTime
        self._tell(what, self._n, self._most)
        self._n += 1
        try:
            _, judged = judge_probe(self._compiler, probe)
        except Exception as error:  # the compiler's: the graph itself compiles
            self._refused.append(f"{what}: {type(error).__name__}")
            return {}
        found: dict[str, Judged] = {}
        for j in judged:
            if j.verdict.status is Status.MISMATCH:
                found.setdefault(probe.origin[j.position], j)
        return dict(sorted(found.items(), key=lambda item: self._nodes.index(self._named[item[0]])))

    def _culprit(self, name: str, judged: Judged, how: str) -> Culprit:
        node = self._named[name]
        site, module = place(node)
        return Culprit(name, operator_name(node), site, module, how, judged.verdict.evidence, judged.errors)
