"""The `shadowrun replay` commands that judge a call of which two recordings hold the inputs. Needs no torch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shadowrun.analysis.wording import shell_command
from shadowrun.errors import ShadowrunError
from shadowrun.platforms.settings import ENV, PYTHON
from shadowrun.platforms.spec import parse
from shadowrun.recording.captured_reader import CapturedFile

if TYPE_CHECKING:
    from pathlib import Path

    from shadowrun.recording.model import Recording
    from shadowrun.studies.diff.recordings import RecordingDiff

__all__ = ["replay_commands"]

_DEVICE: Final = re.compile(r"[a-z][a-z0-9_]{0,30}", re.ASCII)


def replay_commands(found: RecordingDiff, paths: tuple[Path, Path]) -> tuple[str, ...]:
    """Commands that replay the first divergent call of each recording on the platform of the other.

    Args:
        found: The two recordings.
        paths: Their files.

    Returns:
        None unless both files hold the inputs of the call.
    """
    if not found.flow.origins:
        return ()
    calls = [int(call) for call in found.difference.alignment.pairs[found.flow.origins[0].pair]]
    recordings = [v.recording for v in (found.difference.first, found.difference.second)]
    for path, call in zip(paths, calls, strict=True):
        with CapturedFile(path) as captured:
            # Both or neither: one command alone cannot show which machine is off.
            if call not in captured.calls():
                return ()
    targets = [_platform(recording, call) for recording, call in zip(recordings, calls, strict=True)]
    # Crossed: the inputs of one machine are run as the other would, so that each command settles which is off.
    sides = zip(paths, calls, reversed(targets), strict=True)
    return tuple(
        shell_command("replay", path, "--call", str(call), "--target", target) for path, call, target in sides if target
    )


def _platform(recording: Recording, call: int) -> str:
    """The platform that made a call, as far as a command may name it for the user; empty if there is none."""
    device = recording.context_of(call).device
    text = recording.process_of(call).options.get("platform")
    try:
        spec = parse(text) if isinstance(text, str) else None
    except ShadowrunError:
        spec = None
    # A file from another person must not have a user paste what starts a program or sets its environment.
    if spec is not None and not any(key == PYTHON or key.startswith(ENV) for key, _ in spec.settings):
        return spec.public
    return device if _DEVICE.fullmatch(device) else ""
