"""Stand-alone scripts of compiled graphs: the node at fault, or as much of the graph as shows the fault.

`write_repros` takes the report of a check, `write_region_script` a finding of a data file, whose region is searched
for the operator at fault first. Both end in a `GraphScriptMaker`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from shadowrun.compiled import torchcompile
from shadowrun.compiled.accuracy import allowed_differences
from shadowrun.compiled.backend import GraphCase, Region, compile_graph, judge_probe
from shadowrun.compiled.fault_location import ALONE, localise
from shadowrun.compiled.graph import Graph, Snapshot, preserved_rng
from shadowrun.compiled.graph_text import DenseInterpreter
from shadowrun.compiled.outcome import error_text
from shadowrun.compiled.probe_graphs import Probe, call_probe, eager_values, prefix, tensor_nodes
from shadowrun.compiled.regions.captured_region import CapturedRegion, constants_as_inputs
from shadowrun.compiled.rounding import RandomResults
from shadowrun.current_folder import in_empty_folder
from shadowrun.errors import UsageError
from shadowrun.intercept.untrusted.checked_calls import graphs_of_file
from shadowrun.intercept.untrusted.op_allowlist import Refused
from shadowrun.numerics.form import meta
from shadowrun.repro.builder import run_story
from shadowrun.repro.call_replayer import load_captured
from shadowrun.repro.minimise import minimised
from shadowrun.repro.platform_setup import check_harmless
from shadowrun.repro.quoting import code, dotted_name, graph_function, joined
from shadowrun.repro.script import Repro, ReproOptions, ScriptSpec, publish, versions_text
from shadowrun.store.atomic_write import refuse_links, write_text
from shadowrun.store.captured_inputs import NotStorable
from shadowrun.types import Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from shadowrun.analysis import Finding
    from shadowrun.compiled.compile_spec import CompileSpec
    from shadowrun.compiled.fault_location import FaultyNode
    from shadowrun.compiled.outcome import CompileReport, RegionReport
    from shadowrun.store.datafile import DataFile
    from shadowrun.types import OpRecord, RunInfo

__all__ = ["FaultyGraph", "GraphScriptMaker", "graph_fields", "write_region_script", "write_repros"]

_SCRIPT_LIMIT_S: Final = 300.0
_MAX_LISTED: Final = 8
_MAX_OTHERS: Final = 6


@dataclass(frozen=True, slots=True)
class FaultyGraph:
    """What a region's fault is shown on.

    Attributes:
        graph: The region's graph, or that with its random numbers as further inputs.
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
        UsageError: A script cannot name the backend, or a folder in `folder` is a link.
    """
    compile_spec = report.compile_spec
    wanted = list(_wanted(report))
    if compile_spec is None or not wanted:
        return []
    compile_spec.refuse_what_cannot_be_imported()
    made = []
    with preserved_rng():
        for k, (region, culprit) in enumerate(wanted, start=1):
            what = culprit.op if culprit is not None else "graph"
            place = folder / f"{k:02}-{what}-{region.outcome.replace(' ', '-')}"
            refuse_links(place)
            assert region.shown is not None
            seen = f"{report.name}, {region.name}"
            maker = GraphScriptMaker(
                compile_spec, region.shown, culprit, name=region.name, seen=seen, error=region.error
            )
            made.append(maker.write(place, time_limit_s))
    return made


def _wanted(report: CompileReport) -> Iterator[tuple[RegionReport, FaultyNode | None]]:
    for region in report.regions:
        if region.shown is None:
            continue
        culprits = region.localised.culprits if region.localised is not None else ()
        # One script for each operator, not for each of its nodes: these show one fault.
        first = {c.op: c for c in reversed(culprits)}
        yield from ((region, c) for c in culprits if first[c.op] is c)
        if not culprits:
            yield region, None


class GraphScriptMaker:
    """Makes the script of one node, or of a graph as a whole.

    Args:
        compile_spec: How it was compiled.
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
        compile_spec: CompileSpec,
        shown: FaultyGraph,
        culprit: FaultyNode | None,
        *,
        name: str,
        seen: str,
        error: str = "",
        story: Sequence[str] = (),
        needs_grad: Sequence[int] = (),
    ) -> None:
        self._how, self._culprit, self._name, self._seen = compile_spec, culprit, name, seen
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
        except NotStorable as reason:
            raise UsageError(f"No script can hold it: {reason}.", slug="no-repro") from None
        given = [*probe.snapshot.inputs, *constants]
        # `needs_grad` counts the inputs of the whole graph; a part has others.
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

    @in_empty_folder()
    def _allowed(self, probe: Probe) -> list[float | torch.Tensor]:
        """By how much each result may differ."""
        random_results = RandomResults()
        _, expected = probe.graph.eager(probe.snapshot.fresh(), random_results)
        actual = expected
        # Without the backend on this machine eager stands for both: then each element has its own bound.
        if self._how.compiler is not None:
            try:
                compiled = compile_graph(self._how.compiler, probe.graph.module, probe.snapshot.fresh())
                inputs = probe.snapshot.fresh()
                with torch.no_grad():
                    actual = probe.graph.values(compiled(*inputs), inputs)
            except Refused:  # no script may run it either
                raise
            except Exception:  # noqa: S110 - `actual` is still eager's: then one bound for each element
                pass
        return allowed_differences(actual, expected, probe.graph.runs(probe.snapshot, random_results))

    @in_empty_folder()
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

        given = node.target, wanted, (args, kwargs)
        _, (args, kwargs) = minimised(*given, judge, lambda kind: kind, seconds, self._notes)
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


