"""The whole program as `torch.compile` compiles it: run, judged, timed, with its peak memory.

torch has no counter for peak memory on the CPU; it is summed up from the allocations that the profiler reports.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from shadowrun.compiled import torchcompile
from shadowrun.compiled.accuracy import Errors, ReferenceRuns, judge
from shadowrun.compiled.graph import cuda_is_used
from shadowrun.compiled.outcome import error_text
from shadowrun.compiled.program import GRADIENT
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shadowrun.compiled.accuracy import JudgedResult
    from shadowrun.compiled.program import Copy, Program
    from shadowrun.operators.case import Value

__all__ = ["EagerResults", "FullProgram", "peak_on_cpu", "run_full_program"]


def peak_on_cpu(run: Callable[[], object]) -> int:
    """Most bytes that a run holds at a time beyond those that it began with; 0 where the profiler is in use already.

    Memory that does not come from torch's allocator, such as that of a runtime of a backend's own, is not in it.
    """
    if torchcompile.profiler_is_on():  # there is one for a process: a second would end it
        return 0
    # `acc_events`: without it, torch 2.11 warns that events of earlier cycles are dropped, although there is one cycle.
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with _stderr_closed():
        profiler.start()
    try:
        run()
    finally:
        with _stderr_closed():
            profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return _peak(events)


@contextlib.contextmanager
def _stderr_closed() -> Iterator[None]:
    """Some builds of torch write lines for tracing tools to file descriptor 2 whenever a profiler starts or stops."""
    try:
        saved = os.dup(2)
    except OSError:  # a program without it
        yield
        return
    try:
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _peak(events: Iterable[dict[str, Any]]) -> int:
    """The highest sum of what was allocated and freed, in the order of time."""
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]" and _on_cpu(e)]
    held = most = 0
    for _, n_bytes in sorted(changes, key=lambda change: change[0]):
        held += n_bytes
        most = max(most, held)
    return most


def _on_cpu(event: dict[str, Any]) -> bool:
    return bool(event.get("args", {}).get("Device Type") == 0)


# One recompilation is a guard that settles, one for each of several equal calls never ends.
_REPEATS: Final = 3
_PAIRS: Final = (5, 25)
_ENOUGH_S: Final = 0.2
# Both: a program of some microseconds is slower by its guards alone, and a long one by the noise.
_SLOWER: Final = 1.2
_SLOWER_S: Final = 1e-4


class EagerResults:
    """What a program computes eagerly, to judge compiled runs by.

    Args:
        program: The program.

    Attributes:
        random_results: Results of its random operators.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._names, self._values, self.random_results = program.eager()

    def judge(self, names: tuple[str, ...], actual: Any) -> tuple[Verdict, tuple[JudgedResult, ...]]:
        """The verdict on results of a compiled run, and the results that differ."""
        # By name, not by position: a gradient that is None on one side would shift all that follow.
        by_name = dict(zip(names, actual, strict=True))
        expected = dict(zip(self._names, self._values, strict=True))
        alone = {n for n in by_name.keys() ^ expected.keys() if not _is_no_gradient(n, by_name.get(n, expected.get(n)))}
        if alone:
            missing = ", ".join(sorted(alone))
            return Verdict(Status.MISMATCH, Cause.METADATA, "number of results", f"only on one side: {missing}"), ()
        # Fixed, so that the same program gets the same verdict in each check.
        generator = torch.Generator().manual_seed(0x5EED)
        both = [n for n in self._names if n in by_name]

        def named(values: Sequence[Value]) -> list[Value]:
            by_name = dict(zip(self._names, values, strict=True))
            return [by_name[n] for n in both]

        def if_all(values: Sequence[Value] | None) -> Sequence[Value] | None:
            return None if values is None or len(values) != len(self._names) else named(values)

        program = self._program
        runs = ReferenceRuns(
            lambda: if_all(program.truth(self.random_results)),
            lambda: named(program.perturbed(generator)),
            lambda zeros: if_all(program.filled(zeros)),
            mantissa=lambda: program.mantissa,
        )
        return judge(both, [by_name[n] for n in both], [expected[n] for n in both], runs)


