"""Large results: judged by slices, those that are farthest from the reference among them.

The oracle takes many times the memory of a call. Most operators treat slices of their inputs apart: rows of a product's
left operand, images of a batch, elements of a sum of two tensors. So a call on few slices, with what the target and the
reference returned for them, is a call like any other, and the whole ladder judges it. Which inputs are sliced, and
along which dimension, is found by trying: the operator on the slices has to give what the reference gave for them in
the whole call. Trials run on the CPU: on slices that do not fit each other, a kernel of an accelerator may read outside
of its memory, and after that no call on the device succeeds. The slices are not a random sample: those where the target
is farthest from the reference are among them.

What cannot be sliced is compared with one more run of the reference, on inputs perturbed by their own rounding. A
target that is off by orders of magnitude more has a gross error; no oracle is needed for that.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.judge.oracle import bytes_needed, compute_roundoff, result_roundoff
from shadowrun.judge.result_diff import flat_values
from shadowrun.numerics.diff import diff
from shadowrun.numerics.form import form_difference
from shadowrun.numerics.precision import FORMATS
from shadowrun.operators.case import item_of, tensors
from shadowrun.operators.facts import ulp_bound
from shadowrun.operators.vendor_ops import evaluate, is_recurrent, run_changed
from shadowrun.torch_private import schema_of
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.judge.result_diff import ResultDiff
    from shadowrun.operators.case import Case, Value
    from shadowrun.types import TensorDiff

__all__ = ["by_slices", "gross_error", "is_large"]

LARGE_BYTES: Final = 128 << 20
"""What the oracle may take for a call that is judged as a whole: results of 3.3 million elements."""
WANTED_BYTES: Final = 48 << 20
"""The same for a sample: some 250,000 elements, as many as a mean square error needs."""
FEWEST: Final = 4
"""Slices of a sample: half of them by their distance, the ends, others in between."""
FARTHEST: Final = 4096
"""Slices that are the farthest absolutely, and relatively, at most; the others say more of the result as a whole."""
MANY: Final = 1 << 20
"""Slices of which no permutation is drawn, and that are not sorted as a whole."""
BLOCK: Final = 64
# Each further dimension takes trials of its own, with runs of the reference.
MAX_DIMENSIONS: Final = 3
MAX_TRIALS: Final = 64
MAX_S: Final = 5.0
"""Ways to slice the inputs that are tried, and seconds of processor time after which no other is."""
MAX_ITEMS: Final = 8
"""Of lists."""
SAME: Final = 1e-3
SAME_COARSE: Final = 3e-2
"""How far the reference's slices may be from its result for the whole, relative, by norm; and in 16 or 8 bits."""
GROSS: Final = 100.0
"""Times the distance by which moved inputs move the result."""
GROSS_SHARE: Final = 0.02
"""The least gross error relative to the result, by norm. Right numerics of 16 bits stay below 0.01."""

Examined = tuple[Verdict, tuple["TensorDiff", ...], tuple["ResultDiff", ...]]


def is_large(case: Case) -> bool:
    """Whether a call is too large to be judged as a whole in a short time."""
    if bytes_needed(case) <= LARGE_BYTES:
        return False
    dtypes = [t.dtype for t in tensors((*case.expected, *case.args), case.kwargs)]
    return ulp_bound(case.op, dtypes, case.arguments()) != 0  # of exact ones every bit is looked at, for little


