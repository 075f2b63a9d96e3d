"""Programs as graphs: records the operator calls of a function, as they reach the kernels.

`capture` runs the function once, on the CPU or wherever its tensors are. A dispatch mode sees each call below autograd,
and finds by storage, offset, sizes and strides which tensor is a result of an earlier call. All others are inputs:
they get names, and fills fitted to their values at that time, so that the graph runs on generated values.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from shadowrun.intercept import torch_operators, torchapi
from shadowrun.intercept.plan import OpPlan, make_plan
from shadowrun.intercept.untrusted.op_allowlist import Refused, check_operator
from shadowrun.platforms import torchplatform
from shadowrun.replay.call import argument, draws_random
from shadowrun.studies.zoo import input_values
from shadowrun.studies.zoo.device_independent import ALIASES, NotPortable, portable
from shadowrun.studies.zoo.graph import DEVICE, Fill, Graph, Input, Node, Ref
from shadowrun.studies.zoo.infer_fill import described
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import TracebackType

__all__ = [
    "Named",
    "NotCapturable",
    "Recorder",
    "capture",
    "capture_generated",
    "fill_with_generated",
    "named_tensors",
    "tensors_in",
]

# As many as `graph.MAX_NODES` lets a file have.
MAX_CALLS: Final = 20_000
_DRAWN: Final = "random"
# Exact classes: a subclass may change what an operator does to it.
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_aten: Final = torch.ops.aten


class NotCapturable(Exception):  # noqa: N818 - a reason, caught inside
    """A function that no graph can hold; the message is the reason."""


class Named(NamedTuple):
    """A tensor that a graph takes as input.

    Attributes:
        name: Path: ``layers.0.weight``, ``input_ids``, ``args.1``.
        tensor: The tensor.
        role: As `Input.role`.
        fill: Of its values; None to fit one when it is first used.
    """

    name: str
    tensor: torch.Tensor
    role: str
    fill: Fill | None = None


def capture(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Graph:
    """Record a call of a function as a graph.

    Args:
        function: A module or any callable; it runs once. Parameters and buffers are named as in its ``state_dict``.
        *args: Its arguments; tensors among them are named ``args.0``.
        **kwargs: Its keywords; tensors among them are named by keyword.

    Returns:
        The graph, with the results of the function in the order in which they lie in it. Random operators are inputs:
        their results have fills of the kind that was drawn.

    Raises:
        NotCapturable: It calls something that no graph can hold, such as sparse tensors or operators that do more than
            compute, or none of its results comes from a call.
    """
    return _recorded(named_tensors(function, args, kwargs), function, args, kwargs)


def capture_generated(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Graph:
    """Record a call as `capture` does, on generated values of the kind that was there.

    Parameters, buffers and arguments get these values for good. What depends on values (sizes, numbers that Python
    reads) is then that of the graph, which runs on the same ones.
    """
    return _recorded(fill_with_generated(named_tensors(function, args, kwargs)), function, args, kwargs)


def _recorded(tensors: Iterable[Named], function: Callable[..., Any], args: Any, kwargs: Any) -> Graph:
    recorder = Recorder(tensors)
    with recorder, recorder.paths_of(function if isinstance(function, torch.nn.Module) else None):
        out = function(*args, **kwargs)
    return recorder.graph(tensors_in(out))


def named_tensors(function: Any, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None) -> list[Named]:
    """Parameters and buffers of a module, and tensors among the arguments of its call, with their names."""
    found: list[Named] = []
    if isinstance(function, torch.nn.Module):
        found += [Named(name, t, "parameter") for name, t in function.named_parameters()]
        found += [Named(name, t, "buffer") for name, t in function.named_buffers()]
    found += [Named(name, t, "input") for name, t in _paths("args", tuple(args))]
    for key, value in (kwargs or {}).items():
        found += [Named(name, t, "input") for name, t in _paths(key, value)]
    return found


def fill_with_generated(tensors: Iterable[Named], seed: int = 0) -> list[Named]:
    """Replace values, in place, by generated ones of the same kind: the function then runs as its graph will.

    A tensor with a fill gets values of that. Tensors that no memory of their own holds (expanded ones, views of another
    one in the list) stay as they are.

    Returns:
        The same, with the fills that were used.
    """
    done: set[int] = set()
    filled: list[Named] = []
    with torch.no_grad():
        # The largest first: of a tensor and a view of it, the graph has the former as input.
        for one in sorted(tensors, key=lambda one: -one.tensor.numel()):
            t = one.tensor
            if not _unusable(t) and t.numel() and torchapi.storage_key(t) not in done and _has_own_memory(t):
                done.add(torchapi.storage_key(t))
                form = described(one.name, t, role=one.role)
                form = replace(form, fill=one.fill or form.fill)
                # In place: the module and the caller hold this tensor.
                t.copy_(input_values.make_input(form, seed))
                filled.append(one._replace(fill=form.fill))
            else:
                filled.append(one)
    return filled


def _has_own_memory(t: torch.Tensor) -> bool:
    # A stride of 0: elements share memory, and cannot get values of their own.
    return all(step or n == 1 for step, n in zip(t.stride(), t.shape, strict=True))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in a nested result: lists, tuples, mappings, and objects that hold them as attributes."""
    return (t for _, t in _paths("", value))


