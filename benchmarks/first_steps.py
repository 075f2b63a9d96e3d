"""Whether an overhead budget holds from the first step on, and how long the longest steps are.

python benchmarks/first_steps.py [--workload PATTERN] [--target sim] [--flaw NAME] [--budget 1.2] [--steps 300]
    [--runs 3] [--processor-clock]

Each run is a separate process, because this measures work that is done once: imports, plans, the first comparison of an
operator. A run has plain steps, steps under the comparison, and plain steps again; processor time, step by step. All
figures are in plain steps; the last line of a workload has the medians over its runs. The median step is one that the
budget leaves alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import workloads

import shadowrun
from shadowrun import sim

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main"]

_clock = time.process_time_ns
_WARM, _MAX_SHOWN, _FIRST = 20, 5, 300
_AS_IF_ALONE = "import time; time.perf_counter_ns, time.perf_counter = time.process_time_ns, time.process_time; "
"""Where other programs want the processors, wall times say little: as on a machine of one's own, then."""


def distilbert() -> workloads.Program:
    """DistilBERT of 2 layers, d 64, 4 sequences of 32 tokens, AdamW."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(vocab_size=512, dim=64, hidden_dim=256, n_layers=2, n_heads=4, max_position_embeddings=64)
    model = DistilBertForSequenceClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens, labels = torch.randint(0, 512, (4, 32)), torch.randint(0, 2, (4,))

    def step() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return workloads.Program(step, model)


PROGRAMS: dict[str, Callable[[], workloads.Program]] = {
    "DistilBERT": distilbert,
    "micro MLP": workloads.micro_mlp,
    "tiny MLP": workloads.tiny_mlp,
    "transformer": workloads.transformer,
    "CNN": workloads.cnn,
}


def measure(name: str, target: str, flaw: str, budget: float, n_steps: int) -> dict[str, Any]:
    """One run, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sim.enable("sim")
    step = PROGRAMS[name]().step
    for _ in range(_WARM):
        step()
    plain = _steps(step, n_steps // 2)
    run = shadowrun.compare(target, budget=budget)
    with sim.flaws(flaw) if flaw else nullcontext():
        began = _clock()
        run.start()
        setup_ns = _clock() - began
        compared = _steps(step, n_steps, run.step)
        began = _clock()
        run.stop()
        stop_ns = _clock() - began
    plain += _steps(step, n_steps - n_steps // 2)
    plain_ns = statistics.fmean(plain)
    found = [r for r in run.records() if r.verdict.status is shadowrun.Status.MISMATCH]
    return {
        "plain_ms": plain_ns / 1e6,
        "mean": statistics.fmean(compared) / plain_ns,
        "mean_of_first": statistics.fmean(compared[:_FIRST]) / plain_ns,
        "median": statistics.median(compared) / statistics.median(plain),
        "first": compared[0] / plain_ns,
        "longest": [[k, ns / plain_ns] for ns, k in sorted(((ns, k) for k, ns in enumerate(compared)), reverse=True)],
        "longest_plain": max(plain) / plain_ns,
        "setup_ms": setup_ns / 1e6,
        "stop_ms": stop_ns / 1e6,
        "reported": run.info.budget["achieved"],
        "verified": [run.info.budget["n_verified"], run.info.budget["n_signatures"]],
        "mismatches": len(found),
        "causes": sorted({str(r.verdict.cause) for r in found}),
        "found_in_step": min((r.call.step + 1 for r in found), default=None),
    }


def _steps(step: Callable[[], object], n: int, end: Callable[[], object] | None = None) -> list[int]:
    times = []
    for _ in range(n):
        began = _clock()
        step()
        if end is not None:
            end()
        times.append(_clock() - began)
    return times


def main() -> None:
    """Run each workload some times, and print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workload", default="*")
    parser.add_argument("--target", default="sim")
    parser.add_argument("--flaw", default="matmul-in-bf16", help="of the simulated device; empty for none")
    parser.add_argument("--budget", type=float, default=1.2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--processor-clock", action="store_true", help="the budget counts processor time instead of wall time"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.target, options.flaw, options.budget, options.steps)))
        return
    for name in PROGRAMS:
        if fnmatchcase(name, options.workload):
            runs = [_run(name, options) for _ in range(options.runs)]
            medians = {key: statistics.median(run[key] for run in runs) for key in _SHOWN}
            print(f"{name}, medians: {_figures(medians)}", flush=True)


_SHOWN = ("plain_ms", "mean", "mean_of_first", "median", "first", "most", "longest_plain", "setup_ms", "stop_ms")


def _run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run in a process of its own, and a line for it."""
    before = _AS_IF_ALONE if options.processor_clock else ""
    code = f"{before}import runpy; runpy.run_path({__file__!r}, run_name='__main__')"
    command = [sys.executable, "-W", "ignore", "-c", code, "--one", name, "--flaw", options.flaw]
    command += ["--budget", str(options.budget), "--steps", str(options.steps), "--target", options.target]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["most"] = found["longest"][0][1]
    longest = ", ".join(f"{x:.1f} (step {k + 1})" for k, x in found["longest"][:_MAX_SHOWN])
    print(
        f"{name}: {_figures(found)}; reported {found['reported']:.2f}; longest {longest}; {found['verified'][0]} of "
        f"{found['verified'][1]} signatures, {found['mismatches']} mismatches from step {found['found_in_step']}, "
        f"{', '.join(found['causes'])}",
        flush=True,
    )
    return found


def _figures(found: dict[str, Any]) -> str:
    return (
        f"plain {found['plain_ms']:.2f} ms, mean {found['mean']:.3f}, of the first {_FIRST} "
        f"{found['mean_of_first']:.3f}, median step {found['median']:.3f}, first {found['first']:.1f}, longest "
        f"{found['most']:.1f} (of plain steps {found['longest_plain']:.1f}), start {found['setup_ms']:.0f} ms, stop "
        f"{found['stop_ms']:.0f} ms"
    )


if __name__ == "__main__":
    main()
