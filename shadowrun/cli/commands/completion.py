"""Print a script with which a shell completes the commands and options of shadowrun.

Examples:
  shadowrun completion bash > ~/.local/share/bash-completion/completions/shadowrun
  shadowrun completion zsh > ~/.zfunc/_shadowrun
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.errors import UsageError

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="shell that reads the script")


def run(args: argparse.Namespace) -> int:
    """Print the script; returns the exit status."""
    try:
        import shtab
    except ImportError as error:
        raise UsageError(
            "The script is made by shtab, which is not installed: pip install 'shadowrun[completion]'.",
            slug="no-completion",
        ) from error
    from shadowrun.cli.main import build_parser

    print(shtab.complete(build_parser(), shell=args.shell))
    return 0
