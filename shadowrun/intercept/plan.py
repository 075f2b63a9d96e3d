"""The plan of an operator: what to do with its calls, decided once from its schema, its tags and its row of facts.

The row (`operators/facts.py`) has the exceptions to what schemas say. Their evidence: with them, the sweep of the CPU
against itself over the operator database of torch reports nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept import torch_operators
from shadowrun.operators.facts import own_facts
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shadowrun.operators.facts import OpFacts

__all__ = ["Action", "Argument", "OpKind", "OpPlan", "make_plan"]


class Action(enum.Enum):
    """How a call of an operator is treated."""

    REPLAY = "replay"
    VIEW = "view"
    """Metadata only: no value is computed."""
    RANDOM = "random"
    """Replayed with the generator's state restored, where both platforms share a device."""
    EMPTY = "uninitialised output"
    """Runs, and its form is checked; its values mean nothing."""
    PASS = "passed by"  # noqa: S105 - no password
    """Never replayed; `OpPlan.reason` says why, and it is counted."""


class OpKind(enum.Enum):
    """How a call is run again and compared, as far as its operator decides: the C handler and the paths go by it."""

    PASS = "never replayed"  # noqa: S105 - no password
    NO_VALUES = "a view, or uninitialised memory"
    FUNCTIONAL = "one new tensor or number comes back, and nothing is written to"
    IN_PLACE = "the first argument is written to, and comes back"
    SEVERAL = "several results, lists, or other arguments that are written to"
    SPECIAL = "random, not one of torch's own, or one that reads the storage around its input"
    REGION = "a compiled region: compared as a whole"


@dataclass(frozen=True, slots=True)
class Argument:
    """A schema argument that the call writes to."""

    name: str
    position: int
    kwarg_only: bool
    is_list: bool


@dataclass(slots=True)
class OpPlan:
    """The decision for one operator.

    Attributes:
        func: The operator; held so that its id stays its own.
        run: The same, called without its Python wrapper.
        index: Small number of the plan, used in keys.
        name: ``aten::add.Tensor``.
        action: What to do.
        kind: What follows for its calls.
        reason: Why, for PASS and VIEW.
        mutated: Arguments written to, hidden ones included.
        fresh: Numbers of the returns that are no alias of an argument.
        n_returns: Declared number of returns.
        uninitialised: Numbers of the returns whose values mean nothing.
        has_device: Takes a ``device`` keyword.
        dropout: Position of ``dropout_p``, -1 if there is none: at 0 the operator is not random.
        custom: Not one of torch's own operators.
        composite: Splits into other operators where autograd is on.
        on_cpu: Names of the arguments that lie on the CPU whatever the device of the call.
        returns_number: Hands a number to Python: that it ends on the CPU is no fallback.
        reads_storage: Reads the storage of its first argument at an offset that is an argument (`as_strided_copy`).
        unstable: Reason why two runs on the same inputs may differ on any device, or empty.
    """

    func: torch._ops.OpOverload
    run: Callable[..., Any]
    index: int
    name: str
    action: Action
    kind: OpKind
    reason: str = ""
    mutated: tuple[Argument, ...] = ()
    fresh: tuple[int, ...] = ()
    n_returns: int = 1
    uninitialised: frozenset[int] = frozenset()
    has_device: bool = False
    dropout: int = -1
    custom: bool = False
    composite: bool = False
    unstable: str = ""
    on_cpu: tuple[str, ...] = ()
    returns_number: bool = False
    reads_storage: bool = False

    @property
    def mutated_names(self) -> tuple[str, ...]:
        """Schema names of the mutated arguments."""
        return tuple(a.name for a in self.mutated)


_OWN_NAMESPACES = frozenset(
    {"aten", "prims", "prim", "quantized", "sparse", "mkldnn", "mkl", "torch_nn", "torchvision"}
)

# Types of results, as a schema prints them, that need no taking apart.
_PLAIN = frozenset({"Tensor", "number", "bool"})


