"""The values that flow from an intercepted call to a report: frozen, slotted, free of tensors.

A call becomes one `OpRecord` with one `Verdict` and, where bits differed, one `TensorDiff` for each
tensor that it returned or mutated. Names follow `torch.testing`: *actual* is the target's value,
*expected* the reference's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Cause",
    "Count",
    "Excess",
    "OpCall",
    "OpRecord",
    "Permissions",
    "Phase",
    "RunInfo",
    "SignedFloat",
    "Status",
    "TensorDiff",
    "TensorMeta",
    "UlpDistance",
    "UnknownOrCount",
    "Verdict",
]

Count = int
"""A number of elements."""
UnknownOrCount = int
"""A number of elements or bits; -1 where it is not known."""
UlpDistance = int
"""Between two f64 it may exceed 63 bits, and a data file then keeps the nearest float."""
SignedFloat = float
"""A value whose sign counts, also that of a zero."""
Excess = float
"""A number of rounding errors; -1 where it was not computed."""


# Values of these enumerations are texts in data files, JSON and ledgers: a new name here is a new format there.
class Status(enum.StrEnum):
    """Status of a call; each call has exactly one."""

    MATCH = "match"
    """Both platforms agree: bit for bit, or to rounding (then `Verdict.cause` is ROUNDING)."""
    MISMATCH = "mismatch"
    """No correct implementation could have returned what the target returned."""
    UNSUPPORTED = "unsupported"
    """The target has no kernel for this operator, or not for this dtype or layout."""
    FALLBACK = "fallback"
    """The target returned a result that was computed on the CPU."""
    ERROR = "error"
    """The target raised where the reference did not, or shadowrun itself failed (cause HARNESS)."""
    UNVERIFIED = "unverified"
    """Ran, but could not be compared; `Verdict.explanation` says why."""
    SKIPPED = "skipped"
    """Not compared on purpose; `Verdict.explanation` says why."""


class Cause(enum.StrEnum):
    """Why a call has its status. ROUNDING is no fault and goes with MATCH."""

    ROUNDING = "rounding"
    REDUCED_PRECISION = "reduced precision"
    EXCEPTIONAL_VALUES = "exceptional values"
    IMPLEMENTATION = "implementation"
    FLUSHED_SUBNORMALS = "flushed subnormals"
    LAYOUT = "layout or path"
    METADATA = "metadata"
    """Wrong shape, dtype, stride, layout, device or number of results."""
    MEMORY_EFFECTS = "memory effects"
    """An input overwritten, memory outside of a view written, a result that aliases other memory."""
    NO_ERROR = "no error raised"
    """The target accepted an invalid call, for which the reference raised."""
    NON_DETERMINISM = "non-determinism"
    RANDOMNESS = "randomness"
    UNDEFINED = "undefined behaviour"
    PROPAGATED = "propagated"
    REFERENCE = "reference"
    """The float64 oracle confirms the target: the reference is wrong."""
    MISSING_OPERATOR = "missing operator"
    MISSING_DTYPE = "missing dtype"
    SILENT_FALLBACK = "silent fallback"
    WARNED_FALLBACK = "warned fallback"
    SLOW = "slow"
    HARNESS = "harness"


class Phase(enum.StrEnum):
    """The part of a training step that made the call."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Form of a tensor, without its values.

    Attributes:
        dtype: Short name: ``f32``, ``bf16``, ``i64``, ``b8``, ``c64``.
        shape: Sizes.
        stride: Strides in elements; empty for layouts that have none.
        device: ``"cpu"``, ``"cuda:0"``.
        layout: ``"strided"``, ``"sparse_coo"``.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()
    device: str = "cpu"
    layout: str = "strided"

    def __str__(self) -> str:
        """``f32[8, 16]``, as `torch.utils._debug_mode` prints tensors."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class OpCall:
    """One intercepted call, without its values.

    Attributes:
        seq: Number of the call in the run, from 0.
        step: Training step, from 0.
        rank: Rank in a distributed run, else 0.
        op: ``aten::add.Tensor``, as `OpOverload.name()` prints it.
        inputs: Printed inputs, ``f32[8, 16], f32[16], 1.0``.
        module: Path of the innermost `nn.Module`, ``Net.features.0``; empty outside any module.
        phase: Part of the training step.
        site: ``file.py:12 in forward``: the line of the user's code; in backward, of the forward call.
        device: Where the user's program ran it.
    """

    seq: int
    step: int
    rank: int
    op: str
    inputs: str
    module: str
    phase: Phase
    site: str
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """The difference of one tensor of the target (*actual*) from that of the reference (*expected*).

    The fields after `n_elements` become columns of the data file's table ``diff``; the annotation of each decides its
    column's type and which values a reader accepts (`store.schema.DIFF_COLUMNS`).

    Attributes:
        name: ``output 0`` or, for a mutated argument, its name in the schema: ``self``.
        actual, expected: Form of each.
        n_elements: Elements compared.
        n_different: Elements whose bits differ.
        n_mismatched: Elements beyond what rounding explains.
        max_abs: Greatest absolute difference among elements that are finite on both sides.
        max_rel: Greatest ``|actual - expected| / |expected|`` among those with expected != 0.
        rmse: Root mean square difference over finite elements.
        max_ulp: Greatest distance in units in the last place of the dtype (signed values mapped to a
            monotone integer line); 0 for bool and equal; absolute difference for integers.
        remaining_bits: Least number of identical leading mantissa bits over all elements (Schlögl et
            al., NeurIPS 2023); -1 where it has no meaning (integers).
        n_nan, n_inf, n_zero_sign, n_subnormal: Elements whose class differs: NaN on one side only;
            infinite on one side only or of other sign; +0 against -0; subnormal against zero.
        worst_index: Index of the worst element, as in `torch.testing` messages.
        worst_actual, worst_expected: Its values.
        excess_actual, excess_expected: Distance from the float64 oracle in units of the operator's
            own rounding (`docs/design/judge.md`); -1 if the oracle was not run.
        detail: Free text on form differences: ``stride (4, 1) against (1, 2)``.
        n_from_zero: Elements that are 0 on the reference, and finite but not 0 on the target: no relative tolerance
            alone lets them pass; -1 where not counted (data files of schema 1).
    """

    name: str
    actual: TensorMeta
    expected: TensorMeta
    n_elements: Count = 0
    n_different: Count = 0
    # What a verdict decides: 0 until the judge has looked.
    n_mismatched: Count = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    rmse: float = 0.0
    max_ulp: UlpDistance = 0
    remaining_bits: UnknownOrCount = -1
    n_nan: Count = field(default=0, metadata={"label": "NaN on one side only"})
    n_inf: Count = field(default=0, metadata={"label": "infinite on one side only"})
    n_zero_sign: Count = field(default=0, metadata={"label": "zeros of other sign"})
    n_subnormal: Count = field(default=0, metadata={"label": "subnormal against zero"})
    worst_index: tuple[int, ...] = ()
    worst_actual: SignedFloat = 0.0
    worst_expected: SignedFloat = 0.0
    excess_actual: Excess = -1.0
    excess_expected: Excess = -1.0
    detail: str = ""
    n_from_zero: UnknownOrCount = field(
        default=0, metadata={"since": 2, "note": "0 on the reference, finite and not 0 on the target; -1: not counted"}
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a call, with its evidence.

    Attributes:
        status: Exactly one.
        cause: Why; None for a bit-identical match and for skipped calls.
        explanation: Short name of the hypothesis that fits (``inputs rounded to bf16``), or the
            reason of UNVERIFIED and SKIPPED (``sparse layout``).
        evidence: One sentence with the figures.
        confidence: 0 to 1, how sure the cause is.
    """

    status: Status
    cause: Cause | None = None
    explanation: str = ""
    evidence: str = ""
    confidence: float = 1.0


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One call with its verdict and its differences.

    Attributes:
        call: The call.
        verdict: Its verdict.
        diffs: One per tensor whose bits or form differed.
        missing_kernel: The kernel that was missing, which may be another than the operator called
            (``aten::add_.Tensor`` lacks ``aten::add.out``); empty where none was.
        ref_time_us, target_time_us: Wall time of the call on each side, in microseconds; on
            asynchronous devices the time to launch; -1 where it did not run.
        drift_abs, drift_rel: Accumulated error against the reference chain (`drift=True`): greatest
            absolute difference, and RMSE relative to the RMS of the reference; -1 where not measured.
    """

    call: OpCall
    verdict: Verdict
    diffs: tuple[TensorDiff, ...] = ()
    missing_kernel: str = ""
    ref_time_us: float = -1.0
    target_time_us: float = -1.0
    drift_abs: float = -1.0
    drift_rel: float = -1.0


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Description of a run: enough to know whether two runs may be compared.

    Attributes:
        target, ref: Platform specs as given.
        target_fingerprint, ref_fingerprint: What each platform is (`platforms.fingerprint`).
        versions: shadowrun, torch, numpy, python; native: whether shadowrun's compiled part was in use.
        argv: Command line of the user's program.
        config: The configuration, as printable values.
        rank, world_size: Place in a distributed run.
        started: ISO 8601 time, UTC.
        wall_s: Seconds between start and stop, summed over the blocks.
        own_s: Of these, seconds spent in shadowrun itself (replays included), while the program waited.
        budget: Use of the overhead budget (`BudgetReport` of `schedule.budget`); empty without one.
        complete: False while the run records, and after it was killed.
        notes: Notes for the reader (``target and reference are the same platform``).
        async_compare_s: Processor time in seconds of the asynchronous comparison, during which the program did not
            wait; ``behind_s`` in files and JSON.
        raised: Exception that ended the program: ``ValueError: negative (train.py:12 in step)``; empty without one.
        unselected: Why nothing, or not all that was selected, matched `steps`, `ops` and `modules`.
        repairs: Operator to what the loss would be with its calls on the reference (`drift=True`): the fields of
            `Repaired` of `replay.repair_trials`.
    """

    target: str
    ref: str
    target_fingerprint: dict[str, Any] = field(default_factory=dict)
    ref_fingerprint: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    rank: int = 0
    world_size: int = 1
    started: str = ""
    wall_s: float = 0.0
    own_s: float = 0.0
    budget: dict[str, Any] = field(default_factory=dict)
    # Set at the end of a run: the file of a process that was killed says so by itself.
    complete: bool = False
    notes: tuple[str, ...] = ()
    # The key is that of the first data files, and stays: files and JSON are a contract, names in the code are not.
    async_compare_s: float = field(default=0.0, metadata={"key": "behind_s"})
    raised: str = ""
    unselected: str = ""
    repairs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Permissions:
    """What a data file may start and import: see docs/security.md.

    Attributes:
        names: Platforms that the user has named; other names are none of a platform.
        imports: Modules that the user has named, and functions of modules, ``module:function``.
        modules: Whether all modules may be imported, since the run was recorded by this process.
        is_command: Whether the process is a command's, and ends with it: a simulated device stays registered.
    """

    names: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    modules: bool = False
    is_command: bool = False
