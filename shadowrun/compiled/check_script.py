"""Checks everything that a program passes to torch.compile while it runs."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.compiled import torchcompile
from shadowrun.compiled.backend import CheckedBackend
from shadowrun.compiled.check import NO_SINGLE_GRAPH, options_for, region_reports
from shadowrun.compiled.compile_spec import CompileSpec
from shadowrun.compiled.outcome import CompileReport, RegionOutcome
from shadowrun.types import Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shadowrun.compiled.check import Progress

__all__ = ["CompileCall", "checked_torch_compile", "compile_reports"]


@dataclass(frozen=True, slots=True)
class CompileCall:
    """One call of torch.compile.

    Attributes:
        name: What was compiled.
        backend: How, as a reader knows it.
        checked: Its graphs.
        how: The same, to compile parts of it again.
    """

    name: str
    backend: str
    checked: CheckedBackend
    how: CompileSpec


@contextlib.contextmanager
def checked_torch_compile(max_calls: int) -> Iterator[list[CompileCall]]:
    """While inside, what torch.compile compiles is checked, and answered by eager.

    Args:
        max_calls: Calls to check of each graph; further calls only run eagerly.

    Yields:
        A list that gets one entry for each call of torch.compile.
    """
    found: list[CompileCall] = []
    original = torch.compile

    def compile_checked(
        model: Any = None,
        *,
        fullgraph: bool = False,
        dynamic: bool | None = None,
        backend: Any = "inductor",
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        disable: bool = False,
        **others: Any,
    ) -> Any:
        if model is None:
            given = dict(fullgraph=fullgraph, dynamic=dynamic, backend=backend, mode=mode, options=options, **others)
            return lambda function: compile_checked(function, disable=disable, **given)
        if not disable:
            compiler = torchcompile.resolve_backend(backend, mode, options_for(backend, options), dynamic)
            checked = CheckedBackend(compiler, max_calls, whole=True)
            named = backend if isinstance(backend, str) else getattr(backend, "__name__", "its backend")
            how = CompileSpec.of(backend, mode, options, dynamic, compiler)
            found.append(CompileCall(_name(model), named + (f" mode={mode}" if mode else ""), checked, how))
            backend = checked
        return original(model, fullgraph=fullgraph, dynamic=dynamic, backend=backend, disable=disable, **others)

    torch.compile = compile_checked
    try:
        yield found
    finally:
        torch.compile = original


def compile_reports(
    found: list[CompileCall],
    breaks: Mapping[str, int],
    until: float,
    on_progress: Progress,
    *,
    allow_unverified: bool = False,
) -> list[CompileReport]:
    """One report for each call of torch.compile whose result was called.

    Args:
        found: What `checked_torch_compile` gave.
        breaks: Graph breaks of the whole program; torch does not say in which call.
        until: `time.perf_counter()` at which the search for wrong nodes ends.
        on_progress: Called with the current work, the compilations done, and at most how many there are.
        allow_unverified: What could not be verified is no failure.
    """
    reports = []
    for one in found:
        if not one.checked.regions:
            continue
        regions = region_reports(one.checked.regions, one.checked.compiler, until=until, on_progress=on_progress)
        if not regions:
            continue
        outcomes = [r.outcome for r in regions] + ([RegionOutcome.GRAPH_BREAK] if breaks else [])
        worst = min(outcomes, key=list(RegionOutcome).index)
        verdict = min((r.verdict for r in regions), key=lambda v: (v.status is not Status.MISMATCH, v.cause is None))
        unchecked = sum(r.n_unchecked for r in one.checked.regions)
        notes = []
        if unchecked:
            notes.append(f"{unchecked} calls of its graphs only ran eagerly, since enough had been checked.")
        by_name = {r.name: r.outcome for r in regions}
        if any(r.is_whole and by_name.get(r.name) is RegionOutcome.MISMATCH for r in one.checked.regions):
            notes.append(NO_SINGLE_GRAPH)
        if time.perf_counter() > until:
            notes.append("Out of time: this is what is known so far.")
        reports.append(
            CompileReport(
                one.name,
                one.backend,
                worst,
                _whole(verdict),
                regions,
                breaks,
                one.checked.n_graphs,
                notes=tuple(notes),
                how=one.how,
                allow_unverified=allow_unverified,
            )
        )
    return reports


def _whole(verdict: Verdict) -> Verdict:
    """The program as a whole went on with eager's results: only its graphs are judged."""
    return Verdict(verdict.status, verdict.cause, "judged graph by graph")


def _name(model: Callable[..., Any]) -> str:
    return str(getattr(model, "__qualname__", type(model).__name__))
