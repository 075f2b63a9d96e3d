"""A bound on memory while a file's calls are made: too large an allocation raises, and no process is killed."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shadowrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["bounded_memory"]

_OF_TORCH = "DefaultCPUAllocator"
"""In what torch says of memory that it did not get."""
# The rest is for the other processes of the machine.
_SHARE = 0.9
_LEAST = 1 << 30


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Inside, this process and those that it starts may take what the machine has left, and no more (Linux).

    The kernel promises more than there is; who then uses it is killed. Elsewhere than on Linux nothing is bounded.

    Raises:
        UsageError: Memory ran out, and the call did not catch that.
    """
    try:
        with _limit():
            yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and _OF_TORCH not in str(error):
            raise
        raise UsageError("What the file asks for takes more memory than there is.", slug="no-memory") from error


@contextlib.contextmanager
def _limit() -> Iterator[None]:
    left = _left()
    if left is None:
        yield
        return
    import resource

    # RLIMIT_DATA counts private writable memory; RLIMIT_AS would also count address space that is only reserved.
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = _held() + max(_LEAST, int(_SHARE * left))
    bounds = [most, *(n for n in (soft, hard) if n != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(bounds), hard))
    try:
        yield
    finally:
        # The hard limit stays: a process cannot raise it again.
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
    # A container may have less than the machine; its group then says so.
    with contextlib.suppress(OSError, ValueError, IndexError):  # "max", or no such group
        most, used = (int(_lines(f"/sys/fs/cgroup/memory.{name}")[0]) for name in ("max", "current"))
        left = min(left, most - used)
    return left


def _held() -> int:
    """Bytes of private memory that this process has now, used or not."""
    size = next((line for line in _lines("/proc/self/status") if line.startswith("VmData:")), "VmData: 0 kB")
    return int(size.split()[1]) << 10


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="ascii", errors="replace").splitlines()
