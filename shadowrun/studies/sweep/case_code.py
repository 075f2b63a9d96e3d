"""A case as Python code: its function by the public name, its tensors by the names of their arguments."""

from __future__ import annotations

import ast
import functools
import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.current_folder import in_empty_folder
from shadowrun.errors import UsageError
from shadowrun.repro.quoting import Code, code, dotted_name, joined, literal
from shadowrun.studies.sweep.case_programs import gradient, outs_for
from shadowrun.studies.sweep.cases import Part
from shadowrun.studies.sweep.inputs import copied, leaves

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shadowrun.studies.sweep.rebuild_case import RebuiltCase

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
ENTRY = next(entry for entry in op_db if [entry.name, entry.variant_test_name] == {})"""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Expression:
    """A case as code.

    Attributes:
        call: ``torch.nn.functional.pixel_shuffle(x["input"], 2)``.
        inputs: Tensors, and lists of them, by the names in that.
        results: Expression of each result, by name.
        setup: Lines at the top of the script.
        imports: Modules to import.
        before, after: Lines around the call.
        on_cpu: Inputs that stay on the CPU.
    """

    call: Code
    inputs: Mapping[str, Any]
    results: Mapping[str, Code]
    setup: tuple[Code, ...] = ()
    imports: tuple[str, ...] = ()
    before: tuple[Code, ...] = ()
    after: tuple[Code, ...] = ()
    on_cpu: tuple[str, ...] = ()

    def for_spec(self) -> dict[str, Any]:
        """The same for a `ScriptSpec`."""
        return {
            "inputs": dict(self.inputs),
            "results": self.results,
            "setup": self.setup,
            "imports": self.imports,
            "lines": (*self.before, code("out = {}", self.call), *self.after),
            "on_cpu": self.on_cpu,
        }


def expression_of(rebuilt: RebuiltCase, *, whole: bool) -> Expression:
    """Translate a case into code.

    Args:
        rebuilt: The case.
        whole: Run it on the CPU to learn its results; if false, the script compares no results.

    Raises:
        UsageError: An argument has no text, or the gradient is of a function of the result.
    """
    part, sample = rebuilt.case.part, rebuilt.sample
    inplace = part in (Part.INPLACE, Part.STRIDED_INPLACE)
    function, setup, imports = _function(rebuilt.entry, inplace=inplace)
    writer = _Writer()
    first = [] if "::" in rebuilt.case.operator else [writer.text("input", sample.input)]
    places = [writer.text(f"arg{i}", value) for i, value in enumerate(sample.args, start=1)]
    named = [
        code("{}={}", dotted_name(name), writer.text(name, value)) for name, value in (sample.kwargs or {}).items()
    ]
    # Before `out` is added, which is no input that an in-place operator could write to.
    inputs = dict(writer.inputs)
    expected: Any = None
    if whole or part in (Part.OUT, Part.BACKWARD):
        expected = _run_on_cpu(rebuilt, grad=part is Part.BACKWARD, inplace=inplace)
    if part is Part.OUT:
        # As in `programs`: samples of odd numbers get an empty tensor.
        outs = outs_for(expected, resized=rebuilt.case.sample % 2 == 1)
        named.append(code("out={}", writer.text("out", outs)))
    call = code("{}({})", function, joined([*first, *places, *named]))
    stay = tuple(["input", *(f"arg{i}" for i in range(1, 9))][place] for place in sample.stays)
    expression = Expression(call, writer.inputs, _result_paths(expected, code("out")), setup, imports, on_cpu=stay)
    if part is Part.BACKWARD:
        return _with_gradients(expression, rebuilt, writer.given, expected)
    written = {name: value for name, value in inputs.items() if inplace or "::" in rebuilt.case.operator}
    if part is Part.OUT:
        written = {"out": outs}
    results = {name: text for key, value in written.items() for name, text in _tensor_names(key, value)}
    return replace(expression, results={**expression.results, **results} or {"output 0": code("out")})


def _with_gradients(forward: Expression, rebuilt: RebuiltCase, given: Mapping[str, Any], expected: Any) -> Expression:
    sample = rebuilt.sample
    if sample.process is not None and sample.process(expected) is not expected:
        raise UsageError(
            f"{rebuilt.case} takes the gradient of a function of the result that is not part of torch: no script can "
            "be written for it.",
            slug="no-repro",
        )
    results = _result_paths(expected, code("out"))
    tensors = {
        name: t for name, t in zip(results, _result_values(expected), strict=True) if isinstance(t, torch.Tensor)
    }
    outs = {name: t for name, t in tensors.items() if t.requires_grad}
    gradients = {f"gradient of {name}": gradient(t) for name, t in outs.items()}
    given_gradients = [code("x[{}]", name) for name in gradients]
    wanted = {
        text: name
        for key, value in given.items()
        for (name, text), t in zip(_tensor_names(key, value), leaves(value), strict=True)
        if t.requires_grad
    }
    return replace(
        forward,
        inputs={**forward.inputs, **gradients},
        before=(code("torch.set_grad_enabled(True)"), *(code("{}.requires_grad_()", text) for text in wanted)),
        after=(code("torch.autograd.backward({}, {})", [results[name] for name in outs], given_gradients),),
        results={f"gradient of {name}": code("{}.grad", text) for text, name in wanted.items()},
    )


@in_empty_folder()
def _run_on_cpu(rebuilt: RebuiltCase, *, grad: bool, inplace: bool) -> Any:
    x, args, kwargs = copied(rebuilt.sample, _CPU, grad=grad)
    function = rebuilt.entry.inplace_variant if inplace else getattr(rebuilt.entry, "op", rebuilt.entry)
    # As before each case of a sweep: a random function must draw the same numbers.
    torch.manual_seed(0)
    return function(x, *args, **kwargs)


def _function(entry: Any, *, inplace: bool) -> tuple[Code, tuple[Code, ...], tuple[str, ...]]:
    """Expression of the function, setup lines, modules to import."""
    own = getattr(entry, "operator", None)  # of a recorded call
    function = own if own is not None else entry.inplace_variant if inplace else entry.op
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return dotted_name(f"torch.ops.{function}"), (), ()
    name = _public_names().get(id(function))
    if name is not None:
        return dotted_name(name), (), ("operator",) if name.startswith("operator.") else ()
    setup = code(_DATABASE, [entry.name, entry.variant_test_name])
    return code("ENTRY.inplace_variant") if inplace else code("ENTRY.op"), (setup,), ()


@functools.cache
def _public_names() -> dict[int, str]:
    """Names of public functions by `id`; the first module of `_MODULES` that has a function names it."""
    names: dict[int, str] = {}
    for prefix, module in _MODULES:
        for name, value in vars(module).items():
            if callable(value) and not isinstance(value, type):
                # By identity: `torch.linalg.norm` and `torch.norm` have one name and are two functions.
                names.setdefault(id(value), f"{prefix}.{name}")
    for name in dir(torch.Tensor):  # `vars` has no inherited methods
        names.setdefault(id(getattr(torch.Tensor, name, None)), f"torch.Tensor.{name}")
    return names


class _Writer:
    """Translates arguments; tensors, and lists of tensors only, become named inputs of the script.

    Attributes:
        given: These inputs, by name.
        inputs: The same, detached.
    """

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.inputs: dict[str, Any] = {}

    def text(self, name: str, value: Any) -> Code:
        """``x["input"]``, ``2``, ``[x["arg1[0]"], 3]``.

        Raises:
            UsageError: It has no literal.
        """
        if isinstance(value, torch.Tensor) or _is_list_of_tensors(value):
            self.given[name] = value
            self.inputs[name] = [t.detach() for t in value] if isinstance(value, (list, tuple)) else value.detach()
            return code("tuple(x[{}])", name) if isinstance(value, tuple) else code("x[{}]", name)
        if isinstance(value, (list, tuple)) and any(True for _ in leaves(value)):
            inner = [self.text(f"{name}[{i}]", v) for i, v in enumerate(value)]
            return literal(inner) if isinstance(value, list) else code("({},)", joined(inner))
        if isinstance(value, dict) and any(True for _ in leaves(value)):
            return literal({k: self.text(f"{name}[{k}]", v) for k, v in value.items()})
        # A numpy number, whose `repr` names numpy.
        text = literal(value.item() if hasattr(value, "item") and not isinstance(value, torch.Tensor) else value)
        try:  # the script is executed: text that is no expression must not get into it
            ast.parse(text, mode="eval")
        except SyntaxError:
            raise UsageError(
                f"The argument {name} is a {type(value).__name__}, which has no text: no script can be written.",
                slug="no-repro",
            ) from None
        return text


def _is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(v, torch.Tensor) for v in value)


def _tensor_names(name: str, value: Any) -> list[tuple[str, Code]]:
    """Names and expressions of the tensors of an input."""
    if isinstance(value, torch.Tensor):
        return [(name, code("x[{}]", name))]
    return [(f"{name}[{i}]", code("x[{}][{}]", name, i)) for i in range(len(value))]


def _result_paths(value: Any, text: Code) -> dict[str, Code]:
    """Names and expressions of all tensors and numbers in nested results."""
    if isinstance(value, (list, tuple)):
        return {k: v for i, one in enumerate(value) for k, v in _result_paths(one, code("{}[{}]", text, i)).items()}
    shown = value is not None and isinstance(value, (torch.Tensor, bool, int, float, complex))
    return {str(text).replace("out", "output", 1): text} if shown else {}


def _result_values(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [one for v in value for one in _result_values(v)]
    return [value] if isinstance(value, (torch.Tensor, bool, int, float, complex)) else []
