"""Lists of calls as programs of one operator: BackendBench's text traces, and the calls of a recorded run.

A trace has lines such as ``Operator: aten.add.Tensor`` and ``cnt: 2, ((T([8, 16], f16), 1), {})``, or one line
``aten.add.Tensor, 2, ((T([8, 16], f16), 1), {})`` for each call. The text may come from anyone: it is parsed as data,
and only operators that a file may name are called.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.errors import DataFileError
from shadowrun.intercept.untrusted.op_allowlist import operator_named
from shadowrun.studies.sweep.recorded_calls import read_calls, sample
from shadowrun.studies.zoo.capture import capture
from shadowrun.studies.zoo.graph import DEVICE, Fill, Graph, Input, Node, Ref
from shadowrun.studies.zoo.sources.isolated_readers import Candidate, read_each
from shadowrun.studies.zoo.sources.source import Collected, LeftOut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["RUN", "TRACES", "collect_run", "collect_traces", "graph_of_recorded", "graph_of_trace"]

TRACES: Final = "traces"
RUN: Final = "run"
# A trace may come from anyone, with any number of lines, or one that does not end.
_MAX_BYTES: Final = 1 << 28
_MAX_LINE: Final = 1 << 16
# Characters of a call: one more than may be, so that a longer one is still seen to be too long.
_KEPT: Final = _MAX_LINE + 1
_OPERATOR: Final = re.compile(r"Operator: ([\w.:]+)", re.ASCII)
_COUNTED: Final = re.compile(r"cnt: (\d{1,9}), (.*)", re.DOTALL)
_ONE_LINE: Final = re.compile(r"([\w.:]+),\s*(\d{1,9}),\s*(\(.*)", re.DOTALL | re.ASCII)
_DTYPES: Final = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
    "b8": torch.bool,
    "c32": torch.complex32,
    "c64": torch.complex64,
    "c128": torch.complex128,
}
_CONSTANTS: Final = {"inf": float("inf"), "nan": float("nan"), "device": DEVICE}


def collect_traces(
    path: Path, wanted: Callable[[str], bool], on_progress: Callable[..., None], *, isolated: bool = False
) -> Collected:
    """Programs of the calls in a text trace.

    Args:
        path: The file.
        wanted: Whether an operator such as ``aten::add.Tensor`` is.
        on_progress: Called with done, total and name.
        isolated: Read and run each in a worker process with limits.

    Raises:
        DataFileError: The file cannot be read.
    """
    found = Collected(TRACES)
    calls = [
        Candidate(f"{name} {text}"[:160], (name, text), count) for name, count, text in _calls(path) if wanted(name)
    ]
    read_each(found, graph_of_trace, calls, on_progress, isolated=isolated)
    return found


def _calls(path: Path) -> Iterator[tuple[str, int, str]]:
    try:
        if path.exists() and not path.is_file():  # a pipe would block, a device has no end
            raise DataFileError(f"{str(path)!r} is no regular file.", slug="zoo-source-file")
        if path.stat().st_size > _MAX_BYTES:
            raise DataFileError(f"{str(path)!r} has more than 256 MiB.", slug="zoo-source-file")
        with path.open(encoding="utf-8", errors="replace") as lines:
            operator = ""
            for line in lines:
                if (match := _OPERATOR.match(line)) is not None:
                    operator = _named(match[1])
                elif (match := _COUNTED.match(line)) is not None and operator:
                    yield operator, int(match[1]), match[2][:_KEPT]
                elif (match := _ONE_LINE.match(line)) is not None:
                    yield _named(match[1]), int(match[2]), match[3][:_KEPT]
    except OSError as error:
        raise DataFileError(f"{str(path)!r} cannot be read ({error.strerror}).", slug="zoo-source-file") from error


def _named(text: str) -> str:
    """``aten::add.Tensor`` of ``aten.add.Tensor``."""
    if "::" in text:
        return text.removesuffix(".default")
    space, _, rest = text.partition(".")
    return f"{space}::{rest.removesuffix('.default')}"


def graph_of_trace(given: tuple[str, str]) -> Graph:
    """The graph of an operator and the text of its arguments.

    Raises:
        LeftOut: The text is none of a trace.
    """
    name, text = given
    # Before it is parsed, which takes time and memory in proportion.
    if len(text) > _MAX_LINE:
        raise LeftOut("its arguments are too long")
    operator = operator_named(name)
    reader = _Reader()
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise LeftOut(f"its arguments are no such text: {error}") from None
    if not isinstance(tree, ast.Tuple) or len(tree.elts) != 2 or not isinstance(tree.elts[1], ast.Dict):
        raise LeftOut("its arguments are not a pair of tuple and dictionary")
    args = reader.value(tree.elts[0])
    keys = [reader.value(k) for k in tree.elts[1].keys]
    kwargs = dict(zip(keys, map(reader.value, tree.elts[1].values), strict=True))
    if not isinstance(args, tuple):
        raise LeftOut("its arguments are no tuple")
    # What no file may give is refused by `checked`, which reads the graph as from a file.
    node = Node(operator, args, tuple(kwargs.items()))
    return Graph(tuple(reader.inputs), (node,), (Ref(0),))


class _Reader:
    """Reads the arguments of a call from their syntax tree."""

    def __init__(self) -> None:
        self.inputs: list[Input] = []

    def value(self, node: ast.AST | None) -> Any:
        """A plain value, a reference to a new input, or a tuple of these.

        Raises:
            LeftOut: It is none.
        """
        match node:
            case ast.Constant(value=value) if value is None or type(value) in (bool, int, float, str, complex):
                # A trace names the device that it was made on; the graph runs on any.
                return DEVICE if value in ("cpu", "cuda") else value
            # `-1` is no constant to Python's parser.
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value(operand)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return tuple(self.value(e) for e in elements)
            case ast.Name(id=name) if name in _CONSTANTS:
                return _CONSTANTS[name]
            case ast.Name(id=name) if name in _DTYPES:
                return _DTYPES[name]
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                found = vars(torch).get(name)
                if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
                    return found
            case ast.Call(func=ast.Name(id="T"), args=arguments, keywords=[]):
                return self._tensor(arguments)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="device")):
                return DEVICE
        raise LeftOut(f"{ast.unparse(node)[:60] if node is not None else 'it'} is no argument of a trace")

    def _tensor(self, arguments: list[ast.expr]) -> Ref:
        given = [self.value(a) for a in arguments]
        if not 2 <= len(given) <= 3 or not isinstance(given[0], tuple) or not isinstance(given[1], torch.dtype):
            raise LeftOut("a tensor without sizes and dtype")
        shape, dtype, *strides = given
        floats = dtype.is_floating_point or dtype.is_complex
        # Of indices nothing is known: 0 and 1 are valid in all but the smallest.
        fill = Fill() if floats else Fill("bools", 0.5) if dtype is torch.bool else Fill("integers", 0, 1)
        steps = strides[0] if strides else ()
        self.inputs.append(Input(f"x.{len(self.inputs)}", shape, dtype, fill, steps, 0, floats))
        return Ref(-len(self.inputs))


def collect_run(
    path: Path, wanted: Callable[[str], bool], on_progress: Callable[..., None], *, isolated: bool = False
) -> Collected:
    """Programs of the distinct calls that a run recorded, in a ``.shadowrun`` file.

    The file has shapes and dtypes, no values: these are newly drawn.

    Raises:
        DataFileError: Missing, or no data file.
    """
    found = Collected(RUN)
    calls = [
        Candidate(f"{name} {text}"[:160], (name, text))
        for (name, _), texts in read_calls(path).items()
        if wanted(name)
        for text in texts
    ]
    read_each(found, graph_of_recorded, calls, on_progress, isolated=isolated)
    return found


def graph_of_recorded(given: tuple[str, str]) -> Graph:
    """The graph of an operator and the text of its recorded inputs.

    Raises:
        UnreadableCall: They cannot be made.
    """
    name, text = given
    made = sample(name, text, 0)
    with torch.no_grad():
        return capture(operator_named(name), *made.args, **(made.kwargs or {}))
