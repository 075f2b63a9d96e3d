"""One frozen `Config`: its fields are the keyword arguments of `compare` and the flags of the CLI."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from shadowrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from os import PathLike

    from typing_extensions import Unpack

__all__ = ["Config", "Options"]

ON_UNSUPPORTED = ("fallback", "raise")


class Options(TypedDict, total=False):
    """Keyword arguments of `compare`, as a program writes them; `Config` says what they mean."""

    on_unsupported: str
    schedule: Callable[[int], Any] | None
    steps: int | Iterable[int] | None
    modules: str | Iterable[str] | None
    ops: str | Iterable[str] | None
    rtol: float | None
    atol: float | None
    file: str | PathLike[str] | None
    append: bool
    drift: bool
    max_records: int
    max_bytes: int
    slow_ratio: float


@dataclass(frozen=True, slots=True)
class Config:
    """What to compare and how much to keep.

    Attributes:
        on_unsupported: ``"fallback"`` answers an operator that the target lacks with the reference's
            result, moved over, so that one run lists them all; ``"raise"`` lets the target's own
            exception pass.
        schedule: What `torch.profiler.schedule` returns: step number to `ProfilerAction`; calls are
            compared in the steps that it records.
        steps: Step numbers to compare; None for all.
        modules: Glob patterns of module paths to compare (``"*.attn.*"``); None for all.
        ops: Glob patterns of operators to compare (``"aten::*mm*"``); None for all.
        rtol, atol: Tolerances as in `torch.testing.assert_close`, both or neither. They replace the
            rounding analysis, never the comparison of form and of exceptional values.
        file: Data file to stream records to; None keeps them in memory.
        append: Add to an existing data file instead of replacing it.
        drift: Also run a chain of the reference's own results and record the accumulated error.
        max_records: Calls kept one by one where there is no `file` (about 60 bytes each); older matches are then
            only counted. A data file keeps all.
        max_bytes: Bytes that shadowrun may hold for copies of one call's tensors; larger calls
            become UNVERIFIED.
        slow_ratio: A call this many times slower on the target (and a millisecond or more) is reported.
    """

    on_unsupported: str = "fallback"
    schedule: Callable[[int], Any] | None = None
    steps: frozenset[int] | None = None
    modules: tuple[str, ...] | None = None
    ops: tuple[str, ...] | None = None
    rtol: float | None = None
    atol: float | None = None
    file: Path | None = None
    append: bool = False
    drift: bool = False
    max_records: int = 50_000
    max_bytes: int = 4 << 30
    slow_ratio: float = 10.0

    @classmethod
    def make(cls, **given: Unpack[Options]) -> Config:
        """Build a config from keyword arguments, converting plain values.

        Raises:
            UsageError: Unknown option or a value that cannot be used.
        """
        options: dict[str, Any] = dict(given)
        names = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise UsageError(
                    f"compare() has no option {name!r}.{hint} Options: {', '.join(names)}.", slug="unknown-option"
                )
        if options.get("steps") is not None:
            options["steps"] = _steps(options["steps"])
        for name in ("modules", "ops"):
            if options.get(name) is not None:
                options[name] = _patterns(name, options[name])
        if options.get("file") is not None:
            options["file"] = Path(options["file"])
        config = cls(**options)
        config._check()
        return config

    def _check(self) -> None:
        if self.on_unsupported not in ON_UNSUPPORTED:
            raise UsageError(
                f"on_unsupported={self.on_unsupported!r}: use one of {', '.join(map(repr, ON_UNSUPPORTED))}.",
                slug="bad-option",
            )
        if (self.rtol is None) != (self.atol is None):
            raise UsageError(
                "Give rtol and atol together or neither, as in torch.testing.assert_close.", slug="bad-option"
            )
        for name in ("rtol", "atol"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise UsageError(f"{name}={value!r}: use a finite number >= 0.", slug="bad-option")
        if self.schedule is not None and not callable(self.schedule):
            raise UsageError(
                f"schedule={self.schedule!r} is not callable: give what torch.profiler.schedule(...) returns.",
                slug="bad-option",
            )
        for name in ("max_records", "max_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}={value!r}: use a whole number >= 1.", slug="bad-option")
        if not self.slow_ratio > 1:
            raise UsageError(f"slow_ratio={self.slow_ratio!r}: use a number > 1.", slug="bad-option")

    def printable(self) -> dict[str, Any]:
        """The options as values that JSON can hold."""
        plain: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, frozenset):
                value = sorted(value)
            elif isinstance(value, Path):
                value = value.name
            elif callable(value):
                value = getattr(value, "__qualname__", repr(type(value).__name__))
            plain[f.name] = value
        return plain


def _steps(value: int | Iterable[int]) -> frozenset[int]:
    steps: list[Any]
    try:
        steps = [value] if isinstance(value, int) else list(value)
    except TypeError:
        steps = [value]
    if not all(isinstance(s, int) and s >= 0 for s in steps):
        raise UsageError(f"steps={value!r}: use a step number >= 0 or several, such as range(3).", slug="bad-option")
    return frozenset(steps)


def _patterns(name: str, value: str | Iterable[str]) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value)
    if not patterns or any(not isinstance(p, str) for p in patterns):
        raise UsageError(f"{name}={value!r}: use a glob pattern or several.", slug="bad-option")
    return patterns
