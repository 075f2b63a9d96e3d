"""Missing operators, missing dtypes, and operators that fall back to the CPU."""

from __future__ import annotations

import os
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from shadowrun.sim.device import current_name as device_name
from shadowrun.sim.flaw import FlawKind, randn
from shadowrun.types import Cause

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.sim.flaw import KernelChanges

__all__ = ["OperatorNotFound", "flaw"]

# The messages are those of real vendors, which the table in `platforms/unsupported.py` has to recognise.
flaw = FlawKind("support", cause=Cause.MISSING_OPERATOR, statuses=("unsupported",))


@flaw(
    "missing-cumsum",
    "cumsum has no kernel",
    issue="none: the dispatcher's own NotImplementedError, as on musa, tinygrad and CUDA",
    operators=("aten::cumsum", "aten::cumsum_", "aten::cumsum.out"),
    explanation="aten::cumsum.out",
    trigger=lambda device: randn(device, 4, 5).cumsum(1),
)
def missing_cumsum(kernels: KernelChanges) -> None:
    # The functional and the in-place kernel of a real backend are made of the `out` one, so that all three are
    # missing.
    kernels.remove("aten::cumsum", "aten::cumsum_", "aten::cumsum.out")


@flaw(
    "missing-cummax-helper",
    "cummax works through _cummax_helper, which has no kernel",
    issue="none: the dispatcher's own NotImplementedError, as on musa, tinygrad and CUDA",
    operators=("aten::cummax", "aten::_cummax_helper"),
    explanation="aten::_cummax_helper",
    trigger=lambda device: randn(device, 4, 5).cummax(1),
)
def missing_cummax_helper(kernels: KernelChanges) -> None:
    kernels.remove("aten::_cummax_helper")


@flaw(
    "missing-lerp",
    "lerp_.Scalar, which Adam calls, works through lerp.Scalar_out, which has no kernel",
    issue="none: the dispatcher's own NotImplementedError, as on musa, tinygrad and CUDA",
    operators=(
        "aten::lerp_.Scalar",
        "aten::lerp.Scalar",
        "aten::lerp.Scalar_out",
        "aten::_foreach_lerp_.Scalar",
        "aten::_foreach_lerp.Scalar",
    ),
    explanation="aten::lerp.Scalar_out",
    trigger=lambda device: randn(device, 8).lerp_(randn(device, 8, seed=1), 0.1),
)
def missing_lerp(kernels: KernelChanges) -> None:
    # All variants: each has a kernel of its own, and torch would find the one that is left.
    kernels.remove("aten::lerp.Scalar", "aten::lerp_.Scalar", "aten::lerp.Scalar_out")


def _trigger_missing_addcdiv(device: str) -> None:
    weight = nn.Parameter(randn(device, 8))
    # foreach: the fused list operator runs the missing one for each tensor.
    optimizer = torch.optim.AdamW([weight], foreach=True)
    weight.square().sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


@flaw(
    "missing-addcdiv",
    "addcdiv_, also inside _foreach_addcdiv_, lacks the kernel addcdiv.out",
    issue="none: the dispatcher's own NotImplementedError, as on musa, tinygrad and CUDA",
    operators=(
        "aten::addcdiv",
        "aten::addcdiv_",
        "aten::addcdiv.out",
        "aten::_foreach_addcdiv_.ScalarList",
        "aten::_foreach_addcdiv_.Scalar",
    ),
    explanation="aten::addcdiv.out",
    trigger=_trigger_missing_addcdiv,
)
def missing_addcdiv(kernels: KernelChanges) -> None:
    kernels.remove("aten::addcdiv", "aten::addcdiv_", "aten::addcdiv.out")


def _trigger_missing_max_pool_backward(device: str) -> None:
    F.max_pool2d(randn(device, 1, 2, 8, 8).requires_grad_(), 2).sum().backward()  # type: ignore[no-untyped-call]


