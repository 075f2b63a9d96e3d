"""Missing kernels, missing dtypes, fallbacks."""

from __future__ import annotations

import os
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.platforms.sim import device
from shadowrun.platforms.sim.bench import FAULTS, Bench, fault

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OperatorNotFound"]

_MISSING = {
    "missing-cumsum": ("aten::cumsum", "aten::cumsum_", "aten::cumsum.out"),
    "missing-cummax-helper": ("aten::_cummax_helper",),
    "missing-lerp": ("aten::lerp.Scalar", "aten::lerp_.Scalar", "aten::lerp.Scalar_out"),
    "missing-addcdiv": ("aten::addcdiv", "aten::addcdiv_", "aten::addcdiv.out"),
    "missing-max-pool-backward": (
        "aten::max_pool2d_with_indices_backward",
        "aten::max_pool2d_with_indices_backward.grad_input",
    ),
}
"""All kernels of the family go: of a structured operator, one that stays would answer for the others."""


class OperatorNotFound(Exception):  # noqa: N818 - the name that torchax gives it
    """An exception that is no RuntimeError, as a backend outside torch's conventions raises it."""


def _remover(operators: tuple[str, ...]) -> Callable[[Bench], None]:
    return lambda bench: bench.remove(*operators)


for _name, _operators in _MISSING.items():
    FAULTS[_name] = _remover(_operators)


def _raiser(error: Callable[[], Exception], dtype: torch.dtype | None = None) -> Callable[..., None]:
    def before(*args: Any, **_: Any) -> None:
        if dtype is None or any(isinstance(a, torch.Tensor) and a.dtype == dtype for a in args):
            raise error()

    return before


@fault("histc-not-implemented")
def _histc(bench: Bench) -> None:
    name = device.current_name().upper()
    message = (
        f"The operator 'aten::histc' is not currently implemented for the {name} device. If you want this op to be "
        "considered for addition please comment on the tracker and mention use-case, that resulted in missing op."
    )
    bench.call_before(_raiser(lambda: NotImplementedError(message)), "aten::histc", "aten::histc.out")


@fault("kthvalue-err01007")
def _kthvalue(bench: Bench) -> None:
    message = (
        "The operator 'aten::kthvalue.values' would execute its main computation on CPU through dispatcher backend "
        "fallback because it has no kernel, but CPU fallback is disabled by TORCH_NPU_FALLBACK_CPU_DISABLE=1.\n"
        "[ERROR] 2026-01-01-00:00:00 (PID:1, Device:0, RankID:-1) ERR01007 OPS feature not supported"
    )
    bench.call_before(_raiser(lambda: RuntimeError(message)), "aten::kthvalue.values")


@fault("ctc-loss-not-lowered")
def _ctc(bench: Bench) -> None:
    for name in ("aten::_ctc_loss", "aten::_ctc_loss.Tensor"):
        error = OperatorNotFound(f"Operator with name {name} has no lowering")
        bench.call_before(_raiser(lambda error=error: error), name)  # type: ignore[misc]


@fault("group-norm-no-bf16")
def _group_norm(bench: Bench) -> None:
    message = (
        "call aclnnGroupNorm failed, detail:EZ1001: [PID: 1] 2026-01-01-00:00:00 self not implemented for DT_BFLOAT16, "
        "should be in dtype support list [DT_FLOAT,DT_FLOAT16,]."
    )
    bench.call_before(_raiser(lambda: RuntimeError(message), torch.bfloat16), "aten::native_group_norm")


@fault("softplus-no-half")
def _softplus(bench: Bench) -> None:
    error = _raiser(lambda: NotImplementedError("\"softplus_sim\" not implemented for 'Half'"), torch.float16)
    bench.call_before(error, "aten::softplus", "aten::softplus.out")


@fault("no-float64")
def _no_float64(bench: Bench) -> None:
    name = device.current_name().upper()
    message = (
        f"Cannot convert a {name} Tensor to float64 dtype as the {name} framework doesn't support float64. "
        "Please use float32 instead."
    )

    def before(*args: Any, dtype: torch.dtype | None = None, **_: Any) -> None:
        if torch.float64 in (dtype, *(a for a in args if isinstance(a, torch.dtype))):
            raise TypeError(message)

    bench.call_before(before, "aten::empty.memory_format", "aten::empty_strided")


@fault("fft-key-error")
def _fft(bench: Bench) -> None:
    bench.call_before(_raiser(lambda: KeyError(torch.complex64)), "aten::_fft_r2c", "aten::_fft_r2c.out")


@fault("topk-device-error")
def _topk(bench: Bench) -> None:
    message = (
        "NPU function error: call aclnnTopk failed, error code is 561103\n"
        "[ERROR] 2026-01-01-00:00:00 (PID:1, Device:0, RankID:-1) ERR00100 PTA call acl api failed."
    )
    bench.call_before(_raiser(lambda: RuntimeError(message)), "aten::topk", "aten::topk.values")


def _tensors(args: Any) -> list[torch.Tensor]:
    flat: list[torch.Tensor] = []
    for a in args:
        if isinstance(a, torch.Tensor):
            flat.append(a)
        elif isinstance(a, (list, tuple)):
            flat.extend(_tensors(a))
    return flat


def _through_cpu(*args: Any, **kwargs: Any) -> None:
    # What at::native::cpu_fallback calls: the one witness that needs no cooperation of the backend.
    torch.ops.aten._to_cpu([t for t in _tensors((*args, *kwargs.values())) if not t.is_cpu])


@fault("vector-norm-falls-back")
def _vector_norm(bench: Bench) -> None:
    message = (
        "The operator 'aten::linalg_vector_norm.out' is not currently supported on the "
        f"{device.current_name().upper()} backend and will fall back to run on the CPU. "
        "This may have performance implications."
    )

    def before(*args: Any, **kwargs: Any) -> None:
        warnings.warn(message, UserWarning, stacklevel=3)
        _through_cpu(*args, **kwargs)

    bench.call_before(before, "aten::linalg_vector_norm", "aten::linalg_vector_norm.out")


def _warned_on_stderr(bench: Bench, *operators: str) -> None:
    """torch_npu warns through c10's own handler: on file descriptor 2, once per overload."""
    warned: set[str] = set()

    def before_of(name: str) -> Callable[..., None]:
        def before(*args: Any, **kwargs: Any) -> None:
            if name not in warned:
                warned.add(name)
                line = (
                    f"[W{time.strftime('%m%d %H:%M:%S')}.000000000 VariableFallbackKernel.cpp:247] Warning: "
                    f"CAUTION: The operator '{name}' is not currently supported on the NPU backend and will fall "
                    "back to run on the CPU. This may have performance implications. (function npu_cpu_fallback)\n"
                )
                os.write(2, line.encode())
            _through_cpu(*args, **kwargs)

        return before

    for name in operators:
        bench.call_before(before_of(name), name)


@fault("isin-falls-back")
def _isin(bench: Bench) -> None:
    _warned_on_stderr(bench, "aten::isin.Tensor_Tensor", "aten::isin.Tensor_Tensor_out")


@fault("encoder-layer-falls-back")
def _encoder_layer(bench: Bench) -> None:
    _warned_on_stderr(bench, "aten::_transformer_encoder_layer_fwd")


@fault("nll-loss-falls-back-silently")
def _nll_loss(bench: Bench) -> None:
    bench.call_before(_through_cpu, "aten::nll_loss_forward", "aten::nll_loss_forward.output")


@fault("bincount-stays-on-cpu")
def _bincount(bench: Bench) -> None:
    bench.call_after(lambda result: result.cpu(), "aten::bincount")
