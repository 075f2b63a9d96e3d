"""Private attributes of tensors and operators that layers below `intercept` need, each wrapped once.

`intercept.torchapi` and `platforms.torchplatform` wrap the private functions. `tests/test_layering.py` finds private
attributes in any other module.
"""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.torch_versions import need, optional

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "destroy_library",
    "has_hooks",
    "is_distributed",
    "is_zero_tensor",
    "local_part",
    "negated_view",
    "schema_of",
    "sizes_of_nested",
    "sparse_parts",
    "version_of",
]

need(
    *("torch.Tensor._is_zerotensor", "torch.Tensor._neg_view", "torch.Tensor._version"),
    "torch.ops.aten.add.Tensor._schema",
)

# The wrappers are descriptors and getters in C: a call of one takes no frame of Python. All seen on 2.11 to 2.15.

schema_of: Callable[[Any], torch.FunctionSchema] = attrgetter("_schema")
"""Schema of an operator; other callables raise AttributeError."""

is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
"""Whether the tensor has no memory at all (autograd's symbolic zeros). Reading its memory is a segmentation fault."""

negated_view: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor._neg_view
"""The tensor with its negative bit flipped, on the same memory."""

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Number of writes to the tensor's memory by operators. Tensors of inference mode have none, and raise RuntimeError."""

destroy_library: Callable[[Any], None] = optional(
    "torch.library.Library._destroy", lambda _: None, "kernels of shadowrun's go with their library's last reference"
)
"""Unregister the kernels of a `torch.library.Library` at once."""


def is_distributed(kind: type) -> bool:
    """Whether a type of tensors is DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # not imported: it takes a second
    return module is not None and issubclass(kind, module.DTensor)


def local_part(t: Any) -> torch.Tensor:
    """The tensor of this rank in a DTensor; `to_local` would call autograd. Seen on 2.11 to 2.15."""
    part: torch.Tensor = t._local_tensor
    return part


def has_hooks(t: torch.Tensor) -> bool:
    """Whether `Tensor.register_hook` was called on the tensor."""
    return bool(t._backward_hooks)


def sparse_parts(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a COO tensor, coalesced or not, on the tensor's own memory."""
    return t._indices(), t._values()


def sizes_of_nested(t: Any) -> list[torch.Tensor]:
    """The tensors with the sizes, strides and offsets of the parts of a strided nested tensor."""
    return [t._nested_tensor_size(), t._nested_tensor_strides(), t._nested_tensor_storage_offsets()]
