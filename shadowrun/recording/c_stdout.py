"""What libraries print to C's standard output during a call, kept from the program's own output.

oneDNN and MKL print to the stream `stdout` of the C library. In glibc that is a variable: it is set to a stream in
memory for the time of a call. The file descriptor is left alone, so that Python's prints, Python code of other threads
and child processes write where they always do. What other C code prints in that time is given to the real stream after
the call.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

__all__ = ["CStdout"]


class CStdout:
    """A stream in memory that takes the place of C's `stdout`. Not safe to use from several threads at once.

    Raises:
        OSError: This C library has no such variable, or no streams in memory.
    """

    def __init__(self) -> None:
        # `PyDLL` keeps the interpreter's lock: no other thread sees the half of an exchange.
        libc: Any = ctypes.PyDLL(None) if sys.platform == "linux" else None
        if not hasattr(libc, "gnu_get_libc_version"):
            raise OSError("only in glibc may `stdout` be another stream")
        libc.open_memstream.restype = ctypes.c_void_p
        libc.fseeko.argtypes = (ctypes.c_void_p, ctypes.c_long, ctypes.c_int)
        self._libc = libc
        self._write: Any = ctypes.CDLL(None).fwrite  # may wait for a full pipe
        self._stdout = ctypes.c_void_p.in_dll(libc, "stdout")
        self._text, self._size = ctypes.c_void_p(), ctypes.c_size_t()
        self._memory = ctypes.c_void_p(libc.open_memstream(ctypes.byref(self._text), ctypes.byref(self._size)))
        if not self._memory.value:
            raise OSError("no stream in memory")
        self._real: int | None = None

    def begin(self) -> None:
        """Take the place of `stdout`."""
        self._real = self._stdout.value
        self._stdout.value = self._memory.value

    def end(self) -> bytes:
        """Give `stdout` back.

        Returns:
            What was printed since `begin`.
        """
        if self._real is not None:
            self._stdout.value, self._real = self._real, None
        self._libc.fflush(self._memory)
        text = ctypes.string_at(self._text, self._size.value) if self._size.value else b""
        self._libc.fseeko(self._memory, 0, 0)
        return text

    def print(self, text: bytes) -> None:
        """Print to the real stream what was not meant for us."""
        if text:
            self._write(text, ctypes.c_size_t(1), ctypes.c_size_t(len(text)), self._stdout)

    def close(self) -> None:
        """Free the stream."""
        if self._memory.value:
            self.end()
            self._libc.fclose(self._memory)
            self._libc.free(self._text)
            self._memory.value = None
