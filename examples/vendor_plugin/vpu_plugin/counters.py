"""The counters of the device, by the names that `torch._lazy.metrics` and `torch_xla.debug.metrics` have too."""

from vpu_plugin.device import FALLBACKS


def counter_names() -> list[str]:
    """Names of the counters; one that is named after an ATen operator counts its fallbacks to the CPU."""
    return list(FALLBACKS)


def counter_value(name: str) -> int:
    """Value of a counter."""
    return FALLBACKS[name]
