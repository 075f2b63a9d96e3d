"""An operator call as Python code: tensors by the names of the schema, other arguments as literals."""

from __future__ import annotations

from keyword import iskeyword
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.numerics.form import meta
from shadowrun.replay.copies import tensors_in
from shadowrun.repro.quoting import Code, check_name, code, dotted_name, joined, literal
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shadowrun.intercept.plan import OpPlan

__all__ = [
    "named_inputs",
    "needs_layout",
    "result_text",
    "returned_arguments",
    "script_call",
    "shown_inputs",
]


def named_inputs(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The tensors and lists of tensors among the arguments, by their names in the schema."""
    names = [a.name for a in schema_of(plan.func).arguments]
    # Not strict: the last arguments may be left to their defaults.
    given = dict(zip(names, args, strict=False)) | kwargs
    return {name: _listed(value) for name, value in given.items() if any(True for _ in tensors_in((value,)))}


def script_call(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], results: Iterable[str]) -> dict[str, Any]:
    """A call for a `ScriptSpec`: operator, inputs, lines, results, and arguments on the CPU.

    Args:
        plan: The operator.
        args: Its arguments.
        kwargs: Those by name.
        results: Names of the results that the script looks at.
    """
    inputs = named_inputs(plan, args, kwargs)
    return {
        "operator": plan.name,
        "inputs": inputs,
        "lines": (code("out = {}", call_text(plan, args, kwargs)),),
        "results": {name: result_text(plan, name) for name in results},
        "on_cpu": tuple(name for name in plan.on_cpu if name in inputs),
    }


def call_text(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Code:
    """``torch.ops.aten.sum.dim_IntList(x["self"], [1], dtype=torch.float32)``."""
    schema = schema_of(plan.func).arguments
    given = [_argument(schema[i].name, value) for i, value in enumerate(args)]
    given += [code("{}={}", dotted_name(name), _argument(name, value)) for name, value in kwargs.items()]
    packet, _, overload = f"torch.ops.{plan.func}".rpartition(".")
    # `random_.from`: the overload is a word of Python.
    called = (
        code("getattr({}, {})", dotted_name(packet), overload)
        if iskeyword(overload)
        else code("{}.{}", *map(dotted_name, (packet, overload)))
    )
    return code("{}({})", called, joined(given))


def result_text(plan: OpPlan, name: str) -> Code:
    """The expression for a result: ``out[1]`` for ``output 1``, ``x["self"]`` for an argument that was written to.

    Raises:
        DataFileError: The operator has no such result.
    """
    place, _, index = check_name(plan, name).partition("[")
    item = code("[{}]", int(index.removesuffix("]"))) if index else code("")
    if not place.startswith("output "):
        return code("x[{}]{}", place, item)
    return code("out{}", item) if plan.n_returns == 1 else code("out[{}]{}", int(place.split()[1]), item)


def returned_arguments(plan: OpPlan) -> dict[str, Code]:
    """Expressions for results that should be an argument that the call wrote to, by the argument's name."""
    schema, expressions = schema_of(plan.func), {}
    for i, value in enumerate(schema.returns):
        info = value.alias_info
        for a in schema.arguments:
            given = a.alias_info if str(a.type) == "Tensor" else None
            # A result whose alias set is that of a written argument is that argument, by the schema.
            if info is not None and given is not None and given.is_write and given.before_set & info.before_set:
                expressions[a.name] = code("out") if plan.n_returns == 1 else code("out[{}]", i)
    return expressions


def needs_layout(inputs: Mapping[str, Any]) -> bool:
    """Whether a plain copy would change the strides of tensors, or which of them share memory."""
    tensors = [t for t in tensors_in(inputs.values()) if t.layout is torch.strided]
    # Empty tensors have no memory, and all of them the address 0.
    memory = [t.untyped_storage().data_ptr() for t in tensors if t.numel()]
    return len(set(memory)) < len(memory) or not all(t.is_contiguous() for t in tensors)


def shown_inputs(inputs: Mapping[str, Any]) -> str:
    """``self f32[2, 3], other f32[3]``."""

    def one(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return str(meta(value))
        if isinstance(value, list):
            more = f", {len(value) - 3} more" if len(value) > 3 else ""
            return f"[{', '.join(map(one, value[:3]))}{more}]"
        return str(value)

    return ", ".join(f"{name} {one(value)}" for name, value in inputs.items())


def _listed(value: Any) -> Any:
    return [_listed(v) for v in value] if isinstance(value, (list, tuple)) else value


def _argument(name: str, value: Any) -> Code:
    return code("x[{}]", name) if any(True for _ in tensors_in((value,))) else literal(value)
