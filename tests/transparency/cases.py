"""torch's own test databases as small programs: each case is prepared alone, and run plainly or observed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.testing._internal import common_methods_invocations as invocations

from shadowrun.operators.facts import facts
from shadowrun.replay.copies import move

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DTYPES = ("float32", "bfloat16", "float16", "complex64", "int64", "bool")
DATABASES = ("op", "module", "optim", "hop", "custom", "foreach")


@dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
        label: Which sample, and in which of the operator's spellings.
        prepare: Makes fresh inputs, and a function that runs the program on them and fills a dictionary with all
            that must not change.
        form_only: Its values mean nothing.
        unstable: Two runs may differ, says the plan's table.
    """

    label: str
    prepare: Callable[[], tuple[Any, Callable[[dict[str, Any]], None]]]
    form_only: bool = False
    unstable: bool = False


def seed() -> None:
    """The same random streams for everything that draws."""
    # Not `torch.manual_seed`, which keeps a traceback for each kind of device that is not there: 1 ms.
    torch.default_generator.manual_seed(0)
    for device in used_devices():
        device.manual_seed_all(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (the global stream is what programs share)


def used_devices() -> list[Any]:
    """The modules of the accelerators that this process uses, such as `torch.cuda`."""
    used: list[Any] = [torch.cuda] if torch.cuda.is_initialized() else []
    return used + ([torch.sim] if hasattr(torch, "sim") else [])


def operators(db: str, dtype: str) -> dict[str, Any]:
    """Entries of a database by a unique name, those that support the dtype."""
    wanted = getattr(torch, dtype)
    found: dict[str, Any] = {}
    for info in _entries(db):
        supported = info.supported_dtypes("cpu") if db != "optim" else (torch.float32, torch.bfloat16)
        if wanted in supported:
            variant = getattr(info, "variant_test_name", "")
            name = info.name + (f".{variant}" if variant else "")
            while name in found:
                name += "'"
            found[name] = info
    return found


def _entries(db: str) -> list[Any]:
    if db == "op":
        return invocations.op_db
    if db == "module":
        from torch.testing._internal.common_modules import module_db

        return module_db
    if db == "optim":
        from torch.testing._internal.common_optimizers import optim_db

        return optim_db
    if db == "hop":
        from torch.testing._internal.hop_db import hop_db

        return hop_db
    if db == "custom":
        from torch.testing._internal.custom_op_db import custom_op_db

        return custom_op_db
    return [info for name in dir(invocations) if name.startswith("foreach_") and name.endswith("_op_db")
            for info in getattr(invocations, name)]  # fmt: skip


def cases(db: str, info: Any, dtype: str, samples: int | None, device: str = "cpu") -> Iterator[Case]:
    """Programs of one entry, the first `samples` of them (and of their spellings), or all."""
    wanted = getattr(torch, dtype)
    make = {"module": _module_cases, "optim": _optim_cases}.get(db, _operator_cases)
    yield from make(info, wanted, samples, device)


def _operator_cases(info: Any, dtype: torch.dtype, samples: int | None, device: str) -> Iterator[Case]:
    differentiable = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    name = getattr(info, "aten_name", "")
    marks = (facts(name).uninitialised, bool(facts(name).unstable))
    seed()
    for i, sample in enumerate(islice(info.sample_inputs("cpu", dtype, requires_grad=differentiable), samples)):
        process = sample.output_process_fn_grad
        yield Case(f"{i}", _call(info.op, sample, device, process), *marks)
        if samples is not None and i:
            continue
        in_place = getattr(info, "inplace_variant", None)
        if in_place is not None and not isinstance(sample.input, (list, tuple)):
            yield Case(f"{i} in place", _call(_on_clone(in_place), sample, device, process), *marks)
        elif in_place is not None:
            yield Case(f"{i} in place", _call(in_place, sample, device, process, frozen=True), *marks)
        if info.supports_out:
            yield Case(f"{i} out=", _call_out(info.op, sample, device, lambda t: t.clone()), *marks)
            yield Case(f"{i} out=, resized", _call_out(info.op, sample, device, lambda t: t.clone().resize_(0)), *marks)


def _on_clone(in_place: Callable[..., Any]) -> Callable[..., Any]:
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        return in_place(x.clone() if isinstance(x, torch.Tensor) else x, *args, **kwargs)

    return call


def _call(fn: Any, sample: Any, device: str, process: Any, frozen: bool = False) -> Any:
    def prepare() -> Any:
        inputs = Copier(device, frozen=frozen)((sample.input, sample.args, sample.kwargs))

        def run(state: dict[str, Any]) -> None:
            x, args, kwargs = inputs
            state["out"] = out = fn(x, *args, **kwargs)
            backward(process(out))

        return inputs, run

    return prepare


def _call_out(fn: Any, sample: Any, device: str, make_out: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def prepare() -> Any:
        inputs = Copier(device, frozen=True)((sample.input, sample.args, sample.kwargs))
        x, args, kwargs = inputs
        seed()
        expected = fn(x, *args, **kwargs)
        outs = [make_out(torch.zeros_like(t)) for t in tensors_in(expected)]
        given = outs[0] if isinstance(expected, torch.Tensor) else tuple(outs)

        def run(state: dict[str, Any]) -> None:
            state["given"] = given
            state["out"] = fn(x, *args, **kwargs, out=given)

        return inputs, run

    return prepare


def backward(out: Any) -> None:
    """Gradients of all that requires one, from random gradients."""
    outs = [t for t in tensors_in(out) if t.requires_grad and (t.is_floating_point() or t.is_complex())]
    if not outs:
        return
    grads = [
        torch.randn(t.shape, dtype=t.dtype, device=t.device)
        if t.layout is torch.strided and not t.is_nested and not is_subclass(t)
        else torch.ones_like(t)
        for t in outs
    ]
    torch.autograd.backward(outs, grads)


def _module_cases(info: Any, dtype: torch.dtype, samples: int | None, device: str) -> Iterator[Case]:
    for training in (True, False):
        seed()
        inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
        for i, given in enumerate(islice(inputs, samples)):
            if given.forward_input is not None:
                mode = "train" if training else "eval"
                yield Case(f"{i} {mode}", _module_call(info.module_cls, given, dtype, device, training))


def _module_call(module_class: Any, given: Any, dtype: torch.dtype, device: str, training: bool) -> Any:
    def prepare() -> Any:
        built, called = given.constructor_input, given.forward_input
        inputs = Copier(device)((built.args, built.kwargs, called.args, called.kwargs))

        def run(state: dict[str, Any]) -> None:
            options = dict(inputs[1])
            if "device" in options:
                options["device"] = device
            module = module_class(*inputs[0], **options).to(device=device, dtype=dtype).train(training)
            state["out"] = out = module(*inputs[2], **inputs[3])
            backward(out)
            state["grads"] = [p.grad for p in module.parameters()]
            state["after"] = module.state_dict()

        return inputs, run

    return prepare


def _optim_cases(info: Any, dtype: torch.dtype, samples: int | None, device: str) -> Iterator[Case]:
    from torch.testing._internal.common_optimizers import _get_optim_inputs_including_global_cliquey_kwargs as all_of

    # What is asked for a GPU too: `foreach`, and `capturable`, which raises on the CPU and works on other devices.
    given = {repr(g.kwargs): g for kind in ("cuda", "cpu") for g in all_of(kind, dtype, info)}
    for i, g in enumerate(islice(given.values(), samples)):
        yield Case(f"{i} {g.desc}", _training(info, g, dtype, device))


def _training(info: Any, given: Any, dtype: torch.dtype, device: str) -> Any:
    def prepare() -> Any:
        seed()
        shapes = ((4, 3), (5,), (2, 3, 2)) if info.name != "Muon" else ((4, 3), (5, 2))
        params = [nn.Parameter(torch.randn(s, dtype=dtype).to(device)) for s in shapes]
        grads = [[torch.randn(s, dtype=dtype).to(device) for s in shapes] for _ in range(3)]
        if info.only_supports_sparse_grads:
            grads = [[g.to_sparse(1) for g in step] for step in grads]

        def run(state: dict[str, Any]) -> None:
            state["params"] = params
            optimizer = info.optim_cls(params, **Copier()(given.kwargs))
            for step in grads:
                for p, g in zip(params, step, strict=True):
                    p.grad = g

                optimizer.step(lambda: sum(p.detach().sum() for p in params))
            state["state"] = optimizer.state_dict()

        return params, run

    return prepare


class Copier:
    """Copies nested arguments: memory, layout and aliasing as they are, tensors as leaves."""

    def __init__(self, device: str = "cpu", *, frozen: bool = False) -> None:
        self._device = torch.device(device)
        self._frozen = frozen
        self._tensors: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = self._tensor(value)
            return self._tensors[id(value)]
        if isinstance(value, torch.Generator):
            copy = torch.Generator(value.device)
            copy.set_state(value.get_state())
            return copy
        if type(value) in (list, tuple):
            return type(value)(self(v) for v in value)
        if type(value) is dict:
            return {k: self(v) for k, v in value.items()}
        return value

    def _tensor(self, t: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if t.layout is torch.strided and not t.is_nested and not t.is_quantized and not is_subclass(t):
                copy = self._strided(t.detach())
            else:
                copy = t.detach().clone()
            if self._device.type != "cpu":
                copy = move(copy, self._device)
        needs = t.requires_grad and not self._frozen
        if isinstance(t, nn.Parameter):
            return nn.Parameter(copy, requires_grad=needs)
        return copy.requires_grad_(needs)

    def _strided(self, t: torch.Tensor) -> torch.Tensor:
        if t._is_zerotensor():
            return t.clone()
        storage = t.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage.clone()
        copy = torch.empty(0, dtype=t.dtype)
        copy.set_(self._storages[storage._cdata], t.storage_offset(), t.shape, t.stride())
        if t.is_conj():
            copy = copy.conj()
        return copy._neg_view() if t.is_neg() else copy


def is_subclass(t: torch.Tensor) -> bool:
    """Whether it dispatches for itself."""
    return type(t) not in (torch.Tensor, nn.Parameter)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from tensors_in(v)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors_in(v)
