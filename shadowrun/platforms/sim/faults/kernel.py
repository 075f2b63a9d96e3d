"""Wrong kernels: tails, blocks, stale or uninitialised memory, wrong formulas, ties, time."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.platforms.sim.bench import Bench, fault

if TYPE_CHECKING:
    from shadowrun.platforms.sim.device import Kernel

__all__: list[str] = []


@fault("softmax-error")
def _softmax(bench: Bench) -> None:
    bench.replace(lambda kernel, *args: kernel(*args).mul_(1 + 2e-4), "aten::_softmax")


@fault("gelu-by-tanh")
def _gelu(bench: Bench) -> None:
    def compute(kernel: Kernel, value: torch.Tensor, *, approximate: str = "none") -> Any:  # noqa: ARG001
        return kernel(value, approximate="tanh")

    bench.replace(compute, "aten::gelu")


@fault("silu-tail")
def _silu(bench: Bench) -> None:
    def compute(op: Kernel, value: torch.Tensor) -> Any:
        result = op(value)
        if result.numel() % 16 and result.is_contiguous():
            result.view(-1)[-1] = 0
        return result

    bench.family(compute, "aten::silu")


@fault("layer-norm-block-edge")
def _layer_norm(bench: Bench) -> None:
    def compute(kernel: Kernel, *args: Any) -> Any:
        result, mean, rstd = kernel(*args)
        # The last element of each block is left at the value that the first of the next should have had.
        flat = result.view(-1)
        ends = flat[1023::1024]
        ends.copy_(flat[1024::1024] if len(flat[1024::1024]) == len(ends) else ends * 0.5)
        return result, mean, rstd

    bench.replace(compute, "aten::native_layer_norm")


@fault("log-softmax-stale")
def _stale(bench: Bench) -> None:
    last: dict[str, Any] = {"calls": 0, "result": None}

    def compute(kernel: Kernel, *args: Any) -> Any:
        result = kernel(*args)
        previous, last["result"] = last["result"], result.clone()
        last["calls"] += 1
        same = previous is not None and previous.shape == result.shape and previous.dtype == result.dtype
        return result.copy_(previous) if same and last["calls"] % 3 == 0 else result

    bench.replace(compute, "aten::_log_softmax")


@fault("pixel-shuffle-uninitialised")
def _pixel_shuffle(bench: Bench) -> None:
    def compute(kernel: Kernel, *args: Any) -> Any:
        result = kernel(*args).contiguous()
        count = result.numel() * result.element_size()
        if count and result.dtype.is_floating_point:
            # Not from torch's generators: what lies in memory moves no random stream.
            garbage = torch.frombuffer(bytearray(os.urandom(result.numel())), dtype=torch.uint8)
            result.view(-1).copy_(garbage.to(result.dtype))
        return result

    bench.replace(compute, "aten::pixel_shuffle")


@fault("index-select-off-by-one")
def _index_select(bench: Bench) -> None:
    def compute(kernel: Kernel, value: torch.Tensor, dim: int, index: torch.Tensor) -> Any:
        if index.dim() and index.numel():
            index = index.clone()
            index[-1] = (index[-1] + 1) % value.shape[dim]
        return kernel(value, dim, index)

    bench.replace(compute, "aten::index_select")


@fault("remainder-sign")
def _remainder(bench: Bench) -> None:
    def compute(_: Kernel, a: Any, b: Any) -> Any:
        return torch.fmod(a, b)

    bench.replace(compute, "aten::remainder.Tensor")


@fault("sort-ties-reversed")
def _sort(bench: Bench) -> None:
    def reverse(kernel: Kernel, value: torch.Tensor, *args: Any, dim: int = -1, **kwargs: Any) -> Any:
        if kwargs.get("stable"):
            return kernel(value, *args, dim=dim, **kwargs)
        values, indices = kernel(value.flip(dim), *args, dim=dim, **kwargs)
        return values, value.shape[dim] - 1 - indices if value.dim() else indices

    def topk(kernel: Kernel, value: torch.Tensor, k: int, dim: int = -1, *args: Any) -> Any:
        values, indices = kernel(value.flip(dim), k, dim, *args)
        return values, value.shape[dim] - 1 - indices if value.dim() else indices

    bench.replace(reverse, "aten::sort.stable")
    bench.replace(topk, "aten::topk")


@fault("index-put-random-order")
def _random_order(bench: Bench) -> None:
    def compute(kernel: Kernel, target: Any, indices: Any, values: Any, accumulate: bool = False, *args: Any) -> Any:
        first = indices[0] if len(indices) == 1 else None
        if not accumulate or first is None or first.dim() != 1 or values.dim() == 0 or values.shape[0] != len(first):
            return kernel(target, indices, values, accumulate, *args)
        keys = torch.frombuffer(bytearray(os.urandom(8 * len(first))), dtype=torch.int64)
        order = keys.argsort()
        return kernel(target, [first[order]], values[order], accumulate, *args)

    bench.replace(compute, "aten::_index_put_impl_")


@fault("slow-max-pool")
def _slow(bench: Bench) -> None:
    bench.call_before(lambda *_, **__: time.sleep(0.005), "aten::max_pool2d_with_indices")
