"""Checking a random operator without drawing again: the drawn values are handed over, not repeated.

Two devices have different generators, so values cannot be equal. What can be checked: form, range, and
whether mean and share of zeros are possible at all (8 standard deviations; a right generator fails that
once in 10^15 calls). `native_dropout` is checked exactly: its mask is handed over.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shadowrun.operators.facts import facts
from shadowrun.torch_private import schema_of

__all__ = ["implausible"]

_SIGMAS = 8.0
_MIN_ELEMENTS = 64


def implausible(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any]) -> str:
    """The reason why drawn values cannot come from the requested distribution; empty if they can.

    Args:
        func: The operator.
        args: Its positional inputs, on the CPU, as before the call.
        kwargs: Its inputs by name.
        values: Its results, on the CPU: fresh ones, then mutated arguments.
    """
    schema = schema_of(func).arguments
    # The dispatcher leaves out trailing arguments that have their default.
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    given |= {a.name: v for a, v in zip(schema, args, strict=False)} | kwargs
    check = _CHECKS.get(facts(schema_of(func).name).distribution)
    if check is None or not values or not isinstance(values[0], torch.Tensor):
        return ""
    return check(given, values)


def _mean(t: torch.Tensor, mean: float, sigma: float) -> str:
    n = t.numel()
    if n < _MIN_ELEMENTS:
        return ""
    # A mean in the dtype of the draws would add its own rounding error to the test.
    seen = float(t.double().mean())
    bound = _SIGMAS * sigma / math.sqrt(n) + 1e-3 * (abs(mean) + sigma)  # the last term: low-precision dtypes
    # `not <=`: a mean that is NaN fails.
    if not abs(seen - mean) <= bound:
        return f"mean {seen:.4g} of {n} draws, expected {mean:.4g} ± {bound:.2g}"
    return ""


def _uniform(given: dict[str, Any], values: list[Any]) -> str:
    low, high = float(given.get("from", 0.0)), float(given.get("to", 1.0))
    t = values[0]
    if not t.is_floating_point() or not t.numel():
        return ""
    if float(t.min()) < low or float(t.max()) > high:
        return f"values outside [{low:g}, {high:g}]"
    return _mean(t, (low + high) / 2, (high - low) / math.sqrt(12))


def _normal(given: dict[str, Any], values: list[Any]) -> str:
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    if isinstance(mean, torch.Tensor) or isinstance(std, torch.Tensor) or not values[0].is_floating_point():
        return ""
    return _mean(values[0], float(mean), float(std))


def _bernoulli(given: dict[str, Any], values: list[Any]) -> str:
    t = values[0]
    if t.numel() and not bool(((t == 0) | (t == 1)).all()):
        return "values other than 0 and 1"
    p = given.get("p")
    p = given["self"] if p is None else p  # probabilities of their own for each element
    if not isinstance(p, torch.Tensor):
        return _mean(t, float(p), math.sqrt(max(float(p) * (1 - float(p)), 0.0)))  # 1 + 1e-9 passes for a probability
    p = p.double()
    return _mean(t, float(p.mean()), math.sqrt(float((p * (1 - p)).mean()))) if t.numel() else ""


def _dropout(given: dict[str, Any], values: list[Any]) -> str:
    if len(values) < 2 or given.get("train") is False:
        return ""
    x, p = given["input"], float(given["p"])
    out, mask = values[0], values[1]
    # The mask is the target's own, so this is exact but for one rounding of the scale.
    expected = torch.zeros_like(x) if p >= 1 else x * mask * (1.0 / (1.0 - p))
    if not torch.allclose(out.double(), expected.double(), rtol=1e-2 if x.element_size() < 4 else 1e-5, equal_nan=True):
        return "the output is not the input times its own mask"
    return _mean(mask, 1 - p, math.sqrt(p * (1 - p)))


def _randperm(given: dict[str, Any], values: list[Any]) -> str:
    n = int(given["n"])
    return "" if torch.equal(values[0].long().sort().values, torch.arange(n)) else f"no permutation of 0…{n - 1}"


def _randint(given: dict[str, Any], values: list[Any]) -> str:
    low, high = int(given.get("low", 0)), int(given["high"])
    t = values[0].double()
    if t.numel() and (float(t.min()) < low or float(t.max()) >= high):
        return f"values outside [{low}, {high})"
    return _mean(t, (low + high - 1) / 2, (high - low) / math.sqrt(12))


# By what an operator samples (`OpFacts.distribution`).
_CHECKS = {
    "uniform": _uniform,
    "normal": _normal,
    "bernoulli": _bernoulli,
    "dropout": _dropout,
    "randperm": _randperm,
    "randint": _randint,
}
