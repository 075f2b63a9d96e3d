"""The progress bar of the commands that take long: on standard error, if that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Protocol

from shadowrun.report.sanitize import MAX_NAME, clip

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ProgressUpdate", "progress_bar"]


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
