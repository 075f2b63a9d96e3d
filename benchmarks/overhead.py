"""What leaving shadowrun on costs: ratio of a compared training step to the plain step.

Plain and compared steps alternate in one process (A B A B …), so that a machine whose speed drifts slows both;
the figure is the median of the ratios of neighbours, on thread CPU time and on wall time. CPU against CPU, one
thread, all outputs equal, records stored, module and source line attributed.

    python benchmarks/overhead.py [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

import shadowrun

Step = Callable[[], object]


def _training_step(optimizer: torch.optim.Optimizer, loss_of: Callable[[], torch.Tensor]) -> Step:
    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def micro_mlp() -> Step:
    return _mlp(16, 32, 4, batch=8)


def tiny_mlp() -> Step:
    return _mlp(64, 128, 10, batch=32)


def _mlp(n_in: int, hidden: int, n_out: int, batch: int) -> Step:
    model = nn.Sequential(
        nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, n_out)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(batch, n_in), torch.randint(0, n_out, (batch,))

    return _training_step(optimizer, lambda: F.cross_entropy(model(x), y))


def transformer() -> Step:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
    model = nn.ModuleDict(
        {"embed": nn.Embedding(256, 128), "encoder": nn.TransformerEncoder(layer, 2), "head": nn.Linear(128, 256)}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (8, 64))

    def loss_of() -> torch.Tensor:
        logits = model["head"](model["encoder"](model["embed"](tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return _training_step(optimizer, loss_of)


def cnn() -> Step:
    def block(i: int, o: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))

    model = nn.Sequential(block(3, 32), block(32, 64), block(64, 64), nn.Flatten(), nn.Linear(64 * 16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))

    return _training_step(optimizer, lambda: F.cross_entropy(model(x), y))


class Empty(TorchDispatchMode):
    """The floor of any tool: a mode that does nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def measure(step: Step, rounds: int, inner: int) -> dict[str, dict[str, float]]:
    """Median ratio to the plain step, for each setting, on CPU time and on wall time."""
    settings: dict[str, Callable[[], object]] = {
        "empty mode": Empty,
        "record only": lambda: shadowrun.compare("cpu", ops=["none::*"]),
        "isolated": lambda: shadowrun.compare("cpu"),
        "drift": lambda: shadowrun.compare("cpu", drift=True),
    }
    ratios: dict[str, dict[str, float]] = {}
    for name, make in settings.items():
        mode = make()
        with mode:
            step()
        pairs = []
        for _ in range(rounds):
            plain = _time(step, inner)
            with mode:
                compared = _time(step, inner)
            pairs.append((compared[0] / plain[0], compared[1] / plain[1], plain[1] / inner * 1e3))
        ratios[name] = {
            "cpu": statistics.median(p[0] for p in pairs),
            "wall": statistics.median(p[1] for p in pairs),
            "plain_ms": statistics.median(p[2] for p in pairs),
        }
        if name == "isolated":
            counts = mode.counts()
            wrong = {
                str(s): n
                for s, n in counts.items()
                if n and s not in (shadowrun.Status.MATCH, shadowrun.Status.SKIPPED)
            }
            if wrong:
                sys.exit(f"not all outputs were equal: {wrong}")
    return ratios


def _time(step: Step, inner: int) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(inner):
        step()
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    models = {
        "micro MLP 16-32-32-4": (micro_mlp, 10),
        "tiny MLP 64-128-128-10": (tiny_mlp, 5),
        "transformer": (transformer, 1),
        "CNN": (cnn, 1),
    }
    found = {name: measure(make(), options.rounds, inner) for name, (make, inner) in models.items()}
    settings = list(next(iter(found.values())))
    print("| model | plain step, ms | " + " | ".join(settings) + " |")
    print("|---|---|" + "---|" * len(settings))
    for name, row in found.items():
        cells = [f"{row[s]['cpu']:.2f} ({row[s]['wall']:.2f})" for s in settings]
        print(f"| {name} | {row[settings[0]]['plain_ms']:.1f} | " + " | ".join(cells) + " |")
    print("\nRatio to the plain step on CPU time (on wall time in brackets), median of", options.rounds, "pairs.")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
