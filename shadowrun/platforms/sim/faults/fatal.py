"""A crash, a hang, and a call that takes all memory."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

from shadowrun.platforms.sim.bench import FAULTS
from shadowrun.platforms.sim.catalogue.fatal import FLAWS

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.platforms.sim.bench import Bench

__all__: list[str] = []

_PIECE = 16 << 20
_PAUSE_S = 0.02


def _crash(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang(*_: Any, **__: Any) -> None:
    while True:
        time.sleep(1)


def _hog(*_: Any, **__: Any) -> None:
    held = []
    while True:
        held.append(bytes(b"x" * _PIECE))  # written to, so that the memory is really there
        time.sleep(_PAUSE_S)  # whoever watches gets to see it grow


_ACTIONS = {"erfinv-crashes": _crash, "digamma-hangs": _hang, "i0-hogs-memory": _hog}


def _builder(operators: tuple[str, ...], action: Callable[..., None]) -> Callable[[Bench], None]:
    return lambda bench: bench.call_before(action, *operators)


for _flaw in FLAWS:
    FAULTS[_flaw.name] = _builder(_flaw.operators, _ACTIONS[_flaw.name])
