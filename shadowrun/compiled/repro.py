"""A stand-alone script for each wrong or failing node: the node, or as much of the graph as it takes, both ways."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from shadowrun.compiled.backend import compile_graph, judge_probe
from shadowrun.compiled.captured import closed
from shadowrun.compiled.judging import allowed_differences
from shadowrun.compiled.localise import ALONE
from shadowrun.compiled.probes import Probe, called, computed, prefix, recorded
from shadowrun.compiled.rounding import Draws
from shadowrun.compiled.scripts import Script, write
from shadowrun.compiled.snapshot import undisturbed_draws
from shadowrun.errors import UsageError
from shadowrun.numerics.form import meta
from shadowrun.repro import Repro
from shadowrun.repro.making import write_new
from shadowrun.repro.minimise import Minimiser
from shadowrun.store.tensors import Unkeepable, write_private
from shadowrun.types import Status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from shadowrun.compiled.graph import Graph
    from shadowrun.compiled.how import How
    from shadowrun.compiled.localise import Culprit
    from shadowrun.compiled.outcome import CompileReport, RegionReport
    from shadowrun.compiled.snapshot import Snapshot

__all__ = ["Maker", "Shown", "write_repros"]

_SCRIPT_LIMIT_S: Final = 300.0
_MOST_LISTED: Final = 8


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
    how.refuse_what_cannot_be_imported()
    made = []
    with undisturbed_draws():
        for k, (region, culprit) in enumerate(wanted, start=1):
            what = culprit.op if culprit is not None else "graph"
            place = folder / f"{k:02}-{what}-{region.outcome.replace(' ', '-')}"
            assert region.shown is not None
            seen = f"{report.name}, {region.name}"
            maker = Maker(how, region.shown, culprit, name=region.name, seen=seen, error=region.error)
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


class Maker:
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
        how: How,
        shown: Shown,
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
            self._notes = [*before, "the operator by itself does not show the fault in a process of its own"]
            made = self._written(whole, folder)
        return made

    def _written(self, probe: Probe, folder: Path) -> Repro:
        try:
            module, constants = closed(probe.graph.module)
        except Unkeepable as reason:
            raise UsageError(f"No script can hold it: {reason}.", slug="no-repro") from None
        given = [*probe.snapshot.inputs, *constants]
        if probe.graph is self._graph:
            given = [v.detach().requires_grad_() if k in self._needs_grad else v for k, v in enumerate(given)]
        raises = bool(self._error)
        script = Script(self._title(), self._story(), module, self._how, probe.graph.written, raises)
        allowed = [] if raises else self._allowed(probe)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "repro.py"
        write_private({"inputs": given, "allowed": allowed}, folder / "inputs.pt")
        write_new(path, write(script))
        write_new(folder / "versions.json", script.versions())
        shows, said = self._try(path)
        return Repro(path, _listed(given), shows, said, tuple(self._notes))

    def _allowed(self, probe: Probe) -> list[float | torch.Tensor]:
        """By how much each result may differ."""
        draws = Draws()
        _, expected = probe.graph.eager(probe.snapshot.fresh(), draws)
        actual = expected
        if self._how.compiler is not None:
            with contextlib.suppress(Exception):  # then one bound for each element
                code = compile_graph(self._how.compiler, probe.graph.module, probe.snapshot.fresh())
                inputs = probe.snapshot.fresh()
                with torch.no_grad():
                    actual = probe.graph.values(code(*inputs), inputs)
        return allowed_differences(actual, expected, probe.graph.runs(probe.snapshot, draws))

    def _part(self, seconds: float) -> Probe | None:
        """The smallest part of the graph that shows it; None where only the whole does."""
        graph, snapshot = self._graph, self._snapshot
        if self._culprit is None:
            return None
        values = recorded(graph, snapshot)
        nodes = computed(graph.module.graph, values)
        node = next(n for n in nodes if n.name == self._culprit.node)
        first = self._minimised(node, values, seconds) if self._culprit.how == ALONE else None
        # A backend may leave a single operator to eager, and compile it only with its neighbours.
        upto = nodes[: nodes.index(node) + 1]
        return first or self._showing(prefix(graph, snapshot, values, upto))

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

    def _try(self, path: Path) -> tuple[bool | None, str]:
        """Run the script as its reader will."""
        try:
            done = run_script(path, self._how.folder())
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


def run_script(path: Path, folder: Path | None) -> subprocess.CompletedProcess[str]:
    """Run a script as its reader will.

    Args:
        path: The script.
        folder: Of the backend's module, if it is a function.

    Raises:
        TimeoutExpired: It takes too long.
    """
    environment = os.environ | {"PYTHONSAFEPATH": "1"}  # what lies beside the script is no module of its
    if folder is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), environment.get("PYTHONPATH"))))
    return subprocess.run(  # noqa: S603 - the script that was just written
        [sys.executable, "-P", str(path.absolute())], capture_output=True, text=True, errors="replace",
        timeout=_SCRIPT_LIMIT_S, check=False, env=environment,
    )  # fmt: skip


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
