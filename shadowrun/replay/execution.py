"""Running an operator on a platform: settings, device rules, fallback witnesses, time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept import torchapi
from shadowrun.intercept.plan import Action, OpPlan
from shadowrun.platforms.fallback import Evidence, FallbackWitness
from shadowrun.replay import results
from shadowrun.replay.equivalents import EQUIVALENTS
from shadowrun.replay.mirror import Arguments, mirror, move, tensors_in, written_to

if TYPE_CHECKING:
    from shadowrun.platforms.device import Platform
    from shadowrun.replay.case import Value

__all__ = ["Executor", "Ran"]

_CPU = torch.device("cpu")
_clock = time.perf_counter_ns


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

    def call(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that needs no watching, under this platform's settings."""
        if self.plain:
            return torchapi.unheard(plan.run, (), args, kwargs)
        with self.platform.context():
            return torchapi.unheard(plan.run, (), args, kwargs)

    def _run(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ran:
        func = plan.func
        if self.plain:
            start = _clock()
            out = func(*args, **kwargs)
            return Ran(args, kwargs, out, _clock() - start)
        with self.platform.context():
            start = _clock()
            if self.platform.functionalizes:
                with torchapi.functionalize_included():
                    out = func(*args, **kwargs)
                self._materialise(plan)
            else:
                out = func(*args, **kwargs)
            return Ran(args, kwargs, out, _clock() - start)

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
            out = plan.run(*args, **kwargs)
            return Ran(args, kwargs, out, _clock() - start)
        key = _watch_key(plan, args)
        with self.witness.watch(key, plan.name, mute=False) as found:
            start = _clock()
            if self.platform.functionalizes and not any(t.device.type != "cpu" for t in tensors_in(args)):
                # A factory, or a copy from the CPU: the device wraps its result for Functionalize.
                with torchapi.functionalize_included():
                    out = plan.run(*args, **kwargs)
            else:
                # Functionalize comes before the mode: these are the tensors that it unwrapped.
                out = plan.run(*args, **kwargs)
            self._materialise(plan)
            ran = Ran(args, kwargs, out, _clock() - start)
        if found:
            ran.fallback = found[0]
        return ran

    def _materialise(self, plan: OpPlan) -> None:
        """Draw now: each reading of a lazy tensor runs its graph anew, and would draw anew."""
        if plan.action is Action.RANDOM and self.platform.functionalizes:
            self.platform.synchronize()

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
        if not self.platform.functionalizes:
            return mirror(args, kwargs, device, max_bytes, written=written_to(plan, args, kwargs))
        with torchapi.functionalize_included():
            return mirror(args, kwargs, device, max_bytes, _move_without_strides)

    def values(self, plan: OpPlan, ran: Ran) -> list[Value]:
        """Results of a run, on the CPU; a list with fewer entries than the operator gives for an equivalent."""
        found = ran.out if isinstance(ran.out, list) and plan.name in EQUIVALENTS else None
        if found is None:
            found = results.values(plan, ran.args, ran.kwargs, ran.out)
        if self._is_cpu:
            return list(found)
        if self.platform.functionalizes:
            with torchapi.functionalize_included():
                return _defined_on_cpu(found)
        return [to_cpu(v) for v in found]


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


def _defined_on_cpu(values: list[Value]) -> list[Value]:
    moved = []
    for value in values:
        try:
            moved.append(to_cpu(value))
        except RuntimeError as error:
            if not torchapi.is_undefined_error(error):
                raise
    return moved


def _move_without_strides(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    return move(t, device, strided=False)