def by_slices(case: Case, examine: Callable[[Case], Examined]) -> Examined | None:
    """Judge a large call by slices of it.

    Args:
        case: The call.
        examine: Judges a call as a whole.

    Returns:
        As `examine` does, with the figures of the whole results; None where the call cannot be judged so.
    """
    if len(case.actual) != len(case.expected) or any(map(form_difference, case.actual, case.expected)):
        return None  # a wrong form needs no oracle
    # The items of an optimizer's lists are independent: one item is a call like any other.
    if case.facts.lists and (n := _n_items(case)) != 1:
        return _by_items(case, n, examine)
    pairs = zip(case.names, case.actual, case.expected, strict=True)
    diffs = {k: d for k, d in enumerate(diff(*pair) for pair in pairs if pair[1] is not None) if d.n_different}
    judged: list[Examined] = []
    # The largest result first: it is the one for which the call is too large.
    for k in sorted(diffs, key=lambda k: -diffs[k].n_elements):
        sample = _sample(case, k)
        found = examine(sample.case) if sample is not None else None
        if sample is None or found is None or found[0].cause is Cause.REFERENCE:
            gross = gross_error(case, k)
            if gross is None:
                return None
            judged.append((gross, (diffs[k],), ()))
            continue
        sampled = next((d for d in found[1] if d.name == case.names[k]), None)
        if sampled is not None:
            changes = {name: getattr(sampled, name) for name in ("n_mismatched", "excess_actual", "excess_expected")}
            diffs[k] = replace(diffs[k], **changes)
        verdict = replace(found[0], evidence=f"{found[0].evidence}; {sample.text}".removeprefix("; "))
        judged.append((verdict, (), found[2]))
    if not judged:
        return None
    worst = min(judged, key=lambda j: _ORDER[j[0].status])
    return worst[0], tuple(diffs.values()), worst[2]


_ORDER: Final = {Status.MISMATCH: 0, Status.UNVERIFIED: 1, Status.MATCH: 2}


def _n_items(case: Case) -> int:
    """How many items the lists of tensors have; 0 where they differ in length."""
    given = (*case.args, *case.kwargs.values())
    counts = {len(v) for v in given if isinstance(v, (list, tuple)) and any(isinstance(t, torch.Tensor) for t in v)}
    return counts.pop() if len(counts) == 1 else 0


def _by_items(case: Case, n: int, examine: Callable[[Case], Examined]) -> Examined | None:
    """Judge an operator of lists (an optimizer's step) by those items that are farthest from the reference."""
    items = [item for name in case.names if (item := item_of(name)) is not None]
    if not n or len(items) != len(case.names):
        return None
    found = [diff(*pair) for pair in zip(case.names, case.actual, case.expected, strict=True)]
    far: dict[int, float] = {}
    for item, d in zip(items, found, strict=True):
        if d.n_different:
            # A difference of class outranks any distance.
            odd = d.n_nan + d.n_inf > 0
            far[item] = max(far.get(item, 0.0), float("inf") if odd else max(d.max_rel, d.rmse))
    judged = []
    for item in sorted(far, key=lambda i: -far[i])[:MAX_ITEMS]:
        one = _item(case, item, n, [i == item for i in items])
        judged.append((by_slices(one, examine) if is_large(one) else None) or examine(one))
    if not judged:
        return None
    verdict, _, findings = min(judged, key=lambda j: _ORDER[j[0].status])
    text = f"too large to be judged as a whole: {len(judged)} of {n} items, the farthest among them"
    evidence = f"{verdict.evidence}; {text}".removeprefix("; ")
    return replace(verdict, evidence=evidence), tuple(d for d in found if d.n_different), findings