def _is_no_gradient(name: str, value: Value) -> bool:
    """Whether it says that nothing depends on something: compiled code may return zeros there, and eager nothing."""
    return name.startswith(GRADIENT) and isinstance(value, torch.Tensor) and not value.any()


@dataclass(slots=True)
class FullProgram:
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


def run_full_program(
    program: Program, expected: EagerResults, compiler: Callable[..., Any], compiled_by: Callable[[Any, Any], Any]
) -> FullProgram:
    """Compile a program, run it, and judge and time that.

    Args:
        program: The program.
        expected: What it computes eagerly.
        compiler: Takes a graph and inputs, returns a callable.
        compiled_by: `torch.compile` of a function with a backend.
    """
    whole = FullProgram()
    made = []

    # Dynamo calls its backend once for each graph that it makes, also for one that it makes anew.
    def count(module: Any, example: Any) -> Any:
        made.append(module)
        return compiler(module, example)

    before = torchcompile.graph_breaks()
    # Both before anything runs: a later copy would have the buffers that the first run wrote.
    eager, copied = program.copy(), program.copy()
    compiled = compiled_by(copied.function, count)
    began = time.perf_counter()
    try:
        names, actual = copied.run(compiled)
    except Exception as error:
        whole.error, whole.raised = error_text(error), error
        return whole
    finally:
        whole.n_graphs = len(made)
        now = torchcompile.graph_breaks()
        whole.breaks = {r: n - before.get(r, 0) for r, n in now.items() if n > before.get(r, 0)}
    whole.compile_s = time.perf_counter() - began
    whole.verdict, judged = expected.judge(names, actual)
    whole.errors = Errors.together(judged)
    storms = 0
    # The same inputs again: a graph that is compiled anew for these has a guard that never holds.
    for _ in range(_REPEATS):
        n = len(made)
        copied.run(compiled)
        storms += len(made) > n
    whole.n_recompiled = len(made) - whole.n_graphs
    # One recompilation is a guard that settles (a dynamic size); one for each call never ends.
    whole.storm = storms == _REPEATS
    _measure_speed_and_memory(whole, eager, copied, compiled)
    return whole


def _measure_speed_and_memory(whole: FullProgram, eager: Copy, copied: Copy, compiled: Any) -> None:
    """Eager and compiled in turn: what else the machine does slows both, and the median ratio is that of neither."""
    pairs: list[tuple[float, float]] = []
    spent = 0.0
    # At least five pairs, and more while they are short: the median of a fast program needs many.
    while len(pairs) < _PAIRS[1] and (len(pairs) < _PAIRS[0] or spent < _ENOUGH_S):
        pair = eager.seconds(eager.function), copied.seconds(compiled)
        pairs.append(pair)
        spent += sum(pair)
    # The median: a busy machine makes single pairs arbitrarily slow.
    whole.speed_ratio = statistics.median(e / c for e, c in pairs)
    gap = statistics.median(c - e for e, c in pairs)
    # A program of some microseconds is slower by the guards alone: hence also an absolute limit.
    whole.slower = whole.speed_ratio * _SLOWER < 1 and gap > _SLOWER_S
    # The first call also runs the program once.
    whole.compile_s = max(0.0, whole.compile_s - min(e for e, _ in pairs))
    peaks = [_peak_of_run(copy, function) for copy, function in ((eager, eager.function), (copied, compiled))]
    whole.memory_ratio = peaks[1] / peaks[0] if peaks[0] > 0 else -1.0


def _peak_of_run(copy: Copy, function: Any) -> int:
    """Peak bytes of a run."""
    if not cuda_is_used():
        return peak_on_cpu(lambda: copy.seconds(function))
    # Kernels of before may still allocate.
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    copy.seconds(function)
    return torch.cuda.max_memory_allocated()
