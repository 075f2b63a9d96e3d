"""Runs one case on both platforms and says what became of it."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.comparison import compare
from shadowrun.numerics.bits import Uncomparable, bits_equal
from shadowrun.numerics.form import form_difference
from shadowrun.platforms.remote import Unsendable, WorkerDied
from shadowrun.platforms.unsupported import classify, first_sentence
from shadowrun.replay.mirror import move, without_strides
from shadowrun.sweep.cases import DERIVED, INVARIANCE, Part
from shadowrun.sweep.inputs import is_plain
from shadowrun.sweep.invariance import Invariance
from shadowrun.sweep.judging import finding_of_error, finding_of_row, records_since
from shadowrun.sweep.opinfo import without_steps
from shadowrun.sweep.outcome import FAILURES, Finding, Kind
from shadowrun.sweep.programs import NoGradient
from shadowrun.sweep.refusals import NotAsked, Refusals
from shadowrun.types import Cause, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.run import Run
    from shadowrun.sweep.judging import Row
    from shadowrun.sweep.programs import Program

__all__ = ["Trial"]

_CPU = torch.device("cpu")
_COPY = "aten::_to_copy"
_WHOLE = "as a whole"
_DOUBTFUL = (Kind.MISMATCH, Kind.REFERENCE)
_LAYOUTS = (Part.TRANSPOSED, Part.STRIDED, Part.STRIDED_INPLACE, Part.CHANNELS_LAST)
_POISONS = (0x11, 0x7E, 0xC1)
_SIZES = tuple(2**n for n in range(2, 15))
_NOT_ASKED = Finding(Kind.UNVERIFIED, explanation="refused before any operator of the platform's own process is called")


class Trial:
    """A pair of platforms on which cases are run, one after another, in this process.

    Args:
        target: Platform under test.
        ref: Platform that is trusted.
        call_limit_s: Seconds for one operator, where the target has a process of its own.
        on_target: Called when the reference has run a case and the target begins.
        capture: Whether inputs of calls that fail are kept, for scripts.

    Raises:
        PlatformError: A platform is absent, or its process does not start.
    """

    def __init__(
        self, target: str, ref: str, call_limit_s: float, on_target: Callable[[], None], *, capture: bool = False
    ) -> None:
        self._run = compare(
            target, ref, settings=False, known=False, call_limit_s=call_limit_s, asynchronous=False, capture=capture
        )
        self._target, self._ref = self._run._target, self._run._ref
        self._on_target = on_target
        self._on_device = self._target.is_ambient  # the program runs on the target, else on the reference
        away = self._target if self._on_device else self._ref
        self._home = away.device if away.is_ambient else _CPU
        self._last = -1
        self._invariance = Invariance(self._target)
        self._refusals = Refusals(self._target), Refusals(self._ref)
        for platform in (self._target, self._ref):
            platform.keep()  # each case is a comparison
            platform.start()

    def run(self, part: Part, program: Program) -> list[Finding] | None:
        """Run a case.

        Returns:
            What it showed; nothing for a pass, None where there is nothing to try.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if part in INVARIANCE:
                return self._invariant(part, program)
            return self._refused(program) if part is Part.INVALID else self._accepted(part, program)

    def watch(self, program: Program) -> Run:
        """Run a case on the target, and give what the comparison recorded; what the case raises is part of that."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._observed(program(self._home))
        return self._run

    def _accepted(self, part: Part, program: Program) -> list[Finding] | None:
        try:
            expected = self._on_reference(program)
        except NoGradient:
            return None
        except Exception as error:
            return [_reference_failed(part, error)]
        self._on_target()
        try:
            prepared = program(self._home)
        except Exception as error:
            return [finding_of_error(error, _COPY)]
        memory = part is Part.MEMORY
        actual, raised = self._observed(prepared, memory=memory)
        if isinstance(raised, NoGradient):
            return None
        rows = self._records()
        shown = [(row, finding) for row in rows if (finding := finding_of_row(row)) is not None]
        findings = [finding for row, finding in shown if part is not Part.BACKWARD or row[2] == Phase.BACKWARD]
        if memory:
            return [finding for finding in findings if finding.cause == Cause.MEMORY_EFFECTS]
        if raised is not None:
            if not self._on_device:  # it ran on the reference
                return [_reference_failed(part, raised)]
            findings = [finding for _, finding in shown]  # a forward pass that raises leaves no backward
            if not any(f.kind in FAILURES for f in findings):
                findings.append(self._by_itself(program, raised))
        elif self._on_device and all(f.kind is Kind.PASS for _, f in shown):
            # Where a device has no strides, what a view by strides sees is its own affair.
            same_memory = part not in _LAYOUTS or not self._target.functionalizes
            findings += self._whole(program, rows if same_memory else [], actual, expected)
        if any(f.kind in _DOUBTFUL for f in findings) and not self._repeats(program):
            findings = [f for f in findings if f.kind not in _DOUBTFUL]
            findings.append(Finding(Kind.UNVERIFIED, "", "", Cause.UNDEFINED, "the reference does not repeat itself"))
        return findings

    def _by_itself(self, program: Program, raised: Exception) -> Finding:
        """Whose exception it is: what the target raises only while it is compared is ours."""
        try:
            result = program(self._home)()
            self._target.materialise([t for t in _flat(result) if isinstance(t, torch.Tensor)])
        except Exception:
            return finding_of_error(raised)
        return Finding(Kind.HARNESS, explanation="it raises only where it is compared", message=failure_text(raised))

    def _invariant(self, part: Part, program: Program) -> list[Finding] | None:
        """The target against itself."""
        try:
            prepared = program(_CPU)
            torch.manual_seed(0)
            return self._invariance.run(part, prepared, self._on_target)
        except Exception as error:
            return [_reference_failed(part, error)]

    def _refused(self, program: Program) -> list[Finding] | None:
        """Invalid inputs, which both platforms have to refuse."""
        target, ref = self._refusals
        try:
            expected = ref.of(program)
        except NotAsked:
            return [_NOT_ASKED]
        except Exception as error:
            return [_reference_failed(Part.INVALID, error)]
        if expected is None:
            return [Finding(Kind.HARNESS, explanation="the reference accepts it")]
        if isinstance(expected, (Unsendable, WorkerDied)):
            return [_reference_failed(Part.INVALID, expected)]
        self._on_target()
        try:
            raised = target.of(program)
        except NotAsked:
            return [_NOT_ASKED]
        except Exception as error:
            found = finding_of_error(error, _COPY)
            return [found] if found.kind is not Kind.ERROR else []
        if raised is not None:
            return _unlike(raised, expected)
        message = f"the reference raises {type(expected).__name__}: {first_sentence(str(expected))}"
        return [Finding(Kind.MISSING_ERROR, explanation=type(expected).__name__, message=message)]

    def _on_reference(self, program: Program) -> Any:
        """Results of the reference; of the CPU here, where it has a process of its own, which runs no programs."""
        device = self._ref.device if self._ref.is_ambient else _CPU
        prepared = program(device)
        with self._ref.context() if self._ref.remote is None else contextlib.nullcontext():
            torch.manual_seed(0)
            return prepared()

    def _observed(self, prepared: Callable[[], Any], *, memory: bool = False) -> tuple[Any, Exception | None]:
        torch.manual_seed(0)
        self._run._replayer.look_at_memory(always=memory)
        with self._run:
            try:
                with without_steps() if self._target.functionalizes else contextlib.nullcontext():
                    return prepared(), None
            except Exception as error:
                return None, error

    def _records(self) -> list[Row]:
        self._run._recorder.flush()
        rows = records_since(self._run._data, self._last)
        if rows:
            self._last = rows[-1][0]
        return rows

    def _whole(self, program: Program, rows: list[Row], actual: Any, expected: Any) -> list[Finding]:
        """Where each operator by itself is right, all results must be: in form, and where all were equal, in bits."""
        local = self._ref.remote is None
        exact = local and bool(rows) and all(row[3] == "match" and not row[4] for row in rows)
        actual, expected = list(_flat(actual)), list(_flat(expected))
        if len(actual) != len(expected):
            return [_wrong_form(f"{len(actual)} results against {len(expected)}")]
        for k, (a, e) in enumerate(zip(actual, expected, strict=True)):
            try:
                here, there = self._brought(a), self._brought(e)
                form = form_difference(here, there)
                if form and not form.startswith("stride"):
                    return [_wrong_form(f"result {k}: {form}")]
                if exact and not bits_equal(here, there) and not self._explained(program, k, here):
                    evidence = f"result {k} differs, while each operator by itself is right"
                    return [Finding(Kind.MISMATCH, "", "", Cause.IMPLEMENTATION, _WHOLE, evidence)]
            except (Uncomparable, NotImplementedError, KeyError, TypeError):
                continue
            except RuntimeError as error:
                return [finding_of_error(error, _COPY)]
        return []

    def _explained(self, program: Program, k: int, actual: Any) -> bool:
        """Whether a result differs since torch takes other operators there.

        It does so where it is watched, and where a device has an operator of its own (attention). So the reference is
        watched as well; what differs then was computed by other operators, and has to agree to half of its digits.
        """
        prepared = program(_CPU)
        torch.manual_seed(0)
        with self._run:
            watched = list(_flat(prepared()))
        self._records()
        return bits_equal(actual, self._brought(watched[k])) or _agree(actual, self._brought(watched[k]))

    def _repeats(self, program: Program) -> bool:
        """Whether the reference returns the same again, also where memory held something else before."""
        first, *others = (self._after(poison, program) for poison in _POISONS)
        try:
            return all(len(first) == len(other) and all(map(bits_equal, first, other)) for other in others)
        except Uncomparable:
            return True

    def _after(self, poison: int, program: Program) -> list[Any]:
        """Results of the reference where what it allocates and does not write is likely to hold `poison`."""
        for size in _SIZES:
            _ = [torch.full((size,), poison, dtype=torch.uint8) for _ in range(16)]
        return [self._brought(value) for value in _flat(self._on_reference(program))]

    def _brought(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach()
        if value.device.type == "cpu":
            return value
        if self._target.functionalizes or not is_plain(value):
            return without_strides(value, _CPU)
        return move(value, _CPU)


def _flat(value: Any) -> Iterator[Any]:
    """Tensors and numbers of nested results."""
    if isinstance(value, dict):
        for v in value.values():
            yield from _flat(v)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _flat(v)
    elif value is None or isinstance(value, (torch.Tensor, bool, int, float, complex)):
        yield value


def _reference_failed(part: Part, error: Exception) -> Finding:
    kind = Kind.NOT_VALID if part in DERIVED else Kind.HARNESS
    return Finding(kind, "", "", "", f"the reference raises {type(error).__name__}", first_sentence(str(error)))


def _wrong_form(text: str) -> Finding:
    return Finding(Kind.FORM, "", "", Cause.METADATA, _WHOLE, text)


def _unlike(error: Exception, expected: Exception) -> list[Finding]:
    """Two refusals are alike if one's type is a kind of the other's."""
    if isinstance(error, (Unsendable, WorkerDied)):
        return [finding_of_error(error)]
    if isinstance(error, type(expected)) or isinstance(expected, type(error)):
        failure = classify(error)
        if failure.supported or type(error) is type(expected):
            return []
    found = finding_of_error(error)
    if found.kind is not Kind.ERROR:
        return [found]
    words = f"{type(error).__name__} against {type(expected).__name__}"
    message = f"{failure_text(error)}; the reference: {failure_text(expected)}"
    return [Finding(Kind.WRONG_ERROR, "", "", "", words, message)]


def failure_text(error: Exception) -> str:
    """Type and first sentence."""
    return f"{type(error).__name__}: {first_sentence(str(error), 120)}"


def _agree(actual: Any, expected: Any) -> bool:
    """Whether two results agree to half of the digits of the greatest element."""
    if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return False
    if not (actual.is_floating_point() or actual.is_complex()):
        return False
    a, e = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (actual, expected))
    if not torch.equal(a.isfinite(), e.isfinite()) or not torch.equal(a.isnan(), e.isnan()):
        return False
    finite = e.isfinite()
    a, e = a[finite], e[finite]
    return a.numel() == 0 or bool((a - e).abs().max() <= torch.finfo(actual.dtype).eps ** 0.5 * e.abs().max())
