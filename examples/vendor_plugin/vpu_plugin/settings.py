"""Settings of the device: each function makes a context manager, which shadowrun enters around each call."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from shadowrun import sim

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def fast_math(on: bool) -> Iterator[None]:
    """``vpu[fast_math=on]``: products in bfloat16."""
    others = [flaw for flaw in sim.active() if flaw != "matmul-in-bf16"]
    with sim.flaws(*others, *(["matmul-in-bf16"] if on else [])):
        yield


@contextlib.contextmanager
def rounding(mode: str) -> Iterator[None]:
    """``vpu[rounding=reversed]``: sums from the other end."""
    others = [flaw for flaw in sim.active() if flaw != "sum-in-other-order"]
    with sim.flaws(*others, *(["sum-in-other-order"] if mode == "reversed" else [])):
        yield
