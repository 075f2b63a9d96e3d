"""What a recording is made of: one pass over a program, each call with digests of its results. Needs no torch.

A recording is read on another machine than it was made on. Its calls are found again by `Key`, and its results are
compared by their ladders (`numerics.hash_ladder`); no tensor is in it unless it was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shadowrun.numerics.hash_ladder import Hashes, mantissa_of, mix

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shadowrun.types import Phase

__all__ = [
    "CALL",
    "N_SAMPLES",
    "OUTPUTS_BYTES",
    "RESULT",
    "Context",
    "Form",
    "Key",
    "Kind",
    "Process",
    "Recording",
    "output_name",
    "sample_positions",
    "width_of",
]

N_SAMPLES: Final = 64
"""Elements of each result that are kept, at positions that depend on its shape only."""

OUTPUTS_BYTES: Final = 1 << 22
"""What the results of all steps' last calls may take in a recording; those of one step may take a quarter of it."""

NONE: Final = -1
"""A number of a row that there is not."""


class Kind(IntEnum):
    """What a row of results stands for."""

    RESULT = 0
    """A result that a call made. `base` is a row of the tensor whose memory it lies on, where its schema says that it
    has memory of its own."""
    WRITTEN = 1
    """An argument that a call wrote to, after the call."""
    LEAF = 2
    """A tensor that no recorded call made: a parameter, a buffer, an input. Recorded at its first use."""
    VIEW = 3
    """A result that shares memory with an argument. It has no digest: `base` is the row that its values come from."""
    OVERWRITTEN = 4
    """Memory of a tensor argument, or next to it, that a call wrote to and its schema does not declare, after the call.
    `position` is the number of the argument among the call's tensors."""


CALL: Final = np.dtype([
    ("step", "<i4"),
    ("context", "<i4"),
    ("occurrence", "<i4"),  # how often the operator was called before in this module, phase and step
    ("kernel", "<i4"),  # number of the kernel's name, or NONE
    ("n_results", "<u2"),  # its rows of results: leaves first used here, then results, then written arguments
    ("n_inputs", "<u2"),  # its entries of inputs
])  # fmt: skip
"""One call. Its number is its position in the recording."""

RESULT: Final = np.dtype([
    ("form", "<i4"),
    ("kind", "u1"),
    ("position", "u1"),  # which result or argument of the call, 255 for all beyond; equal ones of a call are repeats
    ("n_samples", "u1"),
    ("n_rungs", "u1"),  # of its ladder: 0 for views and what was not digested
    ("n_rows", "<i4"),  # ladders of single rows, see `rows=`
    ("base", "<i8"),  # the row that a view's values come from, or the rest of a written memory; NONE; see `Kind`
    ("n_nan", "<i8"),
    ("n_pos_inf", "<i8"),
    ("n_neg_inf", "<i8"),
    ("n_zero", "<i8"),  # +0
    ("n_neg_zero", "<i8"),
    ("n_subnormal", "<i8"),
    ("min", "<f8"),  # of the finite elements; NaN where there are none
    ("max", "<f8"),
    ("norm", "<f8"),  # 2-norm of the finite elements, at most the greatest float64
])  # fmt: skip
"""One tensor of a call. Its number is its position in the recording."""


class Context(NamedTuple):
    """What calls have in common.

    Attributes:
        op: ``aten::addmm``, with its overload.
        module: Path of the module, or an empty string.
        phase: Forward, backward or optimizer.
        site: Source line, ``train.py:17 in step``.
        device: Type of the device, ``cuda``.
        arguments: Arguments that are not tensors, as JSON; equal operators with equal inputs and equal arguments shall
            give equal results.
    """

    op: str
    module: str
    phase: Phase
    site: str
    device: str
    arguments: str


class Form(NamedTuple):
    """Form of a tensor.

    Attributes:
        dtype: ``float32``.
        shape: Sizes of its dimensions.
        stride: In elements.
        layout: ``strided``, or another one, whose values are not digested.
        placement: Mesh and placements of a DTensor, whose local part is digested; an empty string for others.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    layout: str = "strided"
    placement: str = ""

    @property
    def of_values(self) -> tuple[str, tuple[int, ...], str]:
        """What equal results have in common: strides are the device's."""
        return self.dtype, self.shape, self.placement

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        n = 1
        for size in self.shape:
            n *= size
        return n


