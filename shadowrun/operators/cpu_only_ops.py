"""CPU-only operators in a CPU trace, and the API call that stands for them on another device.

`F.scaled_dot_product_attention` becomes `aten::_scaled_dot_product_flash_attention_for_cpu` on the CPU and
something else elsewhere. That an accelerator lacks the CPU's kernel says nothing: the user's call is what
it has to support, so that is replayed.
"""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F  # noqa: N812

from shadowrun.intercept.checked_calls import looks_of_file
from shadowrun.intercept.threads import OwnThread

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EQUIVALENTS", "attend", "attention_gradients", "in_thread"]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> list[torch.Tensor]:
    """Attention as a user calls it: ``[output]``."""

    def run() -> list[torch.Tensor]:
        # The operator has no argument `enable_gqa`: fewer heads of keys than of queries show it.
        grouped = query.dim() > 3 and query.shape[-3] != key.shape[-3]
        args = (query, key, value, attn_mask, dropout_p, is_causal)
        return [F.scaled_dot_product_attention(*args, scale=scale, enable_gqa=grouped)]

    return in_thread(run)


def attend_backward(
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
    """Gradients of query, key and value, by autograd."""
    del out, logsumexp
    inputs = [query, key, value] if attn_mask is None else [query, key, value, attn_mask]
    return attention_gradients(grad_out, inputs, dropout_p, is_causal, scale)[:3]


def attention_gradients(
    grad_out: torch.Tensor, inputs: list[torch.Tensor], dropout_p: float, is_causal: bool, scale: float | None
) -> list[torch.Tensor]:
    """Gradients of query, key, value and, if there is one, of a floating mask."""

    def run() -> list[torch.Tensor]:
        # Detached: the graph of the program must not grow by the replay, and its gradients stay as they are.
        own = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
        (q, k, v), mask = own[:3], own[3] if len(own) > 3 else None
        grouped = q.dim() > 3 and q.shape[-3] != k.shape[-3]
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped)
        return list(torch.autograd.grad(out, [t for t in own if t.requires_grad], grad_out))

    return in_thread(run)


def in_thread(run: Callable[[], list[Any]]) -> list[Any]:
    """Run as a user would: a mode's handler has autograd excluded, and Functionalize; a new thread has not."""
    results: list[list[Any]] = []
    errors: list[BaseException] = []
    context = contextvars.copy_context()

    def body() -> None:
        try:
            with context.run(looks_of_file):
                results.append(run())
        except BaseException as error:
            errors.append(error)

    thread = OwnThread(target=body, name="shadowrun-replay")
    thread.start()
    thread.join()
    # An exception must reach the caller, whose replay decides what it means; a thread would only print it.
    if errors:
        raise errors[0]
    return results[0]


EQUIVALENTS: dict[str, Callable[..., list[Any]]] = {
    # Each gives the first results of the operator; the rest (logsumexp) belong to the CPU's kernel.
    "aten::_scaled_dot_product_flash_attention_for_cpu": attend,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": attend_backward,
}
