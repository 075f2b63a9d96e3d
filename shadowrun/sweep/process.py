"""A worker process as seen from the sweep: started, fed, listened to, measured, ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowrun.errors import PlatformError

if TYPE_CHECKING:
    from shadowrun.sweep.cases import Part, Task

__all__ = ["Step", "WorkerProcess", "refuse_without_processes"]

_START = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]);"
    "from shadowrun.sweep.worker import main; main(json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))"
)
_PIECE = 1 << 16
_HAS_PIPES = os.name == "posix"


def refuse_without_processes() -> None:
    """Refuse a system whose child processes inherit no pipes.

    Raises:
        PlatformError: It is one, Windows.
    """
    if not _HAS_PIPES:
        raise PlatformError(
            "A sweep runs in processes of its own, which only Linux and macOS can give it.", slug="no-worker"
        )


@dataclass(slots=True)
class Step:
    """Where a worker is.

    Attributes:
        case: Part and sample of the case in hand; None between cases.
        inputs: Its inputs, printed.
        on_target: Whether the reference has run it.
        since: `time.monotonic` of its beginning.
        base_bytes: Memory of the process then.
    """

    case: tuple[Part, int] | None = None
    inputs: str = ""
    on_target: bool = False
    since: float = field(default_factory=time.monotonic)
    base_bytes: int = 0


class WorkerProcess:
    """One worker.

    Args:
        settings: What `worker.main` takes.

    Attributes:
        task: What it has in hand; None while it is idle.
        step: Where it is in that.
        parts: Parts of the task that it has finished.
        done: Cases of the task that it has run.
        is_ready: Whether it has started.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.task: Task | None = None
        self.parts: set[Part] = set()
        self.done: set[tuple[Part, int]] = set()
        self.step = Step()
        self.is_ready = False
        self._buffer = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._lines, there = os.pipe()
        lifeline, self._life = os.pipe()
        os.set_inheritable(self._life, False)
        command = [
            sys.executable,
            "-P",
            "-c",
            _START,
            json.dumps(sys.path),
            json.dumps(settings),
            str(there),
            str(lifeline),
        ]
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=(there, lifeline),
            )
        finally:
            os.close(there)
            os.close(lifeline)

    def fileno(self) -> int:
        """Of the pipe that it tells its steps on."""
        return self._lines

    def begin(self, task: Task, calls: list[str] | None) -> None:
        """Hand it a task."""
        self.task, self.parts, self.done, self.step = task, set(), set(), Step(base_bytes=self.memory_bytes())
        line = {
            "operator": task.operator,
            "dtype": task.dtype,
            "parts": task.parts,
            "done": sorted(task.done),
            "calls": calls,
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: `read` is going to say so
            self._process.stdin.write((json.dumps(line) + "\n").encode())
            self._process.stdin.flush()

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Lines that it has written since, and whether it has closed its end."""
        piece = os.read(self._lines, _PIECE)
        *lines, self._buffer = (self._buffer + piece).split(b"\n")
        return [json.loads(line) for line in lines], not piece

    def memory_bytes(self) -> int:
        """Memory that it holds; 0 where the system does not tell (it does on Linux)."""
        return _memory_bytes(self._process.pid)

    def end_greater(self, n_bytes: int) -> None:
        """Kill the processes of its platforms that hold more: that is told by the worker, which knows whose it is."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        with contextlib.suppress(OSError, ValueError):
            for pid in map(int, children.read_text(encoding="ascii").split()):
                if _memory_bytes(pid) > n_bytes:
                    os.kill(pid, signal.SIGKILL)

    def obituary(self) -> str:
        """How it ended: ``signal 11 (SIGSEGV)``."""
        try:
            status = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if status >= 0:
            return f"exit status {status}"
        name = signal.Signals(-status).name if -status in set(signal.Signals) else "?"
        return f"signal {-status} ({name})"

    def last_words(self) -> str:
        """The last line that it wrote to standard error."""
        self._errors.seek(0)
        lines = self._errors.read()[-4000:].decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""

    def end(self) -> None:
        """Kill it if it runs, and let go of it."""
        if self._lines < 0:
            return
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._lines)
        os.close(self._life)
        self._lines = -1
        self._errors.close()


def _memory_bytes(pid: int) -> int:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
