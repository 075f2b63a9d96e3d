"""Programs that use one feature of torch each: autograd's, transforms, modes."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.transparency.programs import Collection
from tests.transparency.tensor_programs import attempt, grid

PROGRAMS = Collection()
program = PROGRAMS
FOREACH = "under a mode, lists of tensors on a device are written to without a new version"
GRADIENTS = "under a mode, gradients are added up out of place"


def network(device: str, dropout: float = 0.5) -> nn.Sequential:
    """A small model, its weights the same each time."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3))
    for i, p in enumerate(model.parameters()):
        nn.init.constant_(p, 0.1 * (i + 1))
    return model.to(device)


def trained(model: nn.Module, loss: torch.Tensor) -> Any:
    """Run backward; the loss, all gradients and the state after it."""
    loss.backward()
    return loss, [p.grad for p in model.parameters()], model.state_dict()


# -- autograd ------------------------------------------------------------------------------------------


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, factor):
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        ctx.mark_non_differentiable(sign := x.sign())
        ctx.set_materialize_grads(False)
        return x * y * factor, sign

    @staticmethod
    def backward(ctx, grad, _):
        x, y = ctx.saved_tensors
        return grad * y * ctx.factor, (grad * x).sum() if ctx.needs_input_grad[1] else None, None


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@program("autograd.Function", by_torch=GRADIENTS)
def function(device):
    x, y = grid(device, 4).requires_grad_(), torch.tensor(2.0, device=device, requires_grad=True)
    out, sign = Scaled.apply(x, y, 3.0)
    dirty = InPlace.apply(x * 1)
    (out.sum() + dirty.square().sum()).backward()
    return x, y, out, sign, dirty


@program("hooks of modules")
def module_hooks(device):
    model, seen = network(device), []
    handles = [
        model[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,)),
        model[2].register_forward_hook(lambda m, args, out: out + 1),
        model[2].register_full_backward_hook(lambda m, given, out: (given[0] * 3,)),
        model[4].register_full_backward_pre_hook(lambda m, out: (out[0] * 0.5,)),
        model.register_state_dict_post_hook(lambda m, state, *_: seen.append(len(state))),
        nn.modules.module.register_module_forward_hook(lambda m, args, out: seen.append(type(m).__name__)),
    ]
    try:
        result = trained(model, model(grid(device, 5, 4)).square().sum())
    finally:
        for handle in handles:
            handle.remove()
    return result, seen


@program("hooks of tensors and of gradient accumulators")
def tensor_hooks(device):
    x, seen = grid(device, 3).requires_grad_(), []
    y = x * 2
    y.register_hook(lambda g: g * 3)
    y.retain_grad()
    x.register_hook(lambda g: seen.append(g.clone()))
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    accumulator = y.grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda given, out: seen.append(out[0] + 1))
    accumulator.register_prehook(lambda out: (out[0] * 0.5,))
    y.grad_fn.register_hook(lambda given, out: (given[0] + 1, *given[1:]))
    for _ in range(2):
        y.exp().sum().backward(retain_graph=True)
    return x, y, y.grad, seen


@program("an optimizer that steps in backward", by_torch=FOREACH)
def step_in_backward(device):
    model = network(device)
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        model(grid(device, 5, 4)).square().sum().backward()
    return model.state_dict(), [o.state_dict() for o in optimizers.values()], [p.grad for p in model.parameters()]


@program("saved-tensor hooks", by_torch=GRADIENTS)
def saved(device):
    x, packed = grid(device, 3).requires_grad_(), []

    def pack(t):
        packed.append(tuple(t.shape))
        return (t * 2).cpu()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: (t / 2).to(device)):
        y = (x * x).exp()
    with torch.autograd.graph.save_on_cpu():
        z = y.sigmoid() * y
    z.sum().backward()
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        refused = attempt(torch.autograd.graph.saved_tensors_hooks(pack, pack).__enter__)
    return x, y, z, packed, refused


def checkpointed(device: str, **how: Any) -> Any:
    model = network(device)
    x = grid(device, 5, 4).requires_grad_()
    return x, *trained(model, checkpoint(model, x, **how).square().sum())


@program("checkpoint, reentrant")
def reentrant(device):
    return checkpointed(device, use_reentrant=True), checkpointed(device, use_reentrant=True, preserve_rng_state=False)


@program("checkpoint, not reentrant")
def not_reentrant(device):
    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default, torch.ops.aten.tanh.default])

    return checkpointed(device, use_reentrant=False), checkpointed(device, use_reentrant=False, context_fn=contexts)


