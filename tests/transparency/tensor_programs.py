"""Programs on tensors that are hard to copy or to replay: views, overlaps, odd layouts, hidden writes."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.transparency.programs import Collection

PROGRAMS = Collection()
program = PROGRAMS


def grid(device: str, *shape: int) -> torch.Tensor:
    """Different numbers, positive and negative, in each place."""
    n = torch.Size(shape).numel()
    return (torch.arange(n, dtype=torch.float32) * 0.37 - n * 0.15).view(shape).to(device)


def attempt(function: Any, *args: Any, **kwargs: Any) -> str:
    """The text of the error that a call gives."""
    try:
        function(*args, **kwargs)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "no error"


@program("views and writes through them")
def views(device):
    x = grid(device, 4, 6)
    parts = [x[1], x[:, ::2], x.t(), x.view(2, 12), x.unsqueeze(0), x.diagonal(), x.unfold(1, 3, 2)]
    parts[0].mul_(2)
    parts[1].add_(1)
    parts[2][2:].sigmoid_()
    parts[3].select(0, 1).zero_()
    parts[5].fill_(3)
    return x, parts, x.sum(0), [p._base is x for p in parts]


@program("views in autograd, written to")
def written_views(device):
    x = grid(device, 3, 4).requires_grad_()
    y = x * 2
    y[1].mul_(3)
    y.t()[0].exp_()
    first, second = y.split(2, dim=1)
    whole = attempt(first.add_, 1)
    y.detach().abs_()
    z = y.view(-1).narrow(0, 2, 5).clone()
    z.sum().backward()
    return x, y, second, whole, z


@program("a saved tensor that is written to raises")
def stale(device):
    x = grid(device, 3).requires_grad_()
    y = x.exp()
    y.add_(1)
    return attempt(y.sum().backward), y._version, attempt(x.add_, 1), attempt(x.detach().resize_, 2)


@program("overlapping arguments")
def overlapping(device):
    x = grid(device, 8)
    errors = [
        attempt(x[1:].add_, x[:-1]),
        attempt(x.as_strided((4, 4), (1, 1)).add_, 1),
        attempt(torch.add, x[:-1], x[1:], out=x[1:]),
    ]
    inner = x.as_strided((4, 3), (1, 2))
    return x, errors, inner * 2, inner.sum(1), inner @ grid(device, 3, 2), inner.clone()


@program("arguments that share a storage")
def sharing(device):
    x = grid(device, 4, 4)
    x[0].add_(x[1])
    x[:, 0].mul_(x[2])
    x[:2].copy_(x[2:])
    torch.mul(x[0], x[1], out=x[3])
    x[0].addcmul_(x[1], x[2])
    x.add_(x[0])
    torch._foreach_add_([x[0], x[1]], [x[1], x[0]])
    torch._foreach_mul_([x[:, 0], x[:, 1]], 2.0)
    x.index_add_(0, torch.tensor([0, 2], device=device), x[1:3].clone())
    return x, x.t() @ x, torch.cat([x, x]), torch.stack([x[0], x[0]])


@program("add_(x, x) and its like")
def with_itself(device):
    x = grid(device, 5)
    same = [x.add_(x) is x, x.mul_(x) is x, x.sub_(x * 0.5) is x]
    y = x.clone()
    y.copy_(y)
    y.div_(y)
    x.addcmul_(x, x)
    x.lerp_(x, 0.5)
    return x, y, same, x._version, torch.dot(x, x), torch.add(x, x, out=x) is x


@program("out=, of every kind")
def given_out(device):
    x, y = grid(device, 3, 4), grid(device, 3, 4).flip(0)
    fits = torch.empty(3, 4, device=device)
    small, empty = torch.empty(2, device=device), torch.empty(0, device=device)
    wide = torch.zeros(4, 3, dtype=torch.float64, device=device).t()
    strided = torch.zeros(3, 8, device=device)[:, ::2]
    values, indices = torch.empty(3, device=device), torch.empty(3, dtype=torch.long, device=device)
    results = [
        torch.add(x, y, out=fits) is fits,
        torch.mul(x, y, out=small) is small,
        torch.sub(x, y, out=empty) is empty,
        torch.add(x, y, out=wide) is wide,
        torch.mm(x, y.t(), out=torch.empty(3, 3, device=device)),
        torch.exp(x, out=strided),
        torch.max(x, dim=1, out=(values, indices)),
        torch.sigmoid(x, out=x) is x,
        torch.cat([x, y], out=torch.empty(6, 4, device=device)),
        attempt(torch.add, x, y, out=torch.empty(3, 4, dtype=torch.long, device=device)),
        attempt(torch.add, x.clone().requires_grad_(), y, out=fits),
    ]
    return x, y, fits, small, empty, wide, strided, values, indices, results


@program("set_, resize_ and .data")
def rebound(device):
    x, y = grid(device, 2, 3), grid(device, 4)
    z = torch.empty(0, device=device).set_(y.untyped_storage(), 1, (2,), (2,))
    z.mul_(2)
    x.resize_(3, 2).add_(1)
    x.resize_(2, 2)
    w = torch.empty(0, device=device)
    w.set_(x)
    w.neg_()
    p = nn.Parameter(grid(device, 3))
    p.data = grid(device, 2)
    p.data.mul_(3)
    v = grid(device, 3)
    v.data = w.data.clone()
    r = grid(device, 2).resize_as_(grid(device, 1, 2))
    return x, y, z, w, p, v, r, x.sum() + w.sum(), p * 2


@program("a storage that is freed and grown again")
def freed(device):
    x = grid(device, 6)
    storage, n = x.untyped_storage(), x.untyped_storage().nbytes()
    kept = x.clone()
    storage.resize_(0)
    emptied = storage.nbytes()
    storage.resize_(n)
    x.copy_(kept)
    return x * 2, emptied, storage.nbytes()


@program("expanded tensors")
def expanded(device):
    x = grid(device, 3, 1)
    wide = x.expand(3, 4)
    row = grid(device, 4).expand(5, 4)
    w = grid(device, 1).expand(2, 3, 3, 3)
    g = grid(device, 3, 1).requires_grad_()
    (g.expand(3, 4) * 2).sum().backward()
    return wide + 1, wide.sum(1), row @ wide.t(), attempt(wide.add_, 1), wide.clone(), wide.contiguous(), g, F.conv2d(
        grid(device, 1, 3, 5, 5), w
    )  # fmt: skip


@program("strided and transposed tensors")
def strided(device):
    x = grid(device, 6, 8)
    s = x.as_strided((3, 4), (9, 2), 1)
    u = grid(device, 10).unfold(0, 4, 3)
    p = x.view(2, 3, 8).permute(2, 0, 1)
    s.mul_(2)
    return x, s, s @ s.t(), u.sum(1), p.softmax(0), p.reshape(8, 6), x.t().mm(x), p.flip(0), x[:, 3].cumsum(0), p.exp()


@program("negative and conjugate bits")
def bits(device):
    z = torch.complex(grid(device, 3, 3), grid(device, 3, 3).flip(0))
    c, n = z.conj(), z.conj().imag
    before = (c.is_conj(), n.is_neg())
    results = [c @ z, c + 1, n * 2, n.sum(), z.mH @ z, torch.vdot(z[0], c[1]), c.abs(), c.t() @ c]
    c[0].mul_(2)
    n[1].add_(1)
    torch.add(z, 1, out=c)
    return z, c, n, before, results, c.resolve_conj(), n.resolve_neg(), torch.view_as_real(c.resolve_conj()), c.clone()


@program("zero-size tensors")
def zero_size(device):
    e = torch.empty(0, 3, device=device)
    results = [e + 1, e.sum(0), e.t() @ e, e @ grid(device, 3, 2), torch.cat([e, grid(device, 2, 3)]), e.softmax(1)]
    e.add_(1)
    g = torch.empty(0, 3, device=device, requires_grad=True)
    (g * 2).sum().backward()
    nothing = torch.empty(0, dtype=torch.long, device=device)
    return e, results, g, attempt(e.max), e.mean(), grid(device, 3)[nothing], e.any()


@program("0-dim tensors and numbers")
def scalars(device):
    s = torch.tensor(2.5, device=device)
    x = grid(device, 3)
    half = torch.tensor(3, dtype=torch.float16, device=device)
    x.add_(s).mul_(torch.tensor(2.0))
    read = [s.item(), float(s), bool(s > 1), int(half), s.tolist(), x.sum().item(), x[1].item()]
    return s + 1, 1 - s, s * x, x * half, x + torch.tensor(1.5, dtype=torch.float64, device=device), read, x, s.view(1)


@program("ZeroTensor", by_torch="under a mode, functions of a tensor without memory raise or allocate")
def zero_tensor(device):
    z = torch._efficientzerotensor((3,), device=device)
    x = grid(device, 3)
    return x + z, x * z, z.clone(), attempt(torch.add, z, 1), x


@program("ZeroTensor as a gradient", by_torch="under a mode, gradients are added up out of place")
def zero_gradient(device):
    x = torch.complex(grid(device, 3), grid(device, 3)).requires_grad_()
    (x.sgn().abs().sum() + x.abs().sum()).backward()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(grid(device, 3), torch.ones(3, device=device))
        tangent = torch.autograd.forward_ad.unpack_dual(dual.round() + dual).tangent
    return x, tangent.clone()


@program("channels-last and other non-contiguous tensors")
def channels_last(device):
    x = grid(device, 2, 3, 6, 6).to(memory_format=torch.channels_last).requires_grad_()
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)).to(device)
    net = net.to(memory_format=torch.channels_last)
    y = net(x)
    y.square().sum().backward()
    v = grid(device, 1, 2, 3, 4, 4).to(memory_format=torch.channels_last_3d)
    t = grid(device, 4, 3, 5).permute(2, 0, 1)
    return x, y, list(net.parameters()), net.state_dict(), v * 2, F.relu(t), F.linear(t, grid(device, 2, 3)), t.mean(1)


@program("hidden writes: running statistics")
def statistics(device):
    mean, var = torch.zeros(3, device=device), torch.ones(3, device=device)
    x = grid(device, 4, 3, 2).requires_grad_()
    y = F.batch_norm(x, mean, var, training=True, momentum=0.3)
    y = y + F.instance_norm(x, mean, var, use_input_stats=True)
    y.square().sum().backward()
    norm = nn.BatchNorm1d(3).to(device)
    norm(x.detach())
    norm.eval()(x.detach())
    return x, y, mean, var, norm.state_dict(), mean._version


@program("hidden writes: noise, renormalised weights")
def hidden(device):
    x = grid(device, 6).requires_grad_()
    noise = torch.zeros(6, device=device)
    y = torch.ops.aten.rrelu_with_noise(x, noise, 0.1, 0.4, True)
    y.sum().backward()
    weight = grid(device, 5, 3)
    found = F.embedding(torch.tensor([1, 4, 1], device=device), weight, max_norm=0.5)
    return x, y, noise, weight, found, weight._version


@program("memory shared with numpy", not_on_sim="numpy arrays lie in the memory of the CPU")
def shared_with_numpy(device):
    x = grid(device, 4)
    array = x.numpy()
    array[1] = 7
    y = x * 2
    array += 1
    back = torch.from_numpy(array)
    back.mul_(2)
    packed = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))
    packed[0] = -1
    return x, y, array.tolist(), back, packed, torch.frombuffer(bytearray(b"abcd"), dtype=torch.uint8) + 1


@program("copies: deepcopy, save and load")
def copies(device):
    model = nn.Linear(3, 3).to(device)
    model.weight.grad = grid(device, 3, 3)
    twin = copy.deepcopy(model)
    twin.weight.data.add_(1)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    twin.load_state_dict(loaded)
    return model.state_dict(), twin.state_dict(), loaded, model(grid(device, 2, 3)), copy.copy(model.weight) * 1


@program("writes by index")
def by_index(device):
    x = grid(device, 5, 4)
    i = torch.tensor([0, 3, 3], device=device)
    x[i] = 1.5
    x[x > 1] -= 2
    x.index_put_((i, i), torch.ones(3, device=device), accumulate=True)
    x.scatter_add_(0, i.view(3, 1), torch.ones(3, 1, device=device))
    x.masked_fill_(x < -2, 0.25)
    x[..., None, 1:3] *= 2
    return x, x[i], x[:, i], x.gather(0, i.view(3, 1)), torch.take(x, i), x.nonzero(), attempt(lambda: x[9])
