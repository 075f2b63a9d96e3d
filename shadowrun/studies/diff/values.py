"""Tensors and arguments of a recording in the form in which two recordings can be compared by them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shadowrun.numerics.hash_ladder import mix
from shadowrun.operators.facts import base_name
from shadowrun.recording.model import NONE, Kind

if TYPE_CHECKING:
    from collections.abc import Hashable

    import numpy.typing as npt

    from shadowrun.numerics.hash_ladder import Hashes
    from shadowrun.recording.model import Form, Recording

__all__ = ["Values", "argument_codes", "normalised"]


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


# Arguments of calls, in one form where two spellings mean the same: ``split(32, 2)`` and ``split(32, -1)``.
#
# The recorder names arguments by the operator's schema and leaves out those that have its defaults. What is left
# depends on the tensor: a dimension counted from the end, the order of dimensions that are summed over, the sizes of a
# view.

_ALWAYS: Final = ("cpu", "meta")
_MAX_DEPTH: Final = 100
"""Levels of the arguments of a call: those of a program have three."""
# Also one that nothing closes: to look for its end from each quotation mark anew would take hours.
_JSON_TEXT: Final = re.compile(r'"((?:[^"\\]|\\.)*+)"?', re.DOTALL)

_DIMENSIONS: Final = frozenset({"dim", "dims", "dim0", "dim1", "dim2", "start_dim", "end_dim", "axis"})
# Operators whose result has one dimension more, from the end of which they count.
_ONE_MORE: Final = frozenset({"unsqueeze", "unsqueeze_copy", "stack", "_stack"})
# Operators for which a list of dimensions is a set.
_UNORDERED: Final = frozenset({
    "sum", "nansum", "mean", "amax", "amin", "any", "all", "logsumexp", "norm", "linalg_vector_norm", "var", "std",
    "var_mean", "std_mean", "count_nonzero", "flip", "squeeze", "squeeze_copy",
})  # fmt: skip
# Operators for which no dimensions are all.
_ALL_BY_NONE: Final = _UNORDERED - {"flip", "squeeze", "squeeze_copy"}
_IN_DIMENSION: Final = frozenset({"select", "select_copy", "slice", "slice_copy"})
_SYMMETRIC: Final = frozenset({"transpose", "transpose_copy", "swapaxes", "swapdims"})
# Operators whose sizes are those of the result, which is compared by itself; -1 stands for one of them.
_SIZED_BY_RESULT: Final = frozenset({"view", "_unsafe_view", "reshape", "expand", "view_copy", "expand_copy"})
# Arguments that decide where a result lies or its dtype, which are compared by themselves.
_WITHOUT_VALUES: Final = frozenset({"device", "dtype", "pin_memory", "non_blocking"})
_AS_NONE: Final = frozenset({"torch.strided", "torch.preserve_format"})


def argument_codes(recording: Recording) -> npt.NDArray[np.int64]:
    """A number for the arguments of each call, equal in both recordings of one process where they mean the same.

    Returns:
        (n_calls,). Salted anew in each process: no such number may be written to a file.
    """
    texts = _without_devices(recording)
    parsed = [_Arguments.parse(c.op, text) for c, text in zip(recording.contexts, texts, strict=True)]
    contexts = recording.calls["context"]
    # Python's hash of a text differs from process to process: such codes are compared here and never stored.
    codes = np.array([hash(a.form(None)) for a in parsed], np.int64)[contexts] if parsed else np.zeros(0, np.int64)
    of_shape = np.array([a.depend_on_shape for a in parsed], bool)
    calls = np.flatnonzero(of_shape[contexts]) if parsed else np.zeros(0, np.int64)
    if len(calls):
        # The last one stands for NONE.
        shapes = [*(form.shape for form in recording.forms), None]
        pairs = np.stack([contexts[calls], _first_forms(recording)[calls]], axis=1)
        # Each pair of context and form is read once: a recording has far more calls than such pairs.
        kinds, number = np.unique(pairs, axis=0, return_inverse=True)
        of_kind = [hash(parsed[context].form(shapes[form])) for context, form in kinds.tolist()]
        codes[calls] = np.array(of_kind, np.int64)[number.reshape(-1)]
    return codes


def normalised(op: str, arguments: str, shape: tuple[int, ...] | None) -> Hashable:
    """Arguments in the form in which they are compared.

    Args:
        op: The operator.
        arguments: Of a context.
        shape: Of the first tensor that the call reads; None without one.
    """
    return _Arguments.parse(op, arguments).form(shape)


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Arguments of one context.

    Attributes:
        op: Base name of the operator.
        named: By name; None of what is no such JSON.
        text: As recorded.
    """

    op: str
    named: dict[str, Any] | None
    text: str

    @classmethod
    def parse(cls, op: str, text: str) -> _Arguments:
        try:
            named = json.loads(text)
            _frozen(named)
        except (ValueError, RecursionError):
            named = None
        return cls(base_name(op), named if type(named) is dict else None, text)

    @property
    def depend_on_shape(self) -> bool:
        """Whether their form depends on the tensor."""
        return self.named is not None and (self.op in _IN_DIMENSION or not _DIMENSIONS.isdisjoint(self.named))

    def form(self, shape: tuple[int, ...] | None) -> Hashable:
        """The arguments in one form; without a shape nothing is counted from the end."""
        if self.named is None:
            return self.text
        found = {n: _frozen(v) if shape is None else self._value(n, v, len(shape)) for n, v in self.named.items()}
        if shape is not None and self.op in _IN_DIMENSION:
            found = _within_dimension(found, shape)
        if self.op in _SYMMETRIC and {"dim0", "dim1"} <= found.keys():
            # By their texts: one of the two may be a number and the other a name, which have no order.
            found |= zip(("dim0", "dim1"), sorted((found["dim0"], found["dim1"]), key=repr), strict=True)
        left_out = _WITHOUT_VALUES | ({"size"} if self.op in _SIZED_BY_RESULT else frozenset())
        # As a set: two versions of torch name the arguments of one operator in another order.
        return frozenset((n, v) for n, v in found.items() if n not in left_out and v is not None and v not in _AS_NONE)

    def _value(self, name: str, value: Any, n_dimensions: int) -> Hashable:
        if name not in _DIMENSIONS:
            return _frozen(value)
        n = n_dimensions + (self.op in _ONE_MORE)
        if type(value) is int:
            # Out of range stays as it is: the file may say anything, and a remainder would make it valid.
            return value % n if n and -n <= value < n else value
        if type(value) is list and all(type(d) is int and -n <= d < n for d in value):
            wrapped = [d % n for d in value]
            if self.op in _ALL_BY_NONE and (not wrapped or len(wrapped) == n):
                return None
            return tuple(sorted(wrapped) if self.op in _UNORDERED else wrapped)
        return _frozen(value)


