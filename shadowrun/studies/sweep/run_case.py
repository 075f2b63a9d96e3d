"""Runs one case on both platforms and returns its findings.

Valid inputs run under a comparison, as in `shadowrun run`, and the records of its operator calls become findings. For
invalid inputs, `ErrorCatcher` catches the exception of each platform, and the two exceptions are compared. A platform
in a separate process runs single operators only: the program then runs in this process, and the operator that raised
here is repeated in that process.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shadowrun import sim
from shadowrun.comparison import compare
from shadowrun.intercept.plan import make_plan
from shadowrun.intercept.torch_operators import unwrapped
from shadowrun.intercept.torchapi import DispatchMode
from shadowrun.numerics.bits import Uncomparable, bits_equal
from shadowrun.numerics.form import form_difference
from shadowrun.operators.facts import facts
from shadowrun.platforms.spec import parse
from shadowrun.platforms.unsupported import classify, first_sentence
from shadowrun.platforms.worker.client import Unsendable, WorkerDied
from shadowrun.replay.copies import move, tensors_in, without_strides
from shadowrun.replay.executor import Executor
from shadowrun.studies.sweep.case_programs import NoGradient
from shadowrun.studies.sweep.cases import DERIVED, FAILURES, INVARIANCE, CaseFinding, Kind, Part
from shadowrun.studies.sweep.inputs import is_plain
from shadowrun.studies.sweep.invariance import Invariance
from shadowrun.studies.sweep.opinfo import without_steps
from shadowrun.studies.sweep.sweep_findings import finding_of_error, finding_of_row, records_since
from shadowrun.types import Cause, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.platforms.device import Platform
    from shadowrun.run import Run
    from shadowrun.studies.sweep.case_programs import Program
    from shadowrun.studies.sweep.sweep_findings import Row

__all__ = ["AS_A_WHOLE", "CaseRun", "CaseRunner", "ErrorCatcher", "NotDispatched"]


_MAX_BYTES = 1 << 28  # far above the samples of the database


@dataclass(frozen=True, slots=True)
class CaseRun:
    """What a compared run of a case left.

    Attributes:
        rows: Records of its calls.
        actual: Its results, on the device where it ran; None if it raised.
        expected: Results of the reference.
    """

    rows: list[Row]
    actual: Any
    expected: Any


class NotDispatched(Exception):  # noqa: N818 - a reason, caught inside
    """The program raised before it called any operator, so a platform in a separate process was never used."""


class ErrorCatcher:
    """Catches the exception of a program on a platform.

    Args:
        platform: The platform.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._executor = Executor(platform)

    def error_of(self, program: Program) -> Exception | None:
        """Run a program; return its exception, or None if it raises none.

        Raises:
            NotDispatched: The platform has a separate process, and the program raises outside of operators.
            WorkerDied: That process died or timed out.
            Exception: The inputs cannot be copied to the device.
        """
        prepared = program(self._platform.device)
        failed = _FailedCallRecorder()
        # Such a platform runs single operators: the program runs here, and the call that raises is repeated there.
        is_remote = self._platform.remote is not None
        try:
            with failed if is_remote else self._platform.context():
                torch.manual_seed(0)
                result = prepared()
                if not is_remote:
                    self._platform.compute_now(list(tensors_in([result])))
        except Exception as error:
            return self._remote_error(failed) if is_remote else error
        return None

    def _remote_error(self, failed: _FailedCallRecorder) -> Exception | None:
        if failed.call is None:
            raise NotDispatched
        func, args, kwargs = failed.call
        try:
            self._executor.run_mirrored(make_plan(func, 0), args, kwargs, _MAX_BYTES)
        except Exception as error:
            return error
        return None


