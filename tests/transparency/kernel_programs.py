"""Programs that use torch's kernels for networks, other kinds of tensors, tracing, and operators of others."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.two_tensor import TwoTensor

from tests.transparency.feature_programs import GRADIENTS, network, trained
from tests.transparency.programs import Collection
from tests.transparency.tensor_programs import attempt, grid

PROGRAMS = Collection()
program = PROGRAMS
NO_SPARSE = "the simulated device has no sparse tensors"
CUSTOM = frozenset({"custom operator: a replay could repeat its side effects; name it in ops= to allow it"})
NO_CELLS = frozenset({"the reference cannot run it: NotImplementedError"})  # fused cells are for devices only


@program("recurrent networks", by_torch=GRADIENTS, unverified=NO_CELLS)
def recurrent(device):
    results = []
    for kind in (nn.RNN, nn.LSTM, nn.GRU):
        torch.manual_seed(1)
        model = kind(4, 5, num_layers=2, bidirectional=True, dropout=0.3, batch_first=True).to(device)
        x = grid(device, 3, 6, 4).requires_grad_()
        out, _ = model(x)
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 2]), batch_first=True)
        short, _ = model(packed)
        results.append((x, trained(model, out.sum() + short.data.sum())))
    cell = nn.LSTMCell(4, 5).to(device)
    return results, cell(grid(device, 3, 4))


def attention(device: str, backend: Any, **how: Any) -> Any:
    q, k, v = (grid(device, 2, 2, 8, 16).roll(i, -1).requires_grad_() for i in range(3))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, **how)
    out.square().sum().backward()
    return q, k, v, out


@program("attention: math")
def attention_math(device):
    mask = torch.ones(8, 8, dtype=torch.bool, device=device).tril()
    kind = SDPBackend.MATH
    return attention(device, kind), attention(device, kind, attn_mask=mask), attention(device, kind, dropout_p=0.5)


@program("attention: flash")
def attention_flash(device):
    kind = SDPBackend.FLASH_ATTENTION
    if device != "cpu":
        return attempt(attention, device, kind), grid(device, 2) + 1
    return attention(device, kind), attention(device, kind, is_causal=True), attention(device, kind, scale=0.3)


@program("attention: the others, and whichever fits")
def attention_others(device):
    q = grid(device, 2, 2, 8, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        missing = [
            attempt(attention, device, kind)
            for kind in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.OVERRIDEABLE)
            if device == "cpu"
        ]
    grouped = F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], enable_gqa=True)
    many = nn.MultiheadAttention(16, 2, dropout=0.2, batch_first=True).to(device)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).to(device).eval()
    with torch.no_grad():
        fast = layer(q[0])
    return missing, grouped, many(q[0], q[0], q[0]), fast, F.scaled_dot_product_attention(q, q, q, is_causal=True)


# -- other kinds of tensors ----------------------------------------------------------------------------------


@program("sparse tensors", not_on_sim=NO_SPARSE)
def sparse(device):
    x = (grid(device, 4, 4) * torch.eye(4, device=device)).to_sparse().requires_grad_()
    y = torch.sparse.mm(x, grid(device, 4, 2))
    y.sum().backward()
    table = nn.Embedding(5, 3, sparse=True).to(device)
    table(torch.tensor([1, 3, 1], device=device)).sum().backward()
    optimizer = torch.optim.SparseAdam(table.parameters())
    optimizer.step()
    rows = x.detach().to_dense().to_sparse_csr()
    blocks = x.detach().to_dense().to_sparse_bsr((2, 2))
    results = [
        x.detach().coalesce().values() * 2,
        x.detach() + x.detach(),
        rows @ grid(device, 4, 2),
        blocks.to_dense(),
    ]
    return y, x.grad.to_dense(), table.weight, table.weight.grad.coalesce(), optimizer.state_dict(), results


@program(
    "nested tensors", not_on_sim="the simulated device has no nested tensors", unverified=frozenset({"nested tensor"})
)
def nested(device):
    parts = [grid(device, 2, 4), grid(device, 3, 4)]
    old = torch.nested.nested_tensor(parts, requires_grad=True)
    new = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    results = []
    for t in (old, new):
        y = F.linear(t, grid(device, 5, 4)).relu() * 2
        y.to_padded_tensor(0.0).sum().backward()
        results += [y.to_padded_tensor(0.0), *[p.clone() for p in t.grad.unbind()]]
    return results


@program("quantized tensors", not_on_sim="the simulated device has no quantized tensors")
def quantized(device):
    x = grid(device, 3, 4)
    q = torch.quantize_per_tensor(x, 0.1, 3, torch.quint8)
    c = torch.quantize_per_channel(x, torch.full((3,), 0.1), torch.zeros(3, dtype=torch.long), 0, torch.qint8)
    fake = torch.fake_quantize_per_tensor_affine(x.requires_grad_(), 0.1, 0, 0, 255)
    fake.sum().backward()
    total = torch.ops.quantized.add(q, q, 0.2, 3)
    return q, q.dequantize() * 2, q.int_repr() + 1, c.dequantize(), F.relu(q).int_repr(), fake, x, total


@program("complex tensors", by_torch=GRADIENTS)
def complex_numbers(device):
    z = torch.complex(grid(device, 3, 3), grid(device, 3, 3).flip(0)).requires_grad_()
    loss = (z @ z.mH).abs().sum() + torch.fft.fft(z).real.square().sum() + torch.view_as_real(z).prod()
    loss.backward()
    return z, loss, torch.polar(z.detach().abs(), z.detach().angle()), torch.linalg.eigvals(z.detach()).abs().sort()[0]


class Named(torch.Tensor):
    """A subclass without a dispatch of its own."""


class Logged(torch.Tensor):
    """A subclass with a function of its own."""

    names: list[str] = []  # noqa: RUF012 - one list for the program

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.names.append(getattr(func, "__name__", ""))
        return super().__torch_function__(func, types, args, kwargs)


@program("tensor subclasses")
def subclasses(device):
    two = TwoTensor(grid(device, 3).requires_grad_(), grid(device, 3) * 2)
    out = (two * 2 + 1).exp()
    named = grid(device, 3).as_subclass(Named)
    named.add_(1)
    Logged.names.clear()
    logged = grid(device, 3).as_subclass(Logged)
    total = (logged * 2).sum()
    parameter = nn.Parameter(grid(device, 3).as_subclass(Named))
    (parameter * 2).sum().backward()
    return [out.a, out.b], named * 2, total, list(Logged.names), parameter, parameter.grad


@program("FakeTensorMode", uncompared="fake tensors have no values")
def fake(device):
    with FakeTensorMode() as mode:
        x = torch.ones(3, 4, device=device)
        y = (x @ x.t() * 2).sum(0)
        model = nn.Linear(4, 2, device=device)
        made = model(x)
        made.sum().backward()
    shapes = [tuple(t.shape) for t in (y, made, model.weight.grad)]
    return shapes, str(y.device), type(y).__name__, mode.shape_env is None


@program("meta tensors", uncompared="meta tensors have no values")
def meta(device):
    x = torch.ones(3, 4, device="meta", requires_grad=True)
    y = F.softmax(x @ x.t(), 0)
    y.sum().backward()
    return tuple(y.shape), tuple(x.grad.shape), y.stride()


@program("make_fx and export")
def traced(device):
    x = grid(device, 3)
    model = network("cpu", dropout=0.0).eval()
    graphs = [
        make_fx(lambda v: (v * 2).sum().relu(), tracing_mode=mode)(x).code for mode in ("real", "fake", "symbolic")
    ]
    exported = torch.export.export(model, (grid("cpu", 5, 4),))
    graphs.append(exported.graph_module.code)
    return graphs, exported.module()(grid("cpu", 5, 4)), make_fx(torch.sin)(x)(x)


@torch.jit.script
def scripted(x: torch.Tensor, n: int) -> torch.Tensor:
    for i in range(n):
        x = x * 2 + i
    return torch.relu(x)


@program("torch.jit")
def jit(device):
    x = grid(device, 3).requires_grad_()
    y = scripted(x, 3)
    y.sum().backward()
    model = torch.jit.trace(network("cpu", dropout=0.0).eval(), grid("cpu", 5, 4))
    return x, y, model(grid("cpu", 5, 4))


@program("torch.compile")
def compiled(device):
    torch._dynamo.reset()
    results = []
    for backend in ("eager", "aot_eager"):
        model = network("cpu")
        fast = torch.compile(model, backend=backend)
        torch.manual_seed(3)
        results += [trained(model, fast(grid("cpu", 5, 4)).square().sum()) for _ in range(2)]

    @torch.compile(backend="eager")
    def broken(x):
        for _ in range(2):
            x = x * 2
            torch._dynamo.graph_break()
        return x + 1

    return results, broken(grid("cpu", 3))


# -- operators that take functions, and those of others ------------------------------------------------------


@program("cond, while_loop and map")
def control_flow(device):
    from torch._higher_order_ops.map import map as map_over
    from torch._higher_order_ops.while_loop import while_loop

    x = grid("cpu", 3).requires_grad_()
    y = torch.cond(x.sum() > 0, lambda v: v.sin() * 2, lambda v: v.cos() + 1, (x,))
    y.sum().backward()
    counted = while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v.cos() * 2), (torch.tensor(0), grid("cpu", 2)))
    return x, y, counted, map_over(lambda v: v.exp() + 1, grid("cpu", 3, 2))


@program("flex attention", not_on_sim="flex attention is for some devices only")
def flex(device):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q = grid(device, 1, 2, 16, 8)
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 16, 16, device=device)
    bias = grid(device, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scored = flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + bias[i - j])
        return scored, flex_attention(q, q, q, block_mask=mask), flex_attention(q, q, q, return_lse=True)


@torch.library.custom_op("shadowrun_test::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@torch.library.custom_op("shadowrun_test::scale_", mutates_args=("x",))
def scale_(x: torch.Tensor, by: float) -> None:
    x.mul_(by)


halve.register_autograd(lambda ctx, grad: grad / 2)
halve.register_fake(torch.empty_like)


@program("custom operators", unverified=CUSTOM, by_torch="under a mode, the version is counted once, not twice")
def custom(device):
    x, y = grid(device, 3).requires_grad_(), grid(device, 3)
    out = halve(x * 2)
    out.sum().backward()
    scale_(y, 3.0)
    return x, out, y, y._version, torch.func.vmap(torch.sin)(y)
