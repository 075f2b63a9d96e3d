"""A program as a graph of operator calls: data that can be changed, hashed, stored as JSON, and run on any device.

A `Graph` is a list of `Node` in the order of execution. Arguments hold plain values and references (`Ref`) to results
of earlier nodes or to inputs. An input is described, not stored: its values come from `values.make`, by name.

Example:
    >>> x = Input("x", (2, 3)); relu = torch.ops.aten.relu.default
    >>> graph = Graph((x,), (Node(relu, (Ref(-1),)),), (Ref(0),))
    >>> Runner(graph)([torch.ones(2, 3)])[0].shape
    torch.Size([2, 3])
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch

from shadowrun.errors import brief
from shadowrun.intercept.untrusted.checked_calls import check_inside
from shadowrun.intercept.untrusted.op_allowlist import Refused, check_arguments, operator_named
from shadowrun.store import plain_json
from shadowrun.strided import span
from shadowrun.studies.zoo.input_values import KINDS
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Call = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]

__all__ = [
    "DEVICE",
    "Device",
    "Fill",
    "Graph",
    "Input",
    "Node",
    "Ref",
    "Runner",
    "check_call",
    "check_dense",
    "from_json",
    "mapped",
    "refs_in",
    "to_json",
]

# A graph may come from a file of someone else: everything of it that is followed has a bound.
MAX_NODES: Final = 20_000
MAX_DIMS: Final = 64
MAX_ELEMENTS: Final = 1 << 28
"""Of one input, where a file describes it: 2 GiB of float64."""


class Device(enum.Enum):
    """Stands for the device of the run, where an operator takes one."""

    RUN = "run"


DEVICE: Final = Device.RUN


class Ref(NamedTuple):
    """A result of a node, or an input.

    Attributes:
        node: Number of the node; an input has the number ``-1 - k``.
        output: Number of the result, where the node returns several or a list.
    """

    node: int
    output: int = 0


class Fill(NamedTuple):
    """Which values an input gets: a kind, and its two parameters.

    Attributes:
        kind: ``normal`` (mean, standard deviation), ``uniform`` (low, high), ``integers`` (low, high; both included),
            ``constant`` (value), ``arange`` (start, step), ``choice`` (a, b), ``bools`` (share of True),
            ``permutation`` (of 0 to n - 1 along the last dimension), ``triangle`` (a up to the diagonal that ends in
            the last corner, b above it: a causal mask), or a kind of exceptional values; see `values`.
        a: First parameter.
        b: Second parameter.
    """

    kind: str = "normal"
    a: float = 0.0
    b: float = 1.0


_NORMAL: Final = Fill()


@dataclass(frozen=True, slots=True)
class Input:
    """An input of a graph.

    Attributes:
        name: Key of its values; two inputs of one name, fill, dtype and shape are equal on all machines.
        shape: Sizes.
        dtype: Dtype.
        fill: Values.
        strides: In elements; empty for contiguous.
        offset: Elements in front of it in its storage.
        requires_grad: Whether a backward pass computes its gradient.
        role: ``input``, ``parameter`` or ``buffer``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    fill: Fill = _NORMAL
    strides: tuple[int, ...] = ()
    offset: int = 0
    requires_grad: bool = False
    role: str = "input"


