"""A graph as text and back: names of operators and plain values only, so that reading a file runs no code from it.

A file of captured inputs may come from an attacker, so a graph is not stored as Python code. Each name is looked up
among the operators and functions that compute tensors from tensors (`shadowrun.intercept.untrusted.op_allowlist`), each
text must be the name of a choice, and methods are called on results of nodes only.
"""

from __future__ import annotations

import contextlib
import functools
import json
import keyword
import math
import operator
import re
import sys
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from shadowrun.compiled import torchcompile
from shadowrun.compiled.graph import node_origin
from shadowrun.errors import UsageError
from shadowrun.intercept.untrusted.checked_calls import CheckedCalls
from shadowrun.intercept.untrusted.op_allowlist import Refused, check_arguments, check_operator, is_word, operator_named
from shadowrun.intercept.untrusted.sequence_lengths import RECURRENT
from shadowrun.replay.copies import tensors_in
from shadowrun.store import plain_json
from shadowrun.store.plain_json import NotStorable
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["DenseInterpreter", "from_text", "function_name", "to_text"]

# Functions of torch that take no tensor, so that no list of those on tensors has them.
_FACTORIES: Final = (
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "scalar_tensor",
    "tensor", "tril_indices", "triu_indices", "zeros",
)  # fmt: skip
# They make functions, or call what they are given: a text could have anything called by them.
_NOT_ON_VALUES: Final = ("attrgetter", "call", "itemgetter", "methodcaller")
# All that these have computes tensors from tensors.
_SAFE_MODULES: Final = ("torch.fft", "torch.functional", "torch.linalg", "torch.nn.functional", "torch.special")
# Modules by which the code of a graph names functions; some are known by another name here.
_CALLED_IN: Final = ("torch", "torch._C._nn", "math", *_SAFE_MODULES)
# Functions and methods of tensors that are no operators by name, and compute as these do.
_NO_OPERATORS: Final = frozenset(
    {
        *(
            "as_tensor",
            "lobpcg",
            "spmm",
            "sym_float",
            "sym_ite",
            "sym_max",
            "sym_min",
            "sym_not",
            "sym_sqrt",
            "sym_sum",
        ),
        *("tensor", "bfloat16", "bool", "byte", "cdouble", "cfloat", "char", "cpu", "cuda", "dim_order", "double"),
        *("element_size", "float", "half", "int", "is_same_size", "long", "lu", "mtia", "ndimension", "nelement"),
        *("new_tensor", "short", "to_sparse_coo", "tolist", "type", "unique", "xpu"),
    }
)
_DUNDERS: Final = frozenset(
    f"__{prefix}{name}__"
    for name in (
        *("add", "and", "div", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub", "truediv"),
        *(
            "xor",
            "eq",
            "ge",
            "gt",
            "le",
            "lt",
            "ne",
            "abs",
            "neg",
            "pos",
            "invert",
            "getitem",
            "setitem",
            "len",
            "bool",
        ),
        *("contains", "float", "int", "index", "complex", "long"),
    )
    for prefix in ("", "r", "i")
)
_ATTRIBUTES: Final = frozenset(
    {
        *("H", "T", "mH", "mT", "data", "device", "dtype", "imag", "is_cpu", "is_cuda", "is_quantized", "is_sparse"),
        *("itemsize", "layout", "nbytes", "ndim", "real", "requires_grad", "shape"),
    }
)
_AUTOCAST: Final = ("cpu", "cuda", "mps", "mtia", "xpu")
# ASCII: Python reads identifiers in NFKC, by which two different names could become one variable of a script.
_NAME: Final = re.compile(r"[A-Za-z_]\w{0,199}", re.ASCII)
# Names that mean something else in the code of a graph.
_TAKEN: Final = frozenset({"device", "inf", "math", "nan", "operator", "self", "torch"})


def to_text(module: fx.GraphModule) -> str:
    """A graph without constants as text.

    Raises:
        NotStorable: It calls something else than operators and functions on tensors, or with other things than values.
    """
    nodes = []
    for node in module.graph.nodes:
        target = "" if node.op in ("placeholder", "output") else _name_of(node)
        nodes.append([node.op, node.name, target, _encode(node.args), _encode(node.kwargs), list(node_origin(node))])
    return json.dumps(nodes)


def from_text(text: str) -> fx.GraphModule:
    """The graph of a text.

    Raises:
        ValueError: It is no such text.
        UsageError: This torch lacks an operator of it.
    """
    graph = fx.Graph()
    known: dict[str, fx.Node] = {}
    try:
        for op, name, target, args, kwargs, where in json.loads(text):
            # No `get_attr` and no `call_module`: both would need objects that a text cannot hold.
            if op not in ("placeholder", "call_function", "call_method", "output"):
                raise ValueError(op)
            _check_name(name)
            given, named = tuple(_decode(args, known)), _decode(kwargs, known)
            # Names of arguments become a part of a script too.
            for key in named:
                _check_key(key)
            if op == "output":
                node = graph.output(given[0])
            elif op == "placeholder":
                node = graph.placeholder(name)
            else:
                function = _target(op, target)
                given, named = _checked(op, function, given, named)
                node = graph.create_node(op, function, given, named, name)
            node.meta["place"] = (str(where[0]), str(where[1]))
            known[name] = node
        # A file may name a node before it is computed.
        graph.lint()
        return fx.GraphModule(torch.nn.Module(), graph)
    except Refused as why:
        raise UsageError(f"No script is written: {why}.", slug="operator-refused") from None
    # Recursion in a hostile text is a RuntimeError too.
    except (KeyError, TypeError, IndexError, AttributeError, RuntimeError, SyntaxError) as error:
        raise ValueError(repr(error)) from None


class DenseInterpreter(fx.Interpreter):
    """Runs a graph of a file as long as its values are numbers and strided tensors, and arguments those of a file.

    Sparse and nested tensors find their values by indices, which operators believe and other tensors can share:
    ``t_`` turns those of a detached alias around, too, which then lead out of its memory.
    """

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        with CheckedCalls(of_graph=True):
            return super().run(*args, **kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, after a look at arguments that earlier nodes made."""
        if isinstance(target, torch._ops.OpOverload):
            check_arguments(target, args, kwargs)  # those that nodes computed have come now
        else:
            _check_growth(target, args)
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and look at what it returns."""
        value = super().run_node(n)
        for t in tensors_in((value,)):
            if t.layout is not torch.strided or t.is_nested:
                raise TypeError(f"{n.name} is {'nested' if t.is_nested else t.layout}: for a file, tensors are dense")
        return value


_POWERS: Final = frozenset(
    (operator.pow, operator.ipow, operator.lshift, operator.ilshift, math.factorial, math.comb, math.perm)
)
_MAX_BITS, _MAX_POWER, _MAX_LENGTH = 128, 64, 1 << 16


def _check_growth(target: Any, args: tuple[Any, ...]) -> None:
    """Python's integers and lists have no bound: ``2 ** 10 ** 10`` takes all memory, and any time.

    Raises:
        Refused: They would grow beyond what sizes of tensors need.
    """
    numbers = [v for v in args if isinstance(v, int)]
    lists = [v for v in args if isinstance(v, (list, tuple, str))]
    power = abs(args[-1]) if target in _POWERS and len(numbers) == len(args) > 0 else 0
    length = sum(map(len, lists)) * max([1, *numbers]) if lists else 0
    if power > _MAX_POWER or length > _MAX_LENGTH or any(n.bit_length() > _MAX_BITS for n in numbers):
        raise Refused(f"{getattr(target, '__name__', 'a function')} would make too large a number or list")


def function_name(dotted: str) -> str:
    """The name by which `from_text` knows a function that Python code calls, ``torch._C._nn.linear``; empty if none."""
    module, _, last = dotted.rpartition(".")
    # Looked up in what the module holds: `getattr` would import what a module loads when it is first asked for.
    found = vars(sys.modules[module]).get(last) if module in _CALLED_IN else None
    try:
        return _names().get(found, "")
    except TypeError:  # it has no hash
        return ""


def _check_name(name: Any) -> None:
    """A name becomes part of a script."""
    _check_key(name)
    if name in _TAKEN:
        raise ValueError(ascii(name))


def _check_key(name: Any) -> None:
    if type(name) is not str or not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ValueError(ascii(name)[:200])


def _checked(op: str, target: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments of a call, where a file may give them.

    Raises:
        Refused: It may not.
        ValueError: A method of something that no node returned.
    """
    if isinstance(target, torch._ops.OpOverload):
        given, named = _without_messages(target, given, named)
        check_arguments(target, *_stood_for((given, named)))
        return given, named
    # A method of a plain value is Python (`str.format`), not an operator on a tensor.
    if op == "call_method" and not (given and isinstance(given[0], fx.Node)):
        raise ValueError(f"{target} of no node")
    function = _names().get(target, "") if op == "call_function" else target
    for text in _texts((given, list(named.values()))):
        is_one = is_word(text) or text in _WORDS_OF_FUNCTIONS
        if function.rpartition(".")[2] == "einsum":
            is_one = is_one or is_word(text, "equation")
        if function.startswith("torch.amp."):
            is_one = text in _AUTOCAST
        if not is_one:
            raise Refused(f"{ascii(text)[:80]} is no choice for {function}")
    return given, named


_WORDS_OF_FUNCTIONS: Final = ("gelu", "leaky_relu", "relu", "tanh", "conv2d", "sigmoid", "selu", "inf", "fro", "nuc")


def _without_messages(target: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    """An assertion's words, which may quote anything, in plain characters."""
    places = [i for i, a in enumerate(schema_of(target).arguments) if a.name == "assert_msg"]
    plain = [_plain(v) if i in places else v for i, v in enumerate(given)]
    return tuple(plain), {k: _plain(v) if k == "assert_msg" else v for k, v in named.items()}


def _plain(text: Any) -> Any:
    return re.sub(r"[^A-Za-z0-9_ <>=.,()+*/-]", " ", text)[:200] if isinstance(text, str) else text


def _stood_for(value: Any) -> Any:
    """Values with None where a node's will be."""
    if isinstance(value, fx.Node):
        return None
    if isinstance(value, (list, tuple)):
        return [_stood_for(v) for v in value]
    return {k: _stood_for(v) for k, v in value.items()} if isinstance(value, dict) else value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _texts(v)
    elif isinstance(value, dict):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, slice):
        yield from _texts([value.start, value.stop, value.step])


def _name_of(node: fx.Node) -> str:
    target = node.target
    if node.op == "call_method" and _is_method(target):
        return str(target)
    if node.op == "call_function":
        if isinstance(target, torch._ops.OpOverload):
            try:
                check_operator(target)
            except Refused as why:
                raise NotStorable(f"a call of an operator that no file may name: {why}") from None
            return f"torch.ops.{target}"
        name = _names().get(target) if callable(target) else None
        if name is not None and _computes(name):
            return name
    raise NotStorable(f"a call of {getattr(target, '__name__', target)}")


def _target(op: str, name: str) -> Any:
    if op == "call_method":
        if not _is_method(name):
            raise ValueError(name)
        return name
    try:
        if name.startswith("torch.ops."):
            namespace, _, rest = name.removeprefix("torch.ops.").partition(".")
            return operator_named(f"{namespace}::{rest}")
        if not _computes(name):
            raise Refused(f"{ascii(name)[:80]} does more than compute tensors")
        return _functions()[name]
    except (AttributeError, KeyError):
        raise UsageError(
            f"This torch has no operator {ascii(name)[1:-1][:80]}: import the library that brings it, or use the "
            "version of the run.",
            slug="no-repro",
        ) from None


def _is_method(name: Any) -> bool:
    # `__reduce__` and its like run code.
    if not isinstance(name, str) or name.startswith("_") or not callable(getattr(torch.Tensor, name, None)):
        return False
    return name in _NO_OPERATORS or _is_operator(name)


@functools.cache
def _is_operator(name: str) -> bool:
    """Whether a file may have an operator of this name called, in one of its overloads."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    for overload in packet.overloads():  # type: ignore[no-untyped-call]
        with contextlib.suppress(Refused):
            check_operator(getattr(packet, overload))
            return True
    return False


def _computes(name: str) -> bool:
    """Whether a function, of those that are known here, computes tensors from tensors."""
    module, _, last = name.rpartition(".")
    # They split before anything looks, and take states of other layers for their own. As operators they are looked at.
    if last in RECURRENT:
        return False
    if (
        module in ("math", "operator")
        or name in torchcompile.MODES_IN_GRAPHS
        or name.removeprefix("torch.") in _FACTORIES
    ):
        return True
    if module in _SAFE_MODULES:
        return True
    if module == "torch.Tensor" and last.startswith("__"):
        return last in _DUNDERS
    if last == "__get__":
        return module.removeprefix("torch.Tensor.") in _ATTRIBUTES
    return module in ("torch", "torch.Tensor") and (last in _NO_OPERATORS or _is_operator(last))


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    """Name to function: those of torch that may be overridden, and those on numbers and sizes; see `_computes`."""
    functions: dict[str, Any] = {f"torch.{name}": getattr(torch, name) for name in _FACTORIES}
    functions |= torchcompile.MODES_IN_GRAPHS
    for names in torch.overrides.get_overridable_functions().values():
        for function in names:
            name = torch.overrides.resolve_name(function)
            if name is not None:
                # The first name stays: `torch.nn.functional` has some functions a second time.
                functions.setdefault(name, function)
    for module in (operator, math):
        for name in dir(module):
            if not name.startswith("_") and name not in _NOT_ON_VALUES and callable(getattr(module, name)):
                functions[f"{module.__name__}.{name}"] = getattr(module, name)
    return functions


@functools.cache
def _names() -> dict[Any, str]:
    return {function: name for name, function in _functions().items()}


def _encode(value: Any) -> Any:
    """A value as JSON; what JSON lacks, as an object with its kind as the one key."""
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
        return plain_json.encode(value)
    except NotStorable as kind:
        raise NotStorable(f"a {kind} in its graph") from None


def _decode(value: Any, known: dict[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(v, known) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()  # ValueError, which refuses the text, where there is not one key
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
    decoded = plain_json.decode(kind, content)
    # Meta tensors compute no values: nothing would be compared.
    if isinstance(decoded, torch.device) and decoded.type == "meta":
        raise ValueError("a device without values")
    return decoded
