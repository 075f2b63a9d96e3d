"""Bounds on what a file from elsewhere may cost: memory while its calls run, memory and time of commands that read.

Readers check sizes before they take memory, each for what it knows of. What no reader thought of ends here: a process
that reads gets memory and time in proportion to the bytes of its files.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import itertools
import mmap
import os
import stat
import struct
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from shadowrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "CurrentCall",
    "ResourceLimits",
    "at_most_free",
    "bounded_memory",
    "current_call",
    "read_head",
    "read_text",
    "read_toml",
]

# In what torch says of memory that it did not get.
_OF_TORCH = "DefaultCPUAllocator"
# The rest is for the other processes of the machine.
_SHARE = 0.9
_LEAST = 1 << 30

_MEMORY: Final = 1 << 30
# Of a data file of 200,000 calls, a report takes 8 bytes for each of the file; of recordings, `classes` takes 6.
_MEMORY_PER_BYTE: Final = 32
_SECONDS: Final = 60
# Of processor time. The same report takes 1.5, `classes` 0.5; importing torch takes some seconds of its own.
_SECONDS_PER_MB: Final = 5
# Files of a folder that are looked at: the current folder may be a home directory.
_MAX_ENTRIES: Final = 100_000
# How names end of the files that a command reads in a folder, campaigns' and published results (JSON) among them.
_READ_IN_FOLDERS: Final = (".shadowrun", ".shadowrec", ".shadowzoo", ".shadowcampaign", ".json")
_RANK_OF_DEFAULT: Final = ".shadowrun."  # `.shadowrun.0`: of rank 0, where the file has no other name
# Bytes of a text file: a ledger of ten thousand lines has one million.
_MAX_TEXT: Final = 1 << 24
# In a line of TOML: for a key of n parts, `tomllib` takes time and memory in proportion to the square of n.
_MAX_DOTS: Final = 200


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """What a command that only reads files may take.

    Attributes:
        n_bytes: Of its files, on disk.
        memory: Bytes, beyond those that the process begins with (Linux), and of each file that it writes.
        seconds: Of processor time.
    """

    n_bytes: int
    memory: int
    seconds: int

    @classmethod
    def for_files(cls, names: Iterable[str], packed: int = 1) -> Self:
        """For the files, folders and patterns among some words; any other word counts for nothing.

        A file counts once, whatever its names: an archive has further names for few bytes.

        Args:
            names: The words.
            packed: Bytes that a byte of a file usually unpacks to.
        """
        n_bytes = packed * _size({path for name in names if name for path in _named(name)})
        return cls(n_bytes, _MEMORY + _MEMORY_PER_BYTE * n_bytes, _SECONDS + _SECONDS_PER_MB * (n_bytes >> 20))

    @property
    def words(self) -> str:
        """``1.1 GiB of memory or disk, or 80 s of processor time, enough for 4.2 MB of files``."""
        return (
            f"{self.memory / 2**30:.1f} GiB of memory or disk, or {self.seconds} s of processor time, enough for "
            f"{self.n_bytes / 1e6:.1f} MB of files"
        )

    def bound_time_and_disk(self) -> None:
        """From now on, the system ends this process by SIGXCPU where it takes longer, and no file becomes longer.

        Not on Windows. Temporary files of SQLite and tables repeat a text of a file for each row that refers to it.
        """
        with contextlib.suppress(ImportError, ValueError, OSError):  # no such limits
            import resource

            soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
            used = resource.getrusage(resource.RUSAGE_SELF)
            bounds = [int(used.ru_utime + used.ru_stime) + self.seconds, soft, hard]
            bounds = [seconds for seconds in bounds if seconds != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_CPU, (min(bounds), hard))
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            # The output may go to the end of a log, which is longer already.
            lengths = [n for n in (self.memory + _length_of_output(), soft, hard) if n != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_FSIZE, (min(lengths), hard))
            # A signal of this kind would leave an image of the whole memory.
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _length_of_output() -> int:
    """Bytes of the longer of the files that standard output and error go to; 0 where they go to none."""
    found = [0]
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # it is closed
            about = os.fstat(descriptor)
            found.append(about.st_size if stat.S_ISREG(about.st_mode) else 0)
    return max(found)


class CurrentCall:
    """The call of a file that this process makes, in memory that its parent shares: known after any death.

    Attributes:
        ended: What ended an earlier child at a call, by the number of the call: it must not be made again.
        PAGER: Number that says that a person reads what the child has shown.
        AT_END: Number that says that the child ends by itself: a library that ends it says nothing.
    """

    PAGER: Final = -2
    AT_END: Final = -3
    _HEAD: Final = struct.Struct("<qH")

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self.ended: dict[int, str] = {}
        self.begin(-1, "")

    def begin(self, number: int, op: str) -> None:
        """A call begins; -1 between calls, and where a call cannot be left out."""
        text = op.encode("utf-8", "replace")[:1000]
        self._page[: self._HEAD.size + len(text)] = self._HEAD.pack(number, len(text)) + text

    def read(self) -> tuple[int, str]:
        """Its number and operator."""
        number, n = self._HEAD.unpack_from(self._page)
        return number, self._page[self._HEAD.size : self._HEAD.size + n].decode("utf-8", "replace")


current_call: Final = CurrentCall()
"""Of this process, and of the one that it was forked from."""


def read_text(path: Path) -> str:
    """The text of a file that a person wrote, TOML or JSON.

    Raises:
        OSError: It cannot be read, or is no regular file: a device has no end, and a pipe would block.
        ValueError: It is no UTF-8, or larger than any such file.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file")
    with path.open("rb") as file:
        content = file.read(_MAX_TEXT + 1)
    if len(content) > _MAX_TEXT:
        raise ValueError(f"it has more than {_MAX_TEXT >> 20} MiB")
    return content.decode("utf-8").replace("\r\n", "\n")


