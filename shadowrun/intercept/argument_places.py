"""What kernels of the CPU take as places in memory without a look: indices, sizes that have to fit each other, lengths.

Each table row is a family of operators and a look at its arguments before a call. An argument that is not known yet, in
a graph that has not run, is None and passes; it is looked at when the call is made.
"""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.intercept.torchapi import as_in_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Given = Mapping[str, Any]
    Look = Callable[[Given], Iterator[str]]

__all__ = ["has_places", "why_out_of_bounds"]


def has_places(name: str) -> bool:
    """Whether an operator such as ``aten::embedding_dense_backward`` is of a family that is looked at."""
    return bool(_looks(name))


def why_out_of_bounds(name: str, given: Given) -> str:
    """Why a call would read or write outside of its tensors; empty where nothing is known against it.

    Args:
        name: Of the operator, without its overload.
        given: Its arguments by name; None for what is not known yet.
    """
    with as_in_handler():  # a comparison must not see these operators
        return next((why for look in _looks(name) for why in look(given)), "")


@functools.lru_cache(maxsize=4096)
def _looks(name: str) -> tuple[Look, ...]:
    space, _, base = name.partition("::")
    if space != "aten":
        return ()
    return tuple(look for pattern, look in _FAMILIES.items() if re.fullmatch(pattern, base))


def _tensors(given: Given, *names: str) -> list[torch.Tensor] | None:
    """Dense tensors of these names; None if one of them is not known, or is another."""
    found = [given.get(name) for name in names]
    return found if all(isinstance(t, torch.Tensor) and t.layout is torch.strided for t in found) else None  # type: ignore[return-value]


def _is_inside(t: torch.Tensor, low: int, high: int) -> bool:
    """Whether all integers are in a range, its end not included; those of another class of tensors are not known."""
    if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.is_meta:
        return True
    return not t.numel() or (int(t.min()) >= low and int(t.max()) < high)


def _transform(given: Given) -> Iterator[str]:
    x, dims = given.get("self"), given.get("dim")
    if isinstance(x, torch.Tensor) and dims is not None:
        dims = list(dims) if isinstance(dims, (list, tuple)) else [dims]
        if len(set(dims)) < len(dims) or not all(type(d) is int and 0 <= d < x.dim() for d in dims):
            yield "dim is none of the tensor's"


def _embedding(given: Given) -> Iterator[str]:
    indices, n = given.get("indices"), given.get("num_weights")
    if isinstance(indices, torch.Tensor) and type(n) is int and not _is_inside(indices, 0, n):
        yield "indices has some that are not below num_weights"


_PER_CHANNEL: Final = ("weight", "bias", "running_mean", "running_var")
# Of each channel too; evaluation saves nothing.
_SAVED: Final = ("save_mean", "save_invstd", "save_var")


def _batch_norm(given: Given) -> Iterator[str]:
    x = given.get("input", given.get("self"))
    if not isinstance(x, torch.Tensor):
        return
    if x.dim() < 2:
        yield "it has no channels"
        return
    for key in (*_PER_CHANNEL, *_SAVED):
        t = given.get(key)
        if isinstance(t, torch.Tensor) and t.numel() != x.shape[1] and (t.numel() or key not in _SAVED):
            yield f"{key} has not one value for each channel"
    # Without statistics the kernel for evaluation reads those of address 0.
    training = given.get("training", given.get("train", False))
    statistics = [given.get(key) for key in ("running_mean", "running_var")]
    if training is False and not all(isinstance(t, torch.Tensor) for t in statistics):
        yield "it evaluates without running statistics"


def _attention(given: Given) -> Iterator[str]:
    found = _tensors(given, "key", "value")
    # The kernel for the CPU reads as many keys as there are values (pytorch/pytorch#193728).
    if found and found[0].shape[-2:-1] != found[1].shape[-2:-1]:
        yield "key and value have other lengths"


def _pooled(n_dims: int, *, back: bool) -> Look:
    """Pooling that gives the place of each maximum, and what undoes it."""

    def look(given: Given) -> Iterator[str]:
        found = _tensors(given, "grad_output" if back else "self", "indices")
        whole = given.get("self")
        plane = given.get("output_size")
        if back:
            plane = whole.shape[-n_dims:] if isinstance(whole, torch.Tensor) else None
        if found is None or not isinstance(plane, (list, tuple)) or not all(type(n) is int for n in plane):
            return
        pooled, indices = found
        if pooled.dim() not in (n_dims + 1, n_dims + 2):
            yield f"it has {pooled.dim()} dimensions"
        elif not all(map(_has_sizes(n_dims), given.items())):
            yield f"its sizes are not {n_dims}"
        elif pooled.shape != indices.shape:
            yield "indices have another shape than what they are of"
        elif not _is_inside(indices, 0, math.prod(plane)):
            yield "indices has some outside of its plane"
        elif back and isinstance(whole, torch.Tensor) and whole.shape[:-n_dims] != pooled.shape[:-n_dims]:
            yield "its tensors have other numbers of planes"

    return look


