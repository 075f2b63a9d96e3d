"""All flaws of the simulated accelerator, a file for each kind, and the named sets of them. Imports torch."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from shadowrun.sim.catalogue import exceptional, fatal, form, kernel, memory, precision, support, training

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shadowrun.sim.flaw import Flaw

__all__ = ["CATALOGUE", "FATAL", "PRESETS"]

_KINDS = (support, exceptional, precision, form, kernel, training, memory)

CATALOGUE: Mapping[str, Flaw] = MappingProxyType({flaw.name: flaw for kind in _KINDS for flaw in kind.flaw.flaws})
"""All flaws by name, but for those in `FATAL`."""

FATAL: Mapping[str, Flaw] = MappingProxyType({flaw.name: flaw for flaw in fatal.flaw.flaws})
"""Flaws that end or block the process; they can be switched on like the others."""


def _of_kind(kind: str) -> tuple[str, ...]:
    return tuple(flaw.name for flaw in CATALOGUE.values() if flaw.kind == kind)


PRESETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "clean": (),
        # What a convolutional network and a small transformer meet in training on a device in its first year.
        "young": (
            "missing-lerp",
            "missing-max-pool-backward",
            "nll-loss-falls-back-silently",
            "encoder-layer-falls-back",
            "vector-norm-falls-back",
            "matmul-in-bf16",
            "sum-in-other-order",
            "softmax-error",
            "gelu-by-tanh",
            "layer-norm-block-edge",
            "relu-backward-leaks",
            "biased-running-variance",
            "embedding-loses-duplicates",
            "slow-max-pool",
        ),
        "support": _of_kind("support"),
        "exceptional": _of_kind("exceptional"),
        "low-precision": ("matmul-in-bf16", "matmul-in-tf32", "convolution-in-tf32", "matmul-accumulates-in-half"),
        "rounding": ("sum-in-other-order", "tanh-one-ulp-off"),
    }
)
"""Named sets of flaws."""
