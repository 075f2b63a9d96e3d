"""The accumulated error: a second chain, in which the other platform computes on its own results.

A chain has no values of its own before the first result that differs: until then, the replay of a call on the program's
inputs is what the chain would run. So a call whose inputs have no twin costs a drift comparison no further run.

Where the program runs on the target, the reference has a chain; where it runs on the reference, the target has one;
where it runs on neither, both have. A call on the reference, of values from the target, runs in the reference's chain.

Kept by storage: each storage of the user's program has a twin in the chain; any view of it is laid over the twin.
Tensor-keyed maps are wrong: autograd unpacks a saved output as another tensor on the same storage. Where a chain cannot
follow (random draws of another device, data-dependent shapes, an operator that the target lacks), the user's values win
and the chain continues from them.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept import torchapi
from shadowrun.numerics.bits import Uncomparable, bits_equal
from shadowrun.replay.call import argument
from shadowrun.replay.copies import tensors_in
from shadowrun.replay.executor import to_cpu
from shadowrun.torch_private import is_zero_tensor, negated_view

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.intercept.plan import OpPlan
    from shadowrun.operators.case import Value
    from shadowrun.replay.call import Call, CallRun
    from shadowrun.replay.executor import Executor
    from shadowrun.replay.repair_trials import RepairTrials

__all__ = ["Drift", "DriftChain", "RngState", "drift_error"]

RngState = tuple[torch.Generator, torch.Tensor]
"""A generator, and the state that a call began with."""

_CPU = torch.device("cpu")
_NOT_FOLLOWED = (-1.0, -1.0)


@dataclass(slots=True)
class _Twin:
    bytes: torch.Tensor
    nbytes: int
    key: int


_UNFOLLOWED = object()


class _Pending(threading.local):
    def __init__(self) -> None:
        # Per thread: two threads may be inside a call at once, each with laid-out inputs.
        self.call: Any = None


class Drift:
    """The chains of a comparison.

    Args:
        target, ref: Run the chains.
        max_bytes: See `DriftChain`; for each.

    Attributes:
        trials: Measures what the loss would be with an operator repaired; None if that is not wanted.
    """

    trials: RepairTrials | None = None
    _changed: Callable[[bool], None] | None = None

    def __init__(self, target: Executor, ref: Executor, max_bytes: int) -> None:
        self._of_target = DriftChain(target, max_bytes)
        self._of_ref = DriftChain(ref, max_bytes, ref.device)

    def clear(self) -> None:
        """Forget all: what the program did between two blocks was not seen."""
        self._of_target.clear()
        self._of_ref.clear()
        if self.trials is not None:
            self.trials.clear()

    def take_inputs(self, call: Call) -> None:
        """Lay the inputs of a call over the twins, before the program's own run may change them."""
        if self.trials is not None:
            self.trials.take_inputs(call)
        role = call.role
        # A value that the program read back from the target continues in the reference's chain.
        on_target = role.on_target or (role.on_ref and self._of_ref.has_input_of(call))
        for chain, follows in ((self._of_target, not on_target), (self._of_ref, on_target or not role.on_ref)):
            if follows:
                chain.take_inputs(call)
            else:
                # The pending inputs of an earlier call that raised would be taken for this one's.
                chain.leave_out()

    def after(self, plan: OpPlan, own: CallRun, rng: RngState | None = None) -> tuple[float, float]:
        """Run the call in the chains.

        Args:
            plan: The operator.
            own: The program's own run.
            rng: The generator that it drew from, and the state that it began with.

        Returns:
            Greatest absolute difference of any result of the target's from the reference's, and its RMSE relative to
            the RMS of the reference (the greatest over the results); -1 where the chain could not follow.
        """
        if self.trials is not None:
            self.trials.after(plan, own, rng)
        found: list[list[Value] | None] = []
        for chain in (self._of_target, self._of_ref):
            if chain.follows:
                found.append(chain.after(plan, own, rng))
            else:  # the other one continues from here
                chain.reseed(plan, own)
                found.append(own.values(plan))
        actual, expected = found
        if actual is None or expected is None:
            return _NOT_FOLLOWED
        return _greatest_error(actual, expected)

    @property
    def follows_all(self) -> bool:
        """Whether each call has to be followed, for the trials."""
        return self.trials is not None and self.trials.has_suspects

    @property
    def has_diverged(self) -> bool:
        """Whether any value of a chain may differ from the program's."""
        return self.follows_all or self._of_target.has_twins or self._of_ref.has_twins

    def notify(self, changed: Callable[[bool], None]) -> None:
        """Have `changed` called with `has_diverged`, when that changes."""
        self._changed = changed
        for chain in (self._of_target, self._of_ref):
            chain.changed = lambda: changed(self.has_diverged)
        changed(self.has_diverged)

    def suspect(self, op: str, error: float) -> None:
        """A call was wrong: see `RepairTrials.suspect`."""
        if self.trials is not None:
            self.trials.suspect(op, error)
            if self._changed is not None:
                self._changed(self.has_diverged)

    def must_follow(self, call: Call) -> bool:
        """Whether the chains have to run a call: else, they would run what is replayed."""
        return self.follows_all or self._of_target.has_input_of(call) or self._of_ref.has_input_of(call)

    def diverge(self, call: Call, own: CallRun, replayed: CallRun) -> tuple[float, float]:
        """Take the results of a replay into the chain; no input of the call had a twin.

        Args:
            call: The call, on a device that both platforms share.
            own: The program's own run.
            replayed: The run on the other platform, on the same inputs.

        Returns:
            As `after`.
        """
        plan, on_target = call.plan, call.role.on_target
        chain = self._of_ref if on_target else self._of_target
        of_program, of_chain = own.values(plan), replayed.values(plan)
        if len(of_program) != len(of_chain):
            self.reseed(plan, own)
            return _NOT_FOLLOWED
        written = {id(t) for t in tensors_in([argument(a, own.args, own.kwargs) for a in plan.mutated])}
        for value, twin in zip(of_program, of_chain, strict=True):
            if isinstance(value, torch.Tensor) and isinstance(twin, torch.Tensor):
                chain.diverge(value, twin, written=id(value) in written)
        return _greatest_error(*((of_program, of_chain) if on_target else (of_chain, of_program)))

    def reseed(self, plan: OpPlan, own: CallRun, *, answered: bool = False) -> None:
        """Forget the twins of a call's results: they are made anew from the user's values.

        Args:
            plan: The operator.
            own: The program's own run.
            answered: The target lacks the operator, and the program got the reference's result.
        """
        if self.trials is not None:
            self.trials.reseed(plan, own, answered=answered)
        self._of_target.reseed(plan, own)
        self._of_ref.reseed(plan, own)


