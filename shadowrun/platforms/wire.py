"""What a call becomes on its way to a worker process: plain values as they are, tensors as memory and its exact layout.

Memory is named once for each storage, and only the part that the call's tensors cover: what shares memory here shares
it there. How the memory gets across is the business of `channel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Region", "Unsendable", "decode", "encode"]

_ALIGNMENT = 64
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_NAMED = (torch.dtype, torch.layout, torch.memory_format)


class Unsendable(Exception):  # noqa: N818 - a reason, caught inside
    """A value that has no form for another process; the text says which."""


@dataclass(slots=True)
class Region:
    """Memory that a message has: the part of a storage that its tensors cover.

    Attributes:
        storage: Whose memory.
        low, high: The part, in bytes from the storage's begin.
    """

    storage: torch.UntypedStorage
    low: int
    high: int

    @property
    def size(self) -> int:
        """In bytes."""
        return self.high - self.low

    @property
    def address(self) -> int:
        """Where the part begins."""
        return self.storage.data_ptr() + self.low

    def raw(self) -> torch.Tensor:
        """The part as bytes."""
        return _empty(torch.uint8).set_(self.storage, self.low, (self.size,), (1,))


class _Regions:
    def __init__(self) -> None:
        self.found: list[Region] = []
        self._known: dict[int, int] = {}

    def add(self, t: torch.Tensor) -> int:
        size = t.element_size()
        low = int(t.storage_offset()) * size
        high = low + size * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))
        if not t.numel():
            low = high = 0
        # Kernels may choose by alignment: memory begins at the same place of a cache line.
        low -= low % _ALIGNMENT
        storage = t.untyped_storage()
        address = storage.data_ptr() if high else 0
        k = self._known.get(address)
        if k is None:
            k = self._known[address] = len(self.found)
            self.found.append(Region(storage, low, high))
        else:
            part = self.found[k]
            part.low, part.high = min(part.low, low), max(part.high, high)
        return k


def encode(message: Any) -> tuple[Any, list[Region]]:
    """A message as plain values, and the memory that they name by number.

    Args:
        message: Lists, tuples, dictionaries of text to values, tensors of the CPU, numbers, words of torch.

    Raises:
        Unsendable: It has a value of another kind.
    """
    regions = _Regions()
    return _encode(message, regions), regions.found


def _encode(value: Any, regions: _Regions) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in _TENSORS:
        return _encode_tensor(value, regions)
    if kind is list:
        return [_encode(v, regions) for v in value]
    if isinstance(value, tuple):
        return ("tuple", [_encode(v, regions) for v in value])
    if isinstance(value, dict):
        return {str(k): _encode(v, regions) for k, v in value.items()}
    if isinstance(value, _NAMED):
        return ("torch", str(value).removeprefix("torch."))
    if kind is torch.device:
        return ("device", str(value))
    if kind is torch.Generator:
        return ("generator", _encode_tensor(value.get_state(), regions))
    raise Unsendable(f"{kind.__name__} cannot be sent to another process")


def _encode_tensor(t: torch.Tensor, regions: _Regions) -> Any:
    if t.layout is not torch.strided or t.is_nested or t.is_quantized or t.device.type != "cpu":
        kind = "nested" if t.is_nested else "quantized" if t.is_quantized else str(t.layout).removeprefix("torch.")
        where = "" if t.device.type == "cpu" else f" of {t.device.type}"
        raise Unsendable(f"a {kind} tensor{where} cannot be sent to another process")
    k = regions.add(t)
    layout = (str(t.dtype)[6:], tuple(t.shape), t.stride(), t.storage_offset() if t.numel() else 0)
    return ("tensor", k, *layout, t.is_conj(), t.is_neg())


def decode(tree: Any, memory: Sequence[torch.Tensor], lows: Sequence[int]) -> Any:
    """Build the values again.

    Args:
        tree: What `encode` gave.
        memory: For each region its bytes, each a storage of its own.
        lows: For each region where it began in its storage.

    Raises:
        Unsendable: A word that this process's torch does not know.
    """
    if isinstance(tree, list):
        return [decode(v, memory, lows) for v in tree]
    if isinstance(tree, dict):
        return {k: decode(v, memory, lows) for k, v in tree.items()}
    if not isinstance(tree, tuple):
        return tree
    tag = tree[0]
    if tag == "tensor":
        _, k, dtype, shape, stride, offset, conj, neg = tree
        t = _empty(_word(dtype))
        begin = offset - lows[k] // t.element_size() if offset else 0
        t.set_(memory[k].untyped_storage(), begin, shape, stride)
        if conj:
            t = t.conj()
        return t._neg_view() if neg else t
    if tag == "tuple":
        return tuple([decode(v, memory, lows) for v in tree[1]])
    if tag == "torch":
        return _word(tree[1])
    if tag == "device":
        return torch.device(tree[1])
    generator = torch.Generator()
    generator.set_state(decode(tree[1], memory, lows).clone())
    return generator


def _word(name: str) -> Any:
    word = getattr(torch, name, None)
    if word is None:
        raise Unsendable(f"torch {torch.__version__} has no torch.{name}")
    return word


def _empty(dtype: torch.dtype) -> torch.Tensor:
    # The program may have set another default device.
    return torch.empty(0, dtype=dtype, device="cpu")
