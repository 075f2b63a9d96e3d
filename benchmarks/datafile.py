"""The cost of a data file: microseconds and bytes for each call, time of the reports, and time to combine ranks.

The calls are synthetic, but the store's own writer writes them: a training loop of 600 source lines, one call in fifty
with rounding differences (--all-differ: every call, as on another kind of device), a few with mismatches, each with
evidence. The figures of differences are those of f32 tensors: all are 32-bit floats except the root mean square and,
for every second one, two distances from the oracle. Each measurement runs in a separate process, which gives its peak
memory. `s` is wall time; `cpu_s` and `us_of_call` are processor time, as on an idle machine.

    python benchmarks/datafile.py [--calls 1000000] [--ranks 64] [--calls-of-rank 50000] [--all-differ] [--real]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowrun.run import load
from shadowrun.store import DataFile
from shadowrun.types import Cause, Phase, RunInfo, Status, TensorDiff, TensorMeta, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

OPS = 60
PLACES = 600
CALLS_OF_STEP = 1000
ROUNDING_EVERY = 50
MISMATCH_EVERY = 5000
MEMORY_EVERY = 100_000
TARGETS = {"us_of_call": 2.0, "bytes_of_call": 40.0, "report_s": 10.0, "combine_s": 60.0}
BYTES_IF_ALL_DIFFER = 100.0


def _figures(n: int) -> list[tuple[float, ...]]:
    """Figures of differences: max_abs, max_rel, rmse, two values, two distances from the oracle."""
    draw = random.Random(0)
    found = []
    for k in range(n):
        actual = array("f", [draw.gauss(0, 1)])[0]
        max_rel = array("f", [draw.uniform(0.5, 1) * 2.0**-22])[0]
        expected = array("f", [actual * (1 + max_rel)])[0]
        excesses = (10 * draw.random(), 10 * draw.random()) if k % 2 else (-1.0, -1.0)
        found.append((abs(actual - expected), max_rel, draw.random() * 2.0**-23, actual, expected, *excesses))
    return found


FIGURES = _figures(9973)


def record(path: Path, n: int, rank: int = 0, world: int = 1, rounding_every: int = ROUNDING_EVERY) -> dict[str, Any]:
    """Record `n` made-up calls, of which one in `rounding_every` differs."""
    data = DataFile.create(path, RunInfo("npu", "cpu", rank=rank, world_size=world, started="2026-01-01T00:00:00"))
    contexts = [
        data.context_id(
            f"aten::op{place % OPS}", f"f32[{place}, 64], f32[64], 1.0", ("f32",), f"[{place}, 64] [64]",
            f"Net.layers.{place // 10}.attn", Phase.FORWARD, f"model.py:{place} in forward", "npu:0",
        )
        for place in range(PLACES)
    ]  # fmt: skip
    match = data.verdict_id(Verdict(Status.MATCH))
    memory: list[float] = []
    values_us = _values_us(contexts, match, rounding_every)
    started, started_cpu = time.perf_counter(), time.process_time()
    _fill(data, n, contexts, match, rounding_every, memory)
    data.close()
    cpu, wall = time.process_time() - started_cpu, time.perf_counter() - started
    if data.failure:
        sys.exit(data.failure)
    size = path.stat().st_size
    return {
        "s": wall,
        "us_of_call": 1e6 * cpu / n - values_us,
        "us_of_values": values_us,
        "bytes_of_call": size / n,
        "mb": size / 1e6,
        "resident_mb": memory,
    }


def _fill(
    data: DataFile | _Nowhere, n: int, contexts: list[int], match: int, rounding_every: int, memory: list[float]
) -> None:
    every = max(MEMORY_EVERY, n // 10)
    for seq in range(n):
        verdict = match if seq % rounding_every else _differ(data, seq)
        context = contexts[seq % PLACES]
        data.add((seq, seq // CALLS_OF_STEP, context, verdict, 3.1 + seq % 97 / 7, 4.3 + seq % 89 / 9, -1.0, -1.0))
        if seq % CALLS_OF_STEP == 0:
            data.add_step(seq // CALLS_OF_STEP, seq / 1e5, 0.01)
        if seq % every == every // 2:
            memory.append(_resident_mb())


class _Nowhere:
    """Takes values and does nothing with them."""

    def add_diffs(self, seq: int, diffs: object) -> None:
        """As `DataFile`."""

    def add(self, row: object) -> None:
        """As `DataFile`."""

    def add_step(self, step: int, started_s: float, wall_s: float) -> None:
        """As `DataFile`."""

    def verdict_id(self, verdict: object) -> int:  # noqa: ARG002
        return 0


def _values_us(contexts: list[int], match: int, rounding_every: int, n: int = 100_000) -> float:
    """Time in which made-up calls are made up, which is none of the store's."""
    started = time.process_time()
    _fill(_Nowhere(), n, contexts, match, rounding_every, [])
    return 1e6 * (time.process_time() - started) / n


