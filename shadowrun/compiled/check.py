"""Code that torch.compile compiles, checked graph by graph against eager.

`compile_check` takes one function or model; `checked_torch_compile` takes whatever a program passes to torch.compile
while it runs, and `compile_reports` reports on that.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from shadowrun.compiled import torchcompile
from shadowrun.compiled.backend import CheckedBackend, GraphCase, Region
from shadowrun.compiled.compile_spec import CompileSpec
from shadowrun.compiled.fault_location import bisect_stages, failing_node, localise
from shadowrun.compiled.full_program import EagerResults, FullProgram, run_full_program
from shadowrun.compiled.graph import preserved_rng
from shadowrun.compiled.outcome import OUTCOME_OF, CompileReport, CompileStage, RegionOutcome, RegionReport, error_text
from shadowrun.compiled.program import GRADIENT, Program
from shadowrun.compiled.repro import FaultyGraph
from shadowrun.errors import UsageError
from shadowrun.types import Cause, Status, Verdict

__all__ = ["CompileCall", "checked_torch_compile", "compile_check", "compile_reports", "region_reports"]


_NO_SINGLE_GRAPH = (
    "No graph of plain operators deviates by itself: look at what the backend does to Dynamo's own graphs, or to "
    "forward and backward together."
)
# Code of Inductor's cache would be loaded, and a fault in compiling would not happen in this process.
_NO_CACHE = {"fx_graph_cache": False}
_EAGER_RANDOM_NUMBERS = {"fallback_random": True}
Progress = Callable[[str, int, int], None]


def compile_check(
    function: Callable[..., Any],
    *inputs: Any,
    backend: Any = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    train: bool = True,
    ladder: bool = True,
    regions: bool = True,
    allow_unverified: bool = False,
    time_limit_s: float = 600.0,
    on_progress: Progress | None = None,
    **kwargs: Any,
) -> CompileReport:
    """Compile a function or model with torch.compile and check what it computes against eager.

    The program as a whole is compiled as `torch.compile` would and judged: outputs, gradients and the state
    afterwards, each against eager with the float64 result as third opinion. Then each graph is compiled and judged by
    itself, forward and backward, and where one deviates, its wrong nodes are looked for. Everything runs on copies:
    buffers, gradients and the random stream of the program stay as they are. What was compiled before in this process
    is compiled anew when it is called next.

    For Inductor, random operators draw as eager's do (``fallback_random``): else nothing random could be compared.

    Args:
        function: A function, a method or a module.
        *inputs: Its positional arguments.
        backend: As for `torch.compile`; so are `mode`, `options`, `dynamic` and `fullgraph`.
        mode: ``"reduce-overhead"``, ``"max-autotune"``.
        options: Options of the backend.
        dynamic: Whether sizes are symbols.
        fullgraph: Whether a graph break is an error.
        train: Also compare gradients, in a random direction.
        ladder: Where something is wrong, find the stage that brings it in.
        regions: Compile and judge each graph by itself too; if False, only where the program as a whole is not right.
        allow_unverified: `report.ok` is True also where something could not be verified.
        time_limit_s: Seconds after which nothing further is compiled, and what is known is the answer.
        on_progress: Called with the current work, the compilations done, and at most how many there are.
        **kwargs: Arguments of the function by name.

    Example:
        >>> import torch, shadowrun
        >>> model = torch.nn.Linear(3, 4)
        >>> shadowrun.compile_check(model, torch.ones(2, 3), backend="aot_eager").ok
        True

    Raises:
        UsageError: `function` cannot be called, or fails also when it is not compiled.
    """
    if not callable(function):
        raise UsageError(
            f"compile_check() takes a function or a module, not {type(function).__name__}.", slug="no-function"
        )
    chosen = _options_for(backend, options)
    until = time.perf_counter() + time_limit_s
    # The check must leave the program's random stream as it is, and the user's modes must not see its operators.
    with preserved_rng(), torchcompile.no_modes():
        check = _Check(
            Program(function, inputs, kwargs, train=train), backend, mode, chosen, options, dynamic, fullgraph
        )
        report = check.run(
            until, ladder=ladder, regions=regions, on_progress=on_progress or (lambda _what, _done, _of: None)
        )
    return replace(report, allow_unverified=allow_unverified)


def _options_for(backend: Any, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The user's options, and those without which a comparison means nothing."""
    # Inductor's own random numbers differ from eager's: without `fallback_random` nothing random could be compared.
    return {**(_EAGER_RANDOM_NUMBERS | _NO_CACHE if backend == "inductor" else {}), **(options or {})}


