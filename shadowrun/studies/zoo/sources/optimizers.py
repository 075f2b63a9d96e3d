"""Steps of torch's own optimizers as programs: with operators on lists of tensors, and parameter by parameter."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.studies.zoo.capture import capture_generated
from shadowrun.studies.zoo.sources.source import Collected

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.studies.zoo.graph import Graph

__all__ = ["SOURCE", "collect"]

SOURCE: Final = "optimizers"
_SHAPES: Final = ((4, 3), (5,), (2, 2, 3))
# The first step of many optimizers is another one, since their averages are 0.
_STEPS: Final = 2
_OPTIONS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"weight_decay": 0.1},
    {"maximize": True},
    {"amsgrad": True},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "centered": True},
    {"decoupled_weight_decay": True, "weight_decay": 0.1},
)


def collect(patterns: Callable[[str], bool], on_progress: Callable[..., None]) -> Collected:
    """Programs of the optimizers whose names fit.

    Args:
        patterns: Whether a name such as ``optim.AdamW`` is wanted.
        on_progress: Called with done, total and name.
    """
    found = Collected(SOURCE)
    wanted = [(name, cls) for name, cls in _optimizers() if patterns(name)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, (name, cls) in enumerate(wanted):
            on_progress(number, len(wanted), name)
            for options in _options_of(cls):
                full = f"{name} {', '.join(f'{k}={v}' for k, v in options.items())}"
                graph = found.try_step("captured", full, functools.partial(_captured, cls, options))
                if graph is not None:
                    found.add(full, graph)
    return found


def _optimizers() -> Iterator[tuple[str, Any]]:
    """Those that can do all parameters at once; others, such as LBFGS, call a function of the user's."""
    for name, cls in sorted(vars(torch.optim).items()):
        if isinstance(cls, type) and "foreach" in inspect.signature(cls).parameters:
            yield f"optim.{name}", cls


def _options_of(cls: Any) -> Iterator[dict[str, Any]]:
    for options in _OPTIONS:
        if options.keys() <= inspect.signature(cls).parameters.keys():
            yield from ({**options, "foreach": foreach} for foreach in (True, False))


def _captured(cls: Any, options: dict[str, Any]) -> Graph:
    def steps(*tensors: torch.Tensor) -> list[torch.Tensor]:
        parameters = [t.clone() for t in tensors[: len(_SHAPES)]]
        optimizer = cls(parameters, **options)
        for k in range(_STEPS):
            for p, gradient in zip(parameters, tensors[len(_SHAPES) :], strict=True):
                p.grad = gradient * (k + 1)
            optimizer.step()
        return parameters

    # Not random: the values of a program are of the kind that was there.
    return capture_generated(steps, *(torch.linspace(-1, 1, math.prod(s)).reshape(s) for s in (*_SHAPES, *_SHAPES)))
