"""Flaws that end or block the process: a crash, a hang, a call that allocates until memory runs out.

They are kept out of `CATALOGUE`, because no comparison inside that process could report them. They are for commands
that run operators in processes of their own, such as `shadowrun sweep`.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

from shadowrun.sim.flaw import FlawKind

if TYPE_CHECKING:
    from shadowrun.sim.flaw import KernelChanges

__all__ = ["flaw"]

_PIECE = 16 << 20
_PAUSE_S = 0.02

flaw = FlawKind("fatal", statuses=("error",))


def _crash(*_: Any, **__: Any) -> None:
    # By the signal: a real bad access would depend on the layout of memory.
    os.kill(os.getpid(), signal.SIGSEGV)


@flaw(
    "erfinv-crashes",
    "erfinv ends the process by SIGSEGV",
    issue="none: a driver of a device in its first year",
    operators=("aten::erfinv", "aten::erfinv_", "aten::erfinv.out"),
)
def erfinv_crashes(kernels: KernelChanges) -> None:
    kernels.call_before(_crash, "aten::erfinv", "aten::erfinv_", "aten::erfinv.out")


def _hang(*_: Any, **__: Any) -> None:
    while True:
        # Asleep: a busy loop would take the processor from tests that run at the same time.
        time.sleep(1)


@flaw(
    "digamma-hangs",
    "digamma never returns",
    issue="none: a driver of a device in its first year",
    operators=("aten::digamma", "aten::digamma_", "aten::digamma.out"),
)
def digamma_hangs(kernels: KernelChanges) -> None:
    kernels.call_before(_hang, "aten::digamma", "aten::digamma_", "aten::digamma.out")


def _hog(*_: Any, **__: Any) -> None:
    held = []
    while True:
        held.append(bytes(b"x" * _PIECE))  # written to, so that the memory is really there
        time.sleep(_PAUSE_S)  # slowly enough for a watchdog to see it grow


@flaw(
    "i0-hogs-memory",
    "i0 takes more and more memory",
    issue="none: a driver of a device in its first year",
    operators=("aten::i0", "aten::i0_", "aten::i0.out"),
)
def i0_hogs_memory(kernels: KernelChanges) -> None:
    kernels.call_before(_hog, "aten::i0", "aten::i0_", "aten::i0.out")