class _Check:
    def __init__(
        self,
        program: Program,
        backend: Any,
        mode: str | None,
        options: dict[str, Any],
        given: Mapping[str, Any] | None,
        dynamic: bool | None,
        fullgraph: bool,
    ) -> None:
        self._program = program
        self._backend, self._mode, self._options = backend, mode, options
        self._dynamic, self._fullgraph = dynamic, fullgraph
        self._compiler = torchcompile.resolve_backend(backend, mode, options, dynamic)
        self._how = CompileSpec.from_arguments(backend, mode, given, dynamic, self._compiler)
        try:
            self._expected = EagerResults(program)
        except Exception as error:
            raise UsageError(
                f"{program.name} fails without compiling too: {error_text(error)}", slug="fails-in-eager"
            ) from error

    def _may_be_random_order(self, reports: tuple[RegionReport, ...]) -> bool:
        """Whether a difference that no graph shows may be another order of random numbers, which is no fault."""
        shown = any(r.outcome is RegionOutcome.MISMATCH for r in reports)
        return bool(self._expected.random_results.kept) and self._backend != "eager" and not shown

    def _described(self) -> str:
        """The backend and its mode, as a reader knows them."""
        name = self._backend if isinstance(self._backend, str) else getattr(self._backend, "__name__", "its backend")
        return f"{name} mode={self._mode}" if self._mode else name

    def run(self, until: float, *, ladder: bool, regions: bool, on_progress: Progress) -> CompileReport:
        steps = _Steps()
        on_progress("the whole program", 0, 1)
        with steps("the whole program"), torchcompile.fresh_dynamo():
            whole = run_full_program(self._program, self._expected, self._compiler, self._compile)
        on_progress("each graph", 0, 1)
        checked = CheckedBackend(self._compiler)
        notes = []
        right = whole.verdict.status is Status.MATCH and not whole.error
        with steps("each graph"), torchcompile.fresh_dynamo():
            # Even if it was not asked for: of a wrong program, the graphs are the next question.
            error = self._regions(checked) if regions or not right else ""
            # Where the program as a whole failed too, its report has the error already.
            if error and not whole.error:
                notes.append(f"The graphs could not be checked one by one: {error}")
        with steps("search"):
            reports = region_reports(checked.regions, self._compiler, until=until, on_progress=on_progress)
            alone = any(r.outcome is RegionOutcome.MISMATCH for r in reports)
            # Passes that see forward and backward together are not observed in the split graphs.
            if whole.verdict.status is Status.MISMATCH and not alone:
                reports += self._as_dynamo_made_them(until, on_progress)
        if not whole.error:
            # The program compiles, so what fails is only the way in which its parts were cut out.
            reports = tuple(map(_not_alone, reports))
        if whole.verdict.status is Status.MISMATCH and not alone:
            if self._may_be_random_order(reports):
                reason = "random numbers in another order"
                whole.verdict = Verdict(Status.UNVERIFIED, Cause.RANDOMNESS, reason, whole.verdict.evidence)
            else:
                notes.append(_NO_SINGLE_GRAPH)
        outcome = self._outcome(whole, reports)
        stages: tuple[CompileStage, ...] = ()
        wrong = outcome in (RegionOutcome.COMPILE_ERROR, RegionOutcome.RUNTIME_ERROR, RegionOutcome.MISMATCH)
        if ladder and wrong:
            with steps("stages"):
                stages = tuple(self._ladder(until, on_progress))
        if not whole.n_graphs and not whole.error:
            notes.append("Dynamo made no graph: all of it ran eagerly.")
        if time.perf_counter() > until:
            notes.append("Out of time: this is what is known so far.")
        return CompileReport(
            self._program.name,
            self._described(),
            outcome,
            whole.verdict,
            reports,
            whole.breaks,
            whole.n_graphs,
            whole.n_recompiled,
            whole.error,
            whole.compile_s,
            whole.speed_ratio,
            whole.memory_ratio,
            stages,
            tuple(notes),
            whole.errors,
            steps.seconds,
            self._how,
        )

    def _regions(self, checked: CheckedBackend) -> str:
        copied = self._program.copy()
        try:
            copied.run(self._compile(copied.function, checked))
        except Exception as error:
            return error_text(error)
        return ""

    def _as_dynamo_made_them(self, until: float, on_progress: Progress) -> tuple[RegionReport, ...]:
        """The graphs that a backend gets which works on Dynamo's own, forward and backward together."""
        checked = CheckedBackend(self._compiler, split=False, whole=True)
        with torchcompile.fresh_dynamo():
            if self._regions(checked):
                return ()
        return region_reports(checked.regions, self._compiler, until=until, on_progress=on_progress)

    def _ladder(self, until: float, on_progress: Progress) -> Any:
        def run(compiler: Any) -> Verdict:
            copied = self._program.copy()
            with torchcompile.fresh_dynamo():
                names, actual = copied.run(self._compile(copied.function, compiler))
                return self._expected.judge(names, actual)[0]

        is_random = bool(self._expected.random_results.kept)
        in_time = lambda: time.perf_counter() < until  # noqa: E731
        stages = bisect_stages(run, self._backend, self._mode, self._options, is_random=is_random, until=in_time)
        for k, stage in enumerate(stages):
            on_progress("stages", k + 1, k + 2)
            yield stage

    def _compile(self, function: Any, backend: Any) -> Any:
        return torch.compile(function, backend=backend, dynamic=self._dynamic, fullgraph=self._fullgraph)

    def _outcome(self, whole: FullProgram, reports: tuple[RegionReport, ...]) -> RegionOutcome:
        of_regions = [r.outcome for r in reports]
        if whole.error:
            # A region that fails to compile fails while the program runs for the first time.
            return (
                RegionOutcome.RUNTIME_ERROR
                if RegionOutcome.RUNTIME_ERROR in of_regions
                else RegionOutcome.COMPILE_ERROR
            )
        # What is known of the program as a whole holds where only our own way to compile its parts failed.
        counted = [
            r for r in reports if whole.verdict.status is not Status.MATCH or r.verdict.cause is not Cause.HARNESS
        ]
        outcomes = [OUTCOME_OF[whole.verdict.status], *(r.outcome for r in counted)]
        if whole.storm:
            outcomes.append(RegionOutcome.RECOMPILE_STORM)
        if whole.breaks:
            outcomes.append(RegionOutcome.GRAPH_BREAK)
        if whole.slower:
            outcomes.append(RegionOutcome.SLOWER)
        # `RegionOutcome` is ordered from the worst to the best.
        return min(outcomes, key=list(RegionOutcome).index)


