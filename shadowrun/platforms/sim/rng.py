"""The device's own random stream: draws move it, never the CPU's."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["GENERATOR", "global_stream"]

GENERATOR = torch.Generator(device="cpu")
"""Draws for operators that take a generator; its state is the device's RNG state."""

_LOCK = threading.RLock()


@contextmanager
def global_stream() -> Iterator[None]:
    """Puts the device's stream in the place of the CPU's, for operators that take no generator."""
    default = torch.default_generator
    with _LOCK:
        saved = default.get_state()
        default.set_state(GENERATOR.get_state())
        try:
            yield
        finally:
            GENERATOR.set_state(default.get_state())
            default.set_state(saved)
