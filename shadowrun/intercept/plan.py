"""What to do with an operator, decided once per `OpOverload` from its schema, tags and a short table.

The tables are exceptions to what schemas say; each line has its reason. The evidence is the self-shadow
sweep over torch's operator database: with these tables, CPU against CPU reports nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept import torchapi

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Action", "Argument", "OpPlan", "make_plan"]


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
        passes, silent, random: What `action` says, since reading an enum takes 0.1 µs: never replayed; without values
            to compare; draws.
        reason: Why, for PASS and VIEW.
        mutated: Arguments written to, hidden ones included.
        short: A plain call: one fresh tensor or number comes back and nothing is written to, or the first argument is
            written to and comes back.
        fresh: Numbers of the returns that are no alias of an argument.
        n_returns: Declared number of returns.
        uninitialised: Numbers of the returns whose values mean nothing.
        has_device: Takes a ``device`` keyword.
        has_generator: Takes a ``generator`` keyword.
        dropout: Position of ``dropout_p``, -1 if there is none: at 0 the operator is not random.
        custom: Not one of torch's own operators.
        composite: Splits into other operators where autograd is on.
        on_cpu: Names of the arguments that lie on the CPU whatever the device of the call.
        unstable: Reason why two runs on the same inputs may differ on any device, or empty.
    """

    func: torch._ops.OpOverload
    run: Callable[..., Any]
    index: int
    name: str
    action: Action
    reason: str = ""
    mutated: tuple[Argument, ...] = ()
    short: bool = False
    fresh: tuple[int, ...] = ()
    n_returns: int = 1
    uninitialised: frozenset[int] = frozenset()
    has_device: bool = False
    has_generator: bool = False
    dropout: int = -1
    custom: bool = False
    composite: bool = False
    unstable: str = ""
    on_cpu: tuple[str, ...] = ()

    passes: bool = field(init=False)
    silent: bool = field(init=False)
    random: bool = field(init=False)

    def __post_init__(self) -> None:
        self.passes = self.action is Action.PASS
        self.silent = self.action is Action.VIEW or self.action is Action.EMPTY
        self.random = self.action is Action.RANDOM

    @property
    def mutated_names(self) -> tuple[str, ...]:
        """Schema names of the mutated arguments."""
        return tuple(a.name for a in self.mutated)


_OWN_NAMESPACES = frozenset(
    {"aten", "prims", "prim", "quantized", "sparse", "mkldnn", "mkl", "torch_nn", "torchvision"}
)

_PLAIN = frozenset({"Tensor", "number", "bool"})
"""Types of results, as a schema prints them, that need no taking apart."""

_PASS_NAMESPACES = {
    "c10d": "collective: issuing it twice would deadlock or corrupt",
    "_c10d_functional": "collective: issuing it twice would deadlock or corrupt",
    "_c10d_functional_autograd": "collective: issuing it twice would deadlock or corrupt",
    "fsdp": "collective: issuing it twice would deadlock or corrupt",
    "symm_mem": "collective: issuing it twice would deadlock or corrupt",
    "profiler": "profiler mark",
    "inductor": "internal to compiled code",
    "_inductor_test": "internal to compiled code",
    "debugprims": "debugging aid",
    "rngprims": "random state plumbing",
    "export": "internal to export",
    "higher_order": "higher-order operator",
    "aten_test": "torch's own test operator",
}

_PASS = {
    "aten::is_pinned": "asks about memory, not values",
    "aten::_has_same_storage_numel": "asks about memory, not values",
    "aten::is_same_size": "asks about form, not values",
    "aten::is_set_to": "asks about memory, not values",
    "aten::_pin_memory": "moves memory",
    "aten::pin_memory": "moves memory",
    "aten::record_stream": "stream bookkeeping",
    "prim::device": "asks about the device",
    "prim::layout": "asks about the layout",
    "aten::_print": "prints",
    "aten::set_.source_Storage": "rebinds storage: no values are computed",
    "aten::set_.source_Storage_storage_offset": "rebinds storage: no values are computed",
    "aten::set_.source_Tensor": "rebinds storage: no values are computed",
    "aten::set_.source_Tensor_storage_offset": "rebinds storage: no values are computed",
    "aten::set_": "rebinds storage: no values are computed",
    "aten::set_data": "rebinds storage: no values are computed",
    "aten::from_file": "reads a file",
    "aten::_efficientzerotensor": "has no memory",
    "aten::_nested_tensor_from_mask_left_aligned": "asks about a mask",
    "aten::_assert_async": "asserts, returns nothing",
    "aten::_assert_async.msg": "asserts, returns nothing",
    "aten::_assert_scalar": "asserts, returns nothing",
    "aten::_assert_tensor_metadata": "asserts, returns nothing",
    "aten::sym_constrain_range": "asserts, returns nothing",
    "aten::sym_constrain_range_for_size": "asserts, returns nothing",
}

_VIEW = {
    # It shares its input's memory until one of them is written to; to look at its values would end that.
    "aten::_lazy_clone",
    # They alias their input without saying so in the schema (the only ones in the operator database).
    "aten::_unsafe_view",
    "aten::unsafe_split.Tensor",
    "aten::unsafe_split_with_sizes",
    "aten::unsafe_chunk",
}

