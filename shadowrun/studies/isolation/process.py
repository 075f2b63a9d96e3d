"""One worker process as its parent controls it: start, tasks, messages, memory, end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from shadowrun.current_folder import import_path
from shadowrun.errors import PlatformError
from shadowrun.studies.isolation.worker_progress import Step, StepReader, new_page, resident_bytes

__all__ = ["WorkerProcess", "own_command", "refuse_without_processes"]

# With the module path of this process: a worker has to find the same modules, those of `--import` too.
_START: Final = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]);"
    "from shadowrun.studies.isolation.worker_side import main;"
    "main(*sys.argv[2:4], json.loads(sys.stdin.readline()), *map(int, sys.argv[4:]))"
)
# As the script `shadowrun`, whose own folder is in front of the path; with `-m` it is the current folder.
_COMMAND: Final = "import sys; sys.path[0] = sys.argv.pop(1); from shadowrun.cli.main import main; sys.exit(main())"
# The size of a pipe's buffer on Linux.
_PIECE: Final = 1 << 16
_HAS_PIPES = os.name == "posix"
# Bytes of standard error that are kept: a program may print gigabytes.
_MAX_PRINTED: Final = 1 << 20


def refuse_without_processes(what: str) -> None:
    """Refuse a system whose child processes inherit no pipes.

    Raises:
        PlatformError: The system is Windows.
    """
    if not _HAS_PIPES:
        raise PlatformError(
            f"A {what} runs in separate processes that inherit pipes, which only Linux and macOS support.",
            slug="no-worker",
        )


def own_command() -> list[str]:
    """``shadowrun`` in another process, which imports from where this one does: the current folder may be anyone's."""
    if sys.flags.safe_path:
        return [sys.executable, "-P", "-m", "shadowrun"]
    return [sys.executable, "-c", _COMMAND, sys.path[0]]


class WorkerProcess:
    """One worker process.

    Args:
        entry: ``module:function`` for `serving.main`.
        settings: For it.

    Attributes:
        task: Its current task; None while idle.
        n_tasks: Tasks that it was given: a process with none is fresh.
        is_ready: Whether it has started and imported everything.
        started: `time.monotonic` when it was started.
        first_bytes: Memory when it was ready.
        lost: What it said of the device before it ended; empty if nothing.
    """

    def __init__(self, entry: str, settings: dict[str, Any]) -> None:
        self.task: Any = None
        self.n_tasks = 0
        self.is_ready = False
        self.started = self._given = time.monotonic()
        self.first_bytes = self._given_bytes = 0
        self.lost = ""
        self._buffer = b""
        # A file, not a pipe: a worker that prints much would wait for a reader. It appends, so that what is cut off is
        # not made again as a hole.
        self._errors = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - it lives as long as the process
        self._lines, writable = os.pipe()
        # The worker exits when this pipe closes, also if its parent is killed and cannot clean up.
        lifeline, self._life = os.pipe()
        page = new_page()
        # Whether a process that the worker forked holds the other end is not known: a read must not wait for it.
        os.set_blocking(self._lines, False)
        numbers = (writable, lifeline, page)
        # Removed here: the worker may be killed at any time.
        self._folder = tempfile.TemporaryDirectory(prefix="shadowrun-", ignore_cleanup_errors=True)
        texts = (json.dumps(import_path()), entry, self._folder.name, *map(str, numbers))
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                # -P: a file of the current folder must not shadow a module.
                [sys.executable, "-P", "-c", _START, *texts],
                stdin=subprocess.PIPE,
                # Kernels and libraries print; messages have a pipe of their own.
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=numbers,
                # `-P` is for this process alone, and torch's compiler starts others with `-c`.
                env=os.environ | {"PYTHONSAFEPATH": "1"},
                # A group of its own, to end the processes that it starts together with it.
                start_new_session=True,
            )
            self._steps = StepReader(os.dup(page))
            # Not as an argument, of which the system takes 128 KiB.
            self._send(settings)
        finally:
            # The ends of the worker: while this process holds them, no pipe reports that the worker has ended.
            for descriptor in numbers:
                os.close(descriptor)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def step(self) -> Step:
        """Its progress. Between cases, time and memory count from the task or the last case, whichever is later."""
        step = self._steps.read()
        step.since = max(step.since, self._given)
        if step.case is None or not step.base_bytes:
            step.base_bytes = max(step.base_bytes, self._given_bytes)
        return step

    def fileno(self) -> int:
        """File descriptor of the pipe with its messages, for `selectors`."""
        return self._lines

    def begin(self, task: Any, line: dict[str, Any]) -> None:
        """Send it a task, as this line."""
        self.task, self._given, self._given_bytes = task, time.monotonic(), self.memory_bytes()
        self.n_tasks += 1
        self._send(line)

    def _send(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died, which `read` reports
            self._process.stdin.write((json.dumps(line) + "\n").encode())
            self._process.stdin.flush()

    def read(self) -> tuple[list[Any], bool]:
        """New messages, and whether it has closed the pipe."""
        try:
            piece = os.read(self._lines, _PIECE)
        except BlockingIOError:
            return [], False
        *lines, self._buffer = (self._buffer + piece).split(b"\n")
        return [json.loads(line) for line in lines], not piece

    def drain(self) -> list[Any]:
        """All messages that it has sent and that are not read yet."""
        pieces = []
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._lines, _PIECE):
                pieces.append(piece)
        *lines, self._buffer = (self._buffer + b"".join(pieces)).split(b"\n")
        return [json.loads(line) for line in lines]

    def memory_bytes(self) -> int:
        """Resident memory; 0 where the system does not report it (Linux does)."""
        return resident_bytes(self._process.pid)

    def kill_children_above(self, n_bytes: int) -> None:
        """Kill child processes (of platforms) that are larger; the worker reports which platform died."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        with contextlib.suppress(OSError, ValueError):
            for pid in map(int, children.read_text(encoding="ascii").split()):
                if resident_bytes(pid) > n_bytes:
                    os.kill(pid, signal.SIGKILL)

    def forget_printed(self) -> None:
        """Drop what it printed, if that is much."""
        descriptor = self._errors.fileno()
        if os.fstat(descriptor).st_size > _MAX_PRINTED:
            os.ftruncate(descriptor, 0)

    @property
    def has_exited(self) -> bool:
        """Whether it has ended, also if a process that it forked keeps its pipes open."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill it with the processes that it started; messages that it sent stay to be read."""
        # The group is there as long as one of its processes is, also after the worker itself has ended.
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def exit_reason(self) -> str:
        """How it ended: ``signal 11 (SIGSEGV)``."""
        try:
            # The system closes the pipe before the exit status is there.
            status = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if status >= 0:
            return f"exit status {status}"
        name = signal.Signals(-status).name if -status in set(signal.Signals) else "?"
        return f"signal {-status} ({name})"

    def stderr_tail(self) -> str:
        """The last line that it wrote to standard error."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 4000))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""

    def end(self) -> None:
        """Kill it if it runs, and free its resources."""
        if self._lines < 0:
            return
        self.kill()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._lines)
        os.close(self._life)
        self._lines = -1
        self._steps.close()
        self._errors.close()
        self._folder.cleanup()
