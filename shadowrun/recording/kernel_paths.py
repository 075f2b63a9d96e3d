"""Names of kernels as a recording has them, and the way in which each of them multiplies: direct, GEMM, Winograd, FFT.

A name is made of parts, joined by ``; ``: the operators inside the call that computed, then what libraries said of
themselves:

- ``aten::mkldnn_convolution; onednn convolution jit:avx512_core``: oneDNN's primitive, and its implementation;
- ``aten::addmm; mkl SGEMM CNR:OFF``: MKL's routine, and its branch for reproducible results;
- ``aten::native_batch_norm AVX2``: a kernel of torch, and the instruction set for which it was compiled;
- ``cuda sm80_xmma_fprop_implicit_gemm_f32f32``: a kernel of an accelerator, after the type of its device.
"""

from __future__ import annotations

import functools
import re
from typing import Final

__all__ = ["PATHS", "kernel_name", "mkl_parts", "of_the_program", "onednn_parts", "path_of"]

_SEPARATOR: Final = "; "
_MAX_PARTS: Final = 16
_MAX_PART: Final = 300

PATHS: Final[tuple[tuple[str, str], ...]] = (
    # oneDNN: the implementation decides; its `alg:` says convolution_direct for implementations by GEMM as well.
    (r"onednn \w+ .*wino", "Winograd"),
    # Batch-reduced GEMM: the sums are those of small matrix products, although no matrix is unfolded.
    (r"onednn (de)?convolution .*(brg|gemm)", "GEMM"),
    (r"onednn (de)?convolution ", "direct"),  # jit, jit_1x1, jit_dw, ref
    (r"onednn (matmul|inner_product|rnn) .*(brg|gemm|jit)", "GEMM"),
    (r"onednn (matmul|inner_product) ref", "direct"),
    # MKL.
    (r"mkl [SDCZ]?\w*(GEMM|GEMV|SYRK|SYMM|TRSM|TRMM)", "GEMM"),
    (r"mkl \w*DOT", "direct"),
    (r"mkl FFT", "FFT"),
    # Operators of torch, where no library reported.
    (r"aten::(_slow_conv2d|_?thnn_conv|slow_conv)", "GEMM"),  # unfolded into a matrix
    (r"aten::(_fft_|fft_)", "FFT"),
    (r"aten::_?conv_depthwise", "direct"),
    (r"aten::\w*(addmm|bmm|mm|addmv|mv)\b", "GEMM"),
    # Accelerators: names of cuDNN, cuBLAS, CUTLASS, MIOpen, oneDNN and torch's own kernels. Winograd
    # and FFT come before GEMM: such a kernel may have its matrix product in its name too.
    (r"(cuda|xpu) .*winograd", "Winograd"),
    (r"(cuda|xpu) .*fft", "FFT"),
    (r"(cuda|xpu) .*(gemm|gemv|cutlass|xmma|Cijk_|nvjet)", "GEMM"),
    (r"(cuda|xpu) .*(conv_depthwise|_direct_|direct_conv|convolve)", "direct"),
)
"""Pattern of a part of a name, and its path; the first that matches the name counts."""

_COMPILED: Final = tuple((re.compile(pattern, re.IGNORECASE), path) for pattern, path in PATHS)

# Primitives that move elements between memory formats: not what makes a result.
_COPIES: Final = frozenset({"reorder", "concat"})
_MKL_COPY: Final = re.compile(r"COPY")
_LINE: Final = re.compile(rb"(?:onednn_verbose,|MKL_VERBOSE )[^\n]*\n")
_ONEDNN: Final = re.compile(rb"onednn_verbose,([^\n]*)\n")
_MKL: Final = re.compile(rb"MKL_VERBOSE (\w+)\([^\n]*?(?: (CNR:\S+)[^\n]*)?\n")


@functools.lru_cache(maxsize=4096)
def path_of(name: str) -> str:
    """``direct``, ``GEMM``, ``Winograd`` or ``FFT``; an empty string where the name does not show it.

    Args:
        name: Of a kernel, as `kernel_name` makes it.
    """
    parts = name.split(_SEPARATOR)
    return next((path for pattern, path in _COMPILED if any(map(pattern.match, parts))), "")


def kernel_name(parts: list[str]) -> str:
    """One name of different parts; an empty string of none."""
    different = [part[:_MAX_PART] for part in dict.fromkeys(parts)]
    more = [f"{len(different) - _MAX_PARTS} more"] if len(different) > _MAX_PARTS else []
    return _SEPARATOR.join(different[:_MAX_PARTS] + more)


def onednn_parts(text: bytes) -> list[str]:
    """Primitives and implementations in oneDNN's verbose output; those that only copy, if there are no others.

    Args:
        text: Whole lines; of any other origin are skipped.
    """
    found: list[str] = []
    copies: list[str] = []
    for line in dict.fromkeys(_ONEDNN.findall(text)):
        fields = line.decode("ascii", "replace").split(",")
        # ``v1,primitive,exec,cpu,convolution,jit:avx512_core,…``; older ones lack the version, some have a time.
        if "exec" not in fields or "graph" in fields[: fields.index("exec")]:
            continue
        _, primitive, implementation = [*fields[fields.index("exec") + 1 :], "", "", ""][:3]
        (copies if primitive in _COPIES else found).append(f"onednn {primitive} {implementation}")
    return found or copies


def mkl_parts(text: bytes) -> list[str]:
    """Routines in MKL's verbose output, each with its branch (``CNR``); without those that only copy."""
    found = dict.fromkeys((m[1], m[2] or b"") for m in _MKL.finditer(text) if not _MKL_COPY.search(m[1].decode()))
    return [f"mkl {routine.decode()} {branch.decode()}".rstrip() for routine, branch in found]


def of_the_program(text: bytes) -> bytes:
    """What is no verbose output of oneDNN or MKL."""
    return _LINE.sub(b"", text)