class DriftChain:
    """One platform's own chain.

    Args:
        executor: Runs the chain.
        max_bytes: Bytes that all twins together may take; past them the oldest are dropped (they are
            then made anew from the user's values).
        device: Where twins lie: that of the executor, or the CPU, from where each call's inputs are copied.

    Attributes:
        changed: Called when the first twin is made, and when the last is gone.
    """

    def __init__(self, executor: Executor, max_bytes: int, device: torch.device = _CPU) -> None:
        self._executor = executor
        self._device = device
        self._max_bytes = max_bytes
        self._twins: dict[int, _Twin] = {}
        self._held = 0
        self._pending = _Pending()
        self.changed: Callable[[], None] | None = None

    def clear(self) -> None:
        """Forget all."""
        self._twins.clear()
        self._held = 0
        self._notify()

    @property
    def has_twins(self) -> bool:
        """Whether any value may differ from the program's."""
        return bool(self._twins)

    def _notify(self) -> None:
        if self.changed is not None:
            self.changed()

    @property
    def follows(self) -> bool:
        """Whether the call in hand runs here too."""
        return self._pending.call is not None

    def has_input_of(self, call: Call) -> bool:
        """Whether an input has a twin here."""
        return self.has(call.tensors)

    def has(self, value: Any) -> bool:
        """Whether a tensor in a value has a twin here."""
        if not self._twins:
            return False
        try:
            # By storage, not by tensor: autograd unpacks a saved output as another tensor on the same storage.
            return any(torchapi.storage_key(t) in self._twins for t in tensors_in((value,)))
        except (RuntimeError, NotImplementedError, TypeError):
            return False

    def leave_out(self) -> None:
        """The call runs elsewhere."""
        self._pending.call = None

    def take_inputs(self, call: Call) -> None:
        """Lay the inputs of a call over the twins."""
        try:
            self._pending.call = (
                tuple([self._twin_of(a) for a in call.args]),
                self._on_device({k: self._twin_of(v) for k, v in call.kwargs.items()}),
            )
        except (RuntimeError, NotImplementedError, TypeError):  # layouts without a storage: not followed
            self._pending.call = _UNFOLLOWED

    def take_prepared_inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs that `take_inputs` laid out, once; empty for a call that is not followed."""
        call, self._pending.call = self._pending.call, None
        return ((), {}) if call is None or call is _UNFOLLOWED else call

    def after(self, plan: OpPlan, own: CallRun, rng: RngState | None) -> list[Value] | None:
        """Run the call here; its results, as `Ran.values` has them, or None where the chain could not follow."""
        call, self._pending.call = self._pending.call, None
        if call is _UNFOLLOWED:
            self.reseed(plan, own)
            return None
        if rng is not None:
            rng[0].set_state(rng[1])
        of_program = own.values(plan)
        try:
            of_chain = self._run(plan, *call)
        except Exception:  # an input drifted out of the operator's domain, or the operator is missing
            of_chain = []
        # Zipped lists of unequal length would pair results with the wrong twins.
        if len(of_chain) != len(of_program):
            self.reseed(plan, own)
            return None
        # The twins of written arguments hold the chain's values already: the call wrote to them.
        written = {id(t) for t in tensors_in([argument(a, own.args, own.kwargs) for a in plan.mutated])}
        for value, twin in zip(of_program, of_chain, strict=True):
            if isinstance(value, torch.Tensor) and isinstance(twin, torch.Tensor) and id(value) not in written:
                self.adopt(value, twin)
        return of_chain

    def _run(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], executor: Executor | None = None
    ) -> list[Value]:
        """Run a call on twins, which get what it writes; `executor` stands for the chain's own."""
        executor = executor or self._executor
        if executor.device.type == self._device.type:
            ran: CallRun = executor.run(plan, args, kwargs)
            return ran.values(plan)
        ran = executor.run_mirrored(plan, args, kwargs, self._max_bytes)
        values = executor.values(plan, ran)
        written = list(tensors_in([argument(a, args, kwargs) for a in plan.mutated]))
        for twin, value in zip(written, values[len(values) - len(written) :], strict=True):
            if isinstance(value, torch.Tensor):
                # Out arguments may be empty and are resized by the call.
                if twin.shape != value.shape:
                    twin.resize_(value.shape)
                twin.copy_(value)
        return values

    def reseed(self, plan: OpPlan, own: CallRun) -> None:
        """Forget the twins of a call's results: they are made anew from the user's values."""
        self.leave_out()
        for value in tensors_in(own.values(plan)):
            try:
                self._drop(torchapi.storage_key(value))
            except (RuntimeError, NotImplementedError):
                continue

    def _twin_of(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._twin_of(v) for v in value]
        if not isinstance(value, torch.Tensor):
            return value
        if is_zero_tensor(value):
            return torch.zeros(value.shape, dtype=value.dtype, device=self._device)
        twin = self._twin_storage(value)
        base = torch.empty(0, dtype=value.dtype, device=self._device)
        laid = base.set_(twin.bytes.untyped_storage(), value.storage_offset(), value.size(), value.stride())
        if value.is_conj():
            laid = laid.conj()
        return negated_view(laid) if value.is_neg() else laid

    def _twin_storage(self, value: torch.Tensor) -> _Twin:
        key = torchapi.storage_key(value)
        storage = value.untyped_storage()
        twin = self._twins.get(key)
        # A resized storage keeps its key, and a view of its new end would lie outside the twin.
        if twin is not None and twin.nbytes == storage.nbytes():
            return twin
        raw = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
        return self._keep(value, raw.to(self._device, copy=True))

    def diverge(self, value: torch.Tensor, result: torch.Tensor, *, written: bool) -> None:
        """Make what a replay returned the twin of the program's value, where it differs.

        Args:
            value: The program's.
            result: The replay's, which nothing else writes to unless `written`.
            written: It is an argument that the call wrote to: the rest of its storage is that of the program.
        """
        try:
            if value.shape != result.shape or bits_equal(value, result):
                self._drop(torchapi.storage_key(value))
            elif not written:
                self.adopt(value, result)
            elif value.layout is torch.strided:
                twin = self._twin_of(value)
                twin.copy_(result)
        except (RuntimeError, NotImplementedError, TypeError, Uncomparable):  # kinds without a storage: not followed
            return

    def adopt(self, value: torch.Tensor, result: torch.Tensor) -> None:
        """Make the chain's own result the twin of the program's."""
        if value.shape != result.shape or value.layout is not torch.strided:
            return
        storage = value.untyped_storage()
        of_result = result.untyped_storage()
        same_layout = (
            value.stride() == result.stride()
            and value.storage_offset() == result.storage_offset()
            and storage.nbytes() == of_result.nbytes()
        )
        # The result becomes the twin itself: a copy of each result would double the memory of the chain.
        if same_layout:
            raw = torch.empty(0, dtype=torch.uint8, device=result.device).set_(of_result)
        else:
            raw = torch.zeros(storage.nbytes(), dtype=torch.uint8, device=self._device)
            laid = torch.empty(0, dtype=value.dtype, device=self._device)
            laid.set_(raw.untyped_storage(), value.storage_offset(), value.size(), value.stride()).copy_(result)
        self._keep(value, raw)

    def _keep(self, value: torch.Tensor, raw: torch.Tensor) -> _Twin:
        key = torchapi.storage_key(value)
        self._drop(key)
        twin = self._twins[key] = _Twin(raw, raw.numel(), key)
        self._held += twin.nbytes
        if len(self._twins) == 1:
            self._notify()
        # The storage lives as long as its last view; a new one may then get the same key.
        weakref.finalize(value.untyped_storage(), self._expire, twin).atexit = False
        while self._held > self._max_bytes and len(self._twins) > 1:
            oldest = next(iter(self._twins))
            # The twin that was just made is in use, even if it is larger than the bound.
            if oldest == key:
                break
            self._drop(oldest)
        return twin

    def _expire(self, twin: _Twin) -> None:
        # The finalizer may run late: the key can belong to a newer storage by then.
        if self._twins.get(twin.key) is twin:
            self._drop(twin.key)

    def _drop(self, key: int) -> None:
        twin = self._twins.pop(key, None)
        if twin is not None:
            self._held -= twin.nbytes
            if not self._twins:
                self._notify()

    def _on_device(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        # A factory of the program names the program's device; the chain's result belongs on the chain's.
        if kwargs.get("device") is not None:
            kwargs["device"] = self._device
        return kwargs


def _greatest_error(actual: list[Value], expected: list[Value]) -> tuple[float, float]:
    drift = (0.0, 0.0)
    for a, e in zip(actual, expected, strict=True):
        # The greatest over all results: the mean of a large and a small result would hide the small one.
        error = drift_error(to_cpu(a), to_cpu(e))
        drift = (max(drift[0], error[0]), max(drift[1], error[1]))
    return drift


def drift_error(actual: Any, expected: Any) -> tuple[float, float]:
    """Greatest absolute difference, and the RMS of the differences by that of the expected values."""
    try:
        if bits_equal(actual, expected):
            return 0.0, 0.0
    except Uncomparable:
        return -1.0, -1.0
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        actual, expected = torch.tensor(actual), torch.tensor(expected)
    if actual.shape != expected.shape:
        return float("inf"), float("inf")
    a, e = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (actual, expected))
    # The square of a float16 difference over- or underflows.
    a, e = a.double(), e.double()
    both = torch.isfinite(a) & torch.isfinite(e)
    d = torch.where(both, a - e, torch.zeros_like(a))
    rms = float(torch.where(both, e, torch.zeros_like(e)).square().mean().sqrt()) if e.numel() else 0.0
    rmse = float(d.square().mean().sqrt()) if d.numel() else 0.0
    # NaN or infinity on one side only: no finite error describes that.
    if not bool((both | (a == e) | (a.isnan() & e.isnan())).all()):
        return float("inf"), float("inf")
    return float(d.abs().max()) if d.numel() else 0.0, rmse / rms if rms else (float("inf") if rmse else 0.0)
