"""Folders in the layout of GraphNet: ``model.py`` with a graph in FX's Python, ``weight_meta.py``, ``input_meta.py``.

The files are untrusted Python. They are read as syntax trees, never imported or run: assignments of calls, and
names of functions that `compiled.graph_text` knows.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.compiled.graph_text import function_name
from shadowrun.errors import DataFileError
from shadowrun.limits import read_text
from shadowrun.studies.zoo.graph import Fill, Input
from shadowrun.studies.zoo.infer_fill import fitted
from shadowrun.studies.zoo.sources.foreign_graph import MAX_ELEMENTS, Rows, captured, plain
from shadowrun.studies.zoo.sources.isolated_readers import candidates_below, read_each
from shadowrun.studies.zoo.sources.source import Collected, LeftOut

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.studies.zoo.graph import Graph

__all__ = ["GRAPHNET", "collect_folders", "graph_of_folder"]

GRAPHNET: Final = "graphnet"
_MODEL, _WEIGHTS, _INPUTS = "model.py", "weight_meta.py", "input_meta.py"
_MAX_FOLDERS: Final = 100_000
_BINARY: Final = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.Pow: "pow", ast.MatMult: "matmul", ast.BitAnd: "and_", ast.BitOr: "or_", ast.BitXor: "xor",
    ast.LShift: "lshift", ast.RShift: "rshift",
}  # fmt: skip
_IN_PLACE: Final = {kind: f"i{name.rstrip('_')}" for kind, name in _BINARY.items()}
_COMPARISONS: Final = {
    ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
}  # fmt: skip
_UNARY: Final = {ast.USub: "neg", ast.UAdd: "pos", ast.Invert: "invert", ast.Not: "not_"}
_DUNDERS: Final = {
    f"__{name.rstrip('_')}__": name for name in (*_BINARY.values(), *_COMPARISONS.values(), *_UNARY.values())
} | {"__getitem__": "getitem", "__setitem__": "setitem"}
_NUMBERS: Final = {"inf": float("inf"), "nan": float("nan")}
# They count uses, or raise where a size is wrong: no result needs them.
_NO_EFFECT: Final = ("torch._C._log_api_usage_once", "torch._check", "torch._check_is_size")
_Kinds = (torch.dtype, torch.layout, torch.memory_format)


def collect_folders(
    path: Path, wanted: Callable[[str], bool], on_progress: Callable[..., None], *, isolated: bool = False
) -> Collected:
    """Programs of all folders in GraphNet's layout at or below a folder.

    Args:
        path: The folder.
        wanted: Whether a folder, by its path below this one, is.
        on_progress: Called with done, total and name.
        isolated: Read and run each in a worker process with limits.

    Raises:
        DataFileError: There is no such folder, or none in that layout.
    """
    if not path.is_dir():
        raise DataFileError(f"{str(path)!r} is no folder.", slug="zoo-source-file")
    folders = [model.parent for model in sorted(path.rglob(_MODEL))[:_MAX_FOLDERS]]
    folders = [folder for folder in folders if (folder / _WEIGHTS).is_file() or (folder / _INPUTS).is_file()]
    if not folders:
        raise DataFileError(
            f"{str(path)!r} has no folder with {_MODEL} and {_WEIGHTS}, the layout of GraphNet.", slug="zoo-source-file"
        )
    found = Collected(GRAPHNET)
    read_each(found, graph_of_folder, candidates_below(path, folders, wanted), on_progress, isolated=isolated)
    return found


def graph_of_folder(path: str) -> Graph:
    """The graph of a folder.

    Raises:
        LeftOut: It has what no program can hold.
    """
    folder = Path(path)
    described = _described(folder / _WEIGHTS) | _described(folder / _INPUTS)
    forward = _forward(_tree(folder / _MODEL))
    rows, inputs, names = Rows(), [], {}
    # The first argument is `self`.
    for argument in forward.args.args[1:]:
        facts = described.get(argument.arg)
        if facts is None:
            raise LeftOut(f"nothing describes its input {argument.arg[:80]}")
        # Sizes that vary are numbers in the graph: no program has inputs that are no tensors.
        if _is_size(argument.annotation):
            names[argument.arg] = _size(facts)
            continue
        names[argument.arg] = rows.placeholder()
        inputs.append(_input(argument.arg, facts, argument.annotation))
    _Translator(rows, names).run(forward.body)
    return captured(rows, inputs)


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(read_text(path))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise LeftOut(f"{path.name} cannot be read: {type(error).__name__}: {error}") from None


def _forward(tree: ast.Module) -> ast.FunctionDef:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    found = [f for c in classes for f in c.body if isinstance(f, ast.FunctionDef) and f.name == "forward"]
    if len(found) != 1:
        raise LeftOut(f"{_MODEL} has {len(found)} functions forward, not one")
    return found[0]


# -- inputs ------------------------------------------------------------------------------------------------


def _described(path: Path) -> dict[str, dict[str, Any]]:
    """What a file says of tensors, by their name: a class for each, with plain values."""
    if not path.is_file():
        return {}
    found = {}
    for node in _tree(path).body:
        if isinstance(node, ast.ClassDef):
            facts = dict(filter(None, map(_fact, node.body)))
            found[str(facts.get("name", node.name))] = facts
    return found


def _fact(node: ast.stmt) -> tuple[str, Any] | None:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            try:
                # Literals only: nothing of the file is evaluated.
                return name, ast.literal_eval(value)
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
                return None
    return None


def _is_size(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Attribute) and annotation.attr == "SymInt"


def _size(facts: dict[str, Any]) -> int:
    data = facts.get("data")
    value = data[0] if isinstance(data, list) and data else data
    if type(value) is not int:
        raise LeftOut("a size without a value")
    return value


def _input(name: str, facts: dict[str, Any], annotation: ast.expr | None) -> Input:
    shape, dtype = facts.get("shape"), facts.get("dtype")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n <= MAX_ELEMENTS for n in shape):
        raise LeftOut(f"its input {name[:80]} has no shape")
    kind = vars(torch).get(str(dtype).removeprefix("torch."))
    if not isinstance(kind, torch.dtype):
        raise LeftOut(f"its input {name[:80]} has no dtype of torch")
    is_parameter = isinstance(annotation, ast.Attribute) and annotation.attr == "Parameter"
    role = "parameter" if is_parameter else "buffer" if "_buffers_" in name else "input"
    return Input(name[:200], tuple(shape), kind, _fill(name, facts, kind), role=role)


def _fill(name: str, facts: dict[str, Any], dtype: torch.dtype) -> Fill:
    """Values of the kind that the file describes: it has statistics, and those of integers."""
    data = facts.get("data")
    if isinstance(data, list) and data:
        try:
            return fitted(torch.tensor(data).to(dtype))
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise LeftOut(f"the values of its input {name[:80]} are no numbers") from None
    low, high = facts.get("min_val"), facts.get("max_val")
    if dtype is torch.bool:
        return Fill("bools", 0.5)
    if not (dtype.is_floating_point or dtype.is_complex):
        if isinstance(low, int) and isinstance(high, int) and low <= high:
            return Fill("integers", low, high)
        return Fill("integers", 0, 1)
    mean, std = (float(v) if isinstance(v, (int, float)) else 0.0 for v in (facts.get("mean"), facts.get("std")))
    if "running_var" in name:
        return Fill("uniform", 0.5, 1.5)  # never negative, whatever its spread
    return Fill("normal", mean, std) if 0 < std < 1e30 and abs(mean) < 1e30 else Fill("constant", mean)


# -- code --------------------------------------------------------------------------------------------------


class _Translator:
    """Translates the statements of a function.

    Args:
        rows: Gets the calls.
        names: Encoded values of the arguments.
    """

    def __init__(self, rows: Rows, names: dict[str, Any]) -> None:
        self._rows, self._names = rows, names

    def run(self, body: list[ast.stmt]) -> None:
        """All statements.

        Raises:
            LeftOut: One of them is none that FX writes; the text has its line.
        """
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                made = self._value(value)
                for target in targets:
                    self._assign(target, made)
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value) if type(op) in _IN_PLACE:
                given = [self._named(name), self._value(value)]
                self._names[name] = self._rows.call(f"operator.{_IN_PLACE[type(op)]}", given)
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                pass
            case ast.Expr(value=value):
                self._value(value)
            case ast.Return(value=value):
                self._rows.output(self._value(value) if value is not None else None)
            case _:
                raise LeftOut(f"line {node.lineno}: {type(node).__name__} is no statement of a graph")

    def _assign(self, target: ast.expr, made: Any) -> None:
        match target:
            case ast.Name(id=name):
                self._names[name] = made
            case ast.Subscript(value=value, slice=index):
                self._rows.call("operator.setitem", [self._value(value), self._value(index), made])
            case ast.Tuple(elts=elements) if all(isinstance(e, ast.Name) for e in elements):
                for k, element in enumerate(elements):
                    self._assign(element, self._rows.call("operator.getitem", [made, k]))
            case _:
                raise LeftOut(f"line {target.lineno}: {ast.unparse(target)[:60]} cannot be assigned to")

    def _named(self, name: str) -> Any:
        if name in self._names:
            return self._names[name]
        if name in _NUMBERS:
            return plain(_NUMBERS[name])
        if name == "Ellipsis":
            return {"ellipsis": None}
        raise LeftOut(f"nothing is named {name[:80]}")

    def _value(self, node: ast.expr | None) -> Any:
        match node:
            case None | ast.Constant(value=None):
                return None
            case ast.Constant(value=value) if value is Ellipsis:
                return {"ellipsis": None}
            case ast.Constant(value=value) if type(value) in (bool, int, float, complex, str):
                return plain(value)
            case ast.Name(id=name):
                return self._named(name)
            case ast.Tuple(elts=elements):
                return {"tuple": [self._value(e) for e in elements]}
            case ast.List(elts=elements):
                return [self._value(e) for e in elements]
            case ast.Slice(lower=lower, upper=upper, step=step):
                return {"slice": [self._value(lower), self._value(upper), self._value(step)]}
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value) | float(value))):
                return plain(-value)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                return self._rows.call(f"operator.{_UNARY[type(op)]}", [self._value(operand)])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return self._rows.call(f"operator.{_BINARY[type(op)]}", [self._value(left), self._value(right)])
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
                return self._rows.call(f"operator.{_COMPARISONS[type(op)]}", [self._value(left), self._value(right)])
            case ast.Subscript(value=value, slice=index):
                return self._rows.call("operator.getitem", [self._value(value), self._value(index)])
            case ast.Attribute(value=value, attr=attr):
                return self._attribute(node, value, attr)
            case ast.Call(func=function, args=args, keywords=keywords):
                return self._call(function, args, keywords)
        raise LeftOut(f"line {getattr(node, 'lineno', 0)}: {type(node).__name__} is no value of a graph")

    def _attribute(self, node: ast.expr, value: ast.expr, attr: str) -> Any:
        name = self._dotted(node)
        if name:  # of a module: only constants have a value
            found = vars(torch).get(attr) if name == f"torch.{attr}" else None
            if isinstance(found, _Kinds):
                return plain(found)
            raise LeftOut(f"line {node.lineno}: {name[:80]} is no constant of torch")
        return self._rows.call(f"torch.Tensor.{attr}.__get__", [self._value(value)])

    def _call(self, function: ast.expr, args: list[ast.expr], keywords: list[ast.keyword]) -> Any:
        given = [self._value(a) for a in args]
        named = {k.arg: self._value(k.value) for k in keywords if k.arg is not None}
        if len(named) < len(keywords):
            raise LeftOut(f"line {function.lineno}: a call with ** is none of a graph")
        name = self._dotted(function)
        if name in ("device", "torch.device"):
            return plain(torch.device("cpu"))
        if name == "slice":
            return {"slice": [*([None] if len(given) == 1 else []), *given, None, None][:3]}
        if name in _NO_EFFECT:
            return None
        if name.startswith("torch.ops."):
            return self._rows.call(name, given, named)
        if name:
            known = name if name.startswith("operator.") else function_name(name)
            if not known:
                raise LeftOut(f"line {function.lineno}: {name[:80]} is no function on tensors")
            return self._rows.call(known, given, named)
        if not isinstance(function, ast.Attribute):
            raise LeftOut(f"line {function.lineno}: {ast.unparse(function)[:60]} cannot be called")
        receiver = self._value(function.value)
        if function.attr in _DUNDERS:
            return self._rows.call(f"operator.{_DUNDERS[function.attr]}", [receiver, *given], named)
        return self._rows.method(function.attr, [receiver, *given], named)

    def _dotted(self, node: ast.expr) -> str:
        """``torch.nn.functional.relu`` of a name that no value has; empty for anything else."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id in self._names or node.id in _NUMBERS:
            return ""
        return ".".join([node.id, *reversed(parts)])
