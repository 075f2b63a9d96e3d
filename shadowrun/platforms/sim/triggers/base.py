"""The table of triggers and what they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["TRIGGERS", "randn", "trigger"]

Trigger = Callable[[str], None]

TRIGGERS: dict[str, Trigger] = {}
"""Triggers by name."""


def trigger(name: str) -> Callable[[Callable[[str], Any]], Trigger]:
    """Registers a trigger."""

    def register(function: Callable[[str], Any]) -> Trigger:
        def run(device: str) -> None:
            function(device)

        run.__doc__ = function.__doc__
        TRIGGERS[name] = run
        return run

    return register


def randn(device: str, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers that are the same on every device and move no random stream."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(device)
