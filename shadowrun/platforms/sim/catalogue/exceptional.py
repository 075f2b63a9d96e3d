"""NaN, infinities, signed zeros, subnormals and the edges of the range."""

from __future__ import annotations

from shadowrun.platforms.sim.flaw import Flaw
from shadowrun.types import Cause

__all__ = ["FLAWS"]


def _flaw(
    name: str, description: str, issue: str, operators: tuple[str, ...], explanation: str = "",
          cause: Cause = Cause.EXCEPTIONAL_VALUES, statuses: tuple[str, ...] = ("mismatch",),
          accepted: tuple[Cause, ...] = ()) -> Flaw:  # fmt: skip
    return Flaw(name, "exceptional", description, issue, operators, statuses, cause, accepted, explanation)


FLAWS = (
    _flaw("maximum-drops-nan", "maximum and minimum return the other operand for NaN", "pytorch/pytorch#143976",
          ("aten::maximum", "aten::minimum"), "NaN treated as missing"),
    _flaw("reduced-max-drops-nan", "amax, amin, max and min pass over NaN", "pytorch/pytorch#130295",
          ("aten::amax", "aten::amin", "aten::max", "aten::min", "aten::max.dim", "aten::min.dim"),
          "NaN treated as missing"),
    _flaw("clamp-nan-to-bound", "clamp turns NaN into the lower bound", "pytorch/pytorch#122710",
          ("aten::clamp", "aten::clamp_", "aten::clamp_min", "aten::clamp_min_")),
    _flaw("nan-to-zero-integer", "NaN becomes 0 as an integer, INT_MIN on the CPU", "pytorch/pytorch#140347",
          ("aten::_to_copy", "aten::copy_"), "NaN to integer", Cause.UNDEFINED, ("unverified",)),
    _flaw("tril-of-inf", "tril and triu multiply by a mask: infinity outside becomes NaN", "pytorch/pytorch#149813",
          ("aten::tril", "aten::triu", "aten::tril_", "aten::triu_")),
    _flaw("baddbmm-beta-zero", "baddbmm with beta=0 lets NaN of the addend through", "pytorch/pytorch#187521",
          ("aten::baddbmm", "aten::baddbmm_")),
    _flaw("hypot-overflows", "hypot by squares: overflows, and hypot(inf, nan) is NaN", "pytorch/pytorch#192507",
          ("aten::hypot", "aten::hypot_")),
    _flaw("sinh-overflows", "sinh is infinite near 88.8", "pytorch/pytorch#183763", ("aten::sinh", "aten::sinh_")),
    _flaw("cosh-overflows", "cosh is infinite near 88.8", "pytorch/pytorch#183765", ("aten::cosh", "aten::cosh_")),
    _flaw("exp-overflows-early", "exp is infinite from 88 on, 0.7 too early",
          "none: range reduction to 2**128 that a fast exp leaves out", ("aten::exp", "aten::exp_")),
    _flaw("round-loses-zero-sign", "round turns -0.3 into +0.0", "none: rounding by conversion to integer and back",
          ("aten::round", "aten::round_")),
    _flaw("mul-flushes-subnormals", "mul flushes subnormal inputs and results to zero",
          "none: flush-to-zero mode, the default of several accelerators", ("aten::mul.Tensor", "aten::mul_.Tensor"),
          "subnormals flushed", Cause.FLUSHED_SUBNORMALS),
    _flaw("sqrt-nan-is-zero", "sqrt of a negative number is 0", "none: sqrt as x * rsqrt(x) with a guard",
          ("aten::sqrt", "aten::sqrt_")),
)  # fmt: skip
