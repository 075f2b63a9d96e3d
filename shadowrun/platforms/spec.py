"""The words for a platform: ``"cuda:1"``, ``"npu"``, ``"cpu[threads=1,mkldnn=off]"``.

Only words are checked here, without importing torch, so that the command line can refuse a typing
error at once. Whether this machine has the device is asked by `shadowrun.platforms.resolve`.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import re
import sys
from dataclasses import dataclass
from typing import Any, TypeAlias

from shadowrun.errors import PlatformError

__all__ = [
    "ENTRY_POINT_GROUP",
    "PLUGINS",
    "PROCESS_VARIABLES",
    "PlatformSpec",
    "Setting",
    "known_devices",
    "parse",
]

Setting: TypeAlias = "bool | int | str"

ENTRY_POINT_GROUP = "shadowrun.platforms"
"""Packages may add a device type: entry point name = device type, value = a callable without
arguments that makes ``torch.device(name)`` usable."""

PLUGINS = {
    "npu": "torch_npu",
    "hpu": "habana_frameworks.torch",
    "xla": "torch_xla",
    "musa": "torch_musa",
    "mlu": "torch_mlu",
    "gcu": "torch_gcu",
}
"""Device types that a package other than torch brings."""

PROCESS_VARIABLES = {
    "isa": "ATEN_CPU_CAPABILITY",
    "mkl_cbwr": "MKL_CBWR",
    "mkl_isa": "MKL_ENABLE_INSTRUCTIONS",
    "onednn_isa": "ONEDNN_MAX_CPU_ISA",
}
"""Settings that a process reads once, at its start, and the environment variables that they are."""

_TORCH_DEVICES = ("cpu", "cuda", "xpu", "mps", "mtia", "lazy", "vulkan", "ipu", "maia", "ve", "sim")
_PATTERN = re.compile(r"(?P<type>[A-Za-z_]\w*)(?::(?P<index>\d+))?(?:\[(?P<settings>.*)\])?", re.ASCII)
_BOOLS = {"on": True, "true": True, "1": True, "yes": True, "off": False, "false": False, "0": False, "no": False}
_PRECISIONS = ("highest", "high", "medium")
_WORDS = {
    "isa": ("default", "avx2", "avx512"),
    "mkl_cbwr": (
        *("AUTO", "COMPATIBLE", "SSE2", "SSE3", "SSSE3", "SSE4_1", "SSE4_2", "AVX", "AVX2", "AVX512", "AVX512_E1"),
        *("AVX2_STRICT", "AVX512_STRICT", "AVX512_E1_STRICT"),
    ),
    "mkl_isa": ("SSE4_2", "AVX", "AVX2", "AVX512", "AVX512_E1"),
    "onednn_isa": (
        *("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16"),
        *("AVX512_CORE_FP16", "AVX512_CORE_AMX", "ALL"),
    ),
    "float32_matmul_precision": _PRECISIONS,
}
_SETTINGS = {
    "deterministic": "on or off",
    "float32_matmul_precision": ", ".join(_PRECISIONS),
    "flush_denormal": "on or off",
    "isa": ", ".join(_WORDS["isa"]),
    "mkl_cbwr": ", ".join(_WORDS["mkl_cbwr"]),
    "mkl_isa": ", ".join(_WORDS["mkl_isa"]),
    "mkldnn": "on or off",
    "onednn_isa": ", ".join(_WORDS["onednn_isa"]),
    "threads": "a whole number from 1 to 1024",
}
_EXAMPLE = 'such as "cuda:1", "npu" or "cpu[threads=1,mkldnn=off]"'


@dataclass(frozen=True, slots=True)
class PlatformSpec:
    """A platform as named by the user, in canonical form.

    Attributes:
        device_type: ``cpu``, ``cuda``, ``npu``.
        index: Which of the devices; None for the current one.
        settings: Sorted pairs; only a CPU has any.
    """

    device_type: str
    index: int | None = None
    settings: tuple[tuple[str, Setting], ...] = ()

    @property
    def device_string(self) -> str:
        """The part that torch understands: ``cuda:1``."""
        return self.device_type if self.index is None else f"{self.device_type}:{self.index}"

    @property
    def needs_process(self) -> bool:
        """Whether it has a setting that only a process of its own can have."""
        return any(key in PROCESS_VARIABLES for key, _ in self.settings)

    def __str__(self) -> str:
        """The canonical text, which `parse` reads back."""
        if not self.settings:
            return self.device_string
        pairs = ",".join(f"{key}={_print(value)}" for key, value in self.settings)
        return f"{self.device_string}[{pairs}]"


def parse(spec: Any) -> PlatformSpec:
    """Read a platform spec.

    Args:
        spec: Text, a `torch.device`, or a `PlatformSpec`.

    Example:
        >>> str(parse("cpu[mkldnn=no, deterministic=on]"))
        'cpu[deterministic=on,mkldnn=off]'

    Raises:
        PlatformError: Malformed text, unknown device, unknown setting or bad value.
    """
    if isinstance(spec, PlatformSpec):
        return spec
    if type(spec).__module__ == "torch" and type(spec).__name__ == "device":
        spec = str(spec)
    if not isinstance(spec, str):
        raise PlatformError(
            f"{spec!r} is no platform: give a torch device or its name, {_EXAMPLE}.",
            slug="bad-spec",
        )
    match = _PATTERN.fullmatch(spec.strip())
    if match is None:
        raise PlatformError(
            f"Platform {spec!r} cannot be read: write device, device:index or cpu[key=value,...], {_EXAMPLE}.",
            slug="bad-spec",
        )
    device_type = match["type"]
    if device_type == "meta":
        raise PlatformError("Platform 'meta' has shapes but no values: nothing could be compared.", slug="bad-spec")
    known = known_devices()
    if device_type not in known:
        raise PlatformError(
            f"Unknown device {device_type!r} in platform {spec!r}.{_nearest(device_type, known)} "
            f"Devices: {', '.join(known)}. `shadowrun platforms` tells which of them this machine has.",
            slug="unknown-device",
        )
    index = None if match["index"] is None else int(match["index"])
    return PlatformSpec(device_type, index, _settings(spec, device_type, match["settings"]))


def known_devices() -> list[str]:
    """Sorted names of the device types that a spec may use, present on this machine or not."""
    names = {*_TORCH_DEVICES, *PLUGINS}
    names.update(entry.name for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))
    # A plug-in or the simulated device may have named torch's private-use device; only a torch that
    # is loaded already can know.
    if "torch" in sys.modules:
        from shadowrun.platforms import torchplatform

        names.add(torchplatform.private_device_name())
    return sorted(names - {"privateuseone"})


def _settings(spec: str, device_type: str, text: str | None) -> tuple[tuple[str, Setting], ...]:
    if text is None:
        return ()
    if device_type != "cpu":
        raise PlatformError(
            f"Device {device_type!r} in platform {spec!r} has no settings; only cpu has: {', '.join(_SETTINGS)}.",
            slug="unknown-setting",
        )
    settings: dict[str, Setting] = {}
    for item in text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not key or not equals:
            raise PlatformError(
                f"Setting {item.strip()!r} in platform {spec!r} cannot be read: write key=value. "
                f"Settings: {', '.join(_SETTINGS)}.",
                slug="bad-spec",
            )
        if key in settings:
            raise PlatformError(f"Setting {key!r} is given twice in platform {spec!r}.", slug="bad-spec")
        settings[key] = _value(spec, key, value)
    if settings.get("flush_denormal") is True and int(settings.get("threads", 1)) > 1:
        # torch sets the mode on the calling thread only: the other threads' share would not be flushed.
        raise PlatformError(
            f"Platform {spec!r}: flush_denormal=on reaches one thread only, so it runs with threads=1; "
            f"leave threads={settings['threads']} away.",
            slug="bad-setting",
        )
    return tuple(sorted(settings.items()))


def _value(spec: str, key: str, text: str) -> Setting:
    if key not in _SETTINGS:
        raise PlatformError(
            f"Unknown setting {key!r} in platform {spec!r}.{_nearest(key, _SETTINGS)} "
            f"Settings of cpu: {', '.join(_SETTINGS)}.",
            slug="unknown-setting",
        )
    if key == "threads":
        if text.isdecimal() and text.isascii() and 1 <= int(text) <= 1024:
            return int(text)
    elif key in _WORDS:
        for word in _WORDS[key]:
            if text.lower() == word.lower():
                return word
    elif text.lower() in _BOOLS:
        return _BOOLS[text.lower()]
    raise PlatformError(
        f"{key}={text!r} in platform {spec!r} cannot be used: give {_SETTINGS[key]}.",
        slug="bad-setting",
    )


def _nearest(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word.lower(), list(known), 1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def _print(value: Setting) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
