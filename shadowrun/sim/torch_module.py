"""The module ``torch.<name>`` of the device: what `torch` and users call on an accelerator."""

from __future__ import annotations

import types
from typing import Any

import torch

from shadowrun.sim import device as sim_device
from shadowrun.sim import kernels, stream

__all__ = ["make_module"]


class _DeviceContext:
    """``with torch.sim.device(0)``: there is one device, so nothing changes."""

    def __init__(self, device: Any) -> None:
        self.device = device

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _index(device: Any = None) -> int:
    if device is None:
        return 0
    index = device if isinstance(device, int) else torch.device(device).index or 0
    # -1 stands for no change of the current device, as in `torch.cuda.device`.
    if index not in (-1, 0):
        raise RuntimeError(f"invalid device ordinal {index}: {sim_device.current_name()} has 1 device")
    return 0


def make_module() -> types.ModuleType:
    """The device module.

    Memory statistics are absent on purpose: the device uses the host's memory, and a stub that returns 0 would look
    like a measurement.

    Returns:
        A module to be registered as ``torch.<name>``.
    """
    module = types.ModuleType("torch.sim", "Simulated accelerator of shadowrun.")

    def set_device(device: Any) -> None:
        _index(device)

    def manual_seed(seed: int) -> None:
        kernels.GENERATOR.manual_seed(int(seed))

    def get_rng_state(device: Any = None) -> torch.Tensor:
        _index(device)
        return kernels.GENERATOR.get_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
        _index(device)
        kernels.GENERATOR.set_state(new_state)

    def set_rng_state_all(states: list[torch.Tensor]) -> None:
        (state,) = states
        kernels.GENERATOR.set_state(state)

    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_built": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_initialized": True,  # without it, checkpointing does not restore the random stream
        "_is_in_bad_fork": lambda: False,  # without it, `torch.manual_seed` does not seed the device
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": set_device,
        "device": _DeviceContext,
        "get_device_name": lambda device=None: f"shadowrun simulated accelerator {_index(device)}",
        "synchronize": _synchronize,
        "is_asynchronous": lambda: stream.STREAM.asynchronous,
        "current_stream": stream.current_stream,
        "Stream": stream.Stream,
        "Event": stream.Event,
        "empty_cache": lambda: None,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "seed": kernels.GENERATOR.seed,
        "seed_all": kernels.GENERATOR.seed,
        "initial_seed": kernels.GENERATOR.initial_seed,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [kernels.GENERATOR.get_state()],
        "set_rng_state_all": set_rng_state_all,
        # `torch.autocast` asks a private-use device for these.
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_bf16_supported": lambda: True,
    }
    for attribute, function in functions.items():
        setattr(module, attribute, function)
    return module


def _synchronize(device: Any = None) -> None:
    _index(device)
    stream.STREAM.synchronize()