def _item(case: Case, item: int, n: int, here: list[bool]) -> Case:
    """One item of the lists, as a call."""

    def only(value: Any) -> Any:
        return [value[item]] if isinstance(value, (list, tuple)) and len(value) == n else value

    whole = case.run_target

    def run_target(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> tuple[Value, ...]:
        return tuple(itertools.compress(whole(*case.fresh_inputs()), here))

    return replace(
        case,
        args=tuple(map(only, case.args)),
        kwargs={k: only(v) for k, v in case.kwargs.items()},
        names=tuple(f"{name.rpartition('[')[0]}[0]" for name in itertools.compress(case.names, here)),
        actual=tuple(itertools.compress(case.actual, here)),
        expected=tuple(itertools.compress(case.expected, here)),
        run_target=run_target,
        previous_actual=None,
    )


@dataclass(frozen=True, slots=True)
class _Sample:
    """Some slices of a call, as a call.

    Attributes:
        case: It.
        text: What it is of the whole.
    """

    case: Case
    text: str


def _sample(case: Case, position: int) -> _Sample | None:
    """Slices of a call that hold the worst of one result; None where it cannot be sliced."""
    # States and weights have to fit each other in ways that no kernel of a recurrent network looks at.
    if is_recurrent(case):
        return None
    began, notes = time.process_time(), list[str]()
    sample = case
    for _ in range(MAX_DIMENSIONS):
        needed = bytes_needed(sample)
        # What is within half of the goal is not worth one more round of trials.
        if needed <= 1.5 * WANTED_BYTES:
            break
        value = sample.expected[position]
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        smaller = None
        for dim in sorted(range(value.dim()), key=lambda d: -value.shape[d]):
            size = value.shape[dim]
            kept = max(FEWEST, int(0.9 * size * WANTED_BYTES / needed))  # what is not sliced stays as large
            if kept >= size:
                continue
            smaller = _sliced(sample, position, dim, kept, began)
            if smaller is not None:
                notes.append(f"{kept} of {size} along dimension {dim}")
                break
        if smaller is None:
            break
        sample = smaller
    if not notes or bytes_needed(sample) > LARGE_BYTES:
        return None
    return _Sample(
        sample, f"too large to be judged as a whole: by slices, the farthest among them ({', '.join(notes)})"
    )


def _sliced(case: Case, position: int, dim: int, kept: int, began: float) -> Case | None:
    """The call on some slices along one dimension of a result."""
    expected = case.expected[position]
    assert isinstance(expected, torch.Tensor)
    where = _farthest_slices(case, position, dim, kept)
    wanted = expected.index_select(dim, where)
    inputs = list({id(t): t for t in tensors(case.args, case.kwargs)}.values())
    # Which dimension of an input belongs to one of the result is in no schema; the reference's own slices decide.
    for slicing in itertools.islice(_slicings(inputs, expected, dim), MAX_TRIALS):
        # Processor time: a busy machine must not change which calls can be judged.
        if time.process_time() - began > MAX_S:
            return None
        memo = {id(t): t if e is None else _select(t, e, where) for t, e in zip(inputs, slicing, strict=True)}
        args, kwargs = _swapped(case, memo, expected.shape[dim], kept)
        trial = replace(case, args=args, kwargs=kwargs)
        try:
            found = dict(zip(*evaluate(trial, *trial.fresh_inputs()), strict=True))
            if not _agrees(found.get(case.names[position]), wanted):
                continue
            values = run_changed(case, case.run_reference, trial.fresh_inputs())
        # An operator may refuse a wrong slicing; that is one trial less, and no error.
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
            continue
        if len(values) == len(case.expected) and _agrees(values[position], wanted):
            return _case(case, args, kwargs, values, dim, where)
    return None


def _case(
    case: Case,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    values: tuple[Value, ...],
    dim: int,
    where: torch.Tensor,
) -> Case:
    """A call on slices, with both sides' results for them; results that have no such slices are left open."""
    actual_slices: list[Value] = []
    expected_slices: list[Value] = []
    dims: list[int | None] = []
    for actual, expected, value in zip(case.actual, case.expected, values, strict=True):
        found: tuple[Value, Value, int | None] = (value, value, None)
        if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor) and isinstance(value, torch.Tensor):
            for e in (dim, *range(expected.dim())):
                if e < expected.dim() and expected.shape[e] > int(where.max()):
                    slices = _select(expected, e, where)
                    if _agrees(value, slices):
                        found = (_select(actual, e, where), slices, e)
                        break
        actual_slices.append(found[0])
        expected_slices.append(found[1])
        dims.append(found[2])
    whole = case.run_target

    def run_target(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> tuple[Value, ...]:
        # On slices the target may take another slicing: the question is whether it repeats itself.
        again = whole(*case.fresh_inputs())
        return tuple(
            _select(v, e, where) if e is not None and isinstance(v, torch.Tensor) else open_
            for v, e, open_ in zip(again, dims, actual_slices, strict=True)
        )

    return replace(
        case,
        args=args,
        kwargs=kwargs,
        actual=tuple(actual_slices),
        expected=tuple(expected_slices),
        run_target=run_target,
        previous_actual=None,
    )


def _select(t: torch.Tensor, dim: int, where: torch.Tensor) -> torch.Tensor:
    return t.detach().index_select(dim, where)


def _swapped(case: Case, memo: dict[int, torch.Tensor], size: int, kept: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with slices in the place of tensors; a batch size that is an argument follows."""

    def swap(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return memo[id(value)]
        if isinstance(value, (list, tuple)):
            return [swap("", v) for v in value]
        return kept if name == "N" and value == size else value

    schema = schema_of(case.func).arguments
    return tuple(swap(schema[i].name, a) for i, a in enumerate(case.args)), {
        k: swap(k, v) for k, v in case.kwargs.items()
    }


def _slicings(inputs: list[torch.Tensor], result: torch.Tensor, dim: int) -> Iterator[tuple[int | None, ...]]:
    """Along which dimension each input may have to be sliced; the likeliest first."""
    size, behind = result.shape[dim], result.dim() - dim
    choices: list[tuple[int | None, ...]] = [
        (*[e for e in range(t.dim()) if t.shape[e] == size and t.layout is torch.strided], None) for t in inputs
    ]
    aligned = [t.dim() - behind for t in inputs]

    def unlikely(slicing: tuple[int | None, ...]) -> int:
        return sum(
            0 if e == near else 0 if e == dim else 1 if e is None else 3
            for e, near in zip(slicing, aligned, strict=True)
        )

    # The number of choices grows as a power of the number of inputs.
    few = itertools.islice(itertools.product(*choices), 4 * MAX_TRIALS)
    return iter(sorted((slicing for slicing in few if any(e is not None for e in slicing)), key=unlikely))


def _farthest_slices(case: Case, position: int, dim: int, kept: int) -> torch.Tensor:
    """Indices of slices: the farthest from the reference absolutely and relatively, the ends, and some in between."""
    actual, expected = (_real(v[position]) for v in (case.actual, case.expected))
    size = expected.shape[dim]
    a, e = (t.movedim(dim, 0).reshape(size, -1) for t in (actual, expected))
    far, near = torch.empty(size), torch.empty(size)
    # In pieces of 8 million elements (32 MiB in float32): the result is large by definition.
    step = max(1, (8 << 20) // max(1, a.shape[1]))
    for i in range(0, size, step):
        x, y = a[i : i + step].to(torch.float32), e[i : i + step].to(torch.float32)
        # Infinities of one sign and NaN on both sides are equal here; one on one side is the greatest distance.
        gap = (x - y).abs_().masked_fill_(x.isnan() & y.isnan() | (x == y), 0.0).nan_to_num_(torch.inf, torch.inf)
        far[i : i + step] = gap.amax(1)
        near[i : i + step] = gap.div_(y.abs().nan_to_num_(1.0).clamp_min_(1e-30)).amax(1)
    few = min(max(1, kept // 4), FARTHEST)
    chosen = torch.zeros(size, dtype=torch.bool)
    chosen[torch.cat([_greatest(far, few), _greatest(near, few)])] = True
    chosen[0] = chosen[-1] = True
    # From a separate generator: the program's random stream must not change, and a second run must take the same
    # slices. A permutation of millions takes longer than the judgement; draws repeat a few slices.
    own = torch.Generator().manual_seed(0)
    others = torch.randint(size, (kept,), generator=own) if size > MANY else torch.randperm(size, generator=own)
    while missing := kept - int(chosen.count_nonzero()):
        chosen[others[~chosen[others]][:missing]] = True
        others = (~chosen).nonzero().flatten()
    return chosen.nonzero().flatten()


def _greatest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the `k` greatest of some numbers."""
    n = values.numel()
    if n <= MANY:
        return values.topk(k).indices
    # They lie in the `k` blocks with the greatest maxima: `topk` of millions takes longer than the judgement.
    end = n - n % BLOCK
    blocks = values[:end].view(-1, BLOCK).amax(1).topk(k).indices
    inside = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    where = torch.cat([inside, torch.arange(end, n)])
    return where[values[where].topk(k).indices]


def _real(value: Value) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    t = value.detach().resolve_conj().resolve_neg()
    return t.abs() if t.is_complex() else t


def _agrees(value: Value, slices: torch.Tensor) -> bool:
    """Whether the reference on slices gives the slices of what it gave."""
    if not isinstance(value, torch.Tensor) or value.shape != slices.shape or value.dtype != slices.dtype:
        return False
    a, b = (flat_values(v).to(torch.float64) for v in (value, slices))
    # A norm with a NaN in it is NaN, and any comparison with it False.
    odd = ~(a.isfinite() & b.isfinite())
    if bool(odd.any()):
        if not torch.equal(a[odd].nan_to_num(7.0), b[odd].nan_to_num(7.0)):
            return False
        a, b = a[~odd], b[~odd]
    fmt = FORMATS.get(flat_values(slices).dtype)
    if fmt is None:
        # Ties may flip under another blocking of the same reference.
        return bool((a != b).to(torch.float64).mean() < SAME) if a.numel() else True
    gap, size = float((a - b).norm()), float(b.norm())
    return gap <= (SAME if fmt.mantissa >= 23 else SAME_COARSE) * size


def gross_error(case: Case, position: int) -> Verdict | None:
    """A mismatch if one result is farther off than any rounding takes it; None where that cannot be decided.

    Args:
        case: The call.
        position: Which result.
    """
    row = case.facts
    # Results that are not unique may be as far off as they like.
    if position in (*row.not_unique, *row.any_order, *row.by_equation):
        return None
    fmt = FORMATS.get(flat_values(case.expected[position]).dtype)
    if fmt is None:
        return None
    moved = torch.Generator().manual_seed(0)
    # A rounding of the inputs moves the result by what no implementation can be blamed for.
    step = max(compute_roundoff(case), result_roundoff(case))

    def move(t: torch.Tensor) -> torch.Tensor:
        if not (t.is_floating_point() or t.is_complex()) or t.layout is not torch.strided:
            return t.detach().clone()
        signs = torch.randint(0, 2, t.shape, generator=moved, dtype=torch.int8)
        return t.detach() * (1 + step * (2 * signs.to(torch.float64) - 1)).to(_factor(t))

    try:
        again = run_changed(case, case.run_reference, case.fresh_inputs(move))[position]
    except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
        return None
    if not isinstance(again, torch.Tensor) or form_difference(again, case.expected[position]).startswith(("sh", "dt")):
        return None
    actual, expected = (flat_values(v[position]) for v in (case.actual, case.expected))
    off, size = _rms(actual, expected), _rms(expected, None)
    reach = max(_rms(flat_values(again), expected), fmt.roundoff * size)
    # Without an oracle, only what no rounding explains: 100 times the effect of the inputs' rounding, and 2 % of the
    # result.
    if not off > max(GROSS * reach, GROSS_SHARE * size) or not torch.isfinite(torch.tensor([size, reach])).all():
        return None
    evidence = (
        f"{case.names[position]} is {off / size if size else float('inf'):.3g} times its own size off, by norm, and "
        f"moving the inputs by their rounding moves it by {reach / size if size else 0.0:.3g}; too large for the oracle"
    )
    return Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", evidence, 0.5)


def _factor(t: torch.Tensor) -> torch.dtype:
    return torch.float64 if t.dtype in (torch.float64, torch.complex128) else torch.float32


def _rms(a: torch.Tensor, b: torch.Tensor | None) -> float:
    """Root mean square of a tensor, or of the difference of two, in pieces; NaN counts as 0 where both have it."""
    total = 0.0
    # In pieces: a float64 copy of the whole result would take the memory for which the oracle was refused.
    for i in range(0, a.numel(), 1 << 22):
        x = a[i : i + (1 << 22)].to(torch.float64)
        gap = x
        if b is not None:
            y = b[i : i + (1 << 22)].to(torch.float64)
            gap = (x - y).masked_fill_((x == y) | (x.isnan() & y.isnan()), 0.0)
        total += float(gap.square().nan_to_num_(0.0 if b is None else torch.inf).sum())
    return float((total / max(1, a.numel())) ** 0.5)
