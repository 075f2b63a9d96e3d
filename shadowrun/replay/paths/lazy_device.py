"""Programs on a lazy device (lazy, XLA): their own tensors are not read, and their graph is not run.

What such a device computes depends on when it is read. Each reading runs the graph of a tensor again: it draws
random values again, writes to buffers again, and leaves a program in the device's cache that a later graph may be
mistaken for. So the program's calls only extend its graph, as they would without a comparison. Each call runs once
more, eagerly and alone, on eager shadow values of the program's tensors, which were computed the same way.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.torch_operators import functionalize_included, unwrapped
from shadowrun.intercept.torchapi import with_isolated_warnings
from shadowrun.replay.call import argument
from shadowrun.replay.context import BUDGET, CUSTOM, ReplayContext
from shadowrun.replay.copies import Arguments, OverBudget, kept_on_cpu, mirror, tensors_in, without_strides
from shadowrun.replay.paths.platform_runs import inputs_not_copied
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadowrun.replay.call import Call, CallRun
    from shadowrun.replay.executor import Executor
    from shadowrun.replay.paths.platform_runs import PlatformRuns
    from shadowrun.replay.paths.view_check import UncomparedCalls
    from shadowrun.types import Verdict

__all__ = ["LazyDevicePath", "ShadowValues"]

_CPU = torch.device("cpu")


class ShadowValues:
    """Eager values of the program's tensors, for as long as the tensors live.

    Args:
        max_bytes: Bytes that all may take; past them no more values are kept, and the tensors are read.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = 0
        self._by_id: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def remember(self, t: torch.Tensor, value: torch.Tensor) -> None:
        """Remember the value of a tensor. It stays valid: functionalization makes a new tensor instead of writing."""
        self.forget(t)
        # Past the bound the tensor is read, which is slower and may run its graph again, but takes no memory.
        if self._held + value.nbytes > self._max_bytes:
            return
        key = id(t)

        def expire(_: object) -> None:
            self._drop(key)

        # The weak reference keeps an id from being taken for that of a later tensor.
        self._by_id[key] = weakref.ref(t, expire), value
        self._held += value.nbytes

    def get(self, t: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor, on the CPU and read-only; None where it is not known."""
        found = self._by_id.get(id(t))
        return found[1] if found is not None and found[0]() is t else None

    def forget(self, t: torch.Tensor) -> None:
        """Read this tensor from here on."""
        self._drop(id(t))

    def _drop(self, key: int) -> None:
        found = self._by_id.pop(key, None)
        if found is not None:
            self._held -= found[1].nbytes


class LazyDevicePath:
    """Observes calls of a program on a functionalizing device.

    Args:
        context: The parts of the comparison.
        executor: Runs calls on that device.
        runs: Runs a call on either platform, and records what it raises.
        uncompared: Records calls that are not compared.
    """

    def __init__(
        self, context: ReplayContext, executor: Executor, runs: PlatformRuns, uncompared: UncomparedCalls
    ) -> None:
        self._context = context
        self._executor = executor
        self._runs = runs
        self._uncompared = uncompared
        self._max_bytes = context.config.max_bytes
        # A read of the program's own tensor would run its graph again, draw again and write buffers again.
        self._values = ShadowValues(context.config.max_bytes)
        # A call that is not compared gives values to those that are, unless the budget bounds how many calls run again.
        self._follows_all = context.config.budget is None

    def observe(self, call: Call) -> CallRun:
        """Run a call for the program, on both platforms with shadow values, and record the verdict."""
        plan, on_target = call.plan, call.role.on_target
        pristine: Arguments | None = None
        problem: Verdict | None = None
        try:
            if not self._context.may_replay(plan):
                problem = CUSTOM
            # Left-out calls run as well: a value that is not kept has to be read from the device later.
            elif self._follows_all or not call.reason:
                pristine = with_isolated_warnings(self._inputs, (), (call,))
        except OverBudget:
            problem = BUDGET
        except Exception as error:
            problem = inputs_not_copied(error)
        try:
            own = self._executor.run_user(plan, call.args, call.kwargs)
        except Exception as error:
            answer = self._runs.answer(call, pristine, error) if on_target else None
            if answer is None:
                raise
            # The device never computed the answer, so its shadow value is the answer itself.
            with_isolated_warnings(self._keep_uncompared, (), (call, answer, None))
            return answer
        if on_target and (pristine is not None or (own.fallback is not None and call.reason == plan.reason)):
            with_isolated_warnings(self._executor.probe_warnings, (), (plan, own, pristine, self._max_bytes))
        try:
            if call.reason or problem is not None:
                with_isolated_warnings(self._keep_uncompared, (), (call, own, pristine))
            if call.reason:
                self._uncompared.record(call, own)
                return own
            self._context.recorder.context(call)
            if problem is not None or pristine is None:
                self._context.unverified(call, problem or BUDGET, own)
                return own
            with_isolated_warnings(self._compare, (), (call, own, pristine))
        except Exception as error:
            self._context.failed("replaying", call, error, own.out)
        return own

    def _inputs(self, call: Call) -> Arguments:
        """Inputs as before the call, on the CPU.

        Raises:
            OverBudget: The copies exceed the bound.
        """
        with self._preserved_rng(call.kwargs), functionalize_included():
            kept = kept_on_cpu(call.plan, call.args, call.kwargs)
            return mirror(call.args, call.kwargs, _CPU, self._max_bytes, self._value, kept=kept)

    def _compare(self, call: Call, own: CallRun, pristine: Arguments) -> None:
        """Run the call on both platforms, record the verdict, and keep the values of its results."""
        comparator, role = self._context.comparator, call.role
        random = call.is_random
        with self._preserved_rng(own.kwargs):
            actual = self._runs.run_target(call, pristine)
            # The reference's own draws would differ and move the program's stream for nothing.
            expected = None if random and role.on_target else self._runs.run_reference(call, pristine)
            if actual is not None and role.on_target and actual.fallback is None:
                # The program's run was watched too: a fallback that only happens there must not be lost.
                actual.fallback = own.fallback
            if actual is not None and random:
                with_isolated_warnings(comparator.compare_and_record_random, (), (call, pristine, actual))
            elif actual is not None and expected is not None:
                here = role.device if role.on_target else None
                runs = (call, pristine, actual, expected)
                with_isolated_warnings(comparator.compare_and_record, (), runs, {"shared": False, "here": here})
            # The kept value is that of the program's own device: errors have to pass on as they do there.
            self._keep(call, own, actual if role.on_target else expected)

    def _keep_uncompared(self, call: Call, own: CallRun, pristine: Arguments | None) -> None:
        """Keep the values of a call that is not compared, since the inputs of others follow from them.

        Args:
            call: The call.
            own: The program's own run.
            pristine: Its inputs; None where they were not copied: its results have to be read.
        """
        ran = None
        if pristine is not None:
            with self._preserved_rng(own.kwargs), contextlib.suppress(Exception):
                ran = self._executor.run_mirrored(call.plan, *pristine, self._max_bytes)
        self._keep(call, own, ran)

    @contextlib.contextmanager
    def _preserved_rng(self, kwargs: dict[str, Any]) -> Iterator[None]:
        """Restore the program's random streams: the device draws from the CPU's, and whenever it runs a graph."""
        platform, passed = self._executor.platform, kwargs.get("generator")
        generator = passed if isinstance(passed, torch.Generator) else None
        # A graph that still runs draws from the CPU's stream between the two reads of its state.
        platform.wait_for_running_graphs()
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
            # A replay may write to its inputs, and the kept value serves later calls.
            return value.clone()
        if t.device.type == "cpu":
            return without_strides(t, device)
        # When a tensor itself is read, the device takes the memory of its input for the result: later writes to that
        # (batch norm, each time it runs) would write to what the program sees. So a clone is read.
        value = without_strides(t.clone(), device)
        self._values.remember(t, value)
        return value.clone()

    def _keep(self, call: Call, own: CallRun, ran: CallRun | None) -> None:
        # Functionalization does not know of mutations that the schema hides: there the program keeps what it had.
        plan = call.plan
        declared = [a for a in plan.mutated if schema_of(plan.func).arguments[a.position].alias_info is not None]
        written = list(tensors_in([argument(a, own.args, own.kwargs) for a in declared]))
        for t in written:
            self._values.forget(t)
        if ran is None:
            return
        of_program, eager = list(tensors_in([own.out])), list(tensors_in([ran.out]))
        # Shapes differ where the device is wrong: a value of another shape cannot stand for the tensor.
        if [t.shape for t in of_program] != [t.shape for t in eager]:
            return
        for t, value in zip(of_program, self._executor.read(eager), strict=True):
            if value is not None and t.device.type != "cpu" and not any(t is w for w in written):
                self._values.remember(unwrapped(t), value)
