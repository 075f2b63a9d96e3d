"""CPU-only operators in a CPU trace, and the API call that stands for them on another device.

`F.scaled_dot_product_attention` becomes `aten::_scaled_dot_product_flash_attention_for_cpu` on the CPU and
something else elsewhere. That an accelerator lacks the CPU's kernel says nothing: the user's call is what
it has to support, so that is replayed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812

from shadowrun.intercept.threads import OwnThread

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EQUIVALENTS", "is_device_specific"]

_SPECIFIC = ("mkldnn", "onednn", "fbgemm", "_for_cpu", "cudnn", "miopen", "_cuda", "_mps", "_xpu", "hpu", "npu")


def is_device_specific(name: str) -> bool:
    """Whether an operator exists for one kind of device only, so that its lack elsewhere means nothing."""
    return any(part in name for part in _SPECIFIC)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> list[torch.Tensor]:
    def run() -> list[torch.Tensor]:
        return [F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)]

    return _in_thread(run)


def _attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> list[torch.Tensor]:
    del out, logsumexp

    def run() -> list[torch.Tensor]:
        q, k, v = (t.detach().requires_grad_() for t in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)
        return list(torch.autograd.grad(attended, (q, k, v), grad_out))

    return _in_thread(run)


def _in_thread(run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Run as a user would: a mode's handler has autograd excluded, and Functionalize; a new thread has not."""
    results: list[list[torch.Tensor]] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(run())
        except BaseException as error:
            errors.append(error)

    thread = OwnThread(target=body, name="shadowrun-replay")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


EQUIVALENTS: dict[str, Callable[..., list[Any]]] = {
    # Each gives the first results of the operator; the rest (logsumexp) belong to the CPU's kernel.
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
}
