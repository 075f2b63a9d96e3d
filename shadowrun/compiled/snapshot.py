"""The state before a run of a graph: inputs, with the memory that they share, and the random generators."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.operators.case import exact_copy
from shadowrun.replay.copies import storage_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Change = Callable[[torch.Tensor], torch.Tensor]

__all__ = ["Snapshot", "cuda_is_used", "nbytes", "preserved_rng", "rng_state", "set_rng_state"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a run began with.

    Attributes:
        inputs: Copies, with the strides of the originals.
        rng: State of the random generators.
        shared: Positions of the inputs that share memory, group by group.
    """

    inputs: tuple[Any, ...]
    rng: Any
    shared: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def take(cls, inputs: Sequence[Any], written: Sequence[int] = ()) -> Snapshot:
        """Copy inputs, keeping layouts and identity.

        Args:
            inputs: Tensors and numbers.
            written: Positions of the tensors that the run writes to: what shares their memory does so in the copy, too.
        """
        # A write through one view must be seen through the others, as in the program.
        shared = _shared(inputs, written)
        return cls(tuple(_copies(inputs, shared, exact_copy)), rng_state(), shared)

    def fresh(self, change: Change = exact_copy) -> list[Any]:
        """Inputs for one run; the random state is put back too."""
        set_rng_state(self.rng)
        return _copies(self.inputs, self.shared, change)


def nbytes(inputs: Sequence[Any], written: Sequence[int] = ()) -> int:
    """Bytes of a copy of inputs."""
    tensors = {id(t): t for t in inputs if isinstance(t, torch.Tensor) and t.layout is torch.strided}
    n = int(sum(t.nbytes for t in tensors.values()))
    for positions in _shared(inputs, written):
        group = [inputs[k] for k in positions]
        start, end = _span(group)
        n += (end - start) * int(group[0].element_size())
    return n


def rng_state() -> Any:
    """State of the random generators."""
    # To ask for the state would initialise CUDA in a program that does not use it.
    cuda = torch.cuda.get_rng_state_all() if cuda_is_used() else None
    return torch.get_rng_state(), cuda


def cuda_is_used() -> bool:
    """Whether this process has begun to use CUDA."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def set_rng_state(state: Any) -> None:
    """Set the random generators to a state of before."""
    cpu, cuda = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the program's random stream afterwards, as if nothing had been drawn inside."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def _shared(inputs: Sequence[Any], written: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Positions of tensors over one memory of which the run writes at least one; of one dtype, else each is copied."""
    targets = [inputs[k] for k in written if isinstance(inputs[k], torch.Tensor)]
    if not targets:
        return ()
    groups = []
    for group in storage_groups(targets, tuple(inputs), {}):
        plain = [t for t in group if t.layout is torch.strided and t.numel() and not t.is_conj() and not t.is_neg()]
        # `as_strided` over one memory needs one element size and no lazy flag.
        if len(plain) == len(group) and len({t.dtype for t in group}) == 1:
            members = {id(t) for t in group}
            groups.append(tuple(k for k, v in enumerate(inputs) if id(v) in members))
    return tuple(groups)


def _copies(values: Sequence[Any], shared: Sequence[Sequence[int]], change: Change) -> list[Any]:
    memo: dict[int, torch.Tensor] = {}
    for positions in shared:
        memo.update(_together([values[k] for k in positions], change))
    return [_copied(v, memo, change) for v in values]


def _together(group: list[torch.Tensor], change: Change) -> dict[int, torch.Tensor]:
    """Copies of tensors that share memory, which share memory again."""
    start, end = _span(group)
    whole = change(group[0].detach().as_strided((end - start,), (1,), start))
    return {id(t): whole.as_strided(t.shape, t.stride(), t.storage_offset() - start) for t in group}


def _span(group: list[torch.Tensor]) -> tuple[int, int]:
    """First element, and that behind the last, of the memory that tensors cover."""
    ends = [1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in group]
    # Only the part that the tensors cover is copied: a storage may be far larger (slices of one buffer).
    starts = [int(t.storage_offset()) for t in group]
    return min(starts), max(start + n for start, n in zip(starts, ends, strict=True))


def _copied(value: Any, memo: dict[int, torch.Tensor], change: Change) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) not in memo:
        memo[id(value)] = change(value.detach())
    return memo[id(value)]
