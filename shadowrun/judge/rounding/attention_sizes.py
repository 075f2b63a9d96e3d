"""How far rounding moves attention and its gradients, as `row_sizes` says it of norms: a few products for each head.

With P = softmax(S), S = scale q kᵀ + mask, O = P V, and each input off by about a unit roundoff, an element of S is off
by the root of w = scale² (q²)(k²)ᵀ for the queries' errors, and as much for the keys'. Errors that the elements of a
row or a column of S have in common are left out, so the sizes are below those that perturbing gives. The gradients are
those of Dao et al., FlashAttention, algorithm 4: dV = Pᵀ dO, dS = P (dO Vᵀ - rowsum(dO O)), dQ = scale dS K,
dK = scale dSᵀ Q.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.operators.cpu_only_ops import attention_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["attention_gradient_sizes", "attention_sizes", "root"]

MAX_SCORES: Final = 1 << 26
"""Scores of a head of keys, of which some ten copies are held: above, the oracle decides."""


def attention_sizes(named: dict[str, Any], expected: Any) -> tuple[torch.Tensor, ...]:
    """Sizes of the output and, where it is a result, of the logarithm of the sums."""
    q, v = named["query"], named["value"]
    if not _is_known(named):
        return ()
    found = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    sums = torch.empty(q.shape[:-1], dtype=q.dtype, device=q.device)
    for head in _heads(named):
        moved = (head.p * head.p).mul_(head.w)
        out, values = head.p @ head.v, head.v * head.v
        # Of sum_j p_j (1 + w_j (v_j - out)**2): a score that moves, moves the output towards its value.
        size = (head.p * head.p) @ values
        size.add_(moved @ values).sub_((moved @ head.v).mul_(out).mul_(2.0))
        total = moved.sum(-1, keepdim=True)
        found[head.at] = root(size.addcmul_(out * out, total))
        sums[head.at] = root(total.squeeze(-1))
    return (found, sums) if len(expected) > 1 else (found,)


def attention_gradient_sizes(named: dict[str, Any], _: Any) -> tuple[torch.Tensor, ...]:
    """Sizes of the gradients of query, key and value."""
    q, k, v = (named[name] for name in ("query", "key", "value"))
    if not _is_known(named):
        return ()
    gradient, out = named["grad_out_" if "grad_out_" in named else "grad_out"], named["out"]
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    for head in _heads(named):
        grad = gradient[head.at]
        grad2, p2 = grad * grad, head.p * head.p
        ds = grad @ head.v.mT
        ds.sub_((grad * out[head.at]).sum(-1, keepdim=True))
        # How far dO Vᵀ moves, and how far P does.
        moved = (grad2 @ (head.v * head.v).mT).addcmul_(ds * ds, head.w).mul_(p2)
        ds.mul_(head.p)
        moved.addcmul_(ds, ds)
        dq[head.at] = root(moved @ (head.k * head.k)).mul_(head.scale)
        dk[head.at_keys] = root((moved.mT @ (head.q * head.q)).sum(0)).mul_(head.scale)
        dv[head.at_keys] = root((p2.addcmul_(p2, head.w).mT @ grad2).sum(0))
    return dq, dk, dv


class _Head:
    """One head of keys and values, with the heads of queries that share it.

    Attributes:
        at: Where the queries lie; `at_keys`: the keys.
        q, k, v: (heads, n, d), (m, d), (m, d).
        p: Weights, (heads, n, m).
        w: Variances of the scores by the keys alone or by the queries alone, in unit roundoffs squared.
        scale: Of the scores.
    """

    def __init__(self, named: dict[str, Any], batch: int, head: int, group: int, scale: float) -> None:
        heads = slice(head * group, (head + 1) * group)
        self.at, self.at_keys, self.scale = (batch, heads), (batch, head), abs(scale)
        self.q, self.k, self.v = named["query"][self.at], named["key"][self.at_keys], named["value"][self.at_keys]
        mask = named.get("attn_mask", named.get("attn_bias"))
        if mask is not None:
            mask = mask.expand(*named["query"].shape[:-1], self.k.shape[-2])[self.at] if mask.numel() else None
        is_causal = bool(named.get("is_causal"))
        self.p = attention_weights(self.q, self.k, mask, is_causal=is_causal, scale=scale)
        self.w = ((self.q * self.q) @ (self.k * self.k).mT).mul_(scale * scale)


def _is_known(named: dict[str, Any]) -> bool:
    q, k = named["query"], named["key"]
    if q.dim() != 4 or not q.numel() or not k.numel():
        return False
    n_scores: int = q.shape[1] // k.shape[1] * q.shape[2] * k.shape[2]
    return n_scores <= MAX_SCORES


def _heads(named: dict[str, Any]) -> Iterator[_Head]:
    q, k = named["query"], named["key"]
    group = q.shape[1] // k.shape[1]
    scale = named.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for batch in range(k.shape[0]):
        for head in range(k.shape[1]):
            yield _Head(named, batch, head, group, scale)


def root(variance: torch.Tensor) -> torch.Tensor:
    """In place; terms that cancel may leave a rounding error below 0."""
    return variance.clamp_min_(0.0).sqrt_()
