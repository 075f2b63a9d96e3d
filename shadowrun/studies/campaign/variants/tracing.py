"""What a graph computes on the CPU: forms for mutators to choose by, and whether a mutated graph runs at all.

Tiny graphs are run, not propagated on `meta` tensors: a graph of ten calls takes 0.15 ms this way, 4 ms with
`FakeTensor` and 9 ms on `meta` (measured), and only values tell whether a result is finite or an index in range.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.operators.facts import base_name, facts
from shadowrun.studies.zoo.graph import DEVICE, Ref, check_call, check_dense
from shadowrun.studies.zoo.input_values import make_input
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shadowrun.studies.zoo.graph import Graph, Input, Node

__all__ = ["Invalid", "OpInfo", "Trace", "Values", "copied", "first_line", "info", "run_node", "trace"]

MAX_ELEMENTS: Final = 1 << 20
"""Of one result: variants are small."""
# Values of inputs are kept, since they cost more than a small graph to make.
_MAX_BYTES: Final = 1 << 25
# Of a small tensor beside its values: its description and torch's objects (measured: 1.2 KiB).
_ENTRY_BYTES: Final = 1280
_CPU: Final = torch.device("cpu")
_FLOATS: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_INTEGERS: Final = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_INDICES: Final = frozenset({"index", "indices", "offsets", "target", "targets", "repeats", "bucket", "boundaries"})
_PER_CHANNEL: Final = ("weight", "bias", "running_mean", "running_var")
# Their kernels on the CPU do not check sizes or indices in all ways: a wrong one reads or writes elsewhere.
_UNCHECKED: Final = frozenset(
    """
    _ctc_loss ctc_loss _ctc_loss_backward _transformer_encoder_layer_fwd _native_multi_head_attention
    _transform_bias_rescale_qkv _weight_norm_interface segment_reduce max_unpool2d max_unpool3d
    """.split()  # noqa: SIM905
)
_BOUNDED: Final = frozenset(
    """
    argmax argmin argsort topk sort max min median nanmedian mode kthvalue nonzero searchsorted bucketize multinomial
    cummax cummin eq ne gt lt ge le isnan isinf isfinite logical_and logical_or logical_not logical_xor any all
    max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d ones_like zeros_like full_like new_zeros
    new_ones new_full sym_size
    """.split()  # noqa: SIM905
)


class Invalid(Exception):  # noqa: N818 - a reason, counted
    """A variant that cannot be made, or that the reference cannot run; the text says why."""


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What mutators ask about an operator.

    Attributes:
        base: ``add`` of ``aten::add.Tensor``.
        writes: It writes to an argument, whether or not its schema says so.
        into: It writes its result to a tensor that it is given for that.
        casts: It may make integers of floats.
        pointwise: Each element of its result depends on one element of each input.
        random: It draws numbers.
        layout: What it returns depends on strides.
        fragile: Kernels of the CPU do not check its arguments.
        bounded: Its results are in a range whatever the values of its inputs.
        indices: Positions of the arguments that hold indices.
    """

    base: str
    writes: bool
    into: bool
    casts: bool
    pointwise: bool
    random: bool
    layout: bool
    fragile: bool
    bounded: bool
    indices: tuple[int, ...]


@functools.lru_cache(maxsize=8192)
def info(op: torch._ops.OpOverload) -> OpInfo:
    """What mutators ask about an operator."""
    name = str(op.name())  # type: ignore[no-untyped-call]
    schema, row, base = schema_of(op), facts(name), base_name(name)
    return OpInfo(
        base=base,
        writes=bool(schema.is_mutable) or bool(row.hidden_writes),
        into=any(a.is_out for a in schema.arguments),
        casts=base in ("_to_copy", "to", "copy", "type_as", "_convert", "convert_element_type"),
        pointwise=torch.Tag.pointwise in op.tags,
        random=torch.Tag.nondeterministic_seeded in op.tags,
        layout="as_strided" in base or "reshape_alias" in base or base.startswith(("empty", "new_empty", "resize")),
        fragile="batch_norm" in base or "scaled_dot_product" in base or base in _UNCHECKED,
        bounded=base in _BOUNDED,
        indices=tuple(i for i, a in enumerate(schema.arguments) if a.name in _INDICES and "Tensor" in str(a.type)),
    )


