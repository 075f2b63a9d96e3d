"""Operators of an accelerator's own libraries, and what the CPU computes for them.

On a GPU `F.batch_norm` becomes `aten::cudnn_batch_norm`, attention one of three fused kernels, an LSTM
`aten::_cudnn_rnn`; the CPU has none of them. What they compute is defined, so the reference computes that by its own
operators, and the float64 oracle too. Results that are the kernel's own affair (log-sums in a padded layout, seeds,
reserve space) are None and not compared: what they are good for is compared where the backward uses them.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from shadowrun.intercept.torch_operators import raw_operator
from shadowrun.intercept.untrusted.checked_calls import changed_call, check_changed
from shadowrun.intercept.untrusted.sequence_lengths import RECURRENT
from shadowrun.operators.case import flat_results
from shadowrun.operators.cpu_only_ops import attend, attention_weights, in_thread
from shadowrun.operators.facts import base_name
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.intercept.plan import OpPlan
    from shadowrun.operators.case import Arguments, Case, Value

__all__ = ["COUNTERPARTS", "compared", "evaluate", "for_reference", "is_recurrent", "run_changed"]

Tensor = torch.Tensor
Results = tuple[Any, ...]
_Operator: TypeAlias = "Callable[..., Tensor]"
_aten = torch.ops.aten
_DREW = "it drew random numbers, which the CPU cannot draw"
_RNNS: Final = (torch.rnn_relu, torch.rnn_tanh, torch.lstm, torch.gru)
# Place in `_RNNS`: cuDNN's number of the mode.
_LSTM: Final = 2


def _batch_norm(*args: Any) -> Results:
    # The fourth result is cuDNN's reserve space.
    return (*_aten.native_batch_norm.default(*args), None)


def _miopen_batch_norm(*args: Any) -> Results:
    return tuple(_aten.native_batch_norm.default(*args))


def _batch_norm_backward(
    x: Tensor,
    grad: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    epsilon: float,
    reserve: Tensor | None = None,
) -> Results:
    del reserve
    saved = (weight, mean, variance, save_mean, save_invstd)
    return tuple(_aten.native_batch_norm_backward.default(grad, x, *saved, True, epsilon, [True] * 3))


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, _: bool, p: float = 0.0, causal: bool = False, **scale: Any
) -> Results:
    return attend(q, k, v, p, causal, attn_mask=bias, **scale)[0], None, None, None


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, *args: Any, **scale: Any
) -> Results:
    p, mask, causal = args[3], args[4], bool(args[5]) if len(args) > 5 else False
    # The CPU cannot repeat the kernel's random mask: its seed is private to the kernel.
    _refuse_dropout(p)
    grads = _attention_backward(grad, q, k, v, bias, out, causal=causal, scale=scale.get("scale"))
    return tuple(g if wanted else None for g, wanted in zip(grads, mask, strict=True))


def _flash(q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, causal: bool = False, *_: Any, **named: Any) -> Results:
    # Of nine results, the output alone is defined.
    return attend(q, k, v, p, causal, scale=named.get("scale"))[0], *[None] * 8


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *args: Any, **scale: Any) -> Results:
    p, causal = args[5], args[6]
    _refuse_dropout(p)
    return _attention_backward(grad, q, k, v, None, out, causal=causal, scale=scale.get("scale"))[:3]


def _cudnn_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *args: Any, **named: Any) -> Results:
    p, causal = args[1] if len(args) > 1 else 0.0, args[2] if len(args) > 2 else False
    return attend(q, k, v, p, causal, attn_mask=bias, scale=named.get("scale"))[0], *[None] * 8


def _cudnn_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *args: Any, **scale: Any
) -> Results:
    bias, p, causal = args[3], args[8], args[9]
    _refuse_dropout(p)
    return _attention_backward(grad, q, k, v, bias, out, causal=causal, scale=scale.get("scale"))[:3]


def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    causal: bool,
    scale: float | None,
) -> Results:
    """Gradients of query, key, value and bias, from the saved output as all fused kernels compute them.

    With P = softmax(scale q kᵀ + bias): dV = Pᵀ dO, dS = P (dO Vᵀ - rowsum(dO O)), dQ = scale dS K, dK = scale dSᵀ Q
    (Dao et al., FlashAttention, algorithm 4). The row sum cancels dO Vᵀ where a query sees one key: what remains there
    is the rounding of O, so that an O of the reference's would not do.
    """
    bias = None if bias is None or not bias.numel() else bias
    # Kernels compute in float32, also on 16-bit tensors.
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[-3] // k.shape[-3] if q.dim() > 3 else 1
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dscores: list[Tensor] = []
    # One head of keys at a time: the scores of all would take as much memory as no fused kernel does.
    for batch, head in itertools.product(range(k.shape[0]), range(k.shape[1])):
        at, heads = (batch, head), (batch, slice(head * group, (head + 1) * group))
        one_q, one_k, one_v = q[heads].to(wide), k[at].to(wide), v[at].to(wide)
        one_grad = grad[heads].to(wide)
        mask = None if bias is None else bias.expand(*q.shape[:-1], k.shape[-2])[heads]
        p = attention_weights(one_q, one_k, mask, is_causal=causal, scale=factor)
        ds = p * (one_grad @ one_v.mT - (one_grad * out[heads].to(wide)).sum(-1, keepdim=True))
        dq[heads] = (ds @ one_k * factor).to(q.dtype)
        dk[at] = (ds.mT @ one_q * factor).sum(0).to(k.dtype)
        dv[at] = (p.mT @ one_grad).sum(0).to(v.dtype)
        if bias is not None:
            dscores.append(ds)
    if bias is None or not dscores:
        return dq, dk, dv, None
    dbias = torch.cat(dscores).reshape(*q.shape[:-1], k.shape[-2]).sum_to_size(bias.shape)
    return dq, dk, dv, dbias.to(bias.dtype)


def _rms_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, mask: list[bool]
) -> Results:
    """With n = x rstd and h = w grad: grad_x = rstd (h - n mean(h n)), grad_w = sum(grad n)."""
    inner = tuple(range(x.dim() - len(shape), x.dim()))
    outer = tuple(range(x.dim() - len(shape)))
    # Kernels compute gradients of norms in float32, also for 16-bit tensors.
    wide = torch.promote_types(x.dtype, torch.float32)
    normed, grad = x.to(wide) * rstd.to(wide), grad.to(wide)
    h = grad if weight is None else grad * weight.to(wide)
    grad_x = (rstd.to(wide) * (h - normed * (h * normed).mean(inner, keepdim=True))).to(x.dtype)
    if weight is None or not mask[1]:
        return grad_x if mask[0] else None, None
    grad_w = (grad * normed).sum(outer) if outer else grad * normed
    return grad_x if mask[0] else None, grad_w.to(weight.dtype)


def _grid_sampler(x: Tensor, grid: Tensor) -> Results:
    # torch gives cuDNN only this kind: bilinear, zeros outside, corners aligned.
    return (_aten.grid_sampler_2d.default(x, grid, 0, 0, True),)


def _grid_sampler_backward(x: Tensor, grid: Tensor, grad: Tensor) -> Results:
    return tuple(_aten.grid_sampler_2d_backward.default(grad, x, grid, 0, 0, True, [True, True]))


def _rnn(x: Tensor, weights: list[Tensor], stride0: int, _: Any, hx: Tensor, cx: Tensor | None, *args: Any) -> Results:
    mode, _, _, layers, batch_first, _, train, bidirectional, batch_sizes, _ = args
    state: Any = [hx, cx] if mode == _LSTM else hx
    layers_of: Any = _RNNS[mode]
    # `weight_stride0` counts the weights of a layer: two, or three with a projection, where there are no biases.
    how = (stride0 > 3, layers, 0.0, train, bidirectional)
    if len(batch_sizes):
        packed = torch.tensor(list(batch_sizes))
        found = layers_of(x, packed, state, list(weights), *how)
    else:
        found = layers_of(x, state, list(weights), *how, batch_first)
    return (*found, *[None] * (5 - len(found)))


def _rnn_backward(
    x: Tensor, weights: list[Tensor], stride0: int, buffer: Any, hx: Tensor, cx: Tensor | None, *args: Any
) -> Results:
    grads, how, mask = args[1:4], args[4:14], args[15]
    _refuse_dropout(how[5])

    def run() -> list[Any]:
        own: list[Tensor] = [t.detach().requires_grad_() for t in (x, hx, *([] if cx is None else [cx]), *weights)]
        states, others = own[1 : len(own) - len(weights)], own[len(own) - len(weights) :]
        out = _rnn(own[0], others, stride0, buffer, states[0], states[1] if len(states) > 1 else None, *how)
        pairs = [(o, g) for o, g in zip(out, grads, strict=False) if o is not None and g is not None]
        return list(torch.autograd.grad([o for o, _ in pairs], own, [g for _, g in pairs], allow_unused=True))

    # Below a dispatch mode autograd is excluded; a new thread has it.
    found = in_thread(run)
    states = found[1 : len(found) - len(weights)]
    results = (found[0], states[0], states[1] if len(states) > 1 else None, found[len(found) - len(weights) :])
    return tuple(r if wanted else None for r, wanted in zip(results, mask, strict=True))


def _inputs(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> list[Tensor]:
    return [q, k, v] if bias is None or not bias.numel() else [q, k, v, bias]


def _refuse_dropout(p: float) -> None:
    if p:
        raise NotImplementedError(_DREW)


def _log_sigmoid_backward(operator: _Operator) -> _Operator:
    def run(grad: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
        # Accelerators save an empty buffer; the CPU reads exp(-|x|) from it.
        return operator(grad, x, buffer if buffer.numel() == x.numel() else _aten.log_sigmoid_forward.default(x)[1])

    return run


def _softmax(operator: _Operator) -> _Operator:
    """Softmax whose 16-bit input becomes float32 on the way, which only accelerators do in one kernel."""
    return lambda x, dim, half_to_float: operator(x.float() if half_to_float else x, dim, False)


def _softmax_backward(operator: _Operator) -> _Operator:
    """The backward pass of that: a float32 gradient becomes one of the 16-bit input."""
    # The CPU's operator takes no notice of the input's dtype; a 16-bit gradient stays one on each device.
    return lambda grad, out, dim, input_dtype: operator(grad, out, dim, grad.dtype).to(
        input_dtype if grad.dtype is torch.float32 else grad.dtype
    )


def _histc(operator: _Operator) -> _Operator:
    # The CPU counts floating numbers only.
    return lambda x, *args: operator(x if x.is_floating_point() else x.double(), *args).to(x.dtype)


def _grouped_mm(operator: _Operator) -> _Operator:
    """Products of groups of rows, columns or terms, which end at `offs`; the operator itself has no float64."""

    def run(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
        if a.dtype is not torch.float64 or bias is not None:
            return operator(a, b, offs, bias, out_dtype)
        if offs is None:
            return a @ b
        ends = offs.tolist()
        groups = list(enumerate(slice(*bounds) for bounds in zip([0, *ends], ends, strict=False)))
        if a.dim() == b.dim() == 2:
            return torch.stack([a[:, group] @ b[group] for _, group in groups])
        if b.dim() == 2:
            return torch.cat([a[i] @ b[:, group] for i, group in groups], 1)
        products = torch.cat([a[group] @ b[i] for i, group in groups])
        # Rows behind the last group have no value.
        return torch.cat([products, products.new_zeros(len(a) - len(products), products.shape[1])])

    return run


COUNTERPARTS: Final[dict[str, Callable[..., Results]]] = {
    "aten::cudnn_batch_norm": _batch_norm,
    "aten::cudnn_batch_norm_backward": _batch_norm_backward,
    "aten::miopen_batch_norm": _miopen_batch_norm,
    "aten::miopen_batch_norm_backward": _batch_norm_backward,
    "aten::_scaled_dot_product_efficient_attention": _efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten::_scaled_dot_product_flash_attention": _flash,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_cudnn_attention": _cudnn_attention,
    "aten::_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
    "aten::_fused_rms_norm_backward": _rms_norm_backward,
    "aten::cudnn_grid_sampler": _grid_sampler,
    "aten::cudnn_grid_sampler_backward": _grid_sampler_backward,
    "aten::_cudnn_rnn": _rnn,
    "aten::_cudnn_rnn_backward": _rnn_backward,
}
"""Each gives all results of the operator, None in the place of those that are not compared."""

_COMPLETED: Final[dict[str, Callable[[_Operator], _Operator]]] = {
    "aten::log_sigmoid_backward": _log_sigmoid_backward,
    "aten::_softmax": _softmax,
    "aten::_log_softmax": _softmax,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::_log_softmax_backward_data": _softmax_backward,
    "aten::histc": _histc,
    "aten::_grouped_mm": _grouped_mm,
}
"""Operators that the CPU has too, but not in every form that another device has."""


def for_reference(plan: OpPlan) -> OpPlan:
    """The plan by which the CPU runs an operator that may be another device's own."""
    own = plan.name not in COUNTERPARTS and plan.name not in _COMPLETED
    return plan if own else replace(plan, run=_on_cpu(plan.func))


