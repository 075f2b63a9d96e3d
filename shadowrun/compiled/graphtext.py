"""A graph as text and back: names of operators and plain values only, so that reading one runs nothing of its writer's.

A file of captured inputs may come from anybody. A graph printed as Python would be a program of theirs; here each name
is looked up among torch's operators and functions on tensors.
"""

from __future__ import annotations

import functools
import json
import keyword
import math
import operator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from shadowrun.compiled import torchcompile
from shadowrun.compiled.graph import place
from shadowrun.errors import UsageError
from shadowrun.store import values
from shadowrun.store.values import Unkeepable

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["from_text", "to_text"]

_FACTORIES: Final = (
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "scalar_tensor",
    "tensor", "tril_indices", "triu_indices", "zeros",
)  # fmt: skip
"""Functions of torch that take no tensor, so that no list of those on tensors has them."""
_NOT_ON_VALUES: Final = ("attrgetter", "call", "itemgetter", "methodcaller")


def to_text(module: fx.GraphModule) -> str:
    """A graph without constants as text.

    Raises:
        Unkeepable: It calls something else than operators and functions on tensors, or with other things than values.
    """
    nodes = []
    for node in module.graph.nodes:
        target = "" if node.op in ("placeholder", "output") else _name_of(node)
        nodes.append([node.op, node.name, target, _encode(node.args), _encode(node.kwargs), list(place(node))])
    return json.dumps(nodes)


def from_text(text: str) -> fx.GraphModule:
    """The graph that a text tells.

    Raises:
        ValueError: It is no such text.
        UsageError: This torch lacks an operator of it.
    """
    graph = fx.Graph()
    known: dict[str, fx.Node] = {}
    try:
        for op, name, target, args, kwargs, where in json.loads(text):
            if op not in ("placeholder", "call_function", "call_method", "output"):
                raise ValueError(op)
            _check_name(name)
            given, named = tuple(_decode(args, known)), _decode(kwargs, known)
            for key in named:
                _check_name(key)
            if op == "output":
                node = graph.output(given[0])
            elif op == "placeholder":
                node = graph.placeholder(name)
            else:
                node = graph.create_node(op, _target(op, target), given, named, name)
            node.meta["place"] = (str(where[0]), str(where[1]))
            known[name] = node
        graph.lint()
        return fx.GraphModule(torch.nn.Module(), graph)
    except (KeyError, TypeError, IndexError, AttributeError, RuntimeError, SyntaxError) as error:
        raise ValueError(repr(error)) from None


def _check_name(name: Any) -> None:
    """A name becomes part of a script."""
    if type(name) is not str or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(name)


def _name_of(node: fx.Node) -> str:
    target = node.target
    if node.op == "call_method" and _is_method(target):
        return str(target)
    if node.op == "call_function":
        if isinstance(target, torch._ops.OpOverload):
            return f"torch.ops.{target}"
        name = _names().get(target) if callable(target) else None
        if name is not None:
            return name
    raise Unkeepable(f"a call of {getattr(target, '__name__', target)}")


def _target(op: str, name: str) -> Any:
    if op == "call_method":
        if not _is_method(name):
            raise ValueError(name)
        return name
    try:
        if name.startswith("torch.ops."):
            namespace, packet, overload = name.removeprefix("torch.ops.").split(".")
            found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
            if not isinstance(found, torch._ops.OpOverload):
                raise ValueError(name)
            return found
        return _functions()[name]
    except (AttributeError, KeyError):
        raise UsageError(
            f"This torch has no operator {name}: import the library that brings it, or use the version of the run.",
            slug="no-repro",
        ) from None


def _is_method(name: Any) -> bool:
    return isinstance(name, str) and not name.startswith("_") and callable(getattr(torch.Tensor, name, None))


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    """Name to function, for all that a graph may call: those on tensors, numbers and sizes."""
    found: dict[str, Any] = {f"torch.{name}": getattr(torch, name) for name in _FACTORIES}
    found |= torchcompile.MODES_IN_GRAPHS
    for names in torch.overrides.get_overridable_functions().values():
        for function in names:
            name = torch.overrides.resolve_name(function)
            if name is not None:
                found.setdefault(name, function)
    for module in (operator, math):
        for name in dir(module):
            if not name.startswith("_") and name not in _NOT_ON_VALUES and callable(getattr(module, name)):
                found[f"{module.__name__}.{name}"] = getattr(module, name)
    return found


@functools.cache
def _names() -> dict[Any, str]:
    return {function: name for name, function in _functions().items()}


def _encode(value: Any) -> Any:
    """A value as JSON; what JSON lacks, as an object with one key that tells its kind."""
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, tuple):  # sizes too
        return {"tuple": [_encode(v) for v in value]}
    if isinstance(value, list):
        return [_encode(v) for v in value]
    if isinstance(value, dict):
        return {"dict": [[_encode(k), _encode(v)] for k, v in value.items()]}
    if isinstance(value, slice):
        return {"slice": [_encode(v) for v in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"ellipsis": None}
    try:
        return values.encode(value)
    except Unkeepable as kind:
        raise Unkeepable(f"a {kind} in its graph") from None


def _decode(value: Any, known: dict[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(v, known) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return known[content]
    if kind == "dict":
        return {_decode(k, known): _decode(v, known) for k, v in content}
    if kind == "tuple":
        return tuple(_decode(v, known) for v in content)
    if kind == "slice":
        return slice(*(_decode(v, known) for v in content))
    if kind == "ellipsis":
        return ...
    return values.decode(kind, content)
