"""Stand-alone scripts of compiled graphs: the node at fault, or as much of the graph as shows the fault."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from shadowrun.compiled.backend import compile_graph, judge_probe
from shadowrun.compiled.captured import constants_as_inputs
from shadowrun.compiled.judging import allowed_differences
from shadowrun.compiled.localise import ALONE
from shadowrun.compiled.probes import Probe, call_probe, eager_values, prefix, tensor_nodes
from shadowrun.compiled.rounding import RandomResults
from shadowrun.compiled.snapshot import preserved_rng
from shadowrun.errors import UsageError
from shadowrun.numerics.form import meta
from shadowrun.repro.minimise import minimised
from shadowrun.repro.quoting import code, dotted_name, graph_function, joined
from shadowrun.repro.script import Repro, ScriptSpec, publish, versions_text
from shadowrun.store.captured_inputs import Unkeepable
from shadowrun.types import Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from shadowrun.compiled.compile_spec import CompileSpec
    from shadowrun.compiled.graph import Graph
    from shadowrun.compiled.localise import Culprit
    from shadowrun.compiled.outcome import CompileReport, RegionReport
    from shadowrun.compiled.snapshot import Snapshot

__all__ = ["FaultyGraph", "GraphScriptMaker", "graph_fields", "write_repros"]

_SCRIPT_LIMIT_S: Final = 300.0
_MOST_LISTED: Final = 8


@dataclass(frozen=True, slots=True)
class FaultyGraph:
    """What a region's fault is shown on.

    Attributes:
        graph: The region's graph, or that with what was drawn as further inputs.
        snapshot: Inputs with which it deviates or fails.
    """

    graph: Graph
    snapshot: Snapshot


def write_repros(report: CompileReport, folder: Path, *, time_limit_s: float) -> list[Repro]:
    """Write a script for each region and operator at fault, the first node of each.

    Args:
        report: What was found.
        folder: Gets one folder for each.
        time_limit_s: For making the inputs of one smaller.

    Raises:
        UsageError: A script cannot name the backend.
    """
    how = report.how
    wanted = list(_wanted(report))
    if how is None or not wanted:
        return []
    how.refuse_what_cannot_be_imported()
    made = []
    with preserved_rng():
        for k, (region, culprit) in enumerate(wanted, start=1):
            what = culprit.op if culprit is not None else "graph"
            place = folder / f"{k:02}-{what}-{region.outcome.replace(' ', '-')}"
            assert region.shown is not None
            seen = f"{report.name}, {region.name}"
            maker = GraphScriptMaker(how, region.shown, culprit, name=region.name, seen=seen, error=region.error)
            made.append(maker.write(place, time_limit_s))
    return made


def _wanted(report: CompileReport) -> Iterator[tuple[RegionReport, Culprit | None]]:
    for region in report.regions:
        if region.shown is None:
            continue
        culprits = region.localised.culprits if region.localised is not None else ()
        first = {c.op: c for c in reversed(culprits)}
        yield from ((region, c) for c in culprits if first[c.op] is c)
        if not culprits:
            yield region, None


class GraphScriptMaker:
    """Makes the script of one node, or of a graph as a whole.

    Args:
        how: How it was compiled.
        shown: The graph, and inputs with which it deviates or fails.
        culprit: The node at fault; None for the graph as a whole.
        name: The graph's.
        seen: Where it was seen, in words.
        error: What was raised; empty where it deviates.
        story: Further lines on where it was seen.
        needs_grad: Positions of the inputs of the graph that required a gradient.
    """

    def __init__(
        self,
        how: CompileSpec,
        shown: FaultyGraph,
        culprit: Culprit | None,
        *,
        name: str,
        seen: str,
        error: str = "",
        story: Sequence[str] = (),
        needs_grad: Sequence[int] = (),
    ) -> None:
        self._how, self._culprit, self._name, self._seen = how, culprit, name, seen
        self._graph, self._snapshot = shown.graph, shown.snapshot
        self._error, self._more, self._needs_grad = error, tuple(story), tuple(needs_grad)
        self._notes: list[str] = []

    def write(self, folder: Path, seconds: float) -> Repro:
        """Write the script and try it; where a part of the graph does not show the fault there, the whole graph.

        Args:
            folder: It is made if it is not there.
            seconds: For making inputs smaller; 0 leaves them as they are.

        Raises:
            UsageError: No script can hold the graph.
        """
        whole = Probe(self._graph, self._snapshot, self._graph.names())
        probe = self._part(seconds) or whole
        before = tuple(self._notes)
        made = self._written(probe, folder)
        if made.shows_fault is False and probe is not whole:
            self._notes = [*before, "the operator by itself does not show the fault in a new process"]
            # A part may be right in a new process; the whole graph is larger, but shows the fault.
            made = self._written(whole, folder)
        return made

    def _written(self, probe: Probe, folder: Path) -> Repro:
        try:
            module, constants = constants_as_inputs(probe.graph.module)
        except Unkeepable as reason:
            raise UsageError(f"No script can hold it: {reason}.", slug="no-repro") from None
        given = [*probe.snapshot.inputs, *constants]
        if probe.graph is self._graph:
            given = [v.detach().requires_grad_() if k in self._needs_grad else v for k, v in enumerate(given)]
        allowed = [] if self._error else self._allowed(probe)
        spec = ScriptSpec(
            kind="graph",
            title=self._title(),
            story=tuple(self._story()),
            inputs={"inputs": given, "allowed": allowed},
            **graph_fields(module, self._how, probe.graph.written, raises=bool(self._error)),
        )
        return publish(
            spec, folder, _versions(self._how), self._notes, shown=_listed(given), limit_s=_SCRIPT_LIMIT_S,
            path=self._how.folder(), gone="the script does not show the fault: it needs more of the program around it",
        )  # fmt: skip

    def _allowed(self, probe: Probe) -> list[float | torch.Tensor]:
        """By how much each result may differ."""
        draws = RandomResults()
        _, expected = probe.graph.eager(probe.snapshot.fresh(), draws)
        actual = expected
        if self._how.compiler is not None:
            with contextlib.suppress(Exception):  # then one bound for each element
                compiled = compile_graph(self._how.compiler, probe.graph.module, probe.snapshot.fresh())
                inputs = probe.snapshot.fresh()
                with torch.no_grad():
                    actual = probe.graph.values(compiled(*inputs), inputs)
        return allowed_differences(actual, expected, probe.graph.runs(probe.snapshot, draws))

    def _part(self, seconds: float) -> Probe | None:
        """The smallest part of the graph that shows it; None where only the whole does."""
        graph, snapshot = self._graph, self._snapshot
        if self._culprit is None:
            return None
        # Minimised on eager's values, so that the script contains the fault of this node only.
        values = eager_values(graph, snapshot)
        nodes = tensor_nodes(graph.module.graph, values)
        node = next(n for n in nodes if n.name == self._culprit.node)
        first = self._minimised(node, values, seconds) if self._culprit.how == ALONE else None
        # A backend may leave a single operator to eager, and compile it only with its neighbours.
        upto = nodes[: nodes.index(node) + 1]
        return first or self._showing(prefix(graph, snapshot, values, upto))

    def _minimised(self, node: fx.Node, values: dict[str, Any], seconds: float) -> Probe | None:
        """The node by itself, on small inputs; None if it is right then."""
        args, kwargs = (_values(a, values) for a in (node.args, node.kwargs))
        wanted = self._kind(call_probe(self._graph, self._snapshot, node, args, kwargs))
        if wanted is None:
            return None

        def judge(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self._kind(call_probe(self._graph, self._snapshot, node, args, kwargs))

        _, (args, kwargs) = minimised(wanted, (args, kwargs), judge, lambda kind: kind, seconds, self._notes)
        return call_probe(self._graph, self._snapshot, node, args, kwargs)

    def _showing(self, probe: Probe) -> Probe | None:
        return None if self._kind(probe) is None else probe

    def _kind(self, probe: Probe) -> Any:
        """The same for two probes that show the same fault; None where there is none."""
        try:
            verdict, _ = judge_probe(self._how.look_for_compiler(), probe)
        except Exception as error:
            return type(error) if self._error else None
        return (verdict.cause, verdict.explanation) if verdict.status is Status.MISMATCH else None

    def _title(self) -> str:
        what = self._culprit.op if self._culprit is not None else self._name
        does = f"does not compile or run: {self._error}" if self._error else "is wrong"
        return f"{what}, compiled with {self._how.label}, {does}"

    def _story(self) -> list[str]:
        lines = [f"Seen by shadowrun in {self._seen}."]
        if self._culprit is not None:
            places = ", ".join(filter(None, (self._culprit.node, self._culprit.module, self._culprit.site)))
            lines = [f"Seen by shadowrun in {self._seen}: {places}."]
            if self._culprit.how != ALONE:
                lines.append(f"It is wrong {self._culprit.how}.")
        lines += self._more
        if self._how.is_function:
            lines.append(f"The backend is in module {self._how.module}, whose folder must be on PYTHONPATH.")
        return [*lines, "", "Exit status: 1 while the fault is there, 0 when it is gone."]


def graph_fields(module: fx.GraphModule, how: CompileSpec, written: Sequence[int], *, raises: bool) -> dict[str, Any]:
    """What the script of a graph takes: the graph as code, its modules, and the arguments of `torch.compile`."""
    graph = graph_function(module)
    used = set(re.findall(r"\b[A-Za-z_]\w*", graph))
    setup = [code("from math import {}", dotted_name(name)) for name in ("inf", "nan") if name in used]
    setup += [code("from torch import device")] if "device" in used else []
    if how.is_function:
        setup.append(code("from {} import {} as backend", dotted_name(how.module), dotted_name(how.name)))
    elif how.module and how.module.partition(".")[0] != "torch":
        setup.append(code("import {}  # registers the backend", dotted_name(how.module)))
    options = [code("backend={}", code("backend") if how.is_function else how.name), code("fullgraph=True")]
    options += [code("mode={}", how.mode)] if how.mode else []
    options += [code("options={}", how.options)] if how.options and not how.mode else []  # torch takes one of both
    options += [code("dynamic={}", how.dynamic)] if how.dynamic is not None else []
    return {
        "imports": tuple(name for name in ("math", "operator") if name in used),
        "setup": (joined(setup, "\n"),),
        "values": {"graph": graph, "options": joined(options), "written": tuple(written), "raises": raises},
    }


def _versions(how: CompileSpec) -> str:
    """The file of versions, with those of the backend's packages."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for top in {how.module.partition(".")[0]} - {"", "torch"}:
        for name in importlib.metadata.packages_distributions().get(top, ()):
            found[name] = importlib.metadata.version(name)
    return versions_text({"versions": found, "platform": platform.platform()})


def _values(value: Any, values: dict[str, Any]) -> Any:
    """Arguments of a node with what eager gave to it."""
    if isinstance(value, fx.Node):
        return values[value.name]
    if isinstance(value, dict):
        return {k: _values(v, values) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        each = [_values(v, values) for v in value]
        return tuple(each) if isinstance(value, tuple) else each
    return value


def _listed(given: list[Any]) -> str:
    return ", ".join(map(_shown, given[:_MOST_LISTED])) + (", …" if len(given) > _MOST_LISTED else "")


def _shown(value: Any) -> str:
    return str(meta(value)) if isinstance(value, torch.Tensor) else repr(value)