@program("double backward", by_torch="under a mode, the derivatives of prod are computed in another way")
def double_backward(device):
    model = network(device, dropout=0.0)
    x = grid(device, 5, 4).requires_grad_()
    (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    penalty = (g.norm(dim=1) - 1).square().mean()
    hessian = torch.autograd.functional.hessian(lambda v: v.sin().prod(), grid(device, 3))
    return x, g, hessian, trained(model, penalty)


@program("anomaly mode", by_torch=GRADIENTS)
def anomaly(device):
    x = grid(device, 3).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with torch.autograd.detect_anomaly(check_nan=True):
            (x * x).exp().sum().backward()
            bad = attempt((x.sqrt() * 0).sum().backward)
    return x, bad


@program("inference_mode")
def inference(device):
    model = network(device).eval()
    with torch.inference_mode():
        x = grid(device, 3, 4)
        y = x.t()[1:].reshape(-1)
        x.mul_(2)
        made = model(x)
        parts = [y + 1, F.linear(x, x), x[0].add_(1), F.dropout(x, 0.5), F.softmax(x, 0), F.layer_norm(x, (4,))]
    return x, made, parts, attempt(lambda: x.requires_grad_() * 2), attempt(lambda: x._version), x.clone() + 1


@program("no_grad, enable_grad and set_grad_enabled")
def grad_modes(device):
    model = network(device)
    with torch.no_grad():
        model[0].weight.mul_(2)
        y = model(grid(device, 5, 4))
        with torch.enable_grad():
            z = model(grid(device, 5, 4))
    torch.set_grad_enabled(False)
    off = model(grid(device, 5, 4))
    torch.set_grad_enabled(True)
    return y, off, trained(model, z.sum())


# -- transforms ----------------------------------------------------------------------------------------


@program("vmap")
def vmap(device):
    x, w = grid(device, 3, 4), grid(device, 3, 4, 2)
    drawn = torch.func.vmap(lambda v: v + torch.rand(4, device=device), randomness="different")(x)
    nested = torch.func.vmap(torch.func.vmap(lambda a, b: a * b, in_dims=(0, None)), in_dims=(0, 0))(w, w[:, 0])
    return torch.func.vmap(lambda v, m: (v @ m).softmax(0))(x, w), drawn, nested, torch.func.vmap(torch.sum)(x)


@program("functorch: grad, vjp, jacobians")
def functorch(device):
    x = grid(device, 3)
    model = network(device, dropout=0.0).eval()
    state = dict(model.named_parameters()) | dict(model.named_buffers())

    def loss(state, batch):
        return torch.func.functional_call(model, state, (batch,)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(
        {k: v.detach() for k, v in state.items()}, grid(device, 2, 1, 4)
    )
    out, pull = torch.func.vjp(torch.sin, x)
    square = lambda v: (v * v).sin().sum()  # noqa: E731
    return (
        per_sample,
        out,
        pull(torch.ones_like(x)),
        torch.func.grad(square)(x),
        torch.func.jacrev(torch.sin)(x),
        torch.func.jacfwd(torch.sin)(x),
        torch.func.hessian(square)(x),
        torch.func.grad_and_value(square)(x),
    )


@program("functorch: jvp, linearize, functionalize")
def forward_mode(device):
    x = grid(device, 3)
    out, push = torch.func.linearize(lambda v: v.sin() * v, x)

    def writes(v):
        y = v.clone()
        y[0].mul_(2)
        return y.add_(1)

    dual = torch.func.jvp(lambda v: (v * v).sin(), (x,), (torch.ones_like(x),))
    return dual, out, push(torch.ones_like(x)), torch.func.functionalize(writes)(x)


@program("autocast", by_torch=GRADIENTS)
def autocast(device):
    model = network(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = model(grid(device, 5, 4))
        with torch.autocast(device, enabled=False):
            z = model(grid(device, 5, 4))
        scores = F.scaled_dot_product_attention(*[grid(device, 1, 2, 3, 4)] * 3)
    return y, z, scores, trained(model, y.float().sum() + z.sum())


@program("GradScaler", by_torch=FOREACH)
def scaler(device):
    model = network(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaling = torch.amp.GradScaler(device, init_scale=2.0**4, growth_interval=2)
    scales = []
    for factor in (1.0, float("inf"), 1.0, 1.0):
        optimizer.zero_grad()
        scaling.scale(model(grid(device, 5, 4)).sum() * factor).backward()
        scaling.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaling.step(optimizer)
        scaling.update()
        scales.append(scaling.get_scale())
    return model.state_dict(), optimizer.state_dict(), scales, scaling.state_dict()
