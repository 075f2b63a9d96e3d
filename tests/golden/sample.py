# ruff: noqa: E501, TC003 - rows of a table
"""A made-up run with every kind of finding, as a real one would record it; no torch needed."""

from __future__ import annotations

import math
from pathlib import Path

from shadowrun.store import DataFile
from shadowrun.types import Cause, Phase, RunInfo, Status, TensorDiff, TensorMeta, Verdict

F, B, O = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER
ARGV = ("train.py", "--model", "resnet18", "--data", "/data/cifar", *(f"--option-{i}=value" for i in range(40)))

INFO = RunInfo(
    target="npu",
    ref="cpu",
    target_fingerprint={"device": "npu:0", "name": "Simulated NPU", "driver": "7.0.1", "memory_bytes": 8 << 30},
    ref_fingerprint={"device": "cpu", "name": "x86_64, AVX2", "threads": 2},
    versions={"shadowrun": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "numpy": "2.4.0"},
    argv=ARGV,
    config={"on_unsupported": "fallback", "slow_ratio": 10.0, "rtol": None, "atol": None, "drift": True},
    started="2026-11-30T10:00:00Z",
    wall_s=3.42,
    own_s=2.12,
    notes=("The target is simulated: its times say nothing about hardware.",),
)


def meta(dtype: str, *shape: int, device: str = "npu:0") -> TensorMeta:
    stride, strides = 1, []
    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= size
    return TensorMeta(dtype, shape, tuple(strides), device)


def diff(name: str, dtype: str, *shape: int, **figures) -> TensorDiff:
    figures.setdefault("n_elements", math.prod(shape))
    return TensorDiff(name, meta(dtype, *shape), meta(dtype, *shape, device="cpu"), **figures)


MATCH = Verdict(Status.MATCH)


def rounding(ulp: int) -> Verdict:
    return Verdict(
        Status.MATCH,
        Cause.ROUNDING,
        "accumulation order",
        f"at most {ulp} ULP, 0.4 of the operator's own rounding",
        0.95,
    )


def round_diff(dtype: str, *shape: int, ulp: int) -> TensorDiff:
    return diff(
        "output 0", dtype, *shape, n_different=12, max_abs=ulp * 6e-8, max_rel=ulp * 1.2e-7, rmse=2e-8, max_ulp=ulp,
        remaining_bits=24 - ulp.bit_length(), worst_index=(1, 2), worst_actual=1.0 + ulp * 6e-8, worst_expected=1.0,
    )  # fmt: skip


MM_DIFF = diff(
    "output 0", "f32", 64, 1000, n_different=63871, n_mismatched=61004, max_abs=0.0317, max_rel=0.0088, rmse=0.0041,
    max_ulp=73_912, remaining_bits=7, worst_index=(17, 403), worst_actual=3.5938, worst_expected=3.6255,
    excess_actual=4128.0, excess_expected=0.6,
)  # fmt: skip
BN_DIFF = diff(
    "running_var", "f32", 64, n_different=64, n_mismatched=64, max_abs=0.0021, max_rel=0.0039, rmse=0.0015,
    max_ulp=32_768, remaining_bits=8, worst_index=(5,), worst_actual=0.9004, worst_expected=0.9025,
    excess_actual=910.0, excess_expected=0.5,
)  # fmt: skip
SOFTMAX_DIFF = diff(
    "output 0", "f32", 64, 8, 49, 49, n_different=98, n_mismatched=98, max_abs=0.0, n_nan=98, worst_index=(3, 1, 7, 0),
    worst_actual=math.nan, worst_expected=0.0,
)  # fmt: skip
EXP_DIFF = diff(
    "output 0", "f32", 64, n_different=3, n_mismatched=3, n_inf=3, worst_index=(9,), worst_actual=3.4028235e38,
    worst_expected=math.inf,
)  # fmt: skip
STRIDE_DIFF = diff("output 0", "f32", 64, 64, detail="stride (64, 1) against (1, 64)")

