"""Root causes: the findings of all variants, grouped by signature, one for each fault.

A campaign shows one fault in thousands of variants. The *signature* of a finding is its innermost operator, the class
of its dtype, its verdict, its cause, and the type of its exception. Findings of one signature are one root cause, and
so are those of other forms of the operator, or dtypes, that the judge explains alike.

A root cause is a *framework flaw* where it does not depend on the platform: each platform of the campaign shows it, or
the reference contradicts itself (a metamorphic pair), or float64 condemns the reference. Any other is a *platform
issue*.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from shadowrun.studies.sweep.cases import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shadowrun.studies.campaign.run_variants import VariantFinding

__all__ = [
    "MISSING",
    "PUBLISHED_CAUSES",
    "RootCause",
    "Seen",
    "Signature",
    "is_compiled",
    "published_cause",
    "root_causes",
    "signature",
    "without_flaws",
]

_CLASSES: Final = {
    **dict.fromkeys(("f16", "bf16"), "16-bit float"),
    **dict.fromkeys(("f32", "f64"), "float"),
    **dict.fromkeys(("c32", "c64", "c128"), "complex"),
    **dict.fromkeys(("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"), "integer"),
    "b8": "bool",
}
_RAISED: Final = (Kind.ERROR, Kind.UNSUPPORTED, Kind.UNSUPPORTED_DTYPE, Kind.MISSING_ERROR, Kind.WRONG_ERROR)
_IN_ANY_DTYPE: Final = (Kind.UNSUPPORTED, Kind.SILENT_FALLBACK, Kind.WARNED_FALLBACK)
MISSING: Final = (*_IN_ANY_DTYPE, Kind.UNSUPPORTED_DTYPE)
"""What a platform lacks, whether it says so or computes it on the CPU."""
_FIGURES: Final = re.compile(r"[0-9]+")
_MAX_STORY: Final = 80
# Not up to the next `)` whatever comes: without one, each ` (` of a long text would be followed to its end.
_FLAWS: Final = re.compile(r" \([^()]*\)")
_ORDER: Final = {kind: n for n, kind in enumerate(Kind)}

PUBLISHED_CAUSES: Final = ("operator implementation", "exceptional values", "instruction scheduling", "undefined")
"""The three causes that "Mind the Gap" (arXiv 2511.11601) names in its abstract, and what it has no name for."""
_PUBLISHED: Final = {
    "exceptional values": "exceptional values",
    "flushed subnormals": "exceptional values",
    "reduced precision": "instruction scheduling",
    "rounding": "instruction scheduling",
    "non-determinism": "instruction scheduling",
    "undefined behaviour": "undefined",
    "randomness": "undefined",
}


def is_compiled(target: str) -> bool:
    """Whether a target of a store is compiled code: ``npu, inductor``, ``sim (a-flaw, another), inductor``."""
    return ", " in without_flaws(target)


def without_flaws(target: str) -> str:
    """The name of a target of a store without the flaws of a simulated one, which reports name once."""
    return _FLAWS.sub("", target)


def published_cause(cause: str) -> str:
    """One of `PUBLISHED_CAUSES` for a cause of ours.

    The study defines them nowhere that is public. Here precision and order of accumulation count as scheduling, values
    outside of the normal range as exceptional, all other wrong results as implementation.
    """
    return _PUBLISHED.get(cause, "operator implementation")


@dataclass(frozen=True, slots=True, order=True)
class Signature:
    """What findings of one root cause share.

    Attributes:
        kind: The verdict, a value of `Kind`.
        op: Innermost operator, or the missing kernel; empty for a variant as a whole.
        dtype: Class of the dtype: ``float``, ``16-bit float``, ``integer``, …; empty if unknown.
        cause: A value of `shadowrun.types.Cause`, or empty.
        raised: Type of the exception; empty if none.
    """

    kind: str
    op: str
    dtype: str
    cause: str
    raised: str

    def __str__(self) -> str:
        """``mismatch aten::mm, float: reduced precision``."""
        where = ", ".join(filter(None, (self.op or "the program as a whole", self.dtype)))
        why = ", ".join(filter(None, (self.cause, self.raised)))
        return f"{self.kind} {where}{': ' if why else ''}{why}"


def signature(finding: VariantFinding) -> Signature:
    """The signature of a finding."""
    raised = finding.explanation if finding.kind in _RAISED else ""
    # A platform that lacks an operator lacks it in each dtype: one line for all of them.
    dtype = "" if finding.kind in _IN_ANY_DTYPE else _CLASSES.get(finding.dtype, finding.dtype)
    return Signature(finding.kind, finding.op, dtype, finding.cause, raised)


@dataclass(frozen=True, slots=True)
class Seen:
    """A finding, and where it was seen.

    Attributes:
        number: Number of the variant.
        target: Number of the target; -1 for the reference against itself.
        size: Operator calls that the variant made.
        finding: The finding.
    """

    number: int
    target: int
    size: int
    finding: VariantFinding


@dataclass(frozen=True, slots=True)
class RootCause:
    """Findings of one signature.

    Attributes:
        signature: The signature.
        n_variants: Variants that show it.
        targets: Targets that show it; -1 is the reference against itself.
        first: Number of the first variant that shows it.
        smallest: The finding in the variant with the fewest calls, the first of these.
        explanations: Explanations, the most frequent first.
        is_framework: Whether it is a flaw of the framework rather than of a platform.
        others: Signatures of other forms of the operator, or dtypes, that show the same fault.
    """

    signature: Signature
    n_variants: int
    targets: tuple[int, ...]
    first: int
    smallest: Seen
    explanations: tuple[str, ...] = ()
    is_framework: bool = False
    others: tuple[Signature, ...] = ()

    @property
    def is_missing(self) -> bool:
        """Whether it is something that a platform lacks, which is no wrong result."""
        return self.signature.kind in MISSING


@dataclass(slots=True)
class _Group:
    key: Signature
    numbers: set[int] = field(default_factory=set)
    targets: set[int] = field(default_factory=set)
    smallest: Seen | None = None
    explanations: Counter[str] = field(default_factory=Counter)
    stories: set[str] = field(default_factory=set)
    """What other forms of the operator must have in common with it to be one fault."""

    def add(self, seen: Seen) -> None:
        self.numbers.add(seen.number)
        self.targets.add(seen.target)
        self.explanations[seen.finding.explanation] += 1
        self.stories.add(_story(seen.finding))
        # By number among equals: workers return findings in any order.
        if self.smallest is None or (seen.size, seen.number, seen.target) < (
            self.smallest.size,
            self.smallest.number,
            self.smallest.target,
        ):
            self.smallest = seen


def root_causes(findings: Iterable[Seen], n_targets: int) -> list[RootCause]:
    """Group findings by signature: the worst verdicts first, then the most frequent; what is missing comes last.

    Signatures that differ by the form of their operator (in place, ``out=``, another overload) or the dtype are one
    root cause where an explanation is the same: a fault of ``mul`` shows in ``mul_`` and in complex numbers too.

    Args:
        findings: All findings of a campaign, in any order.
        n_targets: Number of its platforms; targets of higher numbers are compiled code.
    """
    groups: dict[Signature, _Group] = {}
    for seen in findings:
        key = signature(seen.finding)
        groups.setdefault(key, _Group(key)).add(seen)
    causes = [_root_cause(folded, n_targets) for folded in _folded(groups.values())]
    return sorted(
        causes, key=lambda c: (c.is_missing, _ORDER.get(Kind(c.signature.kind), 99), -c.n_variants, c.signature)
    )


def _folded(groups: Iterable[_Group]) -> Iterator[list[_Group]]:
    """Groups of one fault: those of one operator and cause that share an explanation, also by way of a third."""
    # Each group and story is looked at once: a store from elsewhere may have tens of thousands of them.
    by_story: dict[tuple[Signature, str], list[_Group]] = {}
    remaining = {group.key: group for group in groups}
    for group in remaining.values():
        for family_story in _family_stories(group):
            by_story.setdefault(family_story, []).append(group)
    while remaining:
        fault = [remaining.popitem()[1]]
        for group in fault:  # grows meanwhile
            for family_story in _family_stories(group):
                fault += [g for g in by_story.pop(family_story, ()) if remaining.pop(g.key, None) is not None]
        yield fault


def _family_stories(group: _Group) -> Iterator[tuple[Signature, str]]:
    """The stories of a group, each with the operator and cause that it belongs to."""
    family = replace(group.key, op=_base(group.key.op), dtype="")
    return ((family, story) for story in group.stories)


def _story(finding: VariantFinding) -> str:
    """How a finding is explained; the exception where there is one, without figures."""
    if finding.kind in _IN_ANY_DTYPE:
        return ""  # the message names the overload
    if finding.kind in _RAISED:
        return _FIGURES.sub("", finding.message)[:_MAX_STORY]
    # What the judge cannot explain may be different faults in different dtypes.
    return finding.explanation or _CLASSES.get(finding.dtype, finding.dtype)


def _base(op: str) -> str:
    """``aten::mul`` of ``aten::mul_.Tensor``."""
    # In-place forms and overloads call one kernel.
    return op.partition(".")[0].rstrip("_")


def _root_cause(folded: Sequence[_Group], n_targets: int) -> RootCause:
    # Named after the form that came first: one that comes later does not rename it.
    first, *others = sorted(folded, key=lambda g: (min(g.numbers), g.key))
    assert first.smallest is not None
    numbers = set().union(*(g.numbers for g in folded))
    targets: Sequence[int] = sorted(set().union(*(g.targets for g in folded)))
    counted: Counter[str] = Counter()
    for group in folded:
        counted.update(group.explanations)
    # One platform alone cannot tell its own fault from one of the framework.
    everywhere = n_targets > 1 and sum(0 <= t < n_targets for t in targets) == n_targets
    by_itself = -1 in targets or first.key.kind == Kind.REFERENCE
    explained = sorted(filter(None, counted), key=lambda text: (-counted[text], text))
    return RootCause(
        first.key,
        len(numbers),
        tuple(targets),
        min(numbers),
        first.smallest,
        tuple(explained),
        everywhere or by_itself,
        tuple(g.key for g in others),
    )
