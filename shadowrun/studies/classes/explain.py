"""What explains the classes: architectures, cores, CPU flags and other facts; and claims as checks."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shadowrun.studies.classes.equivalence import letter
from shadowrun.studies.classes.samples import groups_by_magnitude

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shadowrun.studies.classes.classes_by_call import Change
    from shadowrun.studies.classes.equivalence import Classes, Output
    from shadowrun.studies.classes.platforms import Platform

__all__ = [
    "Claim",
    "Fact",
    "FlagCluster",
    "FlagClusters",
    "Outliers",
    "Point",
    "by_fact",
    "claims",
    "curve",
    "deciding_facts",
    "flag_clusters",
    "outliers",
]

ORDER: Final = ("vendor", "architecture", "cores")
"""Facts that the cumulative curve is ordered by."""

# Flags of vector instructions, which change results, name a cluster before others.
_PREFERRED: Final = tuple(
    re.compile(pattern)
    for pattern in (
        *("amx_tile", "avx10", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx512_?vbmi", "avx512.*"),
        *(
            "avx2",
            "fma",
            "avx",
            "f16c",
            "sse4a",
            "sse4_2",
            "sse4_1",
            "sse.*",
            "sve.*",
            "asimd.*",
            "bf16",
            "i8mm",
            "neon",
        ),
    )
)


@dataclass(frozen=True, slots=True)
class Point:
    """A platform on the cumulative curve, with the classes of it and all before it."""

    platform: str
    group: str
    n_classes: int


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact of platforms against their classes.

    Attributes:
        name: Of the fact, such as ``cores``.
        n_platforms: Platforms that have it.
        groups: For each value the platforms and their classes: (value, n_platforms, n_classes).
        decides: Whether platforms with equal values are in one class.
        decided: Whether platforms of one class have equal values.
    """

    name: str
    n_platforms: int
    groups: tuple[tuple[str, int, int], ...]
    decides: bool
    decided: bool


@dataclass(frozen=True, slots=True)
class FlagCluster:
    """CPU flags that occur on the same platforms.

    Attributes:
        name: Its representative.
        flags: All of its flags.
        platforms: Those that have them.
        classes: Letters of the classes that have them.
        aligned: Whether no class has both platforms with them and platforms without: they may explain the classes.
    """

    name: str
    flags: tuple[str, ...]
    platforms: tuple[str, ...]
    classes: tuple[str, ...]
    aligned: bool


@dataclass(frozen=True, slots=True)
class FlagClusters:
    """Clusters of the flags that not all platforms have.

    Attributes:
        clusters: Aligned ones first, large ones first.
        n_platforms: Platforms with flags.
        n_flags: Flags that any of them has.
        n_common: Flags that all have.
        n_distinguished: Classes that aligned clusters distinguish.
        n_classes: Classes of these platforms.
    """

    clusters: tuple[FlagCluster, ...]
    n_platforms: int
    n_flags: int
    n_common: int
    n_distinguished: int
    n_classes: int


