"""Plain values as JSON: what files of ours hold beside tensors. Reading them runs nothing of their writer's."""

from __future__ import annotations

from typing import Any

__all__ = ["Unkeepable", "decode", "encode"]


class Unkeepable(Exception):  # noqa: N818 - a reason, caught inside
    """A value that no such file can hold."""


def encode(value: Any) -> Any:
    """A number, a text or a constant of torch; what JSON lacks, as a dictionary with one key that tells its kind.

    Raises:
        Unkeepable: It is something else; the text is its type.
    """
    import torch

    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is complex:
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    raise Unkeepable(type(value).__name__)


def decode(kind: str, content: Any) -> Any:
    """What the one entry of such a dictionary stands for.

    Raises:
        ValueError: There is no such kind, or torch has no such constant.
    """
    import torch

    if kind == "complex":
        return complex(*content)
    if kind == "device":
        return torch.device(content)
    if kind == "torch":
        # Not `getattr`, for which torch imports modules.
        found = vars(torch).get(content)
        if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            return found
    raise ValueError(kind)
