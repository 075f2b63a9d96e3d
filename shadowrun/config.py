"""`Config`: the options of a comparison. Its fields are the keyword arguments of `compare`, and most are flags."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from shadowrun.errors import UsageError
from shadowrun.settings import (
    FAIL_ON,
    KINDS,
    NEW,
    KnownLine,
    ToleranceRule,
    fits_operator,
    fits_platform,
    read_settings,
    tolerance_rules,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from os import PathLike

    from typing_extensions import Unpack

__all__ = ["Config", "Options"]

ON_UNSUPPORTED = ("fallback", "raise")
STOP_ON = KINDS[:-1]
"""Kinds of findings that single calls are: that an operator is slow is known after many."""
_MAX_SECONDS = 10**9
_CAPTURED_BYTES = 64 << 20


class Options(TypedDict, total=False):
    """Keyword arguments of `compare`, before conversion; `Config` describes them."""

    on_unsupported: str
    schedule: Callable[[int], Any] | None
    steps: int | Iterable[int] | None
    modules: str | Iterable[str] | None
    ops: str | Iterable[str] | None
    rtol: float | None
    atol: float | None
    tolerance: Mapping[str, Any] | None
    known: str | PathLike[str] | bool | None
    vendor_known: bool
    settings: str | PathLike[str] | bool | None
    file: str | PathLike[str] | None
    append: bool
    replay: bool
    drift: bool
    budget: float | None
    max_records: int
    max_bytes: int
    slow_ratio: float
    call_limit_s: float
    asynchronous: bool | None
    compiled: bool
    capture: bool | int | None
    fail_fast: bool | Iterable[str]
    stop_on: str | Iterable[str]
    on_finding: Callable[[Any], object] | None
    ranks: int | Iterable[int] | None
    api: bool
    timeline: bool


@dataclass(frozen=True, slots=True)
class Config:
    """What to compare, how, and how much to keep.

    Attributes:
        on_unsupported: ``"fallback"`` returns the reference's result, on the target's device, for an operator that
            the target lacks, so that one run lists them all; ``"raise"`` raises the target's own exception.
        schedule: Step number to `ProfilerAction`, such as `torch.profiler.schedule` returns; calls are compared in the
            steps that it records.
        steps: Step numbers to compare; None for all.
        modules: Glob patterns of module paths to compare (``"*.attn.*"``); None for all.
        ops: Glob patterns of operators to compare (``"aten::*mm*"``); None for all.
        rtol, atol: Tolerances as in `torch.testing.assert_close`, both or neither. They replace the
            rounding analysis, never the comparison of form and of exceptional values.
        tolerance: Tolerances by operator, dtype and platform, as in ``[tool.shadowrun.tolerance]``:
            ``{"aten::mm*": {"rtol": 1e-3, "atol": 1e-5}}``. The last rule that matches a result decides: first come
            the rules of the settings, then these, then `rtol` and `atol`.
        known: Ledger of known issues: a file, False for none; None uses that of the settings.
        vendor_known: False leaves out the known issues that the package of the target's device ships; `known=False`
            does, too.
        settings: Settings to read: a file, False for none; None looks upward from the working directory for
            ``shadowrun.toml`` and for a ``pyproject.toml`` with ``[tool.shadowrun]``.
        file: Data file to stream records to; None keeps them in memory.
        append: Add to an existing data file instead of replacing it.
        replay: False replays nothing: each call is recorded as skipped, with operator, forms of the inputs, module and
            line.
        drift: Also continue the other platform with its own results, and record the accumulated error.
        budget: Limit of a step's time in units of the plain step (1.2: a fifth more). Calls are selected to keep it:
            each signature (operator, forms of the inputs, module, line) once, then those not verified for longest.
        max_records: Calls kept one by one without a `file` (about 60 bytes each); older matches are then only counted.
            A data file keeps all.
        max_bytes: Bytes that shadowrun may hold for copies of one call's tensors; larger calls
            become UNVERIFIED.
        slow_ratio: Operators this many times slower on the target (and by a millisecond or more) are reported.
        call_limit_s: Seconds that a call may take in a worker process; then the process is ended, and the call is an
            ERROR.
        asynchronous: Compare calls of an asynchronous device (``"cuda"``) on another thread, without a host sync:
            None if possible, True or an error, False never. False also has a program on the CPU wait for each answer
            of a worker process (``"cpu[isa=default]"``).
        compiled: Also compare each graph that torch.compile compiles inside the block, forward and backward, with
            eager as a whole; the program still gets the results of the compiled code.
        capture: Bytes of inputs of failing calls to keep in a folder next to the data file for `Run.repro`: those of
            the first and of the worst call of each finding, each at most a quarter. True is 64 MiB, False is none;
            None is 64 MiB if there is a `file`.
        api: Also record which function or module of torch the program called to make each operator call, such as
            ``F.linear`` or ``nn.GRU``; `Run.api_coverage` and ``shadowrun coverage --api`` count by them.
        timeline: Also record when the parts of each call ran, for the lanes of a trace (`Run.write_trace`): of the
            first 200,000 calls. Calls are then observed in Python, which takes longer.
        fail_fast: Kinds of findings at the first of which the program is ended, at its next operator call, as by
            `sys.exit`; True for those that fail a run by default. ``"new"`` is one that `Run.baseline` does not have.
        stop_on: Kinds of findings (``"mismatch"``) at the first of which `CallFindingError` is raised into the program,
            by the very call, with the results of both sides. Calls are then compared at once: an asynchronous device is
            waited for after each call.
        on_finding: Called with each new `Finding`, of its first call alone, on the thread of the block: after the call,
            or, where another thread compares or ran it, at a later call or the end of the step. An exception in it is
            noted in the report with one warning, and does not reach the program.
        ranks: Ranks of a distributed program to compare on; the others run plain, and write nothing. None for all; no
            effect in a program that is not distributed.
    """

    on_unsupported: str = "fallback"
    schedule: Callable[[int], Any] | None = None
    steps: frozenset[int] | None = None
    modules: tuple[str, ...] | None = None
    ops: tuple[str, ...] | None = None
    rtol: float | None = None
    atol: float | None = None
    tolerance: tuple[ToleranceRule, ...] = ()
    known: tuple[KnownLine, ...] = ()
    vendor_known: bool = True
    settings: tuple[Path, ...] = ()
    file: Path | None = None
    append: bool = False
    replay: bool = True
    drift: bool = False
    budget: float | None = None
    max_records: int = 50_000
    max_bytes: int = 4 << 30
    slow_ratio: float = 10.0
    call_limit_s: float = 60.0
    asynchronous: bool | None = None
    compiled: bool = False
    capture: bool | int | None = None
    fail_fast: tuple[str, ...] = ()
    stop_on: tuple[str, ...] = ()
    on_finding: Callable[[Any], object] | None = None
    ranks: frozenset[int] | None = None
    api: bool = False
    timeline: bool = False

    @property
    def captured_bytes(self) -> int:
        """`capture` in bytes."""
        wanted = self.file is not None if self.capture is None else self.capture
        # A bool is an int: True must not become one byte.
        return int(wanted) if not isinstance(wanted, bool) else _CAPTURED_BYTES if wanted else 0

    @classmethod
    def from_options(cls, **keywords: Unpack[Options]) -> Config:
        """Build a config from keyword arguments, converting plain values.

        Raises:
            UsageError: An option is unknown, or has an invalid value.
        """
        options: dict[str, Any] = dict(keywords)
        names = [f.name for f in dataclasses.fields(cls)]
        for name in options:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise UsageError(
                    f"compare() has no option {name!r}.{hint} Options: {', '.join(names)}.", slug="unknown-option"
                )
        # Here, not at the first comparison of a call: a wrong settings file must stop the program before it starts.
        _resolve_settings(options)
        if options.get("steps") is not None:
            options["steps"] = _numbers("steps", options["steps"])
        for name in ("modules", "ops"):
            if options.get(name) is not None:
                options[name] = _patterns(name, options[name])
        options["fail_fast"] = _kinds("fail_fast", options.get("fail_fast", ()), (*KINDS, NEW))
        options["stop_on"] = _kinds("stop_on", options.get("stop_on", ()), STOP_ON)
        if options.get("ranks") is not None:
            options["ranks"] = _numbers("ranks", options["ranks"])
        if options.get("file") is not None:
            options["file"] = Path(options["file"])
        config = cls(**options)
        config._check()
        return config

    def tolerance_on(self, platform: str) -> Callable[[str, str], tuple[float, float] | None] | None:
        """The tolerances for one target, by operator and dtype of the result; None if there are none.

        Args:
            platform: Spec of the target.
        """
        if self.rtol is not None and self.atol is not None:
            everywhere = self.rtol, self.atol
            return lambda _op, _dtype: everywhere
        # The last rule that matches decides, so it is looked up first.
        rules = [rule for rule in reversed(self.tolerance) if fits_platform(rule.platform, platform)]
        if not rules:
            return None

        # Once for each operator and dtype: glob patterns are too slow for every result.
        @functools.cache
        def look_up(op: str, dtype: str) -> tuple[float, float] | None:
            fitting = (r for r in rules if fits_operator(r.operator, op) and fnmatchcase(dtype, r.dtype))
            return next(((r.rtol, r.atol) for r in fitting), None)

        return look_up

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
            # Written so that NaN fails it too: every comparison with NaN is false.
            if value is not None and not 0 <= value < float("inf"):
                raise UsageError(f"{name}={value!r}: use a finite number >= 0.", slug="bad-option")
        if self.schedule is not None and not callable(self.schedule):
            raise UsageError(
                f"schedule={self.schedule!r} is not callable: give what torch.profiler.schedule(...) returns.",
                slug="bad-option",
            )
        if self.budget is not None and not 1 < self.budget < float("inf"):
            raise UsageError(
                f"budget={self.budget!r}: use a number > 1, such as 1.2 for a step that takes a fifth longer.",
                slug="bad-option",
            )
        self._check_together()
        if self.on_finding is not None and not callable(self.on_finding):
            raise UsageError(
                f"on_finding={self.on_finding!r} is not callable: give a function of one Finding.", slug="bad-option"
            )
        for name in ("max_records", "max_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}={value!r}: use a whole number >= 1.", slug="bad-option")
        if self.asynchronous not in (None, True, False):
            raise UsageError(f"asynchronous={self.asynchronous!r}: use None, True or False.", slug="bad-option")
        capture: Any = self.capture or 0  # None and False are both none here
        if not isinstance(capture, int) or capture < 0:
            raise UsageError(f"capture={self.capture!r}: use True, False or a number of bytes.", slug="bad-option")
        if not self.slow_ratio > 1:
            raise UsageError(f"slow_ratio={self.slow_ratio!r}: use a number > 1.", slug="bad-option")
        if not 0 < self.call_limit_s <= _MAX_SECONDS:
            raise UsageError(
                f"call_limit_s={self.call_limit_s!r}: use a number > 0 and up to {_MAX_SECONDS}.", slug="bad-option"
            )

    def _check_together(self) -> None:
        """Refuse options of which only one can be used."""
        if self.drift and self.budget is not None:
            raise UsageError("drift=True needs every call, and budget= skips calls: use only one.", slug="bad-option")
        if self.api and self.budget is not None:
            raise UsageError(
                "api=True takes time at each call of a function, also in steps that budget= leaves out: use only one.",
                slug="bad-option",
            )
        if self.stop_on and self.budget is not None:
            raise UsageError(
                "stop_on= raises at the call, and budget= judges calls later: use only one.", slug="bad-option"
            )
        if not self.replay and (self.drift or self.budget is not None or self.compiled or self.timeline):
            other = (
                "drift=True"
                if self.drift
                else "compiled=True"
                if self.compiled
                else "timeline=True"
                if self.timeline
                else "budget="
            )
            raise UsageError(
                f"replay=False compares nothing, and {other} needs a comparison: use only one of them.",
                slug="bad-option",
            )

    def printable(self) -> dict[str, Any]:
        """The options as values that JSON can hold."""
        plain: dict[str, Any] = {}
        # Of a path, only the name: a data file is shared, and the folders of a machine are private.
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name in (
                "known",
                "vendor_known",
            ):  # reports apply the ledger of the day on which the file is read, not that of the run
                continue
            if f.name in ("tolerance", "settings", "fail_fast", "stop_on"):
                value = [v.name if isinstance(v, Path) else str(v) for v in value] or None
            elif isinstance(value, frozenset):
                value = sorted(value)
            elif isinstance(value, Path):
                value = value.name
            elif callable(value):
                # Not its repr, which has an address: files of two equal runs would differ.
                value = getattr(value, "__qualname__", repr(type(value).__name__))
            plain[f.name] = value
        return plain


def _resolve_settings(options: dict[str, Any]) -> None:
    """Read the settings, and put their rules before those of the arguments."""
    found = read_settings(options.get("settings"))
    known, tolerance = options.get("known"), options.get("tolerance") or {}
    ledger = found if known is None else read_settings(known)
    options["tolerance"] = (*found.tolerance, *tolerance_rules(tolerance, "compare()"))
    options["known"] = ledger.known
    options["vendor_known"] = bool(options.get("vendor_known", True)) and known is not False
    options["settings"] = found.files


def _kinds(name: str, value: bool | Iterable[str], known: tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(value, bool):
        return tuple(kind for kind in FAIL_ON if kind in known) if value else ()
    kinds = (value,) if isinstance(value, str) else tuple(value)
    for kind in kinds:
        if kind not in known:
            raise UsageError(f"{name}={kind!r}: use True, or some of {', '.join(known)}.", slug="bad-option")
    return kinds


def _numbers(name: str, value: int | Iterable[int]) -> frozenset[int]:
    numbers: list[Any]
    try:
        numbers = [value] if isinstance(value, int) else list(value)
    except TypeError:
        numbers = [value]
    if not all(isinstance(n, int) and n >= 0 for n in numbers):
        one = name.removesuffix("s")
        raise UsageError(f"{name}={value!r}: use a {one} number >= 0 or several, such as range(3).", slug="bad-option")
    return frozenset(numbers)


def _patterns(name: str, value: str | Iterable[str]) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value)
    if not patterns or any(not isinstance(p, str) for p in patterns):
        raise UsageError(f"{name}={value!r}: use a glob pattern or several.", slug="bad-option")
    return patterns
