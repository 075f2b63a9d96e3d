"""What kernels of the CPU take as places in memory without a look: indices, sizes that have to fit each other, lengths.

Each table row is a family of operators and a look at its arguments before a call. An argument that is not known yet, in
a graph that has not run, is None and passes; it is looked at when the call is made.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.intercept.torchapi import as_in_handler
from shadowrun.intercept.untrusted import backward_shapes, result_shapes, sequence_lengths
from shadowrun.intercept.untrusted.argument_checks import integers, is_inside, overlaps_itself, tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.intercept.untrusted.argument_checks import ArgumentCheck, NamedArguments

__all__ = ["has_bounds_check", "why_out_of_bounds"]


def has_bounds_check(name: str) -> bool:
    """Whether an operator such as ``aten::embedding_dense_backward`` is of a family that is looked at."""
    return bool(_checks_of(name))


def why_out_of_bounds(name: str, given: NamedArguments) -> str:
    """Why a call would read or write outside of its tensors; empty where nothing is known against it.

    Args:
        name: Of the operator, without its overload.
        given: Its arguments by name; None for what is not known yet.
    """
    try:
        with as_in_handler():  # a comparison must not see these operators
            return next((why for check in _checks_of(name) for why in check(given)), "")
    except MemoryError:
        raise
    except Exception as error:  # complex numbers as indices, sizes below 0
        return f"it has arguments of another kind ({' '.join(str(error).split())[:200]})"


@functools.lru_cache(maxsize=4096)
def _checks_of(name: str) -> tuple[ArgumentCheck, ...]:
    space, _, base = name.partition("::")
    if name == "prims::inductor_lookup_seed":
        return (_seed,)
    if space != "aten":
        return ()
    families = (*_FAMILIES.items(), *sequence_lengths.FAMILIES.items(), *result_shapes.FAMILIES.items())
    checks = [check for pattern, check in families if re.fullmatch(pattern, base)]
    if backward_shapes.has_forward(base):
        checks.append(functools.partial(backward_shapes.unlike_forward, base))
    return tuple(checks)


def _descends(t: torch.Tensor) -> bool:
    return any(b < a for a, b in itertools.pairwise(integers(t)))


def _is_dense(t: torch.Tensor) -> bool:
    """Whether a tensor is contiguous in one of the formats of memory."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.is_contiguous() or (t.dim() in formats and t.is_contiguous(memory_format=formats[t.dim()]))


def _transform(given: NamedArguments) -> Iterator[str]:
    x, dims = given.get("self"), given.get("dim")
    if isinstance(x, torch.Tensor) and dims is not None:
        dims = list(dims) if isinstance(dims, (list, tuple)) else [dims]
        if len(set(dims)) < len(dims) or not all(type(d) is int and 0 <= d < x.dim() for d in dims):
            yield "dim is none of the tensor's"
            return
    size = given.get("last_dim_size")
    # Its kernel takes any whose half fits either way, and then transforms more than the result has room for.
    if isinstance(x, torch.Tensor) and dims and type(size) is int and x.shape[dims[-1]] != size // 2 + 1:
        yield "last_dim_size is not that of its spectrum"


def _embedding(given: NamedArguments) -> Iterator[str]:
    indices, n = given.get("indices"), given.get("num_weights")
    if isinstance(indices, torch.Tensor) and type(n) is int and not is_inside(indices, 0, n):
        yield "indices has some that are not below num_weights"


def _gathered(given: NamedArguments) -> Iterator[str]:
    x, index, dim = given.get("self"), given.get("index"), given.get("dim")
    if not isinstance(x, torch.Tensor) or not isinstance(index, torch.Tensor) or type(dim) is not int:
        return
    n = 1 if not x.dim() else x.shape[dim] if -x.dim() <= dim < x.dim() else 0
    if not is_inside(index, 0, n):
        yield "index has some that are no place of self"


_PER_CHANNEL: Final = ("weight", "bias", "running_mean", "running_var")
# Of each channel too; evaluation saves nothing.
_SAVED: Final = ("save_mean", "save_invstd", "save_var")


