"""A worker process seen from the program: started, asked, restarted when it dies, ended with the comparison."""

from __future__ import annotations

import builtins
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import Counter
from typing import IO, TYPE_CHECKING, Any

from shadowrun.errors import PlatformError
from shadowrun.platforms import torchplatform, wire
from shadowrun.platforms.cpu import flushes_denormals
from shadowrun.platforms.spec import PROCESS_VARIABLES
from shadowrun.platforms.wire import Unsendable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shadowrun.platforms.spec import PlatformSpec

__all__ = ["Answer", "Unsendable", "Worker", "WorkerDied"]

Answer = tuple[list[Any], list[Any], int]
"""Fresh returns (None for the others), mutated arguments, nanoseconds."""

_START = "import sys; sys.path[:] = sys.argv[2:]; from shadowrun.platforms.worker import main; main(int(sys.argv[1]))"
_START_LIMIT_S = 120.0
_MAX_DEATHS = 3
_BUFFER = 1 << 20


class WorkerDied(RuntimeError):  # noqa: N818 - the record's word for it
    """The worker crashed or did not answer in time."""


class Worker:
    """One process that runs operators, with settings that a process reads at its start.

    It is started by the first call that needs it, and anew after each death.

    Args:
        spec: The platform.
        limit_s: Seconds that a call may take.
    """

    def __init__(self, spec: PlatformSpec, limit_s: float = 60.0) -> None:
        self.limit_s = limit_s
        self._spec = spec
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._errors: IO[bytes] | None = None
        self._facts: dict[str, Any] = {}
        self._deaths: Counter[str] = Counter()
        self._end: weakref.finalize[Any, Any] | None = None
        self._owner = 0

    @property
    def pid(self) -> int:
        """Number of the process, 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start the process if it does not run, and wait until it is ready.

        Raises:
            PlatformError: It cannot be started here.
        """
        with self._lock:
            self._started()

    def facts(self) -> dict[str, Any]:
        """Fingerprint of the process."""
        with self._lock:
            if not self._facts:
                self._started()
            return dict(self._facts)

    def stop(self) -> None:
        """End the process. Does nothing if it does not run, or belongs to the process that this one was forked from."""
        with self._lock:
            if self._owner == os.getpid():
                self._kill()

    def call(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        returns: tuple[int, tuple[int, ...]],
        written: Sequence[tuple[str, int]],
        rng: torch.Tensor | None = None,
    ) -> Answer:
        """Run an operator there.

        Args:
            name: ``aten::add.Tensor``.
            args: Positional inputs, on the CPU; they stay as they are.
            kwargs: Inputs by name.
            returns: Declared number of returns, and which of them are wanted.
            written: Arguments to send back, by name and position (-1: by name only).
            rng: State that the worker's random stream is set to.

        Raises:
            WorkerDied: It crashed or exceeded the time limit; the next call finds another process.
            Unsendable: The call has a value that cannot travel, or the worker lacks the operator.
            Exception: What the operator raised, of the same type where it is Python's or torch's.
        """
        with self._lock:
            if self._deaths[name] >= _MAX_DEATHS:
                raise WorkerDied(f"worker died {_MAX_DEATHS} times in this operator: not tried again")
            if self._process is not None and self._owner != os.getpid():
                raise Unsendable("a forked process cannot use the worker of the process that it was forked from")
            connection = self._started()
            connection.settimeout(self.limit_s)
            ambient = (*torchplatform.ambient(), flushes_denormals())
            message = (name, args, kwargs, returns, tuple(written), ambient, rng)
            try:
                wire.send(connection, message)
                answer = wire.receive(connection)
            except Unsendable:
                raise
            except TimeoutError:
                self._deaths[name] += 1
                self._kill()
                raise WorkerDied(f"worker hung: no answer within {self.limit_s:g} s") from None
            except (wire.Closed, OSError):
                self._deaths[name] += 1
                raise WorkerDied(f"worker died: {self._obituary()}") from None
            except BaseException:  # an interrupt: the answer that is still to come would be taken for the next call's
                self._kill()
                raise
        if answer[0] == "ran":
            return answer[1], answer[2], answer[3]
        if answer[0] == "raised":
            raise _rebuilt(*answer[1:])
        raise Unsendable(answer[1])

    def _started(self) -> socket.socket:
        if self._connection is not None:
            return self._connection
        if not hasattr(socket, "AF_UNIX") or os.name != "posix":
            raise PlatformError(
                f"Platform {str(self._spec)!r} needs a process of its own, which only Linux and macOS can give it.",
                slug="no-worker",
            )
        here, there = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        with there:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-I", "-c", _START, str(there.fileno()), *sys.path],
                pass_fds=(there.fileno(),),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for the program
            )
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end, self._process, here, self._errors, self._owner)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            here.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        here.settimeout(_START_LIMIT_S)
        self._connection = here
        try:
            wire.send(here, self._spec.settings)
            self._facts = wire.receive(here)[1]
        except BaseException as error:
            why = self._last_words() or type(error).__name__
            how = self._obituary()
            if not isinstance(error, (wire.Closed, OSError)):
                raise
            raise PlatformError(
                f"The process of platform {str(self._spec)!r} did not start ({how}): {why}.", slug="no-worker"
            ) from None
        return here

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        for key, value in self._spec.settings:
            if key in PROCESS_VARIABLES:
                environment[PROCESS_VARIABLES[key]] = str(value).replace("_STRICT", ",STRICT")
            elif key == "threads":
                environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(value)
        return environment

    def _obituary(self) -> str:
        """End what is left of the process, and say how it ended."""
        process = self._process
        status = None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(2.0)
        self._kill()
        if status is None:
            return "it closed its connection"
        if status >= 0:
            return f"exit status {status}"
        with contextlib.suppress(ValueError):
            return f"signal {-status} ({signal.Signals(-status).name})"
        return f"signal {-status}"

    def _last_words(self) -> str:
        if self._errors is None:
            return ""
        self._errors.seek(0)
        lines = self._errors.read()[-4000:].decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""

    def _kill(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._connection = self._errors = self._end = None


def _end(process: subprocess.Popen[bytes], connection: socket.socket, errors: IO[bytes], owner: int) -> None:
    connection.close()
    errors.close()
    if owner != os.getpid():
        return
    process.kill()
    process.wait()


def _rebuilt(module: str, qualname: str, text: str) -> Exception:
    """An exception of the worker's; of another package's type it becomes a RuntimeError that names it."""
    home: Any = builtins if module == "builtins" else sys.modules.get(module) if module.startswith("torch") else None
    kind = getattr(home, qualname, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):
            return kind(text)
    return RuntimeError(f"{qualname}: {text}")
