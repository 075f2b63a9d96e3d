"""A call of the program, what is decided to do with it, and what one run of it gave.

`TreatmentPolicy.treatment` is the one place of that decision, for every route. An operator's schema decides a part of
it, which `OpPlan.kind` has: `NativeHandler.add_operator` gives that part to the C handler. The rest depends on the
call: its device, what the program selected, the overhead budget.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.attribution import NOWHERE
from shadowrun.intercept.plan import Action, OpKind
from shadowrun.intercept.user_call import own_call
from shadowrun.replay.copies import arguments_by_name
from shadowrun.strided import span

if TYPE_CHECKING:
    from shadowrun.intercept.attribution import Origin
    from shadowrun.intercept.plan import Argument, OpPlan
    from shadowrun.operators.case import Value
    from shadowrun.platforms.device import Platform
    from shadowrun.platforms.fallback import Evidence
    from shadowrun.replay.context import RunSink
    from shadowrun.schedule.budget import Budget
    from shadowrun.schedule.selection import Selection

__all__ = [
    "AROUND_INPUT",
    "IN_GRAPH",
    "OVER_BUDGET",
    "Call",
    "CallRun",
    "Role",
    "Roles",
    "Treatment",
    "TreatmentPolicy",
    "argument",
    "draws_random",
    "run_own",
]

OVER_BUDGET = "overhead budget"
AROUND_INPUT = "it reads the storage around its input, which copies do not have"

_CPU = torch.device("cpu")
# Exact types: subclasses may answer `is_cpu` or `stride` by code of the program.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_FRAMES = 4  # of shadowrun, above `treatment`: the search for the program's line skips them

_clock = time.perf_counter_ns


class Treatment(enum.Enum):
    """What is done with a call. In each case the program gets the result of its own run.

    A path gets the target's own calls even where `Call.reason` says why no values are compared: it detects fallbacks,
    missing kernels and views of a wrong form.
    """

    RUN = "run only: the comparison has stopped"
    COUNT = "run, and count by the reason why it is not compared"
    RECORD = "run, and record without comparing"
    REGION = "a compiled region: run, and compare as a whole"
    SAME_DEVICE = "run twice on the device that both platforms share"
    TWO_SETTINGS = "run twice on an accelerator, and fetch one flag"
    CROSS_DEVICE = "run on the program's device and, on copies, on the other"
    ASYNC = "run, and compare on another thread"


@dataclass(frozen=True, slots=True)
class Role:
    """What a device means to the comparison.

    Attributes:
        device: Where the program's call runs.
        on_target, on_ref: That is the target, the reference; neither: both are replayed.
        shared: Both platforms are this device, each with its own settings.
        treatment: How its calls are compared.
        device_name: As it is recorded: to print a device takes as long as to make a `Call`.
    """

    device: torch.device
    on_target: bool
    on_ref: bool
    shared: bool
    treatment: Treatment = Treatment.SAME_DEVICE
    device_name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device_name", str(self.device))


@dataclass(slots=True)
class Call:
    """One operator call of the program. Made once per call; `treatment` and the recorder fill in the rest.

    Attributes:
        plan: The operator.
        args: Positional arguments.
        kwargs: Arguments by name.
        role: What the device means on which it runs.
        origin: Module, phase and line.
        reason: Why it is not compared; empty where it is.
        context: Number of its context in the data file; -1 until the recorder was asked for it.
        signature: What it has in common with calls that need not be compared again; set where there is a budget.
    """

    plan: OpPlan
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    role: Role
    origin: Origin = NOWHERE
    reason: str = ""
    context: int = -1
    signature: tuple[Any, ...] = field(init=False, repr=False)

    @property
    def tensors(self) -> tuple[Any, ...]:
        """All arguments, to look for tensors in."""
        return (*self.args, *self.kwargs.values())

    @property
    def is_random(self) -> bool:
        """Whether it draws random values: attention with dropout 0 does not."""
        return draws_random(self.plan, self.args, self.kwargs)

    def without_arguments(self) -> Call:
        """The same call, without what would keep the program's tensors alive."""
        # Autograd clones a gradient that has another reference; a waiting job must not be one.
        return Call(self.plan, (), {}, self.role, self.origin, self.reason, self.context)


