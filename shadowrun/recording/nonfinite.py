"""Where NaN and infinities come from, without a reference: the calls whose results have some and whose inputs had none.

On the CPU each result is looked at after its call; where it is finite, as nearly always, the inputs are never read. On
an accelerator the look must not wait for the device: flags stay there until `flush`, which reads all of them at once.
"""

from __future__ import annotations

import cmath
import math
import threading
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.intercept import torchapi
from shadowrun.intercept.plan import Action, OpKind, OpPlan
from shadowrun.intercept.torchapi import StorageWatch, as_in_handler, storage_key
from shadowrun.intercept.user_call import own_call
from shadowrun.native import core
from shadowrun.numerics.form import meta
from shadowrun.recording.call_results import flat, returned_values
from shadowrun.replay.call import argument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from shadowrun.intercept.attribution import Attribution
    from shadowrun.schedule.selection import Selection

__all__ = ["BORN", "ENTERED", "NonFinite", "NonFiniteObserver"]

BORN: Final = "born"
ENTERED: Final = "entered"
_FRAMES: Final = 3  # of shadowrun, above `_conclude`: the search for the program's line skips them
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
# Flags of calls on an accelerator are read in batches, since each reading waits for the device.
_MAX_PENDING: Final = 4096
_MAX_BAD: Final = 100_000
_MAX_PRINTED: Final = 6
_MAX_TEXT: Final = 60
_NAN, _INF = 1, 2


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Calls of one place whose results have NaN or infinities that their inputs do not explain.

    Attributes:
        how: ``"born"``: no input had any of the kind. ``"entered"``: an input that no call of the run had made had
            some, such as a batch of data or a loaded weight.
        kind: ``"NaN"`` or ``"Inf"``.
        op: ``aten::log``.
        module, phase, site: Module path, part of the training step, and source line.
        step, seq: Step and number of the first such call, from 0.
        inputs: Its arguments: dtype and shape of tensors; range of the values, where they could still be read.
        n_elements, of_elements: Elements of the kind in its results, of so many; -1 on an accelerator.
        n_calls: Calls of this place so far.
    """

    how: str
    kind: str
    op: str
    module: str
    phase: str
    site: str
    step: int
    seq: int
    inputs: tuple[str, ...]
    n_elements: int
    of_elements: int
    n_calls: int = 1

    def __str__(self) -> str:
        where = f"{self.module or 'outside of a module'}, {self.phase}, {self.site or 'line unknown'}"
        count = f" in {self.n_elements:,} of {self.of_elements:,} elements" if self.n_elements >= 0 else ""
        verb = "makes" if self.how == BORN else "gets"
        what = f"{self.op} {verb} {self.kind}{count}"
        return f"step {self.step}, call {self.seq}: {what} ({where}); {', '.join(self.inputs)}"


class State:
    """What the observer and its fast path in C read and set.

    Attributes:
        running: Calls are looked at now.
        has_recorded: There were calls in this step.
        has_bad: A storage has some: what is written to is followed by Python.
    """

    __slots__ = ("has_bad", "has_recorded", "running")

    def __init__(self) -> None:
        self.running = self.has_recorded = self.has_bad = False


class _Storage:
    """A storage, whose key no other storage gets while this object lives.

    Attributes:
        key: Its identity.
        kinds: What its elements have.
        is_covered: The tensor that it was met with has all of its elements.
    """

    __slots__ = ("_watch", "is_covered", "key", "kinds")

    def __init__(self, t: torch.Tensor) -> None:
        self.key = storage_key(t)
        self.kinds = 0
        self.is_covered = t.numel() * t.element_size() == t.untyped_storage().nbytes()
        self._watch = StorageWatch(t)

    @property
    def freed(self) -> bool:
        return self._watch.freed


@dataclass(frozen=True, slots=True)
class _Pending:
    """A call on an accelerator, whose flags are read later.

    Attributes:
        flags: On the device: has NaN, has infinities; of each leaf, then of each result.
        leaves: Storages of inputs that no call had made.
        results: Results, by their storages.
        inputs: Storages of inputs.
        constant: Kinds that an argument has that is a number.
        found: What is noted if the call is the first to have some.
    """

    flags: tuple[torch.Tensor, ...]
    leaves: tuple[_Storage, ...]
    results: tuple[_Storage, ...]
    inputs: tuple[int, ...]
    constant: int
    found: NonFinite


class NonFiniteObserver:
    """Runs each call, and looks for NaN and infinities in what it returned and wrote to.

    Args:
        attribution: Finds where a call comes from.
        selection: Of all calls; the fast path asks it.
        met: Called with the first call of each place.
        max_places: Places that are kept.

    Attributes:
        plans: Plans by the id of their operator.
        step: The current training step.
        native_handler: Runs plain calls on the CPU in C; None without the C extension.
        skipped: Calls that were not looked at, by reason.
        failure: Why nothing more is looked at; empty while all is well.
    """

    run_distributed: None = None

    def __init__(
        self, attribution: Attribution, selection: Selection, met: Callable[[NonFinite], None], max_places: int
    ) -> None:
        self.attribution = attribution
        self._selection = selection
        self.plans: dict[int, OpPlan] = {}
        self.step = 0
        self._state = State()
        self._n_calls = self._n_frames = 0
        self.skipped: Counter[str] = Counter()
        self.failure = ""
        self.lock = threading.RLock()
        self._met = met
        self._max_places = max_places
        self._places: dict[tuple[str, ...], NonFinite] = {}
        self._bad: dict[int, _Storage] = {}
        self._seen: dict[int, _Storage] = {}
        self._pending: list[_Pending] = []
        self._native: Any = None
        self.native_handler: Any = None

    @property
    def running(self) -> bool:
        """Whether calls are looked at now."""
        return self._state.running

    @property
    def recorded_in_step(self) -> bool:
        """Whether the current step has calls."""
        return self._state.has_recorded

    @property
    def n_calls(self) -> int:
        """Calls that were looked at."""
        return self._n_calls + (0 if self._native is None else int(self._native.n_calls))

    def start(self) -> None:
        """Look at calls from here on."""
        self.failure = ""
        if self._native is None and core is not None and self.attribution.native_origins is not None:
            self._native = core.FiniteHandler(
                origins=self.attribution.native_origins,
                selection=self._selection,
                contexts={},
                device="cpu",
                n_modes_below=torchapi.n_modes_below,
                function_mode_on=torchapi.has_function_mode,
                profiler_on=torchapi.profiling,
                acquire=None,
                release=None,
                state=self._state,
                conclude=self._conclude,
            )
            for plan in self.plans.values():
                self.add_operator(plan)
        self.native_handler = self._native
        self._state.running = True

    def stop(self) -> None:
        """Only run calls from here on."""
        self._state.running = False

    def found(self) -> list[NonFinite]:
        """All places so far, the earliest call first."""
        with self.lock:
            self.flush()
            return sorted(self._places.values(), key=lambda f: f.seq)

    # -- what a mode and `Steps` ask for ---------------------------------------------------------------

    def add_operator(self, plan: OpPlan) -> None:
        """Teach the fast path an operator whose results it can find."""
        if (
            core is None
            or self._native is None
            or plan.kind is OpKind.PASS
            or plan.composite
            or plan.custom
            or plan.uninitialised
        ):
            return
        if any(a.is_list or a.kwarg_only for a in plan.mutated) or len(plan.mutated) > core.MAX_WRITTEN:
            return
        written = tuple(a.position for a in plan.mutated)
        self._native.add_operator(plan.func, plan, plan.run, plan.index, _has_values(plan), written)

    def count(self, name: str, reason: str) -> None:
        """Count a call that has no plan."""
        self.skipped[f"{name}: {reason}"] += 1

    def run_and_count(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that is never looked at, and count it."""
        if self.running and not plan.returns_number:
            self.skipped[f"{plan.name}: {plan.reason or 'fake or traced tensors'}"] += 1
        return own_call(plan.run, args, kwargs)

    def add_step(self, step: int, began_s: float, took_s: float) -> None:
        """A step has ended; its times are of no use here."""

    def between_calls(self) -> AbstractContextManager[Any]:
        """Hold the lock: no call is being looked at."""
        return self.lock

    def forked(self) -> None:
        """In a forked child: the thread that held the lock may not exist."""
        self.lock = threading.RLock()
        self.stop()

    def observe(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call for the program, and look at its results."""
        out = own_call(plan.run, args, kwargs)
        if self.running:
            self._conclude(plan, args, kwargs, out, _FRAMES)
        return out

    # -- inside ----------------------------------------------------------------------------------------

    def _conclude(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, n_frames: int = 0
    ) -> None:
        """Look at a call that has run.

        C calls this too, with no frames of shadowrun in between. Raises what `met` raises, which is meant for the
        program, and nothing else.
        """
        found: list[NonFinite] = []
        try:
            with self.lock:
                self._n_calls += 1
                self._state.has_recorded = True
                if _has_values(plan):
                    self._n_frames = n_frames
                    found = self._look(plan, args, kwargs, out)
                self.attribution.note_origin(n_frames)  # its backward may make some
        except Exception as error:
            self.failure = self.failure or f"{plan.name}: {type(error).__name__}: {error}"[:300]
        for one in found:
            self._met(one)

    def _look(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[NonFinite]:
        bad, later = [], []
        for t, is_new in _results(plan, args, kwargs, out):
            if not t.is_cpu:
                later.append((t, is_new))
            # Values without NaN and infinities have a finite sum, unless it overflows: then they are counted.
            elif not cmath.isfinite(t.sum().item()) and any(_count(t)):
                bad.append(t)
            # Finite in all of its memory: what an earlier call had left there is gone.
            elif self._bad and not is_new and _Storage(t).is_covered:
                self._bad.pop(storage_key(t), None)
        found = self._postpone(plan, args, kwargs, later) if later else []
        return found + self._explain(plan, args, kwargs, bad) if bad else found

    def _explain(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], bad: list[torch.Tensor]
    ) -> list[NonFinite]:
        """Whether the inputs have what the results have, and if so, whether a call of the run has made it."""
        counts = [_count(t) for t in bad]
        written = {storage_key(t) for t in bad}
        known = {key: self._kinds_of(key) for key in written}  # as before the call
        had = []
        for t in _floats((*args, *kwargs.values())):
            key = storage_key(t)
            # Of memory that the call wrote to, only what was noted before is known.
            had.append((t, known[key] if key in written else _kinds(*_count(t))))
        found = []
        for kind, bit, n in (("NaN", _NAN, sum(c[0] for c in counts)), ("Inf", _INF, sum(c[1] for c in counts))):
            # A number of the program explains it: `masked_fill` with -inf is no finding.
            if not n or any(_kinds(math.isnan(v), math.isinf(v)) & bit for v in _numbers(args, kwargs)):
                continue
            carriers = [t for t, kinds in had if kinds & bit]
            if carriers and all(self._kinds_of(storage_key(t)) & bit for t in carriers):
                continue  # an earlier call has made it, and was noted
            for t in carriers:
                self._mark(_Storage(t), bit)
            how = ENTERED if carriers else BORN
            found += self._note(self._described(plan, args, kwargs, how, kind, n, sum(t.numel() for t in bad)))
        for t, (n_nan, n_inf) in zip(bad, counts, strict=True):
            self._mark(_Storage(t), _kinds(n_nan, n_inf))
        return found

    def _described(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], how: str, kind: str, n: int, of: int
    ) -> NonFinite:
        module, phase, site = self.attribution.find_origin(self._n_frames + 3)
        inputs = tuple(_printed((*args, *kwargs.values())))
        return NonFinite(how, kind, plan.name, module, str(phase), site, self.step, self.n_calls - 1, inputs, n, of)

    def _note(self, one: NonFinite) -> list[NonFinite]:
        """Count a call; it is returned if it is the first of its place."""
        key = (one.how, one.kind, one.op, one.module, one.phase, one.site)
        before = self._places.get(key)
        if before is not None:
            self._places[key] = replace(before, n_calls=before.n_calls + 1)
        # A program with NaN everywhere must not fill memory with places.
        elif len(self._places) < self._max_places:
            self._places[key] = one
            return [one]
        return []

    def _kinds_of(self, key: int) -> int:
        storage = self._bad.get(key)
        return 0 if storage is None else storage.kinds

    def _mark(self, storage: _Storage, kinds: int) -> None:
        if len(self._bad) >= _MAX_BAD:
            self._bad = {key: known for key, known in self._bad.items() if not known.freed}
        self._bad.setdefault(storage.key, storage).kinds |= kinds
        self._state.has_bad = True

    # -- accelerators ----------------------------------------------------------------------------------

    def _postpone(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[tuple[torch.Tensor, bool]]
    ) -> list[NonFinite]:
        """Have the device compute flags, without a host sync; gives what is found where no more can wait."""
        inputs = [t for t in _floats((*args, *kwargs.values())) if t.device.type != "cpu"]
        # What no call has made is looked at when it is met first.
        leaves = [t for t in inputs if storage_key(t) not in self._seen]
        if len(self._seen) >= _MAX_BAD:
            self._seen = {key: known for key, known in self._seen.items() if not known.freed}
        met = [_Storage(t) for t in (*leaves, *(t for t, _ in results))]
        self._seen.update((storage.key, storage) for storage in met)
        constant = 0
        for v in _numbers(args, kwargs):
            constant |= _kinds(math.isnan(v), math.isinf(v))
        self._pending.append(
            _Pending(
                tuple(torch.stack([t.isnan().any(), t.isinf().any()]) for t in (*leaves, *(t for t, _ in results))),
                tuple(met[: len(leaves)]),
                tuple(met[len(leaves) :]),
                tuple(storage_key(t) for t in inputs),
                constant,
                # The line can be found now only; how and which kind are known when the flags are read.
                self._described(plan, args, kwargs, BORN, "NaN", -1, -1),
            )
        )
        return self._read_pending() if len(self._pending) >= _MAX_PENDING else []

    def flush(self) -> None:
        """Read what waits on accelerators. Safe to call at any time."""
        for one in self._read_pending():
            self._met(one)

    def _read_pending(self) -> list[NonFinite]:
        pending, self._pending = self._pending, []
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for call in pending:
            for flag in call.flags:
                by_device.setdefault(flag.device, []).append(flag)
        # Stacked and read as in a handler of the mode: these are no calls of the program.
        with as_in_handler():
            read = {device: iter(torch.stack(flags).tolist()) for device, flags in by_device.items()}
        found: list[NonFinite] = []
        for call in pending:
            kinds = [_kinds(*next(read[flag.device])) for flag in call.flags]
            found += self._found_later(call, kinds)
        return found

    def _found_later(self, call: _Pending, kinds: list[int]) -> Iterator[NonFinite]:
        leaves, results = kinds[: len(call.leaves)], kinds[len(call.leaves) :]
        before = [self._kinds_of(key) for key in call.inputs]
        for kind, bit in (("NaN", _NAN), ("Inf", _INF)):
            entered = any(k & bit for k in leaves)
            if not any(k & bit for k in results) or call.constant & bit or any(k & bit for k in before):
                continue
            yield from self._note(replace(call.found, how=ENTERED if entered else BORN, kind=kind))
        for storage, bits in zip((*call.leaves, *call.results), kinds, strict=True):
            if bits:
                self._mark(storage, bits)
            elif storage.is_covered:
                self._bad.pop(storage.key, None)


def _has_values(plan: OpPlan) -> bool:
    """A view shows memory that was looked at when it was written; `empty` may hold anything."""
    # A view for which autograd keeps no relation, so that its schema says nothing.
    return plan.kind is not OpKind.NO_VALUES and plan.action is not Action.EMPTY and plan.name != "aten::_unsafe_view"


def _kinds(has_nan: Any, has_inf: Any) -> int:
    return (_NAN if has_nan else 0) | (_INF if has_inf else 0)


def _count(t: torch.Tensor) -> tuple[int, int]:
    """NaN and infinite elements."""
    return int(t.isnan().sum()), int(t.isinf().sum())


def _results(
    plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Tensors with values that a call made or wrote to, and whether it made them."""
    # The most frequent call: one new tensor.
    if plan.kind is OpKind.FUNCTIONAL and type(out) is torch.Tensor:
        yield from ((t, True) for t in _floats((out,)))
        return
    for mutated in plan.mutated:
        for t in _floats((argument(mutated, args, kwargs),)):
            yield t, False
    for number, value in returned_values(out, plan.n_returns):
        if number in plan.fresh and number not in plan.uninitialised:
            for t in _floats((value,)):
                yield t, True


def _floats(values: Any) -> Iterator[torch.Tensor]:
    for v in flat(values):
        if type(v) not in _PLAIN or v.layout is not torch.strided or v.is_meta or not v.numel():
            continue
        if v.is_floating_point() or v.is_complex():
            yield v


def _numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[float]:
    return (v for v in flat((*args, *kwargs.values())) if type(v) is float)


def _printed(values: Any) -> Iterator[str]:
    """The first arguments: form and range of tensors, numbers as they are."""
    for v in list(flat(values))[:_MAX_PRINTED]:
        if not isinstance(v, torch.Tensor):
            yield str(v)[:_MAX_TEXT]
        elif v.is_cpu and type(v) in _PLAIN and v.is_floating_point() and v.layout is torch.strided and v.numel():
            n_nan, n_inf = _count(v)
            finite = v[v.isfinite()] if n_nan or n_inf else v
            low, high = finite.aminmax() if finite.numel() else (math.nan, math.nan)
            counts = ((n_nan, "NaN"), (n_inf, "Inf"))
            yield ", ".join([f"{meta(v)} in [{low:.6g}, {high:.6g}]", *(f"{n} {kind}" for n, kind in counts if n)])
        else:
            yield str(meta(v))
