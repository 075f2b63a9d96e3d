"""The worker process: runs operators under settings that a process reads once, at its start, or with another torch.

Started by `process.Process`; ends when its parent closes the connection or dies, also in the middle of a call. Its
environment may have torch and nothing else: it imports torch, the standard library and modules that do the same.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import select
import socket
import threading
import time
import warnings
from typing import Any

import torch

from shadowrun.platforms import cpu, torchplatform
from shadowrun.platforms.cpu import CpuSettings
from shadowrun.platforms.device import resolve
from shadowrun.platforms.fingerprint import fingerprint
from shadowrun.platforms.settings import environment
from shadowrun.platforms.worker import wire
from shadowrun.platforms.worker.channel import PROBE, Channel, ChannelClosed
from shadowrun.platforms.worker.ring import OPEN, SERVE, Ring
from shadowrun.platforms.worker.ring_answers import answer_in_ring
from shadowrun.platforms.worker.wire import Unsendable

__all__ = ["main"]

_clock = time.perf_counter_ns


def main(descriptor: int) -> None:
    """Serve calls until the parent has ended."""
    # What was imported stays: the collector, which was off until here, need not go through a million objects of torch.
    gc.freeze()
    gc.enable()
    with contextlib.suppress(ImportError, ValueError, OSError):  # a crash is reported; its core file has no use
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What a replay warns of is not for the user.
    warnings.simplefilter("ignore")
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with_parent, args=(descriptor, os.getppid()), daemon=True).start()
    channel = Channel(connection, answers=True)
    try:
        probe, settings = channel.receive()
        if probe != PROBE:
            raise SystemExit(f"Python {platform.python_version()} reads values in another form")
        server = _Server(settings)
        channel.send((PROBE, server.facts()))
        # As inside a dispatch mode's handler, where the call was made.
        with torch.no_grad(), torchplatform.below_autograd():
            while True:
                _serve(channel, server)
    # The parent has ended: no clean-up of torch may delay the end.
    except (ChannelClosed, OSError):
        os._exit(0)


def _serve(channel: Channel, server: _Server) -> None:
    """Answer one message, and keep nothing of it: the next one uses the same shared memory."""
    try:
        message = channel.receive()
        if message == SERVE:
            server.serve_ring()
            channel.send(SERVE)
        elif message == OPEN:
            server.open_ring(channel.carried.pop())
            channel.send(OPEN)
        else:
            channel.send(_answer(channel, server, message))
    except Unsendable as reason:
        channel.send(("unsendable", str(reason)))


def _answer(channel: Channel, server: _Server, message: tuple[Any, ...]) -> Any:
    try:
        return server.answer(*message)
    except _NotResizable:  # shared memory has a fixed size: once more with inputs in private memory
        return server.answer(*channel.receive_again(), grows=True)


def _end_with_parent(descriptor: int, parent: int) -> None:
    """Exit as soon as the parent has ended: a call that hangs would never return."""
    poll = select.poll()
    poll.register(descriptor, 0)
    while not poll.poll(1000) and os.getppid() == parent:
        pass
    # `sys.exit` would end this thread only.
    os._exit(0)


class _NotResizable(Exception):  # noqa: N818 - a reason, caught inside
    """A call makes an argument larger, and shared memory cannot grow."""


class _Server:
    """Runs the calls.

    Args:
        settings: Of the platform, as in `PlatformSpec.settings`; they override what the program has set.
    """

    def __init__(self, settings: tuple[tuple[str, Any], ...]) -> None:
        self._settings = settings
        self._operators: dict[str, Any] = {}
        self._differing: dict[str, tuple[wire.Signature, wire.Signature]] = {}
        self._ring: Ring | None = None
        CpuSettings(settings).__enter__()

    def facts(self) -> dict[str, Any]:
        """Fingerprint of this process."""
        facts = fingerprint(resolve("cpu")) | {"python": platform.python_version()}
        mkl = bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
        mkldnn = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        notes = cpu.settings_without_effect(environment(self._settings), mkl=mkl, mkldnn=mkldnn)
        return facts | ({"without_effect": "; ".join(notes)} if notes else {})

    def open_ring(self, descriptor: int) -> None:
        """Take the memory in which calls wait."""
        self._ring = Ring(descriptor)
        os.close(descriptor)

    def serve_ring(self) -> None:
        """Answer the calls that wait, and those that come in the meantime."""
        ring = self._ring
        assert ring is not None
        while (number := ring.answered + 1) <= ring.written:
            *call, changed = ring.text(number)
            self._set(wire.decode(changed, (), ()))
            ring.settle(number, *answer_in_ring(ring, call, self.answer))

    def _set(self, kernel_settings: tuple[Any, ...] | None) -> None:
        # Only where they changed: each call into torch costs time in every replay.
        if kernel_settings is not None:
            torchplatform.set_kernel_settings(kernel_settings[:-1])
            torch.set_flush_denormal(kernel_settings[-1])
            # After the program's settings: those of the platform override them.
            CpuSettings(self._settings).__enter__()

    def answer(
        self,
        plain: tuple[str, wire.Signature | None, tuple[int, tuple[int, ...]], tuple[tuple[str, int], ...]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kernel_settings: tuple[Any, ...] | None,
        rng: torch.Tensor | None,
        *,
        grows: bool = False,
    ) -> Any:
        """Run one call; what it raises is part of the answer. `client.Worker.call` documents the arguments.

        Args:
            plain: Name, signature, returns and written arguments.
            args: Positional inputs.
            kwargs: Inputs by name.
            kernel_settings: The program's settings where they have changed since the last call.
            rng: State of the generator.
            grows: Whether the memory of arguments may grow.

        Raises:
            _NotResizable: The call needs arguments whose memory can grow, and these cannot unless `grows`.
        """
        name, signature, returns, written = plain
        operator = self._operators.get(name)
        if operator is None:
            operator = wire.find_operator(name)
            if operator is None:
                return "lacking", str(torch.__version__)
            self._operators[name] = operator
        if signature is not None and (here := wire.signature(operator)) != signature:
            self._differing[name] = (signature, here)
        if name in self._differing:
            why = wire.signature_difference(*self._differing[name], len(args), kwargs)
            if why:
                return "unsendable", f"torch {torch.__version__} has another {name}: {why}"
        self._set(kernel_settings)
        try:
            return _run(operator, args, kwargs, returns, written, rng)
        except Exception as error:
            if not grows and "storage that is not resizable" in str(error):
                raise _NotResizable from None
            kind = type(error)
            return "raised", kind.__module__, kind.__qualname__, str(error)


def _run(
    operator: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    returns: tuple[int, tuple[int, ...]],
    written: tuple[tuple[str, int], ...],
    rng: torch.Tensor | None,
) -> Any:
    if rng is not None:
        torch.set_rng_state(rng)
    # The time of the transfer is not the operator's.
    start = _clock()
    out = operator(*args, **kwargs)
    ns = _clock() - start
    results = (out,) if returns[0] == 1 else out
    fresh = [v if i in returns[1] else None for i, v in enumerate(results)] if returns[0] else []
    mutated = [kwargs.get(n) if p < 0 else args[p] for n, p in written]
    return "ran", fresh, mutated, ns
