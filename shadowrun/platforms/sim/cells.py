"""The fused cells of recurrent networks: torch asks PrivateUse1 devices for them, and the CPU has none."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["gru_cell", "gru_cell_backward", "lstm_cell", "lstm_cell_backward"]


def lstm_cell(
    igates: torch.Tensor,
    hgates: torch.Tensor,
    cell: torch.Tensor,
    ibias: torch.Tensor | None = None,
    hbias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New hidden state, new cell state, and the gates for backward; gates are ``(N, 4 H)``."""
    gates = igates + hgates
    if ibias is not None and hbias is not None:
        gates = igates + ibias + (hgates + hbias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * cell + i * g
    return o * new.tanh(), new, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_h: torch.Tensor | None,
    grad_c: torch.Tensor | None,
    cell: torch.Tensor,
    new: torch.Tensor,
    workspace: torch.Tensor,
    has_bias: bool,
) -> Any:
    """Gradients of the gates, of the cell state and of a bias."""
    if grad_h is None and grad_c is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    grad_h = torch.zeros_like(new) if grad_h is None else grad_h
    grad_c = torch.zeros_like(new) if grad_c is None else grad_c
    tanh = new.tanh()
    grad_c = grad_c + grad_h * o * (1 - tanh * tanh)
    grads = (
        grad_c * g * i * (1 - i),
        grad_c * cell * f * (1 - f),
        grad_c * i * (1 - g * g),
        grad_h * tanh * o * (1 - o),
    )
    gates = torch.cat(grads, 1)
    return gates, grad_c * f, gates.sum(0) if has_bias else None


def gru_cell(
    igates: torch.Tensor,
    hgates: torch.Tensor,
    hidden: torch.Tensor,
    ibias: torch.Tensor | None = None,
    hbias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """New hidden state and what backward needs; gates are ``(N, 3 H)``."""
    if ibias is not None and hbias is not None:
        igates, hgates = igates + ibias, hgates + hbias
    (ir, iz, new), (hr, hz, hn) = igates.chunk(3, 1), hgates.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (new + r * hn).tanh()
    return n + z * (hidden - n), torch.cat([r, z, n, hidden, hn], 1)


def gru_cell_backward(grad: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> Any:
    """Gradients of both gates, of the hidden state and of both biases."""
    r, z, n, hidden, hn = workspace.chunk(5, 1)
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_r, grad_z = grad_n * hn * r * (1 - r), grad * (hidden - n) * z * (1 - z)
    igates, hgates = torch.cat([grad_r, grad_z, grad_n], 1), torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (igates.sum(0), hgates.sum(0)) if has_bias else (None, None)
    return igates, hgates, grad * z, *biases
