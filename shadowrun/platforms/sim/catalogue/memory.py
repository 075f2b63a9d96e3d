"""Right values, and memory that is not as the operator's schema promises."""

from __future__ import annotations

from shadowrun.platforms.sim.flaw import Flaw
from shadowrun.types import Cause

__all__ = ["FLAWS"]


def _flaw(name: str, description: str, issue: str, operators: tuple[str, ...], explanation: str) -> Flaw:
    return Flaw(
        name, "memory", description, issue, operators, ("mismatch",), Cause.MEMORY_EFFECTS, explanation=explanation
    )


FLAWS = (
    _flaw("layer-norm-centres-its-input", "layer normalisation subtracts the mean in its input's own memory",
          "none: a kernel that takes its input for scratch memory", ("aten::native_layer_norm",), "input overwritten"),
    _flaw("mul-writes-past-the-view", "mul_ by a number also multiplies what lies behind the last element",
          "none: a vector loop whose tail is not masked", ("aten::mul_.Tensor", "aten::mul_.Scalar"),
          "memory outside the argument written"),
    _flaw("clone-aliases", "clone of a contiguous tensor returns its input's own memory",
          "none: a copy that is put off and never made", ("aten::clone",), "result shares memory with an input"),
)  # fmt: skip
