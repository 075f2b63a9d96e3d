"""The cost of a call in a worker process: ``python benchmarks/worker.py``.

For each size, an operator runs alternately here and in the worker (A B A B), with the tensor in shared memory and with
the tensor sent through the socket. The output has medians: microseconds for a call, the ratio to the call here, and the
data rate (there and back). ``--train`` measures a training step that is compared with such a platform.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import torch

import shadowrun
from shadowrun.platforms.spec import parse
from shadowrun.platforms.worker import client
from shadowrun.platforms.worker.channel import Channel
from shadowrun.platforms.worker.client import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {"1 element": 1, "1 MiB": 1 << 18, "64 MiB": 1 << 24}


class Socket(Channel):
    """The way without shared memory, as on macOS."""

    def __init__(self, connection: object) -> None:
        super().__init__(connection, shared=False)  # type: ignore[arg-type]


def measured(runs: dict[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, float]:
    """Median seconds of one call, for each of several ways that take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for k in range(rounds + 1):
        for name, run in runs.items():
            for _ in range(calls):
                begin = time.perf_counter()
                run()
                if k:  # the first round warms up
                    seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(s) for name, s in seconds.items()}


def calls(spec: str, op: str, rounds: int) -> None:
    """One operator on tensors of several sizes."""
    shared = Worker(parse(spec))
    shared.start()
    client.Channel = Socket  # type: ignore[misc, assignment]
    through_socket = Worker(parse(spec))
    through_socket.start()
    client.Channel = Channel  # type: ignore[misc]
    function = getattr(torch.ops.aten, op).default
    print(f"{op}, {spec}, {torch.get_num_threads()} threads here")
    for name, n in SIZES.items():
        x = torch.rand(n)

        def there(worker: Worker, x: torch.Tensor = x) -> object:
            return worker.call(f"aten::{op}", (x,), {}, (1, (0,)), [])

        runs: dict[str, Callable[[], object]] = {
            "here": lambda x=x: function(x),  # type: ignore[misc]
            "shared": lambda there=there: there(shared),  # type: ignore[misc]
            "socket": lambda there=there: there(through_socket),  # type: ignore[misc]
        }
        found = measured(runs, rounds, max(3, 200 if n == 1 else 20 if n < 1 << 20 else 3))
        for way in ("here", "shared", "socket"):
            s = found[way]
            rate = "" if way == "here" or n == 1 else f"  {8 * n / s / 2**30:6.2f} GiB/s"
            print(f"  {name:>9} {way:>7}: {1e6 * s:10.1f} µs  x {s / found['here']:7.1f}{rate}")
    shared.stop()
    through_socket.stop()


def train(spec: str, rounds: int) -> None:
    """A training step of a small network: plain, and compared with the platform."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.LayerNorm(512), torch.nn.Linear(512, 10))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(128, 256), torch.randint(10, (128,))

    def step() -> None:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    run = shadowrun.compare(spec)

    def compared() -> None:
        step()
        run.step()

    plain = measured({"plain": step}, rounds, 5)["plain"]
    with run:
        seconds = measured({"compared": compared}, rounds, 5)["compared"]
    again = measured({"plain": step}, rounds, 5)["plain"]
    n = sum(run.counts().values()) / (5 * (rounds + 1))
    plain = statistics.median([plain, again])
    print(f"training step: {1e3 * plain:.2f} ms plain, {1e3 * seconds:.2f} ms compared, x {seconds / plain:.1f}")
    print(f"  {n:.0f} calls in a step, {1e6 * (seconds - plain) / n:.0f} µs for each")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="cpu[isa=avx2]", help="platform (default: %(default)s)")
    parser.add_argument("--op", default="neg", help="operator of one tensor (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of each way")
    parser.add_argument("--train", action="store_true", help="also measure a training step")
    parser.add_argument("--threads", type=int, help="threads here and there")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    calls(options.spec, options.op, options.rounds)
    if options.train:
        train(options.spec, options.rounds)


if __name__ == "__main__":
    main()
