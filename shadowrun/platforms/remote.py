"""A worker process seen from the program: started, asked, restarted when it dies, ended with the comparison."""

from __future__ import annotations

import builtins
import contextlib
import os
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from shadowrun.errors import PlatformError
from shadowrun.platforms import isa, schemas, settings, torchplatform
from shadowrun.platforms.channel import Channel, Closed
from shadowrun.platforms.cpu import flushes_denormals
from shadowrun.platforms.process import Process, is_foreign
from shadowrun.platforms.wire import Unsendable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shadowrun.platforms.spec import PlatformSpec

__all__ = ["Answer", "Unsendable", "Worker", "WorkerDied"]

Answer = tuple[list[Any], list[Any], int]
"""Fresh returns (None for the others), mutated arguments, nanoseconds."""

_START_LIMIT_S = 120.0
_MAX_DEATHS = 3


class WorkerDied(RuntimeError):  # noqa: N818 - the record's word for it
    """The worker crashed or did not answer in time."""


class Worker:
    """One process that runs operators, with settings that a process reads at its start, or by another torch.

    It is started by the first call that needs it, and anew after each death.

    Args:
        spec: The platform.
        limit_s: Seconds that a call may take.

    Attributes:
        kept: Whether `stop` leaves the process to the next comparison; it ends with this object then.
    """

    def __init__(self, spec: PlatformSpec, limit_s: float = 60.0) -> None:
        self.limit_s = limit_s
        self.kept = False
        self._spec = spec
        self._foreign = is_foreign(spec)
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._channel: Channel | None = None
        self._facts: dict[str, Any] = {}
        self._deaths: Counter[str] = Counter()
        self._failed_starts = 0
        self._told: set[str] = set()

    @property
    def pid(self) -> int:
        """Number of the process, 0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start the process if it does not run, and wait until it is ready.

        Raises:
            PlatformError: It cannot be started here, or this processor lacks what the platform asks for.
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
        """End the process if it runs and is not kept; one of the process that this one was forked from is let go."""
        if self._process is not None and self._process.owner != os.getpid():
            self._lock = threading.Lock()  # whoever held it is not in this process
            self.kept = False
        if self.kept:
            return
        with self._lock:
            self._drop()

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

        Returns:
            Tensors of this process; large ones lie in memory that the worker leaves alone as long as they live.

        Raises:
            WorkerDied: It crashed or exceeded the time limit; the next call finds another process.
            Unsendable: The call has a value that cannot travel, or the worker lacks the operator.
            NotImplementedError: Its torch, another version, lacks the operator.
            Exception: What the operator raised, of the same type where it is Python's or torch's.
        """
        with self._lock:
            if self._deaths[name] >= _MAX_DEATHS:
                raise WorkerDied(f"worker died {_MAX_DEATHS} times in this operator: not tried again")
            if self._process is not None and self._process.owner != os.getpid():
                raise Unsendable("a forked process cannot use the worker of the process that it was forked from")
            channel = self._restarted()
            form = None
            if self._foreign and name not in self._told:
                operator = schemas.find(name)
                form = None if operator is None else schemas.form(operator)
            ambient = (*torchplatform.ambient(), flushes_denormals())
            try:
                channel.limit(self.limit_s)
                channel.send((name, form, args, kwargs, returns, tuple(written), ambient, rng))
                answer = channel.receive()
            except Unsendable:
                raise
            except TimeoutError:
                self._deaths[name] += 1
                self._drop()
                raise WorkerDied(
                    f"worker hung: no answer within {self.limit_s:g} s, ended by signal 9 (SIGKILL)"
                ) from None
            except (Closed, OSError):
                self._deaths[name] += 1
                raise WorkerDied(f"worker died: {self._obituary()}") from None
            except BaseException:  # an interrupt: the answer that is still to come would be taken for the next call's
                self._drop()
                raise
            self._told.add(name)
        if answer[0] == "ran":
            return answer[1], answer[2], answer[3]
        if answer[0] == "raised":
            raise _rebuilt(*answer[1:])
        if answer[0] == "unsendable":
            raise Unsendable(answer[1])
        if name.startswith("aten::"):
            raise NotImplementedError(
                f"The operator '{name}' is not currently implemented for the torch {answer[1]} there"
            )
        raise Unsendable(f"the worker has no operator {name}")

    def _restarted(self) -> Channel:
        """The channel, for a program that runs: what cannot be started is not tried for ever."""
        try:
            if self._failed_starts >= _MAX_DEATHS:
                raise WorkerDied("worker died and could not be started again")
            return self._started()
        except PlatformError as error:
            self._failed_starts += 1
            raise WorkerDied(f"worker died and could not be started again: {error}") from None

    def _started(self) -> Channel:
        if self._channel is not None:
            return self._channel
        from shadowrun.platforms.worker import PROBE

        environment = settings.environment(self._spec.settings)
        self._refuse_lacking(environment)
        process = self._process = Process(self._spec)
        channel = self._channel = Channel(process.connection)
        self._told.clear()
        try:
            channel.limit(_START_LIMIT_S)
            channel.send((PROBE, self._spec.settings))
            probe, facts = channel.receive()
        except BaseException as error:
            why = process.last_words() or "it wrote nothing"
            how = self._obituary()
            if isinstance(error, TimeoutError):
                how = f"it was not ready within {_START_LIMIT_S:g} s"
            if not isinstance(error, (Closed, OSError, Unsendable)):
                raise
            raise PlatformError(
                f"The process of platform {str(self._spec)!r} did not start ({how}): {why}.", slug="no-worker"
            ) from None
        if probe != PROBE:
            self._drop()
            raise PlatformError(
                f"The process of platform {str(self._spec)!r} reads values in another form: its Python is "
                f"{facts.get('python')}.",
                slug="no-worker",
            )
        self._refuse_other(environment, str(facts.get("cpu_capability")))
        self._facts = facts
        self._failed_starts = 0
        return channel

    def _refuse_lacking(self, environment: dict[str, str]) -> None:
        lacking = isa.lacking(environment)
        if lacking is not None:
            name, value, missing = lacking
            raise PlatformError(
                f"Platform {str(self._spec)!r}: this processor lacks instructions that {name}={value} asks for "
                f"({missing}).",
                slug="absent-isa",
            )

    def _refuse_other(self, environment: dict[str, str], got: str) -> None:
        """Without Linux's list of what the processor has, torch's own word is what there is."""
        wanted = environment.get("ATEN_CPU_CAPABILITY", "").upper()
        if wanted in ("DEFAULT", "AVX2", "AVX512") and got != wanted:
            self._drop()
            raise PlatformError(
                f"Platform {str(self._spec)!r}: torch there computes with {got} instructions, not with {wanted}: this "
                "processor or this build of torch has no others.",
                slug="absent-isa",
            )

    def _obituary(self) -> str:
        process = self._process
        assert process is not None
        how = process.obituary()
        self._drop()
        return how

    def _drop(self) -> None:
        if self._process is not None:
            self._process.end()
        self._process = self._channel = None


def _rebuilt(module: str, qualname: str, text: str) -> Exception:
    """An exception of the worker's; of another package's type it becomes a RuntimeError that names it."""
    home: Any = builtins if module == "builtins" else sys.modules.get(module) if module.startswith("torch") else None
    kind = getattr(home, qualname, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):
            return kind(text)
    return RuntimeError(f"{qualname}: {text}")
