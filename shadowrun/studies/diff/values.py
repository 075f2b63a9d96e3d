"""What the tensors of a recording are, as numbers that two recordings can be compared by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shadowrun.numerics.ladder import mix
from shadowrun.recording.model import NONE, Kind
from shadowrun.studies.diff.arguments import argument_codes

if TYPE_CHECKING:
    import numpy.typing as npt

    from shadowrun.numerics.ladder import Hashes
    from shadowrun.recording.model import Form, Recording

__all__ = ["Values"]


class Values:
    """Columns of a recording, by row of results and by call.

    Attributes:
        recording: The recording.
        call: The call that each row belongs to: (n_results,).
        source: The row whose digest stands for each row: of a view, what it is a view of.
        known: Whether it has a digest.
        whole: Rung 0 of `source`; 0 where there is none.
        identity: Number that two tensors share if their values are equal as far as digests show: digests of all that a
            view or a partly written memory consists of, and how each view was taken.
        moved: Whether a view has its elements in another order than its base, or only some of them: its identity can
            only be compared with that of another such view.
        form: dtype and shape, as a number. Strides differ between devices and are no difference of values.
        layout: The same with strides.
        placement: Mesh and placements of the local part of a DTensor, as a number; 0 for others.
        arguments: A number for the arguments of each call that are not tensors, see `arguments`: (n_calls,).
    """

    def __init__(self, recording: Recording) -> None:
        results, forms = recording.results, recording.forms
        rows = np.arange(len(results), dtype=np.int64)
        self.recording = recording
        self.call = np.repeat(np.arange(len(recording.calls)), recording.calls["n_results"])
        self.arguments = argument_codes(recording)
        self.form = _numbers([(f.dtype, f.shape) for f in forms])[results["form"]]
        self.layout = _numbers([(f.dtype, f.shape, _strides(f)) for f in forms])[results["form"]]
        self.placement = _numbers([f.placement for f in forms])[results["form"]]
        is_view = (results["kind"] == Kind.VIEW) & (results["base"] != NONE)
        self.source = _ends(np.where(is_view, results["base"], rows))
        has = results["n_rungs"] > 0
        own = np.zeros(len(results), np.uint64)
        # The first rung is the digest of all bits; the others are those without the lowest ones.
        own[has] = recording.rungs[recording.first_rung[:-1][has]]
        self.known: npt.NDArray[np.bool_] = has[self.source]
        self.whole: Hashes = own[self.source]
        code = self._view_codes(is_view)
        self.moved = _sums(is_view & (code != 0), np.where(is_view, results["base"], rows)) > 0
        # A tensor that was written to in part has the digest of that part, and the rest of its base.
        in_part = (results["kind"] == Kind.WRITTEN) | (results["kind"] == Kind.OVERWRITTEN)
        continues = is_view | (in_part & (results["base"] != NONE))
        parts = np.where(is_view, code, mix(own))
        self.identity: Hashes = _sums(parts, np.where(continues, results["base"], rows))

    def _view_codes(self, is_view: npt.NDArray[np.bool_]) -> Hashes:
        """How each view was taken; 0 where it has all elements of its base in the same order, and for other rows."""
        recording = self.recording
        code = np.zeros(len(is_view), np.uint64)
        views = np.flatnonzero(is_view)
        if not len(views):
            return code
        forms = recording.results["form"][views]
        bases = recording.results["form"][recording.results["base"][views]]
        contiguous = np.array([_is_contiguous(f) for f in recording.forms], bool)
        # A hostile file may name a shape whose product does not fit into int64.
        size = np.array([min(f.n_elements, 1 << 62) for f in recording.forms], np.int64)
        keeps = contiguous[forms] & contiguous[bases] & (size[forms] == size[bases])
        ops = _numbers([c.op for c in recording.contexts])
        form = self.form[views].view(np.uint64)
        calls = self.call[views]
        taken = ops[recording.calls["context"][calls]].view(np.uint64)
        taken = mix(taken) ^ self.arguments[calls].view(np.uint64)
        with np.errstate(over="ignore"):
            # The lowest bit is set, so that no code of a real view is 0, which stands for "the same elements".
            code[views] = np.where(keeps, np.uint64(0), mix(mix(taken) + form) | np.uint64(1))
        return code

    def results_identity(self) -> Hashes:
        """A number for the values of all that each call made, in their order; 0 if any has no digest: (n_calls,)."""
        recording = self.recording
        made = recording.results["kind"] != Kind.LEAF
        first = recording.first_result[self.call]
        # Leaves come first among the rows of a call: results count from the first that is none.
        n_leaves = np.bincount(self.call[~made], minlength=len(recording.calls))[self.call]
        place = (np.arange(len(made)) - first - n_leaves).astype(np.uint64)
        found = np.zeros(len(recording.calls), np.uint64)
        with np.errstate(over="ignore"):
            np.add.at(found, self.call[made], mix(mix(place[made]) + self.identity[made]))
        found[self.call[made & ~self.known]] = 0
        return found

    def inputs_identity(self) -> Hashes:
        """A number for the values of all inputs of each call, in their order: (n_calls,)."""
        recording = self.recording
        n = recording.calls["n_inputs"].astype(np.int64)
        position = np.arange(len(recording.inputs)) - np.repeat(np.cumsum(n) - n, n)
        with np.errstate(over="ignore"):
            each = np.zeros(len(position), np.uint64)
            known = recording.inputs != NONE
            each[known] = mix(mix(position[known].astype(np.uint64)) + self.identity[recording.inputs[known]])
            sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(each, dtype=np.uint64)])
            found: Hashes = sums[recording.first_input[1:]] - sums[recording.first_input[:-1]]
            return found


def _ends(following: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where each chain of rows ends."""
    # Each round follows twice as many; a base comes before its view, so that this ends.
    while len(following):
        further = following[following]
        if (further == following).all():
            break
        following = further
    return following


def _sums(parts: npt.NDArray[Any], following: npt.NDArray[np.int64]) -> Hashes:
    """Sum of the parts along each chain of rows, modulo 2^64."""
    total = parts.astype(np.uint64)
    # The end of a chain follows itself: its own part is added once, behind all others.
    rows = np.arange(len(following))
    is_end = following == rows
    ends = np.where(is_end, total, np.uint64(0))
    total = np.where(is_end, np.uint64(0), total)
    with np.errstate(over="ignore"):
        while len(following):
            further = following[following]
            total = total + total[following]
            if (further == following).all():
                break
            following = further
        return total + ends[following] if len(following) else total


def _numbers(values: list[Any]) -> npt.NDArray[np.int64]:
    """Hashes of Python's: equal values have equal numbers in both recordings of one process."""
    # Salted anew in each process: no such number may be written to a file.
    return np.array([hash(value) for value in values], np.int64)


def _strides(form: Form) -> tuple[int, ...]:
    """Strides of the dimensions that have any."""
    return tuple(stride for size, stride in zip(form.shape, form.stride, strict=False) if size > 1)


def _is_contiguous(form: Form) -> bool:
    step = 1
    for size, stride in zip(reversed(form.shape), reversed(form.stride), strict=False):
        # A dimension of size 1 may have any stride: no element is reached by it.
        if size > 1 and stride != step:
            return False
        step *= size
    return len(form.shape) == len(form.stride)
