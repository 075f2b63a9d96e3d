"""Which calls are compared: steps, the profiler's schedule, operators, modules."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from shadowrun.settings import fits_operator

if TYPE_CHECKING:
    from shadowrun.config import Config
    from shadowrun.intercept.attribution import Place
    from shadowrun.intercept.plan import OpPlan

__all__ = ["Selection"]


class Selection:
    """Decides per call; the answer for a step, an operator and a module is computed once each.

    Attributes:
        everything: All calls of the current step are compared.
    """

    __slots__ = ("_by_module", "_by_plan", "_config", "_step_reason", "everything")  # C reads it there

    def __init__(self, config: Config) -> None:
        self._config = config
        self._by_plan: dict[int, str] = {}
        self._by_module: dict[str, str] = {}
        self._step_reason = ""
        self.everything = False
        self.begin_step(0)

    @property
    def ops_named(self) -> bool:
        """Whether the user chose operators by name, custom ones included."""
        return self._config.ops is not None

    @property
    def compares_step(self) -> bool:
        """Whether any call of the current step may be compared."""
        return not self._step_reason

    def begin_step(self, step: int) -> None:
        """Decide for a step."""
        config = self._config
        if config.steps is not None and step not in config.steps:
            self._step_reason = "step not selected"
        elif config.schedule is not None and not _records(config.schedule(step)):
            self._step_reason = "schedule"
        else:
            self._step_reason = ""
        self.everything = not self._step_reason and config.ops is None and config.modules is None

    def unwanted(self, plan: OpPlan) -> str:
        """Why no call of this operator is compared in this step, wherever it comes from; empty if one may be."""
        if self._step_reason:
            return self._step_reason
        reason = self._by_plan.get(plan.index)
        if reason is None:
            ops = self._config.ops
            found = ops is None or any(fits_operator(p, plan.name) for p in ops)
            reason = self._by_plan[plan.index] = "" if found else "operator not selected"
        return reason

    def reason_to_skip(self, plan: OpPlan, place: Place) -> str:
        """Why this call is not compared; empty if it is."""
        if unwanted := self.unwanted(plan):
            return unwanted
        config = self._config
        if config.modules is not None:
            module = place[0]
            reason = self._by_module.get(module)
            if reason is None:
                found = any(fnmatchcase(module, p) for p in config.modules)
                reason = self._by_module[module] = "" if found else "module not selected"
            return reason
        return ""


def _records(action: Any) -> bool:
    """Whether a `torch.profiler.ProfilerAction` is RECORD or RECORD_AND_SAVE (or a plain true value)."""
    name = getattr(action, "name", None)
    return name.startswith("RECORD") if isinstance(name, str) else bool(action)
