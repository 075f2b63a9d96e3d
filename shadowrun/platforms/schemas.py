"""Whether an operator of this torch and of a worker's other torch can be called alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Form", "difference", "find", "form"]

Form = tuple[list[tuple[str, str, bool, bool, bool]], list[str]]
"""For each argument its name, type, whether it is by name only, has a default, is written to; types of the returns."""


def find(name: str) -> Any:
    """The operator of this name (``aten::add.Tensor``), or None where this torch has none."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    except AttributeError:
        return None


def form(operator: Any) -> Form:
    """What two versions of an operator must have in common, as plain values."""
    schema = operator._schema
    arguments = [
        (a.name, _type(a), a.kwarg_only, a.has_default_value(), a.alias_info is not None and a.alias_info.is_write)
        for a in schema.arguments
    ]
    return arguments, [_type(r) for r in schema.returns]


def difference(theirs: Form, mine: Form, n_positional: int, named: Iterable[str]) -> str:
    """Why a call that is written for one form does not fit another; empty where it does.

    Args:
        theirs: The form that the call is written for.
        mine: The form that it shall be given to.
        n_positional: How many arguments the call has by position.
        named: The names of its others.
    """
    if theirs[1] != mine[1]:
        return f"it returns ({', '.join(mine[1])}), not ({', '.join(theirs[1])})"
    named = set(named)
    by_name = {a[0]: a for a in mine[0]}
    for k, (name, kind, *_, written) in enumerate(theirs[0]):
        given = k < n_positional or name in named
        other = mine[0][k] if k < n_positional and k < len(mine[0]) else by_name.get(name)
        if not given and not written:
            continue
        if other is None or other[0] != name or (k < n_positional and other[2]):
            return f"it has no argument {name!r} in that place"
        if other[1] != kind:
            return f"its argument {name!r} is {other[1]}, not {kind}"
        if other[4] != written:
            return f"it {'writes' if other[4] else 'does not write'} to its argument {name!r}"
    passed = {name for k, (name, *_) in enumerate(theirs[0]) if k < n_positional} | named
    lacking = [name for name, _, _, has_default, _ in mine[0] if name not in passed and not has_default]
    return f"it also needs {', '.join(lacking)}" if lacking else ""


def _type(argument: Any) -> str:
    # Which of the whole numbers may be symbolic changes from version to version, and a replay has none.
    return str(argument.type).replace("SymInt", "int").replace("SymBool", "bool").replace("SymFloat", "float")
