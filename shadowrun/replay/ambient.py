"""What operators of the CPU depend on besides their inputs, for a call that runs on another thread than its own."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shadowrun.platforms import torchplatform

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Ambient"]


@dataclass(slots=True)
class Ambient:
    """The modes of a thread, and settings of the process.

    Attributes:
        grad, inference: Modes of the calling thread.
        default_dtype, deterministic: Settings of the process.
    """

    grad: bool
    inference: bool
    default_dtype: torch.dtype
    deterministic: tuple[bool, bool]

    @staticmethod
    def now() -> Ambient:
        """As it is on this thread."""
        return Ambient(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torchplatform.deterministic_state(),
        )

    def still_holds(self) -> bool:
        """Whether the settings of the process are the same; those of the thread are put in place by `entered`."""
        return (
            self.default_dtype is torch.get_default_dtype()
            and self.deterministic == torchplatform.deterministic_state()
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """As inside a dispatch mode's handler on the calling thread."""
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            stack.enter_context(torchplatform.below_autograd())
            yield
