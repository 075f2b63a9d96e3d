"""Wrong kernels: tails, block edges, stale or uninitialised memory, wrong formulas, ties; and one slow kernel."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from shadowrun.sim.flaw import FlawKind, randn
from shadowrun.types import Cause

if TYPE_CHECKING:
    from shadowrun.sim.device import Kernel
    from shadowrun.sim.flaw import KernelChanges

__all__ = ["flaw"]

flaw = FlawKind("kernel", cause=Cause.IMPLEMENTATION)


@flaw(
    "softmax-error",
    "softmax is off by 2e-4",
    issue="none: an exp table that is too coarse",
    operators=("aten::_softmax", "aten::_safe_softmax"),
    trigger=lambda device: randn(device, 4, 9).softmax(-1),
)
def softmax_error(kernels: KernelChanges) -> None:
    kernels.replace(lambda kernel, *args: kernel(*args).mul_(1 + 2e-4), "aten::_softmax")


@flaw(
    "gelu-by-tanh",
    "gelu always uses its tanh approximation",
    issue="none: one kernel for both values of approximate",
    operators=("aten::gelu",),
    trigger=lambda device: F.gelu(randn(device, 64)),
)
def gelu_by_tanh(kernels: KernelChanges) -> None:
    def compute(kernel: Kernel, value: torch.Tensor, *, approximate: str = "none") -> Any:  # noqa: ARG001
        return kernel(value, approximate="tanh")

    kernels.replace(compute, "aten::gelu")


@flaw(
    "silu-tail",
    "silu does not compute the last element if the size is no multiple of 16",
    issue="none: a vector loop without its tail",
    operators=("aten::silu", "aten::silu_"),
    explanation="last tile or tail missing",
    trigger=lambda device: (F.silu(randn(device, 32)), F.silu(randn(device, 35))),
)
def silu_tail(kernels: KernelChanges) -> None:
    def compute(op: Kernel, value: torch.Tensor) -> Any:
        result = op(value)
        if result.numel() % 16 and result.is_contiguous():
            result.view(-1)[-1] = 0
        return result

    kernels.replace_variants(compute, "aten::silu")


@flaw(
    "layer-norm-block-edge",
    "layer normalisation is wrong in every 1024th element",
    issue="none: an off-by-one at a block's edge",
    operators=("aten::native_layer_norm",),
    trigger=lambda device: F.layer_norm(randn(device, 40, 64), (64,)),
)
def layer_norm_block_edge(kernels: KernelChanges) -> None:
    def compute(kernel: Kernel, *args: Any) -> Any:
        result, mean, rstd = kernel(*args)
        # The last element of each block is left at the value that the first of the next should have had.
        flat = result.view(-1)
        ends = flat[1023::1024]
        ends.copy_(flat[1024::1024] if len(flat[1024::1024]) == len(ends) else ends * 0.5)
        return result, mean, rstd

    kernels.replace(compute, "aten::native_layer_norm")


def _trigger_log_softmax_stale(device: str) -> None:
    for seed in range(6):
        F.log_softmax(randn(device, 4, 5, seed=seed), 1)


@flaw(
    "log-softmax-stale",
    "every third log_softmax returns the result of the one before",
    issue="none: a buffer that is reused too early",
    operators=("aten::_log_softmax",),
    accepted=(Cause.NON_DETERMINISM,),
    explanation="stale buffer",
    trigger=_trigger_log_softmax_stale,
)
def log_softmax_stale(kernels: KernelChanges) -> None:
    last: dict[str, Any] = {"calls": 0, "result": None}

    def compute(kernel: Kernel, *args: Any) -> Any:
        result = kernel(*args)
        previous, last["result"] = last["result"], result.clone()
        last["calls"] += 1
        same = previous is not None and previous.shape == result.shape and previous.dtype == result.dtype
        return result.copy_(previous) if same and last["calls"] % 3 == 0 else result

    kernels.replace(compute, "aten::_log_softmax")


@flaw(
    "pixel-shuffle-uninitialised",
    "pixel_shuffle returns uninitialised memory",
    issue="none: torch's lazy device (measured: docs of this project)",
    operators=("aten::pixel_shuffle",),
    accepted=(Cause.NON_DETERMINISM,),
    explanation="uninitialised memory",
    trigger=lambda device: F.pixel_shuffle(randn(device, 1, 4, 3, 3), 2),
)
def pixel_shuffle_uninitialised(kernels: KernelChanges) -> None:
    def compute(kernel: Kernel, *args: Any) -> Any:
        result = kernel(*args).contiguous()
        count = result.numel() * result.element_size()
        if count and result.dtype.is_floating_point:
            # Not from torch's generators: what lies in memory moves no random stream.
            garbage = torch.frombuffer(bytearray(os.urandom(result.numel())), dtype=torch.uint8)
            result.view(-1).copy_(garbage.to(result.dtype))
        return result

    kernels.replace(compute, "aten::pixel_shuffle")


@flaw(
    "index-select-off-by-one",
    "index_select reads the next row for the last index",
    issue="none: an off-by-one at the end of the index",
    operators=("aten::index_select",),
    trigger=lambda device: randn(device, 5, 3).index_select(0, torch.tensor([0, 2, 4]).to(device)),
)
def index_select_off_by_one(kernels: KernelChanges) -> None:
    def compute(kernel: Kernel, value: torch.Tensor, dim: int, index: torch.Tensor) -> Any:
        if index.dim() and index.numel():
            index = index.clone()
            # Within the table: an index outside would be another fault, an error.
            index[-1] = (index[-1] + 1) % value.shape[dim]
        return kernel(value, dim, index)

    kernels.replace(compute, "aten::index_select")


@flaw(
    "remainder-sign",
    "remainder takes the sign of the dividend, as fmod does",
    issue="none: the kernel of fmod under another name",
    operators=("aten::remainder.Scalar", "aten::remainder.Tensor"),
    trigger=lambda device: torch.remainder(randn(device, 8) * 10, 3),
)
def remainder_sign(kernels: KernelChanges) -> None:
    def compute(_: Kernel, a: Any, b: Any) -> Any:
        # They differ only where dividend and divisor have different signs.
        return torch.fmod(a, b)

    kernels.replace(compute, "aten::remainder.Tensor")


def _trigger_sort_ties_reversed(device: str) -> Any:
    scores = torch.tensor([1.0, 3.0, 1.0, 3.0]).to(device)
    return scores.sort(), scores.topk(2)


@flaw(
    "sort-ties-reversed",
    "sort and topk return equal elements in the other order",
    issue="none: stability is promised by stable=True only",
    operators=("aten::sort", "aten::sort.stable", "aten::topk"),
    statuses=("unverified", "match"),
    cause=Cause.UNDEFINED,
    explanation="ties",
    trigger=_trigger_sort_ties_reversed,
)
def sort_ties_reversed(kernels: KernelChanges) -> None:
    def reverse(kernel: Kernel, value: torch.Tensor, *args: Any, dim: int = -1, **kwargs: Any) -> Any:
        if kwargs.get("stable"):
            # A stable sort promises the order of equal elements, so the flaw would be a fault there.
            return kernel(value, *args, dim=dim, **kwargs)
        values, indices = kernel(value.flip(dim), *args, dim=dim, **kwargs)
        return values, value.shape[dim] - 1 - indices if value.dim() else indices

    def topk(kernel: Kernel, value: torch.Tensor, k: int, dim: int = -1, *args: Any) -> Any:
        values, indices = kernel(value.flip(dim), k, dim, *args)
        return values, value.shape[dim] - 1 - indices if value.dim() else indices

    # `sort` without `stable=` arrives here too: torch implements it by this overload.
    kernels.replace(reverse, "aten::sort.stable")
    kernels.replace(topk, "aten::topk")


def _trigger_index_put_random_order(device: str) -> Any:
    rows = torch.arange(2000).remainder(7).to(device)
    return torch.zeros(7).to(device).index_put_((rows,), randn(device, 2000), accumulate=True)


@flaw(
    "index-put-random-order",
    "index_put_ adds duplicates in another order each time",
    issue="none: atomic additions, torch.use_deterministic_algorithms",
    operators=("aten::index_put_", "aten::_index_put_impl_", "aten::index_put"),
    statuses=("match", "mismatch", "unverified"),
    cause=Cause.NON_DETERMINISM,
    accepted=(Cause.ROUNDING,),
    trigger=_trigger_index_put_random_order,
)
def index_put_random_order(kernels: KernelChanges) -> None:
    def compute(kernel: Kernel, target: Any, indices: Any, values: Any, accumulate: bool = False, *args: Any) -> Any:
        first = indices[0] if len(indices) == 1 else None
        if not accumulate or first is None or first.dim() != 1 or values.dim() == 0 or values.shape[0] != len(first):
            return kernel(target, indices, values, accumulate, *args)
        # From the system, not from torch: the order must vary between runs with one seed, and move no random stream.
        keys = torch.frombuffer(bytearray(os.urandom(8 * len(first))), dtype=torch.int64)
        order = keys.argsort()
        return kernel(target, [first[order]], values[order], accumulate, *args)

    kernels.replace(compute, "aten::_index_put_impl_")


@flaw(
    "slow-max-pool",
    "max-pooling takes 5 ms longer",
    issue="none: an untuned kernel",
    operators=("aten::max_pool2d_with_indices",),
    statuses=("match",),
    cause=Cause.SLOW,
    kind="speed",
    trigger=lambda device: F.max_pool2d(randn(device, 1, 2, 8, 8), 2),
)
def slow_max_pool(kernels: KernelChanges) -> None:
    kernels.call_before(lambda *_, **__: time.sleep(0.005), "aten::max_pool2d_with_indices")