def graph_fields(
    module: fx.GraphModule, compile_spec: CompileSpec, written: Sequence[int], *, raises: bool
) -> dict[str, Any]:
    """What the script of a graph takes: the graph as code, its modules, and the arguments of `torch.compile`."""
    graph = graph_function(module)
    used = set(re.findall(r"\b[A-Za-z_]\w*", graph))
    setup = [code("from math import {}", dotted_name(name)) for name in ("inf", "nan") if name in used]
    setup += [code("from torch import device")] if "device" in used else []
    if compile_spec.is_function:
        setup.append(
            code("from {} import {} as backend", dotted_name(compile_spec.module), dotted_name(compile_spec.name))
        )
    elif compile_spec.module and compile_spec.module.partition(".")[0] != "torch":
        setup.append(code("import {}  # registers the backend", dotted_name(compile_spec.module)))
    options = [
        code("backend={}", code("backend") if compile_spec.is_function else compile_spec.name),
        code("fullgraph=True"),
    ]
    options += [code("mode={}", compile_spec.mode)] if compile_spec.mode else []
    options += (
        [code("options={}", compile_spec.options)] if compile_spec.options and not compile_spec.mode else []
    )  # torch takes one of both
    options += [code("dynamic={}", compile_spec.dynamic)] if compile_spec.dynamic is not None else []
    return {
        "imports": tuple(name for name in ("math", "operator") if name in used),
        "setup": (joined(setup, "\n"),),
        "values": {"graph": graph, "options": joined(options), "written": tuple(written), "raises": raises},
    }


