"""Copies of a call's tensors: layouts exact, aliasing kept, bounded in bytes.

`clone` and `to` compact a sliced or expanded tensor; kernels then take another path and sum in another reduction order,
which shows as a difference of values. So what a copy covers is copied as it lies in memory. `at_offsets` also keeps the
storage offsets: some kernels ignore where in its storage a tensor begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.intercept import torchapi
from shadowrun.operators.case import Arguments, tensors
from shadowrun.strided import span
from shadowrun.torch_private import is_zero_tensor, negated_view, schema_of

if TYPE_CHECKING:
    from shadowrun.intercept.plan import OpPlan

__all__ = [
    "Arguments",
    "OverBudget",
    "arguments_by_name",
    "at_offsets",
    "copy_mutated",
    "copy_on_device",
    "kept_on_cpu",
    "mirror",
    "move",
    "offsets",
    "overlaps_unnoticed",
    "plan_with_cpu_tensors",
    "storage_groups",
    "tensors_in",
    "without_strides",
    "written_to",
]


Convert = Callable[[torch.Tensor, torch.device], torch.Tensor]


class OverBudget(Exception):  # noqa: N818 - a reason, caught inside
    """The copies of one call would exceed the budget."""


def tensors_in(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    """All tensors among arguments, lists included."""
    for a in args:
        if isinstance(a, torch.Tensor):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from tensors_in(a)


def copy_mutated(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], max_bytes: int) -> Arguments:
    """Copy the arguments that the call writes to, and those that share memory with them; others stay.

    Raises:
        OverBudget: The copies exceed `max_bytes`.
    """
    memo: dict[int, torch.Tensor] = {}
    # Inputs that are only read serve both runs: copying them would double the cost of a call.
    written = written_to(plan, args, kwargs)
    # A view of the written tensor must see the write in the copy as well, as it does in the program.
    shared = storage_groups(written, args, kwargs)
    if sum(_nbytes(t) for t in written) + sum(g[0].untyped_storage().nbytes() for g in shared) > max_bytes:
        # The sum is checked before the first allocation: a call that does not fit must not take memory first.
        raise OverBudget
    for t in written:
        if id(t) not in memo:
            memo[id(t)] = _copy(t)
    for group in shared:
        memo.update(_copy_storage(group, group[0].device))

    def swap(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return memo.get(id(value), value)
        if isinstance(value, (list, tuple)):
            # Lists are rebuilt, never changed: the program may hold this very list.
            return [memo.get(id(v), v) for v in value]
        return value

    return tuple([swap(a) for a in args]), {k: swap(v) for k, v in kwargs.items()}


def written_to(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call writes to."""
    written: list[torch.Tensor] = []
    for a in plan.mutated:
        value = kwargs.get(a.name) if a.kwarg_only or a.position >= len(args) else args[a.position]
        if isinstance(value, torch.Tensor):
            written.append(value)
        elif isinstance(value, (list, tuple)):
            # A list of optional tensors may have None in it.
            written += [v for v in value if v is not None]
    return written


