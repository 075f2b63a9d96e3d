"""Operators that the device does not have, has not for every dtype, or computes on the CPU."""

from __future__ import annotations

from shadowrun.platforms.sim.flaw import Flaw
from shadowrun.types import Cause

__all__ = ["FLAWS"]

_DISPATCHER = "none: the dispatcher's own NotImplementedError, as on musa, tinygrad and CUDA"
_UNSUPPORTED, _FALLBACK = ("unsupported",), ("fallback",)


def _flaw(
    name: str, description: str, issue: str, operators: tuple[str, ...], statuses: tuple[str, ...],
          cause: Cause | None, explanation: str = "") -> Flaw:  # fmt: skip
    return Flaw(name, "support", description, issue, operators, statuses, cause, explanation=explanation)


FLAWS = (
    _flaw("missing-cumsum", "cumsum has no kernel", _DISPATCHER, ("aten::cumsum", "aten::cumsum_", "aten::cumsum.out"),
          _UNSUPPORTED, Cause.MISSING_OPERATOR, "aten::cumsum.out"),
    _flaw("missing-cummax-helper", "cummax works through _cummax_helper, which has no kernel",
          _DISPATCHER,
          ("aten::cummax", "aten::_cummax_helper"), _UNSUPPORTED, Cause.MISSING_OPERATOR, "aten::_cummax_helper"),
    _flaw("missing-lerp", "lerp_.Scalar, which Adam calls, works through lerp.Scalar_out, which has no kernel",
          _DISPATCHER,
          ("aten::lerp_.Scalar", "aten::lerp.Scalar", "aten::lerp.Scalar_out", "aten::_foreach_lerp_.Scalar",
           "aten::_foreach_lerp.Scalar"), _UNSUPPORTED, Cause.MISSING_OPERATOR, "aten::lerp.Scalar_out"),
    _flaw("missing-addcdiv", "addcdiv_, also inside _foreach_addcdiv_, lacks the kernel addcdiv.out", _DISPATCHER,
          ("aten::addcdiv", "aten::addcdiv_", "aten::addcdiv.out", "aten::_foreach_addcdiv_.ScalarList",
           "aten::_foreach_addcdiv_.Scalar"), _UNSUPPORTED, Cause.MISSING_OPERATOR, "aten::addcdiv.out"),
    _flaw("missing-max-pool-backward", "max-pooling has a forward kernel and no backward kernel", _DISPATCHER,
          ("aten::max_pool2d_with_indices_backward", "aten::max_pool2d_with_indices_backward.grad_input"),
          _UNSUPPORTED, Cause.MISSING_OPERATOR, "aten::max_pool2d_with_indices_backward.grad_input"),
    _flaw("histc-not-implemented", "histc raises NotImplementedError in MPS's words",
          "none: the message of MPS ('not currently implemented for the MPS device')", ("aten::histc",), _UNSUPPORTED,
          Cause.MISSING_OPERATOR),
    _flaw("kthvalue-err01007", "kthvalue raises RuntimeError with torch_npu's ERR01007",
          "none: the message of torch_npu with CPU fallback disabled", ("aten::kthvalue", "aten::kthvalue.values"),
          _UNSUPPORTED, Cause.MISSING_OPERATOR),
    _flaw("ctc-loss-not-lowered", "ctc_loss raises a plain Exception named OperatorNotFound",
          "none: torchax.tensor.OperatorNotFound", ("aten::_ctc_loss", "aten::_ctc_loss.Tensor"), _UNSUPPORTED,
          Cause.MISSING_OPERATOR),
    _flaw("group-norm-no-bf16", "group normalisation has no bfloat16 kernel and says so in aclnn's words",
          "none: torch_npu's 'EZ1001 ... not implemented for DT_BFLOAT16'", ("aten::native_group_norm",), _UNSUPPORTED,
          Cause.MISSING_DTYPE),
    _flaw("softplus-no-half", "softplus is not compiled for float16",
          "none: the dispatch macro of CPU and CUDA kernels",
          ("aten::softplus",), _UNSUPPORTED, Cause.MISSING_DTYPE),
    _flaw("no-float64", "float64 tensors cannot be made", "none: the TypeError of MPS",
          ("aten::_to_copy", "aten::empty.memory_format", "aten::empty_strided", "aten::zeros", "aten::ones",
           "aten::full", "aten::copy_"),
          _UNSUPPORTED, Cause.MISSING_DTYPE),
    _flaw("fft-key-error", "a real FFT ends in KeyError: torch.complex64", "none: the tinygrad backend's KeyError",
          ("aten::_fft_r2c",), _UNSUPPORTED, Cause.MISSING_DTYPE),
    _flaw("topk-device-error", "topk raises the vendor's runtime error 561103",
          "none: torch_npu's 'NPU function error ... 561103'", ("aten::topk", "aten::topk.values"), ("error",), None),
    _flaw("vector-norm-falls-back", "the vector norm runs on the CPU and warns in Python",
          "none: MPS with PYTORCH_ENABLE_MPS_FALLBACK=1",
          ("aten::linalg_vector_norm", "aten::linalg_vector_norm.out", "aten::_foreach_norm.Scalar"), _FALLBACK,
          Cause.WARNED_FALLBACK),
    _flaw("isin-falls-back", "isin runs on the CPU; the warning goes to file descriptor 2 once", "Ascend/pytorch#40",
          ("aten::isin.Tensor_Tensor", "aten::isin.Tensor_Tensor_out"), _FALLBACK, Cause.WARNED_FALLBACK),
    _flaw("encoder-layer-falls-back", "the fused encoder layer runs on the CPU; the warning goes to file descriptor 2",
          "Ascend/pytorch#51", ("aten::_transformer_encoder_layer_fwd",), _FALLBACK, Cause.WARNED_FALLBACK),
    _flaw("nll-loss-falls-back-silently", "the cross-entropy loss runs on the CPU and nothing says so",
          "none: any backend on at::native::cpu_fallback with warnings off", ("aten::nll_loss_forward",
          "aten::nll_loss_forward.output"), _FALLBACK, Cause.SILENT_FALLBACK),
    _flaw("bincount-stays-on-cpu", "bincount returns its result on the CPU",
          "none: fallbacks of torch's lazy device that return CPU tensors", ("aten::bincount",),
          ("fallback", "mismatch"), Cause.SILENT_FALLBACK),
)  # fmt: skip
