"""Cases from a data file: the operator calls of a program, rebuilt from their recorded text.

A data file has shapes and dtypes of inputs, not their values. Floats are newly sampled; integers are so small that they
are valid indices into every tensor of the call. The file may be untrusted: its text is parsed here, never evaluated,
and only operators of the allowlist are called.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import math
import re
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.errors import brief
from shadowrun.intercept.untrusted.checked_calls import check_call
from shadowrun.intercept.untrusted.op_allowlist import Refused, operator_named
from shadowrun.numerics.form import dtype_name
from shadowrun.operators.vendor_ops import COUNTERPARTS
from shadowrun.store.datafile import DataFile
from shadowrun.store.records import distinct_calls
from shadowrun.studies.sweep.inputs import Sample, leaves
from shadowrun.studies.sweep.opinfo import seeded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["MAX_BYTES", "UnreadableCall", "function", "read_calls", "sample"]

# Each pattern takes time in proportion to the text, which an untrusted file may make a megabyte long.
_SHAPE = re.compile(r"\[([\d, ]*)\]")
_TENSOR = re.compile(r"([a-z]\w*)\[([\d, ]*)\]")
_MORE = re.compile(r"… (\d+) more")
_KEYWORD = re.compile(r"([a-z_]\w*)=")
_WORD = re.compile(r"[^,\]]+")
MAX_BYTES = 2 << 30
"""Maximum size of the inputs of one call, in bytes: a short text can name a tensor of any size."""
_MAX_UNWRITTEN = 100_000
# An integer of a million digits takes Python minutes to read.
_MAX_DIGITS = 100
_MAX_DIMENSIONS = 1000
_MAX_SIZE_DIGITS = 19
_WORDS = {"None": None, "True": True, "False": False, "inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


class UnreadableCall(ValueError):  # noqa: N818 - a reason, caught inside
    """A recorded call that cannot be rebuilt; the message is the reason."""


def read_calls(path: Path) -> dict[tuple[str, str], list[str]]:
    """Inputs of all different calls in a data file, by operator and dtype of the first tensor.

    Raises:
        DataFileError: Missing, or no data file.
    """
    data = DataFile.open(path)
    texts: dict[tuple[str, str], dict[str, None]] = {}  # not lists: a file may have a million inputs of one operator
    for op, inputs, dtypes in distinct_calls(data):
        short = dtypes.partition(",")[0]
        dtype = _dtypes().get(short)
        texts.setdefault((op, str(dtype).removeprefix("torch.") if dtype else short or "any"), {})[inputs] = None
    return {key: list(calls) for key, calls in texts.items()}


def function(name: str) -> Callable[..., Any]:
    """The operator ``aten::add.Tensor``, with an unused first argument, which stands for `Sample.input`.

    Its attribute ``operator`` is the operator itself.

    Raises:
        UnreadableCall: This torch has no such operator, or the operator does more than compute tensors.
    """
    operator = _operator(name)

    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    call.operator = operator  # type: ignore[attr-defined]
    return call


def _operator(name: str) -> torch._ops.OpOverload:
    try:
        return operator_named(name)
    except AttributeError:
        raise UnreadableCall(f"this process has no operator {name}") from None
    except Refused as why:
        raise UnreadableCall(str(why)) from None


def sample(name: str, text: str, seed: int, shapes: str = "") -> Sample:
    """Inputs of a recorded call, with newly sampled values.

    Args:
        name: Operator.
        text: Recorded inputs, ``f32[8, 16], [0, 1], keepdim=True``.
        seed: Seed of the values.
        shapes: Recorded shapes of all its tensors, ``[8, 16] [16]``. The text shortens long lists; the missing tensors
            get these shapes and the dtype of the last tensor before them.

    Raises:
        UnreadableCall: The text is incomplete, has a value without a literal, or asks for a forbidden operation.
    """
    operator = _operator(name)
    # Seeded per call, so that a script can rebuild one call without the others.
    seeded(f"{seed} {name} {text}")
    try:
        args, kwargs = _Reader(text, shapes).arguments()
        # An index must be smaller than the smallest dimension of any tensor of the call.
        sizes = [n for t in leaves([args, kwargs]) for n in t.shape if n]
        for t in leaves([args, kwargs]):
            # At most 1: an index that fits into one dimension fits into every other one, and 0 and 1 are booleans
            # too.
            _fill(t, min([2, *sizes]))
        # After that: some values are places in memory, and it is those of the call that must lie inside.
        check_call(operator, args, kwargs, stand_in=COUNTERPARTS.get(name))
    except UnreadableCall:
        raise
    # The text may name any shape, dtype and number.
    except (ValueError, TypeError, RuntimeError, MemoryError, OverflowError) as why:
        raise UnreadableCall(f"its inputs cannot be made: {why}") from None
    return Sample(None, tuple(args), kwargs)


class _Reader:
    """Parser of the text of recorded inputs: one pass, from left to right."""

    def __init__(self, text: str, shapes: str) -> None:
        self._text = text
        self._at = 0
        self._shapes = [_shape(match[1]) for match in _SHAPE.finditer(shapes)]
        self._n_tensors = 0
        self._n_bytes = 0
        self._n_unwritten = 0

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        while self._at < len(self._text):
            keyword = _KEYWORD.match(self._text, self._at)
            if keyword is not None:
                self._at = keyword.end()
                kwargs[keyword[1]] = self._value()
            else:
                args.append(self._value())
            self._skip_comma()
        return args, kwargs

    def _value(self) -> Any:
        text = self._text
        if text.startswith("[", self._at):
            return self._list()
        if text.startswith(("'", '"'), self._at):
            return self._string()
        tensor = _TENSOR.match(text, self._at)
        if tensor is not None and tensor[1] in _dtypes():
            self._at = tensor.end()
            self._n_tensors += 1
            return self._tensor(_shape(tensor[2]), _dtypes()[tensor[1]])
        word = _WORD.match(text, self._at)
        if word is None:
            raise UnreadableCall(f"{brief(text[self._at :])} cannot be read")
        self._at = word.end()
        return _of_word(word[0].strip())

    def _tensor(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        self._n_bytes += math.prod(shape) * dtype.itemsize
        if self._n_bytes > MAX_BYTES:
            raise UnreadableCall("its inputs are larger than 2 GiB")
        return torch.empty(shape, dtype=dtype)

    def _list(self) -> list[Any]:
        self._at += 1
        entries: list[Any] = []
        while not self._text.startswith("]", self._at):
            if self._at >= len(self._text):
                raise UnreadableCall("its inputs were recorded in part")
            more = _MORE.match(self._text, self._at)
            if more is None:
                entries.append(self._value())
                self._skip_comma()
            else:
                self._at = more.end()
                entries += self._unwritten(int(more[1]), entries)
        self._at += 1
        return entries

    def _unwritten(self, n: int, before: list[Any]) -> list[Any]:
        last = before[-1] if before else None
        self._n_unwritten += n  # of the whole text, which can name a list every few characters
        if self._n_unwritten > _MAX_UNWRITTEN:
            raise UnreadableCall(f"lists with {self._n_unwritten} more entries")
        if isinstance(last, list):  # ten in ten in ten: each level would multiply what the text names
            raise UnreadableCall("lists in a list were recorded in part")
        if not isinstance(last, torch.Tensor):
            # Lists are of one kind: what was not written is most likely like the entry before it.
            return [last] * n
        shapes = self._shapes[self._n_tensors : self._n_tensors + n]
        if len(shapes) < n:
            raise UnreadableCall("its inputs were recorded in part")
        self._n_tensors += n
        return [self._tensor(shape, last.dtype) for shape in shapes]

    def _string(self) -> str:
        end = self._text.find(self._text[self._at], self._at + 1)
        if end < 0:
            raise UnreadableCall("its inputs were recorded in part")
        word, self._at = self._text[self._at : end + 1], end + 1
        try:
            return str(ast.literal_eval(word))
        except (ValueError, SyntaxError):
            raise UnreadableCall("its inputs were recorded in part") from None

    def _skip_comma(self) -> None:
        if self._text.startswith(", ", self._at):
            self._at += 2


def _shape(text: str) -> list[int]:
    sizes = [n.strip() for n in text.split(",") if n.strip()]
    # The product of thousands of numbers of thousands of digits takes minutes.
    if len(sizes) > _MAX_DIMENSIONS or any(len(n) > _MAX_SIZE_DIGITS for n in sizes):
        raise UnreadableCall("no tensor has such a shape")
    return [int(n) for n in sizes]


def _of_word(word: str) -> Any:
    if word in _WORDS:
        return _WORDS[word]
    if word.startswith("torch."):
        constant = vars(torch).get(word.removeprefix("torch."))  # `getattr` would import modules
        if isinstance(constant, (torch.dtype, torch.layout, torch.memory_format)):
            return constant
        raise UnreadableCall(f"{brief(word)} is no constant")
    with contextlib.suppress(ValueError, SyntaxError):
        # The limit is for an integer of a million digits, which takes Python minutes to read.
        number = ast.literal_eval(word) if len(word) <= _MAX_DIGITS else None
        if isinstance(number, (bool, int, float, complex)):
            return number
    try:
        torch.device(word)
    except RuntimeError:
        raise UnreadableCall(f"{brief(word)} was recorded without its value") from None
    return torch.device("cpu")  # `copied` replaces it by the device of the inputs


@functools.cache
def _dtypes() -> dict[str, torch.dtype]:
    return {dtype_name(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


def _fill(t: torch.Tensor, n: int) -> None:
    if t.is_floating_point() or t.is_complex():
        # Drawn in float32: `randn` has no kernel for float8.
        t.copy_(torch.randn(t.shape, dtype=t.dtype if t.is_complex() else torch.float32))
    elif t.dtype is torch.bool:
        t.copy_(torch.rand(t.shape) < 0.5)
    else:
        t.copy_(torch.randint(0, n, t.shape))
