"""Encoding of a call for a worker process, and comparison of operator signatures of two torch versions.

Plain values stay as they are; tensors become memory and its exact layout. Each storage is encoded once, and only the
part that the call's tensors cover: tensors that share memory here share it in the worker. `channel` moves the memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.strided import span
from shadowrun.torch_private import negated_view, schema_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "Plain",
    "Region",
    "Signature",
    "Unsendable",
    "decode",
    "encode",
    "find_operator",
    "signature",
    "signature_difference",
]

Signature = tuple[list[tuple[str, str, bool, bool, bool]], list[str]]
"""For each argument its name, type, whether it is by name only, has a default, is written to; types of the returns."""


def find_operator(name: str) -> Any:
    """The operator of this name (``aten::add.Tensor``), or None where this torch has none."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    except AttributeError:
        return None


def signature(operator: Any) -> Signature:
    """The signature of an operator, as plain values that two versions of torch can compare."""
    schema = schema_of(operator)
    arguments = [
        (a.name, _type(a), a.kwarg_only, a.has_default_value(), a.alias_info is not None and a.alias_info.is_write)
        for a in schema.arguments
    ]
    return arguments, [_type(r) for r in schema.returns]


def signature_difference(caller: Signature, worker: Signature, n_positional: int, named: Iterable[str]) -> str:
    """Why a call for one signature does not fit another; empty if it fits.

    Args:
        caller: The signature that the call was made for.
        worker: The signature of the operator that shall run it.
        n_positional: How many arguments the call has by position.
        named: The names of its others.
    """
    # Results are compared by position, so their number and kinds must be equal.
    if caller[1] != worker[1]:
        return f"it returns ({', '.join(worker[1])}), not ({', '.join(caller[1])})"
    named = set(named)
    by_name = {a[0]: a for a in worker[0]}
    for k, (name, kind, *_, written) in enumerate(caller[0]):
        given = k < n_positional or name in named
        # A version may have put an argument in between: by position a value would then reach another argument.
        other = worker[0][k] if k < n_positional and k < len(worker[0]) else by_name.get(name)
        # An argument that has its default on both sides says nothing about this call.
        if not given and not written:
            continue
        if other is None or other[0] != name or (k < n_positional and other[2]):
            return f"it has no argument {name!r} in that place"
        if other[1] != kind:
            return f"its argument {name!r} is {other[1]}, not {kind}"
        if other[4] != written:
            return f"it {'writes' if other[4] else 'does not write'} to its argument {name!r}"
    passed = {name for k, (name, *_) in enumerate(caller[0]) if k < n_positional} | named
    # What the older version has made up by default, the newer one may demand.
    missing = [name for name, _, _, has_default, _ in worker[0] if name not in passed and not has_default]
    return f"it also needs {', '.join(missing)}" if missing else ""


def _type(argument: Any) -> str:
    # Which integers may be symbolic differs between versions, and a replay has no symbolic ones.
    return str(argument.type).replace("SymInt", "int").replace("SymBool", "bool").replace("SymFloat", "float")


_ALIGNMENT = 64
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_STRIDED = torch.strided
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_NAMED = (torch.dtype, torch.layout, torch.memory_format)


class Unsendable(Exception):  # noqa: N818 - a reason, caught inside
    """A value that cannot be encoded for another process; the text says which."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A value without tensors or words of torch, encoded as it is: a walk over it would cost time in each call.

    Attributes:
        value: Numbers, text, None, and lists and tuples of them.
    """

    value: Any