def _differ(data: DataFile | _Nowhere, seq: int) -> int:
    meta = TensorMeta("f32", (seq % PLACES, 64), (64, 1), "npu:0")
    wrong = seq % MISMATCH_EVERY == 0
    max_abs, max_rel, rmse, actual, expected, excess, excess_expected = FIGURES[seq % len(FIGURES)]
    diff = TensorDiff(
        "output 0", meta, meta, 640, 300 + seq % 300, 3 * wrong, max_abs, max_rel, rmse, 3, 21, worst_index=(1, 2),
        worst_actual=actual, worst_expected=expected, excess_actual=excess, excess_expected=excess_expected,
    )  # fmt: skip
    data.add_diffs(seq, [diff])
    if wrong:
        evidence = f"{seq} times the operator's own rounding"
        return data.verdict_id(Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "wrong", evidence, 0.9))
    return data.verdict_id(Verdict(Status.MATCH, Cause.ROUNDING, "", f"at most {seq % 7} ULP"))


def record_real(path: Path, n: int) -> dict[str, Any]:
    """The whole of it: operators on one element, replayed, compared and recorded."""
    import torch

    import shadowrun

    x = torch.ones(1)
    with shadowrun.compare("cpu[threads=1]", file=path) as run:
        for _ in range(1000):
            x + x
        memory = [_resident_mb()]
        started = time.process_time()
        for i in range(n):
            x + x
            if i % MEMORY_EVERY == MEMORY_EVERY - 1:
                memory.append(_resident_mb())
        run.counts()
        cpu = time.process_time() - started
    size = path.stat().st_size
    return {"us_of_call": 1e6 * cpu / n, "bytes_of_call": size / n, "resident_mb": memory}


def report(path: Path, form: str, out: Path) -> dict[str, Any]:
    """Time of one report, from opening the file on."""
    started = time.perf_counter()
    load(path).write(out, format=form)
    return {"s": time.perf_counter() - started, "mb": out.stat().st_size / 1e6}


def combine(paths: list[Path], out: Path) -> dict[str, Any]:
    """Time of combining files of ranks."""
    import shadowrun

    started = time.perf_counter()
    shadowrun.combine(paths, out)
    return {"s": time.perf_counter() - started, "mb": out.stat().st_size / 1e6}


def _resident_mb() -> float:
    """Memory held now, where the system reports it; else the peak so far."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return round(pages * resource.getpagesize() / 1e6, 1)
    except OSError:
        return _peak_mb()


def _peak_mb() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6, 1)


def _measured(function: Callable[..., dict[str, Any]], args: tuple[Any, ...], pipe: Any) -> None:
    before, started = _peak_mb(), time.process_time()
    found = function(*args)
    pipe.send({**found, "cpu_s": time.process_time() - started, "peak_mb": _peak_mb(), "peak_mb_before": before})


def alone(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Run a measurement in its own process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measured, args=(function, args, theirs))
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = ours.recv()
    except EOFError:
        sys.exit(f"{function.__name__} failed")
    process.join()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--calls-of-rank", type=int, default=50_000)
    parser.add_argument("--all-differ", action="store_true", help="every call differs by rounding")
    parser.add_argument("--real", action="store_true", help="also record that many calls of real operators")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    found: dict[str, Any] = {}

    def measure(name: str, function: Callable[..., dict[str, Any]], *values: Any) -> dict[str, Any]:
        found[name] = result = alone(function, *values)
        print(f"{name:22}", *(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in result.items()))
        sys.stdout.flush()
        return result

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = folder / "one.shadowrun"
        written = measure("record", record, one, args.calls, 0, 1, 1 if args.all_differ else ROUNDING_EVERY)
        reports = [
            measure(f"report {form}", report, one, form, folder / f"one.{form}") for form in ("txt", "html", "json")
        ]
        good = [
            written["us_of_call"] <= TARGETS["us_of_call"],
            written["bytes_of_call"] <= (BYTES_IF_ALL_DIFFER if args.all_differ else TARGETS["bytes_of_call"]),
            *(result["cpu_s"] < TARGETS["report_s"] for result in reports),
        ]
        one.unlink()
        if args.real:
            measure("record real", record_real, one, args.calls)
        if args.ranks:
            paths = [folder / f"run.{rank}.shadowrun" for rank in range(args.ranks)]
            for rank, path in enumerate(paths):
                record(path, args.calls_of_rank, rank, args.ranks)
            together = folder / "run.shadowrun"
            good.append(measure("combine", combine, paths, together)["cpu_s"] < TARGETS["combine_s"])
            for form in ("txt", "html", "json"):
                measure(f"combined {form}", report, together, form, folder / f"all.{form}")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    print("targets met" if all(good) else "targets MISSED")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
