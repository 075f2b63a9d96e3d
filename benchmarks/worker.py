"""The cost of a call in a worker process: ``python benchmarks/worker.py``.

For each size, an operator runs alternately here and in the worker (A B A B): asked for by itself with the tensor in
shared memory and with the tensor sent through the socket, and as one of several calls that wait in a ring (with its
result, which the worker compares; the operator's own run here is not counted). The output has medians: microseconds for
a call, the ratio to the call here, and the data rate in each direction (there and back in the time that the operator
itself did not take). ``--train`` measures a
training step of the transformer of ``workloads.py`` that is compared with such a platform, after its first steps, in
which each line is judged in full: wall time, and processor time of this process; and what its operators take in the
worker, below which no comparison can be.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import torch
import workloads

import shadowrun
from shadowrun.platforms.spec import parse
from shadowrun.platforms.worker import client
from shadowrun.platforms.worker.channel import Channel
from shadowrun.platforms.worker.client import Worker
from shadowrun.platforms.worker.ring import RING_BYTES
from shadowrun.platforms.worker.ring_calls import RingCall, Room

if TYPE_CHECKING:
    from collections.abc import Callable

WAITING = 32
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

        own_ns: list[int] = []

        def there(worker: Worker, x: torch.Tensor = x, own_ns: list[int] = own_ns) -> object:
            answer = worker.call(f"aten::{op}", (x,), {}, (1, (0,)), [])
            own_ns.append(answer[2])
            return answer

        runs: dict[str, Callable[[], object]] = {
            "here": lambda x=x: function(x),  # type: ignore[misc]
            "shared": lambda there=there: there(shared),  # type: ignore[misc]
            "socket": lambda there=there: there(through_socket),  # type: ignore[misc]
        }
        if 4 * x.nbytes < RING_BYTES:
            y = function(x)
            runs["ring"] = lambda x=x, y=y: waiting(shared, op, x, y)  # type: ignore[misc]
        found = measured(runs, rounds, max(3, 200 if n == 1 else 20 if n < 1 << 20 else 3))
        for way in runs:
            s = found[way] / (WAITING if way == "ring" else 1)
            own = statistics.median(own_ns) / 1e9
            rate = "" if way in ("here", "ring") or n == 1 else f"  {8 * n / (s - own) / 1e9:6.2f} GB/s"
            print(f"  {name:>9} {way:>7}: {1e6 * s:10.1f} µs  x {s / found['here']:7.1f}{rate}")
    shared.stop()
    through_socket.stop()


def waiting(worker: Worker, op: str, x: torch.Tensor, y: torch.Tensor) -> None:
    """Several calls that wait at the same time."""
    held: list[RingCall] = []

    def end_oldest() -> None:
        worker.await_call(held[0])
        worker.release_call(held.pop(0))

    for _ in range(WAITING):
        while isinstance(call := worker.open_call(f"aten::{op}", (x,), {}, (1, (0,)), []), Room):
            end_oldest()
        assert call is not None
        while isinstance(worker.close_call(call, [y]), Room):
            end_oldest()
        held.append(call)
    while held:
        end_oldest()


def train(spec: str, rounds: int) -> None:
    """A training step of the transformer: plain, and compared with the platform, in turns."""
    (workload,) = workloads.chosen(workloads.WORKLOADS, "transformer*")
    program = workload.build()
    run = shadowrun.compare(spec)
    own_ns: list[int] = []
    answer = Worker.answer

    def noted(worker: Worker, question: client.Question) -> client.Answer:
        found = answer(worker, question)
        own_ns.append(found[2])
        return found

    release = Worker.release_call

    def released(worker: Worker, call: RingCall) -> None:
        own_ns.append(call.ns)
        release(worker, call)

    Worker.answer = noted  # type: ignore[method-assign]
    Worker.release_call = released  # type: ignore[method-assign]
    # Wall and processor seconds of a step, plain and compared.
    plain, compared, ratios = [], [], []
    for k in range(rounds + 1):
        plain.append(_blocks(program.step, 5))
        with run:
            compared.append(_blocks(lambda: (program.step(), run.step()), 3 if k else 8))
        if k:
            ratios.append([b / a for a, b in zip(plain[-1], compared[-1], strict=True)])
    steps = 3 * rounds + 8
    print(f"its operators alone, in the worker: {sum(own_ns) / steps / 1e6:.1f} ms in {len(own_ns) / steps:.0f} calls")
    n = sum(run.counts().values()) / steps
    for name, side in (("wall", 0), ("processor", 1)):
        a, b = (statistics.median(s[side] for s in seconds) for seconds in (plain[1:], compared[1:]))
        r = sorted(pair[side] for pair in ratios)
        spread = f"x {statistics.median(r):.1f} ({r[0]:.1f} to {r[-1]:.1f})"
        print(f"transformer's step, {name}: {1e3 * a:.1f} ms plain, {1e3 * b:.1f} ms compared with {spec}, {spread}")
        print(f"  {n:.0f} calls in a step, {1e6 * (b - a) / n:.0f} µs for each")


def _blocks(step: Callable[[], object], n: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(n):
        step()
    return (time.perf_counter() - wall) / n, (time.process_time() - cpu) / n


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="cpu[isa=avx2]", help="platform (default: %(default)s)")
    parser.add_argument("--op", default="neg", help="operator of one tensor (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of each way")
    parser.add_argument("--train", action="store_true", help="measure a training step instead")
    parser.add_argument("--threads", type=int, help="threads here and there")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.train:
        train(options.spec, options.rounds)
    else:
        calls(options.spec, options.op, options.rounds)


if __name__ == "__main__":
    main()
