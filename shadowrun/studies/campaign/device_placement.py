"""Results that a device leaves elsewhere, and the later calls that raise because of them.

The lazy device returns lists of tensors on the CPU: each later call with one of them and a tensor of the device raises.
These exceptions are effects of one fault, so they are counted for the operator whose result lies elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shadowrun.intercept.torch_operators import unwrapped
from shadowrun.replay.copies import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    Call = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]

__all__ = ["DevicePlacement"]


class DevicePlacement:
    """Watches where results of a program's calls lie.

    Args:
        call: Calls an operator.
        device: Where each result should lie.

    Attributes:
        origin: Operator whose result, which lies elsewhere, an argument of the call that raised comes from; empty
            where there is none.
        where: Device of that result.
    """

    def __init__(self, call: Call, device: torch.device) -> None:
        self._call, self._device = call, device
        self._elsewhere: dict[int, tuple[torch.Tensor, str, str]] = {}
        """By id, each kept so that its id stays its own: with the operator at fault, and the device."""
        self.origin = self.where = ""

    def __call__(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an operator."""
        given = (self._elsewhere.get(id(t)) for t in tensors_in((*args, *kwargs.values())))
        wrong = next(filter(None, given), None)
        try:
            out = self._call(op, args, kwargs)
        except Exception:
            if wrong is not None:
                _, self.origin, self.where = wrong
            raise
        for t in tensors_in([out]):
            # The wrapper of functionalization reports the device of the program, not that of what it wraps.
            device = unwrapped(t).device
            if device.type != self._device.type:
                self._elsewhere[id(t)] = (t, *(wrong[1:] if wrong is not None else (op.name(), str(device))))
        return out
