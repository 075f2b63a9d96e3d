"""Equivalence classes: which platforms have the same result, and how near the classes are to each other.

Two results are in one class if they have equal dtype, shape and bytes (rung 0 of the ladder). Agreement to all but the
lowest k bits is transitive for each k, so that the classes after truncation are a tree: single, complete and average
linkage by remaining precision all give it, and no clustering library is needed.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shadowrun.errors import UsageError
from shadowrun.numerics.hash_ladder import remaining_precision
from shadowrun.recording.model import Kind
from shadowrun.studies.classes import samples
from shadowrun.types import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from shadowrun.numerics.hash_ladder import Hashes
    from shadowrun.recording.model import Form, Key, Recording
    from shadowrun.studies.classes.platforms import Platform

__all__ = [
    "KEY_FIELDS",
    "MODE_WARNING",
    "Classes",
    "Member",
    "Output",
    "Value",
    "classes_of",
    "common_keys",
    "letter",
    "outputs_of",
]

MODE_WARNING: Final = 0.6
"""Share of repeats below which the most frequent result does not stand for a platform."""

_MAX_OUTPUTS: Final = 10_000
# Patterns of outputs that a recording may name; further ones are left out.
_MAX_NAMED: Final = 100

# Position of all results beyond the first 255: they cannot be distinguished from repeats.
_BEYOND: Final = 255


KEY_FIELDS: Final = {"rank": int, "step": int, "phase": str, "module": str, "op": str, "occurrence": int}
"""Fields of `Key` and their types."""


class Output(NamedTuple):
    """A result that every platform may have.

    Attributes:
        key: Of its call.
        kind: Result, or argument that was written to.
        position: Which of the call's.
    """

    key: Key
    kind: int
    position: int

    @property
    def name(self) -> str:
        """``module/op``, with the position and the occurrence where they are not 0."""
        name = f"{self.key.module}/{self.key.op}" if self.key.module else self.key.op
        name += f" #{self.key.occurrence}" if self.key.occurrence else ""
        name += f" [{self.position}]" if self.position else ""
        return f"rank {self.key.rank} {name}" if self.key.rank else name

    @property
    def fields(self) -> dict[str, str | int]:
        """Its key by name."""
        return {name: getattr(self.key, name) for name in KEY_FIELDS}


class Value(NamedTuple):
    """What a recording has of one result.

    Attributes:
        form: Its form.
        ladder: Its ladder, not empty.
        bits: Raw bits of the sampled elements; of all, where each platform has them.
        row: Of `RESULT`.
        all_bits: Raw bits of all elements; None where the recording has only some.
    """

    form: Form
    ladder: Hashes
    bits: Hashes
    row: Any
    all_bits: Hashes | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """A platform in the classes of an output.

    Attributes:
        platform: Its name.
        label: Number of its class, in first-seen order; the class of the mode if repeats differ.
        n_repeats: Results that it has.
        n_mode: Those in the class of the mode.
        n_distinct: Different ones.
    """

    platform: str
    label: int
    n_repeats: int = 1
    n_mode: int = 1
    n_distinct: int = 1

    @property
    def star(self) -> bool:
        """Whether the platform repeated itself differently."""
        return self.n_distinct > 1

    @property
    def text(self) -> str:
        """Letter of the class, with a star if repeats differ."""
        return letter(self.label) + "*" * self.star


@dataclass(frozen=True)
class Classes:
    """Classes of one output.

    Attributes:
        output: The output.
        members: Platforms that have it, in their order.
        values: One for each class: what its first member has.
        by_value: Whether NaNs of any payload, and zeros of any sign, were equal.
        n_undecided: By value: pairs of classes that samples and counts cannot decide; they are two classes here.
    """

    output: Output
    members: tuple[Member, ...]
    values: tuple[Value, ...]
    by_value: bool = False
    n_undecided: int = 0

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.values)

    @property
    def labels(self) -> list[int]:
        """Label of each member."""
        return [member.label for member in self.members]

    @cached_property
    def mantissa(self) -> int:
        """Stored mantissa bits of the output's dtype; of the widest, if platforms disagree."""
        return max(len(value.ladder) for value in self.values) - 1

    @cached_property
    def precision(self) -> npt.NDArray[np.int64]:
        """Remaining precision of each pair of classes: (n_classes, n_classes); 0 for different forms."""
        found = np.full((self.n_classes, self.n_classes), self.mantissa, np.int64)
        for i, a in enumerate(self.values):
            for j, b in enumerate(self.values[:i]):
                # Views have the ladders of their bases, which may be of other dtypes.
                same = a.form.of_values == b.form.of_values and len(a.ladder) == len(b.ladder)
                found[i, j] = found[j, i] = remaining_precision(a.ladder, b.ladder) if same else 0
        return found

    @property
    def min_precision(self) -> int:
        """Least remaining precision of any two platforms."""
        return int(self.precision.min())

    @cached_property
    def truncated(self) -> list[list[int]]:
        """For each number of bits cut off, from 0 to all of the mantissa: a label for each class, first seen first."""
        return [self._labels_without(k) for k in range(self.mantissa + 1)]

    def _labels_without(self, n_bits: int) -> list[int]:
        seen: dict[object, int] = {}
        return [
            # A shorter dtype has fewer rungs: its last one, without any mantissa, stands for all further bits.
            seen.setdefault((*v.form.of_values, int(v.ladder[min(n_bits, len(v.ladder) - 1)])), len(seen))
            for v in self.values
        ]

    @property
    def n_starred(self) -> int:
        """Platforms that repeated themselves differently."""
        return sum(member.star for member in self.members)

    @property
    def lost_bits(self) -> int | None:
        """Least number of low bits without which all platforms agree; None if signs or exponents differ."""
        return next((k for k, labels in enumerate(self.truncated) if max(labels) == 0), None)

    @property
    def max_ulp(self) -> int | None:
        """A bound on the difference of any two platforms in ULP, from ladders alone; None if there is none."""
        return None if self.lost_bits is None else 2**self.lost_bits - 1