_EMPTY = {
    "aten::empty.memory_format",
    "aten::empty.names",
    "aten::empty.out",
    "aten::empty_like",
    "aten::empty_like.out",
    "aten::new_empty",
    "aten::new_empty.out",
    "aten::empty_strided",
    "aten::empty_strided.out",
    "aten::new_empty_strided",
    "aten::new_empty_strided.out",
    "aten::empty_permuted",
    "aten::empty_permuted.out",
    "aten::empty_quantized",
    "aten::_empty_affine_quantized",
    "aten::_empty_per_channel_affine_quantized",
    "aten::resize_",
    "aten::resize_as_",
    "aten::resize",
    "aten::resize_as",
    "aten::_resize_output_",
}

_UNINITIALISED_RETURNS = {
    "aten::_ctc_loss": {1},  # log_alpha is allocated and only partly filled
    "aten::_ctc_loss.Tensor": {1},
    "aten::mkldnn_rnn_layer": {3},  # workspace
    "aten::_scaled_dot_product_flash_attention": {6, 7, 8},  # rng_state, unused, debug mask
    "aten::_scaled_dot_product_efficient_attention": {2, 3},  # philox seed and offset
    "aten::_scaled_dot_product_cudnn_attention": {6, 7, 8},
    "aten::_flash_attention_forward": {2, 3, 4},
    "aten::_efficient_attention_forward": {2, 3},
    "aten::cudnn_batch_norm": {3},  # reserve space
    "aten::_batch_norm_with_update": {3},
    "aten::_batch_norm_with_update_functional": {3},
    "aten::_batch_norm_no_update": {3},
    "aten::_embedding_bag_forward_only": {1, 2, 3},  # without a backward nobody reads them, and not all are filled
    "aten::_cudnn_rnn": {3, 4},  # reserve, weight buffer
    "aten::miopen_rnn": {3, 4},
}

_HIDDEN_MUTATIONS = {
    # The schema does not say that the running statistics are written in training.
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::batch_norm": ("running_mean", "running_var"),
    "aten::instance_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
    "aten::batch_norm_update_stats": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
    "aten::_batch_norm_impl_index": ("running_mean", "running_var"),
}

_ON_CPU = {
    # Lengths that every backend reads on the host, and refuses on a device.
    "aten::_pack_padded_sequence": ("lengths",),
    "aten::_pack_padded_sequence_backward": ("batch_sizes",),
    "aten::_pad_packed_sequence": ("batch_sizes",),
    "aten::tensor_split.tensor_indices_or_sections": ("tensor_indices_or_sections",),
    **{f"aten::{rnn}.data": ("batch_sizes",) for rnn in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}

_UNSTABLE = {
    # 5 bit patterns in 300 calls on the same inputs with LAPACK's gelsy driver.
    "aten::linalg_lstsq": "LAPACK's gelsy driver is not repeatable by itself",
}


def make_plan(func: torch._ops.OpOverload, index: int) -> OpPlan:
    """Decide what to do with an operator (60 µs, once per operator and run)."""
    schema = func._schema
    name: str = func.name()  # type: ignore[no-untyped-call]
    namespace = name.split("::", 1)[0]
    action, reason = _action(func, name, namespace)
    hidden = _HIDDEN_MUTATIONS.get(name.partition(".")[0], ())  # of all overloads, `.out` too
    mutated = tuple(
        Argument(a.name, i, a.kwarg_only, "List" in str(a.type) or "[]" in str(a.type))
        for i, a in enumerate(schema.arguments)
        if (a.alias_info is not None and a.alias_info.is_write) or a.name in hidden
    )
    returns = schema.returns
    fresh = len(returns) == 1 and returns[0].alias_info is None and str(returns[0].type) in _PLAIN and not mutated
    in_place = len(returns) == 1 and returns[0].alias_info is not None and [a.position for a in mutated] == [0]
    custom = namespace not in _OWN_NAMESPACES
    short = action is Action.REPLAY and not custom and (fresh or (in_place and not mutated[0].is_list))
    arguments = {a.name for a in schema.arguments}
    return OpPlan(
        func=func,
        run=torchapi.raw_operator(func),
        index=index,
        name=name,
        action=action,
        reason=reason,
        mutated=mutated,
        short=short,
        fresh=tuple(i for i, r in enumerate(returns) if r.alias_info is None),
        n_returns=len(returns),
        uninitialised=frozenset(_UNINITIALISED_RETURNS.get(name, ())),
        has_device="device" in arguments,
        has_generator="generator" in arguments,
        dropout=next((i for i, a in enumerate(schema.arguments) if a.name in ("dropout_p", "dropout")), -1),
        custom=custom,
        composite=namespace == "aten" and torchapi.operator_is_composite(name),
        unstable=_UNSTABLE.get(name, ""),
        on_cpu=_ON_CPU.get(name, ()),
    )


def _action(func: torch._ops.OpOverload, name: str, namespace: str) -> tuple[Action, str]:
    if namespace in _PASS_NAMESPACES:
        return Action.PASS, _PASS_NAMESPACES[namespace]
    if name in _PASS:
        return Action.PASS, _PASS[name]
    if name in _EMPTY:
        return Action.EMPTY, "uninitialised output"
    returns = func._schema.returns
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    if name in _VIEW or is_view or torch.Tag.inplace_view in func.tags:
        return Action.VIEW, "view: metadata only"
    if torch.Tag.nondeterministic_seeded in func.tags:
        return Action.RANDOM, "random"
    return Action.REPLAY, ""
