"""The Python part of the device, as a vendor's package would have it: a name and a module of torch's."""

from __future__ import annotations

import ctypes
import types
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

SILENT, WARNED_EACH, WARNED_ONCE, WARNED_ON_STDERR = range(4)


def start(library: str, name: str) -> tuple[Callable[[], list[str]], Callable[[int], None]]:
    """Start the device under a name; ``privateuseone`` is the one that needs none.

    Returns:
        A function that gives the kernels that fell back since its last call, and one that says how the device reports.
    """
    torch.ops.load_library(library)
    device = types.ModuleType(f"torch.{name}")
    device._is_in_bad_fork = lambda: False
    device.current_device = lambda: 0
    device.device_count = lambda: 1
    device.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    device.get_device_name = lambda _=0: "host memory under another name"
    device.is_available = lambda: True
    device.manual_seed_all = lambda _: None  # it draws where it computes: on the CPU
    if name != "privateuseone":
        torch.utils.rename_privateuse1_backend(name)
    torch._register_device_module(name, device)
    raw = ctypes.CDLL(library)
    raw.cppdev_take.restype = ctypes.c_char_p
    return lambda: raw.cppdev_take().decode().split(), raw.cppdev_manner
