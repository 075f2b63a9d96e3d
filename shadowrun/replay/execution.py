"""Running an operator on a platform: settings, device rules, fallback witnesses, time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shadowrun.intercept import torchapi
from shadowrun.intercept.own_call import own_call
from shadowrun.intercept.plan import Action, OpPlan
from shadowrun.platforms.fallback import Evidence, FallbackWitness
from shadowrun.replay import results
from shadowrun.replay.equivalents import EQUIVALENTS
from shadowrun.replay.mirror import Arguments, kept_on_cpu, mirror, move, tensors_in, without_strides, written_to
from shadowrun.types import Cause

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.platforms.device import Platform
    from shadowrun.replay.case import Value

__all__ = ["Executor", "Ran"]

_CPU = torch.device("cpu")
_UNDEFINED = object()
_clock = time.perf_counter_ns
_T = TypeVar("_T")


@dataclass(slots=True)
class Ran:
    """A finished run of a call.

    Attributes:
        args, kwargs: What it ran on, as the call left them.
        out: What it returned.
        ns: How long it took, in nanoseconds.
        fallback: Evidence that it computed on the CPU.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    ns: int
    fallback: Evidence | None = None


class Executor:
    """Runs calls on one platform.

    Attributes:
        plain: Calls need nothing around them: the process's own settings, no functionalization.
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.device = platform.device
        self.witness = FallbackWitness(platform.dispatch_key, platform.device.type)
        self.plain = platform.is_ambient and not platform.functionalizes
        self._is_cpu = platform.device.type == "cpu"
        self._remote = platform.remote
        self._above: dict[int, bool] = {}

    def run(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], *, mute: bool = True) -> Ran:
        """Run a call on tensors that lie on this platform's device.

        Args:
            plan: The operator.
            args: Positional inputs; the call may write to them.
            kwargs: Inputs by name.
            mute: It is a replay: warnings that it gives are not the user's.
        """
        if self._remote is not None:
            done: Ran = torchapi.unheard(self._run_remote, (), (plan, args, kwargs))
            _write_back(plan, args, kwargs, done)
            return Ran(args, kwargs, done.out, done.ns)
        if self.witness.active:
            key = _watch_key(plan, args)
            with self.witness.watch(key, plan.name, mute=mute) as found:
                ran: Ran = torchapi.unheard(self._run, (), (plan, args, kwargs))
            if found:
                ran.fallback = found[0]
            return ran
        unwatched: Ran = torchapi.unheard(self._run, (), (plan, args, kwargs))
        return unwatched

    def asked(self, question: Callable[[Executor], _T]) -> _T:
        """Answer a question that runs calls on this platform, on the thread that may run them."""
        return question(self)

    def call(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that needs no watching, under this platform's settings."""
        if self.plain:
            return torchapi.unheard(plan.run, (), args, kwargs)
        with self.platform.context():
            return torchapi.unheard(plan.run, (), args, kwargs)

    def _run(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ran:
        func = plan.run
        if self.plain:
            start = _clock()
            out = func(*args, **kwargs)
            return Ran(args, kwargs, out, _clock() - start)
        with self.platform.context():
            start = _clock()
            if self.platform.functionalizes:
                with torchapi.functionalize_included(autograd=self._has_autograd_kernel(plan)):
                    out = func(*args, **kwargs)
                if plan.action is Action.RANDOM:  # draw now: each reading runs the graph anew, and would draw anew
                    self.platform.materialise(list(tensors_in([out])))
            else:
                out = func(*args, **kwargs)
            return Ran(args, kwargs, out, _clock() - start)

    def _has_autograd_kernel(self, plan: OpPlan) -> bool:
        """Whether a program on this platform's device never reaches a kernel of the backend below autograd."""
        if plan.index not in self._above:
            self._above[plan.index] = torchapi.has_autograd_kernel(plan.name, self.platform.dispatch_key)
        return self._above[plan.index]

    def _run_remote(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ran:
        """Run a call in the platform's own process; the inputs stay as they are, the run has what became of them."""
        assert self._remote is not None
        written = [(a.name, -1 if a.kwarg_only or a.position >= len(args) else a.position) for a in plan.mutated]
        rng = torch.get_rng_state() if plan.action is Action.RANDOM else None
        wanted = plan.fresh if plan.n_returns == 1 else tuple(i for i in plan.fresh if i not in plan.uninitialised)
        fresh, mutated, ns = self._remote.call(plan.name, args, kwargs, (plan.n_returns, wanted), written, rng)
        after, named = list(args), dict(kwargs)
        for (name, position), value in zip(written, mutated, strict=True):
            if position >= 0:
                after[position] = value
            elif name in named:
                named[name] = value
        return Ran(tuple(after), named, fresh[0] if plan.n_returns == 1 else tuple(fresh), ns)

    def run_user(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ran:
        """Run the user's own call: nothing is changed around it, it is only watched."""
        if not self.witness.active:
            start = _clock()
            out = own_call(plan.run, args, kwargs)
            return Ran(args, kwargs, out, _clock() - start)
        key = _watch_key(plan, args)
        with self.witness.watch(key, plan.name, mute=False) as found:
            start = _clock()
            given = tensors_in((*args, *kwargs.values()))
            if self.platform.functionalizes and not any(t.device.type != "cpu" for t in given):
                # A factory, or a copy from the CPU: the device wraps its result for Functionalize.
                with torchapi.functionalize_included():
                    out = own_call(plan.run, args, kwargs)
            else:
                # Functionalize comes before the mode: these are the tensors that it unwrapped.
                out = own_call(plan.run, args, kwargs)
            ran = Ran(args, kwargs, out, _clock() - start)
        if found:
            ran.fallback = found[0]
        return ran

    def expects_hearing(self, plan: OpPlan, args: tuple[Any, ...]) -> bool:
        """Whether `hear` has something to do after this call."""
        return self.witness.active and self.witness.is_unheard(_watch_key(plan, args))

    def hear(self, plan: OpPlan, ran: Ran, pristine: Arguments | None, max_bytes: int) -> None:
        """Run the user's call once more if what C++ code warned of in it could not be heard; once for each kind.

        Args:
            plan: The operator.
            ran: The user's own run, which gets the evidence.
            pristine: Inputs as before the call, on the CPU; None where they were not copied.
            max_bytes: Bound of the copies.
        """
        if not self.witness.active or not self.witness.to_be_heard(_watch_key(plan, ran.args)):
            return
        if isinstance(ran.kwargs.get("generator"), torch.Generator) or (pristine is None and plan.mutated):
            return
        state, cpu_state = self.platform.rng_state(), torch.get_rng_state()
        try:
            if pristine is None:
                again = self.run(plan, ran.args, ran.kwargs)
            else:
                again = self.run_mirrored(plan, *pristine, max_bytes)
            if again.fallback is not None and again.fallback[0] is Cause.WARNED_FALLBACK:
                ran.fallback = again.fallback
        except Exception:  # noqa: S110 - the user's own run went well, and is judged with what is known of it
            pass
        finally:
            self.platform.set_rng_state(state)
            torch.set_rng_state(cpu_state)

    def run_mirrored(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], max_bytes: int) -> Ran:
        """Run a call whose inputs lie on the CPU, on copies of them on this platform's device."""
        if self._remote is not None:
            done: Ran = torchapi.unheard(self._run_remote, (), (plan, args, kwargs))
            return done
        here_args, here_kwargs = torchapi.unheard(self.to_device, (), (plan, args, kwargs, self.device, max_bytes))
        equivalent = None if self._is_cpu else EQUIVALENTS.get(plan.name)
        if equivalent is None:
            return self.run(plan, here_args, here_kwargs)
        key = _watch_key(plan, args)
        with self.witness.watch(key, plan.name, mute=True) as found, self.platform.context():
            start = _clock()
            if self.platform.functionalizes:
                with torchapi.functionalize_included():
                    out = torchapi.unheard(equivalent, (), here_args, here_kwargs)
            else:
                out = torchapi.unheard(equivalent, (), here_args, here_kwargs)
            ran = Ran(here_args, here_kwargs, out, _clock() - start)
        if found:
            ran.fallback = found[0]
        return ran

    def to_device(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, max_bytes: int
    ) -> Arguments:
        """Copy inputs to a device, this platform being one end of the way."""
        kept = kept_on_cpu(plan, args, kwargs)
        if not self.platform.functionalizes:
            return mirror(args, kwargs, device, max_bytes, written=written_to(plan, args, kwargs), kept=kept)
        with torchapi.functionalize_included():
            return mirror(args, kwargs, device, max_bytes, without_strides, kept=kept)

    def values(self, plan: OpPlan, ran: Ran) -> list[Value]:
        """Results of a run, on the CPU; a list with fewer entries than the operator gives for an equivalent."""
        found = ran.out if isinstance(ran.out, list) and plan.name in EQUIVALENTS else None
        if found is None:
            found = results.values(plan, ran.args, ran.kwargs, ran.out)
        if self._is_cpu:
            return list(found)
        if self.platform.functionalizes:
            with torchapi.functionalize_included():
                return [v for v in map(_defined_on_cpu, found) if v is not _UNDEFINED]
        return [to_cpu(v) for v in found]

    def read(self, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Copies of a run's tensors on the CPU, where this platform functionalizes; None for those without values."""
        read: list[torch.Tensor | None] = []
        with torchapi.functionalize_included():
            for t in tensors:
                try:
                    read.append(move(torchapi.unwrapped(t), _CPU, strided=False))
                except RuntimeError:  # a wrapper that holds no tensor; read a second time, it gives another error
                    read.append(None)
        return read


def _write_back(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], done: Ran) -> None:
    for a in plan.mutated:
        mine, theirs = (results.argument(a, *call) for call in ((args, kwargs), (done.args, done.kwargs)))
        pairs = zip(mine, theirs, strict=True) if isinstance(mine, (list, tuple)) else ((mine, theirs),)
        for to, by in pairs:
            if isinstance(to, torch.Tensor):
                if to.shape != by.shape:
                    to.resize_(by.shape)
                to.copy_(by)


def _watch_key(plan: OpPlan, args: tuple[Any, ...]) -> object:
    """Operator and dtypes: what a vendor warns about once."""
    return (plan.index, *[t.dtype for t in args if isinstance(t, torch.Tensor)])


def to_cpu(value: Value) -> Value:
    """A value's copy on the CPU; what lies there is returned as it is."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return move(value, _CPU, strided=value.device.type not in ("lazy", "xla"))
    return value


def _defined_on_cpu(value: Value) -> Any:
    try:
        # What fell back and stayed on the CPU may still be wrapped, and a wrapper has no memory of its own.
        return to_cpu(torchapi.unwrapped(value) if isinstance(value, torch.Tensor) else value)
    except RuntimeError as error:
        if not torchapi.is_undefined_error(error):
            raise
        return _UNDEFINED
