"""A CPU with other settings: applied around one replay, and put back exactly as they were."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from shadowrun.platforms import torchplatform

if TYPE_CHECKING:
    from types import TracebackType

    from shadowrun.platforms.spec import Setting

__all__ = ["CpuSettings", "flushes_denormals"]

# CPU kernels read oneDNN's precision, which torch.set_float32_matmul_precision sets to these words. The
# public function would change CUDA's precision too, and reading it raises once a program has used both
# the old and the new API.
_PRECISION_WORDS = {"highest": "ieee", "high": "tf32", "medium": "bf16"}
_SMALLEST_NORMAL = sys.float_info.min


class CpuSettings:
    """Context manager that applies CPU settings; one object serves one ``with`` block at a time.

    ``flush_denormal`` is a mode of the calling thread, so the block then runs with one thread. The
    other settings are the process's: another thread that computes meanwhile sees them too.

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
        if self._denormal:
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
            torchplatform.set_deterministic_state((bool(self._deterministic), False))
        if self._precision is not None:
            torchplatform.set_mkldnn_precision(self._precision)
        if self._denormal is not None:
            torch.set_flush_denormal(bool(self._denormal))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._saved is not None
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

    torch can set the mode but not tell it. Python's floats obey the same register, and asking them
    makes no operator call that a comparison would see.
    """
    return _SMALLEST_NORMAL / 2 == 0.0
