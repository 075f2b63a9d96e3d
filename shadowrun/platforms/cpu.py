"""CPU settings: applied around one replay and restored exactly; and instruction sets that this processor lacks."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shadowrun.platforms import torchplatform

if TYPE_CHECKING:
    from types import TracebackType

    from shadowrun.platforms.spec import Setting

__all__ = ["CpuSettings", "flushes_denormals", "instruction_sets", "missing_instructions", "settings_without_effect"]

_AVX512 = ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl")
_VNNI = (*_AVX512, "avx512_vnni")
_BF16 = (*_VNNI, "avx512_bf16")
_FP16 = (*_BF16, "avx512_fp16")
_NEEDED = {
    # torch takes the word as it is, and dies of an illegal instruction.
    "ATEN_CPU_CAPABILITY": {"avx2": ("avx2", "fma"), "avx512": _AVX512},
    # oneDNN takes it as a limit: past what the processor has, nothing would change.
    "ONEDNN_MAX_CPU_ISA": {
        "sse41": ("sse4_1",),
        "avx": ("avx",),
        "avx2": ("avx2",),
        "avx2_vnni": ("avx2", "avx_vnni"),
        "avx2_vnni_2": ("avx2", "avx_vnni", "avx_vnni_int8", "avx_ne_convert"),
        "avx512_core": _AVX512,
        "avx512_core_vnni": _VNNI,
        "avx512_core_bf16": _BF16,
        "avx512_core_fp16": _FP16,
        "avx512_core_amx": (*_FP16, "amx_tile", "amx_int8", "amx_bf16"),
    },
}


def missing_instructions(environment: dict[str, str]) -> tuple[str, str, str] | None:
    """The first variable that asks for instructions which this processor lacks: name, value, what is missing.

    Only Linux on x86 lists what the processor has; elsewhere nothing counts as missing.
    """
    flags = _cpuinfo()[1]
    for name, known in _NEEDED.items():
        value = environment.get(name, "").lower()
        # Without a list of flags nothing may be refused: the system does not say what the processor has.
        missing = [flag for flag in known.get(value, ()) if flags and flag not in flags]
        if missing:
            return name, value, ", ".join(missing)
    return None


def settings_without_effect(environment: dict[str, str], *, mkl: bool, mkldnn: bool) -> list[str]:
    """Sentences about variables that have no effect here.

    Args:
        environment: The platform's own.
        mkl: Whether its torch was built with MKL.
        mkldnn: Whether its torch was built with oneDNN.
    """
    vendor = _cpuinfo()[0]
    libraries = {
        "MKL_CBWR": (mkl, "MKL"),
        "MKL_ENABLE_INSTRUCTIONS": (mkl, "MKL"),
        "ONEDNN_MAX_CPU_ISA": (mkldnn, "oneDNN"),
    }
    notes = [
        f"{name} has no effect: this torch was built without {library}"
        for name, (present, library) in libraries.items()
        if name in environment and not present
    ]
    if mkl and vendor and vendor != "GenuineIntel":
        if "MKL_ENABLE_INSTRUCTIONS" in environment:
            notes.append(
                f"MKL_ENABLE_INSTRUCTIONS has no effect: MKL heeds it on Intel's processors only, not {vendor}"
            )
        branch = environment.get("MKL_CBWR", "").upper()
        if branch not in ("", "AUTO", "COMPATIBLE"):
            notes.append(f"MKL_CBWR={branch} is the same as AUTO: MKL has that branch on Intel's processors only")
    return notes


def instruction_sets() -> list[str]:
    """The processor's flags as Linux lists them, sorted; empty elsewhere."""
    return sorted(_cpuinfo()[1])


@functools.cache
def _cpuinfo() -> tuple[str, frozenset[str]]:
    """The processor's vendor and its flags; empty where the system does not list them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", frozenset()
    fields = {}
    # The first processor: the blocks of all cores are alike, and there may be hundreds.
    for line in text.partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    # An Arm processor lists `Features` and no vendor's name, so that nothing is refused there.
    return fields.get("vendor_id", ""), frozenset(fields.get("flags", "").split())


# CPU kernels read oneDNN's precision, which torch.set_float32_matmul_precision sets to these words. The
# public function would change CUDA's precision too, and reading it raises once a program has used both
# the old and the new API.
_PRECISION_WORDS = {"highest": "ieee", "high": "tf32", "medium": "bf16"}
_SMALLEST_NORMAL = sys.float_info.min


class CpuSettings:
    """Context manager that applies CPU settings; one object serves one ``with`` block at a time.

    ``flush_denormal`` is a mode of the calling thread, so the block then runs with one thread. The
    other settings are the process's: another thread that computes at the same time sees them too.

    Args:
        settings: Pairs as in `PlatformSpec.settings`.
    """

    __slots__ = ("_denormal", "_deterministic", "_mkldnn", "_precision", "_saved", "_threads")

    def __init__(self, settings: tuple[tuple[str, Setting], ...]) -> None:
        values = dict(settings)
        self._threads = values.get("threads")
        self._mkldnn = values.get("mkldnn")
        self._deterministic = values.get("deterministic")
        self._denormal = values.get("flush_denormal")
        self._precision = _PRECISION_WORDS.get(str(values.get("float32_matmul_precision")))
        # The flush mode belongs to the calling thread.
        if self._denormal:
            # Other threads of the pool would not flush: with two, half of a product of 2 million elements was flushed.
            self._threads = 1
        self._saved: tuple[int, bool, tuple[bool, bool], bool, str] | None = None

    def __enter__(self) -> None:
        self._saved = (
            torch.get_num_threads(),
            torchplatform.mkldnn_enabled(),
            torchplatform.deterministic_state(),
            flushes_denormals(),
            torchplatform.mkldnn_precision(),
        )
        if self._threads is not None:
            torch.set_num_threads(int(self._threads))
        if self._mkldnn is not None:
            torchplatform.set_mkldnn_enabled(bool(self._mkldnn))
        if self._deterministic is not None:
            # Not by `use_deterministic_algorithms`: that also changes Inductor's configuration.
            torchplatform.set_deterministic_state((bool(self._deterministic), False))
        if self._precision is not None:
            # Not by `set_float32_matmul_precision`: that also changes CUDA's precision.
            torchplatform.set_mkldnn_precision(self._precision)
        if self._denormal is not None:
            torch.set_flush_denormal(bool(self._denormal))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Restored exactly: the program must not run under a replay's settings.
        assert self._saved is not None
        # In the reverse order, and only what was set: each call into torch costs time in every replay.
        threads, mkldnn, deterministic, denormal, precision = self._saved
        if self._denormal is not None:
            torch.set_flush_denormal(denormal)
        if self._precision is not None:
            torchplatform.set_mkldnn_precision(precision)
        if self._deterministic is not None:
            torchplatform.set_deterministic_state(deterministic)
        if self._mkldnn is not None:
            torchplatform.set_mkldnn_enabled(mkldnn)
        if self._threads is not None:
            torch.set_num_threads(threads)


def flushes_denormals() -> bool:
    """Whether the calling thread flushes subnormal numbers to zero.

    torch can set the mode but not read it. Python's floats obey the same register, and asking them
    makes no operator call that a comparison would see.
    """
    return _SMALLEST_NORMAL / 2 == 0.0
