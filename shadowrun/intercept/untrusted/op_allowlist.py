"""Which operators a file may have us call: those that compute tensors from tensors, by their schemas.

A data file, and the inputs captured next to it, may come from anyone. What they name is looked up among the operators
of this process and called only if its schema has nothing but tensors and plain values: no text that could be a path,
no storage, stream, generator or object of a class, no collective. The tables below are of what schemas do not say.
docs/security.md says what is left.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.plan import Action, make_plan
from shadowrun.intercept.torch_operators import operator_is_dispatched
from shadowrun.intercept.torchapi import as_in_handler
from shadowrun.intercept.untrusted.argument_checks import overlaps_itself, shared_result
from shadowrun.intercept.untrusted.internal_operators import is_for_kernels_only, is_plain_primitive
from shadowrun.intercept.untrusted.memory_bounds import has_bounds_check, why_out_of_bounds
from shadowrun.intercept.untrusted.sequence_lengths import RECURRENT
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Refused",
    "check_arguments",
    "check_operator",
    "check_places",
    "depends_on_values",
    "is_word",
    "operator_named",
    "trusts_its_arguments",
]


class Refused(ValueError):  # noqa: N818 - a reason, caught inside
    """An operator or an argument that no file may have us use; the message says why."""


_NAME = re.compile(r"(?P<space>[A-Za-z_]\w*)::(?P<packet>[A-Za-z_]\w*)(?:\.(?P<overload>[A-Za-z_]\w*))?", re.ASCII)
# Types without their ``Optional`` and ``List``, as schemas print them: dtypes and layouts print as ``int``.
_VALUES = frozenset({"Tensor", "int", "float", "bool", "number", "complex", "Device"})
_WRAPPED = re.compile(r"(?:Optional|List)\[(.*)\]")

# Operators of torch's other namespaces do more than compute (files, communication), or are internal.
_PLAIN_SPACES = frozenset({"aten", "prims"})
# Namespaces that are no custom operators of the user's, and whose operators do more than compute, or are internal.
_SPACES_OF_TORCH = frozenset(
    {
        *(
            "_c10d_functional",
            "_c10d_functional_autograd",
            "c10d_functional",
            "_caffe2",
            "_dtensor",
            "_inductor_test",
            "_native",
            "_nnapi",
        ),
        *(
            "_quantized",
            "_test",
            "aten_test",
            "c10d",
            "caffe2",
            "cuda",
            "debug_mode_ops",
            "debugprims",
            "dist_autograd",
        ),
        *("export", "fsdp", "higher_order", "inductor", "inductor_prims", "metal", "metal_prepacked", "mkl", "mkldnn"),
        *("mkldnn_prepacked", "mtia", "nccl", "onednn", "onnx", "prepacked", "prim", "profiler", "quantization"),
        *("quantized", "quantized_decomposed", "rngprims", "rpc", "sparse", "static_runtime", "symm_mem", "vulkan"),
        *("vulkan_prepacked", "xnnpack"),
        # Of torch's own libraries, which read and write files.
        *("image", "torchaudio", "torchaudio_sox", "torchtext", "video_reader"),
    }
)

# A file could make such an operator read or write outside of its tensors.
_UNCHECKED = "it does not check its indices"
_UNSIZED = "it does not check that its arguments have sizes that fit"
# Operators whose schema looks plain, by name without overload; `internal_operators` has families.
_REFUSED = {
    "_foreach_copy": _UNSIZED,
    "choose_qparams_optimized": _UNSIZED,
    "fused_moving_avg_obs_fake_quant": _UNSIZED,
    "segment_reduce": _UNCHECKED,
    "set": "it rebinds storage",
    "sparse_resize": _UNCHECKED,
    "sparse_resize_": _UNCHECKED,
    "sparse_resize_and_clear": _UNCHECKED,
    "sparse_resize_and_clear_": _UNCHECKED,
    # They keep the indices that they are given: who writes to these afterwards takes the checks away, where there were
    # any; those of a COO tensor are not checked at all.
    **dict.fromkeys(
        (
            *("sparse_bsc_tensor", "sparse_bsr_tensor", "sparse_compressed_tensor", "sparse_coo_tensor"),
            *("sparse_csc_tensor", "sparse_csr_tensor"),
        ),
        _UNCHECKED,
    ),
    # Who writes to these views of a sparse tensor takes its checks away.
    **dict.fromkeys(
        ("indices", "values", "ccol_indices", "col_indices", "crow_indices", "row_indices"),
        "it gives access to unchecked indices",
    ),
}

# Operators that programs call, and whose kernels do not look whether indices, lengths and sizes fit those of the other
# arguments (docs/security.md): with some of them changed, they read or write elsewhere.
_TRUSTING = frozenset(
    {
        *("_ctc_loss", "_ctc_loss_backward", "_embedding_bag", "_embedding_bag_forward_only", "_pad_packed_sequence"),
        *("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward", "adaptive_max_pool2d_backward"),
        *("adaptive_max_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
        *("_pdist_backward", "_log_softmax_backward_data", "_softmax_backward_data", "native_group_norm_backward"),
        *("linalg_ldl_solve", "linalg_lu_solve", "lu_unpack"),
        *("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_", "max_unpool2d", "max_unpool3d"),
        *("_native_multi_head_attention", "_transformer_encoder_layer_fwd", "_weight_norm_interface"),
        # Composite operators of these.
        *("ctc_loss", "embedding_bag"),
        *RECURRENT,
    }
)

# What compilers leave in graphs: they raise, or do nothing.
_ASSERTIONS = frozenset(
    {
        *("aten::_assert_async", "aten::_assert_async.msg", "aten::_assert_scalar", "aten::_assert_tensor_metadata"),
        *("aten::_functional_assert_async.msg", "aten::_functional_assert_scalar"),
        *("aten::sym_constrain_range", "aten::sym_constrain_range_for_size"),
    }
)

_FREE = {
    "equation": re.compile(r"[A-Za-z.,> -]{0,400}"),
    "assert_msg": re.compile(r"[\w <>=.,()+*/-]{0,400}", re.ASCII),
}
_MODES = (
    *("area", "bicubic", "bilinear", "circular", "complete", "constant", "linear", "max", "mean", "nearest"),
    *("nearest-exact", "r", "rand", "randn", "reduced", "reflect", "replicate", "sum", "trilinear"),
)
# Texts that are the name of a choice, by the argument that takes them; `_FREE` has the others.
_WORDS: dict[str, tuple[str, ...]] = {
    "UPLO": ("L", "U", "l", "u"),
    "activation": ("gelu", "none", "relu", "silu"),
    "approximate": ("none", "tanh"),
    "driver": ("gels", "gelsd", "gelss", "gelsy", "gesvd", "gesvda", "gesvdj"),
    "indexing": ("ij", "xy"),
    "interpolation": ("higher", "linear", "lower", "midpoint", "nearest"),
    "mode": _MODES,
    "norm": ("backward", "forward", "ortho"),
    "ord": ("fro", "nuc"),
    "p": ("fro", "nuc"),
    "pad_mode": ("circular", "constant", "reflect", "replicate"),
    "padding": ("same", "valid"),
    "padding_mode": ("border", "reflection", "zeros"),
    "padding_side": ("left", "right"),
    "reduce": ("add", "amax", "amin", "max", "mean", "min", "multiply", "prod", "sum"),
    "reduction": ("batchmean", "mean", "none", "sum"),
    "rounding_mode": ("floor", "trunc"),
    "side": ("left", "right"),
}
_ALL_WORDS = frozenset(word for words in _WORDS.values() for word in words)

_LAYOUTS = frozenset(
    (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
)
# What gives a sparse tensor another size: of one in CSC, torch leaves too few indices.
_RESIZES = re.compile(r"aten::_?resize")
# Schemas have numbers for these. Kernels find what belongs to a dtype by its number, which is not checked.
_CONSTANTS = {"Layout": torch.layout, "MemoryFormat": torch.memory_format, "ScalarType": torch.dtype}
_KIND_OF_VALUE = {bool: "number", int: "number", float: "number", complex: "number"}
_MAX_INT = 1 << 64
# Of what is made from sizes alone: 2 GiB of float64.
_MAX_ELEMENTS = 1 << 28
_META = torch.device("meta")


def operator_named(name: Any, *, checked: bool = True) -> torch._ops.OpOverload:
    """The operator that a file calls ``aten::add.Tensor``.

    Args:
        name: Of the operator.
        checked: Whether it must be one that a file may name; not needed where this process itself recorded it.

    Raises:
        AttributeError: This process has none of this name.
        Refused: It is none that a file may name.
    """
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise Refused(f"{ascii(name)[:80]} is no name of an operator")
    space, packet, overload = match["space"], match["packet"], match["overload"] or "default"
    # `torch.ops.load_library` and the other methods of its class would be taken for namespaces.
    if (checked and space in _SPACES_OF_TORCH) or hasattr(type(torch.ops), space):
        raise Refused(f"{name} does more than compute, or is internal to torch")
    try:
        found = getattr(getattr(getattr(torch.ops, space), packet), overload)
    except RuntimeError as error:
        raise AttributeError(str(error)) from None
    if isinstance(found, torch._ops.OpOverload):
        if checked:
            check_operator(found)
        return found
    raise AttributeError(name)


@functools.lru_cache(maxsize=4096)
def _refusal(func: torch._ops.OpOverload) -> str:
    """Why a file may not have an operator called; empty where it may."""
    name: str = func.name()  # type: ignore[no-untyped-call]
    space, _, rest = name.partition("::")
    if name in _ASSERTIONS:
        return ""
    if space in _SPACES_OF_TORCH:
        return "it does more than compute, or is internal to torch"
    base = rest.partition(".")[0]
    if space in _PLAIN_SPACES and (base in _REFUSED or base.startswith(("_test", "fbgemm_"))):
        return _REFUSED.get(base, "it is internal to torch")
    if space == "aten" and is_for_kernels_only(base):
        return "it is internal to torch, and no program records it"
    if space == "prims" and not is_plain_primitive(base):
        return "no look at its arguments knows what its kernel believes"
    if not operator_is_dispatched(name):
        return "torch's dispatcher does not know it"
    plan = make_plan(func, 0)
    if plan.action is Action.PASS:
        return plan.reason
    schema = schema_of(func)
    for argument in schema.arguments:
        kind = _unwrapped(str(argument.type))
        by_choice = kind == "str" and (argument.name in _WORDS or argument.name in _FREE)
        is_left_out = kind in ("str", "Generator") and str(argument.type) == f"Optional[{kind}]"
        if kind not in _VALUES and not by_choice and not is_left_out:
            return f"its argument {argument.name} is a {kind}"
    if "_backward" in base and any(a.is_out for a in schema.arguments):
        return "no program gives a backward pass its results: it does not check that their sizes fit"
    kinds = [_unwrapped(str(r.type)) for r in schema.returns]
    if not all(kind in _VALUES for kind in kinds):
        return f"it returns a {next(kind for kind in kinds if kind not in _VALUES)}"
    if not kinds and not plan.mutated:
        return "it returns nothing"
    if "Tensor" not in (*kinds, *(_unwrapped(str(a.type)) for a in schema.arguments)):
        return "it is not about tensors"
    return ""


def check_operator(func: torch._ops.OpOverload) -> None:
    """Look at the schema of an operator that a file names.

    Raises:
        Refused: No file may have it called.
    """
    why = _refusal(func)
    if why:
        raise Refused(f"{func.name()} is not called for a file: {why}")  # type: ignore[no-untyped-call]


def check_arguments(func: torch._ops.OpOverload, args: Any, kwargs: Any, *, checked: bool = True) -> None:
    """Look at the arguments that a file gives to an operator; anything may stand where a computed value will.

    Args:
        func: The operator.
        args: Its arguments.
        kwargs: Those by name.
        checked: Whether they must be what a file may give; else they only have to fit the schema.

    Raises:
        Refused: One is no tensor and no plain value, a text is no choice of this argument, or memory would run out.
    """
    declared = schema_of(func).arguments
    named = {a.name: a for a in declared}
    if len(args) > len(declared) or not set(kwargs) <= set(named):
        raise Refused(f"{func.name()} takes other arguments")  # type: ignore[no-untyped-call]
    if not checked:
        return
    writes = torch.Tag.inplace_view not in func.tags  # else to what describes a tensor only
    for argument, value in (*zip(declared, args, strict=False), *((named[k], v) for k, v in kwargs.items())):
        kind, real = _kinds(func)[argument.name]
        for one in _flat(value):
            if isinstance(one, str) and not (kind == "str" and is_word(one, argument.name)):
                raise Refused(f"{ascii(one)[:80]} is no choice for {argument.name}")
            if not isinstance(one, _PLAIN) or (isinstance(one, torch.device) and one.type == "meta"):
                raise Refused(f"{argument.name} is a {type(one).__name__}")
            if isinstance(one, torch.Tensor) and (kind_of_memory := _without_looks(one)):
                raise Refused(f"{argument.name} is {kind_of_memory}: no look at a call knows what its kernels believe")
            if (
                isinstance(one, torch.Tensor)
                and one.layout is not torch.strided
                and _RESIZES.match(schema_of(func).name)
            ):
                raise Refused(f"it does not check the indices of {argument.name} against another size")
            if not _is_of_kind(one, real):
                what = _KIND_OF_VALUE.get(type(one), type(one).__name__)
                raise Refused(f"{argument.name} is a {what}, where a {real} has to be")
            if isinstance(one, int) and abs(one) > _MAX_INT:
                raise Refused(f"{argument.name} is a number of {one.bit_length()} bits")
            if isinstance(one, torch.Tensor) and writes and argument.is_write and overlaps_itself(one):
                raise Refused(f"elements of {argument.name}, which it writes, lie in the same place")
    results = _results(func)
    if results and (why := shared_result(_as_taken(declared, args, kwargs), results)):
        raise Refused(why)
    check_places(func, args, kwargs)
    _check_size(func, args, kwargs)


def check_places(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> None:
    """Look at what the kernel of an operator takes as places in memory, and does not look at itself.

    Raises:
        Refused: It would read or write outside of its tensors.
    """
    schema = schema_of(func)
    if has_bounds_check(schema.name) and (
        why := why_out_of_bounds(schema.name, _as_taken(schema.arguments, args, kwargs))
    ):
        raise Refused(why)


@functools.lru_cache(maxsize=4096)
def _results(func: torch._ops.OpOverload) -> frozenset[str]:
    """Arguments that are results (``out=``), of an operator that may take what its other arguments hold for places."""
    is_elementwise = torch.Tag.pointwise in func.tags
    return frozenset(a.name for a in schema_of(func).arguments if a.is_out and not is_elementwise)


@functools.lru_cache(maxsize=4096)
def _kinds(func: torch._ops.OpOverload) -> dict[str, tuple[str, str]]:
    """Types of the elements of each argument, as schemas print them and as they are."""
    return {a.name: (_unwrapped(str(a.type)), _unwrapped(_real_type(a))) for a in schema_of(func).arguments}


def _is_of_kind(value: Any, kind: str) -> bool:
    """Whether a value is of its argument's type: torch makes a number of a tensor, and one of a dtype, unseen."""
    if value is None or isinstance(value, str):
        return True
    if kind in _CONSTANTS or isinstance(value, tuple(_CONSTANTS.values())):
        return isinstance(value, _CONSTANTS.get(kind, ()))
    return not isinstance(value, torch.Tensor) or kind == "Tensor"