def _versions(compile_spec: CompileSpec) -> str:
    """The file of versions, with those of the backend's packages."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for top in {compile_spec.module.partition(".")[0]} - {"", "torch"}:
        for name in importlib.metadata.packages_distributions().get(top, ()):
            versions[name] = importlib.metadata.version(name)
    return versions_text({"versions": versions, "platform": platform.platform()})


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
    return ", ".join(map(_shown, given[:_MAX_LISTED])) + (", …" if len(given) > _MAX_LISTED else "")


def _shown(value: Any) -> str:
    return str(meta(value)) if isinstance(value, torch.Tensor) else repr(value)


def write_region_script(
    data: DataFile, finding: Finding, record: OpRecord, directory: Path, options: ReproOptions
) -> Repro:
    """Write a script for a compiled region that is wrong.

    Args:
        data: The run's data file.
        finding: The finding to show.
        record: The call whose inputs were kept.
        directory: Folder to write to; it is created if needed.
        options: How to make it; the operator at fault is looked for in the time of the minimisation.

    Raises:
        UsageError: No script can show this finding.
        DataFileError: What was kept cannot be read.
        PlatformError: The simulated device would end or block this process, and only the file names it.
    """
    check_harmless(data.info, options.allowed)
    captured = load_captured(data, record)
    with in_empty_folder():  # the looks at its nodes make calls, too
        region = CapturedRegion.read(captured, options.allowed)
    region.compile_spec.refuse_what_cannot_be_imported()
    # A comparison may be running: what is done here is none of its calls.
    looks = contextlib.nullcontext() if options.allowed.modules else graphs_of_file()
    try:
        with torchcompile.no_modes(), preserved_rng(), looks:
            search = _RegionSearch(region, finding.op, options.seconds, is_own=options.allowed.modules)
            maker = GraphScriptMaker(
                search.compile_spec,
                search.shown,
                search.culprit,
                name=finding.op,
                seen=_seen(finding, record),
                story=(*run_story(data.info, finding.evidence), *search.others),
                needs_grad=() if region.is_plain else region.needs_grad,
            )
            made = maker.write(directory, search.seconds_left())
    except Refused as why:  # by a run with other values than the first
        raise UsageError(f"No script is written: {why}.", slug="operator-refused") from None
    # `write` has put the versions of this machine there; the finding was seen with those of the run.
    versions = directory / "versions.json"
    write_text(versions, _versions_of_run(data.info, versions.read_text(encoding="utf-8")))
    return replace(made, notes=(*search.notes, *made.notes))


class _RegionSearch:
    """Looks for the operator at fault.

    Attributes:
        compile_spec: How the region was compiled, with what compiles so here, if it does.
        shown: Its graph, and the inputs.
        culprit: The first operator at fault; None where none was found.
        others: A line on further ones.
        notes: What a reader should know.
    """

    @in_empty_folder()
    def __init__(self, region: CapturedRegion, name: str, seconds: float, *, is_own: bool) -> None:
        self._until = time.monotonic() + seconds
        graph = Graph(region.module)
        # Such functions have no schema that says what they write to.
        if not region.is_plain:  # functions of torch may write to any tensor
            graph.written = tuple(k for k, v in enumerate(region.inputs) if isinstance(v, torch.Tensor))
        self.shown = FaultyGraph(graph, Snapshot.take(region.inputs, graph.written))
        # Compiled code checks neither indices nor sizes of memory, so a damaged file could crash the process.
        _check_runs(self.shown, is_own=is_own)
        self.compile_spec = region.compile_spec
        self.notes: list[str] = []
        self.others: list[str] = []
        self.culprit: FaultyNode | None = None
        if region.compile_spec.left_out:
            self.notes.append(
                f"a script cannot hold these options of the backend: {', '.join(region.compile_spec.left_out)}"
            )
        try:
            self.compile_spec = replace(region.compile_spec, compiler=region.compile_spec.look_for_compiler())
        except Exception as error:  # whatever importing it raises
            where = (
                f"; put the folder of {region.compile_spec.module} on PYTHONPATH"
                if region.compile_spec.is_function
                else ""
            )
            self.notes.append(f"nothing was minimised, the backend is not here: {error_text(error)}{where}")
            return
        # Without time for a search the script shows the whole graph.
        if seconds:
            self._look(name)

    def seconds_left(self) -> float:
        """For making inputs smaller."""
        return max(0.0, self._until - time.monotonic())

    def _look(self, name: str) -> None:
        graph, snapshot, compiler = self.shown.graph, self.shown.snapshot, self.compile_spec.look_for_compiler()
        try:
            verdict, judged = judge_probe(compiler, Probe(graph, snapshot, graph.names()))
            # The fault may need the code around the region, or another version of the backend.
            if verdict.status is not Status.MISMATCH:
                self.notes.append("the region compiled by itself is right here: nothing was minimised")
                return
            case = GraphCase(graph, snapshot, RandomResults(), verdict, judged)
            until = time.perf_counter() + self.seconds_left()
            localised = localise(Region(name, graph), case, compiler, until=until)
        except Refused:
            raise
        except Exception as error:  # the compiler's: the run of the script shows whether the fault is there
            self.notes.append(f"nothing was minimised: {error_text(error)}")
            return
        if localised.note:
            self.notes.append(localised.note)
        if localised.culprits:
            self.culprit = localised.culprits[0]
        if len(localised.culprits) > 1:
            names = ", ".join(f"{c.op} ({c.node})" for c in localised.culprits[1:_MAX_OTHERS])
            more = len(localised.culprits) - _MAX_OTHERS
            self.others.append(f"Also wrong there: {names}" + (f" and {more} more." if more > 0 else "."))


def _check_runs(shown: FaultyGraph, *, is_own: bool) -> None:
    """Eager checks what compiled code may not: that a graph asks for memory that there is, at places that it has.

    Raises:
        UsageError: It raises.
    """
    try:
        if is_own:
            shown.graph.eager(shown.snapshot.fresh())
        else:
            inputs = shown.snapshot.fresh()
            with torch.no_grad():
                out = DenseInterpreter(shown.graph.module).run(*inputs, enable_io_processing=False)
            shown.graph.values(out, inputs)
    except Exception as error:  # whatever the file's graph does on the file's inputs
        raise UsageError(
            f"The graph does not run eagerly on its inputs: {error_text(error)}", slug="no-repro"
        ) from None


def _seen(finding: Finding, record: OpRecord) -> str:
    call = record.call
    return ", ".join(filter(None, (finding.op, f"call {call.seq}", call.module, str(call.phase), call.site)))


def _versions_of_run(info: RunInfo, here: str) -> str:
    """Versions of the run, and those of the backend here."""
    content = json.loads(here)
    content["versions"] |= {name: version for name, version in info.versions.items() if version}
    return versions_text(content)
