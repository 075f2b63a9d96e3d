"""`Study`: everything that classes over N recordings say, before it is written down."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shadowrun.errors import UsageError
from shadowrun.studies.classes import explain
from shadowrun.studies.classes.classes_by_call import along_graph
from shadowrun.studies.classes.equivalence import MODE_WARNING, classes_of, common_keys, outputs_of
from shadowrun.studies.classes.layer_kernels import layer_kernels
from shadowrun.studies.classes.samples import are_complete, difference, ulp_difference

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shadowrun.studies.classes.classes_by_call import Change
    from shadowrun.studies.classes.equivalence import Classes, Member
    from shadowrun.studies.classes.explain import Claim, Fact, FlagClusters, Outliers, Point
    from shadowrun.studies.classes.layer_kernels import LayerKernels
    from shadowrun.studies.classes.platforms import Platform

__all__ = ["FEW_COMMON", "OutputStudy", "Study"]

FEW_COMMON: Final = 0.5
"""Share of common calls below which recordings are of different programs."""

_VERSION: Final = "version"
# Kinds of names in the provenance: what stands before the colon.
_GENERATOR: Final = "generator"


_Explained = tuple["tuple[Fact, ...]", "FlagClusters | None", "tuple[Point, ...]"]


@dataclass(frozen=True, slots=True)
class OutputStudy:
    """One output, explained.

    Attributes:
        classes: Its classes.
        outliers: Platforms that differ by more than rounding.
        max_difference: Greatest difference of any two classes by samples, relative to the greatest magnitude.
        max_ulp: Likewise in ULP; None for integers.
        is_exact: Whether that is of all elements.
        facts: Facts of platforms against the classes.
        flags: Flag clusters; None if fewer than two platforms have flags.
        curve: The cumulative curve.
    """

    classes: Classes
    outliers: Outliers
    max_difference: float
    max_ulp: int | None
    is_exact: bool
    facts: tuple[Fact, ...]
    flags: FlagClusters | None
    curve: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Study:
    """Classes of platforms.

    Attributes:
        platforms: The platforms.
        outputs: Their outputs.
        changes: Calls along the graph.
        claims: Published claims, checked.
        n_common: Calls that all platforms have.
        n_any: Calls that any has.
        provenance: For each digest that platforms disagree about: platforms by digest; an empty digest for none.
        by_value: Whether classes are by value.
        layers: Kernels of the calls that multiply; empty where none were recorded.
    """

    platforms: tuple[Platform, ...]
    outputs: tuple[OutputStudy, ...]
    changes: tuple[Change, ...]
    claims: tuple[Claim, ...]
    n_common: int
    n_any: int
    provenance: Mapping[str, Mapping[str, tuple[str, ...]]]
    by_value: bool = False
    layers: tuple[LayerKernels, ...] = ()

    @classmethod
    def from_platforms(
        cls, platforms: Sequence[Platform], wanted: Sequence[str] = (), *, by_value: bool = False
    ) -> Study:
        """Compare platforms.

        Args:
            platforms: Two or more.
            wanted: Patterns of outputs; see `outputs_of`.
            by_value: NaNs of any payload are equal, and zeros of any sign.

        Raises:
            UsageError: There are fewer than two platforms, or nothing to compare.
        """
        if len(platforms) < 2:
            raise UsageError(
                f"Classes need two or more recordings to compare, and there {_are(len(platforms))}. "
                "To check one recording against known classes, use --known FILE.",
                slug="no-recordings",
            )
        found = [classes_of(platforms, output, by_value=by_value) for output in outputs_of(platforms, wanted)]
        every = [classes for classes in found if classes is not None]
        if not every:
            raise UsageError(
                "The recordings have no results to compare: no call left a digest. Look at what was recorded, and "
                "record again.",
                slug="no-recordings",
            )
        n_common, n_any = common_keys(platforms)[0], common_keys(platforms)[1]
        changes = along_graph(platforms)
        explained: dict[object, _Explained] = {}
        return cls(
            tuple(platforms),
            tuple(_of_output(classes, platforms, explained) for classes in every),
            tuple(changes),
            tuple(explain.claims(every, platforms, changes)),
            len(n_common),
            n_any,
            _disagreements(platforms),
            by_value,
            tuple(layer_kernels(platforms)),
        )

    @property
    def are_different_programs(self) -> bool:
        """Whether platforms have so few calls in common that these are not recordings of one program."""
        return self.n_common < FEW_COMMON * self.n_any

    @property
    def input_disagreements(self) -> dict[str, Mapping[str, tuple[str, ...]]]:
        """Disagreements about what went in: where there are any, hardware is credited with nothing."""
        return {name: found for name, found in self.provenance.items() if _kind(name) != _VERSION}

    @property
    def versions(self) -> dict[str, Mapping[str, tuple[str, ...]]]:
        """Software of which platforms have different versions, by its name: platforms by version."""
        return {name.partition(":")[2]: found for name, found in self.provenance.items() if _kind(name) == _VERSION}

    @property
    def incomplete(self) -> list[str]:
        """Platforms whose program was killed while it was recorded."""
        # A file without its end may lack the last calls: their classes would be of fewer platforms, without a word.
        return [p.name for p in self.platforms if not all(q.complete for r in p.recordings for q in r.processes)]

    @property
    def unstable_outputs(self) -> list[tuple[Classes, Member]]:
        """Outputs of platforms that repeated themselves differently."""
        return [(o.classes, m) for o in self.outputs for m in o.classes.members if m.star]

    @property
    def unreliable_outputs(self) -> list[tuple[Classes, Member]]:
        """Those whose most frequent result has under 60 % of the repeats."""
        return [(c, m) for c, m in self.unstable_outputs if m.n_mode < MODE_WARNING * m.n_repeats]

    @property
    def focus(self) -> OutputStudy:
        """The output with the most classes, the first of several: what the report explains."""
        return max(self.outputs, key=lambda o: o.classes.n_classes)


def _of_output(classes: Classes, platforms: Sequence[Platform], explained: dict[object, _Explained]) -> OutputStudy:
    # Facts and flags depend on nothing but who is in which class, and that is the same for most outputs.
    key = tuple((m.platform, m.label) for m in classes.members)
    if key not in explained:
        facts = tuple(explain.deciding_facts(classes, platforms))
        explained[key] = facts, explain.flag_clusters(classes, platforms), tuple(explain.curve(classes, platforms))
    pairs = [(a, b) for i, a in enumerate(classes.values) for b in classes.values[:i]]
    ulps = [u for u in (ulp_difference(a, b) for a, b in pairs) if u is not None]
    return OutputStudy(
        classes,
        explain.outliers(classes),
        max((difference(a, b) for a, b in pairs), default=0.0),
        max(ulps, default=0 if not pairs else None),
        all(are_complete(value) for value in classes.values),
        *explained[key],
    )


def _disagreements(platforms: Sequence[Platform]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Provenance by name where platforms differ, if they have any: a recording without any says nothing."""
    # Published results, for example, came without weights and inputs.
    having = [p for p in platforms if p.provenance]
    found = {}
    for name in dict.fromkeys(name for p in having for name in p.provenance):
        groups: dict[str, list[str]] = defaultdict(list)
        for platform in having:
            groups[platform.provenance.get(name, "")].append(platform.name)
        if _kind(name) == _GENERATOR:
            groups.pop("", None)  # a generator that a platform lacks belongs to the device of another
        if len(groups) > 1:
            found[name] = {digest: tuple(names) for digest, names in groups.items()}
    return found


def _kind(name: str) -> str:
    """``version`` of ``version:torch`` and of ``rank 1 version:torch``."""
    return name.rpartition(" ")[2].partition(":")[0]


def _are(n: int) -> str:
    return "is one" if n == 1 else "are none"