@dataclass(frozen=True, slots=True)
class Node:
    """One operator call.

    Attributes:
        op: The operator.
        args: Positional arguments: plain values, `Ref`, `DEVICE`, and tuples of these.
        kwargs: Those by name, in the order of the schema.
        module: Path of the module that called it; no part of the identity.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    module: str = ""

    @property
    def name(self) -> str:
        """``aten::add.Tensor``."""
        return cast("str", self.op.name())  # type: ignore[no-untyped-call]

    def refs(self) -> Iterator[Ref]:
        """References among its arguments, in order."""
        yield from refs_in(self.args)
        for _, value in self.kwargs:
            yield from refs_in(value)

    def mapped(self, change: Callable[[Ref], Any]) -> Node:
        """The node with each reference replaced."""
        kwargs = tuple((k, mapped(v, change)) for k, v in self.kwargs)
        return replace(self, args=mapped(self.args, change), kwargs=kwargs)


@dataclass(frozen=True, slots=True)
class Graph:
    """A program.

    Attributes:
        inputs: Its inputs.
        nodes: Its calls, in order.
        outputs: Its results.
    """

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Ref, ...]

    @property
    def writes(self) -> bool:
        """Whether a call writes to its arguments: the order of calls then matters."""
        return any(_writes(node.op) for node in self.nodes)

    def without_dead_code(self) -> Graph:
        """The graph without calls that no result needs, and without inputs that no call needs."""
        needed = {r.node for r in self.outputs}
        # One pass from the end: each call stands after those that it needs.
        for at in range(len(self.nodes) - 1, -1, -1):
            # What is written to may be read later under another name: such calls stay.
            if at in needed or _writes(self.nodes[at].op):
                needed.add(at)
                needed.update(r.node for r in self.nodes[at].refs())
        return self._kept(sorted(n for n in needed if n >= 0), [k for k in range(len(self.inputs)) if -1 - k in needed])

    def identity(self) -> str:
        """Hash of operators, attributes, shapes, dtypes, layouts and fills: 32 hexadecimal digits.

        Names, modules, and the order of independent calls do not count, nor do calls that no result needs.
        """
        graph = self.without_dead_code()
        # With writes, the order of calls is part of what the graph computes.
        if not graph.writes:
            nodes, inputs = graph._in_depth_first_order()
            graph = graph._kept(nodes, inputs)
        text = json.dumps([_canonical(graph)], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _in_depth_first_order(self) -> tuple[list[int], list[int]]:
        """Nodes and inputs in the order in which the results reach them."""
        nodes: list[int] = []
        inputs: list[int] = []
        done: set[int] = set()
        # A stack of our own: graphs of models are deeper than Python's recursion limit.
        stack = [(r.node, False) for r in reversed(self.outputs)]
        while stack:
            at, is_left = stack.pop()
            if is_left:
                nodes.append(at)
            elif at not in done:
                done.add(at)
                if at < 0:
                    inputs.append(-1 - at)
                else:
                    stack.append((at, True))
                    stack += [(r.node, False) for r in reversed(list(self.nodes[at].refs()))]
        return nodes, inputs

    def _kept(self, nodes: Sequence[int], inputs: Sequence[int]) -> Graph:
        """The graph of these nodes and inputs only, in this order."""
        numbers = {at: n for n, at in enumerate(nodes)} | {-1 - k: -1 - n for n, k in enumerate(inputs)}

        def renumbered(ref: Ref) -> Ref:
            return Ref(numbers[ref.node], ref.output)

        return Graph(
            tuple(self.inputs[k] for k in inputs),
            tuple(self.nodes[at].mapped(renumbered) for at in nodes),
            tuple(renumbered(r) for r in self.outputs),
        )


class Runner:
    """Runs a graph; what is looked up in it is looked up once.

    Args:
        graph: The graph.
        device: Device of what it makes without inputs.
        call: Calls an operator with positional and named arguments; None for the usual way.
        checked: Look at each call as at one of a file. Not where the graph is compiled: it ran before.
    """

    def __init__(
        self, graph: Graph, device: torch.device | str = "cpu", call: Call | None = None, *, checked: bool = True
    ) -> None:
        self._graph = graph
        self._checked = checked
        self._call = call or _called
        self._device = torch.device(device)
        last: dict[int, int] = {}
        for at, node in enumerate(graph.nodes):
            last.update((r.node, at) for r in node.refs())
        kept = {r.node for r in graph.outputs}
        # A result is freed after its last use: a captured model would hold all activations at once.
        self._free: list[tuple[int, ...]] = [() for _ in graph.nodes]
        for number, at in last.items():
            if number >= 0 and number not in kept:
                self._free[at] += (number,)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[Any]:
        """Run it on its inputs, which operators may write to; returns the results.

        Raises:
            Refused: A call has arguments that no file may give, or returns what is no dense tensor.
        """
        values: list[Any] = [None] * len(self._graph.nodes)

        def value(ref: Any) -> Any:
            if type(ref) is Ref:
                if ref.node < 0:
                    return inputs[-1 - ref.node]
                v = values[ref.node]
                return v[ref.output] if isinstance(v, (tuple, list)) else v
            if type(ref) is tuple:
                return [value(r) for r in ref]
            return self._device if ref is DEVICE else ref

        for at, (node, free) in enumerate(zip(self._graph.nodes, self._free, strict=True)):
            args, kwargs = [value(a) for a in node.args], {k: value(v) for k, v in node.kwargs}
            if self._checked:
                check_call(node.op, args, kwargs)
            values[at] = self._call(node.op, args, kwargs)
            if self._checked:
                check_dense(node.op, values[at])
            for number in free:
                values[number] = None
        return [value(r) for r in self._graph.outputs]


def check_call(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Look at a call once its tensors are there, which were not when the graph was read.

    Raises:
        Refused: No file may give these arguments.
    """
    check_arguments(op, args, kwargs)  # of each: a call may give a tensor where a dtype has to be
    check_inside(op, args, kwargs)


