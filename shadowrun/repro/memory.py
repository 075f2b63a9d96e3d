"""A bound on memory while a file's calls are made: too large an allocation raises, and nobody's process is killed."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["bounded"]

_SHARE = 0.9
_LEAST = 1 << 30


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Inside, this process and those that it starts may take what the machine has left, and no more (Linux).

    The kernel promises more than there is; who then uses it is killed. Elsewhere than on Linux nothing is bounded.
    """
    left = _left()
    if left is None:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = _held() + max(_LEAST, int(_SHARE * left))
    bounds = [most, *(n for n in (soft, hard) if n != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(bounds), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _left() -> int | None:
    """Bytes that can be used before something has to be given up: of the machine, and of this container."""
    if sys.platform != "linux":
        return None
    try:
        machine = next(line for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:"))
        left = int(machine.split()[1]) << 10
    except (OSError, StopIteration, ValueError):
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):  # "max", or no such group
        most, used = (int(_lines(f"/sys/fs/cgroup/memory.{name}")[0]) for name in ("max", "current"))
        left = min(left, most - used)
    return left


def _held() -> int:
    """Bytes of private memory that this process has now, used or not."""
    found = next((line for line in _lines("/proc/self/status") if line.startswith("VmData:")), "VmData: 0 kB")
    return int(found.split()[1]) << 10


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="ascii", errors="replace").splitlines()
