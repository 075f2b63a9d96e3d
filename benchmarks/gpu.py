"""The cost of a comparison on an accelerator with the CPU as reference, in plain steps, and a check of the results.

Llama and ResNet-50-like steps in float32 and under bf16 autocast, and matrix products, run plain, and under each of

* shadowrun: compared asynchronously, without a host sync (`compare(device)`),
* shadowrun, other setting: everything compared on the device itself (`ref="cuda[tf32=off]"`),
* shadowrun, in float64: each operator a second time on widened inputs, on the device (`ref="cuda[compute=float64]"`),
* shadowrun, budget 1.2: as much as fits into a fifth of a step (`budget=1.2`),
* shadowrun, record only (`replay=False`): each call is recorded with module and line, none compared,
* shadowrun, waiting: each call is compared before the next (`asynchronous=False`),
* naive: copy the inputs to the CPU, run there too, copy the results back, `assert_close`.

Plain and compared steps alternate (A B A B …); the figure is the median of the ratios of neighbours. A step ends when
the device is idle (*returned*), and when all its calls are compared (*compared*). Then each way and the plain program
train five steps: weights and buffers must be bit-identical.

    python benchmarks/gpu.py --device cuda --json gpu.json      # needs torch and shadowrun, and no network
    python benchmarks/gpu.py --size large --program '*LA*'      # 1.08 billion parameters, sequence of 2,048
    python benchmarks/gpu.py --device sim                       # the same on the simulated device, small
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_programs import PROGRAMS, SIZES, Program, products
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import shadowrun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IDENTITY_STEPS = 5
SETTING = {"sim": "deterministic=off"} | dict.fromkeys(("cuda", "xpu"), "tf32=off")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products are the same each time, as torch asks for it


class Naive(TorchDispatchMode):
    """What one writes in ten lines; what it cannot run or what is not close is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        skipped = torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.name() or func.is_view
        if skipped or func.namespace != "aten":
            return func(*args, **kwargs)
        there_args, there_kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to("cpu", copy=True), (args, kwargs))
        out = func(*args, **kwargs)
        if there_kwargs.get("device") is not None:
            there_kwargs["device"] = "cpu"
        try:
            there = func(*there_args, **there_kwargs)
            here = pytree.tree_map_only(torch.Tensor, lambda t: t.cpu(), out)
            torch.testing.assert_close(here, there, equal_nan=True)
            self.counts["close"] += 1
        except AssertionError:
            self.counts["not close"] += 1
        except Exception as error:  # an operator that the CPU lacks
            self.counts[type(error).__name__] += 1
        return out


@dataclass
class Tool:
    """A way to run a program.

    Attributes:
        name: In tables.
        enter: A context around a step; yields what ends the step.
        counts: What became of the calls.
    """

    name: str
    enter: Callable[[], contextlib.AbstractContextManager[Callable[[], object]]]
    counts: Callable[[], dict[str, int]] = dict


@dataclass
class Figures:
    """One program under one way.

    Attributes:
        returned, compared: Medians of the ratios to the plain step.
        seconds: Median of the step until all is compared.
        plain_seconds: Median of the plain steps next to it.
        counts: What became of the calls.
        memory: Greatest device memory in bytes, over that of the plain step; 0 where it is not known.
        identical: Whether the weights after five steps are those of the plain program; None for single operators.
    """

    program: str
    way: str
    returned: float
    compared: float
    seconds: float
    plain_seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    memory: float = 0.0
    identical: bool | None = None


def ours(device: str, name: str, **options: Any) -> Tool:
    """A way with one comparison for all steps."""
    run = shadowrun.compare(device, settings=False, **options)

    @contextlib.contextmanager
    def enter() -> Iterator[Callable[[], object]]:
        with run:
            yield run.step

    return Tool(name, enter, lambda: {str(k): n for k, n in run.counts().items() if n})


def naive() -> Tool:
    """The naive way."""
    mode = Naive()

    @contextlib.contextmanager
    def enter() -> Iterator[Callable[[], object]]:
        with mode:
            yield lambda: None

    return Tool("naive", enter, lambda: dict(mode.counts))


def ways(device: str) -> dict[str, Callable[[], Tool]]:
    """All ways, made anew for each program."""
    return {
        "shadowrun": lambda: ours(device, "shadowrun"),
        "other setting": lambda: ours(device, "other setting", ref=f"{device}[{SETTING[device]}]"),
        "in float64": lambda: ours(device, "in float64", ref=f"{device}[compute=float64]"),
        "budget 1.2": lambda: ours(device, "budget 1.2", budget=1.2),
        "record only": lambda: ours(device, "record only", replay=False),
        "waiting": lambda: ours(device, "waiting", asynchronous=False),
        "naive": naive,
    }


class Clock:
    """Times steps on a device."""

    def __init__(self, device: str) -> None:
        self._module = getattr(torch, torch.device(device).type)

    def wait(self) -> None:
        self._module.synchronize()

    def plain(self, program: Program, n: int) -> float:
        """Seconds for a plain step."""
        self.wait()
        began = time.perf_counter()
        for _ in range(n):
            program.step()
        self.wait()
        return (time.perf_counter() - began) / n

    def under(self, way: Tool, program: Program, n: int) -> tuple[float, float]:
        """Seconds for a step: until the device is idle, and until all is compared."""
        with way.enter() as end:
            self.wait()
            began = time.perf_counter()
            for _ in range(n):
                program.step()
            self.wait()
            returned = time.perf_counter() - began
            end()
            return returned / n, (time.perf_counter() - began) / n

    def peak(self, run: Callable[[], object]) -> float:
        """Peak memory of a run on the device; 0 if the device does not report it."""
        if not hasattr(self._module, "max_memory_allocated"):
            run()
            return 0.0
        self._module.reset_peak_memory_stats()
        run()
        self.wait()
        return float(self._module.max_memory_allocated())


