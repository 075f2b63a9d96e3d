"""Right values in the wrong form, and wrong values where the form is unusual."""

from __future__ import annotations

from shadowrun.platforms.sim.flaw import Flaw
from shadowrun.types import Cause

__all__ = ["FLAWS"]


def _flaw(
    name: str, description: str, issue: str, operators: tuple[str, ...], cause: Cause,
          explanation: str = "") -> Flaw:  # fmt: skip
    return Flaw(name, "form", description, issue, operators, ("mismatch",), cause, explanation=explanation)


FLAWS = (
    _flaw("sigmoid-wrong-stride", "sigmoid returns its result in column-major order",
          "none: kernels that keep the vendor's own layout", ("aten::sigmoid",), Cause.METADATA, "stride"),
    _flaw("argmax-int32", "argmax and argmin return int32", "none: torchax turns int64 into int32",
          ("aten::argmax", "aten::argmin"), Cause.METADATA, "dtype"),
    _flaw("logsumexp-float32", "logsumexp of float64 returns float32", "none: torchax turns float64 into float32",
          ("aten::logsumexp",), Cause.METADATA, "dtype"),
    _flaw("leaky-relu-ignores-strides", "leaky_relu reads a transposed input as if it were contiguous",
          "none: kernels that take a pointer and forget the strides", ("aten::leaky_relu", "aten::leaky_relu_"),
          Cause.LAYOUT, "input read as contiguous"),
    _flaw("mul-inplace-lost", "mul_ on a non-contiguous tensor writes to a copy",
          "none: in-place kernels on a contiguous copy that is never written back",
          ("aten::mul_.Tensor", "aten::mul_.Scalar"), Cause.LAYOUT),
)  # fmt: skip
