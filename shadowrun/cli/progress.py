"""Progress at a terminal: the bar of the commands that take long, and the live line of `run`."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import TYPE_CHECKING, Final, Protocol

from shadowrun.report.sanitize import MAX_NAME, clip

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from typing import Any

    from shadowrun.comparison import Comparison

__all__ = ["LiveLine", "ProgressUpdate", "progress_bar", "progress_text", "wants_live_line"]


class ProgressUpdate(Protocol):
    """Updates a progress bar; what is None stays as it is."""

    def __call__(self, done: int, total: int | None = None, text: str | None = None) -> None:
        """Show `done` of `total`, and what is worked on now."""


@contextlib.contextmanager
def progress_bar(text: str, total: int | None = None) -> Iterator[ProgressUpdate]:
    """Show a progress bar while inside; it disappears at the end.

    Args:
        text: What is worked on.
        total: Number of items; None if not known yet.
    """
    if not sys.stderr.isatty():
        yield _no_update
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        # No markup: names of operators come from the user's program or from an untrusted file.
        *(TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()),
        *(TextColumn("left"), TimeRemainingColumn()),
    )
    # On standard error: standard output has the report, and may be piped.
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=total)

        def update(done: int, total: int | None = None, text: str | None = None) -> None:
            description = None if text is None else clip(text, MAX_NAME)
            bar.update(task, completed=done, total=total, description=description)

        yield update


def _no_update(done: int, total: int | None = None, text: str | None = None) -> None:
    """Show nothing: a log must not be filled with progress."""


# A line at the bottom of the terminal that says how far `run` is, while the program prints above it.
#
# The terminal itself keeps the two apart: all lines but the last scroll, and the last is written by position, with the
# cursor saved and restored in one write. So nothing of the program's output is intercepted, from any process, and no
# thread or process is added: the line is drawn by the program's own calls, while they are recorded.

_MIN_ROWS: Final = 8
_SAVE, _RESTORE, _CLEAR = "\x1b7", "\x1b8", "\x1b[2K"


def wants_live_line(asked: bool | None) -> bool:
    """Whether to show the line: where standard error is a terminal that can, unless it is not wanted."""
    if asked is False or not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return False
    return bool(asked) or not os.environ.get("CI")


def progress_text(comparison: Comparison) -> str:
    """``1,204 calls · 3 findings (2 mismatch, 1 unsupported) · step 4 of 9 …``."""
    now = comparison.progress()
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in now.n_found.items())
    n = sum(now.n_found.values())
    parts = [f"{now.n_calls:,} calls", f"{n:,} finding{'' if n == 1 else 's'}{f' ({kinds})' if n else ''}"]
    parts.append(f"×{now.overhead:.2g}")  # noqa: RUF001 - a factor
    parts.append(f"step {now.step:,}" + (f" of {now.last_step:,}" if now.last_step >= now.step else ""))
    if now.left_s >= 0:
        parts.append(f"{now.left_s:.0f} s left" if now.left_s < 100 else f"{now.left_s / 60:.0f} min left")
    return " · ".join(parts)


class LiveLine:
    """Shows the progress of a comparison on the last line of the terminal, inside of `around`."""

    def __init__(self) -> None:
        self._comparison: Comparison | None = None
        self._fd = -1
        self._pid = os.getpid()
        self._size = (0, 0)

    def follow(self, comparison: Comparison) -> None:
        """Show this comparison, which has not started."""
        self._comparison = comparison
        comparison.follow(self.draw)

    @contextlib.contextmanager
    def shown_during(self, block: AbstractContextManager[Any]) -> Iterator[None]:
        """Enter a block, and show the line while inside."""
        # A copy: the program may close or redirect its own.
        self._fd = os.dup(sys.stderr.fileno())
        try:
            with block:
                yield
        finally:
            self._end()

    def draw(self) -> None:
        """Write the line anew."""
        if self._fd < 0 or self._comparison is None or os.getpid() != self._pid or not self._is_free():
            return
        size = os.get_terminal_size(self._fd)
        columns, rows = size
        if rows < _MIN_ROWS:
            return
        begin = ""
        if size != self._size:  # at first, and after the window was resized
            self._size = size
            # A line more, in case that the cursor is on the last one.
            begin = f"\n{_SAVE}\x1b[1;{rows - 1}r{_RESTORE}\x1b[1A"
        text = clip(f"shadowrun {progress_text(self._comparison)}", columns - 1)
        self._write(f"{begin}{_SAVE}\x1b[{rows};1H\x1b[0;2m{_CLEAR}{text}{_RESTORE}")

    def _end(self) -> None:
        """Give the last line back."""
        fd, self._fd = self._fd, -1
        if os.getpid() != self._pid:
            return
        if self._size != (0, 0):
            rows = self._size[1]
            self._fd = fd
            self._write(f"{_SAVE}\x1b[r\x1b[{rows};1H{_CLEAR}{_RESTORE}")
            self._fd, self._size = -1, (0, 0)
        os.close(fd)

    def _is_free(self) -> bool:
        """Whether a write would neither wait, as after Ctrl-S, nor stop a process in the background."""
        return os.tcgetpgrp(self._fd) == os.getpgrp() and bool(select.select([], [self._fd], [], 0)[1])

    def _write(self, text: str) -> None:
        # In one piece, so that no output of another thread comes between.
        with contextlib.suppress(OSError):
            os.write(self._fd, text.encode("utf-8", "replace"))