def letter(label: int) -> str:
    """Name of a class: A, B, … Z, AA, AB and so on."""
    text = ""
    label += 1
    while label:
        label, rest = divmod(label - 1, 26)
        text = chr(ord("A") + rest) + text
    return text


def common_keys(platforms: Sequence[Platform]) -> tuple[list[Key], int]:
    """Keys that all platforms have, in the order of the first one, and the number of keys that any has.

    Where platforms call an operator a different number of times in a module, the k-th call of one is not the k-th of
    another: none of these is common.
    """
    every = [calls for platform in platforms for calls in platform.calls]
    # Of a key, all but `occurrence`, its last.
    n_calls = [Counter(key[:-1] for key in calls) for calls in every]
    # A set for the test, the first platform's dict for the order: a report must list calls as the program made them.
    common = {key for key in set(every[0]).intersection(*every[1:]) if len({n[key[:-1]] for n in n_calls}) == 1}
    return [key for key in every[0] if key in common], len(set().union(*every))


def outputs_of(platforms: Sequence[Platform], wanted: Sequence[str] = ()) -> list[Output]:
    """The outputs to classify, in the order of the first recording that has them.

    Args:
        platforms: The platforms.
        wanted: Patterns of ``module/op``; by default those that the recordings name, or else the last call of each step
            with digests that has part in the model.

    Raises:
        UsageError: A pattern matches no call.
    """
    patterns = list(wanted)
    if not patterns:
        # A recording may name its outputs, as those of published results do.
        named = platforms[0].recordings[0].processes[0].options.get("outputs", ()) if platforms else ()
        patterns = [str(pattern) for pattern in named][:_MAX_NAMED] if isinstance(named, list | tuple) else []
    outputs: dict[Output, None] = {}
    for platform in platforms:
        for recording, calls in zip(platform.recordings, platform.calls, strict=True):
            chosen = _matching(calls, patterns) if patterns else _last(recording, calls)
            for key in chosen:
                outputs |= dict.fromkeys(Output(key, *place) for place in _places(recording, calls[key]))
    if len(outputs) > _MAX_OUTPUTS:
        raise UsageError(
            f"There are {len(outputs):,} outputs to compare, and at most {_MAX_OUTPUTS:,} are. Choose some by "
            "--output-of MODULE/OPERATOR, or record fewer steps.",
            slug="too-many-outputs",
        )
    if wanted:
        for pattern in wanted:
            if not _matching(dict.fromkeys((output.key for output in outputs), 0), [pattern]):
                raise UsageError(
                    f"--output-of {pattern}: no recorded call matches. Use MODULE/OPERATOR, such as 'fc/aten::addmm' "
                    "or '*/aten::addmm'.",
                    slug="bad-option",
                )
    return list(outputs)


