"""Makes the inputs of a call smaller and simpler while its fault stays.

Greedy and deterministic: fewer tensors in lists, then shorter dimensions, then simpler values; what keeps the fault is
kept, whatever comes first. Each attempt really runs on both platforms.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shadowrun.intercept.untrusted.checked_calls import check_call
from shadowrun.intercept.untrusted.op_allowlist import Refused, trusts_its_arguments
from shadowrun.operators.case import exact_copy
from shadowrun.operators.vendor_ops import COUNTERPARTS
from shadowrun.replay.copies import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Arguments = tuple[tuple[Any, ...], dict[str, Any]]
    Holds = Callable[[tuple[Any, ...], dict[str, Any]], bool]
    Change = Callable[[torch.Tensor], torch.Tensor]

__all__ = ["Minimiser", "minimised"]

# Each element costs a run of the call on both platforms.
_FEW_ELEMENTS = 16
T = TypeVar("T")


def minimised(
    func: Any,
    first: T,
    arguments: Arguments,
    judge: Callable[[tuple[Any, ...], dict[str, Any]], T | None],
    kind: Callable[[T], object],
    seconds: float,
    notes: list[str],
) -> tuple[T, Arguments]:
    """Make the arguments of a call smaller while its fault stays one of the same kind.

    Those of an operator that does not look whether they fit stay as they are: it would read elsewhere, and show another
    fault.

    Args:
        func: What is called: an operator, or any other function.
        first: What `judge` gave for the arguments as they are.
        arguments: Positional and named ones.
        judge: Runs a call; None where it shows no fault.
        kind: What has to stay the same of a fault.
        seconds: Time limit.
        notes: Gets a sentence if that was too short, or nothing was made smaller.

    Returns:
        What `judge` gave last for a call with the fault, and the smallest arguments.
    """
    if seconds and trusts_its_arguments(func):
        notes.append("its kernel does not check indices and lengths: its inputs are not made smaller")
        return first, arguments
    last, wanted = first, kind(first)
    is_operator = isinstance(func, torch._ops.OpOverload) and _fits(func, arguments)

    def holds(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        nonlocal last
        if is_operator and not _fits(func, (args, kwargs)):
            return False
        judged = judge(args, kwargs)
        if judged is None or kind(judged) != wanted:
            return False
        # The verdict belongs to the smallest call, not to the one that was captured.
        last = judged
        return True

    minimiser = Minimiser(holds, seconds)
    arguments = minimiser.minimise(*arguments)
    if seconds and not minimiser.finished:
        notes.append(f"minimising ended after {seconds:g} s and {minimiser.n_runs} runs")
    return last, arguments


def _fits(func: torch._ops.OpOverload, arguments: Arguments) -> bool:
    """Whether arguments are those of a call that a file may have made: none leads outside of memory."""
    try:
        check_call(func, *arguments, stand_in=COUNTERPARTS.get(func.name()))  # type: ignore[no-untyped-call]
    except Refused:
        return False
    return True


class Minimiser:
    """Minimises one call.

    Args:
        holds: Whether a call still has the fault. It must not write to its arguments.
        seconds: Time limit.

    Attributes:
        n_runs: How many calls were tried.
        finished: Whether it came to an end by itself.
    """

    def __init__(self, holds: Holds, seconds: float) -> None:
        self._holds = holds
        self._until = time.monotonic() + seconds
        self.n_runs = 0
        self.finished = True

    def minimise(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The smallest call that was found."""
        best = (args, kwargs)
        before = None
        while before is not best and self._in_time():
            before = best
            # Sizes before values: each attempt runs the call, and a small call runs faster.
            for step in (_plain, _shorter_lists, _smaller, _simpler):
                best = self._repeat(step, best)
        return best

    def _repeat(self, step: Callable[[Arguments], Iterator[Arguments]], best: Arguments) -> Arguments:
        """Take each of a step's proposals that keeps the fault, and ask it again from there."""
        again = True
        while again:
            again = False
            for proposal in step(best):
                if not self._in_time():
                    return best
                if _cost(proposal) >= _cost(best):  # two proposals could undo each other without end
                    continue
                self.n_runs += 1
                if self._keeps(proposal):
                    best, again = proposal, True
                    break
        return best

    def _keeps(self, proposal: Arguments) -> bool:
        try:
            # Most proposals are no valid calls (shapes that do not fit): the operator itself is the check.
            return self._holds(*proposal)
        except Exception:  # no valid call
            return False

    def _in_time(self) -> bool:
        self.finished = self.finished and time.monotonic() < self._until
        return self.finished


def _cost(call: Arguments) -> tuple[int, int, int]:
    """Elements, tensors that are no plain memory, and how hard the values are to read."""
    tensors = list(tensors_in((*call[0], *call[1].values())))
    numbers = [t for t in tensors if t.is_floating_point() and t.layout is torch.strided]
    n_elements = sum(t.numel() for t in tensors)
    return n_elements, sum(not _is_plain(t) for t in tensors), sum(map(_reading, numbers))


def _reading(t: torch.Tensor) -> int:
    """0 for each 0, 1 for each 1, 2 for other whole numbers, 3 for other eighths, 4 for anything else."""
    steps = (t != 0, (t != 0) & (t != 1), t != torch.round(t), t != _short(t))
    return sum(int(step.sum()) for step in steps)


def _plain(call: Arguments) -> Iterator[Arguments]:
    """All tensors dense, none sharing memory."""
    if any(not _is_plain(t) for t in tensors_in((*call[0], *call[1].values()))):
        yield _mapped(call, lambda t: t.detach().clone(memory_format=torch.contiguous_format))


