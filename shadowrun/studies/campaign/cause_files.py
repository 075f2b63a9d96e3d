"""What `campaign repro` leaves of a root cause, ``cause.json`` in a folder of its own, and the report reads.

The folder may come from anyone: texts are bounded, and the report cleans them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shadowrun.store.atomic_write import write_text
from shadowrun.store.codec import decode_facts

if TYPE_CHECKING:
    from pathlib import Path

    from shadowrun.studies.campaign.findings import Signature

__all__ = ["SCRIPTS", "CauseFile", "folder_name", "read_causes", "write_cause"]

SCRIPTS: Final = "scripts"
"""Folder in that of the campaign."""
_NAME: Final = "cause.json"
_MAX_BYTES: Final = 1 << 16
_MAX_FOLDERS: Final = 10_000
_MAX_STEM: Final = 80


@dataclass(frozen=True, slots=True)
class CauseFile:
    """A root cause, minimised.

    Attributes:
        signature: Its text.
        recipe: The variant with the fewest mutations, as JSON.
        n_mutations: Mutations of the variant in which it was found.
        text: The short script; empty without one.
        inputs: Inputs of the long script, in words; empty without one.
        script: That script, below the folder of the root cause.
        exits: Exit status of the long script on the machine that wrote it; -1 where it cannot say, or there is none.
        said: What it printed.
        notes: Why there is no script, and what else a reader should know.
    """

    signature: str
    recipe: str
    n_mutations: int = 0
    text: str = ""
    inputs: str = ""
    script: str = ""
    exits: int = -1
    said: str = ""
    notes: tuple[str, ...] = ()


def folder_name(signature: Signature) -> str:
    """The folder of a root cause: it stays the same while a campaign grows, and its number does not."""
    digest = hashlib.blake2b(str(signature).encode(), digest_size=3).hexdigest()
    stem = re.sub(r"[^A-Za-z0-9_.]+", "-", f"{signature.op or 'program'}-{signature.kind}")[:_MAX_STEM]
    return f"{stem}-{digest}"


def write_cause(folder: Path, cause: CauseFile) -> None:
    """Write it into its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / _NAME, json.dumps(dataclasses.asdict(cause), indent=1) + "\n")


def read_causes(scripts: Path) -> dict[str, CauseFile]:
    """All that is there, by signature; what cannot be read is left out, since `campaign repro` makes it again."""
    found: dict[str, CauseFile] = {}
    folders = sorted(scripts.iterdir())[:_MAX_FOLDERS] if scripts.is_dir() else []
    for folder in folders:
        path = folder / _NAME
        try:
            if path.is_file() and not path.is_symlink() and path.stat().st_size <= _MAX_BYTES:
                cause = decode_facts(CauseFile, path.read_text(encoding="utf-8"))
                found[cause.signature] = cause
        except (OSError, ValueError, RecursionError):
            continue
    return found
