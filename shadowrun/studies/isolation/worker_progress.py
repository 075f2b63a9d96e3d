"""What a worker process does now: written to memory that its parent shares, so that it is known after any death.

A message on a pipe for each case would wake the parent twice for a case of a millisecond. Memory costs microseconds,
and what a killed process wrote stays.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

__all__ = ["PAGE_BYTES", "Step", "StepReader", "StepWriter", "new_page", "processor_seconds", "resident_bytes"]

PAGE_BYTES: Final = 4096
# Sequence number, start (s), memory (bytes), whether on the target, lengths of operator and case.
_HEAD: Final = struct.Struct("<QdQBHH")
_SEQUENCE: Final = struct.Struct("<Q")
_FLAGS: Final = struct.Struct("<BH")
_LENGTH: Final = struct.Struct("<H")
_FLAGS_AT: Final = 24
_MAX_OP: Final = 200
_OP_AT: Final = _HEAD.size
_CASE_AT: Final = _OP_AT + _MAX_OP
_MAX_CASE: Final = PAGE_BYTES - _CASE_AT


@dataclass(slots=True)
class Step:
    """Progress of a worker.

    Attributes:
        case: The case in hand, as the worker named it; None between cases.
        on_target: Whether it runs on the target; the reference has run it.
        op: Operator in hand; empty where the worker does not say.
        since: `time.monotonic` when it began.
        base_bytes: Memory of the process then.
    """

    case: Any = None
    on_target: bool = False
    op: str = ""
    since: float = field(default_factory=time.monotonic)
    base_bytes: int = 0


def new_page() -> int:
    """File descriptor of a page for a worker and its parent."""
    with tempfile.TemporaryFile() as file:
        # Written, so that its block is there: on a full disk a later store would end the process.
        file.write(bytes(PAGE_BYTES))
        file.flush()
        return os.dup(file.fileno())


class StepWriter:
    """The worker's end.

    Args:
        descriptor: Of `new_page`.
    """

    def __init__(self, descriptor: int) -> None:
        self._page = mmap.mmap(descriptor, PAGE_BYTES)
        self._sequence = self._base_bytes = 0
        self._statm = _open_statm()

    def begin(self, case: Any) -> None:
        """A case begins: what ends the process from here on is its outcome."""
        text = json.dumps(case, separators=(",", ":")).encode()
        if len(text) > _MAX_CASE:
            raise ValueError(f"the name of a case has {len(text)} bytes; {_MAX_CASE} at most")
        # Measured per case: memory that a worker keeps from earlier cases must not count.
        self._base_bytes = self._memory_bytes()
        self._write(text)

    def end(self) -> None:
        """The case has ended, and its outcome was sent."""
        self._write(b"")

    def on_target(self) -> None:
        """The target begins; the reference has run the case."""
        _FLAGS.pack_into(self._page, _FLAGS_AT, 1, 0)

    def in_op(self, name: str) -> None:
        """An operator begins, on either platform; empty where it is not known which."""
        # No new sequence number: the case stays, and a name that is half written only looks odd.
        text = name.encode()[:_MAX_OP]
        self._page[_OP_AT : _OP_AT + len(text)] = text
        _LENGTH.pack_into(self._page, _FLAGS_AT + 1, len(text))

    def _write(self, text: bytes) -> None:
        # An odd number means that the page is being written: a process killed now has no case in hand yet.
        _SEQUENCE.pack_into(self._page, 0, self._sequence + 1)
        self._page[_CASE_AT : _CASE_AT + len(text)] = text
        self._sequence += 2
        odd, now = self._sequence - 1, time.monotonic()
        _HEAD.pack_into(self._page, 0, odd, now, self._base_bytes, 0, 0, len(text))
        _SEQUENCE.pack_into(self._page, 0, self._sequence)

    def _memory_bytes(self) -> int:
        return 0 if self._statm < 0 else _resident(os.pread(self._statm, 100, 0))


class StepReader:
    """The parent's end.

    Args:
        descriptor: Of `new_page`; closed here.
    """

    def __init__(self, descriptor: int) -> None:
        self._page = mmap.mmap(descriptor, PAGE_BYTES, access=mmap.ACCESS_READ)
        os.close(descriptor)

    def read(self) -> Step:
        """What the worker does; between cases if it is just about to begin one."""
        whole = self._page[:]
        sequence, since, base_bytes, on_target, n_op, n_case = _HEAD.unpack_from(whole)
        if sequence % 2 or not n_case or _SEQUENCE.unpack_from(self._page)[0] != sequence:
            return Step(since=since or time.monotonic(), base_bytes=base_bytes)
        case = json.loads(whole[_CASE_AT : _CASE_AT + n_case])
        op = whole[_OP_AT : _OP_AT + n_op].decode(errors="replace")
        return Step(case, bool(on_target), op, since, base_bytes)

    def close(self) -> None:
        """Free the page."""
        self._page.close()


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 where the system does not report it (Linux does)."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:  # noqa: PTH123 - ten times a second and worker
            return _resident(file.read())
    except (OSError, IndexError):
        return 0


def processor_seconds(pid: int) -> float:
    """Processor time of a process and its ended children; 0 where the system does not report it (Linux does)."""
    try:
        # After the name, which may have spaces and brackets: utime, stime, cutime, cstime are fields 14 to 17.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[11:15]
        return sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


def _open_statm() -> int:
    try:
        return os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return -1


def _resident(statm: bytes) -> int:
    # The second field is the resident memory, in pages.
    return int(statm.split(None, 2)[1]) * mmap.PAGESIZE
