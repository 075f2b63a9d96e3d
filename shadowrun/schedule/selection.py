"""`Selection`: which calls are compared, by step, profiler schedule, operator and module."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from shadowrun.errors import UsageError
from shadowrun.intercept import torch_operators
from shadowrun.settings import fits_operator

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from shadowrun.config import Config
    from shadowrun.intercept.attribution import Origin
    from shadowrun.intercept.plan import OpPlan

__all__ = ["Selection", "check_operators", "is_composite", "why_unknown"]

_SHOWN = 4


class Selection:
    """Decides per call; the answer for a step, an operator and a module is computed once each.

    Attributes:
        everything: All calls of the current step are compared.
    """

    # native/dispatch.h reads the slot `everything`.
    __slots__ = (
        "_by_module",
        "_by_plan",
        "_config",
        "_names",
        "_step_compared",
        "_step_reason",
        "_steps",
        "everything",
    )

    def __init__(self, config: Config) -> None:
        self._config = config
        self._by_plan: dict[int, str] = {}
        self._names: dict[str, None] = {}
        self._steps = 0
        self._step_compared = False
        self._by_module: dict[str, str] = {}
        self._step_reason = ""
        self.everything = False
        self.begin_step(0)

    @property
    def compares_step(self) -> bool:
        """Whether any call of the current step may be compared."""
        return not self._step_reason

    def begin_step(self, step: int) -> None:
        """Decide whether the calls of a step are compared."""
        config = self._config
        if config.steps is not None and step not in config.steps:
            self._step_reason = "step not selected"
        # Asked once for each step, as `torch.profiler` asks it: a schedule may keep a state.
        elif config.schedule is not None and not _records(config.schedule(step)):
            self._step_reason = "schedule"
        else:
            self._step_reason = ""
            self._step_compared = True
        self._steps = max(self._steps, step + 1)
        self.everything = not self._step_reason and config.ops is None and config.modules is None

    def unwanted(self, plan: OpPlan) -> str:
        """Why no call of this operator is compared in this step, wherever it comes from; empty if one may be."""
        if self._step_reason:
            return self._step_reason
        reason = self._by_plan.get(plan.index)
        if reason is None:
            ops = self._config.ops
            # All operators called, for the near names that `unmatched` lists.
            self._names[plan.name] = None
            found = ops is None or any(fits_operator(p, plan.name) for p in ops)
            # Once for each operator: the same answer holds for all its calls, of which there are thousands.
            reason = self._by_plan[plan.index] = "" if found else "operator not selected"
        return reason

    def reason_to_skip(self, plan: OpPlan, place: Origin) -> str:
        """Why this call is not compared; empty if it is."""
        if unwanted := self.unwanted(plan):
            return unwanted
        config = self._config
        if config.modules is not None:
            module = place[0]
            reason = self._by_module.get(module)
            if reason is None:
                found = any(fnmatchcase(module, p) for p in config.modules)
                # A model has as many paths as modules; a pattern is tried once for each.
                reason = self._by_module[module] = "" if found else "module not selected"
            return reason
        return ""

    def unmatched(self) -> str:
        """The options that matched no call of the program, with near names; empty if each matched one."""
        config = self._config
        # Steps before operators: where no step was compared, the operators never had a chance to match.
        if not self._step_compared:
            last = f", 0 to {self._steps - 1}" if self._steps > 1 else ""
            none = "" if last else ": it called neither run.step() nor an optimizer's step() more than once"
            chosen = "the schedule" if config.steps is None else f"steps {_ranges(config.steps)}"
            return f"of {chosen} none came; the program had {_plural(self._steps, 'step')}{last}{none}"
        missing = []
        ops, modules = config.ops or (), config.modules or ()
        if ops and not any(fits_operator(p, name) for p in ops for name in self._names):
            called = _plural(len(self._names), "operator")
            missing.append(f"ops {_listed(ops)} fits none of {called} called{_near(ops[0], self._names)}")
        # Without a call inside any module nothing can be said: the program may not use `nn.Module`.
        if modules and self._by_module and all(self._by_module.values()):
            names = dict.fromkeys(filter(None, self._by_module))
            called = _plural(len(names), "module")
            missing.append(f"modules {_listed(modules)} fits none of {called} called{_near(modules[0], names)}")
        return "; ".join(missing)


def check_operators(patterns: Collection[str]) -> None:
    """Refuse patterns that no call can ever match.

    Raises:
        UsageError: No operator has such a name, or all patterns match only composite operators, which the dispatcher
            decomposes before a comparison sees them.
    """
    for pattern in patterns:
        why = why_unknown(pattern)
        if why:
            raise UsageError(f"ops={pattern!r}: {why}.", slug="unknown-operator")
    if patterns and all(map(is_composite, patterns)):
        raise UsageError(
            f"ops={', '.join(map(repr, patterns))}: made of other operators, which are what is compared: name them. "
            "`shadowrun run --ops` finds out which.",
            slug="unknown-operator",
        )


def why_unknown(pattern: str) -> str:
    """Why no operator can match a pattern, with near names; empty if one does, or may be registered later."""
    namespace = pattern.partition("::")[0] if "::" in pattern else ""
    names = torch_operators.operator_names()
    # The program may import a library with operators of other namespaces after this check.
    may_come = namespace not in ("", "aten") or (not namespace and any(c in pattern for c in "*?["))
    if may_come or not names or any(fits_operator(pattern, name) for name in names):
        return ""
    bases = {name.removeprefix("aten::").partition(".")[0] for name in names if name.startswith("aten::")}
    return f"no operator is called so{_near(pattern.removeprefix('aten::'), sorted(bases, key=len))}"


def is_composite(pattern: str) -> bool:
    """Whether all aten operators that match a pattern are composite, as `aten::matmul` is."""
    fitting = [
        name for name in torch_operators.operator_names() if name.startswith("aten::") and fits_operator(pattern, name)
    ]
    own = [name for name in fitting if not name.endswith("out")]
    return bool(own) and all(map(torch_operators.operator_is_composite, own))


def _listed(patterns: tuple[str, ...]) -> str:
    more = ", …" if len(patterns) > _SHOWN else ""
    return ", ".join(map(repr, patterns[:_SHOWN])) + more


def _near(pattern: str, names: Iterable[str]) -> str:
    """Near names, or the first names if none is near."""
    names = list(names)
    wanted = pattern.strip("*?")
    near = difflib.get_close_matches(wanted, names, _SHOWN, 0.7)
    near = near or [name for name in names if wanted and wanted.lower() in name.lower()]
    shown = ", ".join(near[:_SHOWN] or names[:_SHOWN])
    return f"; {'nearest' if near else 'there were'}: {shown}" if shown else ""


def _ranges(steps: frozenset[int]) -> str:
    """``0, 5 to 7``."""
    ends: list[list[int]] = []
    for step in sorted(steps):
        if ends and step == ends[-1][1] + 1:
            ends[-1][1] = step
        else:
            ends.append([step, step])
    shown = [str(a) if a == b else f"{a} to {b}" for a, b in ends]
    return ", ".join(shown[:_SHOWN]) + (" and more" if len(shown) > _SHOWN else "")


def _records(action: Any) -> bool:
    """Whether a `torch.profiler.ProfilerAction` is RECORD or RECORD_AND_SAVE (or a plain true value)."""
    # By name, so that `torch.profiler` is imported only if the program does.
    name = getattr(action, "name", None)
    return name.startswith("RECORD") if isinstance(name, str) else bool(action)


def _plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
