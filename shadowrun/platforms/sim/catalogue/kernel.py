"""Wrong kernels: tails, blocks, stale or uninitialised memory, wrong formulas, ties, time."""

from __future__ import annotations

from shadowrun.platforms.sim.flaw import Flaw
from shadowrun.types import Cause

__all__ = ["FLAWS"]


def _flaw(
    name: str, description: str, issue: str, operators: tuple[str, ...], explanation: str = "",
          cause: Cause = Cause.IMPLEMENTATION, statuses: tuple[str, ...] = ("mismatch",),
          accepted: tuple[Cause, ...] = (), kind: str = "kernel") -> Flaw:  # fmt: skip
    return Flaw(name, kind, description, issue, operators, statuses, cause, accepted, explanation)


FLAWS = (
    _flaw("softmax-error", "softmax is off by 2e-4", "none: an exp table that is too coarse",
          ("aten::_softmax", "aten::_safe_softmax")),
    _flaw("gelu-by-tanh", "gelu always uses its tanh approximation", "none: one kernel for both values of approximate",
          ("aten::gelu",)),
    _flaw("silu-tail", "silu does not compute the last element if the size is no multiple of 16",
          "none: a vector loop without its tail", ("aten::silu", "aten::silu_"), "last tile or tail missing"),
    _flaw("layer-norm-block-edge", "layer normalisation is wrong in every 1024th element",
          "none: an off-by-one at a block's edge", ("aten::native_layer_norm",)),
    _flaw("log-softmax-stale", "every third log_softmax returns the result of the one before",
          "none: a buffer that is reused too early", ("aten::_log_softmax",), "stale buffer",
          accepted=(Cause.NON_DETERMINISM,)),
    _flaw("pixel-shuffle-uninitialised", "pixel_shuffle returns memory that nobody wrote",
          "none: torch's lazy device (measured: docs of this project)", ("aten::pixel_shuffle",),
          "uninitialised memory", accepted=(Cause.NON_DETERMINISM,)),
    _flaw("index-select-off-by-one", "index_select reads the next row for the last index",
          "none: an off-by-one at the end of the index",
          ("aten::index_select",)),
    _flaw("remainder-sign", "remainder takes the sign of the dividend, as fmod does",
          "none: the kernel of fmod under another name",
          ("aten::remainder.Scalar", "aten::remainder.Tensor")),
    _flaw("sort-ties-reversed", "sort and topk return equal elements in the other order",
          "none: stability is promised by stable=True only", ("aten::sort", "aten::sort.stable", "aten::topk"),
          "ties", Cause.UNDEFINED, ("unverified", "match")),
    _flaw("index-put-random-order", "index_put_ adds duplicates in another order each time",
          "none: atomic additions, torch.use_deterministic_algorithms",
          ("aten::index_put_", "aten::_index_put_impl_", "aten::index_put"), "", Cause.NON_DETERMINISM,
          ("match", "mismatch", "unverified"), (Cause.ROUNDING,)),
    _flaw("slow-max-pool", "max-pooling takes 5 ms longer", "none: a kernel that nobody has tuned",
          ("aten::max_pool2d_with_indices",), "", Cause.SLOW, ("match",), kind="speed"),
)  # fmt: skip