@dataclass(slots=True)
class Region:
    """Memory of a message: the part of a storage that its tensors cover.

    Attributes:
        storage: The storage.
        low, high: The part, in bytes from the start of the storage.
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
        """Address of the first byte."""
        return self.storage.data_ptr() + self.low


class _Regions:
    def __init__(self) -> None:
        self.found: list[Region] = []
        self._known: dict[int, int] = {}

    def add(self, t: torch.Tensor) -> int:
        size = t.element_size()
        low = int(t.storage_offset()) * size
        if not t.numel():
            low = high = 0
        elif t.is_contiguous():
            high = low + t.nbytes
        else:
            high = low + size * span(t.shape, t.stride())
        # Kernels may branch on alignment: memory starts at the same offset in a cache line.
        low -= low % _ALIGNMENT
        storage = t.untyped_storage()
        # By address, not by object: two Python storages may stand for one memory. Empty tensors share one region.
        address = storage.data_ptr() if high else 0
        k = self._known.get(address)
        if k is None:
            k = self._known[address] = len(self.found)
            self.found.append(Region(storage, low, high))
        else:
            part = self.found[k]
            # Views of one storage are sent as one piece, so that they alias in the worker as they do here.
            part.low, part.high = min(part.low, low), max(part.high, high)
        return k


def encode(message: Any) -> tuple[Any, list[Region]]:
    """Encode a message as plain values, and the memory that they refer to by number.

    Args:
        message: Lists, tuples, dictionaries of text to values, tensors of the CPU, numbers, dtypes and layouts.

    Raises:
        Unsendable: It has a value of another kind.
    """
    regions = _Regions()
    return _encode(message, regions), regions.found


def _encode(value: Any, regions: _Regions) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    # By exact type: a subclass may answer operators by itself, and the worker does not have its class.
    if kind in _TENSORS:
        return _encode_tensor(value, regions)
    if kind is Plain:
        return ("plain", value.value)
    if kind is list:
        return [v if type(v) in _PLAIN else _encode(v, regions) for v in value]
    if isinstance(value, tuple):
        return ("tuple", [v if type(v) in _PLAIN else _encode(v, regions) for v in value])
    if isinstance(value, dict):
        return {str(k): _encode(v, regions) for k, v in value.items()}
    if isinstance(value, _NAMED):
        return ("torch", str(value).removeprefix("torch."))
    if kind is torch.device:
        return ("device", str(value))
    if kind is torch.Generator:
        # The state, not the seed: the generator may have drawn before.
        return ("generator", _encode_tensor(value.get_state(), regions))
    raise Unsendable(f"{kind.__name__} cannot be sent to another process")


def _encode_tensor(t: torch.Tensor, regions: _Regions) -> Any:
    if t.layout is not _STRIDED or t.is_nested or t.is_quantized or not t.is_cpu:
        kind = "nested" if t.is_nested else "quantized" if t.is_quantized else str(t.layout).removeprefix("torch.")
        where = "" if t.device.type == "cpu" else f" of {t.device.type}"
        raise Unsendable(f"a {kind} tensor{where} cannot be sent to another process")
    k = regions.add(t)
    offset = t.storage_offset() if t.numel() else 0
    return ("tensor", k, str(t.dtype)[6:], tuple(t.shape), t.stride(), offset, t.is_conj(), t.is_neg())


def decode(tree: Any, memory: Sequence[torch.UntypedStorage], lows: Sequence[int]) -> Any:
    """Rebuild the values of a message.

    Args:
        tree: What `encode` gave.
        memory: For each region its bytes.
        lows: For each region where it began in its storage.

    Raises:
        Unsendable: A word that this process's torch does not know.
    """
    kind = type(tree)
    if kind is list:
        return [v if type(v) in _PLAIN else decode(v, memory, lows) for v in tree]
    if kind is dict:
        return {k: decode(v, memory, lows) for k, v in tree.items()}
    if kind is not tuple:
        return tree
    tag = tree[0]
    if tag == "tensor":
        return _decode_tensor(tree, memory, lows)
    if tag == "plain":
        return tree[1]
    if tag == "tuple":
        return tuple([v if type(v) in _PLAIN else decode(v, memory, lows) for v in tree[1]])
    if tag == "torch":
        return _word(tree[1])
    if tag == "device":
        return torch.device(tree[1])
    generator = torch.Generator()
    generator.set_state(decode(tree[1], memory, lows).clone())
    return generator


def _decode_tensor(tree: tuple[Any, ...], memory: Sequence[torch.UntypedStorage], lows: Sequence[int]) -> torch.Tensor:
    _, k, dtype, shape, stride, offset, conj, neg = tree
    # A tensor like another costs half of `torch.empty`.
    t = torch.empty_like(_prototype(dtype))
    # The region begins at a cache line below the tensor, so the offset shifts by a whole number of elements.
    t.set_(memory[k], offset - lows[k] // t.element_size() if offset else 0, shape, stride)
    if conj:
        t = t.conj()
    return negated_view(t) if neg else t


@functools.cache
def _prototype(name: str) -> torch.Tensor:
    """A tensor without elements of this dtype."""
    return _empty(_word(name))


def _word(name: str) -> Any:
    word = getattr(torch, name, None)
    if word is None:
        raise Unsendable(f"torch {torch.__version__} has no torch.{name}")
    return word


def _empty(dtype: torch.dtype) -> torch.Tensor:
    # The program may have set another default device.
    return torch.empty(0, dtype=dtype, device="cpu")
