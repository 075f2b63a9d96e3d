"""Torch's own modules with the inputs of torch's module database, as programs."""

from __future__ import annotations

import importlib
import itertools
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.errors import UsageError
from shadowrun.studies.sweep.opinfo import seeded
from shadowrun.studies.zoo.capture import capture_generated
from shadowrun.studies.zoo.sources.source import Collected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["SOURCE", "collect"]

SOURCE: Final = "modules"
_MODULE: Final = "torch.testing._internal.common_modules"
# Of one module; the database has up to 61.
_MAX_INPUTS: Final = 40
# One operator for all of it, where no gradient is wanted and the batch comes first: the database has no such input.
_FUSED: Final = "nn.TransformerEncoderLayer"


def collect(patterns: Callable[[str], bool], on_progress: Callable[..., None]) -> Collected:
    """Programs of the modules whose names fit.

    Args:
        patterns: Whether a name such as ``nn.Linear`` is wanted.
        on_progress: Called with done, total and name.

    Raises:
        UsageError: Torch's database cannot be imported.
    """
    found = Collected(SOURCE)
    infos = [info for info in _database() if patterns(info.name)]
    # The database seeds torch's global generator.
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, info in enumerate(infos):
            on_progress(number, len(infos), info.name)
            for training in (True, False) if info.train_and_eval_differ else (False,):
                inputs = found.try_step("inputs of the module", _name(info, training), lambda: _inputs(info, training))  # noqa: B023
                for k, one in enumerate(inputs or ()):
                    name = f"{_name(info, training)} {k}"
                    graph = found.try_step("captured", name, lambda: _captured(info, one, training))  # noqa: B023
                    if graph is not None:
                        found.add(name, graph)
        if patterns(_FUSED):
            for options in itertools.product(("relu", "gelu"), (False, True)):
                name = f"{_FUSED} {options[0]}{' norm first' if options[1] else ''} without gradients"
                graph = found.try_step("captured", name, lambda: _fused(*options))  # noqa: B023
                if graph is not None:
                    found.add(name, graph)
    return found


def _database() -> Sequence[Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return list(importlib.import_module(_MODULE).module_db)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"Torch's own database of modules cannot be used ({error}). It needs a package besides torch: "
            "pip install 'shadowrun[sweep]'. Other sources do without it.",
            slug="sweep-database",
        ) from None


def _name(info: Any, training: bool) -> str:
    return f"{info.name}{' train' if training else ''}"


def _inputs(info: Any, training: bool) -> list[Any]:
    seeded(info.name)
    made = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=False, training=training)
    return list(made)[:_MAX_INPUTS]


def _fused(activation: str, norm_first: bool) -> Any:
    seeded(_FUSED)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, activation, batch_first=True, norm_first=norm_first).eval()
    # Not the module itself: what is captured of a module has hooks, and with these it calls no fused operator.
    with torch.no_grad():
        return capture_generated(layer.forward, torch.linspace(-1, 1, 48).reshape(2, 3, 8))


def _captured(info: Any, one: Any, training: bool) -> Any:
    given = one.constructor_input
    module = info.module_cls(*given.args, **given.kwargs).train(training)
    args, kwargs = one.forward_input.args, one.forward_input.kwargs
    if info.is_lazy:
        module(*args, **kwargs)  # its first call makes its parameters
    return capture_generated(module, *args, **kwargs)
