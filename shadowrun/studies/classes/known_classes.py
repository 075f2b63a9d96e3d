"""Known classes: which results are expected on which hardware, in a TOML file that a project keeps.

A file has classes; each names by patterns the fingerprints that it is for, and has the ladder of each output. A
recording passes if a class for its fingerprint has the same bytes in all outputs. Since ladders are kept, a new class
has a distance to each known one.

Tests use them by the fixture of `shadowrun.pytest_plugin`, or by `check`:
    >>> from shadowrun.studies.classes import known_classes
    >>> def test_results_are_known():  # doctest: +SKIP
    ...     known_classes.check("out.shadowrec", "known_classes.toml")
"""

from __future__ import annotations

import datetime as dt
import fnmatch
import glob
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shadowrun.errors import DataFileError, brief
from shadowrun.limits import read_toml
from shadowrun.numerics.hash_ladder import mantissa_of
from shadowrun.recording.file_format.recording_file import read
from shadowrun.recording.model import Key, Kind
from shadowrun.store.atomic_write import atomic_write
from shadowrun.studies.classes.equivalence import KEY_FIELDS, Output, classes_of, outputs_of
from shadowrun.studies.classes.platforms import platforms_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shadowrun.numerics.hash_ladder import Hashes
    from shadowrun.recording.model import Recording
    from shadowrun.studies.classes.platforms import Platform

__all__ = [
    "ClassCheck",
    "KnownClass",
    "KnownOutput",
    "check",
    "check_platform",
    "classes_to_know",
    "read_known",
    "write_known",
]

# Characters of a pattern: the time to compile one may grow with the square of its length.
_MAX_PATTERN: Final = 1000

# Characters of a fact that a pattern is written for: escaped, it is three times as long.
_MAX_FACT: Final = 300

FACTS: Final = ("test", "device", "vendor", "architecture", "cores", "torch", "cpu_capability")
"""Facts that a written class is for, as far as the platform has them; `test` comes from the pytest plug-in."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownOutput:
    """An expected result: its place, form and ladder."""

    output: Output
    dtype: str
    shape: tuple[int, ...]
    ladder: Hashes

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for equal results."""
        return (self.output, self.dtype, self.shape, *self.ladder.tolist())


@dataclass(frozen=True, slots=True, eq=False)
class KnownClass:
    """Expected results of some hardware.

    Attributes:
        name: What messages call it.
        fingerprint: Pattern by name of a fact, as `fnmatch`; all must match.
        outputs: The results, one or more.
        reason: Why they are right.
        date: When they were written.
    """

    name: str
    fingerprint: Mapping[str, str]
    outputs: tuple[KnownOutput, ...]
    reason: str
    date: dt.date

    def is_of(self, **facts: str) -> bool:
        """Whether it has no pattern of these facts that does not match."""
        return all(fnmatch.fnmatchcase(text, self.fingerprint.get(name, "*")) for name, text in facts.items())

    def is_for(self, facts: Mapping[str, str]) -> bool:
        """Whether the facts of a platform match all patterns."""
        return all(fnmatch.fnmatchcase(facts.get(name, ""), pattern) for name, pattern in self.fingerprint.items())


@dataclass(frozen=True, slots=True)
class ClassCheck:
    """A platform against known classes.

    Attributes:
        platform: Its name.
        known: The class that it is in; empty if it is new.
        nearest: If it is new: the nearest class; those for its hardware come before others. Empty if no class has its
            outputs.
        is_for_hardware: Whether the nearest class is for its hardware.
        n_lost: Low bits that must be cut off until the worst output agrees with the nearest class; more than `mantissa`
            if signs or exponents differ.
        mantissa: Stored mantissa bits of that output; 0 for integers.
        output: Name of that output.
    """

    platform: str
    known: str = ""
    nearest: str = ""
    is_for_hardware: bool = True
    n_lost: int = 0
    mantissa: int = 0
    output: str = ""

    @property
    def message(self) -> str:
        """One sentence."""
        if self.known:
            return f"{self.platform}: class {self.known!r}"
        if not self.nearest:
            return f"{self.platform}: no known class has these outputs"
        if not self.n_lost:
            return f"{self.platform}: equal to class {self.nearest!r}, which is for other hardware; none is for this"
        whose = "" if self.is_for_hardware else ", for other hardware"
        if not self.mantissa:
            distance = "integers differ"
        elif self.n_lost > self.mantissa:
            distance = f"0 of {self.mantissa} bits agree: signs or exponents differ"
        else:
            bits, ulp = self.mantissa - self.n_lost, 2**self.n_lost - 1
            distance = f"{bits} of {self.mantissa} bits agree, at most {ulp:,} ULP apart"
        return f"{self.platform}: new class; the nearest is {self.nearest!r}{whose}: {distance} ({self.output})"