def measure(name: str, make: Callable[[], Program], way: Tool, clock: Clock, rounds: int, n: int) -> Figures:
    """Alternate plain and compared steps."""
    torch.manual_seed(0)
    program = make()
    plain_memory = clock.peak(lambda: clock.plain(program, 1))
    memory = clock.peak(lambda: clock.under(way, program, 1))  # both warm up
    pairs = [(clock.plain(program, n), clock.under(way, program, n)) for _ in range(rounds)]
    return Figures(
        name,
        way.name,
        returned=statistics.median(a / p for p, (a, _) in pairs),
        compared=statistics.median(b / p for p, (_, b) in pairs),
        seconds=statistics.median(b for _, (_, b) in pairs),
        plain_seconds=statistics.median(p for p, _ in pairs),
        counts=way.counts(),
        memory=memory / plain_memory if plain_memory else 0.0,
    )


def trained(make: Callable[[], Program], way: Tool | None = None) -> list[torch.Tensor]:
    """Weights and buffers after some steps; the same algorithms each time."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True)
    try:
        torch.manual_seed(0)
        program = make()
        assert program.model is not None
        for _ in range(IDENTITY_STEPS):
            # Fused attention adds up its gradients in any order, deterministic or not.
            with (
                sdpa_kernel(SDPBackend.MATH),
                way.enter() if way is not None else contextlib.nullcontext(lambda: None) as end,
            ):
                program.step()
                end()
        return [t.detach().clone() for t in program.model.state_dict().values()]
    finally:
        torch.use_deterministic_algorithms(mode=before)


class TooLongError(BaseException):  # no failure of a comparison, which would be recorded
    """A way took longer than it may."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TooLongError` inside after so many seconds, and say where it was."""

    def end(*_: object) -> None:
        faulthandler.dump_traceback()
        raise TooLongError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Whether all bits are equal."""
    return all(torch.equal(_bytes(x), _bytes(y)) for x, y in zip(a, b, strict=True))


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def markdown(found: list[Figures], machine: dict[str, str]) -> str:
    """The figures as a table."""
    lines = [
        ", ".join(f"{k} {v}" for k, v in machine.items()),
        "",
        "| program | way | returned | compared | plain step | memory | same bits | calls |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for f in found:
        identical = {True: "yes", False: "**no**", None: ""}[f.identical]
        counts = ", ".join(f"{n} {name}" for name, n in f.counts.items())
        memory = f"x {f.memory:.2f}" if f.memory else ""
        lines.append(
            f"| {f.program} | {f.way} | x {f.returned:.2f} | x {f.compared:.2f} | {f.plain_seconds * 1e3:.3g} ms "
            f"| {memory} | {identical} | {counts} |"
        )
    return "\n".join(lines)


def about(device: str) -> dict[str, str]:
    """What the figures were measured on."""
    module = getattr(torch, torch.device(device).type)
    return {
        "device": str(module.get_device_name()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "CPU threads": str(torch.get_num_threads()),
    }


def main() -> int:
    """Measure, print, and fail if a comparison changed a bit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=SIZES, help="default: full, on sim small")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of plain and compared steps (default: 3)")
    parser.add_argument("--program", default="*", help="glob of programs")
    parser.add_argument("--way", default="*", help="glob of ways")
    parser.add_argument(
        "--identity",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also train plain and compared, and hold the weights together (default: yes)",
    )
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each way of a program (default: 600)")
    parser.add_argument("--tf32", action="store_true", help="convolutions may round to tf32, torch's default")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args()
    device = options.device
    torch.backends.cudnn.allow_tf32 = options.tf32
    if device == "sim":
        from shadowrun import sim

        sim.enable(asynchronous=True)
    size = options.size or ("small" if device == "sim" else "full")
    steps = {name: (lambda make=make: make(device, size)) for name, make in PROGRAMS.items()}
    programs = {k: v for k, v in (steps | products(device, size)).items() if fnmatchcase(k, options.program)}
    chosen = {k: v for k, v in ways(device).items() if fnmatchcase(k, options.way)}
    clock, found, repeats = Clock(device), [], True
    for name, make in programs.items():
        plain = trained(make) if name in steps and options.identity else []
        if plain and not same(plain, trained(make)):
            print(f"{name}: two plain runs differ on this device; its bits cannot be compared", file=sys.stderr)
            plain, repeats = [], False
        for way, make_way in chosen.items():
            try:
                with limited(options.limit):
                    figures = measure(name, make, make_way(), clock, options.rounds, 1 if name in steps else 10)
                    if plain:
                        figures.identical = same(plain, trained(make, make_way()))
            except TooLongError:
                print(f"{name}: {way}: longer than {options.limit:g} s", file=sys.stderr, flush=True)
                continue
            found.append(figures)
            print(f"{name}: {figures.way} x {figures.compared:.2f}", file=sys.stderr, flush=True)
    print(markdown(found, about(device)))
    if options.json:
        figures_json = {"machine": about(device), "repeats": repeats, "figures": [asdict(f) for f in found]}
        Path(options.json).write_text(json.dumps(figures_json, indent=1), encoding="utf-8")
    return 1 if any(f.identical is False for f in found) else 0


if __name__ == "__main__":
    sys.exit(main())
