"""OpInfo, torch's test database of operators with sample inputs. Only this module imports it.

`torch.testing._internal` is private; torch 2.11 to 2.13 have it in every wheel. It needs the package expecttest. If it
cannot be imported, only ``shadowrun sweep --from`` works.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import random
import warnings
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shadowrun.errors import UsageError
from shadowrun.intercept.plan import OpKind, make_plan
from shadowrun.studies.sweep.inputs import Sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = [
    "STAYS",
    "backward_dtypes",
    "database",
    "dtypes",
    "invalid",
    "operators_called",
    "samples",
    "seeded",
    "without_steps",
]

STAYS = {"tensor_split": (1,)}
"""Indices of inputs that must be on the CPU for any device; the database makes them there."""
_MAX_SAMPLES = 25
# float32 first: with it the operators of the backward pass are called too.
_DTYPES = ("float32", "int64", "bool", "complex64")
# Copies occur in many functions, and a user who selects a function does not mean them.
_COPIES = ("aten::clone", "aten::copy_", "aten::_to_copy", "aten::contiguous")
_MODULE = "torch.testing._internal.common_methods_invocations"


@functools.cache
def database() -> Mapping[str, Any]:
    """Entries by name and variant: ``linalg.norm``, ``linalg.norm.subgradients_at_zero``.

    Raises:
        UsageError: It cannot be imported.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            entries = importlib.import_module(_MODULE).op_db
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"Torch's own database of operators cannot be used ({error}). It needs a package besides torch: "
            "pip install 'shadowrun[sweep]'. `--from run.shadowrun` sweeps recorded calls without it.",
            slug="sweep-database",
        ) from None
    by_name: dict[str, Any] = {}
    for info in entries:
        name = info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")
        while name in by_name:  # two entries may have the same name and variant
            name += "'"
        by_name[name] = info
    return by_name


def dtypes(info: Any) -> frozenset[str]:
    """Dtypes of the operator on the CPU by the database: ``float32``."""
    return frozenset(str(dtype).removeprefix("torch.") for dtype in info.supported_dtypes("cpu"))


def backward_dtypes(info: Any) -> frozenset[str]:
    """Dtypes for which it has gradients on the CPU."""
    if not info.supports_autograd:
        return frozenset()
    return frozenset(str(dtype).removeprefix("torch.") for dtype in info.supported_backward_dtypes("cpu"))


def samples(name: str, dtype: str, seed: int, limit: int | None, *, grad: bool) -> list[Sample]:
    """Sample inputs of an entry on the CPU; they depend on the seed only, not on earlier calls."""
    info = database()[name]
    seeded(f"{seed} {name} {dtype}")
    # Not `info.sample_inputs`, which sets a fixed seed.
    # On the CPU, whatever the target: a sample that the device itself made could have its faults.
    made = info.sample_inputs_func(info, "cpu", getattr(torch, dtype), grad)
    return [
        Sample(s.input, tuple(s.args), dict(s.kwargs), s.output_process_fn_grad, STAYS.get(info.name, ()))
        for s in itertools.islice(made, limit)
    ]


def invalid(name: str, seed: int, limit: int | None) -> list[Sample]:
    """Invalid inputs, for which the operator must raise."""
    info = database()[name]
    if info.error_inputs_func is None:
        return []
    seeded(f"{seed} {name}")
    made = [e.sample_input for e in itertools.islice(info.error_inputs_func(info, "cpu"), limit)]
    return [Sample(s.input, tuple(s.args), dict(s.kwargs)) for s in made]


@contextlib.contextmanager
def without_steps() -> Iterator[None]:
    """Disable `torch._lazy.mark_step`, which some of the database's random functions call.

    On the lazy device it runs the graph in the middle of a call. A comparison intercepts the operators of that run and
    reads results from the device, which waits for itself: a deadlock. Without it, the graph runs when results are read.
    """
    lazy: Any = importlib.import_module("torch._lazy")
    step = lazy.mark_step
    lazy.mark_step = lambda *_, **__: None
    try:
        yield
    finally:
        lazy.mark_step = step


def seeded(text: str) -> None:
    """Seed all random generators that samples are drawn from."""
    # Of the name, not of a counter: a case that is run alone, by its script, gets the same values.
    number = zlib.crc32(text.encode())
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - the database draws from the global stream


class _OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[str, None] = {}
        self.backward = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        name = func.name()
        # Every backward pass calls `ones_like` and sums: they do not belong to this function.
        if make_plan(func, 0).kind is not OpKind.NO_VALUES and (not self.backward or "backward" in name):
            self.names[name] = None
        return func(*args, **(kwargs or {}))


def operators_called(name: str) -> tuple[str, ...]:
    """Operators that a function calls, forward and backward, on its sample inputs; empty if there is no such function.

    Args:
        name: ``matmul``, ``nn.functional.linear``, or the last part of such a name.

    Raises:
        UsageError: Torch's database cannot be used.
    """
    entries_by_name = database()
    entries = [entry for entry, info in entries_by_name.items() if name in (entry, info.name, info.aten_name)]
    entries = entries or [entry for entry, info in entries_by_name.items() if info.name.rpartition(".")[2] == name]
    recorder = _OperatorRecorder()
    # The samples seed torch's global generator, which here is the user's.
    with torch.random.fork_rng(devices=()):
        for entry in entries:
            info = entries_by_name[entry]
            has = dtypes(info)
            dtype = next((d for d in _DTYPES if d in has), None)
            if dtype is None:
                continue
            grad = dtype in backward_dtypes(info)
            with contextlib.suppress(Exception):  # an invalid sample shows no operators
                for sample in samples(entry, dtype, 0, _MAX_SAMPLES, grad=grad):
                    recorder.backward = False
                    with recorder:
                        out = info.op(sample.input, *sample.args, **(sample.kwargs or {}))
                    if isinstance(out, torch.Tensor) and out.requires_grad:
                        summed = out.abs().sum() if out.is_complex() else out.sum()
                        recorder.backward = True
                        with recorder:
                            summed.backward()  # type: ignore[no-untyped-call]
    return tuple(n for n in recorder.names if n.rpartition(".")[0] not in _COPIES and n not in _COPIES)
