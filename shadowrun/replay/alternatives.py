"""Causes that predict a result: the operator on changed inputs, with other arguments, or by another formula.

Each function takes the suspect and returns an explanation if what it predicts is the target's result everywhere, and
far better than the truth is (`patterns.reproduces`); else None.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from shadowrun.numerics.tolerance import accumulates, base_name
from shadowrun.replay import patterns
from shadowrun.replay.finding import Finding, flat_values, op_name
from shadowrun.replay.oracle import NoOracle, tensors
from shadowrun.replay.undefined import arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.replay.case import Value
    from shadowrun.replay.oracle import Oracle
    from shadowrun.replay.patterns import Suspect

__all__ = ["argument_ignored", "cancelling_formula", "lost_duplicates", "missing_terms", "truncated_results", "under"]

MISSING_RUNS: Final = 24
"""Runs of the oracle in search of the terms that are missing."""
ENOUGH: Final = 16
"""Elements of a result whose mean square tells how many terms are missing."""
WORSE: Final = 1.25
IGNORED_RUNS: Final = 8
"""Arguments that are tried."""
TELLING: Final = 8
SHARE_TRUNCATED: Final = 0.95
"""Of the elements that truncation and rounding tell apart: sums in float32 lie on the other side of a number once in
some thousand times."""

_NOT_VALUES: Final = frozenset(
    "dtype layout device pin_memory memory_format non_blocking generator out keepdim sparse copy".split()  # noqa: SIM905
)
_FORMULAS: Final[dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]]] = {
    "expm1": ("exp(x) - 1", lambda x: torch.exp(x) - 1),
    "log1p": ("log(1 + x)", lambda x: torch.log(1 + x)),
}
"""Formulas that lose the digits for which the operator exists."""


def under(
    suspect: Suspect,
    change: Callable[[torch.Tensor], torch.Tensor],
    only: Callable[[torch.Tensor], bool] = lambda _: True,
    results: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> bool:
    """Whether the oracle on changed inputs gives the target's results.

    Args:
        suspect: The call.
        change: Takes the flat values of a floating input, float64, and gives others.
        only: Which inputs are changed.
        results: Changes floating results.
    """
    values = _asked(suspect, lambda oracle: oracle.under(change, only))
    if values is None:
        return False
    if results is not None:
        values = tuple(results(v) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values)
    return _reproduce(suspect, values)


def argument_ignored(suspect: Suspect) -> str | None:
    """The target's result is that with the default of one argument in the place of what was given."""
    named = arguments(suspect.case)
    if all(f.bad.size < 2 < f.actual.numel() for f in suspect.findings):
        return None  # One element has the value of one of many other calls too easily.
    others = list(_other_arguments(suspect, named))[:IGNORED_RUNS]
    for name, value in sorted(others, key=lambda other: suspect.known != f"argument {other[0]} ignored"):
        values = _asked(suspect, lambda oracle, n=name, v=value: oracle.with_argument(n, v))  # type: ignore[misc]
        if values is not None and _reproduce(suspect, values):
            return f"argument {name} ignored"
    return None


