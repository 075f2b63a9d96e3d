"""How a value gets into a script: `literal` quotes it, in ASCII, unless this module made code of it before.

Scripts run as soon as they are written, and their texts come from data files, which may be an attacker's. The template
environment passes every value that it inserts through `literal`, so that a text becomes code only by a function of
this module.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.errors import DataFileError
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import fx

    from shadowrun.intercept.plan import OpPlan

__all__ = [
    "Code",
    "check_name",
    "code",
    "dotted_name",
    "graph_function",
    "in_comment",
    "in_docstring",
    "joined",
    "literal",
]

_OUTPUT = re.compile(r"output (0|[1-9]\d{0,3})(?:\[(?:0|[1-9]\d{0,8})\])?", re.ASCII)
# Python decodes a file as a comment in its first two lines says (PEP 263), and then reads that comment again.
_DECLARATION = re.compile(r"(?<=coding)(?=[:=])")
_ITEM = re.compile(r"\[(?:0|[1-9]\d{0,8})\]\Z", re.ASCII)
# Types whose `repr` is code.
_REPEATABLE = (bool, int, float, complex, torch.dtype, torch.layout, torch.memory_format)


class Code(str):
    """Text that is inserted as it is. Only this module makes one (a test searches for others)."""

    __slots__ = ()


def literal(value: Any) -> Code:
    """A plain value, or a list or mapping of them, as code; a device becomes that of the call.

    A value of any other type becomes a text that does not compile.
    """
    if isinstance(value, Code):
        return value
    # A tuple becomes a list: operators take both, and a text needs one form.
    if isinstance(value, (list, tuple)):
        return Code(f"[{', '.join(map(literal, value))}]")
    if isinstance(value, dict):
        return Code("{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}")
    # The script chooses the device of each side itself.
    if isinstance(value, torch.device):
        return Code("device")
    if isinstance(value, str):
        # In ASCII no bidirectional mark or look-alike character hides what the text is.
        quoted = ascii(str(value))
        return Code(quoted if "'" in quoted[1:-1] or '"' in quoted else f'"{quoted[1:-1]}"')
    if isinstance(value, float) and not math.isfinite(value):
        return Code(f'float("{float(value)}")')
    if isinstance(value, complex) and not (math.isfinite(value.real) and math.isfinite(value.imag)):
        return Code(f"complex({literal(value.real)}, {literal(value.imag)})")
    if value is None or value is Ellipsis or isinstance(value, _REPEATABLE):
        return Code(repr(value))
    if isinstance(value, slice):
        return Code(f"slice({', '.join(map(literal, (value.start, value.stop, value.step)))})")
    # No `repr` of an unknown type: it is text from a data file, which would run as code.
    return Code(f"<{type(value).__name__}>")


def code(pattern: str, *values: Any, **named: Any) -> Code:
    """Code with values in it: ``code("x[{}]", name)``.

    Args:
        pattern: For `str.format`; a constant of the source, never a text that was computed.
        values: Put in its place as literals, unless they are code.
        named: The same by name.
    """
    return Code(pattern.format(*map(literal, values), **{k: literal(v) for k, v in named.items()}))


def joined(values: Iterable[Any], separator: str = ", ") -> Code:
    """Literals and code in a row."""
    return Code(separator.join(map(literal, values)))


def dotted_name(name: str) -> Code:
    """A name such as ``torch.ops.aten.add.Tensor``, as code.

    Raises:
        ValueError: It has other characters than a name of Python.
    """
    if not name.isascii() or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{ascii(name)[:200]} is no name")
    return Code(name)


def in_docstring(text: str) -> Code:
    """A text as one line inside a docstring."""
    return Code(text.encode("unicode_escape").decode("ascii").replace('"', "'"))


def in_comment(text: str) -> Code:
    """A text as one line behind ``#``, which does not declare an encoding."""
    return Code(_DECLARATION.sub(" ", in_docstring(text)))


def graph_function(module: fx.GraphModule) -> Code:
    """A graph as a function of its inputs: `forward` without ``self`` and without the lines that free memory.

    The names in a graph from a file are checked where it is read (`shadowrun.compiled.graph_text`).
    """
    # fx appends `;  x = None` to free memory, which a reader of the script does not need.
    source = re.sub(r";  (?:\w+ = )+None[^\n]*", "", module.graph.python_code("self").src)
    source = re.sub(r"def forward\(self(?:, )?", "def graph(", source)
    return Code("\n".join(line for line in source.strip().splitlines() if line.strip()))


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
    if isinstance(name, str) and _ITEM.sub("", name) in {a.name for a in schema_of(plan.func).arguments}:
        return name
    raise DataFileError(
        f"The data file has a result {ascii(name)[:80]} of {plan.name}, which has none of that name: it is damaged, or "
        "was changed.",
        slug="data-file-corrupt",
    )
