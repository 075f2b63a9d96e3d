"""Exceptions of real backends: which of them say that the operator is lacking, and which name."""

import subprocess

import pytest
import torch

from shadowrun.platforms.unsupported import classify, first_sentence
from shadowrun.types import Cause

OP, DTYPE, OTHER = Cause.MISSING_OPERATOR, Cause.MISSING_DTYPE, Cause.IMPLEMENTATION


class OperatorNotFound(Exception):
    """As torchax names it; it derives from nothing special."""


def could_not_run(name, backend):
    return (
        f"Could not run '{name}' with arguments from the '{backend}' backend. This could be because the operator "
        "doesn't exist for this backend, or was omitted during the selective/custom build process (if using custom "
        "build). If you are a Facebook employee using PyTorch on mobile, please visit https://fburl.com/ptmfixes for "
        f"possible resolutions. '{name}' is only available for these backends: [CPU, Meta, ...].\n\nCPU: registered at "
    )


UNSUPPORTED = {
    "dispatcher": (NotImplementedError(could_not_run("aten::_cummax_helper", "npu")), OP, "aten::_cummax_helper"),
    "dispatcher, overload": (NotImplementedError(could_not_run("aten::lgamma.out", "CUDA")), OP, "aten::lgamma.out"),
    "dispatcher, autocast": (NotImplementedError(could_not_run("aten::relu", "Autocastnpu")), OP, "aten::relu"),
    "dispatcher, nested": (NotImplementedError(could_not_run("aten::mm", "NestedTensornpu")), OP, "aten::mm"),
    "dispatcher, sparse": (NotImplementedError(could_not_run("aten::sin", "SparseCsrnpu")), OP, "aten::sin"),
    "dispatcher, mkldnn": (NotImplementedError(could_not_run("aten::cumsum", "MkldnnCPU")), OP, "aten::cumsum"),
    "dtype not compiled": (NotImplementedError("\"addmm_impl_cpu_\" not implemented for 'UInt16'"), DTYPE, ""),
    "dtype not compiled, cuda": (RuntimeError("\"baddbmm_cuda\" not implemented for 'Float8_e5m2'"), DTYPE, ""),
    "convolution": (
        NotImplementedError("convolution_overrideable not implemented. You are likely triggering this with tensor"),
        OP,
        "",
    ),
    "convolution, runtime": (RuntimeError("convolution_overrideable not implemented."), OP, ""),
    "mps": (
        NotImplementedError(
            "The operator 'aten::_linalg_svd.U' is not currently implemented for the MPS device. If you want this op "
            "to be considered for addition please comment on https://github.com/pytorch/pytorch/issues/141287 and "
            "mention use-case, that resulted in missing op as well as commit hash. As a temporary fix, you can set "
            "the environment variable `PYTORCH_ENABLE_MPS_FALLBACK=1` to use the CPU as a fallback for this op."
        ),
        OP,
        "aten::_linalg_svd.U",
    ),
    "mps, float64": (
        TypeError(
            "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
            "Please use float32 instead."
        ),
        DTYPE,
        "",
    ),
    "xpu": (
        NotImplementedError("The operator 'histc' is not currently implemented for the XPU device."),
        OP,
        "aten::histc",
    ),
    "torch_npu, fallback disabled": (
        RuntimeError(
            "The operator 'aten::fmax.out' would execute its main computation on CPU through dispatcher backend "
            "fallback because no NPU kernel is registered, but CPU fallback is disabled by "
            "TORCH_NPU_FALLBACK_CPU_DISABLE=1.\n[ERROR] ERR01007 OPS feature not supported"
        ),
        OP,
        "aten::fmax.out",
    ),
    "torch_npu, sparse": (
        RuntimeError(
            "CAUTION: The operator 'aten::_sparse_mm' is not currently supported on the NPU backend.\n"
            "[ERROR] ERR01007 OPS feature not supported"
        ),
        OP,
        "aten::_sparse_mm",
    ),
    "torch_npu, code only": (RuntimeError("histc failed.\n[ERROR] ERR01007 OPS feature not supported"), OP, ""),
    "torch_npu, dtype": (
        RuntimeError(
            "call aclnnCumsum failed, detail:EZ1001: [PID: 7] Tensor self not implemented for DT_BFLOAT16, should be "
            "in dtype support list [DT_FLOAT,DT_FLOAT16]."
        ),
        DTYPE,
        "",
    ),
    "torch_npu, parameter": (
        RuntimeError(
            "NPU function error: call aclnnRoll failed, error code is 161002\n[ERROR] ERR00100 PTA call acl api failed"
            "\nAclNN_Parameter_Error(EZ1001): The dim of self is 9, and must be in [0, 8]."
        ),
        OP,
        "",
    ),
    "lazy, view": (
        RuntimeError(
            "The operator aten::view appears to be a view operator, but it has no implementation for the backend "
            "\"lazy:0\". View operators don't support falling back to run on the eager, since the tensor's storage"
        ),
        OP,
        "aten::view",
    ),
    "tinygrad, dtype": (KeyError(torch.complex64), DTYPE, ""),
    "mojo": (
        NotImplementedError(
            "aten::nll_loss_forward.output is not supported by mojo eager mode for these inputs (reduction=0)"
        ),
        OP,
        "aten::nll_loss_forward.output",
    ),
    "dlprim, dtype": (RuntimeError("Unsupported data type:ComplexFloat"), DTYPE, ""),
    "torchax": (
        OperatorNotFound("Operator with name aten::_ctc_loss.Tensor has no lowering"),
        OP,
        "aten::_ctc_loss.Tensor",
    ),
    "plain": (NotImplementedError(), OP, ""),
    "plain, with a text": (NotImplementedError("Sparse gradients are for another day"), OP, ""),
}

