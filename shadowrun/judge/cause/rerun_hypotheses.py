"""Hypotheses that predict a result: the operator on changed inputs, with other arguments, or by another formula.

Each function takes the call and returns an explanation if what it predicts is the target's result everywhere, and
far better than the truth is (`patterns.reproduces`); else None.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from shadowrun.judge.cause import value_hypotheses
from shadowrun.judge.oracle import NoOracle
from shadowrun.judge.result_diff import ResultDiff, flat_values
from shadowrun.judge.rounding.bias import is_truncated
from shadowrun.operators.case import tensors
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.judge.cause.value_hypotheses import MismatchedCall
    from shadowrun.judge.oracle import Oracle
    from shadowrun.operators.case import Value

__all__ = [
    "argument_ignored",
    "cancelling_formula",
    "holds_on_changed_inputs",
    "lost_duplicates",
    "missing_terms",
    "truncated_results",
]

MISSING_RUNS: Final = 24
"""Runs of the oracle in search of the terms that are missing."""
ENOUGH: Final = 16
"""Elements of a result from whose mean square the number of missing terms follows."""
WORSE: Final = 1.25
IGNORED_RUNS: Final = 8
"""Arguments that are tried."""

_NOT_VALUES: Final = frozenset(
    "dtype layout device pin_memory memory_format non_blocking generator out keepdim sparse copy".split()  # noqa: SIM905
)
_RUNNING: Final = frozenset({"running_mean", "running_var"})
# What torch's batch norms read without a look whether it is there: without them the process ends (seen on 2.13).
_STATISTICS: Final = _RUNNING | {"save_mean", "save_invstd", "save_var"}
# Which statistics a batch norm reads.
_SWITCHES: Final = frozenset({"train", "training", "update"})
# Formulas that lose the digits for which the operator exists.
_FORMULAS: Final[dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]]] = {
    "expm1": ("exp(x) - 1", lambda x: torch.exp(x) - 1),
    "log1p": ("log(1 + x)", lambda x: torch.log(1 + x)),
}


def holds_on_changed_inputs(
    call: MismatchedCall,
    change: Callable[[torch.Tensor], torch.Tensor],
    only: Callable[[torch.Tensor], bool] = lambda _: True,
    results: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> bool:
    """Whether the oracle on changed inputs gives the target's results.

    Args:
        call: The call.
        change: Takes the flat values of a floating input, float64, and gives others.
        only: Which inputs are changed.
        results: Changes floating results.
    """
    # All elements, not the mismatched ones only: without the right elements, truncation looks like a factor.
    values = _asked(call, lambda oracle: oracle.on_changed_inputs(change, only))
    if values is None:
        return False
    if results is not None:
        values = tuple(results(v) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values)
    return _reproduce(call, values)


def argument_ignored(call: MismatchedCall) -> str | None:
    """The target's result is that with the default of one argument in the place of what was given."""
    named = call.case.arguments()
    if call.case.func.namespace != "aten":
        return None  # What a kernel of the user's or a vendor's does with other arguments is not known: it may crash.
    if all(f.bad.size < 2 < f.actual.numel() for f in call.mismatches):
        return None  # One element has the value of one of many other calls too easily.
    others = list(_other_arguments(call, named))[:IGNORED_RUNS]
    for name, value in sorted(others, key=lambda pair: call.known != f"argument {pair[0]} ignored"):
        values = _asked(call, lambda oracle, n=name, v=value: oracle.with_argument(n, v))  # type: ignore[misc]
        if values is not None and _reproduce(call, values):
            return f"argument {name} ignored"
    return None


