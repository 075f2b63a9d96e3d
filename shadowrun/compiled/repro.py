"""A stand-alone script for each wrong or failing node: the node, or as much of the graph as it takes, both ways."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from shadowrun.compiled import torchcompile
from shadowrun.compiled.backend import compile_graph, judge_probe
from shadowrun.compiled.graph import copied
from shadowrun.compiled.judging import allowed_differences
from shadowrun.compiled.localise import ALONE
from shadowrun.compiled.probes import Probe, called, computed, prefix, recorded
from shadowrun.compiled.rounding import Draws
from shadowrun.compiled.scripts import Script, write
from shadowrun.compiled.snapshot import undisturbed_draws
from shadowrun.errors import UsageError
from shadowrun.numerics.form import meta
from shadowrun.repro import Repro
from shadowrun.repro.minimise import Minimiser
from shadowrun.types import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shadowrun.compiled.graph import Graph
    from shadowrun.compiled.localise import Culprit
    from shadowrun.compiled.outcome import CompileReport, RegionReport
    from shadowrun.compiled.snapshot import Snapshot

__all__ = ["How", "Shown", "write_repros"]

_SCRIPT_LIMIT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class How:
    """How a program was compiled, to compile a part of it again.

    Attributes:
        backend: As `torch.compile` takes it: a name, or a function.
        module: Module that has to be imported before: it registers the name, or has the function.
        mode: Of Inductor.
        options: The user's.
        dynamic: Whether sizes are symbols.
        compiler: Takes a graph and inputs, returns a callable.
    """

    backend: Any
    module: str
    mode: str | None
    options: dict[str, Any]
    dynamic: bool | None
    compiler: Callable[..., Any] = field(repr=False)

    @classmethod
    def of(
        cls, backend: Any, mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None, compiler: Any
    ) -> How:
        """From the arguments of `torch.compile`, and what it made of them."""
        module = torchcompile.module_of(compiler) if isinstance(backend, str) else getattr(backend, "__module__", "")
        return cls(backend, module, mode, dict(options or {}), dynamic, compiler)


@dataclass(frozen=True, slots=True)
class Shown:
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
    _refuse_what_cannot_be_imported(how)
    made = []
    with undisturbed_draws():
        for k, (region, culprit) in enumerate(wanted, start=1):
            what = culprit.op if culprit is not None else "graph"
            place = folder / f"{k:02}-{what}-{region.outcome.replace(' ', '-')}"
            made.append(_Maker(report, how, region, culprit).write(place, time_limit_s))
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


def _refuse_what_cannot_be_imported(how: How) -> None:
    if isinstance(how.backend, str):
        return
    name = getattr(how.backend, "__qualname__", "")
    if how.module == "__main__" or getattr(sys.modules.get(how.module), name, None) is not how.backend:
        raise UsageError(
            f"A script cannot import the backend {how.backend!r}: define it at the top of a module, by its own name.",
            slug="no-repro",
        )


class _Maker:
    """Makes the script of one node."""

    def __init__(self, report: CompileReport, how: How, region: RegionReport, culprit: Culprit | None) -> None:
        assert region.shown is not None
        self._report, self._how, self._region, self._culprit = report, how, region, culprit
        self._graph, self._snapshot = region.shown.graph, region.shown.snapshot
        self._fails = bool(region.error)
        self._notes: list[str] = []

    def write(self, folder: Path, seconds: float) -> Repro:
        probe = self._probe(seconds)
        module, given = _lifted(probe)
        script = Script(
            title=self._title(),
            story=self._story(),
            module=module,
            backend=self._how.backend,
            imported=self._how.module,
            mode=self._how.mode,
            options={} if self._how.mode else self._how.options,
            dynamic=self._how.dynamic,
            raises=self._fails,
        )
        allowed: list[float | torch.Tensor] = []
        if not self._fails:
            draws = Draws()
            _, expected = probe.graph.eager(probe.snapshot.fresh(), draws)
            code = compile_graph(self._how.compiler, probe.graph.module, probe.snapshot.fresh())
            inputs = probe.snapshot.fresh()
            with torch.no_grad():
                actual = probe.graph.values(code(*inputs), inputs)
            allowed = allowed_differences(actual, expected, probe.graph.runs(probe.snapshot, draws))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "repro.py"
        torch.save({"inputs": given, "allowed": allowed}, folder / "inputs.pt")
        path.write_text(write(script), encoding="utf-8")
        (folder / "versions.json").write_text(script.versions(), encoding="utf-8")
        shows, said = self._try(path)
        return Repro(path, ", ".join(map(_shown, given)), shows, said, tuple(self._notes))

    def _probe(self, seconds: float) -> Probe:
        """The smallest graph that shows it."""
        graph, snapshot = self._graph, self._snapshot
        if self._culprit is None:
            return Probe(graph, snapshot, graph.names())
        values = recorded(graph, snapshot)
        nodes = computed(graph.module.graph, values)
        node = next(n for n in nodes if n.name == self._culprit.node)
        first = self._minimised(node, values, seconds) if self._culprit.how == ALONE else None
        # A backend may leave a single operator to eager, and compile it only with its neighbours.
        upto = nodes[: nodes.index(node) + 1]
        return first or self._showing(prefix(graph, snapshot, values, upto)) or Probe(graph, snapshot, graph.names())

    def _minimised(self, node: fx.Node, values: dict[str, Any], seconds: float) -> Probe | None:
        """The node by itself, on small inputs; None if it is right then."""
        args, kwargs = (_values(a, values) for a in (node.args, node.kwargs))
        wanted = self._kind(called(self._graph, self._snapshot, node, args, kwargs))
        if wanted is None:
            return None

        def holds(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            return bool(self._kind(called(self._graph, self._snapshot, node, args, kwargs)) == wanted)

        minimiser = Minimiser(holds, seconds)
        args, kwargs = minimiser.minimise(args, kwargs)
        if seconds and not minimiser.finished:
            self._notes.append(f"minimising ended after {seconds:g} s and {minimiser.n_runs} runs")
        return called(self._graph, self._snapshot, node, args, kwargs)

    def _showing(self, probe: Probe) -> Probe | None:
        return None if self._kind(probe) is None else probe

    def _kind(self, probe: Probe) -> Any:
        """The same for two probes that show the same fault; None where there is none."""
        try:
            verdict, _ = judge_probe(self._how.compiler, probe)
        except Exception as error:
            return type(error) if self._fails else None
        return (verdict.cause, verdict.explanation) if verdict.status is Status.MISMATCH else None

    def _title(self) -> str:
        what = self._culprit.op if self._culprit is not None else self._region.name
        does = f"does not compile or run: {self._region.error}" if self._fails else "is wrong"
        return f"{what}, compiled with {self._report.backend}, {does}"

    def _story(self) -> list[str]:
        lines = [f"Seen by shadowrun in {self._report.name}, {self._region.name}."]
        if self._culprit is not None:
            places = ", ".join(filter(None, (self._culprit.node, self._culprit.module, self._culprit.site)))
            lines = [f"Seen by shadowrun in {self._report.name}, {self._region.name}: {places}."]
            if self._culprit.how != ALONE:
                lines.append(f"It is wrong {self._culprit.how}.")
        if not isinstance(self._how.backend, str):
            lines.append(f"The backend is in module {self._how.module}, whose folder must be on PYTHONPATH.")
        return [*lines, "", "Exit status: 1 while the fault is there, 0 when it is gone."]

    def _try(self, path: Path) -> tuple[bool | None, str]:
        """Run the script as its reader will."""
        environment = dict(os.environ)
        if not isinstance(self._how.backend, str):
            file = sys.modules[self._how.module].__file__ or ""
            root = Path(file).parents[self._how.module.count(".")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), environment.get("PYTHONPATH"))))
        try:
            done = subprocess.run(  # noqa: S603 - the script that was just written
                [sys.executable, str(path.absolute())], capture_output=True, text=True, errors="replace",
                timeout=_SCRIPT_LIMIT_S, check=False, env=environment,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            self._notes.append(f"the script did not end within {_SCRIPT_LIMIT_S:g} s")
            return None, ""
        said = done.stdout.strip()
        if done.returncode not in (0, 1) or "Traceback" in done.stderr:
            lines = (done.stderr.strip() or said).splitlines() or [str(done.returncode)]
            self._notes.append(f"the script cannot tell here: {lines[-1]}")
            return None, said
        if done.returncode == 0:
            self._notes.append("the script does not show the fault: it needs more of the program around it")
        return done.returncode == 1, said


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


def _lifted(probe: Probe) -> tuple[fx.GraphModule, list[Any]]:
    """The graph with its constants as further inputs, and all inputs."""
    module = copied(probe.graph.module)
    given = list(probe.snapshot.inputs)
    last = next((n for n in reversed(list(module.graph.nodes)) if n.op == "placeholder"), None)
    for node in [n for n in module.graph.nodes if n.op == "get_attr"]:
        before = last.next if last is not None else next(iter(module.graph.nodes))
        with module.graph.inserting_before(before):
            last = module.graph.placeholder(node.name.lstrip("_"))
        node.replace_all_uses_with(last)
        module.graph.erase_node(node)
        given.append(getattr(module, str(node.target)).detach().clone())
    return module, given


def _shown(value: Any) -> str:
    return str(meta(value)) if isinstance(value, torch.Tensor) else repr(value)
