"""What only training meets: backward, optimizer, running statistics, duplicates, dropout."""

from __future__ import annotations

from shadowrun.platforms.sim.flaw import Flaw
from shadowrun.types import Cause

__all__ = ["FLAWS"]


def _flaw(
    name: str, description: str, issue: str, operators: tuple[str, ...], explanation: str = "",
          cause: Cause = Cause.IMPLEMENTATION, statuses: tuple[str, ...] = ("mismatch",)) -> Flaw:  # fmt: skip
    return Flaw(name, "training", description, issue, operators, statuses, cause, explanation=explanation)


FLAWS = (
    _flaw("relu-backward-leaks", "the gradient of relu lets a hundredth through where the input was negative",
          "none: leaky_relu's backward kernel under relu's name", ("aten::threshold_backward",)),
    _flaw("gelu-backward-constant", "the gradient of gelu has a wrong constant", "none: a mistyped constant",
          ("aten::gelu_backward",)),
    _flaw("silu-backward-sign", "the gradient of silu has a wrong sign in its second term", "none: a mistyped sign",
          ("aten::silu_backward",)),
    _flaw("biased-running-variance", "batch normalisation stores the biased variance in running_var",
          "none: 1/n in the place of 1/(n-1)",
          ("aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_batch_norm_with_update")),
    _flaw("embedding-loses-duplicates", "the gradient of an embedding keeps the last of equal indices only",
          "none: scatter in the place of scatter-add", ("aten::embedding_dense_backward",), "duplicates lost"),
    _flaw("index-put-loses-duplicates", "index_put_ with accumulate=True keeps the last of equal indices only",
          "none: scatter in the place of scatter-add",
          ("aten::index_put_", "aten::_index_put_impl_", "aten::index_put"), "duplicates lost"),
    _flaw("foreach-skips-last", "_foreach_addcdiv_ leaves the last tensor as it was",
          "none: an off-by-one in a multi-tensor kernel", ("aten::_foreach_addcdiv_.ScalarList",)),
    _flaw("addcdiv-scaled", "addcdiv_ is too large by a thousandth", "none: a reciprocal with 10 bits",
          ("aten::addcdiv_", "aten::_foreach_addcdiv_.ScalarList", "aten::_foreach_addcdiv_.Scalar")),
    _flaw("dropout-ignores-p", "dropout always drops half", "none: the probability is not handed to the kernel",
          ("aten::native_dropout",), "", Cause.RANDOMNESS, ("mismatch", "unverified")),
)  # fmt: skip
