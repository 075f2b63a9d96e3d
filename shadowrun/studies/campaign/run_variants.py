"""Runs variants on the reference and on each target, and says what differs, operator by operator and by each oracle.

The reference runs first: a variant that it refuses is invalid, and says nothing about a target. On the target each
operator call is judged by itself (`studies.sweep.run_case` does that for any program), so the first pass names the
operator, and nothing is bisected. The results of the whole program go to the oracles (`oracles`). Where a recipe asks
for it, each platform is compared with itself, too (`metamorphic`): a fault that the reference shows there is its own.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun import sim
from shadowrun.compiled.rounding import filled_memory
from shadowrun.intercept.plan import make_plan
from shadowrun.intercept.torch_operators import unwrapped
from shadowrun.numerics.bits import bits_equal
from shadowrun.operators.facts import facts
from shadowrun.platforms import parse
from shadowrun.platforms.worker.client import WorkerDied
from shadowrun.replay.copies import move, without_strides
from shadowrun.replay.executor import Executor
from shadowrun.studies.campaign.causes.root_causes import MISSING
from shadowrun.studies.campaign.metamorphic import Metamorphic
from shadowrun.studies.campaign.oracles import FIRED, differing, to_mask
from shadowrun.studies.campaign.variants.variant_program import DevicePlacement, exact_results, program_of
from shadowrun.studies.sweep.cases import FAILURES, CaseFinding, Kind, Part
from shadowrun.studies.sweep.run_case import AS_A_WHOLE, CaseRunner
from shadowrun.studies.sweep.sweep_findings import finding_of_error, finding_of_row
from shadowrun.types import Cause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shadowrun.platforms.device import Platform
    from shadowrun.studies.campaign.variants.variant import Variant
    from shadowrun.studies.sweep.run_case import CaseRun

    Call = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]

__all__ = ["REFERENCE", "TARGET", "Result", "RunnerSettings", "VariantFinding", "VariantRunner"]

# Variants in one comparison: each leaves rows and forms in its memory, which ends with it.
_RENEW: Final = 256
_MAX_BYTES: Final = 1 << 30
_UNSUPPORTED: Final = (Kind.UNSUPPORTED, Kind.UNSUPPORTED_DTYPE)
# In torch's message on a device that has no autocast.
_AUTOCAST: Final = "unsupported autocast device_type"
_AUTOCAST_OP: Final = "torch.autocast"
_WRONG: Final = (Kind.MISMATCH, Kind.FORM)
_CPU: Final = torch.device("cpu")
# Operators that torch splits into others for each device: each of these is judged, and the result of the whole program
# may differ. On the clean simulated device all 62 of 400 variants that differed in bits had one.
_BY_DEVICE: Final = frozenset({"aten::scaled_dot_product_attention"})
TARGET: Final = "target"
REFERENCE: Final = "reference"
_STATUS_OF_OP: Final = {"unsupported": "unsupported", "fallback": "fallback", "error": "error"}


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """Platforms of a campaign.

    Attributes:
        targets: Their specs.
        ref: Spec of the reference.
        flaws: Of the simulated device; None where no target is simulated.
        backends: Of torch.compile: each makes one more target of each target in this process, its compiled code.
        threads: Threads of torch.
        call_limit_s: Time limit of a call, where a platform has a process of its own.
    """

    targets: tuple[str, ...]
    ref: str = "cpu"
    flaws: tuple[str, ...] | None = None
    backends: tuple[str, ...] = ()
    threads: int = 1
    call_limit_s: float = 60.0

    @property
    def names(self) -> tuple[str, ...]:
        """All targets by name: the platforms, then ``npu, inductor`` for what a backend compiles for them."""
        return (*self.targets, *(f"{target}, {backend}" for backend in self.backends for target in self.targets))


@dataclass(frozen=True, slots=True)
class VariantFinding:
    """A fault that a variant showed.

    Attributes:
        op: Innermost operator; empty for the variant as a whole.
        dtype: Dtype of the first tensor among its inputs, ``f32``; empty if there is none.
        kind: A value of `Kind`.
        cause: A value of `shadowrun.types.Cause`, or empty.
        explanation: Hypothesis, or type of the exception.
        message: Evidence, or first sentence of the exception.
        phase: ``forward`` or ``backward``.
        role: `REFERENCE` for a fault that the reference shows against itself, else `TARGET`.
    """

    op: str
    dtype: str
    kind: str
    cause: str = ""
    explanation: str = ""
    message: str = ""
    phase: str = "forward"
    role: str = TARGET


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a variant on a target.

    Attributes:
        status: ``ok``, ``finding``, ``unsupported`` (nothing worse than an operator that the platform lacks, or
            computes on the CPU), ``unverified`` or ``invalid`` (the reference cannot run it).
        reason: Why, for the last two.
        findings: Faults.
        oracles: Bits of the oracles by which the results differ; -1 where they were not compared.
        ops: Operators, each with ``ok``, ``unsupported``, ``fallback`` or ``error``.
        n_calls: Operator calls that were judged.
        cpu_ms: Processor time, in milliseconds.
    """

    status: str
    reason: str = ""
    findings: tuple[VariantFinding, ...] = ()
    oracles: int = -1
    ops: Mapping[str, str] = field(default_factory=dict)
    n_calls: int = 0
    cpu_ms: float = 0.0