def evaluate(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[str, ...], tuple[Value, ...]]:
    """Names and values that a call gives on the CPU, on other inputs of its kind: slices of them, or other values.

    Raises:
        Refused: They do not fit each other, and a kernel would read or write outside of them.
        RuntimeError: The operator refuses them; or another exception of its own.
    """
    with torch.no_grad(), changed_call(case.func, args, kwargs, stands_in=case.op in COUNTERPARTS):
        results = _on_cpu(case.func)(*args, **kwargs)
    return flat_results(case.func, case.mutated, args, kwargs, results)


def is_recurrent(case: Case) -> bool:
    """Whether a call is one of a recurrent network, in which states and weights have to fit each other."""
    return base_name(case.op) in RECURRENT


def run_changed(
    case: Case, run: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Value, ...]], arguments: Arguments
) -> tuple[Value, ...]:
    """Run a call on a platform, on other inputs of its kind.

    Args:
        case: The call.
        run: Its `run_target`, `run_reference` or `run_at_offsets`.
        arguments: The inputs, on the CPU, which it may modify.

    Raises:
        Refused: They do not fit each other, and a kernel would read or write outside of them.
    """
    args, kwargs = arguments
    check_changed(case.func, args, kwargs, COUNTERPARTS.get(case.op))
    return run(args, kwargs)


def _on_cpu(func: torch._ops.OpOverload) -> Callable[..., Any]:
    """What runs an operator on the CPU: itself or, where it is another device's own, its counterpart."""
    name: str = func.name()  # type: ignore[no-untyped-call]
    own = COUNTERPARTS.get(name)
    if own is None:
        operator: _Operator = raw_operator(func)
        return _COMPLETED[name](operator) if name in _COMPLETED else operator
    return own if len(schema_of(func).returns) > 1 else lambda *args, **kwargs: own(*args, **kwargs)[0]


def compared(plan: OpPlan, expected: Any) -> OpPlan:
    """The plan of a call that looks only at results which the CPU's counterpart gives."""
    if plan.n_returns == 1:
        return plan
    # Kernel-private results (seeds, reserve space) are compared by their use in the backward.
    left_out = {i for i, value in enumerate(expected) if value is None}
    return replace(plan, uninitialised=plan.uninitialised | left_out)
