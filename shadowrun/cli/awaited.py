"""A comparison with a device that the program itself registers: it begins when the device is there."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from shadowrun.errors import PlatformError
from shadowrun.platforms import torchplatform

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from shadowrun.comparison import Comparison

__all__ = ["Awaited"]


class Awaited:
    """A ``with`` block in which the program runs.

    Args:
        device: Type of the device that is awaited.
        make: Makes the comparison, once torch knows the device.

    Attributes:
        comparison: None until the device came.
    """

    def __init__(self, device: str, make: Callable[[], Comparison]) -> None:
        self._device = device
        self._make = make
        self._watching = contextlib.ExitStack()
        self._failure: PlatformError | None = None
        self.comparison: Comparison | None = None

    def __enter__(self) -> None:
        self._watching.enter_context(torchplatform.watching_registrations(self._look))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watching.close()
        if self.comparison is not None:
            self.comparison.__exit__(kind, error, trace)

    def required(self) -> Comparison:
        """The comparison that began.

        Raises:
            PlatformError: The program has ended, and the device never came.
        """
        if self.comparison is not None:
            return self.comparison
        why = f" ({self._failure})" if self._failure is not None else ""
        raise PlatformError(
            f"Device {self._device!r} was awaited, since the program names it, and never came{why}: the program "
            "registers it by torch.utils.rename_privateuse1_backend and torch._register_device_module, or a module "
            "that --import names does. Nothing was compared.",
            slug="unknown-device",
        )

    def _look(self) -> None:
        """Torch got a new device, or a device its module."""
        if self.comparison is not None or torchplatform.private_device_name() != self._device:
            return
        try:
            comparison = self._make()
        except PlatformError as error:  # its module is still to come
            self._failure = error
            return
        self._watching.close()  # a comparison registers kernels of its own
        self.comparison = comparison.start()
