"""Lengths of sequences that kernels of the CPU believe: attention, recurrent layers, packed sequences, CTC."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.intercept.untrusted.argument_checks import integers, is_inside, tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadowrun.intercept.untrusted.argument_checks import ArgumentCheck, NamedArguments

__all__ = ["FAMILIES", "RECURRENT"]

RECURRENT: Final = (
    *("gru", "lstm", "rnn_relu", "rnn_tanh", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"),
    *("_cudnn_rnn", "_cudnn_rnn_backward", "miopen_rnn", "miopen_rnn_backward"),
)
"""Operators of recurrent networks: their states and weights have to fit each other, and kernels do not look."""

_MAX_LAYERS: Final = 10_000
_GATES: Final = {0: 1, 1: 1, 2: 4, 3: 3}
"""Of rnn_relu, rnn_tanh, lstm and gru, by their number."""


def _attention(given: NamedArguments) -> Iterator[str]:
    found = tensors(given, "key", "value")
    # The kernel for the CPU reads as many keys as there are values (pytorch/pytorch#193728).
    if found and found[0].shape[-2:-1] != found[1].shape[-2:-1]:
        yield "key and value have other lengths"
    # The number of heads of a query is divided by theirs, of integers: that ends the process.
    elif found and any(t.dim() > 2 and not t.shape[-3] for t in found):
        yield "key and value have no heads"


def _attention_of_cpu(given: NamedArguments) -> Iterator[str]:
    found = tensors(given, "query", "key", "value")
    if not found:
        return
    query, key, value = found
    mask = given.get("attn_mask")
    if any(t.dim() != 4 for t in found) or len({t.shape[0] for t in found}) > 1 or key.shape[1] != value.shape[1]:
        yield "query, key and value have other numbers of batches or heads"
    elif len({t.shape[3] for t in found}) > 1 or not key.shape[1] or query.shape[1] % key.shape[1]:
        yield "query, key and value have heads that do not fit"
    elif not query.shape[2] or not key.shape[2]:  # a division by their lengths
        yield "query or key has no length"
    elif isinstance(mask, torch.Tensor):
        scores = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        if mask.dim() not in (2, 4) or any(
            n not in (1, m) for n, m in zip(mask.shape, scores[-mask.dim() :], strict=True)
        ):
            yield "attn_mask has not the shape of the scores"


def _rnn_of_mkldnn(given: NamedArguments) -> Iterator[str]:
    names = [("weight1", "weight2", "weight3", "weight4"), ("weight0", "weight1", "weight2", "weight3")]
    found = next(filter(None, (tensors(given, "input", *n, "hx_") for n in names)), None)
    mode, hidden, n_layers = (given.get(name) for name in ("mode", "hidden_size", "num_layers"))
    if not found or type(mode) is not int or type(hidden) is not int or type(n_layers) is not int:
        return
    x, into, on, bias_into, bias_on, hx = found
    cx = given.get("cx_", given.get("cx_tmp"))
    rows = _GATES.get(mode, 0) * hidden
    if not all(t.is_contiguous() for t in (*found, cx) if isinstance(t, torch.Tensor)):
        yield "its tensors are not contiguous"
    # The number of layers is that of the whole module, of which this is one layer in one direction.
    elif rows <= 0 or not 0 < n_layers <= _MAX_LAYERS or x.dim() != 3 or given.get("batch_sizes"):
        yield "it is none that torch calls"
    elif into.shape != (rows, x.shape[2]) or on.shape != (rows, hidden):
        yield "its weights have other shapes"
    elif given.get("has_biases") and not bias_into.shape == bias_on.shape == (rows,):
        yield "its biases have other shapes"
    else:
        for t in (hx, cx):
            # Steps come first, whatever the module's argument `batch_first` is.
            if isinstance(t, torch.Tensor) and t.numel() != x.shape[1] * hidden:
                yield "its states have other shapes"
                return


def _rnn_of_mkldnn_backward(given: NamedArguments) -> Iterator[str]:
    found = tensors(given, "input", "weight1", "weight2", "weight3", "weight4", "hx_", "cx_tmp")
    saved = tensors(given, "output", "hy_", "cy_", "workspace")
    how = [given.get(name) for name in _HOW]
    # The look at the forward call comes first: only calls that it accepts are made here.
    if not found or not saved or any(value is None for value in how) or next(_rnn_of_mkldnn(given), ""):
        return
    # Which memory the forward call needs is known to its library only.
    made = torch.ops.aten.mkldnn_rnn_layer.default(*found, *how)
    grads = [given.get(name) for name in ("grad_output", "grad_hy", "grad_cy")]
    pairs = [*zip(saved, made, strict=True), *((g, t) for g, t in zip(grads, made, strict=False) if g is not None)]
    if not all((t.shape, t.dtype) == (m.shape, m.dtype) and t.is_contiguous() for t, m in pairs):
        yield "its tensors are not those that its forward call returns"


_HOW: Final = (
    *("reverse", "batch_sizes", "mode", "hidden_size", "num_layers", "has_biases", "bidirectional", "batch_first"),
    "train",
)


def _labels(given: NamedArguments) -> Iterator[str]:
    found = tensors(given, "log_probs", "targets")
    of_inputs, of_labels = _numbers(given.get("input_lengths")), _numbers(given.get("target_lengths"))
    if not found or of_inputs is None or of_labels is None:
        return
    scores, labels = found
    if not labels.is_contiguous():
        yield "targets are not contiguous"
    elif scores.dim() != 3 or labels.dim() not in (1, 2) or not is_inside(labels, 0, scores.shape[-1]):
        yield "targets has some that are no class"
    elif not len(of_inputs) == len(of_labels) == scores.shape[1] or not 0 <= given.get("blank", 0) < scores.shape[2]:
        yield "its lengths are not as many as sequences, or blank is no class"
    elif not all(0 <= n <= scores.shape[0] for n in of_inputs) or not all(n >= 0 for n in of_labels):
        yield "input_lengths are no lengths of log_probs"
    elif labels.dim() == 1 and labels.shape[0] != sum(of_labels):
        yield "target_lengths are no lengths of targets"
    elif labels.dim() == 2 and (labels.shape[0] != len(of_labels) or labels.shape[1] < max(of_labels, default=0)):
        yield "target_lengths are longer than the rows of targets"
    else:
        paths = (scores.shape[0], 2 * max(of_labels, default=0) + 1)
        for name, shape in (("grad", ()), ("neg_log_likelihood", ()), ("log_alpha", paths)):
            t = given.get(name)
            if isinstance(t, torch.Tensor) and t.shape != (scores.shape[1], *shape):
                yield f"{name} has another shape than the forward pass gives it"


def _numbers(value: Any) -> list[int] | None:
    """Integers of a list, or of a tensor of one dimension; None where they are not known."""
    if isinstance(value, torch.Tensor):
        return None if value.is_meta else integers(value)
    return [int(n) for n in value] if isinstance(value, (list, tuple)) else None


def _packed(given: NamedArguments) -> Iterator[str]:
    found = tensors(given, "data", "batch_sizes")
    if found:
        data, sizes = found
        is_one = sizes.dim() == 1 and sizes.dtype is torch.int64 and data.dim() > 0 and sizes.is_contiguous()
        if (
            not is_one
            or not sizes.numel()
            or not is_inside(sizes, 1, 1 << 62)
            or any(b > a for a, b in itertools.pairwise(integers(sizes)))
        ):
            yield "batch_sizes are no sizes of batches"
        elif int(sizes.sum()) != data.shape[0]:
            yield "batch_sizes are not as many as data"


def _layers(given: NamedArguments) -> Iterator[str]:
    n = given.get("num_layers")
    if type(n) is not int:
        return
    if not 0 < n <= _MAX_LAYERS:
        yield f"num_layers is {n}"
    states = given.get("hx")
    states = states if isinstance(states, (list, tuple)) else [states]
    states = [*states, given.get("cx")]
    rows = 2 * n if given.get("bidirectional") else n
    if any(isinstance(t, torch.Tensor) and (t.dim() != 3 or t.shape[0] != rows) for t in states):
        yield "hx or cx has not a state for each layer and direction"


FAMILIES: Final[dict[str, ArgumentCheck]] = {
    r"_?scaled_dot_product\w*attention\w*": _attention,
    r"_scaled_dot_product_flash_attention_for_cpu\w*": _attention_of_cpu,
    r"mkldnn_rnn_layer\w*": _rnn_of_mkldnn,
    "mkldnn_rnn_layer_backward": _rnn_of_mkldnn_backward,
    "_ctc_loss(_backward)?": _labels,
    "(_pad_packed_sequence|lstm|gru|rnn_tanh|rnn_relu)": _packed,
    # Of other devices too: the CPU computes these by the operators above.
    r"(lstm|gru|rnn_tanh|rnn_relu|(_cudnn|miopen)_rnn(_backward)?)": _layers,
}
"""By a pattern of names without namespace and overload."""