@flaw(
    "missing-max-pool-backward",
    "max-pooling has a forward kernel and no backward kernel",
    issue="none: the dispatcher's own NotImplementedError, as on musa, tinygrad and CUDA",
    operators=("aten::max_pool2d_with_indices_backward", "aten::max_pool2d_with_indices_backward.grad_input"),
    explanation="aten::max_pool2d_with_indices_backward.grad_input",
    trigger=_trigger_missing_max_pool_backward,
)
def missing_max_pool_backward(kernels: KernelChanges) -> None:
    kernels.remove("aten::max_pool2d_with_indices_backward", "aten::max_pool2d_with_indices_backward.grad_input")


def _raiser(error: Callable[[], Exception], dtype: torch.dtype | None = None) -> Callable[..., None]:
    def before(*args: Any, **_: Any) -> None:
        if dtype is None or any(isinstance(a, torch.Tensor) and a.dtype == dtype for a in args):
            raise error()

    return before


@flaw(
    "histc-not-implemented",
    "histc raises NotImplementedError in MPS's words",
    issue="none: the message of MPS ('not currently implemented for the MPS device')",
    operators=("aten::histc",),
    trigger=lambda device: randn(device, 32).histc(8),
)
def histc_not_implemented(kernels: KernelChanges) -> None:
    name = device_name().upper()
    message = (
        f"The operator 'aten::histc' is not currently implemented for the {name} device. If you want this op to be "
        "considered for addition please comment on the tracker and mention use-case, that resulted in missing op."
    )
    kernels.call_before(_raiser(lambda: NotImplementedError(message)), "aten::histc", "aten::histc.out")


@flaw(
    "kthvalue-err01007",
    "kthvalue raises RuntimeError with torch_npu's ERR01007",
    issue="none: the message of torch_npu with CPU fallback disabled",
    operators=("aten::kthvalue", "aten::kthvalue.values"),
    trigger=lambda device: randn(device, 32).kthvalue(3),
)
def kthvalue_err01007(kernels: KernelChanges) -> None:
    message = (
        "The operator 'aten::kthvalue.values' would execute its main computation on CPU through dispatcher backend "
        "fallback because it has no kernel, but CPU fallback is disabled by TORCH_NPU_FALLBACK_CPU_DISABLE=1.\n"
        "[ERROR] 2026-01-01-00:00:00 (PID:1, Device:0, RankID:-1) ERR01007 OPS feature not supported"
    )
    kernels.call_before(_raiser(lambda: RuntimeError(message)), "aten::kthvalue.values")


def _trigger_ctc_loss_not_lowered(device: str) -> Any:
    logits = randn(device, 6, 2, 5).log_softmax(2)
    return F.ctc_loss(logits, torch.tensor([[1, 2], [3, 4]]).to(device), (6, 6), (2, 2))  # type: ignore[arg-type]


class OperatorNotFound(Exception):  # noqa: N818 - the name that torchax gives it
    """An exception that is no RuntimeError, as a backend outside torch's conventions raises it."""


@flaw(
    "ctc-loss-not-lowered",
    "ctc_loss raises a plain Exception named OperatorNotFound",
    issue="none: torchax.tensor.OperatorNotFound",
    operators=("aten::_ctc_loss", "aten::_ctc_loss.Tensor"),
    trigger=_trigger_ctc_loss_not_lowered,
)
def ctc_loss_not_lowered(kernels: KernelChanges) -> None:
    for name in ("aten::_ctc_loss", "aten::_ctc_loss.Tensor"):
        error = OperatorNotFound(f"Operator with name {name} has no lowering")
        kernels.call_before(_raiser(lambda error=error: error), name)  # type: ignore[misc]


@flaw(
    "group-norm-no-bf16",
    "group normalisation has no bfloat16 kernel and says so in aclnn's words",
    issue="none: torch_npu's 'EZ1001 ... not implemented for DT_BFLOAT16'",
    operators=("aten::native_group_norm",),
    cause=Cause.MISSING_DTYPE,
    trigger=lambda device: F.group_norm(randn(device, 2, 4, 3, 3).bfloat16(), 2),
)
def group_norm_no_bf16(kernels: KernelChanges) -> None:
    message = (
        "call aclnnGroupNorm failed, detail:EZ1001: [PID: 1] 2026-01-01-00:00:00 self not implemented for DT_BFLOAT16, "
        "should be in dtype support list [DT_FLOAT,DT_FLOAT16,]."
    )
    kernels.call_before(_raiser(lambda: RuntimeError(message), torch.bfloat16), "aten::native_group_norm")


