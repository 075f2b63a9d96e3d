"""Where a fault is: the nodes of a graph that are wrong once compiled or fail, and the stage of compilation.

`localise` finds wrong nodes, with the user's lines:

1. *Alone*: each node by itself on eager's values, all in one graph. This names all wrong nodes, and none that only
   propagates an error. One compilation.
2. *In the graph*: all intermediate values become results; the first that deviates. One compilation.
3. *Bisection*, where both find nothing since the fault needs neighbouring nodes (fusion): the shortest prefix in which
   a value that is used later deviates. One compilation for each halving. (With the last node as the only result,
   prefixes are not monotone, and a node before or after it would be named.)

`failing_node` bisects a graph that does not compile or run: the shortest prefix that fails as the whole graph does.
`bisect_stages` adds the stages of compilation one by one, then switches Inductor's passes off.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.compiled import torchcompile
from shadowrun.compiled.backend import GraphCase, Region, compile_graph, judge_probe
from shadowrun.compiled.graph import node_origin, operator_name, preserved_rng
from shadowrun.compiled.outcome import OUTCOME_OF, CompileStage, RegionOutcome, error_text
from shadowrun.compiled.probe_graphs import (
    Probe,
    eager_values,
    intermediates,
    isolated_node,
    isolated_nodes,
    prefix,
    tensor_nodes,
)
from shadowrun.types import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import fx

    from shadowrun.compiled.accuracy import Errors, JudgedResult
    from shadowrun.types import Verdict

__all__ = [
    "ALONE",
    "KEPT",
    "TOGETHER",
    "WITHIN",
    "FaultyNode",
    "Localisation",
    "bisect_stages",
    "failing_node",
    "localise",
]

ALONE, WITHIN, TOGETHER = "alone", "within the graph", "together with nodes before it"
KEPT = "in the elements that it kept"


@dataclass(frozen=True, slots=True)
class FaultyNode:
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
class Localisation:
    """What was found, and what it cost.

    Attributes:
        culprits: In the order of the graph.
        complete: The search came to its end; else `note` has the best answer.
        seconds: Time it took.
        n_compiled: Graphs compiled for it.
        note: What a reader should know.
    """

    culprits: tuple[FaultyNode, ...]
    complete: bool
    seconds: float
    n_compiled: int
    note: str = ""


class _OutOfTime(Exception):  # noqa: N818 - no error
    pass


def localise(
    region: Region,
    case: GraphCase,
    compiler: Callable[..., Any],
    *,
    until: float = float("inf"),
    on_progress: Callable[[str, int, int], None] = lambda _what, _done, _of: None,
) -> Localisation:
    """Find the nodes of a region that are wrong.

    Args:
        region: The region that deviates.
        case: The call to find it by.
        compiler: What compiled it.
        until: `time.perf_counter()` at which no further compilation begins.
        on_progress: Called with the current work, the compilations done, and at most how many there are.
    """
    with preserved_rng():
        search = _WrongNodeSearch(region, case, compiler, until, on_progress)
        try:
            return search.run()
        except _OutOfTime:
            return search.ended((), complete=False, note=f"Out of time; {search.best}")


class _WrongNodeSearch:
    def __init__(self, region: Region, case: GraphCase, compiler: Any, until: float, on_progress: Any) -> None:
        self._graph = case.graph
        self._snapshot, self._judged = case.snapshot, case.judged
        self._compiler = compiler
        self._until, self._on_progress = until, on_progress
        self._began = time.perf_counter()
        self._n = 0
        self._refused: list[str] = []
        self._values = eager_values(self._graph, case.snapshot)
        self._nodes = tensor_nodes(self._graph.module.graph, self._values)
        self._named = {n.name: n for n in self._nodes}
        # For progress: two probes, the whole graph, and one compilation for each halving.
        self._most = 3 + len(self._nodes).bit_length()
        outputs = sorted({j.diff.name for j in case.judged if j.verdict.status is Status.MISMATCH})
        self.best = f"the wrong results of {region.name} are {', '.join(outputs)}."

    def run(self) -> Localisation:
        # A dropout's own random numbers cannot be compared, but its scale on the elements that it kept can.
        if dropped := tuple(self._dropped()):
            return self.ended(dropped)
        # On eager's values, so that no node inherits the error of another; probing intermediate values finds one
        # node only.
        deviating = self._deviating(
            "each node alone", isolated_nodes(self._graph, self._snapshot, self._values, self._nodes)
        )
        if deviating:
            return self.ended(tuple(self._culprit(name, j, ALONE) for name, j in deviating.items()))
        whole = intermediates(self._graph, self._snapshot, self._values)
        deviating = self._deviating("all intermediate values", whole)
        if deviating:
            # Only the first: all later nodes may just pass its error on.
            name, judged = next(iter(deviating.items()))
            return self.ended((self._culprit(name, judged, WITHIN),))
        return self._bisect()

    def _dropped(self) -> Iterator[FaultyNode]:
        """Dropouts whose scale is wrong: that was seen with their own random masks."""
        wrong = {j.diff.name: j for j in self._judged if j.verdict.status is Status.MISMATCH}
        for node in self._nodes:
            source = node.meta.get("of")
            if source is not None and source.name in wrong:
                site, module = node_origin(source)
                judged = wrong[source.name]
                yield FaultyNode(
                    node.name, operator_name(source), site, module, KEPT, judged.verdict.evidence, judged.errors
                )

    def ended(self, culprits: tuple[FaultyNode, ...], *, complete: bool = True, note: str = "") -> Localisation:
        return Localisation(culprits, complete, time.perf_counter() - self._began, self._n, note)

    def _bisect(self) -> Localisation:
        good, bad = 0, len(self._nodes)
        worst: JudgedResult | None = None
        while bad - good > 1 or worst is None:
            # The whole graph first: if no probe shows the fault, halving cannot locate it.
            middle = bad if worst is None else (good + bad) // 2
            # All values that are needed later are results: with the last node alone, prefixes are not monotone.
            probe = prefix(self._graph, self._snapshot, self._values, self._nodes[:middle])
            deviating = self._deviating(f"the first {middle} of {len(self._nodes)} nodes", probe)
            if deviating:
                bad, worst = middle, next(iter(deviating.values()))
                first, last = self._nodes[good].name, self._nodes[bad - 1].name
                self.best = f"the fault is between {first} and {last}."
            elif worst is None:
                failed = f"; not compiled: {', '.join(self._refused)}" if self._refused else ""
                return self.ended((), note=f"No probe shows it (the graph as a whole does){failed}; {self.best}")
            else:
                good = middle
        return self.ended((self._culprit(self._nodes[bad - 1].name, worst, TOGETHER),))

    def _deviating(self, what: str, probe: Probe) -> dict[str, JudgedResult]:
        """Nodes that deviate in a probe, in the order of the graph, each with its worst result."""
        if time.perf_counter() >= self._until:
            raise _OutOfTime
        self._on_progress(what, self._n, self._most)
        self._n += 1
        try:
            _, judged = judge_probe(self._compiler, probe)
        except Exception as error:  # the compiler's: the graph itself compiles
            # A part that the backend refuses proves nothing: the next probe is tried.
            self._refused.append(f"{what}: {type(error).__name__}")
            return {}
        worst_of_node: dict[str, JudgedResult] = {}
        for j in judged:
            if j.verdict.status is Status.MISMATCH:
                # `judged` is in the order of results: a node with several keeps its first wrong one.
                worst_of_node.setdefault(probe.origin[j.position], j)
        return dict(sorted(worst_of_node.items(), key=lambda item: self._nodes.index(self._named[item[0]])))

    def _culprit(self, name: str, judged: JudgedResult, how: str) -> FaultyNode:
        node = self._named[name]
        site, module = node_origin(node)
        return FaultyNode(name, operator_name(node), site, module, how, judged.verdict.evidence, judged.errors)


def failing_node(
    region: Region,
    compiler: Callable[..., Any],
    *,
    until: float = float("inf"),
    on_progress: Callable[[str, int, int], None] = lambda _what, _done, _of: None,
) -> Localisation:
    """Find the node that brings a region's exception in.

    Args:
        region: The region that fails; its first call that failed is known.
        compiler: What cannot compile it.
        until: `time.perf_counter()` at which no further compilation begins.
        on_progress: Called with the current work, the compilations done, and at most how many there are.
    """
    with preserved_rng():
        return _FailureSearch(region, compiler, until, on_progress).run()


class _FailureSearch:
    def __init__(self, region: Region, compiler: Any, until: float, on_progress: Any) -> None:
        assert region.error is not None
        assert region.failing is not None
        self._graph, self._snapshot = region.graph, region.failing
        self._stage, self._raised = region.error
        self._compiler = compiler
        self._until, self._on_progress = until, on_progress
        self._began = time.perf_counter()
        self._n = 0

    def run(self) -> Localisation:
        values = eager_values(self._graph, self._snapshot)
        nodes = tensor_nodes(self._graph.module.graph, values)
        good, bad = 0, len(nodes)
        # The whole graph, each halving, and the node alone.
        self._most = 2 + len(nodes).bit_length()
        error: BaseException | None = None
        while bad - good > 1 or error is None:
            if time.perf_counter() >= self._until:
                between = f"between {nodes[good].name} and {nodes[bad - 1].name}" if nodes else "unknown"
                return self._ended((), complete=False, note=f"Out of time; the node that fails is {between}.")
            # The whole graph first: without the writes to its inputs it may compile.
            middle = bad if error is None else (good + bad) // 2
            probe = prefix(self._graph, self._snapshot, values, nodes[:middle]) if nodes else None
            raised = None if probe is None else self._fails(f"the first {middle} of {len(nodes)} nodes", probe)
            if raised is not None:
                bad, error = middle, raised
            elif error is None:
                return self._ended((), note="The graph's nodes compile without what it writes to its inputs.")
            else:
                good = middle
        node = nodes[bad - 1]
        by_itself = self._fails(f"{node.name} alone", isolated_node(self._graph, self._snapshot, values, node))
        return self._ended((self._culprit(node, error, TOGETHER if by_itself is None else ALONE),))

    def _fails(self, what: str, probe: Probe) -> BaseException | None:
        """The exception, if it is of the same class and comes from the same stage."""
        self._on_progress(what, self._n, self._most)
        self._n += 1
        stage = "compile"
        try:
            code = compile_graph(self._compiler, probe.graph.module, probe.snapshot.fresh())
            stage = "runtime"
            with torch.no_grad():
                code(*probe.snapshot.fresh())
        except Exception as error:
            # A prefix may fail for another reason than the whole graph.
            return error if stage == self._stage and type(error) is type(self._raised) else None
        return None

    def _culprit(self, node: fx.Node, error: BaseException, how: str) -> FaultyNode:
        site, module = node_origin(node)
        return FaultyNode(node.name, operator_name(node), site, module, how, error_text(error))

    def _ended(self, culprits: tuple[FaultyNode, ...], *, complete: bool = True, note: str = "") -> Localisation:
        return Localisation(culprits, complete, time.perf_counter() - self._began, self._n, note)


_DECOMPOSED: Final = "aot_eager_decomp_partition"
# Dynamo's graphs only; and autograd traced ahead; and decompositions with Inductor's partition.
_RUNGS: Final = ("eager", "aot_eager", _DECOMPOSED)
_OFF: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("without fusion", {"max_fusion_size": 1, "epilogue_fusion": False}),
    # Fused kernels keep 16-bit intermediate values in float32; this option rounds them where eager does.
    ("rounding between fused operators", {"emulate_precision_casts": True}),
    ("without pattern passes", {"pattern_matcher": False}),
    ("without autotuning", {"max_autotune": False, "coordinate_descent_tuning": False}),
)


def bisect_stages(
    run: Callable[[Any], Verdict],
    backend: Any,
    mode: str | None,
    options: dict[str, Any],
    *,
    is_random: bool,
    until: Callable[[], bool],
) -> Iterator[CompileStage]:
    """Try each stage; those of the backend itself, with options off, only for Inductor.

    Args:
        run: Compiles the program by a compiler given, runs and judges it; raises what that raises.
        backend: The user's.
        mode: Its mode.
        options: Its options.
        is_random: The program has random operators: decomposed, it has other random numbers, and its results
            cannot be compared.
        until: Whether there is time for one more.
    """
    rungs: list[tuple[str, Any]] = [
        # The backend of the user comes last, whichever it is.
        (n, torchcompile.resolve_backend(n, None, None, None))
        for n in _RUNGS
        if n != backend
    ]
    name = backend if isinstance(backend, str) else getattr(backend, "__name__", "backend")
    rungs.append((name, torchcompile.resolve_backend(backend, mode, options, None)))
    if backend == "inductor":
        for what, off in _OFF:
            # A stage without effect on this mode would cost a compilation.
            if what != "without autotuning" or "autotune" in (mode or ""):
                rungs.append((f"{name} {what}", torchcompile.resolve_backend(backend, mode, {**options, **off}, None)))
    for what, compiler in rungs:
        if not until():
            return
        try:
            verdict = run(compiler)
        except Exception as error:
            yield CompileStage(what, RegionOutcome.COMPILE_ERROR, error_text(error))
            continue
        # Decomposed, the program has other random numbers, so the comparison proves nothing.
        if is_random and what == _DECOMPOSED and verdict.status is Status.MISMATCH:
            yield CompileStage(what, RegionOutcome.UNVERIFIED, "its random numbers differ")
            continue
        yield CompileStage(what, OUTCOME_OF[verdict.status], verdict.evidence)
