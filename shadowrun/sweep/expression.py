"""A case as Python code: the function of the database by its public name, its tensors by the names of its arguments."""

from __future__ import annotations

import ast
import functools
import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.errors import UsageError
from shadowrun.repro.quoting import literal, quoted
from shadowrun.sweep.cases import Part
from shadowrun.sweep.inputs import copied, leaves
from shadowrun.sweep.programs import gradient, outs_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shadowrun.sweep.again import Again

__all__ = ["Expression", "expression_of"]

_MODULES: tuple[tuple[str, Any], ...] = (
    ("torch", torch),
    ("torch.Tensor", torch.Tensor),
    ("torch.nn.functional", torch.nn.functional),
    ("torch.linalg", torch.linalg),
    ("torch.special", torch.special),
    ("torch.fft", torch.fft),
    ("torch.sparse", torch.sparse),
    ("torch.signal.windows", torch.signal.windows),
    ("operator", operator),
)
_DATABASE = """\
from torch.testing._internal.common_methods_invocations import op_db

# The function is one of torch's own tests.
ENTRY = next(entry for entry in op_db if (entry.name, entry.variant_test_name) == {key!r})"""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Expression:
    """A case as code.

    Attributes:
        call: ``torch.nn.functional.pixel_shuffle(x["input"], 2)``.
        inputs: Tensors, and lists of them, by the names in that.
        results: Names of its results, with their expressions.
        preamble: Lines that it needs before.
        modules: Modules to import.
        before, after: Lines around the call.
        on_cpu: Inputs that stay on the CPU.
    """

    call: str
    inputs: Mapping[str, Any]
    results: tuple[tuple[str, str], ...]
    preamble: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    on_cpu: tuple[str, ...] = ()


def expression_of(again: Again, *, whole: bool) -> Expression:
    """Write a case out.

    Args:
        again: The case.
        whole: Run it on the CPU to see which results it has; else the script looks at none.

    Raises:
        UsageError: An argument has no text, or the gradient is of a function of the result.
    """
    part, sample = again.case.part, again.sample
    inplace = part in (Part.INPLACE, Part.STRIDED_INPLACE)
    function, preamble, modules = _function(again.entry, inplace=inplace)
    writer = _Writer()
    first = [] if "::" in again.case.operator else [writer.text("input", sample.input)]
    places = [writer.text(f"arg{i}", value) for i, value in enumerate(sample.args, start=1)]
    named = [f"{name}={writer.text(name, value)}" for name, value in (sample.kwargs or {}).items()]
    inputs = dict(writer.inputs)
    expected: Any = None
    if whole or part in (Part.OUT, Part.BACKWARD):
        expected = _ran(again, grad=part is Part.BACKWARD, inplace=inplace)
    if part is Part.OUT:
        outs = outs_for(expected, resized=again.case.sample % 2 == 1)
        named.append(f"out={writer.text('out', outs)}")
    call = f"{function}({', '.join([*first, *places, *named])})"
    stay = tuple(["input", *(f"arg{i}" for i in range(1, 9))][place] for place in sample.stays)
    found = Expression(call, writer.inputs, _paths(expected, "out"), preamble, modules, on_cpu=stay)
    if part is Part.BACKWARD:
        return _with_gradients(found, again, writer.given, expected)
    written = {name: value for name, value in inputs.items() if inplace or "::" in again.case.operator}
    if part is Part.OUT:
        written = {"out": outs}
    results = [(name, expression) for name, value in written.items() for name, expression in _named(name, value)]
    return replace(found, results=(*found.results, *results) or (("output 0", "out"),))


def _with_gradients(found: Expression, again: Again, given: Mapping[str, Any], expected: Any) -> Expression:
    sample = again.sample
    if sample.process is not None and sample.process(expected) is not expected:
        raise UsageError(
            f"{again.case} takes the gradient of a function of the result that is not part of torch: no script can be "
            "written for it.",
            slug="no-repro",
        )
    results = dict(_paths(expected, "out"))
    tensors = {name: t for name, t in zip(results, _values(expected), strict=True) if isinstance(t, torch.Tensor)}
    outs = {name: t for name, t in tensors.items() if t.requires_grad}
    gradients = {f"gradient of {name}": gradient(t) for name, t in outs.items()}
    named = [f"x[{quoted(name)}]" for name in gradients]
    wanted = {
        text: name
        for key, value in given.items()
        for (name, text), t in zip(_named(key, value), leaves(value), strict=True)
        if t.requires_grad
    }
    return replace(
        found,
        inputs={**found.inputs, **gradients},
        before=("torch.set_grad_enabled(True)", *(f"{text}.requires_grad_()" for text in wanted)),
        after=(f"torch.autograd.backward([{', '.join(results[name] for name in outs)}], [{', '.join(named)}])",),
        results=tuple((f"gradient of {name}", f"{text}.grad") for text, name in wanted.items()),
    )


