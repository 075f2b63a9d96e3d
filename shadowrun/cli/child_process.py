"""Runs a command on a file in a child process, so that whatever ends that process ends it with a message.

`explain`, `repro`, `slowdown` and `replay` run calls of a file. Inputs of such a call can make a kernel divide by zero
or read where there is no memory, and then no exception is raised. Commands that only read have bounds on memory and
processor time, of which the system enforces the second by a signal. Where calls have numbers (`replay`, `slowdown`),
the death of the child is the result of the call that it made, and another child makes the others. A command with worker
processes of its own (`sweep`) has its files read once by a child first. The child is forked before torch is imported: a
later fork would inherit locks of threads, and an accelerator that it cannot use.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import shutil
import signal
import sys
import tempfile
from typing import TYPE_CHECKING

from shadowrun.current_folder import has_empty_folder
from shadowrun.errors import ShadowrunError
from shadowrun.limits import bounded_memory, current_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from shadowrun.limits import ResourceLimits

__all__ = ["check_costs", "in_child", "with_limits"]

_FORWARDED = ("SIGTERM", "SIGHUP")
_BY_KERNELS = ("SIGSEGV", "SIGFPE", "SIGBUS", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS")
_ENDED_BY_CALLS = (*_BY_KERNELS, "SIGKILL")
_KERNEL_SIGNALS = {int(getattr(signal, name)) for name in _BY_KERNELS if hasattr(signal, name)}
_MAX_CHILDREN = 20
_AGAIN = -1000  # no exit status
# After Ctrl-C `replay` still writes its report, which takes seconds.
_AFTER_INTERRUPT_S = 60.0
_AFTER_SECOND_S = 1.0
_TOO_COSTLY = 9


def in_child(allowance: ResourceLimits | None = None) -> int | None:
    """Fork, and wait for the child.

    Args:
        allowance: Of a command that only reads; None for one that runs calls.

    Returns:
        None in the child, and where processes cannot be forked; its exit status in the parent.

    Raises:
        ShadowrunError: A signal of a kernel ended the child, or one of the system that its time is over; or a library
            did, which it does without a signal.
        KeyboardInterrupt: Ctrl-C ended it, or came and was swallowed: torch's loader makes another exception of it.
    """
    if not hasattr(os, "fork"):
        return None
    while (ended := _in_one_child(allowance)) is _AGAIN:
        pass
    return ended


def _in_one_child(allowance: ResourceLimits | None) -> int | None:
    """As `in_child`; `_AGAIN` where a call ended the child that another child can leave out."""
    # Made and removed by the parent: a call may end the child at any time.
    folder = "" if allowance is not None else _new_folder()
    # What waits in the buffers would be written by both processes.
    sys.stdout.flush()
    sys.stderr.flush()
    # One that comes before the parent hands it on would end the parent alone.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, *(getattr(signal, n) for n in _FORWARDED)])
    current_call.begin(-1, "")
    pid = os.fork()
    if not pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if allowance is not None:
            allowance.bound_time_and_disk()
        has_empty_folder(folder)
        # The first that is registered is called last. A library that ends the process (libgomp without threads) calls
        # none of Python's.
        atexit.register(_note_end, os.getpid())
        return None
    status, is_interrupted = _wait_for(pid, before)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    if is_interrupted and (status >= 0 or -status == signal.SIGKILL):
        status = -signal.SIGINT
    if status >= 0 and (allowance is not None or current_call.read()[0] == current_call.AT_END):
        return status
    if allowance is None and _left_out(status):
        return _AGAIN
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if -status == signal.SIGINT:
        raise KeyboardInterrupt
    if status >= 0:
        raise ShadowrunError(
            f"A library ended the process with exit status {status} while it worked on the file: a call{_of()} of it "
            "asks for what this machine lacks (threads, memory). `shadowrun report` runs no call.",
            slug="calls-ended-process",
        )
    # SIGXCPU is the limit of time, SIGKILL its hard end; a C++ library without memory aborts.
    if allowance is not None and -status in (signal.SIGXCPU, signal.SIGKILL, signal.SIGABRT):
        raise _too_costly(allowance)
    names = {int(getattr(signal, name)): name for name in _ENDED_BY_CALLS if hasattr(signal, name)}
    if -status not in names:
        # Ended by the same signal, so that a shell or a CI service sees what ended the child.
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    raise ShadowrunError(
        f"{names.get(-status, f'Signal {-status}')} ended the process while it worked on the file: a call{_of()} of it "
        "has inputs that a kernel does not check, or took all memory. `shadowrun report` runs no call.",
        slug="calls-ended-process",
    )


def _new_folder() -> str:
    """The current folder of calls, see `current_folder`.

    Raises:
        ShadowrunError: None can be made.
    """
    try:
        return tempfile.mkdtemp(prefix="shadowrun-")
    except OSError as error:
        raise ShadowrunError(
            f"No folder can be made for the calls of the file to run in ({error.strerror}): set TMPDIR to a folder in "
            "which you may write.",
            slug="unusable-path",
        ) from error


def _wait_for(pid: int, mask: Iterable[int]) -> tuple[int, bool]:
    """Wait for the child, and hand on the signals that end a command.

    Args:
        pid: The child.
        mask: Signals that this process blocks while it waits.

    Returns:
        The child's exit status, and whether Ctrl-C came.
    """
    # Ctrl-C goes to both, and the child decides what it means. A kernel does not look at it, and may take hours.
    waits_s = [_AFTER_SECOND_S, _AFTER_INTERRUPT_S]

    def interrupt(*_: object) -> None:
        # In a pager Ctrl-C ends a search, and the person may go on reading for hours.
        if waits_s and current_call.read()[0] != current_call.PAGER:
            signal.setitimer(signal.ITIMER_REAL, waits_s.pop())

    def forward(number: int, _: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if number == signal.SIGALRM else number)

    of_interrupt = signal.getsignal(signal.SIGINT)
    if of_interrupt != signal.SIG_IGN:  # of a job in the background: it stays ignored by both
        signal.signal(signal.SIGINT, interrupt)
    forwarded = [signal.SIGALRM, *(getattr(signal, name) for name in _FORWARDED)]
    for number in forwarded:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in forwarded:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, of_interrupt or signal.default_int_handler)
    return status, len(waits_s) < 2


def check_costs(read: Callable[[], object], allowance: ResourceLimits) -> None:
    """Read files in a child with bounds, for a command that then reads them without, since it does more than read.

    Args:
        read: Reads them.
        allowance: The bounds.

    Raises:
        ShadowrunError: They cost more.
        KeyboardInterrupt: Ctrl-C ended the child.
    """
    if not hasattr(os, "fork"):
        return
    ended = in_child(allowance)
    if ended is None:
        ended = 0
        try:
            with with_limits(allowance):
                read()
        except ShadowrunError as error:  # of any other fault, the command itself will have to say more
            ended = _TOO_COSTLY if error.slug == "file-too-costly" else 0
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            os._exit(ended)
    if ended == _TOO_COSTLY:
        raise _too_costly(allowance)


def _of() -> str:
    op = current_call.read()[1]
    return f" of {op}" if op else ""


def _note_end(pid: int) -> None:
    if os.getpid() == pid:  # processes that the child forks have its handlers too
        current_call.begin(current_call.AT_END, "")


def _left_out(status: int) -> bool:
    """Note a call that ended the child, if the next child can leave it out."""
    call, _ = current_call.read()
    ended = current_call.ended
    # A file of many such calls costs a start for each. SIGKILL is memory: the next call would take it, too.
    if call < 0 or call in ended or len(ended) >= _MAX_CHILDREN or not (status >= 0 or -status in _KERNEL_SIGNALS):
        return False
    by = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
    ended[call] = f"it ended its process by {by}"
    current_call.begin(-1, "")
    return True


@contextlib.contextmanager
def with_limits(allowance: ResourceLimits | None) -> Iterator[None]:
    """Inside, a command that reads may take the memory of its allowance (Linux); one that runs calls, what is free.

    Raises:
        ShadowrunError: Memory ran out, or a file became too long.
    """
    if allowance is None:
        with bounded_memory():
            yield
        return
    try:
        with bounded_memory(allowance.memory):
            yield
    except (ShadowrunError, OSError) as error:
        if getattr(error, "slug", "") != "no-memory" and not _is_too_long(error):
            raise
        raise _too_costly(allowance) from error


def _is_too_long(error: BaseException) -> bool:
    """Whether a file that was written became longer than it may."""
    why = error.__cause__ or error
    # SQLite's error of a write; the module takes as long to import as all of `--help`.
    is_of_sqlite = getattr(why, "sqlite_errorname", "") == "SQLITE_IOERR_WRITE"
    return is_of_sqlite or (isinstance(why, OSError) and why.errno == errno.EFBIG)


def _too_costly(allowance: ResourceLimits) -> ShadowrunError:
    return ShadowrunError(
        f"To read what is named here takes more than {allowance.words}: a file may have been made to take all that "
        "there is. If you trust the files, add --no-limits.",
        slug="file-too-costly",
    )