class _FailedCallRecorder(DispatchMode):  # type: ignore[no-untyped-call]
    """Records the last operator call that raised."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except Exception:
            if isinstance(func, torch._ops.OpOverload):
                self.call = func, args, kwargs
            raise


_CPU = torch.device("cpu")
_COPY = "aten::_to_copy"
AS_A_WHOLE = "as a whole"
_VALUE_KINDS = (Kind.MISMATCH, Kind.REFERENCE)
_LAYOUTS = (Part.TRANSPOSED, Part.STRIDED, Part.STRIDED_INPLACE, Part.CHANNELS_LAST)
_POISONS = (0x11, 0x7E, 0xC1)  # different signs and magnitudes as floats, and different integers
_SIZES = tuple(2**n for n in range(2, 15))
_NOT_DISPATCHED = CaseFinding(
    Kind.UNVERIFIED, explanation="refused before any operator of the platform's own process is called"
)


class CaseRunner:
    """Runs cases on a pair of platforms, one after another, in this process.

    Args:
        target: Platform under test.
        ref: Platform that is trusted.
        call_limit_s: Time limit of one operator call, if the target has a separate process.
        on_target: Called when the reference has run a case and before the target runs it.
        capture: Whether to keep the inputs of failing calls, for scripts.

    Raises:
        PlatformError: A platform is absent, or its process does not start.

    Attributes:
        observed: The last case that was compared; None where the reference refused it.
        is_on_device: Whether programs run on the target itself; if not, on the reference.
    """

    def __init__(
        self, target: str, ref: str, call_limit_s: float, on_target: Callable[[], None], *, capture: bool = False
    ) -> None:
        for spec in map(parse, (target, ref)):
            # Programs of cases run on the device itself: autograd finds no device that has no name.
            if spec.device_type == "sim" and not spec.needs_process and not sim.is_named():
                sim.enable(flaws=sim.active())
        # No settings file and no known issues: a sweep is about the platform, not about a project. Not asynchronous:
        # the records of a case are read before the next begins.
        self._run = compare(
            target, ref, settings=False, known=False, call_limit_s=call_limit_s, asynchronous=False, capture=capture
        )
        self._target, self._ref = self._run._target, self._run._ref
        self._on_target = on_target
        self.is_on_device = self._target.has_program_settings  # if false, on the reference
        away = self._target if self.is_on_device else self._ref
        self._device = away.device if away.has_program_settings else _CPU
        # All cases write to one data file: the records of a case are those after this number.
        self._last = -1
        self.observed: CaseRun | None = None
        self._invariance = Invariance(self._target)
        self._error_catchers = ErrorCatcher(self._target), ErrorCatcher(self._ref)
        for platform in (self._target, self._ref):
            platform.keep_worker()  # each case is one comparison, which would start a process each time
            platform.start()

    def run(self, part: Part, program: Program) -> list[CaseFinding] | None:
        """Run a case.

        Returns:
            Findings; an empty list for a pass, None if the part does not apply to the case.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if part in INVARIANCE:
                return self._invariant(part, program)
            return self._compare_exceptions(program) if part is Part.INVALID else self._compare_results(part, program)

    @property
    def target(self) -> Platform:
        """The platform under test."""
        return self._target

    @property
    def reference(self) -> Platform:
        """The platform that is trusted."""
        return self._ref

    def watch(self, program: Program) -> Run:
        """Run a case on the target, and return the comparison, which also recorded any exception of the case."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._run_compared(program(self._device))
        return self._run

    def _compare_results(self, part: Part, program: Program) -> list[CaseFinding] | None:
        try:
            # The reference first: a case that it cannot run says nothing about the target.
            self.observed = None
            expected = self._on_reference(program)
        except NoGradient:
            return None
        except Exception as error:
            return [_reference_failed(part, error)]
        self._on_target()
        try:
            prepared = program(self._device)
        except Exception as error:
            return [finding_of_error(error, _COPY)]
        memory = part is Part.MEMORY
        actual, raised = self._run_compared(prepared, memory=memory)
        if isinstance(raised, NoGradient):
            return None
        rows = self._records()
        self.observed = CaseRun(rows, actual, expected)
        shown = [(row, finding) for row in rows if (finding := finding_of_row(row)) is not None]
        # The forward pass has a part of its own: its faults are not counted twice.
        findings = [finding for row, finding in shown if part is not Part.BACKWARD or row[2] == Phase.BACKWARD]
        if memory:
            return [finding for finding in findings if finding.cause == Cause.MEMORY_EFFECTS]
        if raised is not None:
            if not self.is_on_device:  # the program ran on the reference
                return [_reference_failed(part, raised)]
            findings = [finding for _, finding in shown]  # a forward pass that raises leaves no backward
            if not any(f.kind in FAILURES for f in findings):
                findings.append(self._error_without_comparison(program, raised))
        elif self.is_on_device and all(f.kind is Kind.PASS for _, f in shown):
            # On a device without strides, `as_strided` sees other elements: whole results may then differ in bits.
            same_memory = part not in _LAYOUTS or not self._target.functionalizes
            findings += self._compare_whole(program, rows if same_memory else [], actual, expected)
        # A mismatch of values means nothing if the reference itself returns different values each time.
        if any(f.kind in _VALUE_KINDS for f in findings) and not self._is_deterministic(program):
            # What else was found (a form, an exception) does not depend on the values.
            findings = [f for f in findings if f.kind not in _VALUE_KINDS]
            findings.append(
                CaseFinding(Kind.UNVERIFIED, "", "", Cause.UNDEFINED, "the reference does not repeat itself")
            )
        return findings

    def _error_without_comparison(self, program: Program, raised: Exception) -> CaseFinding:
        """Run without comparison: an exception that only a compared run raises is a fault of shadowrun."""
        try:
            result = program(self._device)()
            self._target.compute_now([t for t in _flat_values(result) if isinstance(t, torch.Tensor)])
        except Exception:
            return finding_of_error(raised)
        return CaseFinding(
            Kind.HARNESS, explanation="it raises only where it is compared", message=failure_text(raised)
        )

    def _invariant(self, part: Part, program: Program) -> list[CaseFinding] | None:
        """Compare the target with itself."""
        try:
            prepared = program(_CPU)
            torch.manual_seed(0)
            return self._invariance.run(part, prepared, self._on_target)
        except Exception as error:
            return [_reference_failed(part, error)]

    def _compare_exceptions(self, program: Program) -> list[CaseFinding] | None:
        """Compare the exceptions for invalid inputs: both platforms must raise."""
        target, ref = self._error_catchers
        try:
            expected = ref.error_of(program)
        except NotDispatched:
            return [_NOT_DISPATCHED]
        except Exception as error:
            return [_reference_failed(Part.INVALID, error)]
        # Then the database is wrong, and nothing is known against the target.
        if expected is None:
            return [CaseFinding(Kind.HARNESS, explanation="the reference accepts it")]
        if isinstance(expected, (Unsendable, WorkerDied)):
            return [_reference_failed(Part.INVALID, expected)]
        self._on_target()
        try:
            raised = target.error_of(program)
        except NotDispatched:
            return [_NOT_DISPATCHED]
        except Exception as error:
            finding = finding_of_error(error, _COPY)
            return [finding] if finding.kind is not Kind.ERROR else []
        if raised is not None:
            return _exception_difference(raised, expected)
        message = f"the reference raises {type(expected).__name__}: {first_sentence(str(expected))}"
        return [CaseFinding(Kind.MISSING_ERROR, explanation=type(expected).__name__, message=message)]

    def _on_reference(self, program: Program) -> Any:
        """Results of the reference; of this process's CPU if the reference has a separate process."""
        device = self._ref.device if self._ref.has_program_settings else _CPU
        prepared = program(device)
        with self._ref.context() if self._ref.remote is None else contextlib.nullcontext():
            torch.manual_seed(0)
            return prepared()

    def _run_compared(self, prepared: Callable[[], Any], *, memory: bool = False) -> tuple[Any, Exception | None]:
        torch.manual_seed(0)
        # A comparison checks memory at the first calls of each signature only; a case of the part `memory` is its
        # check.
        self._run._replayer.check_memory(always=memory)
        # All cases call from one line: what is found must not depend on the cases before.
        self._run._replayer.forget_verdicts()
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

    def _compare_whole(self, program: Program, rows: list[Row], actual: Any, expected: Any) -> list[CaseFinding]:
        """Compare the results of the whole case, after each single operator was right.

        Dtype and shape must agree, and bits too if all operators agreed in bits. This finds faults between operators.
        """
        local = self._ref.remote is None
        exact = local and bool(rows) and all(row[3] == "match" and not row[4] for row in rows)
        actual, expected = list(_flat_values(actual)), list(_flat_values(expected))
        if len(actual) != len(expected):
            return [_wrong_form(f"{len(actual)} results against {len(expected)}")]
        for k, (a, e) in enumerate(zip(actual, expected, strict=True)):
            try:
                here, there = self._on_cpu(a), self._on_cpu(e)
                form = form_difference(here, there)
                # Strides of the whole result depend on the decomposition; each operator's strides were compared.
                if form and _is_saved(rows, k, len(actual), form):
                    continue
                if form and not form.startswith("stride"):
                    return [_wrong_form(f"result {k}: {form}")]
                if exact and not bits_equal(here, there) and not self._is_other_decomposition(program, k, here):
                    evidence = f"result {k} differs, while each operator by itself is right"
                    return [CaseFinding(Kind.MISMATCH, "", "", Cause.IMPLEMENTATION, AS_A_WHOLE, evidence)]
            except (Uncomparable, NotImplementedError, KeyError, TypeError):
                continue
            except RuntimeError as error:
                return [finding_of_error(error, _COPY)]
        return []

    def _is_other_decomposition(self, program: Program, k: int, actual: Any) -> bool:
        """Whether a result differs because torch decomposes the function into other operators."""
        # Torch chooses other operators under a dispatch mode, and on a device with a fused operator (attention). So the
        # reference runs under the comparison too. If results still differ, other operators computed them: the bound is
        # then half of the digits.
        prepared = program(_CPU)
        torch.manual_seed(0)
        with self._run:
            watched = list(_flat_values(prepared()))
        self._records()
        return bits_equal(actual, self._on_cpu(watched[k])) or _agree_to_half_precision(
            actual, self._on_cpu(watched[k])
        )

    def _is_deterministic(self, program: Program) -> bool:
        """Whether the reference returns the same for different contents of uninitialised memory."""
        first, *others = (self._results_after_poison(poison, program) for poison in _POISONS)
        try:
            return all(len(first) == len(other) and all(map(bits_equal, first, other)) for other in others)
        except Uncomparable:
            return True

    def _results_after_poison(self, poison: int, program: Program) -> list[Any]:
        """Results of the reference, with uninitialised memory that is likely to contain `poison`."""
        # The CPU allocator reuses freed blocks of the same size: fill blocks of all small sizes and free them.
        for size in _SIZES:
            _ = [torch.full((size,), poison, dtype=torch.uint8) for _ in range(16)]
        return [self._on_cpu(value) for value in _flat_values(self._on_reference(program))]

    def _on_cpu(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = unwrapped(value.detach())  # a wrapper has no memory, and may say that it is on the CPU
        if value.device.type == "cpu":
            return value
        if self._target.functionalizes or not is_plain(value):
            return without_strides(value, _CPU)
        return move(value, _CPU)


def _is_saved(rows: list[Row], k: int, n_results: int, form: str) -> bool:
    """Whether a result is a statistic that an operator saves for its backward, in another precision."""
    return n_results > 1 and form.startswith("dtype") and "," not in form and any(k in facts(r[1]).saved for r in rows)


def _flat_values(value: Any) -> Iterator[Any]:
    """Tensors and numbers of nested results."""
    if isinstance(value, dict):
        for v in value.values():
            yield from _flat_values(v)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _flat_values(v)
    elif value is None or isinstance(value, (torch.Tensor, bool, int, float, complex)):
        yield value


def _reference_failed(part: Part, error: Exception) -> CaseFinding:
    kind = Kind.NOT_VALID if part in DERIVED else Kind.HARNESS
    return CaseFinding(kind, "", "", "", f"the reference raises {type(error).__name__}", first_sentence(str(error)))


def _wrong_form(text: str) -> CaseFinding:
    return CaseFinding(Kind.FORM, "", "", Cause.METADATA, AS_A_WHOLE, text)


def _exception_difference(error: Exception, expected: Exception) -> list[CaseFinding]:
    """Findings on two exceptions, which are alike if one type is a subclass of the other."""
    if isinstance(error, (Unsendable, WorkerDied)):
        return [finding_of_error(error)]
    if isinstance(error, type(expected)) or isinstance(expected, type(error)):
        failure = classify(error)
        # NotImplementedError is a RuntimeError: a missing kernel must not pass as a refusal of the inputs.
        if failure.supported or type(error) is type(expected):
            return []
    finding = finding_of_error(error)
    if finding.kind is not Kind.ERROR:
        return [finding]
    words = f"{type(error).__name__} against {type(expected).__name__}"
    message = f"{failure_text(error)}; the reference: {failure_text(expected)}"
    return [CaseFinding(Kind.WRONG_ERROR, "", "", "", words, message)]


def failure_text(error: Exception) -> str:
    """Type and first sentence of an exception."""
    return f"{type(error).__name__}: {first_sentence(str(error), 120)}"


def _agree_to_half_precision(actual: Any, expected: Any) -> bool:
    """Whether two results agree to half of the digits, relative to the element of greatest magnitude."""
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
