"""Printing a report on the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shadowrun.run import Run

__all__ = ["show"]


def show(run: Run) -> None:
    """Print the terminal report on standard output, coloured where that is a terminal."""
    from shadowrun import report

    sys.stdout.write(report.render(run, "terminal"))
    sys.stdout.flush()