# How many sizes an argument may have, besides one for each dimension.
_LENGTHS: Final = {"kernel_size": (1,), "padding": (1,), "dilation": (1,), "stride": (0, 1), "output_size": ()}


def _has_sizes(n_dims: int) -> Callable[[tuple[str, Any]], bool]:
    def fits(item: tuple[str, Any]) -> bool:
        name, sizes = item
        return name not in _LENGTHS or not isinstance(sizes, (list, tuple)) or len(sizes) in (n_dims, *_LENGTHS[name])

    return fits


def _same_shape(*names: str) -> Look:
    def look(given: Given) -> Iterator[str]:
        found = _tensors(given, *names)
        if found and len({t.shape for t in found}) > 1:
            yield f"{' and '.join(names)} have other shapes"

    return look


def _padded(n_dims: int, *, back: bool) -> Look:
    def look(given: Given) -> Iterator[str]:
        padding = given.get("padding")
        if padding is not None and (not isinstance(padding, (list, tuple)) or len(padding) != 2 * n_dims):
            yield f"padding has not {2 * n_dims} numbers"
            return
        found = _tensors(given, "self", "grad_output") if back else None
        if found and padding and all(type(n) is int for n in padding):
            x, grad = found
            if x.dim() < n_dims + 1 or x.dim() != grad.dim():
                yield "its tensors have other dimensions"
                return
            wanted = list(x.shape)
            for k in range(n_dims):  # the last dimension comes first
                wanted[-1 - k] += padding[2 * k] + padding[2 * k + 1]
            if list(grad.shape) != wanted:
                yield "grad_output has not the shape of what was padded"

    return look


def _planes(n_dims: int) -> Look:
    def look(given: Given) -> Iterator[str]:
        found = _tensors(given, "grad_output", "self")
        if found:
            grad, x = found
            if grad.dim() != x.dim() or x.dim() <= n_dims or grad.shape[:-n_dims] != x.shape[:-n_dims]:
                yield "its tensors have other numbers of planes"

    return look


def _weight_norm(given: Given) -> Iterator[str]:
    found, dim = _tensors(given, "v", "g"), given.get("dim", 0)
    if found and type(dim) is int:
        v, g = found
        n = 1 if dim == -1 else v.shape[dim] if -v.dim() <= dim < v.dim() else -1
        if g.numel() != n or v.dtype is not g.dtype:
            yield "g has not one value for each row of v"


def _distances(given: Given) -> Iterator[str]:
    found = _tensors(given, "x1", "x2", "cdist", "grad")
    if found:
        x1, x2, distance, grad = found
        fits = min(x1.dim(), x2.dim()) >= 2 and x1.shape[-1] == x2.shape[-1]
        try:
            batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2]) if fits else ()  # type: ignore[no-untyped-call]
        except RuntimeError:
            fits = False
        if not fits or distance.shape != (*batch, x1.shape[-2], x2.shape[-2]) or grad.shape != distance.shape:
            yield "its tensors have shapes that do not fit"


def _pairs(given: Given) -> Iterator[str]:
    x = given.get("self")
    if isinstance(x, torch.Tensor) and x.dim() != 2:
        yield "self is no table"
    found = _tensors(given, "self", "grad", "pdist")
    if found and found[0].dim() == 2:
        n = found[0].shape[0] * (found[0].shape[0] - 1) // 2
        if any(t.shape != (n,) for t in found[1:]):
            yield "it has not one distance for each pair"


