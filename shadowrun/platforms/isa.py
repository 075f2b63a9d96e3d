"""Instruction sets: which this processor lacks, and which settings it does not heed."""

from __future__ import annotations

import functools
from pathlib import Path

__all__ = ["lacking", "unheeded"]

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


def lacking(environment: dict[str, str]) -> tuple[str, str, str] | None:
    """The first variable that asks for instructions which this processor lacks: name, value, what is missing.

    Where the system does not tell what the processor has (it is no Linux, no x86), nothing is lacking.
    """
    flags = _cpuinfo()[1]
    for name, known in _NEEDED.items():
        value = environment.get(name, "").lower()
        missing = [flag for flag in known.get(value, ()) if flags and flag not in flags]
        if missing:
            return name, value, ", ".join(missing)
    return None


def unheeded(environment: dict[str, str], *, mkl: bool, mkldnn: bool) -> list[str]:
    """Sentences about variables that change nothing here.

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


@functools.cache
def _cpuinfo() -> tuple[str, frozenset[str]]:
    """The processor's maker and what it can; empty where the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", frozenset()
    fields = {}
    for line in text.partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    return fields.get("vendor_id", ""), frozenset(fields.get("flags", "").split())