def _batch_norm(given: NamedArguments) -> Iterator[str]:
    x = given.get("input", given.get("self"))
    if not isinstance(x, torch.Tensor):
        return
    if x.dim() < 2:
        yield "it has no channels"
        return
    training = next((given[key] for key in ("training", "train", "update") if key in given), False)
    for key in (*_PER_CHANNEL, *_SAVED):
        t = given.get(key)
        is_saved = key not in _SAVED or training is not False
        if isinstance(t, torch.Tensor) and t.numel() != x.shape[1] and (t.numel() or is_saved):
            yield f"{key} has not one value for each channel"
    # Without statistics the kernel for evaluation reads those of address 0.
    statistics = [given.get(key) for key in ("running_mean", "running_var")]
    if training is False and not all(isinstance(t, torch.Tensor) for t in statistics):
        yield "it evaluates without running statistics"


def _pooled(n_dims: int, *, back: bool) -> ArgumentCheck:
    """Pooling that gives the place of each maximum, and what undoes it."""

    def check(given: NamedArguments) -> Iterator[str]:
        found = tensors(given, "grad_output" if back else "self", "indices")
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
        elif back and not _is_dense(indices):
            yield "indices lie in memory in an order that no pooling gives them"
        elif not is_inside(indices, 0, math.prod(plane)):
            yield "indices has some outside of its plane"
        elif back and isinstance(whole, torch.Tensor) and whole.shape[:-n_dims] != pooled.shape[:-n_dims]:
            yield "its tensors have other numbers of planes"

    return check


# How many sizes an argument may have, besides one for each dimension.
_LENGTHS: Final = {"kernel_size": (1,), "padding": (1,), "dilation": (1,), "stride": (0, 1), "output_size": ()}


def _has_sizes(n_dims: int) -> Callable[[tuple[str, Any]], bool]:
    def fits(item: tuple[str, Any]) -> bool:
        name, sizes = item
        return name not in _LENGTHS or not isinstance(sizes, (list, tuple)) or len(sizes) in (n_dims, *_LENGTHS[name])

    return fits


def _same_shape(*names: str) -> ArgumentCheck:
    def check(given: NamedArguments) -> Iterator[str]:
        found = tensors(given, *names)
        if found and len({t.shape for t in found}) > 1:
            yield f"{' and '.join(names)} have other shapes"

    return check


def _inner_shape(given: NamedArguments) -> Iterator[str]:
    shape = given.get("normalized_shape")
    if not isinstance(shape, (list, tuple)) or not all(type(n) is int for n in shape):
        return
    # The CPU's RMS norm takes the last dimensions whatever their size; a fused kernel may go by what it is told.
    x = given.get("input")
    if isinstance(x, torch.Tensor) and tuple(x.shape[x.dim() - len(shape) :]) != tuple(shape):
        yield "normalized_shape is not that of the input's last dimensions"
    for name in ("weight", "bias"):
        t = given.get(name)
        if isinstance(t, torch.Tensor) and tuple(t.shape) != tuple(shape):
            yield f"{name} is not of normalized_shape"


def _padded(n_dims: int) -> ArgumentCheck:
    def check(given: NamedArguments) -> Iterator[str]:
        padding = given.get("padding")
        if padding is not None and (not isinstance(padding, (list, tuple)) or len(padding) != 2 * n_dims):
            yield f"padding has not {2 * n_dims} numbers"

    return check


def _planes(n_dims: int) -> ArgumentCheck:
    def check(given: NamedArguments) -> Iterator[str]:
        found = tensors(given, "grad_output", "self")
        if found:
            grad, x = found
            if grad.dim() != x.dim() or x.dim() <= n_dims or grad.shape[:-n_dims] != x.shape[:-n_dims]:
                yield "its tensors have other numbers of planes"
            elif 0 in x.shape[-n_dims:]:
                yield "self has planes of nothing"

    return check


def _weight_norm(given: NamedArguments) -> Iterator[str]:
    found, dim = tensors(given, "v", "g"), given.get("dim", 0)
    if found and type(dim) is int:
        v, g = found
        n = 1 if dim == -1 else v.shape[dim] if -v.dim() <= dim < v.dim() else -1
        if g.numel() != n or v.dtype is not g.dtype:
            yield "g has not one value for each row of v"


def _pairs(given: NamedArguments) -> Iterator[str]:
    x = given.get("self")
    if isinstance(x, torch.Tensor) and (x.dim() != 2 or not x.shape[0]):
        yield "self is no table"


