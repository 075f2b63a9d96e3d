"""Plain values as JSON, as stored next to tensors in captured inputs. Decoding runs no code from the file."""

from __future__ import annotations

from typing import Any

__all__ = ["NotStorable", "decode", "encode"]


class NotStorable(Exception):  # noqa: N818 - a reason, caught inside
    """A value that captured inputs cannot hold."""


def encode(value: Any) -> Any:
    """A number, text or constant of torch as JSON; a type that JSON lacks becomes ``{kind: content}``.

    Raises:
        NotStorable: The value has another type; the text is its name.
    """
    import torch

    # Exact types: `numpy.float64` is a float too, and `weights_only=True` refuses to load it.
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is complex:
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    raise NotStorable(type(value).__name__)


def decode(kind: str, content: Any) -> Any:
    """The value of ``{kind: content}``.

    Raises:
        ValueError: The kind is unknown, or torch has no such constant.
    """
    import torch

    if kind == "complex":
        return complex(*content)
    if kind == "device":
        return torch.device(content)
    if kind == "torch":
        # Not `getattr`: torch has a module `__getattr__`, which imports submodules by name.
        found = vars(torch).get(content)
        if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            return found
    raise ValueError(kind)