_MAX_LAYERS: Final = 10_000
_STATES: Final = ("grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "momentum_buffer_list", "state_sums")


def _optimizer(given: Given) -> Iterator[str]:
    parameters = given.get("self")
    if not isinstance(parameters, (list, tuple)):
        return
    for name in (*_STATES, "state_steps"):
        states = given.get(name)
        if not isinstance(states, (list, tuple)) or not states:
            continue
        if len(states) != len(parameters):
            yield f"{name} are not as many as parameters"
            return
        for p, s in zip(parameters, states, strict=True):
            if not isinstance(p, torch.Tensor) or not isinstance(s, torch.Tensor):
                continue
            if s.numel() != 1 if name == "state_steps" else (p.shape, p.dtype) != (s.shape, s.dtype):
                yield f"{name} have other shapes than parameters"
                return
            # Kernels walk over all of them as over one row of memory.
            if name != "state_steps" and p.stride() != s.stride():
                yield f"{name} lie in memory in another order than parameters"
                return


def _group_norm(given: Given) -> Iterator[str]:
    sizes = [given.get(name) for name in ("N", "C", "HxW", "group")]
    x = given.get("input")
    known = [n for n in sizes if type(n) is int and n >= 0]
    if not isinstance(x, torch.Tensor) or len(known) < len(sizes):
        return
    n, c, area, group = known
    fits = {"input": n * c * area, "grad_out": n * c * area, "mean": n * group, "rstd": n * group}
    fits |= {"weight": c, "bias": c}
    if not group or c % group:
        yield "channels are no multiple of groups"
    for name, numel in fits.items():
        t = given.get(name)
        if isinstance(t, torch.Tensor) and t.numel() != numel:
            yield f"{name} has not {numel} elements"


def _pivots(factor: str, pivots: str) -> Look:
    def look(given: Given) -> Iterator[str]:
        found = _tensors(given, factor, pivots)
        if not found or given.get("unpack_pivots") is False:
            return
        lu, p = found
        if lu.dim() < 2 or p.shape != (*lu.shape[:-2], min(lu.shape[-2:])):
            yield f"{pivots} have not the shape of those of {factor}"
        elif not _is_inside(p.abs(), 1, lu.shape[-2] + 1):
            yield f"{pivots} has some that are no row"

    return look


def _bags(given: Given) -> Iterator[str]:
    found = _tensors(given, "weight", "indices", "offsets")
    if not found:
        return
    weight, indices, offsets = found
    scale = given.get("per_sample_weights")
    if weight.dim() != 2 or indices.dim() != 1 or offsets.dim() != 1:
        yield "its tensors have other dimensions"
    elif not _is_inside(indices, 0, weight.shape[0]):
        yield "indices has some that are no row of weight"
    elif not _is_inside(offsets, 0, indices.numel() + 1) or bool((offsets.diff() < 0).any()):
        yield "offsets do not lead through indices"
    elif isinstance(scale, torch.Tensor) and scale.numel() != indices.numel():
        yield "per_sample_weights has not one value for each index"
    elif given.get("mode", 0) not in (0, 1, 2):
        yield "mode is none"


def _labels(given: Given) -> Iterator[str]:
    found = _tensors(given, "log_probs", "targets")
    if found:
        scores, labels = found
        if not scores.is_contiguous() or not labels.is_contiguous():
            yield "log_probs and targets are not contiguous"
        elif scores.dim() < 2 or not _is_inside(labels, 0, scores.shape[-1]):
            yield "targets has some that are no class"


def _packed(given: Given) -> Iterator[str]:
    found = _tensors(given, "data", "batch_sizes")
    if found:
        data, sizes = found
        is_one = sizes.dim() == 1 and sizes.dtype is torch.int64 and data.dim() > 0
        if not is_one or not _is_inside(sizes, 1, 1 << 62) or bool((sizes.diff() > 0).any()):
            yield "batch_sizes are no sizes of batches"
        elif int(sizes.sum()) != data.shape[0]:
            yield "batch_sizes are not as many as data"


def _layers(given: Given) -> Iterator[str]:
    n = given.get("num_layers")
    if type(n) is int and not 0 < n <= _MAX_LAYERS:
        yield f"num_layers is {n}"


def _chunks(given: Given) -> Iterator[str]:
    tensors, dim = given.get("tensors"), given.get("dim", 0)
    if not isinstance(tensors, (list, tuple)) or type(dim) is not int:
        return
    if any(isinstance(t, torch.Tensor) and not -t.dim() <= dim < t.dim() for t in tensors):
        yield "dim is none of each tensor's"


def _grouped(given: Given) -> Iterator[str]:
    for name in ("scale_a", "recipe_a", "scale_b", "recipe_b"):
        if isinstance(given.get(name), (list, tuple)) and not given[name]:
            yield f"{name} is empty"


# By a pattern of names without namespace and overload.
_FAMILIES: Final[dict[str, Look]] = {
    "_fft_(c2c|c2r|r2c)": _transform,
    "embedding_dense_backward": _embedding,
    r"\w*batch_norm\w*": _batch_norm,
    r"_?scaled_dot_product\w*attention\w*": _attention,
    r"(fractional_|adaptive_)?max_pool2d\w*_backward": _pooled(2, back=True),
    r"(fractional_|adaptive_)?max_pool3d\w*_backward": _pooled(3, back=True),
    "max_unpool2d": _pooled(2, back=False),
    "max_unpool3d": _pooled(3, back=False),
    "_(log_)?softmax_backward_data": _same_shape("grad_output", "output"),
    "_masked_softmax_backward": _same_shape("grad_output", "output", "mask"),
    **{f"(reflection|replication)_pad{n}d": _padded(n, back=False) for n in (1, 2, 3)},
    **{f"(reflection|replication)_pad{n}d_backward": _padded(n, back=True) for n in (1, 2, 3)},
    **{f"_adaptive_avg_pool{n}d_backward": _planes(n) for n in (2, 3)},
    "_weight_norm_interface": _weight_norm,
    "_cdist_backward": _distances,
    "_pdist_(forward|backward)": _pairs,
    "_fused_(adagrad|adam|adamw|sgd)_?": _optimizer,
    r"native_group_norm(_backward)?": _group_norm,
    "lu_unpack": _pivots("LU_data", "LU_pivots"),
    r"linalg_lu_solve\w*": _pivots("LU", "pivots"),
    "linalg_ldl_solve": _pivots("LD", "pivots"),
    "(_embedding_bag|_embedding_bag_forward_only)": _bags,
    "_ctc_loss(_backward)?": _labels,
    "_pad_packed_sequence": _packed,
    "(lstm|gru|rnn_tanh|rnn_relu)": _layers,
    "_chunk_cat": _chunks,
    "_scaled_grouped_mm_v2": _grouped,
}
