"""What shadowrun knows about each device type that torch cannot be asked for: one row for each backend.

A device type without a row works too: its package starts it by an entry point, its kernels use torch's own messages,
its calls are compared synchronously. A row adds what is special, and so does the file of a package (`plugin_file`),
which counts before the row. This module imports no torch, so that the command line
can check platform specs at once.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from shadowrun.platforms.plugin_file import plugin_file
from shadowrun.types import Cause

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shadowrun.platforms.plugin_file import VendorSetting

__all__ = [
    "BACKENDS",
    "DISPATCH_KEYS",
    "FUNCTIONALIZING",
    "RESERVED_NAMES",
    "TORCH_NAMES",
    "Backend",
    "ErrorPattern",
    "backend_of",
]

ErrorPattern = tuple[tuple[str, ...], str, Cause]
"""Exception types, a regular expression that is searched for in the text, and what the exception then means.

`NAME` in the expression stands for the group that holds the missing kernel's name."""

_OPERATOR, _DTYPE = Cause.MISSING_OPERATOR, Cause.MISSING_DTYPE


@dataclass(frozen=True, slots=True)
class Backend:
    """One backend.

    Attributes:
        device_type: ``npu``.
        package: Module that is imported before the device is used, also by repro scripts; empty for torch's own.
        distribution: Installed package whose version belongs to the fingerprint.
        dispatch_key: Key that its kernels are registered under.
        native_functions: Whether torch's ``native_functions.yaml`` lists all its kernels.
        streams: Whether calls are asynchronous and its module has the names of ``torch.cuda``: ``Event``,
            ``current_stream``. Not MPS: it has one memory with the host.
        functionalizes: Whether views and in-place operators are rewritten below the dispatcher.
        computes_on_cpu: Whether its values come from the CPU's kernels, so that its fingerprint says nothing new.
        fallback_counters: Module with ``counter_names`` and ``counter_value``; a counter that is named after an ATen
            operator counts its fallbacks to the CPU.
        settings: Settings that a platform of it may have.
        own_settings: Those of them that its package applies.
        reset: Module that brings a device back by ``python -m``, after a case of a sweep or campaign ended its process.
        environment: Environment variables that change what it computes or where.
        script_setup: Lines of a repro script that make it usable.
        missing_kernel: Its words for a missing operator or dtype, in addition to those of torch.
    """

    device_type: str
    package: str = ""
    distribution: str = ""
    # Plug-ins of vendors register here, unless torch has given them a key of their own.
    dispatch_key: str = "PrivateUse1"
    native_functions: bool = False
    streams: bool = False
    functionalizes: bool = False
    computes_on_cpu: bool = False
    fallback_counters: str = ""
    settings: tuple[str, ...] = ()
    own_settings: tuple[VendorSetting, ...] = ()
    reset: str = ""
    environment: tuple[str, ...] = ()
    script_setup: str = ""
    missing_kernel: tuple[ErrorPattern, ...] = ()


