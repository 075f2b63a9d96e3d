"""Scripts for the findings of compiled regions in a data file."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from shadowrun.compiled import torchcompile
from shadowrun.compiled.backend import GraphCase, Region, judge_probe
from shadowrun.compiled.captured import CapturedRegion
from shadowrun.compiled.graph import Graph
from shadowrun.compiled.localise import localise
from shadowrun.compiled.probes import Probe
from shadowrun.compiled.repro import FaultyGraph, GraphScriptMaker
from shadowrun.compiled.rounding import RandomResults
from shadowrun.compiled.snapshot import Snapshot, preserved_rng
from shadowrun.compiled.stage_bisect import first_line
from shadowrun.errors import UsageError
from shadowrun.intercept.op_allowlist import check_arguments
from shadowrun.replay.copies import tensors_in
from shadowrun.repro.builder import load_captured, run_story
from shadowrun.repro.platform_setup import check_harmless
from shadowrun.repro.script import versions_text, write_new
from shadowrun.types import Allowed, Status

if TYPE_CHECKING:
    from pathlib import Path

    from shadowrun.analysis import Finding
    from shadowrun.compiled.localise import Culprit
    from shadowrun.repro import Repro
    from shadowrun.store.datafile import DataFile
    from shadowrun.types import OpRecord, RunInfo

__all__ = ["make"]


def make(
    data: DataFile,
    finding: Finding,
    record: OpRecord,
    directory: Path,
    *,
    minimise: bool = True,
    time_limit_s: float = 30.0,
    allowed: Allowed = Allowed(),  # noqa: B008 - frozen
) -> Repro:
    """Write a script for a compiled region that is wrong.

    Args:
        data: The run's data file.
        finding: What is to be shown.
        record: The call whose inputs were kept.
        directory: Where to; it is made if it is not there.
        minimise: Look for the operator at fault and make its inputs smaller, if the backend is on this machine.
        time_limit_s: How long that may take.
        allowed: What the data file may have imported.

    Raises:
        UsageError: No script can show this finding.
        DataFileError: What was kept cannot be read.
        PlatformError: The simulated device would end or block this process, and only the file names it.
    """
    check_harmless(data.info, allowed)
    region = CapturedRegion.read(load_captured(data, record), allowed)
    region.how.refuse_what_cannot_be_imported()
    # A comparison may be running: what is done here is none of its calls.
    with torchcompile.no_modes(), preserved_rng():
        search = _Search(region, finding.op, time_limit_s if minimise else 0.0, is_own=allowed.modules)
        maker = GraphScriptMaker(
            search.how,
            search.shown,
            search.culprit,
            name=finding.op,
            seen=_seen(finding, record),
            story=(*run_story(data.info, finding.evidence), *search.others),
            needs_grad=() if region.is_plain else region.needs_grad,
        )
        made = maker.write(directory, search.seconds_left())
    versions = directory / "versions.json"
    write_new(versions, _versions(data.info, versions.read_text(encoding="utf-8")))
    return replace(made, notes=(*search.notes, *made.notes))


class _Search:
    """Looks for the operator at fault.

    Attributes:
        how: How the region was compiled, with what compiles so here, if it does.
        shown: Its graph, and the inputs.
        culprit: The first operator at fault; None where none was found.
        others: A line on further ones.
        notes: What a reader should know.
    """

    def __init__(self, region: CapturedRegion, name: str, seconds: float, *, is_own: bool) -> None:
        self._until = time.monotonic() + seconds
        graph = Graph(region.module)
        # Such functions have no schema that says what they write to.
        if not region.is_plain:  # functions of torch may write to any tensor
            graph.written = tuple(k for k, v in enumerate(region.inputs) if isinstance(v, torch.Tensor))
        self.shown = FaultyGraph(graph, Snapshot.take(region.inputs, graph.written))
        # Compiled code checks neither indices nor sizes of memory, so a damaged file could crash the process.
        _check_runs(self.shown, is_own=is_own)
        self.how = region.how
        self.notes: list[str] = []
        self.others: list[str] = []
        self.culprit: Culprit | None = None
        if region.how.left_out:
            self.notes.append(f"a script cannot hold these options of the backend: {', '.join(region.how.left_out)}")
        try:
            self.how = replace(region.how, compiler=region.how.look_for_compiler())
        except Exception as error:  # whatever importing it raises
            where = f"; put the folder of {region.how.module} on PYTHONPATH" if region.how.is_function else ""
            self.notes.append(f"nothing was minimised, the backend is not here: {first_line(error)}{where}")
            return
        if seconds:
            self._look(name)

    def seconds_left(self) -> float:
        """For making inputs smaller."""
        return max(0.0, self._until - time.monotonic())

    def _look(self, name: str) -> None:
        graph, snapshot, compiler = self.shown.graph, self.shown.snapshot, self.how.look_for_compiler()
        try:
            verdict, judged = judge_probe(compiler, Probe(graph, snapshot, graph.names()))
            # The fault may need the code around the region, or another version of the backend.
            if verdict.status is not Status.MISMATCH:
                self.notes.append("the region compiled by itself is right here: nothing was minimised")
                return
            case = GraphCase(graph, snapshot, RandomResults(), verdict, judged)
            until = time.perf_counter() + self.seconds_left()
            found = localise(Region(name, graph), case, compiler, until=until)
        except Exception as error:  # the compiler's: the run of the script shows whether the fault is there
            self.notes.append(f"nothing was minimised: {first_line(error)}")
            return
        if found.note:
            self.notes.append(found.note)
        if found.culprits:
            self.culprit = found.culprits[0]
        if len(found.culprits) > 1:
            names = ", ".join(f"{c.op} ({c.node})" for c in found.culprits[1:_MOST_OTHERS])
            more = len(found.culprits) - _MOST_OTHERS
            self.others.append(f"Also wrong there: {names}" + (f" and {more} more." if more > 0 else "."))


_MOST_OTHERS = 6


class _Dense(fx.Interpreter):
    """Runs a graph as long as its values are numbers and strided tensors.

    Sparse and nested tensors find their values by indices, which operators believe and other tensors can share:
    ``t_`` turns those of a detached alias around, too, which then lead out of its memory.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, torch._ops.OpOverload):
            check_arguments(target, args, kwargs)  # those that nodes computed have come now
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        for t in tensors_in((value,)):
            if t.layout is not torch.strided or t.is_nested:
                raise TypeError(f"{n.name} is {'nested' if t.is_nested else t.layout}: for a file, tensors are dense")
        return value


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
                out = _Dense(shown.graph.module).run(*inputs, enable_io_processing=False)
            shown.graph.values(out, inputs)
    except Exception as error:  # whatever the file's graph does on the file's inputs
        raise UsageError(
            f"The graph does not run eagerly on its inputs: {first_line(error)}", slug="no-repro"
        ) from None


def _seen(finding: Finding, record: OpRecord) -> str:
    call = record.call
    return ", ".join(filter(None, (finding.op, f"call {call.seq}", call.module, str(call.phase), call.site)))


def _versions(info: RunInfo, here: str) -> str:
    """Versions of the run, and those of the backend here."""
    content = json.loads(here)
    content["versions"] |= {name: version for name, version in info.versions.items() if version}
    return versions_text(content)