def classes_of(platforms: Sequence[Platform], output: Output, *, by_value: bool = False) -> Classes | None:
    """Classes of an output; None if no platform has it."""
    keys: list[object] = []  # of the classes, in first-seen order
    values: list[Value] = []
    members = []
    every = [list(values_of(platform, output)) for platform in platforms]
    # Of all or of none: samples of one platform cannot be compared with all elements of another.
    if all(value.all_bits is not None for found in every for value in found):
        every = [[v._replace(bits=v.all_bits) for v in found if v.all_bits is not None] for found in every]
    for platform, found in zip(platforms, every, strict=True):
        if not found:
            continue
        identities = [samples.identity(value, by_value=by_value) for value in found]
        counts = Counter(identities)
        # As the published study did: a platform that does not repeat itself is represented by its most frequent
        # result.
        mode, n_mode = counts.most_common(1)[0]  # the first of several
        if mode not in keys:
            keys.append(mode)
            values.append(found[identities.index(mode)])
        members.append(Member(platform.name, keys.index(mode), len(found), n_mode, len(counts)))
    if not members:
        return None
    n_undecided = samples.n_undecided(values) if by_value else 0
    return Classes(output, tuple(members), tuple(values), by_value, n_undecided)


def values_of(platform: Platform, output: Output) -> Iterator[Value]:
    """All repeats of an output on a platform: in each recording, rows of one call with equal kind and position."""
    for recording, calls in zip(platform.recordings, platform.calls, strict=True):
        if (call := calls.get(output.key)) is None:
            continue
        rows = recording.results_of(call)
        own = recording.results[rows.start : rows.stop]
        # All rows at once: a call may have as many outputs as results.
        for at in np.flatnonzero((own["kind"] == output.kind) & (own["position"] == output.position)).tolist():
            row = rows[at]
            if len(ladder := recording.ladder(row)):
                source = recording.results[recording.source(row)]
                yield Value(
                    recording.form_of(row), ladder, recording.samples_of(row), source, recording.elements_of(row)
                )


def _matching(calls: dict[Key, int], patterns: Sequence[str]) -> list[Key]:
    fits: dict[tuple[str, str], bool] = {}
    for key in calls:
        # Patterns are tried once per module and operator: `fnmatch` is slow, and a step calls the same ones again.
        if (key.module, key.op) not in fits:
            fits[key.module, key.op] = any(_matches(key, pattern) for pattern in patterns)
    return [key for key in calls if fits[key.module, key.op]]


def _matches(key: Key, pattern: str) -> bool:
    return fnmatch.fnmatchcase(f"{key.module}/{key.op}" if key.module else key.op, pattern) or (
        # An operator alone, or one outside all modules.
        fnmatch.fnmatchcase(key.op, pattern) or fnmatch.fnmatchcase(f"{key.module}/{key.op}", pattern)
    )


def _last(recording: Recording, calls: dict[Key, int]) -> list[Key]:
    """Of each rank and step, the last call with digests that has part in the model."""
    # A program that does not mark its steps makes the next batch before the next step begins: calls whose inputs come
    # from no module, backward pass or optimizer are passed over, unless the step has no others.
    steps: dict[tuple[int, int], dict[int, Key]] = {}
    for key, call in calls.items():
        steps.setdefault((key.rank, key.step), {})[call] = key
    last = []
    for of_step in steps.values():
        placed = (call for call in reversed(of_step) if next(_places(recording, call), None) is not None)
        latest = next(placed, None)
        if latest is not None:
            seen: set[int] = set()
            candidates = itertools.chain([latest], placed)
            last.append(of_step[next((c for c in candidates if _is_of_model(recording, c, of_step, seen)), latest)])
    return last


def _is_of_model(recording: Recording, call: int, of_step: Mapping[int, Key], seen: set[int]) -> bool:
    """Whether a call, or a call of its step that it depends on, is in a module, a backward pass or an optimizer."""
    waiting = [call]
    while waiting:
        call = waiting.pop()
        key = of_step.get(call)
        if key is None or call in seen:  # of another step; or looked at, and of no model
            continue
        if key.module or key.phase != Phase.FORWARD:
            return True
        seen.add(call)
        waiting.extend(recording.parents_of(call))
    return False


def _places(recording: Recording, call: int) -> Iterator[tuple[int, int]]:
    """Kind and position of each result of a call that has a digest."""
    kinds, positions = recording.results["kind"], recording.results["position"]
    for row in recording.results_of(call):
        kind, position = int(kinds[row]), int(positions[row])
        if kind != Kind.LEAF and position != _BEYOND and len(recording.ladder(row)):
            yield kind, position