# op, inputs, dtypes, shapes, module, phase, site, verdict, missing kernel, diffs, reference and target times
CALLS = [
    ("aten::convolution", "f32[64, 3, 32, 32], f32[64, 3, 3, 3], None, [1, 1]", ("f32", "f32"), "[64, 3, 32, 32] [64, 3, 3, 3]",
     "ResNet.conv1", F, "model.py:88 in forward", rounding(3), "", (round_diff("f32", 64, 64, 32, 32, ulp=3),), 5200, 9100),
    ("aten::native_batch_norm", "f32[64, 64, 32, 32], f32[64], f32[64], f32[64], f32[64], True, 0.1, 1e-05", ("f32",),
     "[64, 64, 32, 32] [64]", "ResNet.bn1", F, "model.py:89 in forward",
     Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "running variance without Bessel's correction",
             "64 of 64 elements of running_var are beyond rounding; actual = expected * (n-1)/n fits all", 0.9),
     "", (BN_DIFF,), 310, 290),
    ("aten::relu_", "f32[64, 64, 32, 32]", ("f32",), "[64, 64, 32, 32]", "ResNet.relu", F, "model.py:90 in forward",
     MATCH, "", (), 80, 75),
    ("aten::roll", "f32[64, 49, 96], [3], [1]", ("f32",), "[64, 49, 96]", "ResNet.layer1.0.attn", F, "attention.py:41 in shift",
     Verdict(Status.UNSUPPORTED, Cause.MISSING_OPERATOR, "no kernel", "NotImplementedError: Could not run 'aten::roll'"),
     "aten::roll", (), 60, -1),
    ("aten::_softmax", "f32[64, 8, 49, 49], -1, False", ("f32",), "[64, 8, 49, 49]", "ResNet.layer1.0.attn", F,
     "attention.py:57 in forward",
     Verdict(Status.MISMATCH, Cause.EXCEPTIONAL_VALUES, "NaN for rows of -inf",
             "98 elements are NaN on the target only; their rows of the input are all -inf", 1.0),
     "", (SOFTMAX_DIFF,), 420, 380),
    ("aten::mm", "f32[64, 512], f32[512, 1000]", ("f32", "f32"), "[64, 512] [512, 1000]", "ResNet.fc", F, "/home/me/net/model.py:101 in forward",
     Verdict(Status.MISMATCH, Cause.REDUCED_PRECISION, "inputs rounded to bf16",
             "error is 4,128 times the operator's own rounding; rounding the inputs to bf16 gives the same bits "
             "in 63,998 of 64,000 elements", 0.99),
     "", (MM_DIFF,), 900, 350),
    ("aten::cumsum", "f32[64, 1000], 1", ("f32",), "[64, 1000]", "ResNet.head", F, "model.py:104 in forward",
     Verdict(Status.FALLBACK, Cause.SILENT_FALLBACK, "computed on the CPU", "no kernel is registered for the target"),
     "aten::cumsum.out", (), 45, 410),
    ("aten::sort", "f32[64, 1000], -1, True", ("f32",), "[64, 1000]", "ResNet.head", F, "model.py:105 in forward",
     MATCH, "", (), 240, 9200),
    ("aten::exp", "f32[64]", ("f32",), "[64]", "ResNet.head", F, "model.py:106 in forward",
     Verdict(Status.MISMATCH, Cause.EXCEPTIONAL_VALUES, "saturates instead of overflowing", "3 elements are inf on the reference only"),
     "", (EXP_DIFF,), 12, 11),
    ("aten::scatter_add_", "f32[10], 0, i64[64], f32[64]", ("f32", "i64"), "[10] [64] [64]", "ResNet.head", F,
     "model.py:108 in forward", Verdict(Status.MATCH, Cause.NON_DETERMINISM, "order of additions", "two runs on the target differ", 0.8),
     "", (round_diff("f32", 10, 1, ulp=2),), 14, 15),
    ("aten::index_put_", "f32[10, 4], [i64[64]], f32[64, 4], False", ("f32", "i64"), "[10, 4] [64] [64, 4]", "ResNet.head", F,
     "model.py:109 in forward", Verdict(Status.UNVERIFIED, Cause.UNDEFINED, "index written twice", "54 of 64 indices repeat"),
     "", (), 20, 22),
    ("aten::mm", "f32[512, 64], f32[64, 1000]", ("f32", "f32"), "[512, 64] [64, 1000]", "ResNet.fc", B, "/home/me/net/model.py:101 in forward",
     Verdict(Status.MISMATCH, Cause.REDUCED_PRECISION, "inputs rounded to bf16", "error is 3,020 times the operator's own rounding", 0.99),
     "", (diff("output 0", "f32", 512, 1000, n_different=500_100, n_mismatched=480_000, max_abs=0.012, max_rel=0.0081,
               rmse=0.003, max_ulp=65_100, remaining_bits=7, worst_index=(1, 1), worst_actual=1.01, worst_expected=1.022,
               excess_actual=3020.0, excess_expected=0.5),), 910, 340),
    ("aten::t_copy", "f32[64, 64]", ("f32",), "[64, 64]", "ResNet.fc", B, "/home/me/net/model.py:101 in forward",
     Verdict(Status.MISMATCH, Cause.METADATA, "stride", "the target's result is contiguous, the reference's is not"),
     "", (STRIDE_DIFF,), 8, 9),
    ("aten::add_.Tensor", "f64[64], f64[64]", ("f64", "f64"), "[64] [64]", "", O, "train.py:31 in step",
     Verdict(Status.UNSUPPORTED, Cause.MISSING_DTYPE, "no f64 kernel", "RuntimeError: add.out: dtype f64 is not supported"),
     "aten::add.out", (), 7, -1),
    ("aten::add_.Tensor", "f32[64], f32[64]", ("f32", "f32"), "[64] [64]", "", O, "train.py:31 in step", MATCH, "", (), 6, 6),
    ("aten::lgamma", "f32[64]", ("f32",), "[64]", "", O, "train.py:40 in step",
     Verdict(Status.ERROR, None, "RuntimeError", "device-side assertion failed"), "", (), 9, -1),
    ("aten::bmm", "f32[8, 4, 4], f32[8, 4, 4]", ("f32", "f32"), "[8, 4, 4] [8, 4, 4]", "", O, "train.py:44 in step",
     Verdict(Status.ERROR, Cause.HARNESS, "MemoryError", "copying the inputs failed"), "", (), -1, -1),
    ("aten::topk", "f32[64, 1000], 5", ("f32",), "[64, 1000]", "", O, "train.py:50 in step",
     Verdict(Status.UNVERIFIED, None, "budget: call holds 6 GiB"), "", (), -1, 300),
]  # fmt: skip

