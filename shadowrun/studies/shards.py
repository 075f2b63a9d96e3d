"""Parts of a sweep or of a campaign, each run by a process or machine of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shadowrun.errors import UsageError, brief

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Shard", "shard_of"]

# Variables of Slurm, Kubernetes, GitLab and CircleCI: number of a job, the lowest one or its variable, and the count.
# Kubernetes says no count: it is given as ``--shard /N``, or as a variable of the pod.
_ARRAYS: Final = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_COUNT"),
    ("JOB_COMPLETION_INDEX", "0", "JOB_COMPLETIONS"),
    ("CI_NODE_INDEX", "1", "CI_NODE_TOTAL"),
    ("CIRCLE_NODE_INDEX", "0", "CIRCLE_NODE_TOTAL"),
)
_MAX_DIGITS: Final = 9


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a sweep or a campaign, which one process runs.

    Attributes:
        index: From 0.
        of: Number of parts.
    """

    index: int = 0
    of: int = 1

    @property
    def name(self) -> str:
        """``3-of-8``, counted from 1."""
        return f"{self.index + 1}-of-{self.of}"


def shard_of(text: str | None, environment: Mapping[str, str]) -> tuple[Shard, str]:
    """The part that this process runs, and where its number comes from.

    Args:
        text: ``3/8``, the third of eight; ``/8``, one of eight, whose number is in the environment; None for what the
            environment says, which is everything outside of an array of jobs.
        environment: Variables.

    Raises:
        UsageError: It is no shard.
    """
    given, slash, of = (text or "").partition("/")
    if text is not None and (not slash or not _is_number(of) or (given and not _is_number(given))):
        raise UsageError(f"--shard {brief(text)!r}: use I/N, from 1/N to N/N, or /N.", slug="bad-option")
    if given:
        return _shard(int(given) - 1, int(of), f"--shard {text}"), ""
    for index, first, count in _ARRAYS:
        n = of or environment.get(count, "")
        if index in environment and n:
            words = f"{index}={environment[index]}"
            try:
                # Arrays of Slurm may begin at any number.
                low = int(environment.get(first, "0") if first.isidentifier() else first)
                return _shard(int(environment[index]) - low, int(n), words), words
            except ValueError:
                raise UsageError(f"{words} is no number of a job: use --shard I/N.", slug="bad-option") from None
    if of:
        names = ", ".join(index for index, _, _ in _ARRAYS)
        raise UsageError(f"--shard {text}: none of {names} is set. Use --shard I/N.", slug="bad-option")
    return Shard(), ""


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= _MAX_DIGITS


def _shard(index: int, of: int, words: str) -> Shard:
    if not 0 <= index < of:
        raise UsageError(f"{words} is outside of {of} shards: use --shard I/N, from 1/N to N/N.", slug="bad-option")
    return Shard(index, of)
