"""What a platform is, in values that tell whether two runs may be compared.

No host, user or folder name is among them: fingerprints are stored in data files that travel.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform as python_platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shadowrun import native
from shadowrun.platforms import sim, torchplatform

if TYPE_CHECKING:
    from shadowrun.platforms.device import Platform

__all__ = ["fingerprint", "versions"]

_ENVIRONMENT = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "DNNL_MAX_CPU_ISA",
    "KMP_AFFINITY",
    "LTC_FORCE_FALLBACK",
    "MKL_CBWR",
    "MKL_DYNAMIC",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_DYNAMIC",
    "OMP_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "PYTORCH_DEBUG_XPU_FALLBACK",
    "PYTORCH_ENABLE_MPS_FALLBACK",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_NPU_FALLBACK_CPU_DISABLE",
)
_PLUGIN_DISTRIBUTIONS = {"npu": "torch-npu", "hpu": "habana-torch-plugin", "xla": "torch-xla", "musa": "torch-musa"}


def versions() -> dict[str, str]:
    """Versions of shadowrun, torch, numpy and Python, and whether shadowrun's compiled part is in use."""
    found = {"python": python_platform.python_version(), "torch": str(torch.__version__), "native": native.state()}
    for name in ("shadowrun", "numpy"):
        found[name] = _distribution(name)
    return dict(sorted(found.items()))


def fingerprint(platform: Platform) -> dict[str, Any]:
    """Describe a platform in values that JSON can hold.

    Every platform has the CPU's part: operators that fall back are computed there.
    """
    facts: dict[str, Any] = {"platform": str(platform), "device": platform.spec.device_type}
    if platform.remote is not None:
        return platform.remote.facts() | facts
    facts.update(_device_facts(platform))
    facts["threads"] = torch.get_num_threads()
    with platform.context():
        if not platform.is_ambient:
            facts["threads"] = torch.get_num_threads()
        facts["deterministic"] = torchplatform.deterministic_state()[0]
        facts["mkldnn"] = torchplatform.mkldnn_enabled()
        facts["float32_matmul_precision"] = torchplatform.mkldnn_precision()
    facts.update(_machine())
    facts["env"] = {name: _harmless(os.environ[name]) for name in _ENVIRONMENT if name in os.environ}
    return facts


@functools.cache
def _machine() -> dict[str, Any]:
    config = torch.__config__.show()
    return {
        "cpu": _cpu_model(),
        "cpu_flags": _cpu_flags(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "system": python_platform.system(),
        "machine": python_platform.machine(),
        "torch": str(torch.__version__),
        "torch_git": str(torch.version.git_version)[:12],
        "mkl": _first(r"Math Kernel Library Version (\S+)", config),
        "onednn": _first(r"MKL-DNN (v\S+)", config),
        "openmp": _first(r"OpenMP (\d+)", config),
    }


def _device_facts(platform: Platform) -> dict[str, Any]:
    kind = platform.device.type
    if kind in ("cpu", "lazy"):
        return {}
    facts: dict[str, Any] = {}
    if sim.is_enabled() and sim.device_name() == kind:
        facts["simulated_flaws"] = list(sim.active())
    if kind in _PLUGIN_DISTRIBUTIONS:
        facts["plugin"] = _distribution(_PLUGIN_DISTRIBUTIONS[kind])
    module = getattr(torch, kind, None)
    name = getattr(module, "get_device_name", None)
    if name is not None:
        facts["device_name"] = str(name(platform.device))
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(platform.device)
        facts |= {
            "device_capability": f"{properties.major}.{properties.minor}",
            "device_memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": str(torch.version.cuda or torch.version.hip),
            "cuda_driver": torchplatform.cuda_driver_version(),
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "cuda_matmul_precision": torch.backends.cuda.matmul.fp32_precision,
        }
    return facts


def _cpu_model() -> str:
    text = _cpuinfo()
    return _first(r"^model name\s*:\s*(.+)$", text) or python_platform.processor() or python_platform.machine()


def _cpu_flags() -> str:
    """Digest of the instruction sets: equal digests, equal kernels to choose from."""
    flags = _first(r"^(?:flags|Features)\s*:\s*(.+)$", _cpuinfo())
    return hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:12] if flags else ""


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # not Linux


def _memory_gib() -> float:
    if sys.platform == "win32":
        return 0.0
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    return match[1].strip() if match else ""


def _distribution(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _harmless(value: str) -> str:
    return "(a path)" if "/" in value or "\\" in value else value[:80]