class Key(NamedTuple):
    """How a call is found again in another recording."""

    rank: int
    step: int
    phase: str
    module: str
    op: str
    occurrence: int


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a recording.

    Attributes:
        name: File that it was recorded to, without its folder.
        rank: Of a distributed run; 0 of others.
        world_size: 1 of others.
        complete: Whether the recording was ended, and not killed.
        started: ISO 8601, UTC.
        argv: The program and its arguments.
        fingerprint: Hardware, libraries and settings; see `platforms.fingerprint`.
        provenance: Digests by name: ``script``, ``versions``, ``generator:cpu``, ``input:0``, ``parameter:fc.weight``,
            ``buffer:…``; ``placement:parameter:fc.weight``, mesh and placements of a DTensor. Two recordings are
            comparable only where these are equal.
        options: `rows`, `capture`, `ops`, `modules`, `steps`, `kernels` of the recording.
        skipped: Calls that were not recorded, by reason.
        not_captured: Calls whose inputs were to be kept and are not, by reason.
        first_call: Number of its first call in the recording.
        n_calls: Its calls.
    """

    name: str
    rank: int = 0
    world_size: int = 1
    complete: bool = False
    started: str = ""
    argv: tuple[str, ...] = ()
    fingerprint: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    not_captured: dict[str, int] = field(default_factory=dict)
    first_call: int = 0
    n_calls: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A whole recording, in memory as columns.

    Attributes:
        name: Name of the file, without its folder; what reports call it.
        processes: One for each rank.
        contexts, forms, kernels: What rows of calls and results refer to by number.
        calls: (n_calls,) of `CALL`.
        results: (n_results,) of `RESULT`, in the order of the calls.
        first_result: (n_calls + 1,): call c has the results `first_result[c]` up to `first_result[c + 1]`.
        inputs: Row numbers of results, in the order of the calls; NONE for a tensor that was not digested.
        first_input: (n_calls + 1,), likewise.
        rungs: All ladders, one after the other.
        first_rung: (n_results + 1,), likewise.
        samples: Raw bits of the sampled elements, zero-extended to 64 bits; a complex element is two.
        first_sample: (n_results + 1,), likewise.
        row_rungs: Ladders of single rows: of each result `n_rows` ladders of `n_rungs`.
        first_row_rung: (n_results + 1,), likewise.
        outputs: All elements of results of a step's last call, by row: bytes, in the order of the contiguous tensor.
    """

    name: str
    processes: tuple[Process, ...]
    contexts: tuple[Context, ...]
    forms: tuple[Form, ...]
    kernels: tuple[str, ...]
    calls: npt.NDArray[Any]
    results: npt.NDArray[Any]
    first_result: npt.NDArray[np.int64]
    inputs: npt.NDArray[np.int64]
    first_input: npt.NDArray[np.int64]
    rungs: Hashes
    first_rung: npt.NDArray[np.int64]
    samples: Hashes
    first_sample: npt.NDArray[np.int64]
    row_rungs: Hashes
    first_row_rung: npt.NDArray[np.int64]
    outputs: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    _sources: npt.NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Follow all views to their bases at once: a view may have a million views below it."""
        object.__setattr__(self, "_sources", _sources(self.results))

    @property
    def sources(self) -> npt.NDArray[np.int64]:
        """`source` of all rows: (n_results,)."""
        return self._sources

    def ladder(self, result: int) -> Hashes:
        """The ladder of a result, that of its base for a view; empty where it was not digested."""
        row = self.source(result)
        return self.rungs[self.first_rung[row] : self.first_rung[row + 1]]

    def source(self, result: int) -> int:
        """The row whose digest stands for a result: itself, or what a view takes its values from."""
        return int(self._sources[result])

    def results_of(self, call: int) -> range:
        """Row numbers of the tensors of a call."""
        return range(int(self.first_result[call]), int(self.first_result[call + 1]))

    def inputs_of(self, call: int) -> npt.NDArray[np.int64]:
        """Row numbers of the tensors that a call reads, in the order of its arguments."""
        return self.inputs[self.first_input[call] : self.first_input[call + 1]]

    def parents_of(self, call: int) -> list[int]:
        """Calls that made what a call reads: for a view, the call that made its values; leaves were made by none."""
        rows = [self.source(row) for row in self.inputs_of(call).tolist() if row != NONE]
        rows = [row for row in rows if self.results["kind"][row] != Kind.LEAF]
        found: list[int] = (np.searchsorted(self.first_result, rows, side="right") - 1).tolist()
        return found

    def samples_of(self, result: int) -> Hashes:
        """Raw bits of the sampled elements of a result."""
        row = self.source(result)
        return self.samples[self.first_sample[row] : self.first_sample[row + 1]]

    def elements_of(self, result: int) -> Hashes | None:
        """Raw bits of all elements of a result as `samples_of`; None where only some are in the recording."""
        row = self.source(result)
        form = self.form_of(row)
        found = self.outputs.get(row)
        if found is not None:
            return np.frombuffer(found, f"<u{width_of(form.dtype)}").astype(np.uint64)
        samples = self.samples_of(row)
        n_parts = 2 if form.dtype.startswith("complex") else 1
        is_whole = len(self.ladder(row)) > 0 and len(samples) == n_parts * form.n_elements
        return samples if is_whole else None

    def form_of(self, result: int) -> Form:
        """Form of a result."""
        return self.forms[int(self.results["form"][result])]

    def context_of(self, call: int) -> Context:
        """Context of a call."""
        return self.contexts[int(self.calls["context"][call])]

    def process_of(self, call: int) -> Process:
        """The process that made a call."""
        return next(p for p in reversed(self.processes) if p.first_call <= call)

    def call_keys(self) -> Iterator[Key]:
        """Keys of all calls, in their order."""
        for process in self.processes:
            part = self.calls[process.first_call : process.first_call + process.n_calls]
            columns = (part[name].tolist() for name in ("step", "context", "occurrence"))
            for step, number, occurrence in zip(*columns, strict=True):
                context = self.contexts[number]
                yield Key(process.rank, step, str(context.phase), context.module, context.op, occurrence)


def _sources(results: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """For each row, the first that is no view of an earlier one: (n_results,)."""
    rows = np.arange(len(results), dtype=np.int64)
    is_view = (results["kind"] == Kind.VIEW) & (results["base"] > NONE) & (results["base"] < rows)
    sources = np.where(is_view, results["base"], rows)
    # Each round doubles the length of the path, so that twenty rounds follow a million views.
    while not np.array_equal(further := sources[sources], sources):
        sources = further
    return sources


def sample_positions(n_elements: int) -> npt.NDArray[np.int64]:
    """Flat positions of the sampled elements: all of up to `N_SAMPLES`, else one at random in each of 64 equal parts.

    They depend on the number of elements only, so that two machines sample the same.
    """
    if n_elements <= N_SAMPLES:
        return np.arange(n_elements, dtype=np.int64)
    parts = np.arange(N_SAMPLES + 1, dtype=np.int64)
    # parts * n_elements // N_SAMPLES, of which the product may have more than 63 bits.
    edges = parts * (n_elements // N_SAMPLES) + parts * (n_elements % N_SAMPLES) // N_SAMPLES
    draws = mix(np.arange(N_SAMPLES, dtype=np.uint64) + np.uint64(n_elements))
    widths = (edges[1:] - edges[:-1]).astype(np.uint64)
    return edges[:-1] + (draws % widths).astype(np.int64)


def output_name(rung: int, n_bytes: int) -> str:
    """Under which a result is kept: rung 0 of its ladder shows that it is the one that was digested."""
    return f"{rung:016x}-{n_bytes}"


def width_of(dtype: str) -> int:
    """Bytes of a real number of a dtype."""
    digits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())
    bits = int(digits) if 0 < len(digits) < 4 else 8 if dtype == "bool" else 64
    return min(8, bits // (16 if dtype.startswith("complex") else 8))


def n_rungs(dtype: str) -> int:
    """Rungs of the ladder of a dtype."""
    return mantissa_of(dtype) + 1
