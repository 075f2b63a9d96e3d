"""Models for images of the installed torchvision or timm, without weights: a forward pass, and a training step.

These models cannot be scaled down by a configuration: the small ones are taken, on small images. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.errors import UsageError
from shadowrun.studies.zoo.sources.architectures import (
    MAX_PARAMETERS,
    MODEL,
    Maker,
    backward_runs,
    made_by_workers,
    serve_models,
)
from shadowrun.studies.zoo.sources.source import Collected, LeftOut

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.studies.isolation.worker_side import Channel

__all__ = ["PACKAGES", "collect", "worker"]

PACKAGES: Final = ("torchvision", "timm")
_BATCH: Final = 2
_CLASSES: Final = 16
# Of the images: the smallest that works is taken, since some models divide it many times, or have one size.
_SIZES: Final = (32, 64, 96, 128, 224, 299, 384)


def collect(
    package: str, wanted: Callable[[str], bool], on_progress: Callable[..., None], *, n_workers: int = 1
) -> Collected:
    """Programs of the models whose names fit.

    Args:
        package: One of `PACKAGES`.
        wanted: Whether a model such as ``resnet18`` is.
        on_progress: Called with done, total and name.
        n_workers: Processes.

    Raises:
        UsageError: The package is not installed.
        PlatformError: The system has no processes that inherit pipes.
    """
    found = Collected(package)
    names = [name for name in _names(package) if wanted(name)]
    made_by_workers(f"{__name__}:worker", {"package": package}, names, found, on_progress, n_workers)
    return found


def _names(package: str) -> list[str]:
    try:
        if package == "timm":
            return sorted(importlib.import_module("timm").list_models())
        models = importlib.import_module("torchvision.models")
        # Of its own module: those for detection and segmentation would load weights of their backbone.
        return sorted(models.list_models(module=models))
    except (ImportError, RuntimeError, AttributeError) as error:
        raise UsageError(
            f"{package} cannot be imported ({error}): pip install {package}, of the version for this torch. Other "
            "sources do without it.",
            slug="zoo-source",
        ) from None


def worker(_: dict[str, Any], channel: Channel) -> Callable[[dict[str, Any]], None]:
    """The function of a worker process: makes the programs of one model."""
    return serve_models(channel, lambda: _make)


def _make(maker: Maker, line: dict[str, Any]) -> None:
    name = line["name"]
    model = _built(line["package"], name)
    given = _images(model)
    maker.count_step(MODEL, name)
    maker.programs(f"{name}/{type(model).__name__}", model, given)


def _built(package: str, name: str) -> Any:
    if package == "timm":
        make = importlib.import_module("timm").create_model
        options: dict[str, Any] = {"pretrained": False, "num_classes": _CLASSES}
    else:
        make = importlib.import_module("torchvision.models").get_model
        options = {"weights": None, "num_classes": _CLASSES}
    # Counted first without memory: some are far too large to be made here.
    with torch.device("meta"):
        n = _n_parameters(make, name, options)
    if n > MAX_PARAMETERS:
        raise LeftOut(f"it has {n:,} parameters, more than {MAX_PARAMETERS:,}")
    torch.manual_seed(0)
    return make(name, **options).train()


def _n_parameters(make: Callable[..., Any], name: str, options: dict[str, Any]) -> int:
    try:
        return sum(p.numel() for p in make(name, **options).parameters())
    except (RuntimeError, NotImplementedError, AttributeError):
        return 0  # its constructor reads values: it is made, and its process has a limit


def _images(model: Any) -> dict[str, Any]:
    """Images of the smallest size with which forward and backward pass run.

    Raises:
        LeftOut: There is none; the reason is that of the largest.
    """
    name = next(iter(inspect.signature(model.forward).parameters))
    why: Exception = LeftOut("no images")
    for size in _SIZES:
        given = {name: torch.randn(_BATCH, 3, size, size)}
        try:
            backward_runs(model, given)
        except Exception as error:
            why = error
        else:
            return given
    raise why
