"""`Platform`: one machine or setting with its recordings; two or more recordings are repeats."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shadowrun.errors import UsageError
from shadowrun.recording.file_format.recording_file import read, read_all
from shadowrun.recording.file_format.recording_writer import SUFFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shadowrun.recording.model import Key, Recording

__all__ = ["Platform", "facts_of", "filter_platforms", "find_recordings", "fingerprint_digest", "load", "platforms_of"]

# Entries of a fingerprint that two machines of one kind may differ in.
_NOT_OF_HARDWARE: Final = ("platform", "cloud", "memory_gib", "device_memory_gib")

_VENDORS: Final = {"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}


@dataclass(frozen=True, eq=False)
class Platform:
    """A column of classes.

    Attributes:
        name: Name of the file, with as much of its folder as makes it unique, without the suffix.
        recordings: Repeats of the same program on it.
        facts: Text by name: vendor, architecture, cores, device, and every other plain entry of the fingerprint.
        flags: Flags of its processor; empty if the recording has none.
        fingerprint: Digest of what decides its results: equal digests, equal hardware, libraries and settings.
    """

    name: str
    recordings: tuple[Recording, ...]
    facts: Mapping[str, str]
    flags: frozenset[str]
    fingerprint: str

    def with_facts(self, **facts: str) -> Platform:
        """This platform with further facts."""
        return dataclasses.replace(self, facts={**self.facts, **facts})

    @cached_property
    def calls(self) -> tuple[dict[Key, int], ...]:
        """For each recording: number of the call by key."""
        return tuple({key: number for number, key in enumerate(r.call_keys())} for r in self.recordings)

    @property
    def provenance(self) -> Mapping[str, str]:
        """Digests of what went in, of the first recording; ranks other than 0 prefix their names."""
        return {
            f"rank {p.rank} {name}" if p.rank else name: digest
            for p in self.recordings[0].processes
            for name, digest in p.provenance.items()
        }


def find_recordings(arguments: Sequence[str | Path]) -> list[Path]:
    """Files of recordings: each argument is a file, or a folder whose recordings are meant, at any depth.

    Raises:
        UsageError: A file is given twice, or a folder has no recordings.
    """
    paths: list[Path] = []
    for argument in map(Path, arguments):
        found = sorted(argument.rglob(f"*{SUFFIX}")) if argument.is_dir() else [argument]
        if not found:
            raise UsageError(f"The folder {str(argument)!r} has no {SUFFIX} files.", slug="no-recordings")
        paths += found
    # By the file itself: two names of one file would be two platforms that always agree.
    twice = [path for path, n in Counter(os.path.realpath(path) for path in paths).items() if n > 1]
    if twice:
        raise UsageError(f"The recording {twice[0]!r} is given twice: give each file once.", slug="bad-option")
    return paths


def load(paths: Sequence[Path], *, repeats: bool = False) -> list[Platform]:
    """Read recordings; see `platforms_of`. The files of the ranks of one run, ``a.0.shadowrec`` and so on, are one.

    Raises:
        DataFileError: A file cannot be read.
    """
    runs: dict[Path, list[tuple[Path, Recording]]] = {}
    for path in paths:
        recording = read(path)
        # By what it recorded, not by its name: `a.1.shadowrec` may be any file.
        ranked = any(process.world_size > 1 for process in recording.processes)
        run = path.with_name(re.sub(rf"\.\d+(?={re.escape(SUFFIX)}$)", "", path.name)) if ranked else path
        runs.setdefault(run, []).append((path, recording))
    recordings = [
        files[0][1] if len(files) == 1 else read_all([path for path, _ in files], run.name)
        for run, files in runs.items()
    ]
    return platforms_of(recordings, _unique_names(list(runs)), repeats=repeats)


def platforms_of(
    recordings: Sequence[Recording], names: Sequence[str] | None = None, *, repeats: bool = False
) -> list[Platform]:
    """Platforms of recordings, in their order.

    Args:
        recordings: The recordings.
        names: What to call them; by default the names of the recordings.
        repeats: Recordings with equal fingerprints are repeats of one platform; if false, each is a platform.
    """
    if names is None:
        names = [recording.name for recording in recordings]
    groups: dict[object, list[int]] = {}
    for number, recording in enumerate(recordings):
        groups.setdefault(fingerprint_digest(_fingerprint(recording)) if repeats else number, []).append(number)
    return [
        Platform(
            names[group[0]],
            tuple(recordings[i] for i in group),
            facts_of(_fingerprint(recordings[group[0]])),
            _flags(_fingerprint(recordings[group[0]])),
            fingerprint_digest(_fingerprint(recordings[group[0]])),
        )
        for group in groups.values()
    ]


def filter_platforms(platforms: Iterable[Platform], conditions: Sequence[tuple[str, str]]) -> list[Platform]:
    """Platforms that meet all conditions: pairs of a fact (or ``name``) and a pattern, as `fnmatch`.

    Raises:
        UsageError: No platform has such a fact.
    """
    chosen = list(platforms)
    known = {"name", *(name for platform in chosen for name in platform.facts)}
    for fact, pattern in conditions:
        if fact not in known:
            raise UsageError(
                f"--where {fact}={pattern}: no recording has the fact {fact!r}; there are {', '.join(sorted(known))}.",
                slug="bad-option",
            )
        chosen = [
            p for p in chosen if fnmatch.fnmatchcase(p.name if fact == "name" else p.facts.get(fact, ""), pattern)
        ]
    return chosen


def facts_of(fingerprint: Mapping[str, object]) -> dict[str, str]:
    """Plain entries of a fingerprint as text, with vendor, architecture and cores.

    The architecture of an accelerator is the name of its model; `cores` are the threads that the program used, if they
    were recorded.
    """
    facts = {
        name: str(value) for name, value in fingerprint.items() if isinstance(value, str | int | float) and value != ""
    }
    environment = fingerprint.get("env")
    if isinstance(environment, dict):
        # With a prefix: a variable must not replace the fact of its name.
        facts |= {f"env {name}": str(value) for name, value in environment.items()}
    brand = facts.get("cpu", "")
    if facts.get("device", "cpu") != "cpu":
        name = facts.get("device_name", facts["device"])
        facts |= {"architecture": name, "vendor": "NVIDIA" if facts["device"] in ("cuda", "gpu") else facts["device"]}
    else:
        vendor = facts.get("vendor") or next((v for v in ("Intel", "AMD") if v in brand), brand.partition(" ")[0])
        facts |= {"architecture": facts.get("architecture", brand), "vendor": _VENDORS.get(vendor, vendor)}
    if "threads" in facts:
        # The work is divided among threads, however many cores there are.
        facts["cores"] = facts["threads"]
    return {name: value for name, value in facts.items() if value}


def fingerprint_digest(fingerprint: Mapping[str, object]) -> str:
    """Digest of what decides results: names of platforms, clouds and sizes of memory are left out."""
    kept = {name: value for name, value in fingerprint.items() if name not in _NOT_OF_HARDWARE}
    # 64 bits: two of a thousand fingerprints have one digest with a probability of 3e-14.
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _fingerprint(recording: Recording) -> Mapping[str, object]:
    return recording.processes[0].fingerprint if recording.processes else {}


def _flags(fingerprint: Mapping[str, object]) -> frozenset[str]:
    flags = fingerprint.get("cpu_flag_list")
    return frozenset(map(str, flags)) if isinstance(flags, list | tuple) else frozenset()


def _unique_names(paths: Sequence[Path]) -> list[str]:
    """Name of each file, after as many of its folders as make it unique."""
    parts = [path.absolute().with_name(path.name.removesuffix(SUFFIX)).parts for path in paths]
    n_parts = [1] * len(parts)
    while True:
        names = ["/".join(p[-n:]) for p, n in zip(parts, n_parts, strict=True)]
        twice = {name for name, n in Counter(names).items() if n > 1}
        if not twice or all(n >= len(p) for p, n, name in zip(parts, n_parts, names, strict=True) if name in twice):
            return names
        n_parts = [n + (name in twice) for n, name in zip(n_parts, names, strict=True)]
