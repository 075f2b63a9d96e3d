"""Fingerprint of a platform: hardware, libraries and settings, by which two runs can be recognized as comparable.

No name of a host, user or folder is in it: fingerprints are stored in data files, which are passed on.
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

from shadowrun import native, sim
from shadowrun.platforms import torchplatform
from shadowrun.platforms.backends import BACKENDS, backend_of

if TYPE_CHECKING:
    from shadowrun.platforms.device import Platform

__all__ = ["fingerprint", "versions"]


@functools.cache
def _environment(device_type: str) -> list[str]:
    rows = (*BACKENDS.values(), backend_of(device_type))
    return sorted({name for row in rows for name in row.environment})


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
        # The worker computes: its torch and its libraries are what counts.
        return platform.remote.facts() | facts
    facts.update(_device_facts(platform))
    facts["threads"] = torch.get_num_threads()
    # Read inside the settings: what counts is what the replays run under.
    with platform.context():
        if not platform.has_program_settings:
            facts["threads"] = torch.get_num_threads()
        facts["deterministic"] = torchplatform.deterministic_state()[0]
        facts["mkldnn"] = torchplatform.mkldnn_enabled()
        facts["float32_matmul_precision"] = torchplatform.mkldnn_precision()
    facts.update(_machine())
    # Only variables that change results: others may hold names and secrets.
    facts["env"] = {
        name: _harmless(os.environ[name]) for name in _environment(platform.spec.device_type) if name in os.environ
    }
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
    if distribution := backend_of(kind).distribution:
        facts["plugin"] = _distribution(distribution)
    module = getattr(torch, kind, None)
    name = getattr(module, "get_device_name", None)
    if name is not None:
        facts["device_name"] = str(name(platform.device))
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(platform.device)
        facts |= {
            "device_capability": f"{properties.major}.{properties.minor}",
            "device_memory_gib": round(properties.total_memory / 2**30, 1),
            # A torch for ROCm calls its devices `cuda` as well.
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
    # `flags` on x86, `Features` on Arm.
    flags = _first(r"^(?:flags|Features)\s*:\s*(.+)$", _cpuinfo())
    # Sorted: the order in which the system lists them means nothing.
    return hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:12] if flags else ""


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # not Linux


def _memory_gib() -> float:
    if sys.platform == "win32":
        return 0.0  # no `os.sysconf`
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
    # Data files are passed on, and a path shows a user's name.
    return "(a path)" if "/" in value or "\\" in value else value[:80]