def check(recording: Recording | str | Path, path: str | Path) -> ClassCheck:
    """Assert that a recording's results are of a known class; for tests.

    Args:
        recording: A recording, or its file.
        path: File of known classes.

    Raises:
        AssertionError: The class is new; the message has its distance to the nearest known one.
        DataFileError: A file cannot be read.
    """
    # pytest then shows the line of the test that called this.
    __tracebackhide__ = True
    loaded = read(Path(recording)) if isinstance(recording, str | Path) else recording
    found = check_platform(platforms_of([loaded])[0], read_known(Path(path)))
    if not found.known:
        raise AssertionError(found.message)
    return found


def check_platform(platform: Platform, known: Sequence[KnownClass]) -> ClassCheck:
    """Find the class of a platform; of repeats that differ, the most frequent result counts."""
    candidates = []
    for entry in known:
        distances = [_distance(platform, expected) for expected in entry.outputs]
        if None in distances:
            continue  # another program
        # The output that is farthest decides: a class has all outputs or none.
        worst, mantissa, output = max(d for d in distances if d is not None)
        candidates.append((not entry.is_for(platform.facts), worst, mantissa, output, entry.name))
    if not candidates:
        return ClassCheck(platform.name)
    # Classes for this hardware first, whatever their distance; then the nearest.
    foreign, n_lost, mantissa, output, name = min(candidates, key=lambda c: c[:2])
    if not n_lost and not foreign:
        return ClassCheck(platform.name, name)
    return ClassCheck(
        platform.name, nearest=name, is_for_hardware=not foreign, n_lost=n_lost, mantissa=mantissa, output=output
    )


def classes_to_know(
    platforms: Iterable[Platform], wanted: Sequence[str] = (), reason: str = "", date: dt.date | None = None
) -> list[KnownClass]:
    """Classes of platforms: those with equal facts and equal results are one.

    Args:
        platforms: The platforms.
        wanted: Patterns of outputs; see `outputs_of`.
        reason: Why their results are right.
        date: Today by default.

    Raises:
        UsageError: A pattern matches no call.
    """
    found: dict[object, KnownClass] = {}
    for platform in platforms:
        outputs = []
        for output in outputs_of([platform], wanted):
            if (classes := classes_of([platform], output)) is not None:
                value = classes.values[0]
                outputs.append(KnownOutput(output, value.form.dtype, value.form.shape, value.ladder))
        facts = {name: platform.facts[name] for name in FACTS if 0 < len(platform.facts.get(name, "")) <= _MAX_FACT}
        # A name stands for itself, whatever `fnmatch` would read into its characters.
        patterns = {name: glob.escape(value) for name, value in facts.items()}
        name = " ".join(facts[n] for n in ("architecture", "cores", "torch") if n in facts) or platform.name
        if outputs:
            entry = KnownClass(name, patterns, tuple(outputs), reason, date or dt.datetime.now(dt.UTC).date())
            found.setdefault(_identity(entry), entry)
    return list(found.values())


