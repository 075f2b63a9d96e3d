"""The worker process: runs operators under settings that a process reads once, at its start.

Started by `remote.Worker`; ends when its parent closes the connection or dies, also in the middle of a call.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
import warnings
from typing import Any

import torch

from shadowrun.platforms import torchplatform, wire
from shadowrun.platforms.cpu import CpuSettings

__all__ = ["main"]

_clock = time.perf_counter_ns


def main(descriptor: int) -> None:
    """Serve calls until the parent is gone."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # a crash is reported, its core is nobody's
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with_parent, args=(descriptor, os.getppid()), daemon=True).start()
    try:
        server = _Server(wire.receive(connection))
        wire.send(connection, ("ready", server.facts()))
        with torch.no_grad(), torchplatform.below_autograd():
            while True:
                answer = server.answer(wire.receive(connection))
                try:
                    wire.send(connection, answer)
                except wire.Unsendable as reason:
                    wire.send(connection, ("unsendable", f"a result, {reason}"))
                del answer
    except (wire.Closed, OSError):
        os._exit(0)


def _end_with_parent(descriptor: int, parent: int) -> None:
    """Leave as soon as nobody can want the answer: a call that hangs would go on for ever."""
    poll = select.poll()
    poll.register(descriptor, 0)
    while not poll.poll(1000) and os.getppid() == parent:
        pass
    os._exit(0)


class _Server:
    """Runs the calls.

    Args:
        settings: The platform's own, as in `PlatformSpec.settings`: they go before what the program has set.
    """

    def __init__(self, settings: tuple[tuple[str, Any], ...]) -> None:
        self._settings = settings
        self._ambient: tuple[Any, ...] | None = None
        self._operators: dict[str, Any] = {}
        CpuSettings(settings).__enter__()

    def facts(self) -> dict[str, Any]:
        """Fingerprint of this process."""
        from shadowrun.platforms.device import resolve
        from shadowrun.platforms.fingerprint import fingerprint

        return fingerprint(resolve("cpu"))

    def answer(self, call: Any) -> Any:
        """Run one call; what it raises is part of the answer."""
        name, args, kwargs, returns, written, ambient, rng = call
        operator = self._operators.get(name)
        if operator is None:
            operator = _find(name)
            if operator is None:
                return "unsendable", f"the worker has no operator {name}"
            self._operators[name] = operator
        if ambient != self._ambient:
            self._ambient = ambient
            torchplatform.set_ambient(ambient[:-1])
            torch.set_flush_denormal(ambient[-1])
            CpuSettings(self._settings).__enter__()
        if rng is not None:
            torch.set_rng_state(rng)
        try:
            start = _clock()
            out = operator(*args, **kwargs)
            ns = _clock() - start
        except Exception as error:
            kind = type(error)
            return "raised", kind.__module__, kind.__qualname__, str(error)
        results = (out,) if returns[0] == 1 else out
        fresh = [v if i in returns[1] else None for i, v in enumerate(results)] if returns[0] else []
        mutated = [kwargs.get(n) if p < 0 else args[p] for n, p in written]
        return "ran", fresh, mutated, ns


def _find(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    except AttributeError:
        return None