class _Steps:
    """How long each step took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - began


def _not_alone(report: RegionReport) -> RegionReport:
    """A graph that fails only when it is compiled by itself, as no user compiles it, is no failure of the backend's."""
    if not report.error:
        return report
    # A view, for example, holds only for the layout that eager gave to its input.
    verdict = Verdict(Status.UNVERIFIED, Cause.HARNESS, "it does not compile by itself; the program as a whole does")
    return replace(report, outcome=RegionOutcome.UNVERIFIED, verdict=verdict, shown=None)


def region_reports(
    regions: list[Region], compiler: Any, *, until: float, on_progress: Progress
) -> tuple[RegionReport, ...]:
    """What became of each region that the program called, with its wrong nodes.

    One of Dynamo's graphs as a whole is left out where a part of it is at fault: that says the same, and more.
    """
    # A part says which operators are wrong; the whole graph says the same with less detail.
    bad = {r.number for r in regions if not r.is_whole and _is_bad(r)}
    reported = [r for r in regions if (r.n_calls or r.error) and not (r.is_whole and r.number in bad and _is_bad(r))]
    # The backward of a graph is compiled at its first call, after later graphs: in the order of the program again.
    reported.sort(key=lambda r: (r.number, r.is_whole))
    return tuple(_report(region, compiler, until, on_progress) for region in reported)


def _is_bad(region: Region) -> bool:
    worst = region.worst
    return region.error is not None or (worst is not None and worst.verdict.status is Status.MISMATCH)


def _in_gradients_only(case: GraphCase) -> bool:
    """Whether a graph's own results are right: then nothing in it is to be looked for."""
    wrong = [j.diff.name for j in case.judged if j.verdict.status is Status.MISMATCH]
    return bool(wrong) and all(name.startswith(GRADIENT) for name in wrong)


def _report(region: Region, compiler: Any, until: float, on_progress: Progress) -> RegionReport:
    n_nodes = sum(n.op == "call_function" for n in region.graph.module.graph.nodes)
    worst = region.worst
    verdict = Verdict(Status.UNVERIFIED, explanation="never called") if worst is None else worst.verdict
    error = ""
    if region.error is not None:
        stage, raised = region.error
        outcome = RegionOutcome.COMPILE_ERROR if stage == "compile" else RegionOutcome.RUNTIME_ERROR
        error = error_text(raised)
    else:
        outcome = OUTCOME_OF[verdict.status]
    shown = None
    deviates = worst is not None and outcome is RegionOutcome.MISMATCH and not _in_gradients_only(worst)
    if region.failing is not None:
        shown = FaultyGraph(region.graph, region.failing)
    elif worst is not None and deviates:
        shown = FaultyGraph(worst.graph, worst.snapshot)
    localised = None
    try:
        if region.failing is not None:
            localised = failing_node(region, compiler, until=until, on_progress=on_progress)
        elif worst is not None and deviates:
            localised = localise(region, worst, compiler, until=until, on_progress=on_progress)
    except Exception as failure:  # the finding itself stands
        warnings.warn(f"The search in {region.name} failed: {error_text(failure)}", stacklevel=2)
    return RegionReport(
        region.name, outcome, verdict, region.compile_s, n_nodes, region.n_calls, error, localised, shown
    )


