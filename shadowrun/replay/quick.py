"""The compiled handler of plain calls on the CPU, and what it leaves to Python. See shadowrun/native/handler.c."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shadowrun.intercept import torchapi
from shadowrun.intercept.torchapi import unheard
from shadowrun.native import core
from shadowrun.native.tensors import plainly_equal
from shadowrun.replay.execution import Ran

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.intercept.attribution import Attribution, Place
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.replay.comparing import Comparing
    from shadowrun.replay.recorder import Recorder
    from shadowrun.replay.schedule import Selection
    from shadowrun.replay.shared import SharedPath
    from shadowrun.replay.spares import Spare
    from shadowrun.replay.stage import Role

__all__ = ["Quick"]


class Quick:
    """Switches the compiled handler, which does nothing until then; without a compiled part there is none.

    Args:
        recorder: Whose rows it adds to.
        selection: What is wanted.
        attribution: Tells where calls come from.
        comparing: Knows which operators are watched.
        shared: The same ways in Python.
        role: What the CPU means.

    Attributes:
        handler: It, or None.
    """

    def __init__(
        self,
        recorder: Recorder,
        selection: Selection,
        attribution: Attribution,
        comparing: Comparing,
        shared: SharedPath,
        role: Role,
    ) -> None:
        self._shared = shared
        self._role = role
        self.handler: Any = None
        if core is None or plainly_equal is None or attribution.quick is None:
            return
        self.handler = core.Handler(
            n_modes_below=torchapi.n_modes_below,
            n_modes=torchapi.address_behind("n_modes"),
            asks_functions=torchapi.asks_functions,
            asks=torchapi.address_behind("asks_functions"),
            places=attribution.quick,
            selection=selection,
            device=role.device,
            suspects=comparing.watched,
            spares=shared.short.spares.by_form,
            make_spare=shared.short.spares.make,
            again=_again,
            shares_memory=torchapi.shares_memory,
            ended=self._ended,
            failed=self._failed,
            unrecorded=self._unrecorded,
            too_large=shared.short.is_too_large,
            acquire=None,
            release=None,
            waited_for=None,
            **recorder.inner_parts(),
        )
        recorder.collect_from(self.handler.collect)
        self.handler.slow_ratio = comparing.slow_ratio
        self.handler.max_bytes = shared.short.max_bytes
        self.handler.on_target = role.on_target

    @property
    def own_ns(self) -> int:
        """Nanoseconds spent in it and not in the user's own operators."""
        return 0 if self.handler is None else self.handler.own_ns

    def guard(self, lock: Any, gate: Any) -> None:
        """Have it hold a lock for the length of a call, unless the gate is closed."""
        if self.handler is not None:
            self.handler.guard(lock.acquire, lock.release, gate.locked)

    def compare(self) -> None:
        """Have calls compared."""
        if core is not None and self.handler is not None:
            self.handler.way = core.COMPARING
            core.steady_heap()

    def record(self) -> None:
        """Have calls recorded only."""
        if core is not None and self.handler is not None:
            self.handler.way = core.RECORDING

    def stop(self) -> None:
        """Leave all calls to Python."""
        if core is not None and self.handler is not None:
            self.handler.way = core.OFF

    def _ended(
        self,
        plan: OpPlan,
        context: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        theirs: Any,
        times: tuple[int, int],
        spares: tuple[Spare | None, ...],
        other_args: tuple[Any, ...],
    ) -> None:
        """A call that was slow, or whose results are not plainly equal."""
        mine, replayed = Ran(args, kwargs, out, times[0]), Ran(other_args, kwargs, theirs, times[1])
        short, role = self._shared.short, self._role
        if not plan.short:
            before = list(args)
            for argument, spare in zip(plan.mutated, spares, strict=True):
                if spare is not None:
                    before[argument.position] = spare.before
                    short.spares.drop(spare)  # it is needed longer than this call takes
            self._shared.end_several(plan, context, (tuple(before), kwargs), mine, replayed, role)
        elif spares and spares[0] is not None:
            short.end_in_place(plan, context, mine, replayed, role, spares[0])
        else:
            short.end_fresh(plan, context, mine, replayed, role, plainly=False)

    def _failed(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place, error: Exception
    ) -> None:
        if plan.mutated:
            self._shared.short.spares.clear()  # the memory of one may be another since the replay
        self._shared.ending.fail(plan, args, kwargs, self._role, place, error)

    def _unrecorded(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], _place: Place, error: Exception
    ) -> None:
        self._shared.ending.unrecorded(plan, args, kwargs, error)


def _again(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator once more: warnings of it come at this line."""
    return unheard(run, (), args, kwargs)
