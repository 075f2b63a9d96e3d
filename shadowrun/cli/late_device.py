"""A comparison with a device that the program itself registers: it starts when the device is registered."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from shadowrun.errors import PlatformError
from shadowrun.platforms import torchplatform

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from shadowrun.comparison import Comparison

__all__ = ["LateDeviceComparison"]


class LateDeviceComparison:
    """A ``with`` block in which the program runs; the comparison starts when the program registers its device.

    Args:
        device: Type of the device that the program registers.
        make: Creates the comparison when torch knows the device.

    Attributes:
        comparison: None until the device is registered.
    """

    def __init__(self, device: str, make: Callable[[], Comparison]) -> None:
        self._device = device
        self._make = make
        self._watching = contextlib.ExitStack()
        self._failure: PlatformError | None = None
        self.comparison: Comparison | None = None

    def __enter__(self) -> None:
        self._watching.enter_context(torchplatform.watching_registrations(self._start_if_registered))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Also where the device never came: a hook that stays would start a comparison later.
        self._watching.close()
        if self.comparison is not None:
            self.comparison.__exit__(kind, error, trace)

    def required(self) -> Comparison:
        """The comparison that was started.

        Raises:
            PlatformError: The program has ended without registering the device.
        """
        if self.comparison is not None:
            return self.comparison
        why = f" ({self._failure})" if self._failure is not None else ""
        raise PlatformError(
            f"The program names the device {self._device!r}, and never registered it{why}: it must call "
            "torch.utils.rename_privateuse1_backend and torch._register_device_module, or a module that --import "
            "names must. Nothing was compared.",
            slug="unknown-device",
        )

    def _start_if_registered(self) -> None:
        """Called when torch gets a new device, or a device its module."""
        if self.comparison is not None or torchplatform.private_device_name() != self._device:
            return
        try:
            comparison = self._make()
        except PlatformError as error:  # the device's module is not registered yet
            self._failure = error
            return
        self._watching.close()  # a comparison registers kernels itself
        self.comparison = comparison.start()