def _is_plain(t: torch.Tensor) -> bool:
    if t.layout is not torch.strided or t.is_conj() or t.is_neg():
        return True  # left as it is
    return t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes


def _shorter_lists(call: Arguments) -> Iterator[Arguments]:
    """Lists of tensors, all of one length together, without a half or one of their entries."""
    for n in sorted({len(v) for v in _values(call) if _is_list(v) and len(v) > 1}, reverse=True):
        # Halves first: a long list needs few runs, and single entries are left to the end.
        halves: list[Sequence[int]] = [range(n // 2), range(n // 2, n)]
        keeps = halves + [[k for k in range(n) if k != i] for i in range(n)]
        for keep in keeps:
            yield _each_value(call, functools.partial(_kept, n, keep))


def _kept(n: int, keep: Sequence[int], value: Any) -> Any:
    return [value[k] for k in keep] if _has_length(value, n) else value


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value)


def _has_length(value: Any, n: int) -> bool:
    """Lists of numbers that belong to lists of tensors (a learning rate for each) get shorter with them."""
    return isinstance(value, (list, tuple)) and len(value) == n


def _smaller(call: Arguments) -> Iterator[Arguments]:
    """Shorter dimensions: those of one size in all tensors together (a batch), then each by itself."""
    tensors = [t for t in tensors_in((*call[0], *call[1].values())) if t.layout is torch.strided]
    # The largest first: it shortens all later attempts most.
    sizes = sorted({s for t in tensors for s in t.shape if s > 1}, reverse=True)
    for size in sizes:
        for new in _sizes_below(size):
            # From both ends: faults of tails and of block edges are lost when the last elements are cut.
            for start in dict.fromkeys((0, size - new)):
                shrunk = _mapped(call, functools.partial(_cut, size, start, new))
                # First with the sizes among the other arguments changed too: a norm has its shape as a list of numbers.
                yield _each_value(shrunk, functools.partial(_renumbered, size, new))
                yield shrunk
    for i, t in enumerate(tensors):
        for d, size in enumerate(t.shape):
            for new in _sizes_below(size):
                for start in dict.fromkeys((0, size - new)):
                    yield _with(call, tensors, i, exact_copy(t.narrow(d, start, new)))


def _sizes_below(size: int) -> list[int]:
    # The smallest first: where 1 keeps the fault, one attempt is enough.
    return [n for n in dict.fromkeys((1, 2, size // 4, size // 2, size - 1)) if 0 < n < size]


def _cut(size: int, start: int, new: int, t: torch.Tensor) -> torch.Tensor:
    if t.layout is not torch.strided:
        return t
    cut = t
    for d, n in enumerate(t.shape):
        if n == size:
            cut = cut.narrow(d, start, new)
    return t if cut is t else exact_copy(cut)


def _renumbered(size: int, new: int, value: Any) -> Any:
    """Sizes among the arguments that are no tensors (``normalized_shape``)."""
    if isinstance(value, (list, tuple)) and not _is_list(value):
        return [new if type(v) is int and v == size else v for v in value]
    return new if type(value) is int and value == size else value


def _simpler(call: Arguments) -> Iterator[Arguments]:
    """Simpler values: zeros, ones, whole numbers, short numbers; at last element by element."""
    tensors = [t for t in tensors_in((*call[0], *call[1].values())) if t.is_floating_point()]
    tensors = [t for t in tensors if t.layout is torch.strided and t.numel()]
    changes: tuple[Change, ...] = (torch.zeros_like, torch.ones_like, torch.round, _short)
    for i, t in enumerate(tensors):
        for change in changes:
            # What comes later is less simple, so it could only undo this.
            if _is_simple(t, change):
                break
            yield from _changed(call, tensors, i, change(t))
    for i, t in enumerate(tensors):
        # Each element costs a run of the call on both platforms.
        if t.numel() > _FEW_ELEMENTS or not t.is_contiguous():
            continue
        for k, value in enumerate(t.flatten().tolist()):
            for simple in (0.0, 1.0):
                if value in (0.0, simple):
                    break
                changed = t.clone()
                changed.view(-1)[k] = simple
                yield _with(call, tensors, i, changed)


def _changed(call: Arguments, tensors: list[torch.Tensor], i: int, value: torch.Tensor) -> Iterator[Arguments]:
    """The call with other values in one of its tensors, laid out as they were."""
    before = tensors[i]
    # An expanded tensor has one element at several places; written to, it would be another call.
    if 0 not in before.stride():
        yield _with(call, tensors, i, exact_copy(before).copy_(value))


def _is_simple(t: torch.Tensor, change: Change) -> bool:
    """Whether values are as simple as a change would make them: what comes later is less simple."""
    return torch.equal(change(t), t)


def _short(t: torch.Tensor) -> torch.Tensor:
    """Multiples of 1/8: what people can read."""
    return torch.round(t * 8) / 8


def _values(call: Arguments) -> Iterator[Any]:
    yield from call[0]
    yield from call[1].values()


def _each_value(call: Arguments, change: Callable[[Any], Any]) -> Arguments:
    return tuple(change(v) for v in call[0]), {k: change(v) for k, v in call[1].items()}


def _mapped(call: Arguments, change: Change) -> Arguments:
    # By identity: an argument that is given twice stays one tensor.
    memo: dict[int, torch.Tensor] = {}

    def one(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in memo:
                memo[id(value)] = change(value)
            return memo[id(value)]
        if isinstance(value, (list, tuple)):
            return [one(v) for v in value]
        return value

    return _each_value(call, one)


def _with(call: Arguments, tensors: list[torch.Tensor], i: int, new: torch.Tensor) -> Arguments:
    """The call with another tensor in the place of one of its tensors."""
    return _mapped(call, lambda t: new if t is tensors[i] else t)
