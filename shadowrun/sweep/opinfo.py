"""Torch's own database of operators with sample inputs: the one place that imports it.

`torch.testing._internal` is private; it was seen on torch 2.11 to 2.13 and is part of every wheel. It needs the package
expecttest; without that, or where torch has moved it, there is no sweep but ``--from``.
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

from shadowrun.errors import UsageError
from shadowrun.sweep.inputs import Sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["STAYS", "backward_dtypes", "database", "dtypes", "invalid", "samples", "seeded", "without_steps"]

STAYS = {"tensor_split": (1,)}
"""Inputs that torch wants on the CPU whatever the device, by their place; the database makes them there."""
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
    found: dict[str, Any] = {}
    for info in entries:
        name = info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")
        while name in found:
            name += "'"
        found[name] = info
    return found


def dtypes(info: Any) -> frozenset[str]:
    """Dtypes that the operator has on the CPU, says the database: ``float32``."""
    return frozenset(str(dtype).removeprefix("torch.") for dtype in info.supported_dtypes("cpu"))


def backward_dtypes(info: Any) -> frozenset[str]:
    """Dtypes that its gradients have."""
    if not info.supports_autograd:
        return frozenset()
    return frozenset(str(dtype).removeprefix("torch.") for dtype in info.supported_backward_dtypes("cpu"))


def samples(name: str, dtype: str, seed: int, limit: int | None, *, grad: bool) -> list[Sample]:
    """Sample inputs of an entry, on the CPU; the same for the same seed, whatever was made before."""
    info = database()[name]
    seeded(f"{seed} {name} {dtype}")
    # Not `info.sample_inputs`, which seeds by itself, and always the same.
    made = info.sample_inputs_func(info, "cpu", getattr(torch, dtype), grad)
    return [
        Sample(s.input, tuple(s.args), dict(s.kwargs), s.output_process_fn_grad, STAYS.get(info.name, ()))
        for s in itertools.islice(made, limit)
    ]


def invalid(name: str, seed: int, limit: int | None) -> list[Sample]:
    """Inputs that the operator must refuse."""
    info = database()[name]
    if info.error_inputs_func is None:
        return []
    seeded(f"{seed} {name}")
    made = [e.sample_input for e in itertools.islice(info.error_inputs_func(info, "cpu"), limit)]
    return [Sample(s.input, tuple(s.args), dict(s.kwargs)) for s in made]


@contextlib.contextmanager
def without_steps() -> Iterator[None]:
    """On torch's lazy device the database's random operators run the graph by themselves, in the middle of a call.

    A comparison sees the operators of that run, and asks the device, which waits for itself: it hangs. The results are
    read later, and the graph is run then.
    """
    lazy: Any = importlib.import_module("torch._lazy")
    step = lazy.mark_step
    lazy.mark_step = lambda *_, **__: None
    try:
        yield
    finally:
        lazy.mark_step = step


def seeded(text: str) -> None:
    """Set all random streams that samples are drawn from."""
    number = zlib.crc32(text.encode())
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 - the database draws from the global stream