@dataclass(frozen=True, slots=True)
class Outliers:
    """Platforms whose results differ by more than rounding from most.

    Attributes:
        platforms: Their names.
        n_classes: Classes without them.
    """

    platforms: tuple[str, ...]
    n_classes: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A published claim, checked on these recordings.

    Attributes:
        text: The claim.
        n_tested: Cases that could have broken it; 0: not tested.
        n_broken: Cases that did.
        example: One of these.
    """

    text: str
    n_tested: int
    n_broken: int
    example: str = ""

    @property
    def holds(self) -> bool | None:
        """None where nothing tested it."""
        return None if not self.n_tested else not self.n_broken


def curve(classes: Classes, platforms: Sequence[Platform]) -> list[Point]:
    """Classes found so far, over platforms ordered by vendor, architecture and cores."""
    facts = {p.name: p.facts for p in platforms}
    # In this order, platforms that should agree are neighbours, and a step of the curve shows where a new class
    # begins.
    ordered = sorted(classes.members, key=lambda m: [_sortable(facts[m.platform].get(name, "")) for name in ORDER])
    seen: set[int] = set()
    points = []
    for member in ordered:
        seen.add(member.label)
        points.append(Point(member.platform, facts[member.platform].get("architecture", ""), len(seen)))
    return points


def by_fact(classes: Classes, platforms: Sequence[Platform], name: str) -> Fact:
    """Classes by the values of one fact."""
    facts = {p.name: p.facts for p in platforms}
    labels: dict[str, list[int]] = defaultdict(list)
    values: dict[int, set[str]] = defaultdict(set)
    for member in classes.members:
        # A platform that lacks a fact (a GPU has no CPU flags) neither supports nor contradicts it.
        if (value := facts[member.platform].get(name)) is not None:
            labels[value].append(member.label)
            values[member.label].add(value)
    groups = tuple((value, len(labels[value]), len(set(labels[value]))) for value in sorted(labels, key=_sortable))
    return Fact(
        name,
        sum(n for _, n, _ in groups),
        groups,
        all(n_classes == 1 for *_, n_classes in groups),
        all(len(found) == 1 for found in values.values()),
    )


def deciding_facts(classes: Classes, platforms: Sequence[Platform]) -> list[Fact]:
    """Facts with several values: those that decide the class first, those with few values before others."""
    names = dict.fromkeys(name for p in platforms for name in p.facts if name != "platform")
    if "threads" in names:
        names.pop("cores", None)  # the same
    facts = [by_fact(classes, platforms, name) for name in names]
    several = [fact for fact in facts if len(fact.groups) > 1]
    return sorted(several, key=lambda f: (not (f.decides and f.decided), not f.decides, len(f.groups)))


def flag_clusters(classes: Classes, platforms: Sequence[Platform]) -> FlagClusters | None:
    """Clusters of CPU flags over the platforms of an output; None if fewer than two have flags."""
    flags = {p.name: p.flags for p in platforms if p.flags}
    members = [m for m in classes.members if m.platform in flags]
    if len(members) < 2:
        return None
    # A flag that all platforms have, or none, cannot explain a difference between them.
    every = frozenset().union(*(flags[m.platform] for m in members))
    common = every.intersection(*(flags[m.platform] for m in members))
    patterns: dict[tuple[bool, ...], list[str]] = defaultdict(list)
    for flag in sorted(every - common):
        # Flags that always occur together cannot be distinguished: they are one cluster, as in the published table 1.
        patterns[tuple(flag in flags[m.platform] for m in members)].append(flag)
    clusters = []
    deciding: list[tuple[bool, ...]] = []
    for pattern, own in patterns.items():
        with_flag = {m.label for m, has in zip(members, pattern, strict=True) if has}
        without = {m.label for m, has in zip(members, pattern, strict=True) if not has}
        # A class with platforms on both sides shows that the flag does not decide it.
        aligned = not with_flag & without
        deciding += [pattern] if aligned else []
        names = tuple(m.platform for m, has in zip(members, pattern, strict=True) if has)
        letters = tuple(letter(label) for label in sorted(with_flag))
        clusters.append(FlagCluster(_representative(own), tuple(own), names, letters, aligned))
    clusters.sort(key=lambda c: (not c.aligned, -len(c.flags), c.name))
    signatures = {tuple(pattern[i] for pattern in deciding) for i in range(len(members))}
    n_classes = len({m.label for m in members})
    return FlagClusters(tuple(clusters), len(members), len(every), len(common), len(signatures), n_classes)


def outliers(classes: Classes) -> Outliers:
    """Platforms outside the largest group by magnitude; see `groups_by_magnitude`."""
    group = groups_by_magnitude(classes.values)
    sizes: dict[int, int] = defaultdict(int)
    for member in classes.members:
        sizes[group[member.label]] += 1
    # No recording is a reference: the majority stands for the right result.
    largest = max(sizes, key=lambda g: sizes[g])
    return Outliers(
        tuple(m.platform for m in classes.members if group[m.label] != largest), sum(g == largest for g in group)
    )


def claims(every: Sequence[Classes], platforms: Sequence[Platform], changes: Sequence[Change]) -> list[Claim]:
    """The published claims, checked on all outputs."""
    fingerprints = {p.name: p.fingerprint for p in platforms}
    return [
        _deterministic(every),
        _implied(
            "equal fingerprints have equal results",
            [(m.platform, fingerprints[m.platform], m.label, c.output) for c in every for m in c.members],
        ),
        _implied(
            "equal results have equal fingerprints",
            [(m.platform, m.label, fingerprints[m.platform], c.output) for c in every for m in c.members],
        ),
        _relu(changes),
    ]


def _deterministic(every: Sequence[Classes]) -> Claim:
    repeated = [(m, c.output) for c in every for m in c.members if m.n_repeats > 1]
    broken = [(m, output) for m, output in repeated if m.star]
    example = f"{broken[0][0].platform} on {broken[0][1].name} step {broken[0][1].key.step}" if broken else ""
    return Claim("a platform repeats itself", len(repeated), len(broken), example)


def _implied(text: str, rows: Sequence[tuple[str, object, object, Output]]) -> Claim:
    """Whether rows of one output with an equal second entry have an equal third one; groups of one test nothing."""
    groups: dict[object, list[tuple[str, object]]] = defaultdict(list)
    for platform, given, then, output in rows:
        groups[output, given].append((platform, then))
    tested = [group for group in groups.values() if len(group) > 1]
    broken = [group for group in tested if len({then for _, then in group}) > 1]
    example = ""
    if broken:
        (first, then), *others = broken[0]
        example = f"{first} and {next(p for p, other in others if other != then)}"
    return Claim(text, len(tested), len(broken), example)


def _relu(changes: Sequence[Change]) -> Claim:
    # Whole words: `leaky_relu` and `prelu` multiply, and may lose bits.
    relus = [c for c in changes if re.search(r"\brelu_?\b", c.key.op) and c.precision_before is not None]
    # With equal inputs everywhere there is no precision that could be lost.
    tested = [c for c in relus if c.n_before > 1]
    broken = [c for c in tested if c.trend == "down"]
    example = f"{broken[0].key.module}/{broken[0].key.op}" if broken else ""
    return Claim("relu never lowers the remaining precision", len(tested), len(broken), example)


def _representative(flags: Sequence[str]) -> str:
    # By the place of the first pattern that fits, then by name: the title of a cluster depends on nothing else.
    ranked = ((i, flag) for i, pattern in enumerate(_PREFERRED) for flag in flags if pattern.fullmatch(flag))
    return min(ranked, default=(0, min(flags)))[1]


def _sortable(value: str) -> tuple[float, str]:
    """Numbers by size, before texts."""
    # 8 cores come before 16: as texts they would not.
    return (float(value), "") if re.fullmatch(r"\d+(\.\d+)?", value) else (float("inf"), value)