def _other_arguments(call: MismatchedCall, named: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for argument in schema_of(call.case.func).arguments:
        name, kind = argument.name, str(argument.type)
        given = named.get(name)
        if name in _NOT_VALUES or given is None or argument.alias_info is not None:
            continue
        # A batch norm kernel reads its statistics without a check; a missing tensor ends the process.
        if name in _STATISTICS or (name in _SWITCHES and not _has_statistics(call, named)):
            continue
        if isinstance(given, torch.Tensor):
            if kind == "Optional[Tensor]":
                yield name, None
        elif argument.has_default_value():
            if argument.default_value != given:
                yield name, argument.default_value
        elif isinstance(given, bool):
            yield name, not given


def _has_statistics(call: MismatchedCall, named: dict[str, Any]) -> bool:
    """Whether a batch norm got the statistics for training and for evaluation, all with elements."""
    declared = {a.name for a in schema_of(call.case.func).arguments}
    given = [named.get(name) for name in _STATISTICS if name in declared or name in _RUNNING]
    return all(isinstance(t, torch.Tensor) and t.numel() > 0 for t in given)


def missing_terms(call: MismatchedCall) -> str | None:
    """The oracle agrees with the target once the last terms of the reduction are left out."""
    if not call.case.facts.accumulates:
        return None
    operands = [t for t in tensors(call.case.args, call.case.kwargs) if t.is_floating_point() and t.numel()][:2]
    known = re.fullmatch(r"last (?:(\d+) terms|term) missing", call.known)
    search = _Tails(call)
    for t in operands:
        for dim, length in enumerate(t.shape):
            if not t.is_contiguous() or length < 2:
                continue
            # Vector units take 4, 16 or 64 terms at once; what a kernel forgets is the rest after the last full step.
            usual = sorted({1, *(length % block for block in (4, 16, 64))} - {0})
            tail = search.best(t, dim, [int(known[1] or 1)] if known else [], usual)
            if tail:
                return f"last {tail} terms missing" if tail > 1 else "last term missing"
    return None


class _Tails:
    """Looks for the length of the tail that a reduction leaves out.

    What is left of the target's distance from the truth falls up to that length, and grows from there.
    """

    def __init__(self, call: MismatchedCall) -> None:
        self._suspect = call
        self._runs = 0
        self._few = any(f.actual.numel() < ENOUGH for f in call.mismatches)

    def best(self, t: torch.Tensor, dim: int, known: list[int], usual: list[int]) -> int | None:
        length = t.shape[dim]
        remaining: dict[int, float] = {0: 1.0}
        found: list[int] = []

        def measure(tail: int) -> float:
            if tail not in remaining:
                values = None
                if 0 < tail < length and self._runs < MISSING_RUNS:
                    self._runs += 1
                    change = _without_tail(t.shape, dim, tail)
                    values = _asked(self._suspect, lambda oracle: oracle.on_changed_inputs(change, lambda u: u is t))
                remaining[tail] = np.inf if values is None else _remaining_error(self._suspect, values)
                if (
                    values is not None
                    and remaining[tail] <= value_hypotheses.MARGIN
                    and _reproduce(self._suspect, values)
                ):
                    found.append(tail)
            return remaining[tail]

        for tail in known:
            measure(tail)
        # The mean square of few elements is too noisy to follow downhill, so only the usual lengths are tried.
        if self._few:
            for tail in usual:
                measure(tail)
            return found[0] if found else None
        tail, least = 1, 0
        # A few elements are noisy: on until it is plainly worse.
        while not found and measure(tail) < WORSE * remaining[least]:
            least = tail if remaining[tail] < remaining[least] else least
            tail *= 2
        while not found and least and self._runs < MISSING_RUNS:
            # The mean square that is left at t of n missing terms is |t - n| / n: n is on one of two sides.
            share = min(remaining[least] ** 2, 0.99)
            near = (least / (1 - share), least / (1 + share), least + 1, least - 1)
            new = [n for n in dict.fromkeys(map(round, near)) if 0 < n < length and n not in remaining][:2]
            if not new:
                break
            least = min([least, *new], key=measure)
        return found[0] if found else None


def _without_tail(shape: torch.Size, dim: int, tail: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(flat: torch.Tensor) -> torch.Tensor:
        flat.view(shape).narrow(dim, shape[dim] - tail, tail).zero_()
        return flat

    return change


def truncated_results(call: MismatchedCall) -> str | None:
    """All results of 16 bits are the truth truncated to their dtype, not rounded."""
    oracle = call.oracle()
    if oracle is None:
        return None
    truths = [f.truth or oracle.truths[f.position] for f in call.mismatches]
    if any(t is None or not is_truncated(f, t) for f, t in zip(call.mismatches, truths, strict=True)):
        return None
    names = {str(f.actual.dtype).removeprefix("torch.") for f in call.mismatches}
    return f"results truncated to {' and '.join(sorted(names))}, not rounded"


def cancelling_formula(call: MismatchedCall) -> str | None:
    """The target's result is that of a formula that cancels."""
    found = _FORMULAS.get(call.case.facts.name)
    # The oracle computes in float64, where these formulas lose too few digits to show it; so the call's own dtype is
    # used.
    if found is None:
        return None
    name, formula = found
    for f in call.mismatches:
        x = next(tensors(call.case.args, call.case.kwargs)).detach()
        if f.fmt is None or x.dtype != f.actual.dtype or f.truth is None:
            return None
        a, p = (v.to(torch.float64).numpy() for v in (f.actual, flat_values(formula(x))))
        with np.errstate(all="ignore"):
            off, before = np.abs(a - p), np.abs(a - f.truth.value)
            near = off <= 4 * f.fmt.roundoff * (1 + np.abs(p))
        seen = np.isfinite(off) & np.isfinite(before)
        if not near[seen].all() or np.square(off[seen]).sum() > value_hypotheses.MARGIN * np.square(before[seen]).sum():
            return None
    return f"as {name}, which cancels"


def lost_duplicates(call: MismatchedCall) -> str | None:
    """Where more than one value was added, the result has only one of them."""
    result_diff = call.mismatches[0]
    result = call.case.expected[result_diff.position]
    if not isinstance(result, torch.Tensor) or result.is_complex() or len(call.mismatches) != 1:
        return None
    added = _added(call.case.facts.name, call.case.arguments(), result)
    if added is None:
        return None
    slots = added[0].reshape(-1).numpy()
    values, start = (t.detach().to(torch.float64).reshape(-1).numpy() for t in added[1:])
    several = np.bincount(slots, minlength=result.numel()) > 1
    # Such a kernel loses duplicates wherever they are: a few wrong elements among many have another cause.
    if not several[result_diff.bad].all() or 2 * result_diff.bad.size <= int(several.sum()):
        return None
    actual = result_diff.actual.to(torch.float64).numpy()
    unit = 4 * (result_diff.fmt.roundoff if result_diff.fmt else 0.0)
    with np.errstate(all="ignore"):
        size = np.abs(values) + np.abs(start[slots])
        one = np.abs(actual[slots] - start[slots] - values) <= unit * size
    explained = np.zeros(result.numel(), bool)
    explained[slots[one]] = True
    return "duplicate indices lost" if explained[result_diff.bad].all() else None


def _added(op: str, named: dict[str, Any], result: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Where each value is added, the value, and what was there; None if the operator adds none."""
    # Element numbers, put through the same indexing, are the places where values are added.
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


def _asked(call: MismatchedCall, question: Callable[[Oracle], tuple[Value, ...]]) -> tuple[Value, ...] | None:
    oracle = call.oracle()
    if oracle is None:
        return None
    try:
        return question(oracle)
    except NoOracle:
        return None


def _predicted(result_diff: ResultDiff, values: tuple[Value, ...]) -> torch.Tensor | None:
    value = values[result_diff.position] if result_diff.position < len(values) else None
    if value is None:
        return None
    flat = flat_values(value)
    return flat if flat.numel() == result_diff.actual.numel() else None


def _reproduce(call: MismatchedCall, values: tuple[Value, ...]) -> bool:
    # All elements have to be explained, or a hypothesis that changes nothing would explain a few; and far better than
    # by no hypothesis, or one that changes little would explain what is hardly beyond the limit.
    predicted = [_predicted(f, values) for f in call.mismatches]
    return all(
        p is not None and value_hypotheses.reproduces(f, p) for f, p in zip(call.mismatches, predicted, strict=True)
    )


def _remaining_error(call: MismatchedCall, values: tuple[Value, ...]) -> float:
    predicted = [_predicted(f, values) for f in call.mismatches]
    return max(np.inf if p is None else f.remaining_error(p) for f, p in zip(call.mismatches, predicted, strict=True))
