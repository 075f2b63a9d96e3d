"""How a call travels to a worker process: plain values as they are, tensors as raw memory with their exact layout.

Memory is sent once for each storage, and only the part that the call's tensors cover: what shares memory here shares it
there. Nothing is pickled; `marshal` carries plain values only, and both ends are this Python.
"""

from __future__ import annotations

import marshal
import struct
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import socket

__all__ = ["Closed", "Unsendable", "receive", "send"]

_HEAD = struct.Struct("<QQ")
_ALIGNMENT = 64
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_NAMED = (torch.dtype, torch.layout, torch.memory_format)


class Closed(Exception):  # noqa: N818 - an end, not a failure
    """The other end is gone."""


class Unsendable(Exception):  # noqa: N818 - a reason, caught inside
    """A value that has no form for another process; the text says which."""


class _Storages:
    """The memory of a message: for each storage the bytes that its tensors cover."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.ranges: list[list[int]] = []
        self._known: dict[int, int] = {}

    def add(self, t: torch.Tensor) -> int:
        size = t.element_size()
        low = int(t.storage_offset()) * size
        high = low + size * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))
        if not t.numel():
            low = high = 0
        address = t.untyped_storage().data_ptr() if high else 0
        k = self._known.get(address)
        if k is None:
            k = self._known[address] = len(self.tensors)
            self.tensors.append(t)
            self.ranges.append([low, high])
        else:
            part = self.ranges[k]
            part[0], part[1] = min(part[0], low), max(part[1], high)
        return k

    def finish(self) -> None:
        # Kernels may choose by alignment: memory begins at the same place of a cache line.
        for part in self.ranges:
            part[0] -= part[0] % _ALIGNMENT


def _encode(value: Any, storages: _Storages) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in _TENSORS:
        return _encode_tensor(value, storages)
    if kind is list:
        return [_encode(v, storages) for v in value]
    if isinstance(value, tuple):
        return ("tuple", [_encode(v, storages) for v in value])
    if isinstance(value, dict):
        return {str(k): _encode(v, storages) for k, v in value.items()}
    if isinstance(value, _NAMED):
        return ("torch", str(value).removeprefix("torch."))
    if kind is torch.device:
        return ("device", str(value))
    if kind is torch.Generator:
        return ("generator", _encode_tensor(value.get_state(), storages))
    raise Unsendable(f"{kind.__name__} cannot be sent to another process")


def _encode_tensor(t: torch.Tensor, storages: _Storages) -> Any:
    if t.layout is not torch.strided or t.is_nested or t.is_quantized or t.device.type != "cpu":
        kind = "nested" if t.is_nested else "quantized" if t.is_quantized else str(t.layout).removeprefix("torch.")
        where = "" if t.device.type == "cpu" else f" of {t.device.type}"
        raise Unsendable(f"a {kind} tensor{where} cannot be sent to another process")
    k = storages.add(t)
    layout = (str(t.dtype)[6:], tuple(t.shape), t.stride(), t.storage_offset() if t.numel() else 0)
    return ("tensor", k, *layout, t.is_conj(), t.is_neg())


def _decode(value: Any, memory: list[torch.Tensor], starts: list[int]) -> Any:
    if isinstance(value, list):
        return [_decode(v, memory, starts) for v in value]
    if isinstance(value, dict):
        return {k: _decode(v, memory, starts) for k, v in value.items()}
    if not isinstance(value, tuple):
        return value
    tag = value[0]
    if tag == "tensor":
        _, k, dtype, shape, stride, offset, conj, neg = value
        t = torch.empty(0, dtype=getattr(torch, dtype))
        begin = offset - starts[k] // t.element_size() if offset else 0
        t.set_(memory[k].untyped_storage(), begin, shape, stride)
        if conj:
            t = t.conj()
        return t._neg_view() if neg else t
    if tag == "tuple":
        return tuple([_decode(v, memory, starts) for v in value[1]])
    if tag == "torch":
        return getattr(torch, value[1])
    if tag == "device":
        return torch.device(value[1])
    generator = torch.Generator()
    generator.set_state(_decode(value[1], memory, starts))
    return generator


def send(connection: socket.socket, message: Any) -> None:
    """Send a message: lists, tuples, dictionaries of text to values, tensors of the CPU, numbers, words of torch.

    Raises:
        Unsendable: It has a value of another kind; nothing was sent.
        OSError: The other end is gone, or does not read.
    """
    storages = _Storages()
    tree = _encode(message, storages)
    storages.finish()
    head = marshal.dumps((tree, storages.ranges))
    total = sum(high - low for low, high in storages.ranges)
    connection.sendall(_HEAD.pack(len(head), total) + head)
    for t, (low, high) in zip(storages.tensors, storages.ranges, strict=True):
        if high > low:
            raw = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage(), low, (high - low,), (1,))
            connection.sendall(raw.numpy())  # type: ignore[arg-type]


def receive(connection: socket.socket) -> Any:
    """Wait for a message, and build its values.

    Raises:
        Closed: The other end is gone.
        TimeoutError: The connection has a time limit, and it is over.
    """
    head = bytearray(_HEAD.size)
    _fill(connection, memoryview(head))
    n_tree, _ = _HEAD.unpack(head)
    text = bytearray(n_tree)
    _fill(connection, memoryview(text))
    tree, ranges = marshal.loads(text)  # noqa: S302 - our own child's words, and marshal calls nothing
    memory = []
    for low, high in ranges:
        raw = torch.empty(high - low, dtype=torch.uint8)
        if high > low:
            _fill(connection, memoryview(raw.numpy()))  # type: ignore[arg-type]
        memory.append(raw)
    return _decode(tree, memory, [low for low, _ in ranges])


def _fill(connection: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        try:
            n = connection.recv_into(view[done:])
        except ConnectionError as error:
            raise Closed from error
        if not n:
            raise Closed
        done += n
