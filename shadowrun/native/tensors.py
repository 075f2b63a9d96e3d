"""The compiled functions that look at tensors; None where there is no compiled part, or torch lacks what it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shadowrun.native import core

if TYPE_CHECKING:
    from collections.abc import Callable

    Equal = Callable[[Any, Any], bool]
    Key = Callable[[int, torch.device, tuple[str, str, str], tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]

__all__ = ["context_key", "plainly_equal"]

_EXACT = frozenset({str, torch.dtype, torch.device, torch.layout, torch.memory_format})

plainly_equal: Equal | None = None
"""See `shadowrun.numerics.bits.plainly_equal`. What is no tensor is not equal."""

context_key: Key | None = None
"""See `shadowrun.replay.recorder.Recorder.context`."""

if core is not None and core.setup(torch.Tensor, torch.nn.Parameter, _EXACT):
    plainly_equal, context_key = core.plainly_equal, core.context_key