class _NotReadable(Exception):  # noqa: N818 - a reason, caught inside
    """Results of the target raise where they are read.

    Attributes:
        raised: What they raise.
    """

    def __init__(self, raised: RuntimeError) -> None:
        super().__init__(str(raised))
        self.raised = raised


class VariantRunner:
    """Runs variants, one after another, in this process.

    Args:
        settings: Platforms.

    Raises:
        PlatformError: A platform is absent, or its process does not start.
    """

    def __init__(self, settings: RunnerSettings) -> None:
        self._settings = settings
        # Fixed for all machines: sums are split by threads, and a variant must repeat itself elsewhere.
        torch.set_num_threads(settings.threads)
        if settings.flaws is not None and not sim.is_enabled():
            simulated = next(t for t in settings.targets if parse(t).device_type not in ("cpu", "cuda"))
            sim.enable(parse(simulated).device_type, flaws=settings.flaws)
        # With the first target only: what the reference does to itself is the same whatever it is compared with.
        self._pairs = [_Pair(target, settings, checks_reference=not k) for k, target in enumerate(settings.targets)]
        self._compiled = [(pair, backend) for backend in settings.backends for pair in self._pairs]

    def run(
        self,
        variant: Variant,
        target: int = 0,
        on_target: Callable[[], None] = lambda: None,
        on_op: Callable[[str], None] = lambda _: None,
    ) -> Result:
        """Run a variant on one target.

        Args:
            variant: The variant.
            target: Number of the target, in `RunnerSettings.names`.
            on_target: Called when the reference has run it and before the target does.
            on_op: Called with the name of each operator before it is called, on both; with nothing before a backward
                pass.
        """
        began = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if variant.execution.threads:
                torch.set_num_threads(variant.execution.threads)
            if target < len(self._pairs):
                result = self._pairs[target].run(variant, on_target, on_op)
            else:
                pair, backend = self._compiled[target - len(self._pairs)]
                result = pair.compiled(variant, backend, on_target)
            if variant.execution.threads:
                torch.set_num_threads(self._settings.threads)
        return _timed(result, (time.process_time() - began) * 1e3)


