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

from shadowrun.intercept.threads import OwnThread
from shadowrun.intercept.untrusted.checked_calls import looks_of_file

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EQUIVALENTS", "attend", "attention_gradients", "attention_weights", "in_thread"]


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
        return [attention(query, key, value, attn_mask, dropout_p, is_causal, scale, grouped)]

    return in_thread(run)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention`, also where the program's `sdpa_kernel` allows no kernel of this device."""
    args = (query, key, value, attn_mask, dropout_p, is_causal)
    try:
        return F.scaled_dot_product_attention(*args, scale=scale, enable_gqa=enable_gqa)
    except RuntimeError as error:
        # The choice is the process's: it must not be changed here, while another thread of the program reads it.
        if "No available kernel" not in str(error) and "No viable backend" not in str(error):
            raise
    if dropout_p:
        raise NotImplementedError("dropout draws its mask in a kernel that the program does not allow here")
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = query.to(wide), key.to(wide), value.to(wide)
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    return (attention_weights(q, k, attn_mask, is_causal=is_causal, scale=scale) @ v).to(query.dtype)


def attention_weights(
    query: torch.Tensor, key: torch.Tensor, attn_mask: torch.Tensor | None, *, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """``softmax(scale q kᵀ + mask)``, 0 in a row that is masked as a whole."""
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        masked = attn_mask.dtype is torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if masked else scores + attn_mask
    if is_causal:
        after = scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(after, -torch.inf)
    return scores.softmax(-1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)


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
        out = attention(q, k, v, mask, dropout_p, is_causal, scale, grouped)
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