def read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of a TOML file, and its content.

    Raises:
        OSError, ValueError: As `read_text`, or it is no TOML.
        RecursionError: It has lists of lists without end.
    """
    text = read_text(path)
    if any(line.count(".") > _MAX_DOTS for line in text.split("\n")):
        raise ValueError(f"a line has more than {_MAX_DOTS} dots")
    return text, tomllib.loads(text)


def read_head(path: Path, n: int) -> bytes:
    """The first bytes of a regular file; none of what cannot be read, or is a pipe, which would block."""
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(n)
    return b""


@contextlib.contextmanager
def bounded_memory(most: int | None = None) -> Iterator[None]:
    """Inside, this process and those that it starts may take what the machine has left, and no more (Linux).

    The kernel promises more than there is; who then uses it is killed. Elsewhere than on Linux nothing is bounded.

    Args:
        most: Bytes that it may take if the machine has as many.

    Raises:
        UsageError: Memory ran out, and the call did not catch that.
    """
    try:
        with _limit(most):
            yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and _OF_TORCH not in str(error):
            raise
        raise UsageError("What the file asks for takes more memory than there is.", slug="no-memory") from error


@contextlib.contextmanager
def _limit(most: int | None) -> Iterator[None]:
    left = _available_bytes()
    if left is None:
        yield
        return
    import resource

    # RLIMIT_DATA counts private writable memory; RLIMIT_AS would also count address space that is only reserved.
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    share = max(_LEAST, int(_SHARE * left))
    end = _private_bytes() + (share if most is None else min(share, most))
    bounds = [end, *(n for n in (soft, hard) if n != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(bounds), hard))
    try:
        yield
    finally:
        # The hard limit stays: a process cannot raise it again.
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def at_most_free(n_bytes: int) -> int:
    """So many bytes, or what the machine has left, where that is less: a file may ask for any number (Linux)."""
    left = _available_bytes()
    return n_bytes if left is None else min(n_bytes, max(_LEAST, int(_SHARE * left)))


def _available_bytes() -> int | None:
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


def _private_bytes() -> int:
    """Bytes of private memory that this process has now, used or not."""
    size = next((line for line in _lines("/proc/self/status") if line.startswith("VmData:")), "VmData: 0 kB")
    return int(size.split()[1]) << 10


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="ascii", errors="replace").splitlines()


def _named(name: str) -> Iterator[str]:
    """Paths that a word of the command line stands for."""
    with contextlib.suppress(OSError, ValueError):  # too long for a name, or with NUL
        # Not `Path.glob`, which takes no absolute pattern.
        found = [name] if Path(name).exists() or not glob.has_magic(name) else glob.glob(name)  # noqa: PTH207
        yield from (os.path.realpath(path) for path in found)


def _size(named: set[str]) -> int:
    """Bytes of files, and of those in folders, at all depths, that a command may read there."""
    sizes: dict[tuple[int, int], int] = {}
    waiting, n_left = list(named), _MAX_ENTRIES
    while waiting:
        with contextlib.suppress(OSError):
            here = waiting.pop()
            found = os.lstat(here)
            if stat.S_ISDIR(found.st_mode):
                inside = [entry.path for entry in itertools.islice(os.scandir(here), n_left)]
                n_left -= len(inside)
                waiting += inside
            elif stat.S_ISREG(found.st_mode) and (here in named or _is_read(Path(here).name)):
                # Holes of a file are free: it may claim any size.
                n_bytes = min(found.st_size, getattr(found, "st_blocks", found.st_size) * 512)
                sizes[found.st_dev, found.st_ino] = n_bytes
    return sum(sizes.values())


def _is_read(name: str) -> bool:
    return name.endswith(_READ_IN_FOLDERS) or name.startswith(_RANK_OF_DEFAULT)