def read_known(path: Path) -> list[KnownClass]:
    """Read a file of known classes.

    Raises:
        DataFileError: It is missing or wrong.
    """
    try:
        content = read_toml(path)[1]
        # An empty file has no classes, and is none that is damaged: a project may start with it.
        return [_class(entry) for entry in content.get("class", [])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise DataFileError(
            f"The known classes {str(path)!r} cannot be read: {what}. "
            "`shadowrun classes --write-known FILE` writes such a file.",
            slug="bad-known-classes",
        ) from error


def write_known(path: Path, classes: Sequence[KnownClass]) -> int:
    """Add classes to a file, which need not exist; what it has is kept as it is. Returns the number of new ones.

    Raises:
        DataFileError: The file exists and is wrong, or cannot be written.
    """
    if path.is_symlink():
        raise DataFileError(
            f"The known classes {str(path)!r} are a link, which is not followed: name the file that it leads to.",
            slug="bad-known-classes",
        )
    # Read before it is written to: a file that is no file of classes must not get more lines.
    known = read_known(path) if path.exists() else []
    had = {_identity(entry) for entry in known}
    names = {entry.name for entry in known}
    added = []
    for entry in classes:
        if _identity(entry) in had:
            continue
        name, n = entry.name, 2
        # Messages call a class by its name, so that each needs one of its own.
        while name in names:
            name, n = f"{entry.name} ({n})", n + 1
        names.add(name)
        added.append("\n".join(_toml(name, entry)))
    try:
        # What it has stays byte by byte: the file is edited by hand, and has comments.
        old = path.read_bytes() if path.exists() else b""
        if old and not added:
            return 0
        head = "" if old else "# Known classes of results: shadowrun classes --known checks recordings against them.\n"
        new = head + "".join(f"\n{text}\n" for text in added)
        # A new file in its place: another name of the same file (a hard link) may be of something else.
        with atomic_write(path, path.stat().st_mode & 0o777 if old else 0o666) as file:
            file.write(old + new.encode())
    except OSError as error:
        raise DataFileError(
            f"The known classes {str(path)!r} cannot be written: {error}.", slug="bad-known-classes"
        ) from error
    return len(added)


def _distance(platform: Platform, expected: KnownOutput) -> tuple[int, int, str] | None:
    """Low bits to cut off until an output agrees, its mantissa bits, and its name; None if the platform lacks it."""
    classes = classes_of([platform], expected.output)
    if classes is None:
        return None
    value, mantissa, name = classes.values[0], len(expected.ladder) - 1, expected.output.name
    if (value.form.dtype, value.form.shape) != (expected.dtype, expected.shape):
        return mantissa + 1, mantissa, f"{name}: {value.form.dtype}{list(value.form.shape)}"
    if len(value.ladder) != len(expected.ladder):  # a view in another dtype has the ladder of its base
        return mantissa + 1, mantissa, name
    equal = np.flatnonzero(value.ladder == expected.ladder)
    return int(equal[0]) if equal.size else mantissa + 1, mantissa, name


def _identity(entry: KnownClass) -> object:
    return (*sorted(entry.fingerprint.items()), *(output.identity for output in entry.outputs))


def _class(entry: Mapping[str, Any]) -> KnownClass:
    outputs = tuple(_output(output) for output in entry["output"])
    if not outputs:
        raise ValueError(f"class {entry['name']!r} has no output")
    fingerprint = {str(name): _typed(pattern, str, name) for name, pattern in entry["fingerprint"].items()}
    if any(len(pattern) > _MAX_PATTERN for pattern in fingerprint.values()):
        raise ValueError(f"a pattern of a fingerprint has more than {_MAX_PATTERN} characters")
    date = _typed(entry["date"], dt.date, "date")
    return KnownClass(_typed(entry["name"], str, "name"), fingerprint, outputs, str(entry.get("reason", "")), date)


def _output(entry: Mapping[str, Any]) -> KnownOutput:
    key = Key(**{name: _typed(entry[name], kind, name) for name, kind in KEY_FIELDS.items()})
    kind, position = (_typed(entry[name], int, name) for name in ("kind", "position"))
    text = _typed(entry["ladder"], str, "ladder")
    # Big-endian in the text, whatever this machine has: files are shared between machines.
    ladder = np.frombuffer(bytes.fromhex(text), ">u8").astype(np.uint64)
    dtype = _typed(entry["dtype"], str, "dtype")
    # A view in another dtype, such as the number of a tensor, has the ladder of its base.
    wanted = {mantissa_of(dtype) + 1} if kind != Kind.VIEW else range(1, mantissa_of("float64") + 2)
    if len(ladder) not in wanted:
        raise ValueError(f"a ladder of {len(ladder)} rungs for {dtype}, which has {mantissa_of(dtype) + 1}")
    return KnownOutput(Output(key, kind, position), dtype, tuple(int(size) for size in entry["shape"]), ladder)


def _typed(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name} = {brief(value)}, where {kind.__name__} is expected")
    return value


def _toml(name: str, entry: KnownClass) -> Iterator[str]:
    yield from ("[[class]]", f"name = {_quoted(name)}", f"date = {entry.date.isoformat()}")
    yield from (f"reason = {_quoted(entry.reason)}", "", "[class.fingerprint]")
    yield from (f"{_quoted(fact)} = {_quoted(pattern)}" for fact, pattern in entry.fingerprint.items())
    for known in entry.outputs:
        yield from ("", "[[class.output]]")
        fields = {
            **known.output.fields,
            "kind": known.output.kind,
            "position": known.output.position,
        }
        yield from (
            f"{field} = {_quoted(str(value)) if KEY_FIELDS.get(field, int) is str else int(value)}"
            for field, value in fields.items()
        )
        yield from (f"dtype = {_quoted(known.dtype)}", f"shape = {list(known.shape)}")
        yield f'ladder = "{known.ladder.astype(">u8").tobytes().hex()}"'


def _quoted(text: str) -> str:
    # A basic string of TOML is one of JSON, but for DEL and lone surrogates.
    text = text.encode("utf-8", "replace").decode()
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