def _paths(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    # Objects may refer to themselves.
    if depth > 6:
        return
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, (list, tuple)):
        inside = enumerate(value)
    elif isinstance(value, dict):
        inside = value.items()
    elif hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)) and not callable(value):
        inside = vars(value).items()
    for key, inner in inside:
        yield from _paths(f"{name}.{key}" if name else str(key), inner, depth + 1)


_Key = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


class Recorder(torchapi.DispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records calls; one recording each.

    Args:
        tensors: Inputs that have names. Others are called ``constant.0``, and ``random.0`` if an operator drew them.
        differentiable: Whether the graph is one that autograd differentiates. One with a backward pass in it is not.

    Attributes:
        random: Names of the operators whose results became inputs.
    """

    def __init__(self, tensors: Iterable[Named] = (), *, differentiable: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random: list[str] = []
        self._inputs: list[Input] = []
        self._nodes: list[Node] = []
        self._refs: dict[_Key, Ref] = {}
        self._detached: dict[_Key, Ref] = {}
        # The first tensor seen of each storage, its reference, and the offset from which its views are counted.
        self._of_storage: dict[int, tuple[torch.Tensor, Ref, int]] = {}
        # Nothing is freed while a graph is recorded: another storage would get its key.
        self._kept: list[torch.Tensor] = []
        self._named: dict[int, list[Named]] = {}
        for one in tensors:
            if not _unusable(one.tensor):
                self._named.setdefault(torchapi.storage_key(one.tensor), []).append(one)
        self._input_storages: list[int] = []
        self._written: set[int] = set()
        self._differentiable = differentiable
        self._plans: dict[torch._ops.OpOverload, OpPlan] = {}
        self._broken = ""
        self._path: list[str] = []
        self._n_unnamed = 0
        self._had_onednn = True

    def __enter__(self) -> Any:
        """Record from here on; oneDNN is off, whose operators no other device has."""
        self._had_onednn = torchplatform.mkldnn_enabled()
        torchplatform.set_mkldnn_enabled(False)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Record no more."""
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        torchplatform.set_mkldnn_enabled(self._had_onednn)

    @contextlib.contextmanager
    def paths_of(self, module: torch.nn.Module | None) -> Iterator[None]:
        """Note for each call in which module of this one it was made."""
        hooks: list[Any] = []
        for path, inner in module.named_modules() if module is not None else ():
            hooks.append(inner.register_forward_pre_hook(functools.partial(self._enter, path)))
            # Always: a module that raises must be left as well, or later calls would be named after it.
            hooks.append(inner.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, path: str, *_: Any) -> None:
        self._path.append(path)

    def _leave(self, *_: Any) -> None:
        if self._path:
            self._path.pop()

    def graph(self, outputs: Iterable[torch.Tensor]) -> Graph:
        """What was recorded, as far as these results need it.

        Raises:
            NotCapturable: No graph can hold it.
        """
        if self._broken:
            raise NotCapturable(self._broken)
        found = (self._refs.get(_key(t)) for t in outputs if not _unusable(t))
        refs = tuple(dict.fromkeys(r for r in found if r is not None and r.node >= 0))
        inputs = tuple(
            replace(i, requires_grad=_has_gradient(i) and self._differentiable and storage not in self._written)
            for i, storage in zip(self._inputs, self._input_storages, strict=True)
        )
        # A program computes more than its results need, such as metrics that it only prints.
        graph = Graph(inputs, tuple(self._nodes), refs).without_dead_code()
        if not graph.nodes or not (refs or graph.writes):
            raise NotCapturable("none of its results comes from an operator call")
        return graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            # The program runs on: it must not see that it cannot be captured. The reason is raised at the end, by
            # `graph`.
            self._broken = self._broken or f"it calls the higher-order operator {func}"
            return (torch_operators.plain_kernel(func) or func)(*args, **kwargs)
        if self._broken:
            return func(*args, **kwargs)
        call = None
        try:
            call = self._before(func, args, kwargs)
        except (NotCapturable, NotPortable, Refused) as why:
            self._broken = str(why)
        # The program must not see an exception of ours.
        except Exception as error:
            self._broken = f"shadowrun failed: {type(error).__name__}: {error}"[:300]
        out = func(*args, **kwargs)
        if call is not None:
            try:
                self._after(call, out)
            except (NotCapturable, NotPortable, Refused) as why:
                self._broken = str(why)
            except Exception as error:
                self._broken = f"shadowrun failed: {type(error).__name__}: {error}"[:300]
        return out

    def _before(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """Arguments as those of a node, while their values are what the call gets; None for a call without results."""
        plan = self._plans.get(func)
        if plan is None:
            plan = self._plans[func] = make_plan(func, len(self._plans))
        if plan.returns_number or not (schema_of(func).returns or plan.mutated) or plan.name.startswith(_ASSERTS):
            return None
        if len(self._nodes) >= MAX_CALLS:
            raise NotCapturable(f"it makes more than {MAX_CALLS} calls")
        # Before the call: an operator that writes in place leaves other values in its arguments.
        given = tuple(self._encoded(a) for a in args)
        # A generator is the program's own state; what it draws becomes an input.
        named = {k: self._encoded(v) for k, v in kwargs.items() if not isinstance(v, torch.Generator)}
        written = [t for t in tensors_in([argument(a, args, kwargs) for a in plan.mutated]) if not _unusable(t)]
        self._written.update(torchapi.storage_key(t) for t in written)
        same = None
        # `detach` of a tensor without gradient is the tensor itself; of one with a gradient, it ends differentiation.
        if plan.name in ALIASES or (plan.name in _SAME_MEMORY and not args[0].requires_grad):
            same = given[0]
        return _Call(plan, given, named, written, draws_random(plan, args, kwargs), same, args)

    def _after(self, call: _Call, out: Any) -> None:
        outs = out if isinstance(out, (tuple, list)) else (out,)
        if call.same is not None:
            for t in tensors_in(outs):
                self._know(t, call.same)
        elif call.is_random:
            self._drawn(call, outs)
        else:
            op, args, kwargs = call.plan.func, call.args, call.kwargs
            node, results = portable(op, args, kwargs, self._module, call.real)
            at = self._add(node)
            for k, t in enumerate(outs):
                if isinstance(t, torch.Tensor) and k in results:
                    self._know(t, Ref(at, results[k]), is_alias=call.plan.name in _SAME_MEMORY)

    def _drawn(self, call: _Call, outs: Iterable[Any]) -> None:
        """A random call: what it drew becomes an input."""
        name = call.plan.name
        self.random.append(name)
        if name.startswith("aten::native_dropout"):
            out, mask = outs
            kept = self._input(mask, _DRAWN)
            # Dropout as what it computes: its mask is the drawn part, and the scale follows from its probability.
            # With a probability of 1 nothing is kept, and the scale would be infinite.
            scale = 1.0 / (1.0 - call.args[1]) if call.args[1] < 1 else 0.0
            at = self._add(Node(_aten.mul.Tensor, (call.args[0], kept), (), self._module))
            self._know(out, Ref(self._add(Node(_aten.mul.Tensor, (Ref(at), scale), (), self._module))))
        elif call.written:
            for t in call.written:
                # A copy has a storage of its own: that of the tensor is known already, as what is written to.
                drawn = self._input(t.detach().clone(), _DRAWN)
                at = self._add(Node(_aten.copy_.default, (self._ref(t), drawn), (), self._module))
                self._know(t, Ref(at))
        else:
            for t in tensors_in(outs):
                # The call itself is left out: its result is an input, so that every device gets the same numbers.
                self._input(t, _DRAWN)

    @property
    def _module(self) -> str:
        return self._path[-1] if self._path else ""

    def _add(self, node: Node) -> int:
        check_operator(node.op)
        self._nodes.append(node)
        return len(self._nodes) - 1

    def _know(self, t: torch.Tensor, ref: Ref, *, is_alias: bool = False) -> None:
        why = _unusable(t)
        if why:
            raise NotCapturable(why)
        key = _key(t)
        if not is_alias:
            self._refs[key] = ref
            self._detached.pop(key, None)
        elif self._refs.setdefault(key, ref) is not ref:
            self._detached[key] = ref
        self._of_storage.setdefault(torchapi.storage_key(t), (t, ref, 0))
        self._kept.append(t)

    def _encoded(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._ref(value)
        if isinstance(value, (list, tuple)):
            return tuple(self._encoded(v) for v in value)
        if isinstance(value, torch.device):
            return DEVICE
        if isinstance(value, torch.storage.UntypedStorage):
            raise NotCapturable("it passes a storage to an operator")
        return value

    def _ref(self, t: torch.Tensor) -> Ref:
        """The result that a tensor is, or a new input."""
        why = _unusable(t)
        if why:
            raise NotCapturable(why)
        key = _key(t)
        # Autograd detaches what it saves: only where a tensor has no gradient, the program detached it.
        ref = self._refs.get(key) if t.requires_grad else self._detached.get(key, self._refs.get(key))
        if ref is not None:
            return ref
        storage = torchapi.storage_key(t)
        if storage not in self._of_storage:
            # Of several names on one storage, as tied weights, the largest tensor holds the values of the others.
            base = max(self._named.get(storage, ()), key=lambda one: one.tensor.numel(), default=None)
            self._input(base.tensor if base else t, "constant", base)
        return self._refs.get(_key(t)) or self._view(t, *self._of_storage[storage])

    def _view(self, t: torch.Tensor, base: torch.Tensor, ref: Ref, shift: int) -> Ref:
        """A tensor on the memory of a known one, which no operator made: `.data` of a view, an argument twice."""
        # `as_strided`, by which views are rebuilt, keeps the dtype.
        if t.dtype is not base.dtype:
            raise NotCapturable(f"memory of {base.dtype} is used as {t.dtype}")
        place = (tuple(t.shape), tuple(t.stride()), int(t.storage_offset()) - shift)
        at = self._add(Node(_aten.as_strided.default, (ref, *place), (), self._module))
        self._know(t, Ref(at))
        return Ref(at)

    def _input(self, t: torch.Tensor, kind: str, named: Named | None = None) -> Ref:
        name, role = (named.name, named.role) if named else (f"{kind}.{self._n_unnamed}", "input")
        self._n_unnamed += named is None
        ref = Ref(-1 - len(self._inputs))
        wanted = named is not None or t.requires_grad
        new = described(name, t, role=role, requires_grad=wanted, strides=kind != _DRAWN)
        self._inputs.append(replace(new, fill=named.fill) if named and named.fill else new)
        self._input_storages.append(torchapi.storage_key(t))
        self._of_storage[torchapi.storage_key(t)] = (t, ref, int(t.storage_offset()))
        self._know(t, ref)
        return ref


class _Call(NamedTuple):
    """A call before it ran."""

    plan: OpPlan
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: list[torch.Tensor]
    is_random: bool
    same: Ref | None
    """The argument that its result is, where it leaves no call."""
    real: tuple[Any, ...]


_SAME_MEMORY: Final = ("aten::detach", "aten::alias")
# They only raise, name a stretch of a profile, or return a choice of the device's.
_ASSERTS: Final = (
    "profiler::",
    "aten::_assert",
    "aten::_functional_assert",
    "aten::sym_constrain",
    "aten::_fused_sdp_choice",
)


def _has_gradient(described: Input) -> bool:
    is_wanted = described.requires_grad and described.role != "buffer"
    return is_wanted and (described.dtype.is_floating_point or described.dtype.is_complex)


def _key(t: torch.Tensor) -> _Key:
    # All that decides which elements a tensor has.
    return torchapi.storage_key(t), int(t.storage_offset()), tuple(t.shape), tuple(t.stride()), t.dtype


def _unusable(t: torch.Tensor) -> str:
    """Why a graph cannot have a tensor; empty where it can."""
    if type(t) not in _PLAIN:
        return f"tensors of the class {type(t).__name__}"
    if t.is_nested or t.layout is not torch.strided or t.is_quantized:
        return f"tensors that are {'nested' if t.is_nested else 'quantized' if t.is_quantized else t.layout}"
    if t.is_meta:
        return "tensors without values (meta)"
    return "tensors with a lazy conjugation or negation" if t.is_neg() else ""
