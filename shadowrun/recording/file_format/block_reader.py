"""Unpacks the blocks of a recording, whose every size and number may be wrong: bounds memory, and checks each row."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shadowrun.recording.file_format.recording_writer import (
    MAX_CALLS_PER_BLOCK,
    Block,
    check_range,
)
from shadowrun.recording.model import (
    CALL,
    N_SAMPLES,
    NONE,
    RESULT,
    Form,
    Kind,
    n_rungs,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


__all__ = ["Limits", "Unpacking", "check_rows"]

_MAX_RESULTS_PER_BLOCK: Final = 1 << 22  # a fused optimizer writes to thousands of tensors in one call
_MAX_ELEMENTS: Final = 2**63 - 1
_BELOW_2_31: Final = {"calls": ("step", "occurrence"), "results": ("n_rows",)}
_COUNTS_OF_ELEMENTS: Final = ("n_nan", "n_pos_inf", "n_neg_inf", "n_zero", "n_neg_zero", "n_subnormal")


class Unpacking:
    """Unpacks blocks, up to a number of bytes in all: a kilobyte may stand for a megabyte of zeros.

    Args:
        most: Bytes.
    """

    def __init__(self, most: int) -> None:
        self._left = most

    def block(
        self,
        n_calls: int,
        n_results: int,
        calls: bytes,
        results: bytes,
        inputs: bytes,
        rungs: bytes,
        samples: bytes,
        sample_tops: bytes,
        rows: bytes,
        *,
        widths: Sequence[int],
    ) -> Block:
        """A block from the columns of its row."""
        if n_calls > MAX_CALLS_PER_BLOCK or n_results > _MAX_RESULTS_PER_BLOCK:
            raise ValueError(f"a block of {n_calls} calls and {n_results} results")
        call = self._inflated(calls, CALL, n_calls)
        result = self._inflated(results, RESULT, n_results)
        n_inputs = int(call["n_inputs"].sum(dtype=np.int64))
        return Block(
            call,
            result,
            self._inflated(inputs, np.dtype("<i8"), n_inputs),
            _plain(rungs, int(result["n_rungs"].sum(dtype=np.int64))),
            self._samples(samples, sample_tops, result, widths),
            _plain(rows, int((result["n_rungs"].astype(np.int64) * result["n_rows"]).sum())),
        )

    def _samples(
        self, lower: bytes, tops: bytes, results: npt.NDArray[Any], widths: Sequence[int]
    ) -> npt.NDArray[np.uint64]:
        """What `_split` took apart."""
        check_range(results["form"], 0, len(widths), "a form")
        n = int(results["n_samples"].sum(dtype=np.int64))
        self._take(8 * n)
        of_samples = np.repeat(np.array(widths, np.uint8)[results["form"]], results["n_samples"])
        expected = int(of_samples.sum(dtype=np.int64)) - int(np.count_nonzero(of_samples))
        if len(lower) != expected:
            raise ValueError(f"{len(lower)} bytes of samples where the rows say {expected}")
        columns = np.zeros((n, 8), "u1")
        columns[np.arange(1, 9, dtype=np.uint8) < of_samples[:, None]] = np.frombuffer(lower, "u1")
        there = np.flatnonzero(of_samples)
        columns[there, of_samples[there] - 1] = self._inflated(tops, np.dtype("u1"), len(there))
        return columns.reshape(-1).view("<u8")

    def _take(self, n_bytes: int) -> None:
        """Bounded before memory is taken."""
        self._left -= n_bytes
        if self._left < 0:
            raise ValueError("its columns are far larger than the file")

    def _inflated(self, data: bytes, dtype: np.dtype[Any], n: int) -> npt.NDArray[Any]:
        expected = n * dtype.itemsize
        self._take(expected)
        stream = zlib.decompressobj()
        content = stream.decompress(data, expected + 1)
        if len(content) != expected or stream.unconsumed_tail:
            raise ValueError(f"a block whose columns are not {expected} bytes")
        return np.frombuffer(content, dtype)


def _plain(data: bytes, n: int) -> npt.NDArray[np.uint64]:
    if len(data) != 8 * n:
        raise ValueError(f"{len(data)} bytes of digests where the rows say {8 * n}")
    return np.frombuffer(data, np.dtype("<u8"))


@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """What a tensor of each form has at most: (n_forms,) each.

    Attributes:
        rungs: Rungs of its ladder.
        rows: Ladders of rows.
        samples: Sampled numbers.
        elements: Real numbers.
    """

    rungs: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    elements: npt.NDArray[np.int64]

    @classmethod
    def from_forms(cls, forms: Sequence[Form]) -> Limits:
        """Of forms.

        Raises:
            ValueError: A size is negative, or no tensor has so many elements.
        """
        rows = []
        for form in forms:
            if min(form.shape, default=0) < 0 or form.n_elements > _MAX_ELEMENTS:
                raise ValueError("a shape that no tensor has")
            n_parts = 2 if form.dtype.startswith("complex") else 1
            n_samples = n_parts * min(N_SAMPLES, form.n_elements)
            # A layout whose shape is not recorded has no values either.
            # Leading dimensions of size 1 are skipped where rows are digested.
            n_rows = next((size for size in form.shape if size != 1), 1) if form.shape else 0
            n_elements = min(_MAX_ELEMENTS, n_parts * form.n_elements)
            rows.append((n_rungs(form.dtype), min(n_rows, 2**31), n_samples, n_elements))
        columns = np.array(rows, np.int64).reshape(-1, 4)
        return cls(columns[:, 0], columns[:, 1], columns[:, 2], columns[:, 3])


def check_rows(
    calls: npt.NDArray[Any],
    results: npt.NDArray[Any],
    inputs: npt.NDArray[np.int64],
    n_contexts: int,
    n_kernels: int,
    limits: Limits,
) -> None:
    """Refuse numbers that refer to no row, and more rungs, rows, samples and elements than forms have."""
    check_range(calls["context"], 0, n_contexts, "a context")
    check_range(calls["kernel"], NONE, n_kernels, "a kernel")
    for array, table in ((calls, "calls"), (results, "results")):
        for column in _BELOW_2_31[table]:
            check_range(array[column], 0, 2**31 - 1, f"{column} of {table}")
    check_range(results["form"], 0, len(limits.rungs), "a form")
    check_range(results["kind"], 0, len(Kind), "a kind")
    form = results["form"]
    if not ((results["n_rungs"] == 0) | (results["n_rungs"] == limits.rungs[form])).all():
        raise ValueError("a ladder of a length that its dtype does not have")
    check_range(results["n_rows"], 0, np.where(results["n_rungs"] > 0, limits.rows[form], 0) + 1, "a row")
    check_range(results["n_samples"], 0, limits.samples[form] + 1, "a sample")
    for column in _COUNTS_OF_ELEMENTS:
        # Not `< n + 1`, which may be beyond 63 bits.
        if not ((results[column] >= 0) & (results[column] <= limits.elements[form])).all():
            raise ValueError(f"{column} of more elements than there are")
    if int(calls["n_results"].sum(dtype=np.int64)) != len(results):
        raise ValueError("results that belong to no call")
    # A base comes before its view, so that to follow bases ends.
    check_range(results["base"], NONE, np.arange(len(results)), "the base of a view")
    check_range(inputs, NONE, len(results), "an input")
