"""Programs for the device, and what the device itself says of each call. For scripts in a process of their own."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


def train(device, steps=2):
    """Some steps of training; returns all that came of it, the random stream included."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Dropout(0.25), torch.nn.LayerNorm(8)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 3), torch.nn.ReLU()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    x, y = torch.randn(5, 6).to(device), torch.arange(5).remainder(3).to(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return [losses, *[p.detach().cpu().tolist() for p in model.parameters()], torch.get_rng_state().tolist()]


def operators(device):
    """In-place, out=, views, lists, indices, factories, numbers."""
    x = torch.linspace(-2, 2, 30).view(5, 6).to(device)
    y = torch.tensor([0, 1, 2, 0, 1]).to(device)
    out = torch.empty(5, 6, device=device)
    torch.add(x, 1, out=out)
    torch.exp(x, out=out)
    out.mul_(2)
    out.add_(1)
    out[1:3].neg_()
    out.t().clamp_(min=0)
    out.index_put_((y,), x[0])
    out.scatter_(1, y[:, None], 0.5)
    lists = torch._foreach_add([x, out], 1.0)
    torch._foreach_mul_(lists, [2.0, 3.0])
    one = x[0, 0]
    found = [out, *lists, torch.mm(out, x.t()), out.relu(), x.view(6, 5)[:, 1].sum(), torch.cat([x, out])]
    found += [x[y], x[x > 0], x.nonzero(), torch.where(x > 0, x, out), x.std(), *torch.topk(x, 2), torch.erfinv(x / 4)]
    found += [torch.tril_indices(3, 3, device=device), torch.arange(4, device=device), torch.eye(3, device=device)]
    # Numbers count less than tensors where types are promoted: these stay float32 and int64.
    found += [one / 3, one * 0.1, one + 1, one.abs() ** 0.5, y[1] * 2, y[1] / 3, y[1] + 0.1, y / 3, torch.pow(2.0, x)]
    return [(str(t.dtype), t.cpu().tolist()) for t in found]


def every(device):
    """Both."""
    return [train(device), operators(device)]


class Truth(TorchDispatchMode):
    """Notes which kernels fall back in each call; it knows nothing of shadowrun.

    A call on the CPU is repeated on the device, as a comparison does.

    Args:
        take: The device's own list.
        device: The device's name.
    """

    def __init__(self, take, device):
        super().__init__()
        self.take, self.device = take, device
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self._is_there(args, kwargs):
            state = torch.get_rng_state()
            args_there, there = tree_map(self._move, (args, kwargs))
            if "device" in there:
                there["device"] = torch.device(self.device)
            self._note(func, args_there, there)
            torch.set_rng_state(state)
            return func(*args, **kwargs)
        return self._note(func, args, kwargs)

    def _note(self, func, args, kwargs):
        self.take()
        out = func(*args, **kwargs)
        self.calls.append((func.name(), self.take()))
        return out

    def _move(self, value):
        return value.to(self.device) if isinstance(value, torch.Tensor) else value

    def _is_there(self, args, kwargs):
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        wanted = torch.device(kwargs.get("device") or "cpu")
        return self.device in [wanted.type, *(t.device.type for t in tensors)]


def reported(run):
    """What shadowrun says: of each call, of each operator that it skipped, and where it failed itself."""
    verdicts = [(r.call.op, r.verdict) for r in run.records()]
    return {
        "calls": [[op, str(v.status), str(v.cause), v.evidence] for op, v in verdicts],
        "skipped": sorted({s.op for s in run.coverage().skipped}),
        "own": [str(n) for n in run.internal_failures()],
    }