def _other_arguments(suspect: Suspect, named: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for argument in suspect.case.func._schema.arguments:
        name, kind = argument.name, str(argument.type)
        given = named.get(name)
        if name in _NOT_VALUES or given is None or argument.alias_info is not None:
            continue
        if isinstance(given, torch.Tensor):
            if kind == "Optional[Tensor]":
                yield name, None
        elif argument.has_default_value():
            if argument.default_value != given:
                yield name, argument.default_value
        elif isinstance(given, bool):
            yield name, not given


def missing_terms(suspect: Suspect) -> str | None:
    """The oracle agrees with the target once the last terms of the reduction are left out."""
    if not accumulates(op_name(suspect.case)):
        return None
    operands = [t for t in tensors(suspect.case.args, suspect.case.kwargs) if t.is_floating_point() and t.numel()][:2]
    known = re.fullmatch(r"last (?:(\d+) terms|term) missing", suspect.known)
    search = _Tails(suspect)
    for t in operands:
        for dim, length in enumerate(t.shape):
            if not t.is_contiguous() or length < 2:
                continue
            usual = sorted({1, *(length % block for block in (4, 16, 64))} - {0})
            tail = search.best(t, dim, [int(known[1] or 1)] if known else [], usual)
            if tail:
                return f"last {tail} terms missing" if tail > 1 else "last term missing"
    return None


class _Tails:
    """Looks for the length of the tail that a reduction leaves out.

    What is left of the target's distance from the truth falls up to that length, and grows from there.
    """

    def __init__(self, suspect: Suspect) -> None:
        self._suspect = suspect
        self._runs = 0
        self._few = any(f.actual.numel() < ENOUGH for f in suspect.findings)

    def best(self, t: torch.Tensor, dim: int, known: list[int], usual: list[int]) -> int | None:
        length = t.shape[dim]
        left: dict[int, float] = {0: 1.0}
        right: list[int] = []

        def measure(tail: int) -> float:
            if tail not in left:
                values = None
                if 0 < tail < length and self._runs < MISSING_RUNS:
                    self._runs += 1
                    change = _without_tail(t.shape, dim, tail)
                    values = _asked(self._suspect, lambda oracle: oracle.under(change, lambda u: u is t))
                left[tail] = np.inf if values is None else _left(self._suspect, values)
                if values is not None and left[tail] <= patterns.MARGIN and _reproduce(self._suspect, values):
                    right.append(tail)
            return left[tail]

        for tail in known:
            measure(tail)
        if self._few:
            for tail in usual:
                measure(tail)
            return right[0] if right else None
        tail, least = 1, 0
        # A few elements are noisy: on until it is plainly worse.
        while not right and measure(tail) < WORSE * left[least]:
            least = tail if left[tail] < left[least] else least
            tail *= 2
        while not right and least and self._runs < MISSING_RUNS:
            # The mean square that is left at t of n missing terms is |t - n| / n: n is on one of two sides.
            share = min(left[least] ** 2, 0.99)
            near = (least / (1 - share), least / (1 + share), least + 1, least - 1)
            new = [n for n in dict.fromkeys(map(round, near)) if 0 < n < length and n not in left][:2]
            if not new:
                break
            least = min([least, *new], key=measure)
        return right[0] if right else None


def _without_tail(shape: torch.Size, dim: int, tail: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(flat: torch.Tensor) -> torch.Tensor:
        flat.view(shape).narrow(dim, shape[dim] - tail, tail).zero_()
        return flat

    return change


def truncated_results(suspect: Suspect) -> str | None:
    """All results of 16 bits are the truth truncated to their dtype, not rounded."""
    oracle = suspect.oracle()
    if oracle is None:
        return None
    for f in suspect.findings:
        truth = f.truth or oracle.truths[f.position]
        short = f.fmt is not None and f.fmt.mantissa < 23 and f.actual.element_size() == 2
        if not short or truth is None or truth.value.size != f.actual.numel() or truth.value.dtype != np.float64:
            return None
        o = torch.from_numpy(truth.value)
        nearest = o.to(f.actual.dtype)
        away = nearest.to(torch.float64).abs() > o.abs()
        # Magnitude and sign are apart: one less is one nearer to zero.
        truncated = (nearest.view(torch.int16) - away.to(torch.int16)).view(f.actual.dtype)
        telling = away & torch.isfinite(nearest)
        right = telling & (f.actual == truncated)
        if int(telling.sum()) < TELLING or int(right.sum()) < SHARE_TRUNCATED * int(telling.sum()):
            return None
    names = {str(f.actual.dtype).removeprefix("torch.") for f in suspect.findings}
    return f"results truncated to {' and '.join(sorted(names))}, not rounded"


def cancelling_formula(suspect: Suspect) -> str | None:
    """The target's result is that of a formula that cancels."""
    found = _FORMULAS.get(base_name(op_name(suspect.case)))
    if found is None:
        return None
    name, formula = found
    for f in suspect.findings:
        x = next(tensors(suspect.case.args, suspect.case.kwargs)).detach()
        if f.fmt is None or x.dtype != f.actual.dtype or f.truth is None:
            return None
        a, p = (v.to(torch.float64).numpy() for v in (f.actual, flat_values(formula(x))))
        with np.errstate(all="ignore"):
            off, before = np.abs(a - p), np.abs(a - f.truth.value)
            near = off <= 4 * f.fmt.roundoff * (1 + np.abs(p))
        seen = np.isfinite(off) & np.isfinite(before)
        if not near[seen].all() or np.square(off[seen]).sum() > patterns.MARGIN * np.square(before[seen]).sum():
            return None
    return f"as {name}, which cancels"


def lost_duplicates(suspect: Suspect) -> str | None:
    """Where more than one value was added, the result has only one of them."""
    finding = suspect.findings[0]
    result = suspect.case.expected[finding.position]
    if not isinstance(result, torch.Tensor) or result.is_complex() or len(suspect.findings) != 1:
        return None
    added = _added(base_name(op_name(suspect.case)), arguments(suspect.case), result)
    if added is None:
        return None
    slots = added[0].reshape(-1).numpy()
    values, start = (t.detach().to(torch.float64).reshape(-1).numpy() for t in added[1:])
    several = np.bincount(slots, minlength=result.numel()) > 1
    if not several[finding.bad].all() or 2 * finding.bad.size <= int(several.sum()):
        return None
    actual = finding.actual.to(torch.float64).numpy()
    unit = 4 * (finding.fmt.roundoff if finding.fmt else 0.0)
    with np.errstate(all="ignore"):
        size = np.abs(values) + np.abs(start[slots])
        one = np.abs(actual[slots] - start[slots] - values) <= unit * size
    explained = np.zeros(result.numel(), bool)
    explained[slots[one]] = True
    return "duplicate indices lost" if explained[finding.bad].all() else None


def _added(op: str, named: dict[str, Any], result: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Where each value is added, the value, and what was there; None if the operator adds none."""
    places = torch.arange(result.numel()).view(result.shape)
    if op in {"index_put", "_index_put_impl", "_unsafe_index_put"} and named.get("accumulate"):
        slots = torch.ops.aten.index.Tensor(places, named["indices"])
        return slots, named["values"].expand(slots.shape), named["self"]
    if op == "scatter_add" or (op == "scatter_reduce" and named.get("reduce") == "sum" and named.get("include_self")):
        index = named["index"]
        source = named["src"][tuple(slice(n) for n in index.shape)]
        return places.gather(named["dim"], index), source, named["self"]
    if op == "index_add":
        slots = places.index_select(named["dim"], named["index"].reshape(-1))
        return slots, (named["source"] * named.get("alpha", 1)).expand(slots.shape), named["self"]
    if op == "embedding_dense_backward" and not named.get("scale_grad_by_freq"):
        indices = named["indices"].reshape(-1)
        kept = indices != named["padding_idx"]
        grad = named["grad_output"].reshape(indices.numel(), -1)
        return places[indices[kept]], grad[kept], torch.zeros_like(result)
    return None


def _asked(suspect: Suspect, question: Callable[[Oracle], tuple[Value, ...]]) -> tuple[Value, ...] | None:
    oracle = suspect.oracle()
    if oracle is None:
        return None
    try:
        return question(oracle)
    except NoOracle:
        return None


def _predicted(finding: Finding, values: tuple[Value, ...]) -> torch.Tensor | None:
    value = values[finding.position] if finding.position < len(values) else None
    if value is None:
        return None
    flat = flat_values(value)
    return flat if flat.numel() == finding.actual.numel() else None


def _reproduce(suspect: Suspect, values: tuple[Value, ...]) -> bool:
    # All elements have to be explained, or a hypothesis that changes nothing would explain a few; and far better than
    # by no hypothesis, or one that changes little would explain what is hardly beyond the limit.
    predicted = [_predicted(f, values) for f in suspect.findings]
    return all(p is not None and patterns.reproduces(f, p) for f, p in zip(suspect.findings, predicted, strict=True))


def _left(suspect: Suspect, values: tuple[Value, ...]) -> float:
    predicted = [_predicted(f, values) for f in suspect.findings]
    return max(np.inf if p is None else f.left(p) for f, p in zip(suspect.findings, predicted, strict=True))