def make_plan(func: torch._ops.OpOverload, index: int) -> OpPlan:
    """Decide what to do with an operator (20 µs, once per operator and run)."""
    schema = schema_of(func)
    # Each access makes new objects of all arguments.
    arguments, returns = schema.arguments, schema.returns
    name: str = func.name()  # type: ignore[no-untyped-call]
    namespace = name.split("::", 1)[0]
    row = own_facts(name)
    action, reason = _action(func, row, arguments, returns)
    mutated = tuple(
        Argument(a.name, i, a.kwarg_only, "List" in str(a.type) or "[]" in str(a.type))
        for i, a in enumerate(arguments)
        # Batch norm writes its statistics without saying so in the schema.
        if (a.alias_info is not None and a.alias_info.is_write) or a.name in row.hidden_writes
    )
    custom = namespace not in _OWN_NAMESPACES
    names = [a.name for a in arguments]
    fresh_returns = tuple(i for i, r in enumerate(returns) if r.alias_info is None)
    reads_storage = action is Action.REPLAY and "storage_offset" in names
    return OpPlan(
        func=func,
        # The Python wrapper of an `OpOverload` costs 0.4 µs per call.
        run=torch_operators.raw_operator(func),
        index=index,
        name=name,
        action=action,
        kind=_kind(returns, action, mutated, general=custom or reads_storage),
        reason=reason,
        mutated=mutated,
        fresh=fresh_returns,
        n_returns=len(returns),
        uninitialised=frozenset(row.uninitialised_returns).intersection(fresh_returns),
        has_device="device" in names,
        dropout=next((i for i, name in enumerate(names) if name in ("dropout_p", "dropout")), -1),
        custom=custom,
        composite=namespace == "aten" and torch_operators.operator_is_composite(name),
        unstable=row.unstable,
        returns_number=row.returns_number,
        reads_storage=reads_storage,
        on_cpu=tuple(name for name in row.on_cpu if name in names),
    )


def _kind(returns: Sequence[Any], action: Action, mutated: tuple[Argument, ...], *, general: bool) -> OpKind:
    if action is Action.PASS:
        return OpKind.PASS
    if action is Action.VIEW or action is Action.EMPTY:
        return OpKind.NO_VALUES
    # Custom operators may draw without a tag: the general path restores the generator around each run. An operator that
    # reads around its input is looked at call by call, which C does not do.
    if action is Action.RANDOM or general:
        return OpKind.SPECIAL
    if len(returns) != 1:
        return OpKind.SEVERAL
    # One plain result, nothing written: the fast path needs no copy and no list.
    if returns[0].alias_info is None and str(returns[0].type) in _PLAIN and not mutated:
        return OpKind.FUNCTIONAL
    if returns[0].alias_info is not None and [a.position for a in mutated] == [0]:
        return OpKind.SEVERAL if mutated[0].is_list else OpKind.IN_PLACE
    return OpKind.SEVERAL


def _action(
    func: torch._ops.OpOverload, row: OpFacts, arguments: Sequence[Any], returns: Sequence[Any]
) -> tuple[Action, str]:
    # An `.out` overload computes values into the tensor that it is given, whatever its functional form does.
    into_out = func.namespace == "aten" and any(a.kwarg_only and a.is_write for a in arguments)
    if row.skip and not into_out:
        return Action.PASS, row.skip
    # `empty` returns what lay in memory: two runs never agree.
    if row.uninitialised:
        return Action.EMPTY, "uninitialised output"
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    # `squeeze_`, `t_` and their like write to the form of their argument only: the tag is torch's list of them.
    if (row.view and not into_out) or is_view or torch.Tag.inplace_view in func.tags:
        return Action.VIEW, "view: metadata only"
    # The tag is torch's own list of operators that draw from a generator.
    if torch.Tag.nondeterministic_seeded in func.tags:
        return Action.RANDOM, "random"
    return Action.REPLAY, ""
