"""Fewer bits than the dtype promises; and two flaws that are none: correct kernels that round otherwise."""

from __future__ import annotations

from shadowrun.platforms.sim.flaw import Flaw
from shadowrun.types import Cause

__all__ = ["FLAWS"]

_MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")


def _flaw(
    name: str, description: str, issue: str, operators: tuple[str, ...], explanation: str,
          cause: Cause = Cause.REDUCED_PRECISION, statuses: tuple[str, ...] = ("mismatch",)) -> Flaw:  # fmt: skip
    return Flaw(name, "precision", description, issue, operators, statuses, cause, explanation=explanation)


FLAWS = (
    _flaw("matmul-in-bf16", "float32 products round their inputs to bfloat16",
          "none: float32 matmul precision 'medium', as a device's default", _MATMULS, "inputs rounded to bf16"),
    _flaw("matmul-in-tf32", "float32 products round their inputs to TF32", "none: CUDA's allow_tf32", _MATMULS,
          "inputs rounded to tf32"),
    _flaw("convolution-in-tf32", "float32 convolutions round their inputs to TF32", "none: cuDNN's allow_tf32",
          _CONVOLUTIONS, "inputs rounded to tf32"),
    _flaw("matmul-accumulates-in-half", "float16 and bfloat16 products add up in the same dtype",
          "none: CUDA's allow_fp16_accumulation", _MATMULS, "accumulation in half"),
    _flaw("sum-in-other-order", "sum adds from the other end: correct, other rounding",
          "none: any other summation order", ("aten::sum", "aten::sum.dim_IntList"), "accumulation order",
          Cause.ROUNDING, ("match",)),
    _flaw("tanh-one-ulp-off", "tanh is one unit in the last place too large: within any vendor's bound",
          "none: the published maximum errors of math libraries", ("aten::tanh", "aten::tanh_"), "",
          Cause.ROUNDING, ("match",)),
)  # fmt: skip