class _Pair:
    """One target and the reference.

    Args:
        target: Spec of the target.
        settings: Of all platforms.
        checks_reference: Whether the reference is compared with itself: once for all targets.
    """

    def __init__(self, target: str, settings: RunnerSettings, *, checks_reference: bool) -> None:
        self._target, self._settings = target, settings
        self._checks_reference = checks_reference
        self._on_target: Callable[[], None] = lambda: None
        self._is_on_target = False
        self._n_left = 0
        self._renew()

    def _renew(self) -> None:
        s = self._settings
        self._cases = CaseRunner(self._target, s.ref, s.call_limit_s, self._target_begins)
        self._platform = self._cases.target
        self._relations = {TARGET: Metamorphic(self._platform), REFERENCE: Metamorphic(self._cases.reference)}
        self._n_left = _RENEW

    def _target_begins(self) -> None:
        self._is_on_target = True
        self._on_target()

    def run(self, variant: Variant, on_target: Callable[[], None], on_op: Callable[[str], None]) -> Result:
        if self._n_left <= 0:
            self._renew()
        self._n_left -= 1
        self._on_target, self._is_on_target = on_target, False

        def call(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            on_op(op.name())
            return op(*args, **kwargs)

        # Before the target begins: a crash in here is the reference's.
        itself = self._violations(variant, REFERENCE, on_op) if self._checks_reference else ()
        placement = DevicePlacement(call, self._platform.device)
        program = program_of(variant, self._watched(call, placement), lambda: on_op(""))
        found = self._cases.run(Part.FORWARD, program) or []
        types = {p.device.type for p in (self._platform, self._cases.reference)}
        other_list = variant.execution.autocast and len(types) > 1  # autocast has a list of operators for each type
        by_device = other_list or any(node.name in _BY_DEVICE for node in variant.graph.nodes)
        # 5 of 400 variants were false findings on the clean simulated device before.
        if any(f.explanation == AS_A_WHOLE for f in found) and (by_device or _reads_new_memory(variant)):
            found = [f for f in found if f.explanation != AS_A_WHOLE]
        observed = self._cases.observed
        refused = next((f for f in found if f.kind in (Kind.HARNESS, Kind.NOT_VALID)), None)
        if refused is not None and observed is None:
            return Result("invalid", f"{refused.explanation}: {refused.message}"[:300])
        own = tuple(self._findings(found, observed))
        if placement.origin or variant.execution.autocast:
            own = tuple(_explained(f, placement, variant) for f in own)
        findings = (*own, *self._compiled_too(variant))
        condemned = any(f.kind in _WRONG for f in findings)
        findings += (*self._violations(variant, TARGET, on_op), *itself)
        oracles = -1
        is_unsupported = any(f.kind in _UNSUPPORTED for f in findings)  # the reference answered in its place
        # Unverified is nearly always a reference that does not repeat itself: it differs from any target.
        if not is_unsupported and _status(found, findings)[0] != "unverified":
            try:
                oracles = self._oracles(variant, observed, condemned=condemned)
            except _NotReadable as error:
                f = finding_of_error(error.raised)
                findings += (VariantFinding("", "", f.kind, f.cause, f.explanation, f.message),)
        status, reason = _status(found, findings)
        rows = observed.rows if observed is not None else []
        return Result(
            status,
            reason,
            findings,
            oracles,
            _ops(rows, findings),
            sum(row[3] == "match" or row[3] == "mismatch" for row in rows),
        )

    def _watched(self, call: Call, placement: DevicePlacement) -> Call:
        """Calls whose results are watched where the target runs them."""
        if not self._cases.is_on_device or self._platform.device.type == "cpu":
            return call

        def either(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            return (placement if self._is_on_target else call)(op, args, kwargs)

        return either

    def _violations(self, variant: Variant, role: str, on_op: Callable[[str], None]) -> tuple[VariantFinding, ...]:
        """What a platform shows against itself, where the recipe asks for it; nothing where the variant raises."""
        relation = variant.execution.metamorphic
        if not relation:
            return ()
        called = [""]

        def begins(op: str) -> None:
            called[0] = op
            on_op(op)

        try:
            found, _ = self._relations[role].check(program_of(variant)(_CPU), relation, on_op=begins)
        except WorkerDied as error:
            f = finding_of_error(error)
            if f.kind is Kind.UNVERIFIED:  # the operator is not called again after some deaths
                return ()
            return (VariantFinding(called[0], "", f.kind, f.cause, f.explanation, f.message, role=role),)
        # What the program raises is found, or makes it invalid, where it runs as a whole.
        except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
            return ()
        kind = Kind.MISMATCH
        each = (VariantFinding(v.op, v.dtype, kind, v.cause, v.explanation, v.message, role=role) for v in found)
        # One variant may call a faulty operator many times.
        return tuple({(f.op, f.dtype, f.cause): f for f in each}.values())

    def _compiled_too(self, variant: Variant) -> tuple[VariantFinding, ...]:
        """Findings of the compiled variant, where its recipe asks for compilation."""
        if not variant.execution.compile:
            return ()
        return self.compiled(variant, variant.execution.compile, lambda: None).findings

    def compiled(self, variant: Variant, backend: str, on_target: Callable[[], None]) -> Result:
        """Its compiled code against itself in eager mode."""
        from shadowrun.studies.campaign.variants.compiled_variant import check_compiled  # imports the compiler

        on_target()
        if self._platform.remote is not None:
            return Result("unverified", "the platform has a process of its own: nothing is compiled there")
        with self._platform.context():
            status, reason, found = check_compiled(variant, backend, self._platform.device)
        return Result(status, reason, tuple(VariantFinding(*f) for f in found))

    def _findings(self, found: list[CaseFinding], observed: CaseRun | None) -> Iterator[VariantFinding]:
        places: dict[tuple[str, ...], tuple[str, str]] = {}
        for row in observed.rows if observed is not None else ():
            if (shown := finding_of_row(row)) is not None:
                places.setdefault(_key(shown), (_dtype_of(row[8]), row[2]))
        seen = set()
        for f in found:
            if f.kind not in FAILURES and f.kind is not Kind.REFERENCE:
                continue
            dtype, phase = places.get(_key(f), ("", "forward"))
            one = VariantFinding(f.op or f.kernel, dtype, f.kind, f.cause, f.explanation, f.message, phase)
            # One variant may call a faulty operator many times.
            if (key := (one.op, one.dtype, one.kind, one.cause, one.explanation)) not in seen:
                seen.add(key)
                yield one

    def _oracles(self, variant: Variant, observed: CaseRun | None, *, condemned: bool) -> int:
        if observed is None or (self._cases.is_on_device and observed.actual is None):
            return -1  # it raised
        expected = _tensors(observed.expected)
        actual = _tensors(observed.actual) if self._cases.is_on_device else self._free_run(variant)
        if actual is None or len(actual) != len(expected):
            return -1
        try:
            here = [_to_cpu(t, self._platform) for t in actual]
        except RuntimeError as error:  # a device with a queue raises where its results are read
            raise _NotReadable(error) from error
        if self._platform.device.type == "cpu" and self._cases.is_on_device:
            here = actual
        there = [_to_cpu(t, self._cases.reference) for t in expected]
        names = differing(here, there, lambda: exact_results(variant), condemned=condemned)
        # A match with a cause is one whose bits differ.
        fired = any(row[3] == "mismatch" or (row[3] == "match" and row[4]) for row in observed.rows)
        return to_mask(names | {FIRED} if fired else names)

    def _free_run(self, variant: Variant) -> list[torch.Tensor] | None:
        """Results of the target on its own intermediate results, where the program itself runs on the reference."""
        platform = self._platform
        try:
            if platform.remote is None:
                with platform.context():
                    return _tensors(program_of(variant)(platform.device)())
            if variant.execution.backward:
                return None  # its process runs single operators: no gradient flows through them
            executor = Executor(platform)
            return _tensors(program_of(variant, _remote_caller(executor))(_CPU)())
        except (RuntimeError, NotImplementedError, WorkerDied, ValueError, TypeError, IndexError):
            return None


def _reads_new_memory(variant: Variant) -> bool:
    """Whether a result depends on memory that no kernel writes: ``torch.empty``, a part of what CTC loss returns."""
    graph = variant.graph
    rows = [facts(node.name) for node in graph.nodes]
    read = (*graph.outputs, *(ref for node in graph.nodes for ref in node.refs()))
    # Memory that a kernel takes for itself often has the content of a former run: two runs may agree by chance.
    if any(ref.node >= 0 and ref.output in rows[ref.node].uninitialised_returns for ref in read):
        return True
    if not any(row.uninitialised for row in rows):
        return False
    results = []
    # Not two: `heaviside` makes 0 of NaN, and of 0.
    for number in (None, 0, 1):
        try:
            with filled_memory(number):
                results.append(_tensors(program_of(variant)(_CPU)()))
        except RuntimeError:  # an operator refuses NaN: it reads that memory
            return True
    first, *others = results
    return not all(all(map(bits_equal, first, other)) for other in others)


def _remote_caller(executor: Executor) -> Call:
    def call(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return executor.run_mirrored(make_plan(op, 0), tuple(args), dict(kwargs), _MAX_BYTES).out

    return call


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in value if isinstance(t, torch.Tensor)]


def _to_cpu(t: torch.Tensor, platform: Platform) -> torch.Tensor:
    t = unwrapped(t.detach())  # a wrapper has no memory, and may say that it is on the CPU
    if t.device.type == "cpu":
        return t
    return without_strides(t, _CPU) if platform.functionalizes else move(t, _CPU)


def _status(found: list[CaseFinding], findings: tuple[VariantFinding, ...]) -> tuple[str, str]:
    if any(f.kind not in (*MISSING, Kind.REFERENCE) for f in findings):
        return "finding", ""
    if any(f.kind in MISSING for f in findings):
        return "unsupported", ""
    if findings:
        return "finding", ""
    doubt = next((f for f in found if f.kind in (Kind.UNVERIFIED, Kind.HARNESS)), None)
    return ("ok", "") if doubt is None else ("unverified", f"{doubt.explanation}: {doubt.message}".strip(": ")[:300])


def _explained(f: VariantFinding, placement: DevicePlacement, variant: Variant) -> VariantFinding:
    """A finding as the fault that it shows, where an exception is the effect of another."""
    if f.kind != Kind.ERROR:
        return f
    if placement.origin:
        message = f"a result lies on {placement.where}: {f.op or 'a later call'} raises {f.message}"[:300]
        return replace(
            f, op=placement.origin, kind=Kind.FORM, cause=Cause.METADATA, explanation="device", message=message
        )
    if not f.op and variant.execution.autocast and _AUTOCAST in f.message:
        return replace(f, op=_AUTOCAST_OP, kind=Kind.UNSUPPORTED, cause=Cause.MISSING_OPERATOR)
    return f


def _ops(rows: Sequence[Any], findings: tuple[VariantFinding, ...]) -> dict[str, str]:
    ops: dict[str, str] = {}
    for row in rows:
        status = _STATUS_OF_OP.get(row[3], "ok")
        # An operator that failed once counts as failed, whatever its other calls did.
        if status != "ok" or row[1] not in ops:
            ops[row[1]] = status
    for f in findings:
        if f.kind in _UNSUPPORTED and f.op and f.op != _AUTOCAST_OP:
            ops[f.op] = "unsupported"
    return ops


def _key(f: CaseFinding) -> tuple[str, ...]:
    return (f.op, f.kernel, f.kind, f.cause, f.explanation)


def _dtype_of(inputs: str) -> str:
    """``f32`` of ``f32[8, 16], f32[16], 1.0``."""
    head, bracket, _ = inputs.lstrip("[(").partition("[")
    return head if bracket and head.isalnum() else ""


def _timed(result: Result, cpu_ms: float) -> Result:
    return replace(result, cpu_ms=cpu_ms)
