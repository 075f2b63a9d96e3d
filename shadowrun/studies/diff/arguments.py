"""Arguments of calls, in one form where two spellings mean the same: ``split(32, 2)`` and ``split(32, -1)``.

The recorder names arguments by the operator's schema and leaves out those that have its defaults. What is left depends
on the tensor: a dimension counted from the end, the order of dimensions that are summed over, the sizes of a view.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shadowrun.operators.facts import base_name
from shadowrun.recording.model import NONE

if TYPE_CHECKING:
    from collections.abc import Hashable

    import numpy.typing as npt

    from shadowrun.recording.model import Recording

__all__ = ["argument_codes", "normalised"]

_ALWAYS: Final = ("cpu", "meta")
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
    parsed = [_Arguments.of(c.op, text) for c, text in zip(recording.contexts, texts, strict=True)]
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
    return _Arguments.of(op, arguments).form(shape)


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
    def of(cls, op: str, text: str) -> _Arguments:
        try:
            named = json.loads(text)
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


def _frozen(value: Any) -> Hashable:
    """A value of JSON that can be compared: 1 and 1.0 are equal, zeros of both signs are not."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return frozenset((name, _frozen(v)) for name, v in value.items())
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
