"""Client of a worker process: sends calls, restarts it after a crash, ends it with the comparison."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from shadowrun.errors import PlatformError
from shadowrun.platforms import cpu, settings, torchplatform
from shadowrun.platforms.cpu import flushes_denormals
from shadowrun.platforms.worker import wire
from shadowrun.platforms.worker.channel import PROBE, Channel, ChannelClosed
from shadowrun.platforms.worker.process import Process, is_foreign
from shadowrun.platforms.worker.question import Answer, Question, WorkerDied
from shadowrun.platforms.worker.ring import OPEN, REDO, SERVE, Ring
from shadowrun.platforms.worker.ring_calls import RingCall, RingCalls, Room
from shadowrun.platforms.worker.wire import Unsendable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shadowrun.platforms.spec import PlatformSpec

__all__ = ["Answer", "Question", "Unsendable", "Worker", "WorkerDied"]

# Importing torch takes seconds, and longer on a busy machine.
_START_LIMIT_S = 120.0
_MAX_DEATHS = 3
# To wake the worker costs as much as a small operator: so many calls wait before it is asked to run them.
_BATCH = 8
_LOOK_AGAIN_S = 0.001


class Worker:
    """A process that runs operators with settings that a process reads at its start, or with another torch.

    The first call that needs it starts it, and the next call after a crash restarts it.

    Args:
        spec: The platform.
        limit_s: Seconds that a call may take.

    Attributes:
        kept: Whether `stop` keeps the process for the next comparison; it then ends with this object.
    """

    def __init__(self, spec: PlatformSpec, limit_s: float = 60.0) -> None:
        self.limit_s = limit_s
        self.kept = False
        self._spec = spec
        self._foreign = is_foreign(spec)
        # The channel carries one question at a time.
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._channel: Channel | None = None
        self._facts: dict[str, Any] = {}
        self._deaths: Counter[str] = Counter()
        self._failed_starts = 0
        self._described: set[str] = set()
        self._worker_settings: tuple[Any, ...] | None = None
        # The question that was sent and not answered yet.
        self._open: Question | None = None
        self._calls: RingCalls | None = None
        # When the worker came to the call that it runs, as far as this process knows.
        self._running: tuple[RingCall | None, float] = (None, 0.0)

    @property
    def pid(self) -> int:
        """Process id; 0 while there is no process."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start the process if it does not run, and wait until it is ready.

        Raises:
            PlatformError: It cannot be started here, or this processor lacks what the platform asks for.
        """
        with self._lock:
            self._ensure_started()

    def facts(self) -> dict[str, Any]:
        """Fingerprint of the process."""
        with self._lock:
            if not self._facts:
                self._ensure_started()
            return dict(self._facts)

    def stop(self) -> None:
        """End the process if it runs and is not kept; after a fork, the child only forgets its parent's worker."""
        # The parent still uses the worker: a child must neither end it nor talk to it.
        if self._process is not None and self._process.owner != os.getpid():
            self._lock = threading.Lock()  # the thread that held it is not in this process
            self.kept = False
        if self.kept:
            return
        with self._lock:
            self._end_process()

    def call(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        returns: tuple[int, tuple[int, ...]],
        written: Sequence[tuple[str, int]],
        rng: torch.Tensor | None = None,
    ) -> Answer:
        """Run an operator in the worker: `ask`, and wait for `answer`."""
        return self.answer(self.ask(name, args, kwargs, returns, written, rng))

    def ask(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        returns: tuple[int, tuple[int, ...]],
        written: Sequence[tuple[str, int]],
        rng: torch.Tensor | None = None,
    ) -> Question:
        """Send a call, which the worker runs while this process goes on; raises nothing but interrupts.

        Args:
            name: ``aten::add.Tensor``.
            args: Positional inputs, on the CPU; they stay as they are, and may be written to afterwards.
            kwargs: Inputs by name.
            returns: Declared number of returns, and which of them are wanted.
            written: Arguments to send back, by name and position (-1: by name only).
            rng: State for the worker's CPU generator.
        """
        question = Question(name)
        with self._lock:
            try:
                self._send(question, (args, kwargs), returns, written, rng)
            except (WorkerDied, Unsendable) as error:
                question.error = error
        return question

    def answer(self, question: Question) -> Answer:
        """Wait for the answer to a question, once.

        Returns:
            Tensors of this process; large ones lie in shared memory that the worker does not reuse while they live.

        Raises:
            WorkerDied: It crashed or exceeded the time limit; the next call starts another process.
            Unsendable: The call has a value that cannot be encoded, or the worker lacks the operator.
            NotImplementedError: Its torch, another version, lacks the operator.
            Exception: What the operator raised, of the same type where it is Python's or torch's.
        """
        with self._lock:
            if question is self._open:
                self._refuse_fork()
                self._receive(question)
            if question.error is None and question.answer is None:
                question.error = WorkerDied("worker ended before it answered")
        return question.result()

    # -- calls that wait in a ring -------------------------------------------------------------------

    def open_call(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        returns: tuple[int, tuple[int, ...]],
        written: list[tuple[str, int]],
        rng: torch.Tensor | None = None,
    ) -> RingCall | Room | None:
        """Copy the inputs of a call that the worker runs later; see `ask` for the arguments.

        Returns:
            `ring_calls.FULL` where an older call has to be released first; None where `ask` is the only way.
        """
        with self._lock:
            calls = self._ring_for(name)
            if calls is None:
                return None
            call = RingCall(name, calls.ring, returns, written, self._program_settings(), self.limit_s)
            opened = calls.open(call, args, kwargs, rng)
            return opened if isinstance(opened, Room) else call if opened else None

    def close_call(self, call: RingCall, values: list[Any]) -> Room | bool:
        """Hand over a call, with the program's results; False where it is to be abandoned."""
        with self._lock:
            calls = self._calls
            # Another process: the worker died in a call that the program made inside this one.
            if calls is None or calls.ring is not call.ring:
                return False
            settings = call.kernel_settings
            closed = calls.close(call, values, None if settings == self._worker_settings else settings)
            if closed is True:
                self._worker_settings = settings
                calls.oldest()
                if calls.n_waiting >= _BATCH:
                    self._serve(calls)
            return closed

    def abandon_call(self, call: RingCall) -> None:
        """Forget a call that was opened and not closed."""
        with self._lock:
            if self._calls is not None:
                self._calls.abandon(call)

    def is_answered(self, call: RingCall) -> bool:
        """Whether it is known what became of a call; waits for nothing."""
        if not call.state and self._calls is not None:
            self._calls.oldest()
        return bool(call.state)

    def await_call(self, call: RingCall) -> None:
        """Wait until it is known what became of a call."""
        while not self.is_answered(call):
            with self._lock:
                self._refuse_fork()
                if self._calls is None or self._calls.ring is not call.ring:
                    call.error, call.state = WorkerDied("worker ended before it answered"), REDO
                    return
                self._advance(self._calls)

    def release_call(self, call: RingCall) -> None:
        """Have the memory of a call used again, when it is not needed any more; the oldest first."""
        with self._lock:
            if self._calls is not None and self._calls.ring is call.ring:
                self._calls.release(call)

    def forget_calls(self) -> None:
        """Drop the calls that wait: the worker may be in one of them, and is ended."""
        with self._lock:
            if self._calls is not None:
                self._end_process()

    def _ring_for(self, name: str) -> RingCalls | None:
        """Where calls of this operator can wait; None where they cannot."""
        if self._deaths[name] >= _MAX_DEATHS or (self._foreign and name not in self._described):
            return None
        if self._process is not None and self._process.owner != os.getpid():
            return None
        if self._calls is None and self._channel is not None and self._channel.is_shared:
            self._settle_open()
            descriptor = Ring.make()
            if descriptor is None:
                return None
            try:
                channel = self._restarted()
                channel.limit(self.limit_s)
                channel.send(OPEN, [descriptor])
                channel.receive()
                self._calls = RingCalls(Ring(descriptor))
            # The next call that is sent by itself finds out what is wrong.
            except (Unsendable, ChannelClosed, OSError, WorkerDied):
                return None
            finally:
                os.close(descriptor)
        return self._calls

    def _serve(self, calls: RingCalls) -> None:
        """Have the worker run what waits, unless it does so already."""
        channel = self._channel
        if self._open is not None and channel is not None and channel.arrives(0):
            self._receive(self._open)
        if self._open is not None or self._channel is None:
            return
        question = Question(SERVE)
        try:
            self._channel.limit(self.limit_s)
            self._channel.send(SERVE)
        except BaseException as error:
            self._failed(question, error)
            return
        self._running = calls.oldest(), time.monotonic()
        self._open = question

    def _advance(self, calls: RingCalls) -> None:
        """Wait a moment for the worker, and end it where a call takes too long."""
        question, channel = self._open, self._channel
        if question is None or question.name != SERVE or channel is None:
            self._settle_open()
            self._serve(calls)
            return
        if channel.arrives(_LOOK_AGAIN_S):
            self._receive(question)
            return
        oldest = calls.oldest()
        running, since = self._running
        if oldest is not running:
            self._running = oldest, time.monotonic()
        elif oldest is not None and time.monotonic() - since > oldest.limit_s:
            self._open = None
            self._failed(question, TimeoutError())

    def _settle_open(self) -> None:
        """Read the answer to the question that is open: the channel carries one at a time."""
        if self._open is not None:
            self._receive(self._open)

    def _program_settings(self) -> tuple[Any, ...]:
        # The program may change these settings at any time; a replay must run under its present ones.
        return (*torchplatform.kernel_settings(), flushes_denormals())

    def _refuse_fork(self) -> None:
        if self._process is not None and self._process.owner != os.getpid():
            raise Unsendable("a forked process cannot use the worker of the process that it was forked from")

    def _send(
        self,
        question: Question,
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        returns: tuple[int, tuple[int, ...]],
        written: Sequence[tuple[str, int]],
        rng: torch.Tensor | None,
    ) -> None:
        name = question.name
        # An operator that crashes every worker would cost a process start for each of its calls.
        if self._deaths[name] >= _MAX_DEATHS:
            raise WorkerDied(f"worker died {_MAX_DEATHS} times in this operator: not tried again")
        self._refuse_fork()
        while self._calls is not None and self._calls.oldest() is not None:
            self._advance(self._calls)
        # The program's call raised, or called operators itself.
        self._settle_open()
        channel = self._restarted()
        signature = None
        # Signatures are compared once for each operator, and only if the worker's torch may differ.
        if self._foreign and name not in self._described:
            operator = wire.find_operator(name)
            signature = None if operator is None else wire.signature(operator)
        question.kernel_settings = kernel_settings = self._program_settings()
        changed = None if kernel_settings == self._worker_settings else kernel_settings
        plain = wire.Plain((name, signature, returns, tuple(written)))
        try:
            channel.limit(self.limit_s)
            channel.send((plain, *inputs, changed, rng))
        except BaseException as error:
            self._failed(question, error)
            return
        self._open = question

    def _receive(self, question: Question) -> None:
        """Read the answer to the question that was sent, or why there is none."""
        self._open = None
        channel = self._channel
        if channel is None:
            return
        try:
            # What the program did since the question was sent is not the worker's time.
            channel.limit(self.limit_s)
            question.answer = answer = channel.receive()
        except BaseException as error:
            self._failed(question, error)
            return
        if question.name == SERVE:
            return
        self._described.add(question.name)
        self._worker_settings = question.kernel_settings if answer[0] in ("ran", "raised") else None

    def _failed(self, question: Question, error: BaseException) -> None:
        """Put what went wrong in the channel into the question; an interrupt is raised again."""
        calls, limit_s, name = self._calls, self.limit_s, question.name
        running = calls.oldest() if calls is not None and name == SERVE else None
        if running is not None:
            name, limit_s = running.name, running.limit_s
        # Nothing was sent, or the answer was read to its end: the channel is in order.
        if isinstance(error, Unsendable):
            question.error = error
        elif isinstance(error, TimeoutError):
            # A hang counts as a death: each one costs the program the whole time limit.
            self._deaths[name] += 1
            question.error = WorkerDied(f"worker hung: no answer within {limit_s:g} s, ended by signal 9 (SIGKILL)")
            self._end_process(question.error)
        elif isinstance(error, (ChannelClosed, OSError)):
            self._deaths[name] += 1
            assert self._process is not None
            question.error = WorkerDied(f"worker died: {self._process.exit_reason()}")
            self._end_process(question.error)
        else:  # an interrupt: the next call would receive the answer to this one
            self._end_process()
            raise error

    def _restarted(self) -> Channel:
        """The channel, for a program that runs: a worker that cannot be started is not tried again and again."""
        try:
            # Each try takes seconds of the program's time.
            if self._failed_starts >= _MAX_DEATHS:
                raise WorkerDied("worker died and could not be started again")
            return self._ensure_started()
        except PlatformError as error:
            self._failed_starts += 1
            raise WorkerDied(f"worker died and could not be started again: {error}") from None

    def _ensure_started(self) -> Channel:
        if self._channel is not None:
            return self._channel
        environment = settings.environment(self._spec.settings)
        self._refuse_missing_instructions(environment)
        process = self._process = Process(self._spec)
        channel = self._channel = Channel(process.connection)
        # A new process knows no signatures and none of the program's settings.
        self._described.clear()
        self._worker_settings = None
        try:
            channel.limit(_START_LIMIT_S)
            channel.send((PROBE, self._spec.settings))
            probe, facts = channel.receive()
        except BaseException as error:
            why = process.stderr_tail() or "it wrote nothing"
            how = self._exit_reason()
            if isinstance(error, TimeoutError):
                how = f"it was not ready within {_START_LIMIT_S:g} s"
            if not isinstance(error, (ChannelClosed, OSError, Unsendable)):
                raise
            raise PlatformError(
                f"The process of platform {str(self._spec)!r} did not start ({how}): {why}.", slug="no-worker"
            ) from None
        if probe != PROBE:
            self._end_process()
            raise PlatformError(
                f"The process of platform {str(self._spec)!r} reads values in another form: its Python is "
                f"{facts.get('python')}.",
                slug="no-worker",
            )
        # Torch ignores a word that it does not know, and the comparison would be of one platform with itself.
        self._refuse_other(environment, str(facts.get("cpu_capability")))
        self._facts = facts
        self._failed_starts = 0
        return channel

    def _refuse_missing_instructions(self, environment: dict[str, str]) -> None:
        found = cpu.missing_instructions(environment)
        if found is not None:
            name, value, missing = found
            raise PlatformError(
                f"Platform {str(self._spec)!r}: this processor lacks instructions that {name}={value} asks for "
                f"({missing}).",
                slug="absent-isa",
            )

    def _refuse_other(self, environment: dict[str, str], got: str) -> None:
        """Check what torch reports, which also works where the system does not list the processor's flags."""
        wanted = environment.get("ATEN_CPU_CAPABILITY", "").upper()
        if wanted in ("DEFAULT", "AVX2", "AVX512") and got != wanted:
            self._end_process()
            raise PlatformError(
                f"Platform {str(self._spec)!r}: torch there computes with {got} instructions, not with {wanted}: this "
                "processor or this build of torch has no others.",
                slug="absent-isa",
            )

    def _exit_reason(self) -> str:
        process = self._process
        assert process is not None
        how = process.exit_reason()
        self._end_process()
        return how

    def _end_process(self, error: Exception | None = None) -> None:
        if self._process is not None:
            self._process.end()
        if self._calls is not None:
            self._calls.fail(error or WorkerDied("worker ended before it answered"))
        self._process = self._channel = self._open = self._calls = None