def _within_dimension(found: dict[str, Hashable], shape: tuple[int, ...]) -> dict[str, Hashable]:
    """`index`, `start` and `end` counted from the start of the dimension that they are in, and within it."""
    dim = found.get("dim", 0)
    if type(dim) is not int or not 0 <= dim < len(shape):
        return found
    size = shape[dim]
    there = {}
    for name, least, most in (("index", 0, size - 1), ("start", 0, size), ("end", 0, size)):
        value = found.get(name, size if name == "end" else 0)
        if type(value) is not int:
            return found
        there[name] = min(max(value + size if value < 0 else value, least), most)
    return found | {"dim": dim} | there


def _frozen(value: Any, levels: int = _MAX_DEPTH) -> Hashable:
    """A value of JSON that can be compared: 1 and 1.0 are equal, zeros of both signs are not.

    Raises:
        ValueError: It has more levels.
    """
    if isinstance(value, (list, dict)) and not levels:
        raise ValueError(f"more than {_MAX_DEPTH} levels")
    if isinstance(value, list):
        return tuple([_frozen(v, levels - 1) for v in value])
    if isinstance(value, dict):
        return frozenset([(name, _frozen(v, levels - 1)) for name, v in value.items()])
    return repr(value) if isinstance(value, float) and not value else value


def _first_forms(recording: Recording) -> npt.NDArray[np.int64]:
    """Form of the first tensor that each call reads; NONE where it reads none: (n_calls,)."""
    has = recording.calls["n_inputs"] > 0
    found = np.full(len(recording.calls), NONE, np.int64)
    rows = recording.inputs[recording.first_input[:-1][has]]
    known = rows != NONE
    found[np.flatnonzero(has)[known]] = recording.results["form"][rows[known]]
    return found


def _without_devices(recording: Recording) -> tuple[str, ...]:
    """Arguments of all contexts, in which each device is called the same: two platforms have two devices."""
    devices = {*_ALWAYS, *(c.device for c in recording.contexts if c.device)}

    def called_the_same(text: re.Match[str]) -> str:
        name, colon, index = text[1].partition(":")
        # Only a device that the recording itself names: a mode called "cuda" in another argument would be no device.
        return '"device"' if name in devices and (not colon or index.isdecimal()) else text[0]

    # Names are looked up, not listed in a pattern, which would try each of them at each quotation mark.
    return tuple(_JSON_TEXT.sub(called_the_same, c.arguments) for c in recording.contexts)