# name, backend, operators, first line: recorded in the first step
REGIONS = [
    ("compiled::graph 0", "inductor", 12, "/home/me/net/head.py:21 in forward"),
    ("compiled::graph 1", "inductor", 31, ""),
    ("compiled::graph 2", "openvino", 4, "/home/me/net/loss.py:9 in smooth"),
    ("compiled::graph 3", "inductor", 6, "/home/me/net/drop.py:5 in forward"),
]
REGION_CALLS = [
    (
        "compiled::graph 0",
        F,
        Verdict(Status.MATCH, Cause.ROUNDING, "nearer the truth than eager", "sum: 0.2 units of rounding against 3.1"),
        (
            diff(
                "sum",
                "f32",
                64,
                n_different=5,
                max_abs=1.2e-7,
                max_rel=2e-7,
                max_ulp=2,
                remaining_bits=22,
                worst_index=(3,),
                worst_actual=0.5,
                worst_expected=0.50000012,
                excess_actual=0.2,
                excess_expected=3.1,
            ),
        ),
    ),
    (
        "compiled::graph 1",
        B,
        Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "", "mul: 61 of 64 elements beyond rounding", 0.9),
        (
            diff(
                "mul",
                "f32",
                64,
                n_different=64,
                n_mismatched=61,
                max_abs=0.5,
                max_rel=1.0,
                max_ulp=8_388_608,
                remaining_bits=0,
                worst_index=(7,),
                worst_actual=0.5,
                worst_expected=1.0,
                excess_actual=9_000_000.0,
                excess_expected=0.3,
            ),
        ),
    ),
    ("compiled::graph 2", F, MATCH, ()),
    (
        "compiled::graph 3",
        F,
        Verdict(Status.UNVERIFIED, Cause.RANDOMNESS, "compiled code has other random numbers than eager"),
        (),
    ),
]

SKIPPED = {
    ("aten::view", "npu:0", "view: no values are computed"): 420,
    ("aten::t", "npu:0", "view: no values are computed"): 60,
    ("aten::empty.memory_format", "npu:0", "uninitialised output"): 33,
    ("aten::detach", "npu:0", "view: no values are computed"): 31,
}


def build(path: Path | None = None, steps: int = 3, *, compiled: bool = False, **options) -> DataFile:
    """Record the run; every step makes the same calls, and the accumulated error grows; `compiled` adds regions."""
    data = DataFile.create(path, options.pop("info", INFO), **options)
    contexts = [
        data.context_id(op, inputs, dtypes, shapes, module, phase, site, "npu:0")
        for op, inputs, dtypes, shapes, module, phase, site, *_ in CALLS
    ]
    seq = 0
    for step in range(steps):
        for context, (*_, verdict, kernel, diffs, ref_us, target_us) in zip(contexts, CALLS, strict=True):
            data.add_diffs(seq, diffs)
            # The error that mm brings in is carried along; other calls were not traced.
            drift = 1e-6 * 4 ** (seq / len(CALLS)) if kernel == "" and step * len(CALLS) + 5 == seq else -1.0
            ref, target = (us + seq if us > 0 else -1 for us in (ref_us, target_us))
            data.add((seq, step, context, data.verdict_id(verdict, kernel), ref, target, drift * 10, drift))
            seq += 1
        data.add_step(step, 1.1 * step, 1.05)
    data.add_skipped(SKIPPED)
    for name, backend, n, site in REGIONS if compiled else ():
        data.add_region(name, backend, n, site)
    for name, phase, verdict, diffs in REGION_CALLS if compiled else ():
        form = (name, "f32[64, 8]", ("f32",), "[64, 8]", "ResNet.head", phase, "train.py:52 in step", "npu:0")
        data.add_diffs(seq, diffs)
        data.add((seq, 0, data.context_id(*form), data.verdict_id(verdict), -1.0, -1.0, -1.0, -1.0))
        seq += 1
    if compiled:
        data.add_skipped({("compiled::graph", "", "compiled before the comparison began"): 7})
    data.close()
    return data