@dataclass(frozen=True, slots=True)
class CompileCall:
    """One call of torch.compile.

    Attributes:
        name: What was compiled.
        backend: How, as a reader knows it.
        checked: Its graphs.
        compile_spec: The same, to compile parts of it again.
    """

    name: str
    backend: str
    checked: CheckedBackend
    compile_spec: CompileSpec


@contextlib.contextmanager
def checked_torch_compile(max_calls: int) -> Iterator[list[CompileCall]]:
    """While inside, what torch.compile compiles is checked, and answered by eager.

    Args:
        max_calls: Calls to check of each graph; further calls only run eagerly.

    Yields:
        A list that gets one entry for each call of torch.compile.
    """
    calls: list[CompileCall] = []
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
        # `torch.compile(mode=...)` without a model returns a decorator.
        if model is None:
            given = dict(fullgraph=fullgraph, dynamic=dynamic, backend=backend, mode=mode, options=options, **others)
            return lambda function: compile_checked(function, disable=disable, **given)
        if not disable:
            compiler = torchcompile.resolve_backend(backend, mode, _options_for(backend, options), dynamic)
            # Whole graphs too: of a program that is only watched, nothing is run as a whole and judged.
            checked = CheckedBackend(compiler, max_calls, whole=True)
            named = backend if isinstance(backend, str) else getattr(backend, "__name__", "its backend")
            compile_spec = CompileSpec.from_arguments(backend, mode, options, dynamic, compiler)
            calls.append(CompileCall(_name(model), named + (f" mode={mode}" if mode else ""), checked, compile_spec))
            backend = checked
        # Mode and options are in `compiler`: torch would pass them on to the checking backend, which takes neither.
        return original(model, fullgraph=fullgraph, dynamic=dynamic, backend=backend, disable=disable, **others)

    torch.compile = compile_checked
    try:
        yield calls
    finally:
        torch.compile = original


def compile_reports(
    calls: list[CompileCall],
    breaks: Mapping[str, int],
    until: float,
    on_progress: Progress,
    *,
    allow_unverified: bool = False,
) -> list[CompileReport]:
    """One report for each call of torch.compile whose result was called.

    Args:
        calls: What `checked_torch_compile` gave.
        breaks: Graph breaks of the whole program; torch does not say in which call.
        until: `time.perf_counter()` at which the search for wrong nodes ends.
        on_progress: Called with the current work, the compilations done, and at most how many there are.
        allow_unverified: What could not be verified is no failure.
    """
    reports = []
    for one in calls:
        # torch.compile compiles at the first call: what was never called has no graph.
        if not one.checked.regions:
            continue
        regions = region_reports(one.checked.regions, one.checked.compiler, until=until, on_progress=on_progress)
        if not regions:
            continue
        # Torch counts graph breaks for the process, not for a call of torch.compile: each report has them all.
        outcomes = [r.outcome for r in regions] + ([RegionOutcome.GRAPH_BREAK] if breaks else [])
        worst = min(outcomes, key=list(RegionOutcome).index)
        verdict = min((r.verdict for r in regions), key=lambda v: (v.status is not Status.MISMATCH, v.cause is None))
        unchecked = sum(r.n_unchecked for r in one.checked.regions)
        notes = []
        if unchecked:
            notes.append(f"{unchecked} calls of its graphs only ran eagerly, since enough had been checked.")
        by_name = {r.name: r.outcome for r in regions}
        if any(r.is_whole and by_name.get(r.name) is RegionOutcome.MISMATCH for r in one.checked.regions):
            notes.append(_NO_SINGLE_GRAPH)
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
                compile_spec=one.compile_spec,
                allow_unverified=allow_unverified,
            )
        )
    return reports


def _whole(verdict: Verdict) -> Verdict:
    """The program as a whole ran with eager's results: only its graphs are judged."""
    return Verdict(verdict.status, verdict.cause, "judged graph by graph")


def _name(model: Callable[..., Any]) -> str:
    return str(getattr(model, "__qualname__", type(model).__name__))