def plan_with_cpu_tensors(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPlan:
    """The plan of a device's call, with the names of the tensors that lie on the CPU all the same.

    Kernels read these on the host (the seed of a dropout in attention's backward): handed a copy on the device, they
    would end the process.
    """
    # Nearly all calls have no CPU tensor: the plan is replaced only where one is there.
    if not any(isinstance(t, torch.Tensor) and t.is_cpu for t in (*args, *kwargs.values())):
        return plan
    written = {a.name for a in plan.mutated}
    given = arguments_by_name(plan, args, kwargs).items()
    names = [n for n, t in given if isinstance(t, torch.Tensor) and t.is_cpu and n not in written]
    return replace(plan, on_cpu=tuple(dict.fromkeys((*plan.on_cpu, *names))))


def kept_on_cpu(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call that lie on the CPU wherever it runs."""
    if not plan.on_cpu:
        return []
    given = arguments_by_name(plan, args, kwargs)
    return [t for name in plan.on_cpu if isinstance(t := given.get(name), torch.Tensor) and t.device.type == "cpu"]


def arguments_by_name(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by their names in the schema, without defaults."""
    return dict(zip((a.name for a in schema_of(plan.func).arguments), args, strict=False)) | kwargs


def overlaps_unnoticed(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call writes to memory that it also reads by a tensor on another storage: two of one numpy array, say.

    Only the addresses show it, and to read them ends torch's lazy sharing: asked only of calls that are not equal.
    """
    try:
        written = [_extent(t) for t in written_to(plan, args, kwargs)]
        for t in tensors_in((*args, *kwargs.values())):
            begin, end, storage = _extent(t)
            if any(a < end and begin < b and storage != other for a, b, other in written):
                return True
    except RuntimeError:  # a kind that has no addresses
        pass
    return False


def _extent(t: torch.Tensor) -> tuple[int, int, int]:
    """First address, the one after the last, and the storage; of no bytes off the CPU."""
    # `data_ptr` materialises copy-on-write storages, which `overlaps_unnoticed` warns about.
    begin = t.data_ptr()
    n_bytes = span(t.shape, t.stride()) * t.element_size() if t.is_cpu else 0
    return begin, begin + n_bytes, torchapi.storage_key(t)


def storage_groups(
    written: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[list[torch.Tensor]]:
    """Groups of different tensors on one storage of which the call writes at least one."""
    # One argument cannot share memory with another: `relu_` and the like are left out early.
    if len(args) + len(kwargs) == 1 and len(written) == 1:
        return []
    others = {id(t): t for t in tensors_in((*args, *kwargs.values()))}
    if len(others) <= 1:
        return []
    try:
        by_storage: dict[int, list[torch.Tensor]] = {torchapi.storage_key(t): [] for t in written}
        for t in others.values():
            group = by_storage.get(torchapi.storage_key(t))
            if group is not None:
                group.append(t)
    except (RuntimeError, NotImplementedError):  # sparse and other storageless tensors cannot alias this way
        return []
    return [g for g in by_storage.values() if len(g) > 1]


def _copy_storage(group: list[torch.Tensor], device: torch.device) -> dict[int, torch.Tensor]:
    """Copy the storage of several tensors once, and lay their copies over it."""
    # As bytes: the tensors of the group may have different dtypes.
    raw = torch.empty(0, dtype=torch.uint8, device=group[0].device).set_(group[0].untyped_storage())
    storage = raw.to(device, copy=True).untyped_storage()
    copies = {}
    for t in group:
        laid = torch.empty(0, dtype=t.dtype, device=device).set_(storage, t.storage_offset(), t.size(), t.stride())
        if t.is_conj():
            # The conjugate bit is no part of the memory and has to be set again.
            laid = laid.conj()
        copies[id(t)] = negated_view(laid) if t.is_neg() else laid
    return copies


def _copy(t: torch.Tensor) -> torch.Tensor:
    """Exact copy on the same device."""
    # A symbolic zero has no memory that could be copied.
    if is_zero_tensor(t):
        return torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    if (t.is_conj() or t.is_neg()) and t.layout is torch.strided:  # `clone` would compute them
        return _copy_span(t, None)
    copy = t.clone()
    # `clone` compacts a sliced or expanded tensor: the kernel would take another path.
    if t.layout is torch.strided and copy.stride() != t.stride():
        return _copy_span(t, None)
    return copy


def _copy_span(t: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    if t.is_conj():
        # The memory is copied under the plain view: the copy keeps the lazy conjugation.
        return _copy_span(t.conj(), device).conj()
    if t.is_neg():
        return negated_view(_copy_span(negated_view(t), device))
    if t.numel() == 0:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device or t.device)
    # Overlapping elements (`expand`) are copied once, and still overlap in the copy.
    # The whole span, however large: a copy that packs a sliced tensor gave 1,394 false differences in torch's database
    # (mm, vdot, sum, strides), and one of at most four times its elements still 12 (strides of `copy_`).
    flat = t.as_strided((span(t.shape, t.stride()),), (1,), t.storage_offset())
    moved = flat.clone() if device is None else flat.to(device, copy=True)
    return moved.as_strided(t.shape, t.stride(), 0)


def move(t: torch.Tensor, device: torch.device, *, strided: bool = True) -> torch.Tensor:
    """Exact copy on another device; `strided=False` for devices whose tensors have no strides of their own."""
    if is_zero_tensor(t):
        return torch.zeros(t.shape, dtype=t.dtype, device=device)
    if strided and (t.is_conj() or t.is_neg()) and t.layout is torch.strided:
        return _copy_span(t, device)
    moved = t.to(device, copy=True)
    # `to` compacts as `clone` does: the other device would get another layout than the program's.
    if strided and t.layout is torch.strided and moved.stride() != t.stride() and not t.is_quantized:
        return _copy_span(t, device)
    return moved


def copy_on_device(t: torch.Tensor, _: torch.device) -> torch.Tensor:
    """Copy to where it lies already."""
    return move(t, t.device)


def without_strides(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to or from a device whose tensors have no strides of their own."""
    return move(t, device, strided=False)


def mirror(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    max_bytes: int,
    convert: Convert = move,
    written: list[torch.Tensor] | None = None,
    kept: list[torch.Tensor] | None = None,
) -> Arguments:
    """Copy all tensors of a call to a device; a `device` keyword follows, aliasing by identity is kept.

    Args:
        args: Positional arguments.
        kwargs: Arguments by name.
        device: Where to.
        max_bytes: Bytes that the copies may take.
        convert: Copies one tensor.
        written: Those that the call writes to: copies of what shares their memory share it too.
        kept: Those that stay where they are; the call does not write to them.

    Raises:
        OverBudget: The copies exceed `max_bytes`.
    """
    # Kept tensors stand for themselves, so a pointer to host memory stays one: the backward of attention reads its
    # dropout seed through one, and a copy on the device in its place ended the process.
    memo: dict[int, torch.Tensor] = {id(t): t for t in kept or ()}
    tensors = {id(t): t for t in tensors_in((*args, *kwargs.values()))}
    shared = storage_groups(written, args, kwargs) if written else []
    n_bytes = sum(_nbytes(t) for t in tensors.values()) + sum(g[0].untyped_storage().nbytes() for g in shared)
    if n_bytes > max_bytes:
        raise OverBudget
    for group in shared:
        memo.update(_copy_storage(group, device))
    moved = {k: _mirrored(v, device, memo, convert) for k, v in kwargs.items()}
    if moved.get("device") is not None:
        # A factory's own `device=` would create its result on the program's device.
        moved["device"] = device
    if moved.get("pin_memory"):
        # Torch pins memory of the CPU only, and only for an accelerator.
        moved["pin_memory"] = False
    return tuple([_mirrored(a, device, memo, convert) for a in args]), moved


# No closure that calls itself: it would be a cycle that holds tensors until the garbage collector runs.
def _mirrored(value: Any, device: torch.device, memo: dict[int, torch.Tensor], convert: Convert) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in memo:
            memo[id(value)] = convert(value, device)
        return memo[id(value)]
    if isinstance(value, (list, tuple)):
        return [_mirrored(v, device, memo, convert) for v in value]
    return value


def _nbytes(t: torch.Tensor) -> int:
    """Memory that a copy takes: of a slice, all from its first element to its last (`_copy_span`)."""
    if t.layout is not torch.strided:
        return 0
    n = t.numel()
    if n and not t.is_nested and not t.is_contiguous():
        # A slice of a large tensor has few elements and a large span: the budget must count the span.
        n = max(n, span(t.shape, t.stride()))
    return n * t.element_size()


MAX_BYTES: Final = 64 << 20
"""Memory before a tensor that is laid out again."""


def offsets(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Storage offset of each tensor among arguments; 0 for those that have none or too much memory before them."""
    return tuple(_offset(t) for t in tensors(args, kwargs))


def _offset(t: torch.Tensor) -> int:
    if t.layout is not torch.strided or t.is_conj() or t.is_neg() or is_zero_tensor(t) or not t.numel():
        return 0
    offset = int(t.storage_offset())
    # A row of an embedding may lie gigabytes into its storage.
    return offset if offset * t.element_size() <= MAX_BYTES else 0


def at_offsets(args: tuple[Any, ...], kwargs: dict[str, Any], wanted: tuple[int, ...]) -> Arguments:
    """Lay tensors at other offsets of storages of their own, zeros before them.

    Args:
        args: Arguments with the tensors of `offsets`, in that order.
        kwargs: By name.
        wanted: Their offsets.
    """
    laid = {id(t): _laid(t, n) for t, n in zip(tensors(args, kwargs), wanted, strict=True) if n}

    def each(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return laid.get(id(value), value)
        return type(value)(map(each, value)) if isinstance(value, (list, tuple)) else value

    return tuple(map(each, args)), {name: each(value) for name, value in kwargs.items()}


def _laid(t: torch.Tensor, offset: int) -> torch.Tensor:
    n = span(t.shape, t.stride())
    # Zeros: a kernel that ignores the offset then reads values that differ from the tensor's.
    memory = torch.zeros(offset + n, dtype=t.dtype, device=t.device)
    memory.narrow(0, offset, n).copy_(t.as_strided((n,), (1,), t.storage_offset()))
    return memory.as_strided(t.shape, t.stride(), offset)
