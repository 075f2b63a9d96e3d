"""The program of a recording run here as a whole: how far its results are from the recorded ones, by operator.

This is the propagated error: each call gets what the calls before it gave here. A replay of captured inputs gives the
isolated one.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shadowrun.errors import UsageError
from shadowrun.platforms import settings
from shadowrun.platforms.spec import parse
from shadowrun.recording.file_format.recording_file import read
from shadowrun.recording.model import NONE
from shadowrun.studies.diff.compare import Outcome
from shadowrun.studies.diff.recordings import diff_recordings
from shadowrun.studies.isolation.process import own_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shadowrun.recording.model import Recording
    from shadowrun.studies.diff.recordings import RecordingDiff

__all__ = ["PropagatedError", "by_operator", "free_run"]


_STDERR: Final = 2


@dataclass(slots=True)
class PropagatedError:
    """The calls of one operator in two runs of the program.

    Attributes:
        n_pairs: Calls that correspond.
        n_differ: Of these, those whose results differ.
        remaining: Least remaining precision in bits; -1 without a difference that has one.
    """

    n_pairs: int = 0
    n_differ: int = 0
    remaining: int = NONE


def free_run(
    recording: Recording, target: str, options: Sequence[str], program: Sequence[str]
) -> tuple[RecordingDiff, int]:
    """Record the program in a process of its own, and compare.

    Args:
        recording: Of another machine.
        target: Platform; settings of the CPU are made in the process, a device is the program's own choice.
        options: Of ``shadowrun record``, in front of the program.
        program: Script and arguments, as ``shadowrun record`` takes them.

    Returns:
        The comparison, and the exit status of the program.

    Raises:
        UsageError: The program recorded nothing, or the platform is another interpreter.
    """
    spec = parse(target)
    if any(key == settings.PYTHON for key, _ in spec.settings):
        raise UsageError(
            f"--free runs the program in this interpreter, and {spec.public!r} is another: run `shadowrun record` "
            "there, then `shadowrun diff`.",
            slug="bad-option",
        )
    # On a device, the program itself chooses where it runs: its own arguments name the device.
    own = ["--platform", str(spec)] if spec.device_type == "cpu" and spec.settings else []
    with tempfile.TemporaryDirectory(prefix="shadowrun-") as folder:
        path = Path(folder) / "free.shadowrec"
        command = [*own_command(), "record", "-o", str(path), *own, *options, *program]
        # What it prints goes to standard error: standard output has the report.
        done = subprocess.run(  # noqa: S603 - this interpreter, and the user's program
            command, env=os.environ | settings.environment(spec.settings), stdout=_STDERR, check=False
        )
        if not path.is_file():
            raise UsageError(
                f"The program recorded nothing (exit status {done.returncode}): see its messages above.",
                slug="replay-free",
            )
        here = read(path)
    return diff_recordings(recording, here, labels=(recording.name, "here")), done.returncode


def by_operator(found: RecordingDiff) -> Mapping[str, PropagatedError]:
    """The propagated error of each operator of the first recording."""
    difference, recording = found.difference, found.difference.first.recording
    errors: dict[str, PropagatedError] = {}
    equal = list(Outcome).index(Outcome.EQUAL)
    unknown = list(Outcome).index(Outcome.UNKNOWN)
    contexts = recording.calls["context"][difference.alignment.pairs[:, 0]].tolist()
    columns = zip(contexts, difference.outcomes.tolist(), difference.remaining.tolist(), strict=True)
    for context, outcome, remaining in columns:
        error = errors.setdefault(recording.contexts[context].op, PropagatedError())
        error.n_pairs += 1
        if outcome in (equal, unknown):
            continue
        error.n_differ += 1
        if remaining != NONE:
            error.remaining = remaining if error.remaining == NONE else min(error.remaining, remaining)
    return errors