class Values:
    """Values of inputs, kept: making them costs more than running a small graph.

    Args:
        seed: Of the values.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._made: dict[Input, torch.Tensor] = {}
        self._n_bytes = 0

    def __call__(self, described: Input) -> torch.Tensor:
        """The values of an input; no caller may write to them."""
        found = self._made.get(described)
        if found is None:
            found = make_input(described, self._seed)
            n_bytes = found.untyped_storage().nbytes() + _ENTRY_BYTES
            self._n_bytes += n_bytes
            if self._n_bytes > _MAX_BYTES:
                self._made.clear()
                self._n_bytes = n_bytes
            self._made[described] = found
        return found


class Trace:
    """All values of a graph.

    Attributes:
        graph: The graph.
        inputs: Values of its inputs.
        values: What its calls returned: a tensor, a number, or a list or tuple of these.
    """

    __slots__ = ("_finite", "graph", "inputs", "values")

    def __init__(self, graph: Graph, inputs: list[torch.Tensor], values: list[Any]) -> None:
        self.graph = graph
        self.inputs = inputs
        self.values = values
        self._finite: bool | None = None

    def value(self, ref: Ref) -> Any:
        """The value of a reference.

        Raises:
            Invalid: The call has fewer results than it had.
        """
        if ref.node < 0:
            return self.inputs[-1 - ref.node]
        value = self.values[ref.node]
        if isinstance(value, (list, tuple)):
            if ref.output >= len(value):
                raise Invalid("a call with fewer results")
            return value[ref.output]
        return value

    def tensor(self, ref: Ref) -> torch.Tensor:
        """The tensor of a reference.

        Raises:
            Invalid: It is none.
        """
        several = ref.node >= 0 and isinstance(self.values[ref.node], (list, tuple))
        value = self.value(ref) if several or ref.output == 0 else None
        if isinstance(value, torch.Tensor):
            return value
        raise Invalid("no tensor at this place")

    def resolved(self, argument: Any) -> Any:
        """An argument of a call with each reference replaced by its value, as the operator takes it."""
        if type(argument) is Ref:
            return self.value(argument)
        if type(argument) is tuple:
            return [self.resolved(a) for a in argument]
        return _CPU if argument is DEVICE else argument

    def is_finite_somewhere(self) -> bool:
        """Whether a floating result has a finite element, or there is no floating result."""
        if self._finite is None:
            results = map(self.value, self.graph.outputs)
            floats = [t for t in results if isinstance(t, torch.Tensor) and _has_floats(t)]
            self._finite = not floats or any(bool(t.isfinite().any()) for t in floats)
        return self._finite


def _has_floats(t: torch.Tensor) -> bool:
    return (t.is_floating_point() or t.is_complex()) and t.numel() > 0


def trace(
    graph: Graph, values: Values, base: Trace | None = None, change: Callable[[Node, Trace], Node] | None = None
) -> Trace:
    """Run a graph on the CPU and keep all of its values.

    Args:
        graph: The graph.
        values: Makes those of its inputs.
        base: A trace of the graph that this one was made from: calls in front of the first change are not run again.
        change: Makes another call of each, given the values before it; the trace has the graph of these.

    Raises:
        Invalid: A call raises, makes too much, or does what torch does not define; the text says which and why.
    """
    try:
        inputs = [values(i) for i in graph.inputs]
    except (ValueError, RuntimeError) as error:
        raise Invalid(f"input: {first_line(error)}") from None
    writes = any(info(node.op).writes for node in graph.nodes)
    # With writes, a value that is kept may have been written to after the call that made it.
    done = 0 if writes or base is None else _n_common(graph, inputs, base)
    if writes:
        # Values of inputs are shared by all variants that a worker makes.
        inputs = [copied(t) for t in inputs]
    result = Trace(graph, inputs, base.values[:done] if base is not None else [])
    # Torch warns of deprecated forms of a call; a variant may use them.
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if change is None:
            for node in graph.nodes[done:]:
                result.values.append(run_node(node, result))
            return result
        nodes = []
        for node in graph.nodes:
            nodes.append(change(node, result))
            result.values.append(run_node(nodes[-1], result))
    return Trace(type(graph)(graph.inputs, tuple(nodes), graph.outputs), inputs, result.values)


def _n_common(graph: Graph, inputs: Sequence[torch.Tensor], base: Trace) -> int:
    """Number of calls at the start that have the values they had."""
    # Its values are those after all writes, and not what the calls had read.
    if any(info(node.op).writes for node in base.graph.nodes):
        return 0
    if len(inputs) < len(base.inputs) or any(a is not b for a, b in zip(inputs, base.inputs, strict=False)):
        return 0
    n = 0
    for a, b in zip(graph.nodes, base.graph.nodes, strict=False):
        # By identity: mutators keep the nodes that they do not change.
        if a is not b:
            break
        n += 1
    return n


def copied(t: torch.Tensor) -> torch.Tensor:
    """A copy with its layout."""
    n = t.untyped_storage().nbytes() // t.element_size()
    # The whole storage: an operator may read around a view, as `as_strided` does.
    flat = t.as_strided((n,), (1,), 0).clone()
    return flat.as_strided(t.shape, t.stride(), t.storage_offset())


def run_node(node: Node, known: Trace) -> Any:
    """What a call returns, given the values before it.

    Raises:
        Invalid: As `trace`.
    """
    args = [known.resolved(a) for a in node.args]
    kwargs = {k: known.resolved(v) for k, v in node.kwargs}
    about = info(node.op)
    if about.casts:
        _check_cast(node, args, kwargs)
    if about.fragile:
        _check_fragile(node, args, kwargs)
    try:
        # Here too, not only where it runs: a mutated argument may lead a kernel out of its memory while the variant
        # is made.
        check_call(node.op, args, kwargs)
        # The same draws in each process: what a variant becomes may depend on them.
        with torch.random.fork_rng(devices=()) if about.random else contextlib.nullcontext():
            if about.random:
                torch.default_generator.manual_seed(0)
            value = node.op(*args, **kwargs)
        check_dense(node.op, value)
    # A mutated call may raise anything.
    except Exception as error:
        raise Invalid(f"{about.base}: {first_line(error)}") from None
    for t in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(t, torch.Tensor) and t.numel() > MAX_ELEMENTS:
            raise Invalid(f"{about.base}: more than {MAX_ELEMENTS} elements")
    return value


def _check_cast(node: Node, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Refuse to make integers of floats that these cannot hold: torch leaves open what results.

    Raises:
        Invalid: It is such a cast.
    """
    dtypes = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, torch.dtype)]
    source = args[0] if args else None
    if info(node.op).base == "copy" and len(args) > 1 and isinstance(args[0], torch.Tensor):
        dtypes, source = [args[0].dtype], args[1]
    if not isinstance(source, torch.Tensor) or not source.is_floating_point() or not source.numel():
        return
    for dtype in dtypes:
        if dtype in _INTEGERS:
            low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
            # NaN is in no range.
            # Below `high`: as a float, the greatest int32 and int64 round up to a number that the integer cannot
            # hold.
            if not bool(((source >= low) & (source < high)).all()):
                raise Invalid("a cast of floats that the integer dtype cannot hold")


