"""Programs on a device that puts its work off (lazy, XLA): their own tensors are not read, nor is their graph run.

What such a device computes depends on when it is read. Each reading runs the graph behind a tensor once more: it draws
anew, writes to buffers once more, and leaves a program in the device's cache that a later graph is taken for. So the
program's calls only build its graph, as they would without a comparison. Each runs once more, at once and by itself,
on values that were computed the same way; these are kept beside the program's tensors.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.torchapi import functionalize_included, unheard, unwrapped
from shadowrun.replay import results
from shadowrun.replay.mirror import Arguments, kept_on_cpu, mirror, tensors_in, without_strides

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.intercept.plan import OpPlan
    from shadowrun.replay.execution import Executor, Ran
    from shadowrun.replay.stage import Role, Stage

__all__ = ["AsidePath", "Values"]

_CPU = torch.device("cpu")


class Values:
    """Values of the program's tensors, as computed beside it, for as long as the tensors live.

    Args:
        max_bytes: Bytes that all may take; past them no further ones are kept, and tensors are read.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = 0
        self._by_id: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def keep(self, t: torch.Tensor, value: torch.Tensor) -> None:
        """Remember the value of a tensor that nobody writes to: functionalization makes a new one instead."""
        self.forget(t)
        if self._held + value.nbytes > self._max_bytes:
            return
        key = id(t)

        def expire(_: object) -> None:
            self._drop(key)

        self._by_id[key] = weakref.ref(t, expire), value
        self._held += value.nbytes

    def get(self, t: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor, on the CPU and not to be written to; None where it is not known."""
        found = self._by_id.get(id(t))
        return found[1] if found is not None and found[0]() is t else None

    def forget(self, t: torch.Tensor) -> None:
        """Read this tensor from here on."""
        self._drop(id(t))

    def _drop(self, key: int) -> None:
        found = self._by_id.pop(key, None)
        if found is not None:
            self._held -= found[1].nbytes


class AsidePath:
    """Observes calls of a program on a functionalizing device.

    Args:
        stage: The parts of the comparison.
        executor: Runs calls on that device.
        reference: Runs a call on the reference, or records why it cannot and gives None.
        attempt: The same on the target.
    """

    def __init__(
        self,
        stage: Stage,
        executor: Executor,
        attempt: Callable[[int, OpPlan, Any], Ran | None],
        reference: Callable[[int, OpPlan, Any], Ran | None],
    ) -> None:
        self._stage = stage
        self._executor = executor
        self._attempt = attempt
        self._reference = reference
        self._max_bytes = stage.config.max_bytes
        self._values = Values(stage.config.max_bytes)

    def before(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Inputs as before the call, on the CPU.

        Raises:
            OverBudget: The copies exceed the bound.
        """
        with self.undrawn(kwargs), functionalize_included():
            kept = kept_on_cpu(plan, args, kwargs)
            return mirror(args, kwargs, _CPU, self._max_bytes, self._value, kept=kept)

    def after(
        self,
        plan: OpPlan,
        own: Ran,
        pristine: Arguments,
        context: int,
        role: Role,
        *,
        drawn: bool,
    ) -> None:
        """Run the call on both platforms, record the verdict, and keep the values of its results.

        Args:
            plan: The operator.
            own: The program's call, of which the form is known.
            pristine: Its inputs.
            context: Number of the call's context.
            role: What the program's device means.
            drawn: It is random: there is nothing to compare with.
        """
        comparing = self._stage.comparing
        with self.undrawn(own.kwargs):
            actual = self._attempt(context, plan, pristine)
            expected = None if drawn and role.on_target else self._reference(context, plan, pristine)
            if actual is not None and role.on_target and actual.fallback is None:
                actual.fallback = own.fallback
            if actual is not None and drawn:
                unheard(comparing.conclude_random, (), (plan, context, pristine, actual))
            elif actual is not None and expected is not None:
                here = role.device if role.on_target else None
                concluded = (plan, context, pristine, actual, expected, None)
                unheard(comparing.conclude, (), concluded, {"shared": False, "here": here})
            self._keep(plan, own, actual if role.on_target else expected)

    def uncompared(self, plan: OpPlan, own: Ran, pristine: Arguments | None) -> None:
        """Keep the values of a call that is not compared, since others follow from them.

        Args:
            plan: The operator.
            own: The program's call.
            pristine: Its inputs; None where they were not copied: what it gives has to be read.
        """
        ran = None
        if pristine is not None:
            with self.undrawn(own.kwargs), contextlib.suppress(Exception):
                ran = self._executor.run_mirrored(plan, *pristine, self._max_bytes)
        self._keep(plan, own, ran)

    @contextlib.contextmanager
    def undrawn(self, kwargs: dict[str, Any]) -> Iterator[None]:
        """Put the program's random streams back: the device draws from the CPU's, and whenever it runs a graph."""
        platform, passed = self._executor.platform, kwargs.get("generator")
        generator = passed if isinstance(passed, torch.Generator) else None
        platform.settle()
        cpu_state, state = torch.get_rng_state(), platform.rng_state()
        own_state = generator.get_state() if generator is not None else None
        try:
            yield
        finally:
            torch.set_rng_state(cpu_state)
            platform.set_rng_state(state)
            if generator is not None and own_state is not None:
                generator.set_state(own_state)

    def _value(self, t: torch.Tensor, device: torch.device) -> torch.Tensor:
        value = self._values.get(t)
        if value is not None:
            return value.clone()
        if t.device.type == "cpu":
            return without_strides(t, device)
        # Of a tensor that is read itself, the device takes the memory of its input for the result: whoever writes to
        # that hereafter (batch norm, each time it runs) would write to what the program sees.
        value = without_strides(t.clone(), device)
        self._values.keep(t, value)
        return value.clone()

    def _keep(self, plan: OpPlan, own: Ran, ran: Ran | None) -> None:
        # Hidden from the schema, functionalization does not know of them, and the program keeps what it had.
        told = [a for a in plan.mutated if plan.func._schema.arguments[a.position].alias_info is not None]
        written = list(tensors_in([results.argument(a, own.args, own.kwargs) for a in told]))
        for t in written:
            self._values.forget(t)
        if ran is None:
            return
        mine, theirs = list(tensors_in([own.out])), list(tensors_in([ran.out]))
        if [t.shape for t in mine] != [t.shape for t in theirs]:
            return
        for t, value in zip(mine, self._executor.read(theirs), strict=True):
            if value is not None and t.device.type != "cpu" and not any(t is w for w in written):
                self._values.keep(unwrapped(t), value)
