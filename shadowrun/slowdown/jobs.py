"""What is timed: an operator call of a run, or a function of torch's database."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shadowrun.replay.execution import Executor
from shadowrun.sweep.inputs import copied
from shadowrun.sweep.recorded import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.intercept.plan import OpPlan
    from shadowrun.platforms.device import Platform
    from shadowrun.sweep.inputs import Sample

    Inputs = tuple[tuple[Any, ...], dict[str, Any]]

__all__ = ["FunctionJob", "Job", "OperatorJob"]


class Job(Protocol):
    """A call, for any platform."""

    @property
    def function(self) -> Callable[..., Any]:
        """What is called."""
        ...

    @property
    def writes(self) -> bool:
        """Whether it writes to its inputs, so that each call needs its own."""
        ...

    def moved(self, platform: Platform) -> Inputs:
        """Fresh inputs on a platform's device."""
        ...

    def remote_ns(self, platform: Platform, inputs: Inputs) -> int:
        """Nanoseconds of one call on a platform that has a process of its own."""
        ...


@dataclass(frozen=True)
class OperatorJob:
    """A call of an operator.

    Attributes:
        plan: The operator.
        args, kwargs: Inputs on the CPU; they stay as they are.
    """

    plan: OpPlan
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def function(self) -> Callable[..., Any]:
        """The operator."""
        return self.plan.func

    @property
    def writes(self) -> bool:
        """Says its schema."""
        return bool(self.plan.mutated)

    def moved(self, platform: Platform) -> Inputs:
        """Inputs there; raises OverBudget beyond `MAX_BYTES`."""
        return Executor(platform).to_device(self.plan, self.args, self.kwargs, platform.device, MAX_BYTES)

    def remote_ns(self, platform: Platform, inputs: Inputs) -> int:
        """As that process measured it."""
        return Executor(platform).run(self.plan, *inputs).ns


@dataclass(frozen=True)
class FunctionJob:
    """A call of a function of torch's database, forward.

    Attributes:
        function: Takes the sample's input, args and kwargs.
        sample: Inputs on the CPU.
    """

    function: Callable[..., Any]
    sample: Sample

    @property
    def writes(self) -> bool:
        """Those that do, such as ``zero_``, may write to the same input again."""
        return False

    def moved(self, platform: Platform) -> Inputs:
        """Inputs there."""
        x, args, kwargs = copied(self.sample, platform.device, grad=False)
        return (x, *args), kwargs

    def remote_ns(self, platform: Platform, inputs: Inputs) -> int:
        """Such a process runs single operators only."""
        raise NotImplementedError(f"{platform} runs in a process of its own, which takes no functions")