def _unfolded(given: NamedArguments) -> Iterator[str]:
    grad, whole = given.get("grad_in"), given.get("input_sizes")
    dim, size, step = (given.get(name) for name in ("dim", "size", "step"))
    if not isinstance(grad, torch.Tensor) or not isinstance(whole, (list, tuple)):
        return
    if type(dim) is not int or type(size) is not int or type(step) is not int or not all(type(n) is int for n in whole):
        return
    wanted = list(whole)
    if not -len(wanted) <= dim < len(wanted) or not 0 < size <= wanted[dim] or step < 1:
        yield "it has no such dimension, or no windows of this size"
        return
    wanted[dim] = (wanted[dim] - size) // step + 1
    if list(grad.shape) != [*wanted, size]:
        yield "grad_in has another shape than the windows"


def _packed_product(given: NamedArguments) -> Iterator[str]:
    found, scales = tensors(given, "self", "mat2"), given.get("scales", given.get("qScaleAndZeros"))
    if not found or not isinstance(scales, torch.Tensor):
        return
    x, weight = found
    group = given.get("qGroupSize")
    if x.dim() != 2 or weight.dim() != 2 or not all(t.is_contiguous() for t in (x, weight, scales)):
        yield "its tensors are no contiguous tables"
    elif type(group) is int and (group < 1 or scales.shape != (x.shape[1] // group, weight.shape[0], 2)):
        yield "qScaleAndZeros has not a pair for each group"
    elif group is None and scales.numel() != weight.shape[0]:
        yield "scales has not one value for each row of mat2"


_STATES: Final = ("grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "momentum_buffer_list", "state_sums")


def _seed(given: NamedArguments) -> Iterator[str]:
    seeds, index = given.get("seeds"), given.get("index")
    # Compiled code counts from the first, and does not look.
    if isinstance(seeds, torch.Tensor) and type(index) is int and not 0 <= index < seeds.numel():
        yield "index is none of the seeds"


def _optimizer(given: NamedArguments) -> Iterator[str]:
    parameters = given.get("self")
    if not isinstance(parameters, (list, tuple)):
        return
    # The kernel reads one number from them, whatever their size.
    for name in ("grad_scale", "found_inf"):
        t = given.get(name)
        if isinstance(t, torch.Tensor) and t.numel() != 1:
            yield f"{name} is not one number"
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


def _group_norm(given: NamedArguments) -> Iterator[str]:
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


def _pivots(factor: str, pivots: str) -> ArgumentCheck:
    def check(given: NamedArguments) -> Iterator[str]:
        found = tensors(given, factor, pivots)
        if not found or given.get("unpack_pivots") is False:
            return
        lu, p = found
        if lu.dim() < 2 or p.shape != (*lu.shape[:-2], min(lu.shape[-2:])):
            yield f"{pivots} have not the shape of those of {factor}"
        elif not is_inside(p.abs(), 1, lu.shape[-2] + 1):
            yield f"{pivots} has some that are no row"

    return check


def _bags(given: NamedArguments) -> Iterator[str]:
    found = tensors(given, "weight", "indices", "offsets")
    if not found:
        return
    weight, indices, offsets = found
    scale = given.get("per_sample_weights")
    if weight.dim() != 2 or indices.dim() != 1 or offsets.dim() != 1:
        yield "its tensors have other dimensions"
    elif not indices.is_contiguous() or not offsets.is_contiguous():
        yield "indices and offsets are not contiguous"
    elif not is_inside(indices, 0, weight.shape[0]):
        yield "indices has some that are no row of weight"
    elif not is_inside(offsets, 0, indices.numel() + 1) or _descends(offsets):
        yield "offsets do not lead through indices"
    # Indices before the first bag are added to the row before the first.
    elif indices.numel() and offsets.numel() <= bool(given.get("include_last_offset")):
        yield "it has indices and no bag"
    elif isinstance(scale, torch.Tensor) and scale.numel() != indices.numel():
        yield "per_sample_weights has not one value for each index"
    elif given.get("mode", 0) not in (0, 1, 2):
        yield "mode is none"


def _bags_backward(given: NamedArguments) -> Iterator[str]:
    found = tensors(given, "grad", "indices", "offset2bag")
    if not found:
        return
    grad, indices, bags = found
    weight, scale, sizes, offsets = (given.get(k) for k in ("weight", "per_sample_weights", "bag_size", "offsets"))
    n_weights = weight.shape[0] if isinstance(weight, torch.Tensor) and weight.dim() == 2 else given.get("num_weights")
    if grad.dim() != 2 or indices.dim() != 1 or bags.dim() != 1:
        yield "its tensors have other dimensions"
    elif isinstance(weight, torch.Tensor) and (weight.dim() != 2 or weight.shape[1] != grad.shape[1]):
        yield "weight has other rows than grad"
    elif type(n_weights) is int and not is_inside(indices, 0, n_weights):
        yield "indices has some that are no row of weight"
    elif not all(t.is_contiguous() for t in (indices, bags)):
        yield "indices and offset2bag are not contiguous"
    elif not is_inside(bags, 0, grad.shape[0]):
        yield "offset2bag has some that are no bag"
    elif isinstance(scale, torch.Tensor) and scale.numel() != indices.numel():
        yield "per_sample_weights has not one value for each index"
    elif given.get("mode") not in (None, 0, 1, 2):
        yield "mode is none"
    elif isinstance(sizes, torch.Tensor) and sizes.numel() != grad.shape[0] and (sizes.numel() or given.get("mode")):
        yield "bag_size has not one value for each bag"
    elif bags.numel() == indices.numel():
        return
    # Without it, it is made of offsets.
    elif bags.numel() or not isinstance(offsets, torch.Tensor):
        yield "offset2bag has not one value for each index"
    elif offsets.dim() != 1 or offsets.numel() > grad.shape[0] + 1 or not offsets.is_contiguous():
        yield "offsets are not those of the bags"
    elif not is_inside(offsets, 0, indices.numel() + 1) or _descends(offsets):
        yield "offsets do not lead through indices"
    # The last may be the end of all indices, and begins no bag.
    elif not offsets.numel() or bool(integers(offsets)[0]) or int((offsets < indices.numel()).sum()) > grad.shape[0]:
        yield "offsets are not those of the bags"


def _reduced_backward(given: NamedArguments) -> Iterator[str]:
    found = tensors(given, "grad_out", "weight", "arg_out")
    x = given.get("self")
    if found and isinstance(x, torch.Tensor) and x.layout is torch.sparse_csr:
        grad, weight, places = found
        if grad.dim() != 2 or weight.dim() != 2 or (*x.shape, grad.shape[1]) != (*grad.shape[:1], *weight.shape):
            yield "its tensors have shapes that do not fit"
        elif given.get("reduce") in ("amax", "amin", "max", "min") and (
            places.shape != grad.shape or not places.is_contiguous() or not is_inside(places, 0, x.values().numel() + 1)
        ):
            yield "arg_out has some that are no value of self"


def _resized(given: NamedArguments) -> Iterator[str]:
    x, size, scales = given.get("input", given.get("self")), given.get("output_size"), given.get("scale_factors")
    whole = given.get("input_size", x.shape if isinstance(x, torch.Tensor) else None)
    if scales is not None or not isinstance(size, (list, tuple)) or not isinstance(whole, (list, tuple)):
        return
    for n, out, name in zip(whole[2:], size, ("scales_h", "scales_w"), strict=False):
        scale = given.get(name)
        # The last of them lie beyond the input where there are more than the scale makes.
        if isinstance(scale, float) and not (scale > 0 and out - n * scale < 2):
            yield f"{name} is not that of its sizes"


def _sampled(given: NamedArguments) -> Iterator[str]:
    found = tensors(given, "self", "grid", "grad_output")
    if found:
        x, grid, grad = found
        wanted = (*x.shape[:2], *grid.shape[1:3]) if x.dim() == grid.dim() == 4 else None
        if grad.shape != wanted or grid.shape[0] != x.shape[0] or grid.shape[3] != 2:
            yield "grad_output has another shape than what is sampled"


def _points(given: NamedArguments) -> Iterator[str]:
    grid = given.get("grid")
    # NaN becomes the smallest integer, and the backward pass writes there.
    if isinstance(grid, torch.Tensor) and not grid.is_meta and not bool((grid.abs() < _MAX_POINT).all()):
        yield "grid has points that are no place"


_MAX_POINT: Final = 1e6


def _classes(given: NamedArguments) -> Iterator[str]:
    found = tensors(given, "self", "target")
    if found and found[0].dim() > 0:
        scores, target = found
        n = scores.shape[-1 if scores.dim() < 3 else 1]
        ignored = given.get("ignore_index", -1 if "is_target" in given else None)  # -1 ends a list of labels
        inside = target[target != ignored] if type(ignored) is int and not target.is_meta else target
        if not is_inside(inside, 0, n):
            yield "target has some that are no class"


def _dense(given: NamedArguments) -> Iterator[str]:
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and overlaps_itself(value):
            yield f"elements of {name} lie in the same place, where the kernel reads as many as there are"


def _rows(given: NamedArguments) -> Iterator[str]:
    # Masks are expanded in each model; the kernel has strides for these, and for all dimensions but the last.
    for name in ("query", "key", "value", "out"):
        t = given.get(name)
        if isinstance(t, torch.Tensor) and t.dim() and t.shape[-1] > 1 and not t.stride(-1):
            yield f"elements of a row of {name} lie in the same place, where the kernel reads as many as there are"


def _chunks(given: NamedArguments) -> Iterator[str]:
    tensors, dim = given.get("tensors"), given.get("dim", 0)
    if not isinstance(tensors, (list, tuple)) or type(dim) is not int:
        return
    if any(isinstance(t, torch.Tensor) and not -t.dim() <= dim < t.dim() for t in tensors):
        yield "dim is none of each tensor's"


def _grouped(given: NamedArguments) -> Iterator[str]:
    for name in ("scale_a", "recipe_a", "scale_b", "recipe_b"):
        if isinstance(given.get(name), (list, tuple)) and not given[name]:
            yield f"{name} is empty"


# By a pattern of names without namespace and overload.
# Found by calls under guard pages, before and behind each tensor: a million random ones, and each tensor expanded, with
# gaps and transposed.
_FAMILIES: Final[dict[str, ArgumentCheck]] = {
    "_fft_(c2c|c2r|r2c)": _transform,
    # Nor does who makes a dense tensor of a sparse gradient look at its indices.
    "embedding(_dense|_sparse)?_backward": _embedding,
    "gather_backward": _gathered,
    r"\w*batch_norm\w*": _batch_norm,
    r"_upsample_\w+_aa(_backward)?": _resized,
    "cudnn_grid_sampler_backward": _sampled,  # the reference computes it by another operator, which believes it
    r"(_|cudnn_)?grid_sampler\w*": _points,
    r"_embedding_bag\w*_backward": _bags_backward,
    "_sparse_mm_reduce_impl_backward": _reduced_backward,
    r"(fractional_|adaptive_)?max_pool2d\w*_backward": _pooled(2, back=True),
    r"(fractional_|adaptive_)?max_pool3d\w*_backward": _pooled(3, back=True),
    "max_unpool2d": _pooled(2, back=False),
    "max_unpool3d": _pooled(3, back=False),
    "_masked_softmax_backward": _same_shape("grad_output", "output", "mask"),
    **{f"(reflection|replication)_pad{n}d(_backward)?": _padded(n) for n in (1, 2, 3)},
    **{f"_adaptive_avg_pool{n}d_backward": _planes(n) for n in (2, 3)},
    r"_fused_rms_norm(_backward)?": _inner_shape,
    "_weight_norm_interface": _weight_norm,
    "_pdist_(forward|backward)": _pairs,
    "unfold_backward": _unfolded,
    "_weight_int(4|8)pack_mm(_for_cpu)?": _packed_product,
    "_fused_(adagrad|adam|adamw|sgd)_?": _optimizer,
    r"native_group_norm(_backward)?": _group_norm,
    "lu_unpack": _pivots("LU_data", "LU_pivots"),
    r"linalg_lu_solve\w*": _pivots("LU", "pivots"),
    "linalg_ldl_solve": _pivots("LD", "pivots"),
    "(_embedding_bag|_embedding_bag_forward_only)": _bags,
    r"(nll_loss(2d)?|multi_margin_loss|multilabel_margin_loss)_backward": _classes,
    "_chunk_cat": _chunks,
    "_scaled_grouped_mm_v2": _grouped,
    # Kernels that take dense memory for granted: each tensor of each operator was expanded, before a guard page.
    r"(nan)?median|native_group_norm\w*|_weight_norm_interface": _dense,
    r"_scaled_dot_product_flash_attention_for_cpu\w*": _rows,
}
