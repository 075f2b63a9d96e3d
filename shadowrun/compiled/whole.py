"""The program as a whole, as `torch.compile` compiles it: run, judged, timed."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.compiled import torchcompile
from shadowrun.compiled.judging import Errors, Runs, judge
from shadowrun.compiled.ladder import first_line
from shadowrun.compiled.memory import peak_on_cpu
from shadowrun.compiled.program import GRADIENT
from shadowrun.compiled.snapshot import cuda_is_used
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shadowrun.compiled.judging import Judged
    from shadowrun.compiled.program import Copy, Program
    from shadowrun.replay.case import Value

__all__ = ["Expected", "Whole", "run_whole"]

_REPEATS: Final = 3
_PAIRS: Final = (5, 25)
_ENOUGH_S: Final = 0.2
_SLOWER: Final = 1.2
_SLOWER_S: Final = 1e-4


class Expected:
    """What a program computes eagerly, to judge compiled runs by.

    Args:
        program: It.

    Attributes:
        draws: What it drew.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._names, self._values, self.draws = program.eager()

    def judge(self, names: tuple[str, ...], actual: Any) -> tuple[Verdict, tuple[Judged, ...]]:
        """The verdict on results of a compiled run, and the results that differ."""
        ours, theirs = dict(zip(names, actual, strict=True)), dict(zip(self._names, self._values, strict=True))
        alone = {n for n in ours.keys() ^ theirs.keys() if not _is_no_gradient(n, ours.get(n, theirs.get(n)))}
        if alone:
            other = ", ".join(sorted(alone))
            return Verdict(Status.MISMATCH, Cause.METADATA, "number of results", f"only on one side: {other}"), ()
        generator = torch.Generator().manual_seed(0x5EED)
        both = [n for n in self._names if n in ours]

        def named(values: Sequence[Value]) -> list[Value]:
            found = dict(zip(self._names, values, strict=True))
            return [found[n] for n in both]

        def truth() -> Sequence[Value] | None:
            values = self._program.truth(self.draws)
            return None if values is None or len(values) != len(self._names) else named(values)

        program = self._program
        runs = Runs(truth, lambda: named(program.moved(generator)), mantissa=lambda: program.mantissa)
        return judge(both, [ours[n] for n in both], [theirs[n] for n in both], runs)


def _is_no_gradient(name: str, value: Value) -> bool:
    """Whether it says that nothing depends on something: compiled code may return zeros there, and eager nothing."""
    return name.startswith(GRADIENT) and isinstance(value, torch.Tensor) and not value.any()


@dataclass(slots=True)
class Whole:
    """What is known of the program as a whole.

    Attributes:
        verdict: On its results.
        errors: How far those that differ are from the float64 results.
        raised: What it raised.
        error: Class and first line of that.
        breaks: Reasons of graph breaks, and how often.
        n_graphs: Graphs of Dynamo's.
        n_recompiled: Graphs made anew for calls with the same inputs.
        storm: Each such call made one.
        slower: By a fifth or more.
        compile_s: Seconds of the first call beyond those of an eager one.
        speed_ratio: Time of an eager call over that of a compiled one; -1: not measured.
        memory_ratio: Peak memory of a compiled call over that of an eager one; -1: not measured.
    """

    verdict: Verdict = field(default_factory=lambda: Verdict(Status.UNVERIFIED, explanation="it did not run"))
    errors: Errors | None = None
    raised: BaseException | None = None
    error: str = ""
    breaks: dict[str, int] = field(default_factory=dict)
    n_graphs: int = 0
    n_recompiled: int = 0
    storm: bool = False
    slower: bool = False
    compile_s: float = 0.0
    speed_ratio: float = -1.0
    memory_ratio: float = -1.0


def run_whole(
    program: Program, expected: Expected, compiler: Callable[..., Any], compiled_by: Callable[[Any, Any], Any]
) -> Whole:
    """Compile a program, run it, and judge and time that.

    Args:
        program: It.
        expected: What it computes eagerly.
        compiler: Takes a graph and inputs, returns a callable.
        compiled_by: `torch.compile` of a function with a backend.
    """
    whole = Whole()
    made = []

    def count(module: Any, example: Any) -> Any:
        made.append(module)
        return compiler(module, example)

    before = torchcompile.graph_breaks()
    eager, ours = program.copy(), program.copy()
    compiled = compiled_by(ours.function, count)
    began = time.perf_counter()
    try:
        names, actual = ours.run(compiled)
    except Exception as error:
        whole.error, whole.raised = first_line(error), error
        return whole
    finally:
        whole.n_graphs = len(made)
        now = torchcompile.graph_breaks()
        whole.breaks = {r: n - before.get(r, 0) for r, n in now.items() if n > before.get(r, 0)}
    whole.compile_s = time.perf_counter() - began
    whole.verdict, judged = expected.judge(names, actual)
    whole.errors = Errors.together(judged)
    storms = 0
    for _ in range(_REPEATS):
        n = len(made)
        ours.run(compiled)
        storms += len(made) > n
    whole.n_recompiled = len(made) - whole.n_graphs
    whole.storm = storms == _REPEATS
    _measure(whole, eager, ours, compiled)
    return whole


def _measure(whole: Whole, eager: Copy, ours: Copy, compiled: Any) -> None:
    """Eager and compiled in turn: what else the machine does slows both, and the median ratio is that of neither."""
    pairs: list[tuple[float, float]] = []
    spent = 0.0
    while len(pairs) < _PAIRS[1] and (len(pairs) < _PAIRS[0] or spent < _ENOUGH_S):
        pair = eager.seconds(eager.function), ours.seconds(compiled)
        pairs.append(pair)
        spent += sum(pair)
    whole.speed_ratio = statistics.median(e / c for e, c in pairs)
    gap = statistics.median(c - e for e, c in pairs)
    whole.slower = whole.speed_ratio * _SLOWER < 1 and gap > _SLOWER_S
    whole.compile_s = max(0.0, whole.compile_s - min(e for e, _ in pairs))
    peaks = [_peak(copy, function) for copy, function in ((eager, eager.function), (ours, compiled))]
    whole.memory_ratio = peaks[1] / peaks[0] if peaks[0] > 0 else -1.0


def _peak(copy: Copy, function: Any) -> int:
    """Peak bytes of a run."""
    if not cuda_is_used():
        return peak_on_cpu(lambda: copy.seconds(function))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    copy.seconds(function)
    return torch.cuda.max_memory_allocated()
