"""A backend of torch.compile that compiles each graph with the user's backend, and checks each call of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from shadowrun.compiled import torchcompile
from shadowrun.compiled.accuracy import JudgedResult, judge
from shadowrun.compiled.dynamo_graph import DynamoGraphRun, EagerFailed
from shadowrun.compiled.graph import (
    Graph,
    Snapshot,
    copy_graph,
    preserved_rng,
    rng_state,
    set_rng_state,
    without_layouts,
)
from shadowrun.compiled.outcome import error_text
from shadowrun.compiled.probe_graphs import Probe, dropout_residuals, eager_values, with_random_inputs
from shadowrun.compiled.rounding import RandomRecorder, RandomResults
from shadowrun.intercept.untrusted.checked_calls import looks_of_file
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.operators.case import Value

__all__ = ["CheckedBackend", "GraphCase", "Region"]


@dataclass(frozen=True, slots=True)
class GraphCase:
    """One call of a region, as the search for the node at fault needs it.

    Attributes:
        graph: The region's graph, or that with its random numbers as further inputs.
        snapshot: What it began with.
        random_results: Results of its random operators.
        verdict: On it.
        judged: Its results that differ.
    """

    graph: Graph
    snapshot: Snapshot
    random_results: RandomResults
    verdict: Verdict
    judged: tuple[JudgedResult, ...]


@dataclass(slots=True)
class Region:
    """A graph and what its compiled form did.

    Attributes:
        name: ``graph 0 forward``.
        graph: As it was before it was compiled.
        number: Of Dynamo's graph that it comes from.
        is_whole: It is all of that, forward and backward together.
        compile_s: Seconds to compile it, all sizes of inputs together.
        n_compiled: Number of forms of inputs that it was compiled for.
        n_calls: Calls checked.
        n_unchecked: Calls that only ran eagerly, since enough had been checked.
        error: Exception of the compiler or of the compiled code, and which of both it was.
        failing: What the first call that failed began with.
        worst: The call judged worst; None before the first.
    """

    name: str
    graph: Graph
    number: int = 0
    is_whole: bool = False
    compile_s: float = 0.0
    n_compiled: int = 0
    n_calls: int = 0
    n_unchecked: int = 0
    error: tuple[str, BaseException] | None = None
    failing: Snapshot | None = None
    worst: GraphCase | None = None
    code: dict[Any, Callable[..., Any]] = field(default_factory=dict)


class CheckedBackend:
    """For `torch.compile(backend=...)`: splits into forward and backward, compiles, checks; eager's answer is given.

    What the program gets is eager's, so that one wrong region is not reported by all that follow.

    Args:
        compiler: Takes a graph and inputs, returns a callable.
        max_calls: Calls to check of each graph.
        split: Check forward and backward of plain operators, each compiled by itself.
        whole: Check Dynamo's graphs as the program has them compiled, forward and backward together.

    Attributes:
        regions: All graphs, in the order in which they were made.
        n_graphs: Graphs of Dynamo's so far.
    """

    def __init__(
        self, compiler: Callable[..., Any], max_calls: int | None = None, *, split: bool = True, whole: bool = False
    ) -> None:
        self.compiler = compiler
        self._split, self._whole = split, whole
        self._max_calls = max_calls
        self.regions: list[Region] = []
        self.n_graphs = 0

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Any:
        """Take one graph of Dynamo's."""
        number, self.n_graphs = self.n_graphs, self.n_graphs + 1
        whole = self._whole_region(number, module, inputs) if self._whole else None
        run = self._split_up(number, module, inputs) if self._split else copy_graph(module).forward
        if whole is None:
            return run
        self.regions.append(whole[0])
        return lambda *args: self._check_whole(*whole, run, args)

    def _split_up(self, number: int, module: fx.GraphModule, inputs: list[Any]) -> Any:
        def take(phase: str) -> Callable[..., Any]:
            def compile_later(module: fx.GraphModule, _inputs: Any) -> Any:
                # Compiled at its first call: here AOTAutograd has fake tensors only, and the user's backend gets real
                # inputs.
                region = Region(f"graph {number} {phase}", Graph(module), number)
                self.regions.append(region)
                return torchcompile.mark_boxed(lambda args: self.check(region, args))

            return compile_later

        # The third is for graphs without a backward, which AOTAutograd gives to a compiler of their own.
        return torchcompile.through_autograd(take("forward"), take("backward"), take("forward"))(module, inputs)

    def _whole_region(self, number: int, module: fx.GraphModule, inputs: list[Any]) -> tuple[Region, Any]:
        """A graph of Dynamo's, and what the backend makes of it here and now, as the program would have it."""
        region = Region(f"graph {number} as Dynamo made it", Graph(module), number, is_whole=True)
        began = time.perf_counter()
        code = None
        try:
            with preserved_rng(), torchcompile.own_tracing_context():
                code = self.compiler(copy_graph(module), list(inputs))
        except Exception as error:
            region.error = ("compile", error)
        region.compile_s = time.perf_counter() - began
        return region, code

    def _check_whole(self, region: Region, code: Any, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if code is None or (self._max_calls is not None and region.n_calls >= self._max_calls):
            return run(*args)
        with torchcompile.no_modes():
            # Copies before the run: the graph's own operators may write to its inputs.
            together = DynamoGraphRun(region.graph.module, args)
        out = run(*args)
        region.n_calls += 1
        try:
            verdict, judged = together.judge(code)
            if verdict.status is Status.MISMATCH:
                together, verdict, judged = self._whole_with_eager_random_numbers(together, verdict, judged)
        except EagerFailed as error:
            verdict, judged = Verdict(Status.UNVERIFIED, Cause.HARNESS, "does not run eagerly", error_text(error)), ()
        except Exception as error:
            region.error = region.error or ("runtime", error)
            return out
        if region.worst is None or _RANK[verdict.status] > _RANK[region.worst.verdict.status]:
            region.worst = GraphCase(region.graph, together.snapshot, RandomResults(), verdict, judged)
        return out

    def _whole_with_eager_random_numbers(
        self, together: DynamoGraphRun, verdict: Verdict, judged: tuple[JudgedResult, ...]
    ) -> tuple[DynamoGraphRun, Verdict, tuple[JudgedResult, ...]]:
        """Judge a random graph once more, with eager's random numbers."""
        try:
            given = together.with_eager_random_numbers()
            if given is None:
                return together, verdict, judged
            with preserved_rng(), torchcompile.no_modes(), torch.set_grad_enabled(given.train):
                if given.has_sizes:  # a backend may do something else where sizes are symbols
                    code = torch.compile(given.module(), backend=self.compiler, dynamic=True)
                else:
                    code = self.compiler(given.module(), given.inputs())
                verdict, judged = given.judge(code)
        except Exception as error:  # of a graph that shadowrun made
            reason = f"with eager's random numbers it does not compile: {error_text(error)}"
            return together, Verdict(Status.UNVERIFIED, Cause.RANDOMNESS, "its random numbers differ", reason), ()
        if verdict.status is Status.MATCH:
            verdict = _OTHER_RANDOM_NUMBERS
        return given, verdict, judged

    def check(self, region: Region, args: list[Any]) -> Any:
        """Run a region both ways on the same inputs and compare; returns what eager returned.

        Args:
            region: The region to run.
            args: Its inputs; the list is emptied.
        """
        # Boxed convention of AOTAutograd: the called function empties the list, so that inputs can be freed early.
        given, args[:] = list(args), []
        if self._max_calls is not None and region.n_calls >= self._max_calls:
            region.n_unchecked += 1
            with torch.no_grad():
                return list(fx.Interpreter(region.graph.module).run(*given, enable_io_processing=False))
        with torchcompile.no_modes():
            return self._call(region, given)

    def _call(self, region: Region, given: list[Any]) -> Any:
        plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in given]
        snapshot = Snapshot.take(plain, region.graph.written)
        inputs = snapshot.fresh()
        random_results = RandomResults()
        with torch.no_grad():
            before = rng_state()
            out = _eager(region, given, random_results)
            after = rng_state()
        region.n_calls += 1
        names, expected = region.graph.names(), region.graph.values(out, given)
        # Both runs begin with one state, and the program continues with the stream that eager left.
        set_rng_state(before)
        actual = self._compiled(region, inputs)
        if actual is None:
            # The first call that fails: later ones have inputs that the program might never have reached.
            region.failing = region.failing or snapshot
        else:
            self._judge(region, snapshot, random_results, names, actual, expected)
        set_rng_state(after)
        # Eager's results: one wrong graph is not reported again by all graphs after it.
        return list(out)

    def _compiled(self, region: Region, inputs: list[Any]) -> tuple[Value, ...] | None:
        try:
            code = self._code(region, inputs)
        except Exception as error:
            region.error = region.error or ("compile", error)
            return None
        try:
            with torch.no_grad():
                return region.graph.values(code(*inputs), inputs)
        except Exception as error:
            region.error = region.error or ("runtime", error)
            return None

    def _code(self, region: Region, inputs: list[Any]) -> Callable[..., Any]:
        # Compiled for real inputs, the code holds for one form only; with dynamic sizes the graph is called with
        # several.
        key = tuple((a.dtype, a.shape, a.stride(), a.device) if isinstance(a, torch.Tensor) else a for a in inputs)
        code = region.code.get(key)
        if code is None:
            began = time.perf_counter()
            code = region.code[key] = compile_graph(self.compiler, region.graph.module, inputs)
            region.compile_s += time.perf_counter() - began
            region.n_compiled += 1
        return code

    def _judge(
        self,
        region: Region,
        snapshot: Snapshot,
        random_results: RandomResults,
        names: tuple[str, ...],
        actual: tuple[Value, ...],
        expected: tuple[Value, ...],
    ) -> None:
        verdict, judged = judge(names, actual, expected, region.graph.runs(snapshot, random_results))
        if region.worst is None or _RANK[verdict.status] > _RANK[region.worst.verdict.status]:
            case = GraphCase(region.graph, snapshot, random_results, verdict, judged)
            if verdict.status is Status.MISMATCH and region.graph.is_random:
                case = self._with_eager_random_numbers(case)
            region.worst = case

    def _with_eager_random_numbers(self, case: GraphCase) -> GraphCase:
        """Judge a random region once more, with eager's random numbers: a compiler may generate others."""
        values = eager_values(case.graph, case.snapshot)
        probe = with_random_inputs(case.graph, case.snapshot, values)
        verdict, judged = judge_probe(self.compiler, probe)
        if verdict.status is Status.MATCH:
            # Its own mask is random, but its scale on what it kept can be wrong.
            residuals = dropout_residuals(case.graph, case.snapshot, values)
            if residuals is not None:
                of_residuals, wrong = judge_probe(self.compiler, residuals)
                if of_residuals.status is Status.MISMATCH:
                    return GraphCase(residuals.graph, residuals.snapshot, RandomResults(), of_residuals, wrong)
            verdict = _OTHER_RANDOM_NUMBERS
        return GraphCase(probe.graph, probe.snapshot, RandomResults(), verdict, judged)


