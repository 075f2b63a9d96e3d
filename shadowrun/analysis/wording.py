"""Plural nouns, and quoted shell commands."""

from __future__ import annotations

import shlex
from pathlib import Path

from shadowrun.settings import DATA_FILE

__all__ = ["plural", "shell_command"]


def shell_command(name: str, data: Path | None, *words: str) -> str:
    """``shadowrun repro run.shadowrun --finding 3``, quoted for a shell.

    Args:
        name: The command.
        data: Its data file; left out if it is the default one.
        words: Further arguments.
    """
    file = [] if data is None or data == Path(DATA_FILE) else [str(data)]
    if file and file[0].startswith("-"):  # the command would read such a name as an option
        file = [f"./{file[0]}"]
    return shlex.join(["shadowrun", name, *file, *words])


def plural(n: int, noun: str) -> str:
    """``1 operator``, ``1,234 mismatches``."""
    ending = "" if n == 1 else "es" if noun.endswith("ch") else "s"
    return f"{n:,} {noun}{ending}"