def _check_fragile(node: Node, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Look at what kernels of the CPU take as places in memory unseen.

    Raises:
        Invalid: They would read or write elsewhere.
    """
    names = [a.name for a in schema_of(node.op).arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    x, base = given.get("input", given.get("self")), info(node.op).base
    if "batch_norm" in base and isinstance(x, torch.Tensor):
        channels = x.shape[1] if x.dim() > 1 else -1
        # The kernel reads a value for each channel, however many there are.
        for name in _PER_CHANNEL:
            t = given.get(name)
            if isinstance(t, torch.Tensor) and t.numel() != channels:
                raise Invalid(f"{base}: {name} has not one value for each channel")
    key, value = given.get("key"), given.get("value")
    if "scaled_dot_product" in base and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor):
        n_keys, n_values = key.shape[-2:-1], value.shape[-2:-1]
        if n_keys != n_values:  # the kernel for the CPU reads as many keys as values (pytorch/pytorch#193728)
            raise Invalid(f"{base}: not as many keys as values")
    labels, classes = given.get("targets"), given.get("log_probs")
    if "ctc_loss" in base and isinstance(labels, torch.Tensor) and isinstance(classes, torch.Tensor):
        # Strided ones give wrong results or end in SIGSEGV on the CPU: see docs/found.md.
        if not labels.is_contiguous() or not classes.is_contiguous():
            raise Invalid(f"{base}: labels that are not contiguous")
        if labels.numel() and not bool(((labels >= 0) & (labels < classes.shape[-1])).all()):
            raise Invalid(f"{base}: labels out of range")


def first_line(error: BaseException) -> str:
    """The first line of an error, shortened."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
