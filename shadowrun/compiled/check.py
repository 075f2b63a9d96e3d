"""`compile_check()`: a function or model, compiled, against itself."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from shadowrun.compiled import torchcompile
from shadowrun.compiled.backend import Case, CheckedBackend, Region
from shadowrun.compiled.failing import failing_node
from shadowrun.compiled.how import How
from shadowrun.compiled.ladder import OUTCOME_OF, climb, first_line
from shadowrun.compiled.localise import localise
from shadowrun.compiled.outcome import CompileReport, Outcome, RegionReport, Stage
from shadowrun.compiled.program import GRADIENT, Program
from shadowrun.compiled.repro import Shown
from shadowrun.compiled.snapshot import undisturbed_draws
from shadowrun.compiled.whole import Expected, Whole, run_whole
from shadowrun.errors import UsageError
from shadowrun.types import Cause, Status, Verdict

__all__ = ["TOGETHER", "compile_check", "options_for", "region_reports"]

TOGETHER = (
    "No graph of plain operators deviates by itself: look at what the backend does to Dynamo's own graphs, or to "
    "forward and backward together."
)
_NO_CACHE = {"fx_graph_cache": False}
_SAME_DRAWS = {"fallback_random": True}
Tell = Callable[[str, int, int], None]


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
    allow_unverified: bool = False,
    time_limit_s: float = 600.0,
    tell: Tell | None = None,
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
        allow_unverified: `report.ok` is True also where something could not be verified.
        time_limit_s: Seconds after which nothing further is compiled, and what is known is the answer.
        tell: Told what is being done, how many compilations of it are done, and of how many.
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
    chosen = options_for(backend, options)
    until = time.perf_counter() + time_limit_s
    with undisturbed_draws(), torchcompile.no_modes():
        check = _Check(
            Program(function, inputs, kwargs, train=train), backend, mode, chosen, options, dynamic, fullgraph
        )
        report = check.run(until, ladder=ladder, tell=tell or (lambda _what, _done, _of: None))
    return replace(report, allow_unverified=allow_unverified)


def options_for(backend: Any, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The user's options, and those without which a comparison means nothing."""
    return {**(_SAME_DRAWS | _NO_CACHE if backend == "inductor" else {}), **(options or {})}


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
        self._compiler = torchcompile.compiler(backend, mode, options, dynamic)
        self._how = How.of(backend, mode, given, dynamic, self._compiler)
        try:
            self._expected = Expected(program)
        except Exception as error:
            raise UsageError(
                f"{program.name} fails without compiling too: {first_line(error)}", slug="fails-in-eager"
            ) from error

    def run(self, until: float, *, ladder: bool, tell: Tell) -> CompileReport:
        steps = _Steps()
        tell("the whole program", 0, 1)
        with steps("the whole program"), torchcompile.forgotten():
            whole = run_whole(self._program, self._expected, self._compiler, self._compile)
        tell("each graph", 0, 1)
        checked = CheckedBackend(self._compiler)
        notes = []
        with steps("each graph"), torchcompile.forgotten():
            error = self._regions(checked)
            if error and not whole.error:
                notes.append(f"The graphs could not be checked one by one: {error}")
        with steps("search"):
            reports = region_reports(checked.regions, self._compiler, until=until, tell=tell)
            alone = any(r.outcome is Outcome.MISMATCH for r in reports)
            if whole.verdict.status is Status.MISMATCH and not alone:
                reports += self._as_dynamo_made_them(until, tell)
        if not whole.error:
            reports = tuple(map(_not_alone, reports))
        if whole.verdict.status is Status.MISMATCH and not alone:
            shown = any(r.outcome is Outcome.MISMATCH for r in reports)
            if self._expected.draws.kept and self._backend != "eager" and not shown:
                whole.verdict = Verdict(
                    Status.UNVERIFIED, Cause.RANDOMNESS, "draws in another order", whole.verdict.evidence
                )
            else:
                notes.append(TOGETHER)
        outcome = self._outcome(whole, reports)
        stages: tuple[Stage, ...] = ()
        wrong = outcome in (Outcome.COMPILE_ERROR, Outcome.RUNTIME_ERROR, Outcome.MISMATCH)
        if ladder and wrong:
            with steps("stages"):
                stages = tuple(self._ladder(until, tell))
        if not whole.n_graphs and not whole.error:
            notes.append("Dynamo made no graph: all of it ran eagerly.")
        if time.perf_counter() > until:
            notes.append("Out of time: this is what is known so far.")
        described = (
            self._backend if isinstance(self._backend, str) else getattr(self._backend, "__name__", "its backend")
        )
        return CompileReport(
            self._program.name,
            described + (f" mode={self._mode}" if self._mode else ""),
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
        ours = self._program.copy()
        try:
            ours.run(self._compile(ours.function, checked))
        except Exception as error:
            return first_line(error)
        return ""

    def _as_dynamo_made_them(self, until: float, tell: Tell) -> tuple[RegionReport, ...]:
        """The graphs that a backend gets which works on Dynamo's own, forward and backward together."""
        checked = CheckedBackend(self._compiler, split=False, whole=True)
        with torchcompile.forgotten():
            if self._regions(checked):
                return ()
        return region_reports(checked.regions, self._compiler, until=until, tell=tell)

    def _ladder(self, until: float, tell: Tell) -> Any:
        def run(compiler: Any) -> Verdict:
            ours = self._program.copy()
            with torchcompile.forgotten():
                names, actual = ours.run(self._compile(ours.function, compiler))
                return self._expected.judge(names, actual)[0]

        draws = bool(self._expected.draws.kept)
        in_time = lambda: time.perf_counter() < until  # noqa: E731
        stages = climb(run, self._backend, self._mode, self._options, draws=draws, until=in_time)
        for k, stage in enumerate(stages):
            tell("stages", k + 1, k + 2)
            yield stage

    def _compile(self, function: Any, backend: Any) -> Any:
        return torch.compile(function, backend=backend, dynamic=self._dynamic, fullgraph=self._fullgraph)

    def _outcome(self, whole: Whole, reports: tuple[RegionReport, ...]) -> Outcome:
        of_regions = [r.outcome for r in reports]
        if whole.error:
            # A region that fails to compile fails while the program runs for the first time.
            return Outcome.RUNTIME_ERROR if Outcome.RUNTIME_ERROR in of_regions else Outcome.COMPILE_ERROR
        # What is known of the program as a whole holds where only our own way to compile its parts failed.
        told = [r for r in reports if whole.verdict.status is not Status.MATCH or r.verdict.cause is not Cause.HARNESS]
        found = [OUTCOME_OF[whole.verdict.status], *(r.outcome for r in told)]
        if whole.storm:
            found.append(Outcome.RECOMPILE_STORM)
        if whole.breaks:
            found.append(Outcome.GRAPH_BREAK)
        if whole.slower:
            found.append(Outcome.SLOWER)
        return min(found, key=list(Outcome).index)


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
    verdict = Verdict(Status.UNVERIFIED, Cause.HARNESS, "it does not compile by itself; the program as a whole does")
    return replace(report, outcome=Outcome.UNVERIFIED, verdict=verdict, shown=None)


def region_reports(
    regions: list[Region], compiler: Any, *, until: float, tell: Tell, search: bool = True
) -> tuple[RegionReport, ...]:
    """What became of each region that the program called, with its wrong nodes.

    One of Dynamo's graphs as a whole is left out where a part of it is at fault: that says the same, and more.
    """
    bad = {r.number for r in regions if not r.is_whole and _is_bad(r)}
    told = [r for r in regions if (r.n_calls or r.error) and not (r.is_whole and r.number in bad and _is_bad(r))]
    told.sort(key=lambda r: (r.number, r.is_whole))
    return tuple(_report(region, compiler, until, tell, search=search) for region in told)


def _is_bad(region: Region) -> bool:
    worst = region.worst
    return region.error is not None or (worst is not None and worst.verdict.status is Status.MISMATCH)


def _in_gradients_only(case: Case) -> bool:
    """Whether a graph's own results are right: then nothing in it is to be looked for."""
    wrong = [j.diff.name for j in case.judged if j.verdict.status is Status.MISMATCH]
    return bool(wrong) and all(name.startswith(GRADIENT) for name in wrong)


def _report(region: Region, compiler: Any, until: float, tell: Tell, *, search: bool) -> RegionReport:
    n_nodes = sum(n.op == "call_function" for n in region.graph.module.graph.nodes)
    worst = region.worst
    verdict = Verdict(Status.UNVERIFIED, explanation="never called") if worst is None else worst.verdict
    error = ""
    if region.error is not None:
        stage, raised = region.error
        outcome = Outcome.COMPILE_ERROR if stage == "compile" else Outcome.RUNTIME_ERROR
        error = first_line(raised)
    else:
        outcome = OUTCOME_OF[verdict.status]
    shown = None
    deviates = worst is not None and outcome is Outcome.MISMATCH and not _in_gradients_only(worst)
    if region.failing is not None:
        shown = Shown(region.graph, region.failing)
    elif worst is not None and deviates:
        shown = Shown(worst.graph, worst.snapshot)
    localised = None
    if search:
        try:
            if region.failing is not None:
                localised = failing_node(region, compiler, until=until, tell=tell)
            elif worst is not None and deviates:
                localised = localise(region, worst, compiler, until=until, tell=tell)
        except Exception as failure:  # the finding itself stands
            warnings.warn(f"The search in {region.name} failed: {first_line(failure)}", stacklevel=2)
    return RegionReport(
        region.name, outcome, verdict, region.compile_s, n_nodes, region.n_calls, error, localised, shown
    )