def check_dense(op: Any, value: Any) -> None:
    """Look that a call returned dense tensors.

    Sparse and nested tensors find their values by indices, which kernels believe and other tensors can share.

    Raises:
        Refused: It did not.
    """
    for t in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(t, torch.Tensor) and (t.layout is not torch.strided or t.is_nested):
            raise Refused(f"{op.name()} returns a tensor that is {'nested' if t.is_nested else t.layout}")


def _called(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return op(*args, **kwargs)


def refs_in(value: Any) -> Iterator[Ref]:
    """References in a nested argument, in order."""
    if type(value) is Ref:
        yield value
    elif type(value) is tuple:
        for v in value:
            yield from refs_in(v)


def mapped(value: Any, change: Callable[[Ref], Any]) -> Any:
    """A nested argument with each reference replaced."""
    if type(value) is Ref:
        return change(value)
    return tuple(mapped(v, change) for v in value) if type(value) is tuple else value


def _writes(op: torch._ops.OpOverload) -> bool:
    return bool(schema_of(op).is_mutable)


def _canonical(graph: Graph) -> list[Any]:
    inputs = [[i.shape, _dtype_name(i.dtype), list(i.fill), i.strides, i.offset, i.requires_grad] for i in graph.inputs]
    return [inputs, *_calls_and_outputs(graph)]


def to_json(graph: Graph) -> list[Any]:
    """A graph as plain JSON: inputs, calls, outputs.

    Raises:
        NotStorable: An argument is no plain value.
    """
    inputs = [
        [i.name, i.shape, _dtype_name(i.dtype), list(i.fill), i.strides, i.offset, int(i.requires_grad), i.role]
        for i in graph.inputs
    ]
    calls, outputs = _calls_and_outputs(graph)
    return [inputs, [[*call, node.module] for call, node in zip(calls, graph.nodes, strict=True)], outputs]


def _calls_and_outputs(graph: Graph) -> list[Any]:
    calls = [[n.name, _encode(n.args), {k: _encode(v) for k, v in n.kwargs}] for n in graph.nodes]
    return [calls, [list(r) for r in graph.outputs]]


def from_json(data: Any) -> Graph:
    """The graph of `to_json`. The data may come from anyone: operators are those that a file may name.

    Raises:
        ValueError: It is no such data, or it names an operator or an argument that no file may name.
        NotStorable: A value in it is none.
    """
    try:
        inputs, calls, outputs = data
        if len(calls) > MAX_NODES:
            raise ValueError(f"a graph of {len(calls)} calls; {MAX_NODES} at most")
        graph = Graph(
            tuple(_input(*row) for row in inputs),
            tuple(_node(*row) for row in calls),
            tuple(_ref(r) for r in outputs),
        )
        _check_refs(graph)
    except Refused:
        raise
    except AttributeError as error:  # this torch has no such operator
        raise ValueError(f"no operator of this process: {error}") from None
    # A hostile text may nest too deep as well.
    except (TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a graph: {error!r}"[:200]) from None
    return graph


def _input(
    name: Any, shape: Any, dtype: Any, fill: Any, strides: Any, offset: Any, requires_grad: Any, role: Any
) -> Input:
    sizes, steps = _sizes(shape), _sizes(strides)
    # Strides may reach further than the elements are many, and the memory is taken for all of it.
    reach = span(sizes, steps) if steps else 0
    if max(math.prod(sizes), reach) + _sizes([offset])[0] > MAX_ELEMENTS:
        raise ValueError("an input of more than 2^28 elements")
    kind, a, b = fill
    if not (isinstance(name, str) and isinstance(kind, str) and role in ("input", "parameter", "buffer")):
        raise ValueError("an input without name, fill or role")
    if dtype not in _DTYPES:
        raise ValueError(f"{brief(dtype)} is no dtype of an input")
    found, low, high = _DTYPES[dtype], float(a), float(b)
    if kind not in KINDS:
        raise ValueError(f"values of the unknown kind {kind[:40]!r}")
    if kind == "integers" and not all(abs(v) <= _MAX_INTEGER for v in (low, high)):  # NaN is not
        raise ValueError(f"integers from {low} to {high}")
    return Input(name, sizes, found, Fill(kind, low, high), steps, offset, bool(requires_grad), role)


# Dtypes that values can be made in: not those of quantized tensors, nor those that kernels do not know.
_DTYPES: Final = {
    name: getattr(torch, name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
_MAX_INTEGER: Final = 2.0**62


def _sizes(value: Any) -> tuple[int, ...]:
    if len(value) > MAX_DIMS or not all(type(v) is int and 0 <= v <= MAX_ELEMENTS for v in value):
        raise ValueError(f"{str(value)[:80]} are no sizes")
    return tuple(value)


def _node(name: str, args: Any, kwargs: Any, module: str = "") -> Node:
    op = operator_named(name)
    given, named = tuple(_decode(a) for a in args), {str(k): _decode(v) for k, v in kwargs.items()}
    # References stand for tensors that are not there yet.
    check_arguments(op, _stood_for(given), {k: _stood_for(v) for k, v in named.items()})
    return Node(op, given, tuple(named.items()), str(module)[:400])


def _stood_for(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(_stood_for(v) for v in value)
    # The tensors are checked when the graph runs, by `check_call`.
    return None if type(value) is Ref or value is DEVICE else value


def _ref(value: Any) -> Ref:
    node, output = value
    if type(node) is not int or type(output) is not int or output < 0:
        raise ValueError(f"{str(value)[:80]} is no reference")
    return Ref(node, output)


def _check_refs(graph: Graph) -> None:
    """Look that each reference is to an input or to an earlier call.

    Raises:
        ValueError: One is not.
    """
    lowest = -len(graph.inputs)
    for at, node in enumerate(graph.nodes):
        if not all(lowest <= r.node < at for r in node.refs()):
            raise ValueError(f"call {at} refers to a later one")
    if not all(lowest <= r.node < len(graph.nodes) for r in graph.outputs):
        raise ValueError("a result of no call")


def _encode(value: Any) -> Any:
    if type(value) is Ref:
        return {"ref": list(value)}
    if value is DEVICE:
        return {"device": "run"}
    if type(value) is tuple:
        return [_encode(v) for v in value]
    return plain_json.encode(value)


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(v) for v in value)
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "ref":
        return _ref(content)
    if kind == "device":
        return DEVICE
    return plain_json.decode(kind, content)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