@flaw(
    "softplus-no-half",
    "softplus is not compiled for float16",
    issue="none: the dispatch macro of CPU and CUDA kernels",
    operators=("aten::softplus",),
    cause=Cause.MISSING_DTYPE,
    trigger=lambda device: F.softplus(randn(device, 8).half()),
)
def softplus_no_half(kernels: KernelChanges) -> None:
    error = _raiser(lambda: NotImplementedError("\"softplus_sim\" not implemented for 'Half'"), torch.float16)
    kernels.call_before(error, "aten::softplus", "aten::softplus.out")


@flaw(
    "no-float64",
    "float64 tensors cannot be made",
    issue="none: the TypeError of MPS",
    operators=(
        "aten::_to_copy",
        "aten::empty.memory_format",
        "aten::empty_strided",
        "aten::zeros",
        "aten::ones",
        "aten::full",
        "aten::copy_",
    ),
    cause=Cause.MISSING_DTYPE,
    trigger=lambda device: randn(device, 8).double() + 1,
)
def no_float64(kernels: KernelChanges) -> None:
    name = device_name().upper()
    message = (
        f"Cannot convert a {name} Tensor to float64 dtype as the {name} framework doesn't support float64. "
        "Please use float32 instead."
    )

    def before(*args: Any, dtype: torch.dtype | None = None, **_: Any) -> None:
        if torch.float64 in (dtype, *(a for a in args if isinstance(a, torch.dtype))):
            raise TypeError(message)

    # All ways to make a tensor with memory of its own end in one of these.
    kernels.call_before(before, "aten::empty.memory_format", "aten::empty_strided")


@flaw(
    "fft-key-error",
    "a real FFT ends in KeyError: torch.complex64",
    issue="none: the tinygrad backend's KeyError",
    operators=("aten::_fft_r2c",),
    cause=Cause.MISSING_DTYPE,
    trigger=lambda device: torch.fft.rfft(randn(device, 16)),
)
def fft_key_error(kernels: KernelChanges) -> None:
    kernels.call_before(_raiser(lambda: KeyError(torch.complex64)), "aten::_fft_r2c", "aten::_fft_r2c.out")


@flaw(
    "topk-device-error",
    "topk raises the vendor's runtime error 561103",
    issue="none: torch_npu's 'NPU function error ... 561103'",
    operators=("aten::topk", "aten::topk.values"),
    statuses=("error",),
    cause=None,
    trigger=lambda device: randn(device, 32).topk(3),
)
def topk_device_error(kernels: KernelChanges) -> None:
    message = (
        "NPU function error: call aclnnTopk failed, error code is 561103\n"
        "[ERROR] 2026-01-01-00:00:00 (PID:1, Device:0, RankID:-1) ERR00100 PTA call acl api failed."
    )
    kernels.call_before(_raiser(lambda: RuntimeError(message)), "aten::topk", "aten::topk.values")


def _trigger_vector_norm_falls_back(device: str) -> None:
    layer = nn.Linear(4, 4).to(device)
    layer(randn(device, 2, 4)).sum().backward()
    nn.utils.clip_grad_norm_(layer.parameters(), 0.1, foreach=False)


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


@flaw(
    "vector-norm-falls-back",
    "the vector norm runs on the CPU and warns in Python",
    issue="none: MPS with PYTORCH_ENABLE_MPS_FALLBACK=1",
    operators=("aten::linalg_vector_norm", "aten::linalg_vector_norm.out", "aten::_foreach_norm.Scalar"),
    statuses=("fallback",),
    cause=Cause.WARNED_FALLBACK,
    trigger=_trigger_vector_norm_falls_back,
)
def vector_norm_falls_back(kernels: KernelChanges) -> None:
    message = (
        "The operator 'aten::linalg_vector_norm.out' is not currently supported on the "
        f"{device_name().upper()} backend and will fall back to run on the CPU. "
        "This may have performance implications."
    )

    def before(*args: Any, **kwargs: Any) -> None:
        warnings.warn(message, UserWarning, stacklevel=3)
        _through_cpu(*args, **kwargs)

    kernels.call_before(before, "aten::linalg_vector_norm", "aten::linalg_vector_norm.out")


