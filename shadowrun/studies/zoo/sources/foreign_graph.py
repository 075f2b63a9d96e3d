"""Graphs that other tools wrote, as programs: rows of `compiled.graph_text`, which refuses what no file may call.

A reader translates its format into rows, with `Rows`; `captured` makes a graph of them as any other program's: the
operators that reach the kernels, on generated values.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.compiled.graph_text import DenseInterpreter, from_text
from shadowrun.errors import UsageError
from shadowrun.limits import bounded_memory
from shadowrun.store import plain_json
from shadowrun.studies.zoo import input_values
from shadowrun.studies.zoo.capture import Named, Recorder, tensors_in
from shadowrun.studies.zoo.graph import MAX_DIMS
from shadowrun.studies.zoo.sources.source import LeftOut

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shadowrun.studies.zoo.graph import Graph, Input

__all__ = ["MAX_ELEMENTS", "Rows", "captured", "plain"]

MAX_ELEMENTS: Final = 1 << 26
"""Of all inputs of a graph."""
MAX_VALUES: Final = 1_000_000
"""Of the arguments of all calls, numbers in lists among them."""
_NOWHERE: Final = ("", "")


class Rows:
    """The rows of a graph while it is translated; encoded values are those of `graph_text`."""

    def __init__(self) -> None:
        self._rows: list[list[Any]] = []
        self._has_output = False
        self._n_values = 0

    def placeholder(self) -> Any:
        """An input."""
        return self._add("placeholder", "", (), {})

    def call(self, target: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
        """A call of a function: ``torch.ops.aten.add.Tensor``, ``operator.getitem``."""
        return self._add("call_function", target, args, kwargs or {})

    def method(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
        """A call of a method of the first argument."""
        return self._add("call_method", name, args, kwargs or {})

    def output(self, value: Any) -> None:
        """The result."""
        if self._has_output:
            raise LeftOut("it returns twice")
        self._has_output = True
        self._add("output", "", (value,), {})

    def text(self) -> str:
        """For `graph_text.from_text`."""
        if not self._has_output:
            raise LeftOut("it returns nothing")
        return json.dumps(self._rows)

    def _add(self, op: str, target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._n_values += _number_of([args, list(kwargs.values())], MAX_VALUES - self._n_values)
        # Names of the file are of no use, and may be anything.
        name = f"v{len(self._rows)}"
        given = {"tuple": list(args)}
        self._rows.append([op, name, target, given, {"dict": [[k, v] for k, v in kwargs.items()]}, _NOWHERE])
        return {"node": name}


def _number_of(value: Any, most: int) -> int:
    """How many values lists of lists have, which may hold one list twice: then there are twice as many in the text.

    Raises:
        LeftOut: There are more than that.
    """
    n, waiting = 0, [value]
    while waiting:
        inner = waiting.pop()
        n += 1
        if n > most:
            raise LeftOut(f"its calls have more than {MAX_VALUES:,} arguments")
        if isinstance(inner, dict):
            waiting += inner.values()
        elif isinstance(inner, (list, tuple)):
            waiting += inner
    return n


def plain(value: Any) -> Any:
    """A number, text, dtype, layout or device, encoded.

    Raises:
        NotStorable: It is none.
    """
    return plain_json.encode(value)


def captured(rows: Rows, inputs: Sequence[Input]) -> Graph:
    """The graph of rows, run once on generated values.

    Args:
        rows: They begin with a placeholder for each input.
        inputs: What the placeholders are.

    Raises:
        LeftOut: Its inputs are too large, or it calls what no file may call.
        ValueError: It is no graph.
        NotCapturable: It calls what no program can hold.
    """
    # Not by torch, which lets a product of 64 bits wrap around.
    n = sum(math.prod(i.shape) if len(i.shape) <= MAX_DIMS else MAX_ELEMENTS + 1 for i in inputs)
    if n > MAX_ELEMENTS:
        raise LeftOut(f"its inputs have {n:,} elements, more than {MAX_ELEMENTS:,}")
    try:
        module = from_text(rows.text())
    except UsageError as error:  # worded for a script
        raise LeftOut(str(error).removeprefix("No script is written: ")) from error
    with bounded_memory(), torch.no_grad():
        tensors = input_values.make_inputs(inputs)
        named = [Named(i.name, t, i.role, i.fill) for i, t in zip(inputs, tensors, strict=True)]
        recorder = Recorder(named)
        with recorder:
            out = DenseInterpreter(module).run(*tensors, enable_io_processing=False)
        return recorder.graph(tensors_in(out))