def compile_graph(compiler: Callable[..., Any], module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a copy of a graph for inputs like these; the random state stays as it is."""
    with preserved_rng(), torch.no_grad():
        # A copy: compilers change the graph in place, and it is needed for eager and float64 runs.
        code: Callable[..., Any] = compiler(without_layouts(copy_graph(module)), list(inputs))

    def run(*inputs: Any) -> Any:
        with looks_of_file(compiled=True):
            return code(*inputs)

    return run


def judge_probe(compiler: Callable[..., Any], probe: Probe) -> tuple[Verdict, tuple[JudgedResult, ...]]:
    """Compile a probe and compare it with eager."""
    random_results = RandomResults()
    _, expected = probe.graph.eager(probe.snapshot.fresh(), random_results)
    code = compile_graph(compiler, probe.graph.module, probe.snapshot.fresh())
    # Fresh ones again: compiling may have run the graph, and written to the inputs that it was given.
    inputs = probe.snapshot.fresh()
    with torch.no_grad():
        actual = probe.graph.values(code(*inputs), inputs)
    return judge(probe.origin, actual, expected, probe.graph.runs(probe.snapshot, random_results))


def _eager(region: Region, inputs: list[Any], random_results: RandomResults) -> Any:
    with RandomRecorder(random_results):
        return fx.Interpreter(region.graph.module).run(*inputs, enable_io_processing=False)


_OTHER_RANDOM_NUMBERS = Verdict(
    Status.UNVERIFIED, Cause.RANDOMNESS, "its random numbers differ", "right with eager's random numbers"
)
_RANK = {Status.MATCH: 0, Status.UNVERIFIED: 1, Status.MISMATCH: 2}
