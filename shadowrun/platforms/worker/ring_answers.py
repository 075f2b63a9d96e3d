"""The worker's part of a ring: it runs a call that waits there, and compares its results with the program's."""

from __future__ import annotations

import marshal
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.platforms.worker.ring import DIFFERENT, EQUAL, REDO, copy_bytes
from shadowrun.platforms.worker.wire import decode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shadowrun.platforms.worker.ring import Ring

__all__ = ["answer_in_ring"]


def answer_in_ring(ring: Ring, call: Sequence[Any], run: Callable[..., Any]) -> tuple[int, int]:
    """Run a call.

    Args:
        ring: Where its inputs lie, and the program's results.
        call: As `ring_calls.RingCalls.close` wrote it, without the settings.
        run: `main._Server.answer`.

    Returns:
        What became of it, and the operator's nanoseconds.
    """
    name, returns, written, tree, spans, private, results, shift = call
    try:
        memory = [_memory(ring, n, at, own=k in private) for k, (_, n, at) in enumerate(spans)]
        args, kwargs, rng = decode(tree, memory, [low for low, *_ in spans])
        answer = run((name, None, returns, written), args, kwargs, None, rng)
    except Exception:  # the call comes again by itself, and what it raises then is recorded
        return REDO, 0
    if answer[0] != "ran":
        return REDO, 0
    _, fresh, mutated, ns = answer
    values = [fresh[i] for i in returns[1]] + mutated
    if len(values) != len(results) or not all(map(_has_form, values, results)):
        return REDO, 0
    pairs = [(v, result) for v, result in zip(values, results, strict=True) if len(result) > 1]
    if not any(ring.same_bytes(ring.address + at, v.data_ptr(), n) for v, (at, n, *_) in pairs):
        return EQUAL, ns
    for v, (at, n, *_) in pairs:
        copy_bytes(ring.address + at + shift, v.data_ptr(), n)
    return DIFFERENT, ns


def _memory(ring: Ring, n: int, at: int, *, own: bool) -> torch.UntypedStorage:
    """Memory of a region of inputs: in the ring, or a copy where the call writes to it or might make it larger."""
    if not own or not n:
        return ring.storage(at, n)
    storage = torch.UntypedStorage(n)  # type: ignore[no-untyped-call]
    copy_bytes(storage.data_ptr(), ring.address + at, n)
    return storage


def _has_form(value: Any, result: tuple[Any, ...]) -> bool:
    """Whether a result has the form of the program's; of a number, whether it is the same one."""
    if len(result) == 1:
        return type(value) is type(result[0]) and marshal.dumps(value, 2) == marshal.dumps(result[0], 2)
    _, _, dtype, shape, stride = result
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and tuple(value.shape) == shape
        and value.stride() == stride
        and str(value.dtype)[6:] == dtype
        and not value.is_conj()
        and not value.is_neg()
    )
