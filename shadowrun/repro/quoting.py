"""What goes into a generated script: each text of a program or a file through one of these functions.

Scripts are run as soon as they are written, and the texts in them come from data files, which may be somebody else's.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.errors import DataFileError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shadowrun.intercept.plan import OpPlan

__all__ = ["check_name", "in_docstring", "literal", "mapping", "quoted"]

_OUTPUT = re.compile(r"output (0|[1-9]\d{0,3})(?:\[(?:0|[1-9]\d{0,8})\])?", re.ASCII)
_ITEM = re.compile(r"\[(?:0|[1-9]\d{0,8})\]\Z", re.ASCII)


def quoted(text: str) -> str:
    """A text as a literal of Python, in ASCII: no bidirectional mark or look-alike character shows as anything else."""
    found = ascii(str(text))
    return found if "'" in found[1:-1] or '"' in found else f'"{found[1:-1]}"'


def in_docstring(text: str) -> str:
    """A text as one line inside a docstring."""
    return text.encode("unicode_escape").decode("ascii").replace('"', "'")


def literal(value: Any) -> str:
    """A plain value, or a list of them, as code; a device is that of the call.

    What is no such value becomes a text that is no code.
    """
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, str):
        return ascii(str(value))
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{float(value)}")'
    if isinstance(value, complex) and not (math.isfinite(value.real) and math.isfinite(value.imag)):
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if value is None or value is Ellipsis or isinstance(value, _REPEATABLE):
        return repr(value)
    if isinstance(value, slice):
        return f"slice({', '.join(map(literal, (value.start, value.stop, value.step)))})"
    return f"<{type(value).__name__}>"


_REPEATABLE = (bool, int, float, complex, torch.dtype, torch.layout, torch.memory_format)
"""Types whose `repr` is code."""


def mapping(values: Mapping[str, str]) -> str:
    """A dictionary of names and texts as code."""
    return "{" + ", ".join(f"{quoted(k)}: {quoted(v)}" for k, v in values.items()) + "}"


def check_name(plan: OpPlan, name: Any) -> str:
    """The name of a result, as the recorder writes it: ``output 0``, ``output 1[2]``, ``self``, ``self[3]``.

    Args:
        plan: The operator.
        name: As the data file has it.

    Raises:
        DataFileError: No call of the operator gives a result of this name.
    """
    output = _OUTPUT.fullmatch(name) if isinstance(name, str) else None
    if output is not None and int(output[1]) < plan.n_returns:
        return str(name)
    if isinstance(name, str) and _ITEM.sub("", name) in {a.name for a in plan.func._schema.arguments}:
        return name
    raise DataFileError(
        f"The data file has a result {ascii(name)[:80]} of {plan.name}, which has none of that name: it is damaged, or "
        "was changed.",
        slug="data-file-corrupt",
    )