OTHERS = {
    "shapes": RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"),
    "torch_npu, devices": RuntimeError(
        "Expected all tensors to be on the same device. Expected NPU tensor, please check whether the input tensor "
        "device is correct."
    ),
    "lazy, devices": RuntimeError("Input tensor is not a lazy tensor: torch.FloatTensor"),
    "tinygrad, devices": RuntimeError("expected a tiny tensor, got a cpu one"),
    "tinygrad, compiler": subprocess.CalledProcessError(1, ["clang", "-c"]),
    "tinygrad, index": IndexError("list index out of range"),
    "tinygrad, key": KeyError("buffer"),
    "tinygrad, assertion": AssertionError(),
    "dlprim, build": RuntimeError("Failed to build program source softmax with parameters -DTYPE=half"),
    "device absent": AssertionError("Torch not compiled with CUDA enabled"),
    "device unknown": RuntimeError("Expected one of cpu, cuda, ipu, xpu device type at start of device string: npux"),
    "torch_npu, later": RuntimeError("The Inner error is reported as above. error code is 507018"),
    "out of memory": torch.OutOfMemoryError("npu out of memory. Tried to allocate 2.00 GiB"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_texts_that_say_that_the_operator_is_lacking(name):
    error, cause, kernel = UNSUPPORTED[name]
    failure = classify(error)
    assert not failure.supported
    assert failure.cause is cause
    assert failure.missing_kernel == kernel
    assert failure.message.startswith(type(error).__name__)
    assert len(failure.message) <= 330


@pytest.mark.parametrize("name", OTHERS)
def test_texts_that_say_something_else(name):
    failure = classify(OTHERS[name])
    assert failure.supported
    assert failure.cause is OTHER
    assert failure.missing_kernel == ""


def test_a_subclass_counts_as_its_base():
    class NotYet(NotImplementedError):
        pass

    failure = classify(NotYet(could_not_run("aten::sin", "npu")))
    assert (failure.supported, failure.missing_kernel) == (False, "aten::sin")
    assert failure.message.startswith("NotYet: Could not run 'aten::sin'")


def test_the_dispatcher_s_own_words_are_read():
    with pytest.raises(NotImplementedError) as lacking:
        torch.ones(3, 3).to_sparse().cumsum(0)
    failure = classify(lacking.value)
    assert (failure.supported, failure.cause) == (False, OP)
    assert "cumsum" in failure.missing_kernel
    with pytest.raises(NotImplementedError) as lacking:
        torch.ones(2, 2, dtype=torch.uint16) @ torch.ones(2, 2, dtype=torch.uint16)
    assert classify(lacking.value).cause is DTYPE


def test_the_words_of_a_user_s_shape_error_are_not_taken_for_a_missing_kernel():
    with pytest.raises(RuntimeError) as raised:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert classify(raised.value).supported


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", ""),
        ("one line", "one line"),
        ("First. Second.", "First."),
        ("first line\nsecond line", "first line"),
        ("\n  indented   and spread  \nmore", "indented and spread"),
        ("What is this? It is a text.", "What is this?"),
        ("See https://pytorch.org/a.B for aten::add.Tensor", "See https://pytorch.org/a.B for aten::add.Tensor"),
        ("version 2.13 is meant. Really", "version 2.13 is meant."),
        ("x" * 400, "x" * 299 + "…"),
    ],
)
def test_first_sentence(text, sentence):
    assert first_sentence(text) == sentence


def test_a_dispatcher_error_of_ten_kilobytes_becomes_a_line():
    text = could_not_run("aten::sin", "npu") + "x: registered at y [kernel]\n" * 400
    assert first_sentence(text) == "Could not run 'aten::sin' with arguments from the 'npu' backend."