def _ran(again: Again, *, grad: bool, inplace: bool) -> Any:
    x, args, kwargs = copied(again.sample, _CPU, grad=grad)
    function = again.entry.inplace_variant if inplace else getattr(again.entry, "op", again.entry)
    torch.manual_seed(0)
    return function(x, *args, **kwargs)


def _function(entry: Any, *, inplace: bool) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Its text, lines before, modules to import."""
    own = getattr(entry, "operator", None)  # of a recorded call
    function = own if own is not None else entry.inplace_variant if inplace else entry.op
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"torch.ops.{function}", (), ()
    name = _names().get(id(function))
    if name is not None:
        return name, (), ("operator",) if name.startswith("operator.") else ()
    attribute = "inplace_variant" if inplace else "op"
    return f"ENTRY.{attribute}", (_DATABASE.format(key=(entry.name, entry.variant_test_name)),), ()


@functools.cache
def _names() -> dict[int, str]:
    """Public functions by identity; the first module that has one names it."""
    found: dict[int, str] = {}
    for prefix, module in _MODULES:
        for name, value in vars(module).items():
            if callable(value) and not isinstance(value, type):
                found.setdefault(id(value), f"{prefix}.{name}")
    for name in dir(torch.Tensor):  # what it inherits
        found.setdefault(id(getattr(torch.Tensor, name, None)), f"torch.Tensor.{name}")
    return found


class _Writer:
    """Writes arguments out; tensors, and lists of nothing else, become inputs with names.

    Attributes:
        given: Those, by name.
        inputs: The same without gradients.
    """

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.inputs: dict[str, Any] = {}

    def text(self, name: str, value: Any) -> str:
        """``x["input"]``, ``2``, ``[x["arg1[0]"], 3]``.

        Raises:
            UsageError: It has no text.
        """
        if isinstance(value, torch.Tensor) or _is_list_of_tensors(value):
            self.given[name] = value
            self.inputs[name] = [t.detach() for t in value] if isinstance(value, (list, tuple)) else value.detach()
            return f"tuple(x[{quoted(name)}])" if isinstance(value, tuple) else f"x[{quoted(name)}]"
        if isinstance(value, (list, tuple)) and any(True for _ in leaves(value)):
            inner = ", ".join(self.text(f"{name}[{i}]", v) for i, v in enumerate(value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
        if isinstance(value, dict) and any(True for _ in leaves(value)):
            inner = ", ".join(f"{literal(k)}: {self.text(f'{name}[{k}]', v)}" for k, v in value.items())
            return f"{{{inner}}}"
        text = literal(value.item() if hasattr(value, "item") and not isinstance(value, torch.Tensor) else value)
        try:
            ast.parse(text, mode="eval")
        except SyntaxError:
            raise UsageError(
                f"The argument {name} is a {type(value).__name__}, which has no text: no script can be written.",
                slug="no-repro",
            ) from None
        return text


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(v, torch.Tensor) for v in value)


def _named(name: str, value: Any) -> list[tuple[str, str]]:
    """Names and expressions of the tensors of an input."""
    if isinstance(value, torch.Tensor):
        return [(name, f"x[{quoted(name)}]")]
    return [(f"{name}[{i}]", f"x[{quoted(name)}][{i}]") for i in range(len(value))]


def _paths(value: Any, text: str) -> tuple[tuple[str, str], ...]:
    """Names and expressions of all tensors and numbers in nested results."""
    if isinstance(value, (list, tuple)):
        return tuple(path for i, v in enumerate(value) for path in _paths(v, f"{text}[{i}]"))
    shown = value is not None and isinstance(value, (torch.Tensor, bool, int, float, complex))
    return ((text.replace("out", "output", 1), text),) if shown else ()


def _values(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [one for v in value for one in _values(v)]
    return [value] if isinstance(value, (torch.Tensor, bool, int, float, complex)) else []