def _as_taken(declared: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by name as the operator takes them: with defaults, and of numbers what torch makes of them."""
    given = dict(zip((a.name for a in declared), args, strict=False)) | dict(kwargs)
    taken = {a.name: a.default_value for a in declared if a.has_default_value()}
    kinds = {a.name: a for a in declared}
    return taken | {name: _converted(value, kinds[name]) for name, value in given.items()}


def _converted(value: Any, argument: Any) -> Any:
    kind = _unwrapped(str(argument.type))
    # A number in the place of a list of known length is all of the list.
    length = getattr(argument, "N", None)
    if isinstance(value, (list, tuple)):
        return [_one(v, kind) for v in value]
    return [_one(value, kind)] * length if length and isinstance(value, int) else _one(value, kind)


def _one(value: Any, kind: str) -> Any:
    if not isinstance(value, (bool, int, float, complex)):
        return value
    if kind == "Tensor":
        with as_in_handler():
            return torch.tensor(value, device="cpu")
    if kind == "int" and isinstance(value, bool):
        return int(value)
    return float(value) if kind == "float" and isinstance(value, (bool, int)) else value


@functools.lru_cache(maxsize=4096)
def depends_on_values(func: torch._ops.OpOverload) -> bool:
    """Whether `check_arguments` may refuse a call for its tensors: their values, sizes, layout or places in memory.

    A graph of a file has no tensors when it is read: such a call is checked once more when it is made.
    """
    schema = schema_of(func)
    if has_bounds_check(schema.name) or _RESIZES.match(schema.name):
        return True
    makes = any(a.name == "device" for a in schema.arguments)  # of sizes that a call may have computed
    return makes or any(a.is_write for a in schema.arguments)


def trusts_its_arguments(func: Any) -> bool:
    """Whether the kernel of an operator believes that its arguments fit: those of a call are not to be changed."""
    return isinstance(func, torch._ops.OpOverload) and schema_of(func).name.partition("::")[2] in _TRUSTING


def _without_looks(t: torch.Tensor) -> str:
    """The kind of a tensor whose memory is neither dense nor indices that were checked; empty for others."""
    if t.is_nested:
        return "nested"
    if t.is_quantized:
        return "quantized"
    return "" if t.layout in _LAYOUTS else str(t.layout).removeprefix("torch.")


_PLAIN = (
    *(type(None), bool, int, float, complex, str, torch.Tensor, torch.device),
    *(torch.dtype, torch.layout, torch.memory_format),
)


def is_word(text: str, argument: str | None = None) -> bool:
    """Whether a text is the name of a choice.

    Args:
        text: The text.
        argument: Its argument; None for any.
    """
    if argument in _FREE:
        return _FREE[argument].fullmatch(text) is not None
    return text in (_ALL_WORDS if argument is None else _WORDS.get(argument, ()))


def _check_size(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> None:
    """Refuse to make what cannot be held: of sizes alone, the form of the result is known without it."""
    values = list(_flat([*args, *kwargs.values()]))
    if any(isinstance(v, torch.Tensor) for v in values):
        return
    if not any(a.name == "device" for a in schema_of(func).arguments):
        return
    try:
        # The meta device finds the form and takes no memory.
        with as_in_handler():
            made = func(*args, **{**kwargs, "device": _META})
    except Exception:  # without a rule for forms, or wrong: the call itself then raises
        return
    if any(isinstance(t, torch.Tensor) and _n_held(t) > _MAX_ELEMENTS for t in _flat([made])):
        raise Refused(f"{func.name()} would make more than {_MAX_ELEMENTS} elements")  # type: ignore[no-untyped-call]


def _n_held(t: torch.Tensor) -> int:
    # Strides may reach far beyond the elements: `empty_strided((2,), (10**9,))` holds all that is between.
    return max(t.numel(), t.untyped_storage().nbytes() // t.element_size() if t.layout is torch.strided else 0)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for v in value:
            yield from _flat(v)
    else:
        yield value


def _real_type(argument: Any) -> str:
    """The type of an argument that a schema prints as ``int``. Seen on 2.13 (`Argument.real_type`)."""
    return str(getattr(argument, "real_type", argument.type))


def _unwrapped(kind: str) -> str:
    while (match := _WRAPPED.fullmatch(kind)) is not None:
        kind = match[1]
    return kind