def _warned_on_stderr(kernels: KernelChanges, *operators: str) -> None:
    """torch_npu warns through c10's own handler: on file descriptor 2, once per overload."""
    warned: set[str] = set()

    def before_of(name: str) -> Callable[..., None]:
        def before(*args: Any, **kwargs: Any) -> None:
            # Once, as c10's `TORCH_WARN_ONCE`: the detector must know later calls from the first.
            if name not in warned:
                warned.add(name)
                line = (
                    f"[W{time.strftime('%m%d %H:%M:%S')}.000000000 VariableFallbackKernel.cpp:247] Warning: "
                    f"CAUTION: The operator '{name}' is not currently supported on the NPU backend and will fall "
                    "back to run on the CPU. This may have performance implications. (function npu_cpu_fallback)\n"
                )
                # On the descriptor, not through `sys.stderr`: c10's handler does not pass through Python.
                os.write(2, line.encode())
            _through_cpu(*args, **kwargs)

        return before

    for name in operators:
        kernels.call_before(before_of(name), name)


@flaw(
    "isin-falls-back",
    "isin runs on the CPU; the warning goes to file descriptor 2 once",
    issue="Ascend/pytorch#40",
    operators=("aten::isin.Tensor_Tensor", "aten::isin.Tensor_Tensor_out"),
    statuses=("fallback",),
    cause=Cause.WARNED_FALLBACK,
    trigger=lambda device: torch.isin(torch.arange(8).to(device), torch.tensor([2, 3, 5]).to(device)),
)
def isin_falls_back(kernels: KernelChanges) -> None:
    _warned_on_stderr(kernels, "aten::isin.Tensor_Tensor", "aten::isin.Tensor_Tensor_out")


def _trigger_encoder_layer_falls_back(device: str) -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to(device).eval()
    with torch.no_grad():
        return layer(randn(device, 2, 3, 8))


@flaw(
    "encoder-layer-falls-back",
    "the fused encoder layer runs on the CPU; the warning goes to file descriptor 2",
    issue="Ascend/pytorch#51",
    operators=("aten::_transformer_encoder_layer_fwd",),
    statuses=("fallback",),
    cause=Cause.WARNED_FALLBACK,
    trigger=_trigger_encoder_layer_falls_back,
)
def encoder_layer_falls_back(kernels: KernelChanges) -> None:
    _warned_on_stderr(kernels, "aten::_transformer_encoder_layer_fwd")


@flaw(
    "nll-loss-falls-back-silently",
    "the cross-entropy loss runs on the CPU and nothing says so",
    issue="none: any backend on at::native::cpu_fallback with warnings off",
    operators=("aten::nll_loss_forward", "aten::nll_loss_forward.output"),
    statuses=("fallback",),
    cause=Cause.SILENT_FALLBACK,
    trigger=lambda device: F.cross_entropy(randn(device, 4, 5), torch.tensor([0, 1, 2, 3]).to(device)),
)
def nll_loss_falls_back_silently(kernels: KernelChanges) -> None:
    kernels.call_before(_through_cpu, "aten::nll_loss_forward", "aten::nll_loss_forward.output")


@flaw(
    "bincount-stays-on-cpu",
    "bincount returns its result on the CPU",
    issue="none: fallbacks of torch's lazy device that return CPU tensors",
    operators=("aten::bincount",),
    statuses=("fallback", "mismatch"),
    cause=Cause.SILENT_FALLBACK,
    trigger=lambda device: torch.tensor([0, 1, 1, 3]).to(device).bincount(),
)
def bincount_stays_on_cpu(kernels: KernelChanges) -> None:
    kernels.call_after(lambda result: result.cpu(), "aten::bincount")