IN_GRAPH = "recorded into a graph of the device: it does not run now"
# Reading a member of an enum takes ten times as long as a global name.
_RUN, _COUNT, _RECORD, _REGION = Treatment.RUN, Treatment.COUNT, Treatment.RECORD, Treatment.REGION
_NO_VALUES, _REGION_KIND = OpKind.NO_VALUES, OpKind.REGION


class TreatmentPolicy:
    """Decides what is done with a call.

    Args:
        recorder: Numbers the contexts of calls, which the budget goes by; its attribution finds where they come from.
        selection: What the program wants compared.
        replays: Calls are compared, and not only recorded.
        budget: The overhead budget, if there is one.

    Attributes:
        running: The comparison runs.
        in_graph: Calls are captured into a graph of the device, and do not run.
    """

    def __init__(self, recorder: RunSink, selection: Selection, *, replays: bool, budget: Budget | None) -> None:
        self._recorder = recorder
        self._attribution = recorder.attribution
        self._selection = selection
        self._replays = replays
        self._budget = budget
        self.running = False
        self.in_graph = False

    def treatment(self, call: Call) -> Treatment:
        """Decide what is done with a call, and set its origin, its reason and, with a budget, its signature.

        Args:
            call: The call; its reason is set already where the overhead budget is spent.
        """
        if not self.running:
            return _RUN
        if self.in_graph:
            call.reason = IN_GRAPH
            return _COUNT
        plan, role, selection = call.plan, call.role, self._selection
        kind, over = plan.kind, call.reason
        # The target may lack a call, fall back or return a wrong form: its own calls go to a path in any case.
        # On a shared device the target is the program's own kernel: it lacks nothing and cannot fall back.
        on_target = role.on_target and not role.shared and self._replays
        if not on_target:
            reason = plan.reason if kind is _NO_VALUES else over
            if plan.reads_storage and _reads_around(call):
                reason = AROUND_INPUT
            # An origin costs a search through the stack, which a call of an unselected operator need not pay.
            if not reason and not selection.everything:
                reason = selection.unwanted(plan)
            if reason:
                self._attribution.note_origin(_FRAMES)  # its backward may be compared
                call.reason = reason
                return _COUNT
        call.origin = self._attribution.find_origin(_FRAMES)
        reason = plan.reason if kind is _NO_VALUES else ""
        if plan.reads_storage and _reads_around(call):
            reason = AROUND_INPUT
        if not selection.everything:
            reason = selection.reason_to_skip(plan, call.origin) or reason
        budget = self._budget
        if budget is not None and not reason and kind is not _REGION_KIND:
            call.signature = signature = self._signature(call)
            reason = over or ("" if budget.selects(signature, plan.index) else OVER_BUDGET)
        call.reason = reason
        if reason and not on_target:
            return _COUNT
        if not self._replays:
            return _RECORD
        return _REGION if kind is _REGION_KIND else role.treatment

    def _signature(self, call: Call) -> tuple[Any, ...]:
        """What a call has in common with others that need not be compared again: context and strides."""
        try:
            strides = [a.stride() for a in call.args if type(a) in _PLAIN and a.layout is torch.strided]
            # Strides are no part of a context but choose the kernel: each stride pattern is verified for itself.
            return self._recorder.context(call), *strides
        except Exception:  # tensors without strides: the operator stands for all its calls
            return call.plan.index, call.origin