_ROWS = (
    Backend(
        "cpu",
        dispatch_key="CPU",
        native_functions=True,
        computes_on_cpu=True,
        settings=(
            *(
                "compute",
                "deterministic",
                "env:NAME",
                "float32_matmul_precision",
                "flush_denormal",
                "isa",
                "mkl_cbwr",
                "mkl_isa",
            ),
            *("mkldnn", "onednn_isa", "python", "threads"),
        ),
        environment=(
            *("ATEN_CPU_CAPABILITY", "DNNL_MAX_CPU_ISA", "KMP_AFFINITY", "MKL_CBWR", "MKL_DYNAMIC"),
            *("MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS", "OMP_DYNAMIC", "OMP_NUM_THREADS"),
            *("ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA"),
        ),
    ),
    Backend(
        "cuda",
        dispatch_key="CUDA",
        native_functions=True,
        streams=True,
        settings=("compute", "deterministic", "tf32"),
        environment=(
            *("CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE"),
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        ),
    ),
    Backend(
        "mps",
        dispatch_key="MPS",
        native_functions=True,
        environment=("PYTORCH_ENABLE_MPS_FALLBACK",),
        # XPU, and backends modelled on MPS, use the same words.
        missing_kernel=(
            (
                ("NotImplementedError", "RuntimeError"),
                r"The operator 'NAME' is not (?:currently|current) (?:implemented|supported) (?:for|on) the",
                _OPERATOR,
            ),
            (
                ("TypeError", "RuntimeError"),
                r"[Cc]annot convert a \w+ Tensor to \w+ dtype as the \w+ framework",
                _DTYPE,
            ),
        ),
    ),
    Backend("xpu", dispatch_key="XPU", streams=True, environment=("PYTORCH_DEBUG_XPU_FALLBACK",)),
    Backend("mtia", dispatch_key="MTIA"),
    Backend(
        "npu",
        package="torch_npu",
        distribution="torch-npu",
        streams=True,
        environment=("TORCH_NPU_FALLBACK_CPU_DISABLE",),
        missing_kernel=(
            (("RuntimeError",), r"not implemented for DT_\w+|should be in dtype support list", _DTYPE),
            (("RuntimeError",), r"The operator 'NAME' would execute its main computation on CPU", _OPERATOR),
            (("RuntimeError",), r"ERR\d{5} OPS feature not supported", _OPERATOR),
            # The kernel's own check refuses what the reference accepts.
            (("RuntimeError",), r"\bEZ1001\b|error code is 161002", _OPERATOR),
        ),
    ),
    Backend("hpu", package="habana_frameworks.torch", distribution="habana-torch-plugin", dispatch_key="HPU"),
    Backend("musa", package="torch_musa", distribution="torch-musa", streams=True),
    Backend("mlu", package="torch_mlu", streams=True),
    Backend("gcu", package="torch_gcu"),
    Backend(
        "lazy",
        dispatch_key="Lazy",
        functionalizes=True,
        computes_on_cpu=True,
        fallback_counters="torch._lazy.metrics",
        environment=("LTC_FORCE_FALLBACK",),
        script_setup="import torch._lazy.ts_backend\n\ntorch._lazy.ts_backend.init()",
        missing_kernel=(
            (("RuntimeError",), r"The operator NAME appears to be a view operator, but it has no", _OPERATOR),
        ),
    ),
    Backend(
        "xla",
        package="torch_xla",
        distribution="torch-xla",
        dispatch_key="XLA",
        functionalizes=True,
        # XLA overrides `aten::_to_cpu` itself, so its counters are the only evidence of a fallback.
        fallback_counters="torch_xla.debug.metrics",
    ),
    Backend("sim", computes_on_cpu=True, settings=("compute", "deterministic", "tf32")),
)

BACKENDS: Mapping[str, Backend] = MappingProxyType({row.device_type: row for row in _ROWS})
"""Rows by device type."""

RESERVED_NAMES = ("vulkan", "ipu", "maia", "ve")
"""Device types of which torch has the name only."""

TORCH_NAMES = (*(row.device_type for row in _ROWS if not row.package), *RESERVED_NAMES)
"""Device types that need no package but torch, and the simulated one."""

FUNCTIONALIZING = frozenset(row.device_type for row in _ROWS if row.functionalizes)
"""Device types whose tensors have no strides and no memory that could be looked at."""

DISPATCH_KEYS = tuple(dict.fromkeys(row.dispatch_key for row in _ROWS))
"""Keys that backends register kernels under."""


# A device without a row must work, so a missing row is no error.
@functools.lru_cache(maxsize=64)
def backend_of(device_type: str) -> Backend:
    """The row of a device type, with what an installed package says of it; one without special facts if there is none.

    Raises:
        UsageError: The file of the package cannot be read.
    """
    row = BACKENDS.get(device_type) or Backend(device_type)
    # A package must not be able to redefine the reference, or what this one simulates.
    return row if device_type in ("cpu", "sim") else dataclasses.replace(row, **plugin_file(device_type).facts)
