"""The operator call in which a case ends its process.

A child process runs the case again. It writes the inputs of each operator call to a file before the call, and deletes
the file after the call. When the process has died, the parent reads the inputs of the last call from the file.
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

from shadowrun import sim
from shadowrun.current_folder import import_path, leave_folder
from shadowrun.errors import DataFileError
from shadowrun.intercept.torchapi import DispatchMode
from shadowrun.platforms.device import resolve
from shadowrun.platforms.plugins import import_inherited
from shadowrun.replay.copies import move, without_strides
from shadowrun.store import captured_inputs
from shadowrun.studies.sweep.cases import Case, CaseFinding, Kind, Part
from shadowrun.studies.sweep.inputs import is_plain
from shadowrun.studies.sweep.rebuild_case import Origin, rebuild_case
from shadowrun.studies.sweep.sweep_findings import SweepFinding

if TYPE_CHECKING:
    from shadowrun.platforms.device import Platform

__all__ = ["CasePlatform", "LastCallRecorder", "last_call", "load_last_call", "main"]

_CPU = torch.device("cpu")
_NAME = "0.pt"
_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]);"
    "from shadowrun.studies.sweep.last_call import main; main(json.loads(sys.argv[2]), sys.argv[3])"
)
# Time limit of the start of the process, which imports torch; the limit of the case begins later.
_MARGIN_S = 120.0


@dataclass(frozen=True, slots=True)
class CasePlatform:
    """A platform as plain values, to start it in another process.

    Attributes:
        spec: Its spec.
        device: Device type of a simulated one.
        flaws: Flaws of the simulated device; None if it is not simulated.
    """

    spec: str
    device: str = ""
    flaws: tuple[str, ...] | None = None

    def start(self) -> Platform:
        """Enable the simulated device if there is one, and return the platform.

        Raises:
            PlatformError: It is absent.
        """
        if self.flaws is not None:
            sim.enable(self.device, flaws=self.flaws)
        return resolve(self.spec)


def last_call(
    sweep_finding: SweepFinding, origin: Origin, platform: CasePlatform, seconds: float
) -> captured_inputs.StoredCall | None:
    """The call that was running when the process of a case died or timed out; None if no call was running.

    Args:
        sweep_finding: The finding of the sweep.
        origin: Source of the inputs.
        platform: Platform that runs the case.
        seconds: Time limit of the case.
    """
    case = sweep_finding.first
    with tempfile.TemporaryDirectory(prefix="shadowrun-") as folder:
        facts = {
            "case": astuple(case),
            "inputs": sweep_finding.inputs,
            "seed": origin.seed,
            "samples": origin.samples.get((case.operator, case.dtype, case.part)),
            "source": None if origin.source is None else str(origin.source.absolute()),
            "torch": origin.torch,
            "platform": astuple(platform),
        }
        # With this process's `sys.path`, so that the child imports the same modules.
        command = [sys.executable, "-P", "-c", _START, json.dumps(import_path()), json.dumps(facts), folder]
        process = subprocess.Popen(  # noqa: S603 - our own module
            # The child ends when its standard input closes: it must not survive its parent.
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        with process:
            _wait_or_kill(process, seconds)
        return load_last_call(Path(folder))


def load_last_call(folder: Path) -> captured_inputs.StoredCall | None:
    """The call that a `LastCallRecorder` left in a folder; None if its process ended between two calls."""
    try:
        # The process may have died while it wrote the file.
        return captured_inputs.load(folder, _NAME)
    except DataFileError:
        return None


def _wait_or_kill(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until the process ends or its time is up; the time of the case starts with the line ``begins``."""
    assert process.stdout is not None
    timer = threading.Timer(_MARGIN_S, process.kill)
    timer.start()
    # It also returns where the child dies before it has begun.
    process.stdout.readline()
    timer.cancel()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()


def main(facts: dict[str, Any], folder: str) -> None:
    """Run the case in this child process, which may die.

    Args:
        facts: The arguments that `last_call` sends.
        folder: Where to write the current call.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import_inherited()
    leave_folder(folder)
    operator, dtype, part, sample = facts["case"]
    case = Case(operator, dtype, Part(part), sample)
    source = None if facts["source"] is None else Path(facts["source"])
    samples = {} if facts["samples"] is None else {(operator, dtype, Part(part)): facts["samples"]}
    origin = Origin(facts["seed"], samples, source, facts["torch"])
    spec, device, flaws = facts["platform"]
    platform = CasePlatform(spec, device, None if flaws is None else tuple(flaws)).start()
    rebuilt = rebuild_case(SweepFinding(CaseFinding(Kind.CRASH), case, facts["inputs"], ()), origin)
    prepared = rebuilt.program(platform.device)
    sys.stdout.write("begins\n")
    sys.stdout.flush()
    torch.manual_seed(0)
    with platform.context(), LastCallRecorder(Path(folder), platform):
        prepared()
    # What was launched last may crash after the program has returned.
    platform.synchronize()


def _end_with_parent() -> None:
    # Returns when the pipe closes, however the parent ends, SIGKILL included.
    os.read(0, 1)
    # Not `sys.exit`, which ends this thread only: the main thread may hang in a kernel.
    os._exit(0)


class LastCallRecorder(DispatchMode):  # type: ignore[no-untyped-call]
    """Writes the inputs of the current call to a file, and deletes the file after the call.

    Args:
        folder: Where to.
        platform: Where the calls run.
    """

    def __init__(self, folder: Path, platform: Platform) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._folder = folder
        self._platform = platform

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):
            call = captured_inputs.StoredCall(str(func.name()), self._on_cpu(args), self._on_cpu(kwargs))  # type: ignore[no-untyped-call]
            try:
                # Before the call: a process that dies in it writes nothing afterwards.
                captured_inputs.save(self._folder, _NAME, call)
            except captured_inputs.NotStorable:
                (self._folder / _NAME).unlink(missing_ok=True)
        out = func(*args, **kwargs)
        self._platform.synchronize()  # an asynchronous kernel that crashes must crash inside its own call
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
