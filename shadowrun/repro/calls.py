"""A call as Python code: its tensors by the names of the schema, all else written out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shadowrun.replay.mirror import tensors_in
from shadowrun.repro.quoting import check_name, literal, quoted

if TYPE_CHECKING:
    from shadowrun.intercept.plan import OpPlan

__all__ = ["call_text", "named_inputs", "needs_layout", "result_text", "shown_inputs"]


def named_inputs(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The tensors and lists of tensors among the arguments, by their names in the schema."""
    names = [a.name for a in plan.func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return {name: _listed(value) for name, value in given.items() if any(True for _ in tensors_in((value,)))}


def call_text(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """``torch.ops.aten.sum.dim_IntList(x["self"], [1], dtype=torch.float32)``."""
    schema = plan.func._schema.arguments
    shown = [_argument(schema[i].name, value) for i, value in enumerate(args)]
    shown += [f"{name}={_argument(name, value)}" for name, value in kwargs.items()]
    return f"torch.ops.{plan.func}({', '.join(shown)})"


def result_text(plan: OpPlan, name: str) -> str:
    """The expression for a result: ``out[1]`` for ``output 1``, ``x["self"]`` for an argument that was written to.

    Raises:
        DataFileError: The operator has no such result.
    """
    place, _, index = check_name(plan, name).partition("[")
    item = f"[{index}" if index else ""
    if not place.startswith("output "):
        return f"x[{quoted(place)}]{item}"
    number = place.removeprefix("output ")
    return f"out{item}" if plan.n_returns == 1 else f"out[{number}]{item}"


def needs_layout(inputs: dict[str, Any]) -> bool:
    """Whether a plain copy would change how tensors lie in memory, or which of them share it."""
    tensors = [t for t in tensors_in(inputs.values()) if t.layout is torch.strided]
    memory = [t.untyped_storage().data_ptr() for t in tensors if t.numel()]
    return len(set(memory)) < len(memory) or not all(t.is_contiguous() for t in tensors)


def shown_inputs(inputs: dict[str, Any]) -> str:
    """``self f32[2, 3], other f32[3]``."""
    from shadowrun.numerics.form import meta

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


def _argument(name: str, value: Any) -> str:
    if any(True for _ in tensors_in((value,))):
        return f"x[{quoted(name)}]"
    return literal(value)
