"""The operator call in which a case ends its process: watched from outside, since nobody can tell it from inside.

A process of its own runs the case again and keeps the inputs of each call in a file before it makes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.errors import DataFileError
from shadowrun.intercept.torchapi import DispatchMode
from shadowrun.platforms import sim
from shadowrun.platforms.device import resolve
from shadowrun.replay.mirror import move, without_strides
from shadowrun.store import tensors
from shadowrun.sweep.again import Origin, make_again
from shadowrun.sweep.cases import Case, Part
from shadowrun.sweep.found import Found
from shadowrun.sweep.inputs import is_plain
from shadowrun.sweep.outcome import Finding, Kind

if TYPE_CHECKING:
    from shadowrun.platforms.device import Platform

__all__ = ["Where", "last_call", "main"]

_CPU = torch.device("cpu")
_NAME = "0.pt"
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]);"
    "from shadowrun.sweep.last_call import main; main(json.loads(sys.argv[2]), sys.argv[3])"
)
_MARGIN_S = 120.0
"""For its start, beside what the case may take."""


@dataclass(frozen=True, slots=True)
class Where:
    """A platform, for another process.

    Attributes:
        spec: Its spec.
        device: Device type of a simulated one.
        flaws: Of that; None where none is simulated.
    """

    spec: str
    device: str = ""
    flaws: tuple[str, ...] | None = None

    def start(self) -> Platform:
        """Register what is simulated, and get the platform.

        Raises:
            PlatformError: It is absent.
        """
        if self.flaws is not None:
            sim.enable(self.device, flaws=self.flaws)
        return resolve(self.spec)


def last_call(found: Found, origin: Origin, where: Where, seconds: float) -> tensors.Captured | None:
    """The call that a case was in when its process ended, or when its time was up; None where it was in none.

    Args:
        found: What it was in the sweep.
        origin: Where its inputs come from.
        where: The platform that it ran on.
        seconds: How long it may take.
    """
    with tempfile.TemporaryDirectory(prefix="shadowrun-") as folder:
        told = {
            "case": astuple(found.first),
            "inputs": found.inputs,
            "seed": origin.seed,
            "samples": origin.samples.get((found.first.operator, found.first.dtype, found.first.part)),
            "source": None if origin.source is None else str(origin.source.absolute()),
            "torch": origin.torch,
            "where": astuple(where),
        }
        command = [sys.executable, "-P", "-c", _START, json.dumps(sys.path), json.dumps(told), folder]
        process = subprocess.Popen(  # noqa: S603 - our own module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        with process:
            _let_run(process, seconds)
        try:
            return tensors.load(Path(folder), _NAME)
        except DataFileError:
            return None


def _let_run(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Until it ends, or its time is up: that of the case is counted from when it says that the case begins."""
    assert process.stdout is not None
    timer = threading.Timer(_MARGIN_S, process.kill)
    timer.start()
    process.stdout.readline()
    timer.cancel()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()


def main(told: dict[str, Any], folder: str) -> None:
    """Run the case, in a process that may die of it.

    Args:
        told: What `last_call` writes.
        folder: Where to keep the call in hand.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    operator, dtype, part, sample = told["case"]
    case = Case(operator, dtype, Part(part), sample)
    source = None if told["source"] is None else Path(told["source"])
    samples = {} if told["samples"] is None else {(operator, dtype, Part(part)): told["samples"]}
    origin = Origin(told["seed"], samples, source, told["torch"])
    spec, device, flaws = told["where"]
    platform = Where(spec, device, None if flaws is None else tuple(flaws)).start()
    again = make_again(Found(Finding(Kind.CRASH), case, told["inputs"], ()), origin)
    prepared = again.program(platform.device)
    sys.stdout.write("begins\n")
    sys.stdout.flush()
    torch.manual_seed(0)
    with platform.context(), _Keeping(Path(folder), platform):
        prepared()
    platform.synchronize()


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(0)


class _Keeping(DispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the inputs of the call in hand in a file, which goes when the call has ended."""

    def __init__(self, folder: Path, platform: Platform) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._folder = folder
        self._platform = platform

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):
            call = tensors.Captured(str(func.name()), self._on_cpu(args), self._on_cpu(kwargs))  # type: ignore[no-untyped-call]
            try:
                tensors.save(self._folder, _NAME, call)
            except tensors.Unkeepable:
                (self._folder / _NAME).unlink(missing_ok=True)
        out = func(*args, **kwargs)
        self._platform.synchronize()
        (self._folder / _NAME).unlink(missing_ok=True)
        return out

    def _on_cpu(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            t = value.detach()
            if t.device.type == "cpu":
                return t
            laid = is_plain(t) and not self._platform.functionalizes
            return move(t, _CPU) if laid else without_strides(t, _CPU)
        if isinstance(value, (list, tuple)):
            return [self._on_cpu(v) for v in value]
        if isinstance(value, dict):
            return {k: self._on_cpu(v) for k, v in value.items()}
        return _CPU if isinstance(value, torch.device) else value
