"""`KernelTracer`: the name of the kernel that runs in a call, for `kernels=` of a recording.

On the CPU a call is profiled for the operators inside it, by torch's older profiler: it takes 13 µs a call and prints
nothing, where Kineto takes 50 µs and prints to standard error. oneDNN and MKL are asked to print what they run. On an
accelerator Kineto is the only one that knows the kernels; the call is waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.intercept import torchapi
from shadowrun.intercept.user_call import own_call
from shadowrun.recording.kernel_paths import kernel_name, mkl_parts, of_the_program, onednn_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["CStdout", "KernelTracer"]

_VERBOSE: Final = ("ONEDNN_VERBOSE", "DNNL_VERBOSE", "MKL_VERBOSE")
_NO_ARITHMETIC: Final = (
    *("_local_scalar_dense", "_nnpack_available", "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "as_strided"),
    *("as_strided_", "clone", "contiguous", "copy_", "detach", "empty", "empty_like", "empty_strided", "expand"),
    *(
        "expand_as",
        "fill_",
        "is_nonzero",
        "item",
        "lift_fresh",
        "mH",
        "mT",
        "narrow",
        "new_empty",
        "permute",
        "reshape",
    ),
    *("resize_", "resolve_conj", "resolve_neg", "select", "set_", "slice", "split", "squeeze", "t", "to", "transpose"),
    *("unbind", "unsqueeze", "view", "view_as", "zero_"),
)
# Operators that allocate, view, copy, fill or ask: most calls have some inside, and they do not round.
_SKIPPED: Final = frozenset(f"aten::{name}" for name in _NO_ARITHMETIC)
# Devices whose kernels `torch.profiler` knows.
_ACCELERATORS: Final = ("cuda", "xpu")
_TRANSFERS: Final = ("Memcpy", "Memset", "zeCommandListAppendMemory")
_LOG_LEVEL: Final = "KINETO_LOG_LEVEL"


class KernelTracer:
    """Runs calls of the program, and finds out what ran in them.

    Two calls at the same time, on two threads, would be mixed up: the names of their kernels stay empty. So do those of
    calls that the program profiles itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_mixed = False
        self._last = threading.local()
        self._suffix = f" {torch.backends.cpu.get_cpu_capability()}"
        # What the program's user asked to have printed is printed, and read on its way.
        self._are_printed = any(os.environ.get(name, "0") not in ("", "0") for name in _VERBOSE)
        self._stdout: CStdout | None = None
        self._levels: torchapi.VerboseLevels | None = None

    def start(self) -> None:
        """Prepare for calls."""
        with contextlib.suppress(OSError):  # without it, operators inside of calls are known still
            self._stdout = CStdout()
        if self._stdout is not None and not self._are_printed:
            self._levels = torchapi.VerboseLevels()

    def stop(self) -> None:
        """Leave the process as it was."""
        levels, self._levels = self._levels, None
        stdout, self._stdout = self._stdout, None
        if levels is not None:
            levels.close()
        if stdout is not None:
            stdout.close()

    def forked(self) -> None:
        """In a forked child: another thread may have been in a call."""
        self._lock = threading.Lock()
        self.stop()

    @property
    def name(self) -> str:
        """Name of the kernel of this thread's last call; empty where it is not known."""
        name: str = getattr(self._last, "name", "")
        return name

    def run(self, device: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call for the program.

        Args:
            device: Type of the device that it runs on.
            run: The operator.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        self._last.name = ""
        # Two profilers on one thread exclude each other: the program's comes first.
        if torchapi.profiling():
            return own_call(run, args, kwargs)
        # C's `stdout` belongs to the process: the text of two calls at once could not be separated.
        if not self._lock.acquire(blocking=False):
            self._is_mixed = True
            return own_call(run, args, kwargs)
        parts: list[str] = []
        try:
            self._is_mixed = False
            with self._on_cpu(parts) if device == "cpu" else _on_accelerator(device, parts):
                out = own_call(run, args, kwargs)
            if not self._is_mixed:
                self._last.name = kernel_name(parts)
            return out
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _on_cpu(self, parts: list[str]) -> Iterator[None]:
        """Watch a call on the CPU, and add the parts of its kernel's name."""
        stdout, levels = self._stdout, self._levels
        operators: list[str] = []
        libraries: list[str] = []
        with torchapi.inner_operators(operators, _SKIPPED):
            if stdout is None:
                yield
            else:
                stdout.begin()
                try:
                    with contextlib.nullcontext() if levels is None else levels.raised():
                        yield
                finally:
                    text = stdout.end()
                    is_own = levels is not None and not levels.of_program
                    stdout.print(of_the_program(text) if is_own else text)
                libraries = onednn_parts(text) + mkl_parts(text)
        # Torch compiles its own kernels for several instruction sets; libraries name theirs.
        suffix = "" if libraries else self._suffix
        parts += [f"{name}{suffix}" for name in dict.fromkeys(operators)] + libraries


@contextlib.contextmanager
def _on_accelerator(device: str, parts: list[str]) -> Iterator[None]:
    """Watch a call on an accelerator, if `torch.profiler` knows its kernels."""
    profiling: Any = torch.profiler
    activity = getattr(profiling.ProfilerActivity, device.upper(), None) if device in _ACCELERATORS else None
    if activity is None or activity not in profiling.supported_activities():
        yield
        return
    # Without `acc_events` torch warns of lost events at the first cycle, which here is the only one.
    profiler = profiling.profile(activities=[activity], acc_events=True)
    try:
        with _silent_kineto():
            profiler.start()
    except Exception:  # another profiler has the device, say: the kernel stays unknown
        yield
        return
    try:
        yield
    finally:
        # A kernel that failed is reported to the program by its own next call.
        with contextlib.suppress(Exception):
            torch.accelerator.synchronize()
        with contextlib.suppress(Exception):
            profiler.stop()
            ran = [event.name for event in profiler.events() if event.device_type.name != "CPU"]
            parts += accelerator_parts(device, ran)


def accelerator_parts(device: str, names: Iterable[str]) -> list[str]:
    """Parts of a kernel's name from what ran on a device, without transfers of memory."""
    return [f"{device} {name}" for name in names if not name.startswith(_TRANSFERS)]


@contextlib.contextmanager
def _silent_kineto() -> Iterator[None]:
    """Kineto reads at its first start what it shall print: by default two lines to standard error for each start."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    # Above every level that it knows.
    os.environ[_LOG_LEVEL] = "99"
    try:
        yield
    finally:
        os.environ.pop(_LOG_LEVEL, None)


class CStdout:
    """A stream in memory that takes the place of C's `stdout`. Not safe to use from several threads at once.

    oneDNN and MKL print to the stream `stdout` of the C library. In glibc that is a variable: it is set to a stream in
    memory for the time of a call. The file descriptor is left alone, so that Python's prints, Python code of other
    threads and child processes write where they always do. What other C code prints in that time is given to the real
    stream after the call.

    Raises:
        OSError: This C library has no such variable, or no streams in memory.
    """

    def __init__(self) -> None:
        # `PyDLL` keeps the interpreter's lock: no other thread sees the half of an exchange.
        libc: Any = ctypes.PyDLL(None) if sys.platform == "linux" else None
        if not hasattr(libc, "gnu_get_libc_version"):
            raise OSError("only in glibc may `stdout` be another stream")
        # ctypes would cut the pointer to the 32 bits of an int.
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
        # The next text begins at the start again, or the stream would grow with each call.
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
            # `open_memstream` leaves its text to the caller.
            self._libc.free(self._text)
            self._memory.value = None
