"""The process of a worker: which interpreter it runs, how it starts, and how it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import IO, TYPE_CHECKING

from shadowrun.current_folder import from_folder_of_user
from shadowrun.errors import PlatformError
from shadowrun.platforms import settings

if TYPE_CHECKING:
    from shadowrun.platforms.spec import PlatformSpec

__all__ = ["OLDEST_TORCH", "Process", "is_foreign"]

OLDEST_TORCH = (2, 11)
"""Version that another interpreter's torch must have."""

_BUFFER = 1 << 20
# glibc unmaps large blocks at once, and then each result of 64 MiB costs 30 ms of page faults.
_ALLOCATION = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
_PACKAGE = Path(__file__).resolve().parents[2]

# Run by the interpreter that the user names: nothing here may need a new Python before the version is checked.
# Another interpreter keeps its own packages; of ours it gets shadowrun alone, not the folder that contains it.
_START = f"""
import gc, sys
gc.disable()
if sys.version_info < (3, 11):
    sys.exit("Python %d.%d is too old, 3.11 is needed" % sys.version_info[:2])
descriptor, package, path = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
sys.path[:] = path or [p for p in sys.path if p]
try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit("it has no torch (Python %d.%d)" % sys.version_info[:2])
if tuple(int(n) for n in torch.__version__.split(".")[:2]) < {OLDEST_TORCH}:
    sys.exit("its torch %s is too old, {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} is needed" % torch.__version__)
if not path:
    import importlib.util
    spec = importlib.util.spec_from_file_location("shadowrun", package + "/__init__.py")
    sys.modules["shadowrun"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["shadowrun"])
from shadowrun.platforms.worker.main import main
main(descriptor)
"""


class Process:
    """A worker process and the socket to it.

    Args:
        spec: The platform.

    Raises:
        PlatformError: This system cannot give it one, or there is no such interpreter.
    """

    def __init__(self, spec: PlatformSpec) -> None:
        if not hasattr(socket, "AF_UNIX") or os.name != "posix":
            raise PlatformError(
                f"Platform {str(spec)!r} needs a worker process, which only Linux and macOS can give it.",
                slug="no-worker",
            )
        command = _command(spec)
        self.owner = os.getpid()
        self.connection, there = socket.socketpair()
        # A file and not a pipe: a full pipe would stop the worker.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        try:
            with there:
                self._process = subprocess.Popen(  # noqa: S603 - the user's own interpreter, and our module
                    # The same interpreter gets this sys.path, so that it imports the same shadowrun and torch.
                    [*command, str(there.fileno()), str(_PACKAGE), *_path(spec)],
                    pass_fds=(there.fileno(),),
                    # The user's own environment comes after ours: bounds that it sets are kept.
                    env=_ALLOCATION | os.environ | settings.environment(spec.settings),
                    # The worker must not read what the user types to the program.
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._errors,
                    start_new_session=True,  # Ctrl-C is for the program
                )
        except OSError as error:
            self.connection.close()
            self._errors.close()
            raise PlatformError(
                f"The process of platform {str(spec)!r} did not start: {error.strerror}.", slug="no-worker"
            ) from None
        # Also at the end of the interpreter: a worker must not outlive its program.
        self.end = weakref.finalize(self, _end, self._process, self.connection, self._errors, self.owner)
        """Kill it, if it belongs to this process; what a fork copied is only closed."""
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def exit_reason(self) -> str:
        """End the process if it still runs, and return how it ended."""
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            # The connection closes a moment before the process has its exit status.
            status = self._process.wait(2.0)
        self.end()
        if status is None:
            return "it closed its connection"
        if status >= 0:
            return f"exit status {status}"
        with contextlib.suppress(ValueError):
            return f"signal {-status} ({signal.Signals(-status).name})"
        return f"signal {-status}"

    def stderr_tail(self) -> str:
        """The last line that it wrote to stderr."""
        self._errors.seek(0)
        lines = self._errors.read()[-4000:].decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""


def is_foreign(spec: PlatformSpec) -> bool:
    """Whether the platform has another interpreter than this process."""
    return any(key == settings.PYTHON for key, _ in spec.settings)


def _command(spec: PlatformSpec) -> list[str]:
    for key, value in spec.settings:
        if key == settings.PYTHON:
            # -E: variables such as PYTHONPATH are meant for this interpreter.
            return [_interpreter(spec, str(value)), "-E", "-c", _START]
    return [sys.executable, "-I", "-c", _START]


def _path(spec: PlatformSpec) -> list[str]:
    return [] if is_foreign(spec) else sys.path


def _interpreter(spec: PlatformSpec, name: str) -> str:
    path = Path(name)
    with contextlib.suppress(RuntimeError):  # there is no such user
        path = path.expanduser()
    if from_folder_of_user(path).is_dir():
        path = path / "bin" / "python"
    place = from_folder_of_user(path)
    # A bare name is searched on PATH. Links are not resolved: a virtual environment is recognized by its python.
    found = shutil.which(path if path.name == str(path) else place)
    if found is None:
        why = "may not be executed" if place.exists() else "does not exist"
        raise PlatformError(f"Platform {str(spec)!r}: the interpreter {str(path)!r} {why}.", slug="no-worker")
    return str(Path(found).absolute())


def _end(process: subprocess.Popen[bytes], connection: socket.socket, errors: IO[bytes], owner: int) -> None:
    connection.close()
    errors.close()
    if owner != os.getpid():
        return
    process.kill()
    # Waited for, or the process would stay a zombie.
    process.wait()
