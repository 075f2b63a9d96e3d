"""Whether two recordings are of one program on one set of data: if not, no difference is the platform's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shadowrun.studies.diff.align import renamed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shadowrun.recording.model import Process, Recording

__all__ = ["PlatformFact", "Provenance", "compare_provenance", "differing_generators"]

KINDS: Final = {
    "script": "the script",
    "input": "inputs",
    "parameter": "parameters",
    "buffer": "buffers",
    "placement": "placements of distributed tensors",
    "generator": "states of generators",
}
"""Part of a name before its colon, to what it is of; other names (versions, arguments of the program) are facts."""

# Entries of a fingerprint that are versions of software.
_SOFTWARE: Final = ("torch", "mkl", "onednn", "openmp", "cuda", "cuda_driver", "cudnn", "plugin")

# Memory decides no result, and the list of flags has a hundred entries; `cpu_flags` is its digest.
_VOLATILE: Final = frozenset({"memory_gib", "cpu_flag_list"})
_MAX_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class PlatformFact:
    """A fact in which the platforms differ: ``threads``, 1, 8."""

    name: str
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Provenance:
    """What two recordings started from.

    Attributes:
        different: Names whose digests differ, by kind, in the order of `KINDS`.
        only_first, only_second: Names that the other recording lacks.
        facts: In which the platforms differ.
        versions: Those of the facts that are versions of software which both have: what differs may be theirs.
        n_equal: Names with equal digests.
    """

    different: Mapping[str, tuple[str, ...]]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    facts: tuple[PlatformFact, ...]
    versions: tuple[PlatformFact, ...]
    n_equal: int

    @property
    def is_same(self) -> bool:
        """Whether nothing that the program started from differs."""
        return not (self.different or self.only_first or self.only_second)

    @property
    def line(self) -> str:
        """What differs, in one line; empty if nothing does."""
        parts = [f"{KINDS[kind]} ({_listed(names)})" if kind != "script" else KINDS[kind]
                 for kind, names in self.different.items()]  # fmt: skip
        for names, which in ((self.only_first, "first"), (self.only_second, "second")):
            parts += [f"only the {which} has {_listed(names)}"] if names else []
        return "; ".join(parts)

    @property
    def unnamed(self) -> tuple[str, ...]:
        """What `line` counts and does not name."""
        named = [names for kind, names in self.different.items() if kind != "script"]
        return tuple(name for names in (*named, self.only_first, self.only_second) for name in names[_MAX_NAMED:])


def compare_provenance(first: Recording, second: Recording, modules: Mapping[str, str] | None = None) -> Provenance:
    """Compare what two recordings say of their programs, data and platforms.

    Args:
        first: Of one platform.
        second: Of another.
        modules: Glob patterns of module paths of the second recording to paths of the first; see `renamed`.
    """
    a, b = _digests(first), {_renamed(name, modules or {}): digest for name, digest in _digests(second).items()}
    different: dict[str, tuple[str, ...]] = {}
    for kind in KINDS:
        names = [n for n in a if _kind(n) == kind and n in b and a[n] != b[n]]
        if names:
            different[kind] = tuple(names)
    # A generator that one side lacks belongs to its device. What is missing in a recording that was cut short or that
    # left calls out need not be missing in the program.
    whole = all(_is_whole(p) for r in (first, second) for p in r.processes)
    only = [
        tuple(n for n in x if n not in y and _kind(n) in KINDS and _kind(n) != "generator") if whole else ()
        for x, y in ((a, b), (b, a))
    ]
    n_equal = sum(1 for n in a if _kind(n) in KINDS and a[n] == b.get(n))
    facts = tuple(_facts(first, second, a, b))
    # A CPU has no version of CUDA: what only one platform has is no other version.
    versions = tuple(f for f in facts if _is_version(f.name) and "-" not in (f.first, f.second))
    return Provenance(different, only[0], only[1], facts, versions, n_equal)


def differing_generators(first: Recording, second: Recording) -> frozenset[str]:
    """Types of the devices whose default generators were in other states before the first draw."""
    a, b = _digests(first), _digests(second)
    names = (n for n in a if _kind(n) == "generator" and n in b and a[n] != b[n])
    # A name is `generator:cuda:0`, or `generator:cpu of rank 1`.
    return frozenset(re.split("[: ]", name.partition(":")[2])[0] for name in names)


def _digests(recording: Recording) -> dict[str, str]:
    several = len(recording.processes) > 1
    return {
        (f"{name} of rank {p.rank}" if several else name): digest
        for p in recording.processes
        for name, digest in p.provenance.items()
    }


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    """``parameter:layers.0.weight`` under the names of the first recording."""
    kind, colon, path = name.partition(":")
    return f"{kind}:{renamed(path, modules)}" if colon and kind in ("parameter", "buffer") else name


def _kind(name: str) -> str:
    return name.partition(":")[0].partition(" ")[0]


def _is_whole(process: Process) -> bool:
    return process.complete and not any(process.options.get(name) for name in ("ops", "modules", "steps", "schedule"))


def _facts(first: Recording, second: Recording, a: dict[str, str], b: dict[str, str]) -> Iterator[PlatformFact]:
    of = [_fingerprint(r) | _versions(d) for r, d in ((first, a), (second, b))]
    for name in dict.fromkeys((*of[0], *of[1])):
        x, y = (facts.get(name) for facts in of)
        if x == y or name in _VOLATILE:
            continue
        if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
            # By their texts: entries may be lists, which have no hash, and there may be thousands.
            known = [set(map(str, values)) for values in (x, y)]
            x, y = [v for v in x if str(v) not in known[1]], [v for v in y if str(v) not in known[0]]
        yield PlatformFact(name, _text(x), _text(y))
    for name, text in a.items():
        if _kind(name) == "placement" and b.get(name, text) != text:
            yield PlatformFact(name, text, b[name])
    arguments = [" ".join(r.processes[0].argv) if r.processes else "" for r in (first, second)]
    if arguments[0] != arguments[1]:
        # Arguments are often the very difference that is studied (`--device npu`): a fact, and no other program.
        yield PlatformFact("command", *arguments)


def _versions(digests: dict[str, str]) -> dict[str, str]:
    """``python``, ``numpy`` and ``torch``, by the names that a fingerprint has for them."""
    return {name.partition(":")[2]: version for name, version in digests.items() if _kind(name) == "version"}


def _is_version(name: str) -> bool:
    return name.partition(" ")[0] in (*_SOFTWARE, "python", "numpy")


def _fingerprint(recording: Recording) -> dict[str, Any]:
    return dict(recording.processes[0].fingerprint) if recording.processes else {}


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _listed(names: tuple[str, ...]) -> str:
    more = f" … and {len(names) - _MAX_NAMED:,} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