class Roles:
    """What the devices of calls mean to the comparison.

    Args:
        target: The target.
        ref: The reference.
        shared: How calls are compared on a device that both platforms share.
        apart: How they are compared on any other device.

    Attributes:
        cpu: The role of the CPU.
        all_cpu: Both platforms are the CPU.
    """

    def __init__(self, target: Platform, ref: Platform, *, shared: Treatment, apart: Treatment) -> None:
        self._target, self._ref = target, ref
        self._shared, self._apart = shared, apart
        self._by_device: dict[torch.device, Role] = {}
        self.cpu = self._new(_CPU)
        self.all_cpu = target.device.type == ref.device.type == "cpu"

    @property
    def runs_on_target(self) -> bool:
        """Whether the program was seen on a device that only the target has, and that may lack what it calls."""
        return any(role.on_target and not role.shared for role in self._by_device.values())

    def role_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Role:
        """The role of the device on which a call runs."""
        # Where both platforms are the CPU, this is nearly every call: no device object is made.
        if self.all_cpu and args and type(args[0]) in _PLAIN and args[0].is_cpu:
            return self.cpu
        device = _CPU
        for a in args:
            if isinstance(a, torch.Tensor):
                device = a.device
            elif (kind := type(a)) is list or kind is tuple:
                device = next((t.device for t in a if isinstance(t, torch.Tensor)), device)
            else:
                continue
            # A scalar tensor on the CPU may come first (`mul(cpu_scalar, cuda)`): the accelerator decides where the
            # call runs.
            if device.type != "cpu":
                break
        # Factories have no tensor argument: their `device=` is the only evidence.
        if kwargs and device.type == "cpu":
            wanted = kwargs.get("device")
            if wanted is not None:
                device = wanted
            else:
                device = next((t.device for t in kwargs.values() if isinstance(t, torch.Tensor)), device)
        return self._by_device.get(device) or self._new(device)

    def _new(self, device: torch.device) -> Role:
        target, ref = self._target, self._ref
        on_target = target.has_program_settings and target.same_device(device)
        shared = target.same_device(device) and ref.same_device(device)
        role = self._by_device[device] = Role(
            device,
            on_target=on_target,
            on_ref=not on_target and ref.has_program_settings and ref.same_device(device),
            shared=shared,
            treatment=self._shared if shared else self._apart,
        )
        return role


@dataclass(slots=True)
class CallRun:
    """A finished run of a call.

    Attributes:
        args, kwargs: What it ran on, as the call left them.
        out: What it returned.
        ns: How long it took, in nanoseconds.
        fallback: Evidence that it computed on the CPU.
        began: When, by `time.perf_counter_ns`; 0 where that was not noted.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    ns: int
    fallback: Evidence | None = None
    began: int = 0

    def values(self, plan: OpPlan) -> list[Value]:
        """Fresh returns, then mutated arguments, in the order of `case.flat_results`."""
        found: list[Value] = []
        if plan.n_returns == 1:
            if plan.fresh:
                _extend(found, self.out)
        else:
            for i in plan.fresh:
                if i not in plan.uninitialised:
                    _extend(found, self.out[i])
        for a in plan.mutated:
            _extend(found, argument(a, self.args, self.kwargs))
        return found

    def names(self, plan: OpPlan) -> tuple[str, ...]:
        """Names of `values`, in the same order: ``output 0``, ``self``, ``self[2]``."""
        returned = (self.out,) if plan.n_returns == 1 else self.out
        wanted = [i for i in plan.fresh if plan.n_returns == 1 or i not in plan.uninitialised]
        named = [(f"output {i}", returned[i]) for i in wanted]
        named += [(a.name, argument(a, self.args, self.kwargs)) for a in plan.mutated]
        found: list[str] = []
        for name, value in named:
            if isinstance(value, (list, tuple)):
                found += [f"{name}[{k}]" for k in range(len(value))]
            elif value is not None:
                found.append(name)
        return tuple(found)


def run_own(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRun:
    """Run the program's own call, with nothing around it."""
    start = _clock()
    # `own_call` has the program's line, so that warnings and exceptions point there and not here.
    out = own_call(plan.run, args, kwargs)
    return CallRun(args, kwargs, out, _clock() - start, None, start)


def _extend(found: list[Value], value: Any) -> None:
    if isinstance(value, (list, tuple)):
        found.extend(value)
    elif value is not None:
        found.append(value)


def draws_random(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random values: attention with dropout 0 does not."""
    if plan.action is not Action.RANDOM or plan.dropout < 0:
        return plan.action is Action.RANDOM
    # The draw would be reproducible anyway at 0, and such a call can be compared in full.
    return bool(args[plan.dropout] if plan.dropout < len(args) else kwargs.get("dropout_p", 0.0))


def _reads_around(call: Call) -> bool:
    """Whether a call reads elements of a storage that a copy of its input does not have at the same offset."""
    given = arguments_by_name(call.plan, call.args, call.kwargs)
    t, size, stride, offset = call.args[0], given["size"], given["stride"], given.get("storage_offset")
    if t.layout is not torch.strided or 0 in size:
        return False
    # A copy begins at offset 0 of its own storage, and has the input's elements and the gaps between them.
    if offset is not None and t.storage_offset():
        return True
    return bool((offset or 0) + span(size, stride) > span(t.shape, t.stride()))


def argument(a: Argument, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value passed for a schema argument."""
    if a.kwarg_only or a.position >= len(args):
        return kwargs.get(a.name)
    return args[a.position]
