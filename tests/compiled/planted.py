"""Compilers that are wrong on purpose, one fault each: wrong lowerings, decompositions and passes."""

import dataclasses
from collections.abc import Callable

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Fault:
    """One wrong operator.

    Attributes:
        model: In which model it shows.
        phase: ``forward`` or ``backward``.
        op: The operator that is wrong, which must be named.
        wrong: What is computed instead.
        line: Part of the user's line that the operator comes from.
        module: Paths of the modules it is in.
    """

    model: str
    phase: str
    op: torch._ops.OpOverload
    wrong: Callable
    line: str
    module: tuple[str, ...] = ("",)


def scaled(op, by=1.001, which=0):
    """The operator with one of its results a little too great."""

    def wrong(*args, **kwargs):
        out = op(*args, **kwargs)
        if isinstance(out, tuple):
            return tuple(v * by if i == which else v for i, v in enumerate(out))
        return out * by

    return wrong


def rounded(op, dtype=torch.bfloat16):
    """The operator on inputs rounded to a shorter format."""

    def wrong(*args, **kwargs):
        short = [a.to(dtype).to(a.dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        return op(*short, **kwargs)

    return wrong


def without_bias(bias, a, b, **kwargs):
    return aten.mm.default(a, b)


def other_momentum(*args, **kwargs):
    return aten._native_batch_norm_legit_functional.default(*args[:6], 0.2, *args[7:], **kwargs)


def other_epsilon(x, shape, weight, bias, eps):
    return aten.native_layer_norm.default(x, shape, weight, bias, 1e-3)


def lost_duplicates(grad, indices, n, padding, scale):
    out = grad.new_zeros(n, grad.shape[-1])
    out[indices.reshape(-1)] = grad.reshape(-1, grad.shape[-1])
    return out


def fault(model, phase, op, wrong, line, *modules):
    return Fault(model, phase, op, wrong, line, modules or ("",))


FAULTS = {
    # decompositions
    "gelu by tanh": fault(
        "transformer", "forward", aten.gelu.default, lambda x: aten.gelu.default(x, approximate="tanh"), "F.gelu",
        "blocks.0", "blocks.1",
    ),
    "gelu backward by tanh": fault(
        "transformer", "backward", aten.gelu_backward.default,
        lambda g, x: aten.gelu_backward.default(g, x, approximate="tanh"), "F.gelu", "blocks.0", "blocks.1",
    ),
    "another epsilon in layer norm": fault(
        "transformer", "forward", aten.native_layer_norm.default, other_epsilon, "self.norm", "blocks.0.norm",
        "blocks.1.norm",
    ),
    "scale dropped before softmax": fault(
        "transformer", "forward", aten._softmax.default, lambda x, d, h: aten._softmax.default(x * 8**0.5, d, h),
        "softmax", "blocks.0", "blocks.1",
    ),
    "softmax backward without its sum": fault(
        "transformer", "backward", aten._softmax_backward_data.default, lambda g, y, d, t: g * y, "softmax", "blocks.0",
        "blocks.1",
    ),
    "duplicate tokens lost": fault(
        "transformer", "backward", aten.embedding_dense_backward.default, lost_duplicates, "self.embed", "embed"
    ),
    "another momentum in batch norm": fault(
        "perceptron", "forward", aten._native_batch_norm_legit_functional.default, other_momentum, "self.norm", "norm"
    ),
    "relu lets negatives through": fault(
        "perceptron", "forward", aten.relu.default, lambda x: aten.leaky_relu.default(x, 0.01), "F.relu"
    ),
    "relu backward without its mask": fault(
        "perceptron", "backward", aten.threshold_backward.default, lambda g, x, t: g * 1.0, "F.relu"
    ),
    "bias dropped": fault("perceptron", "forward", aten.addmm.default, without_bias, "self.h", "hidden", "head"),
    "log_softmax backward too great": fault(
        "perceptron", "backward", aten._log_softmax_backward_data.default,
        scaled(aten._log_softmax_backward_data.default), "log_softmax",
    ),
    # lowerings
    "convolution in bfloat16": fault(
        "convolutional", "forward", aten.convolution.default, rounded(aten.convolution.default), "self.conv", "conv"
    ),
    "convolution's bias gradient": fault(
        "convolutional", "backward", aten.convolution_backward.default,
        scaled(aten.convolution_backward.default, which=2), "self.conv", "conv",
    ),
    "silu by a hard sigmoid": fault(
        "convolutional", "forward", aten.silu.default, lambda x: x * (x / 6 + 0.5).clamp(0, 1), "F.silu"
    ),
    "group norm backward": fault(
        "convolutional", "backward", aten.native_group_norm_backward.default,
        scaled(aten.native_group_norm_backward.default, which=1), "self.norm", "norm",
    ),
    "mean over one too few": fault(
        "convolutional", "forward", aten.mean.dim, lambda x, d, keepdim=False: x.sum(d, keepdim) / 8, "h.mean"
    ),
    "tanh a little too small": fault(
        "gated", "forward", aten.tanh.default, scaled(aten.tanh.default, 0.9999), "torch.tanh"
    ),
    "tanh backward with y for y squared": fault(
        "gated", "backward", aten.tanh_backward.default, lambda g, y: g * (1 - y), "torch.tanh"
    ),
    "sigmoid backward in half": fault(
        "gated", "backward", aten.sigmoid_backward.default, rounded(aten.sigmoid_backward.default, torch.float16),
        "torch.sigmoid",
    ),
    "exp to ten bits": fault("gated", "forward", aten.exp.default, rounded(aten.exp.default, torch.float16), ".exp()"),
    # attention, which is tagged as random without dropout too
    "attention too great": fault(
        "attention", "forward", aten._scaled_dot_product_flash_attention_for_cpu.default,
        scaled(aten._scaled_dot_product_flash_attention_for_cpu.default), "F.scaled_dot_product_attention",
    ),
    "gradient of the keys too great": fault(
        "attention", "backward", aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        scaled(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, which=1),
        "F.scaled_dot_product_attention",
    ),
    # passes
    "a pass that swaps operands": fault(
        "gated", "forward", aten.sub.Tensor, lambda a, b: aten.sub.Tensor(b, a), "state - x"
    ),
}  # fmt: skip


def other_dropout(x, p, train):
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(7)) >= p
    return x * mask / (1 - p), mask


OTHER_DRAWS = fault("", "", aten.native_dropout.default, other_dropout, "")
"""No fault: a mask of another random stream."""


def compiler(*faults, **options):
    """A backend with these operators wrong."""
    wrong = {f.op: f.wrong for f in faults}

    def lower(module, _inputs):
        for node in module.graph.nodes:
            node.target = wrong.get(node.target, node.target) if node.op == "call_function" else node.target
        return run(module)

    return aot_autograd(fw_compiler=lower, bw_compiler=lower, **options)


def fusing(module, _inputs):
    """A pass that needs two nodes: a product that is added to becomes a product with the sum."""
    for node in module.graph.nodes:
        if node.target is aten.add.Tensor and getattr(node.args[0], "target", None) is aten.mul.Tensor:
            product = node.args[0]
            if len(product.users) == 1 and not isinstance(node.args[1], fx.Node):
                with module.graph.inserting_before(node):
                    total = module.graph.call_function(aten.add.Tensor, (product.args[1], node.args[1]))
                node.target, node.args = aten.mul.Tensor, (product.args[0], total)
    return run(module)


def run(module):
    def call(args):
        given, args[:] = list(args), []
        return fx.Interpreter(module).run(*given)

    call._boxed_call = True
    return call


def named(graph, op):
    """Names of the nodes of an operator."""
    return [n.name for n in graph.nodes if n.op == "call_function" and n.target is op]
