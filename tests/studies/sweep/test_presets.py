"""All of torch's database on the simulated device: what is blamed is what the catalogue names, and nothing else."""

import pytest

from shadowrun.sim import CATALOGUE, PRESETS
from shadowrun.studies.isolation.pool import Limits
from shadowrun.studies.sweep import opinfo
from shadowrun.studies.sweep.cases import FAILURES, PARTS, Kind, Part
from shadowrun.studies.sweep.coverage_file import CoverageFile
from shadowrun.studies.sweep.run_sweep import SweepRequest, plan, sweep

GAPS = {
    ("sparse.mm.reduce", Kind.UNSUPPORTED), ("sparse.sampled_addmm", Kind.UNSUPPORTED), ("to_sparse", Kind.UNSUPPORTED),
    ("to", Kind.UNSUPPORTED),  # pinned memory
    ("mode", Kind.ERROR),  # out=: "mode only supports CPU, CUDA and XPU device type"
    ("resize_as_", Kind.MISMATCH),
}  # fmt: skip
"""What the device lacks without any flaw: operator and kind."""

INSIDE = {
    "_trilinear": "bmm",
    "embedding": "index_select",
    "linalg_pinv": "mm",
    "_linear_cross_entropy_batch_chunked": "mm",
    "_linear_cross_entropy_batch_chunked_no_reduction": "mm",
    "_unsafe_masked_index_put_accumulate": "index_put",
}
"""Operators whose one kernel for all devices calls another: the flaw of that is theirs."""

CALLED = {
    "clean": (),
    "support": tuple(name for name in PRESETS["support"] if name != "encoder-layer-falls-back"),
    "exceptional": ("tril-of-inf", "round-loses-zero-sign"),
    "low-precision": ("matmul-in-bf16", "matmul-in-tf32", "convolution-in-tf32", "matmul-accumulates-in-half"),
    "rounding": (),
    "young": (
        *("missing-lerp", "missing-max-pool-backward", "nll-loss-falls-back-silently", "vector-norm-falls-back"),
        *("matmul-in-bf16", "softmax-error", "gelu-by-tanh", "relu-backward-leaks", "biased-running-variance"),
        "embedding-loses-duplicates",
    ),
}
"""Flaws of each preset that a case of the database shows. The others need NaN, overflow, long rows or a fused layer."""


def base(name):
    """``addmm`` for ``aten::addmm_.out``."""
    name = name.partition("::")[2].partition(".")[0].removesuffix("_")
    return INSIDE.get(name, name)


def flaws_of(case, finding, preset):
    """Flaws of the preset that can be what a finding shows."""
    if finding.kind is Kind.UNSUPPORTED_DTYPE and "support float64" in finding.message:
        return {"no-float64"} & set(PRESETS[preset])
    names = {base(name) for name in (finding.op, finding.kernel) if name}
    if finding.kind is Kind.MISSING_ERROR:  # no operator was called that could be blamed
        names = {case.operator.rpartition(".")[2]}
    return {name for name in PRESETS[preset] if names & {base(op) for op in CATALOGUE[name].operators}}


QUIET = {"on_result": lambda *_: None, "on_task": lambda _: None}


@pytest.mark.parametrize("every", [50, pytest.param(1, marks=pytest.mark.slow)])
def test_a_clean_device_gives_a_clean_sweep(tmp_path, every):
    """Of no preset: nothing but the target names the device, and backward passes have to find it all the same.

    In place, the CPU makes what `addbmm_` writes to as large as the product.
    """
    ops = ("addbmm", *sorted(opinfo.database())[::every])
    wish = SweepRequest("sim", ops=ops, parts=PARTS, samples=1)
    path = tmp_path / "x.shadowcov"
    assert sweep(wish, plan(wish), path, jobs=1, limits=Limits(600.0, 8 << 30), **QUIET)
    results = list(CoverageFile.open(path).results())
    found = {(case.operator, outcome.kind) for case, outcome in results if outcome.kind in FAILURES}
    passed = {(case.operator, case.part) for case, outcome in results if outcome.kind is Kind.PASS}
    print(f"{len({operator for operator, _ in passed})} operators, {len(results)} cases, {found}")
    assert found <= GAPS
    assert {("addbmm", part) for part in (Part.FORWARD, Part.BACKWARD, Part.INPLACE, Part.OUT, Part.MEMORY)} <= passed
    assert len(passed) > 3 * len(ops)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_blamed_is_what_the_catalogue_names(tmp_path, preset):
    dtypes = ("float32", "bfloat16", "float16", "float64", "int64") if preset == "support" else ("float32", "bfloat16")
    wish = SweepRequest(
        "sim",
        dtypes=dtypes,
        parts=(Part.FORWARD, Part.BACKWARD, Part.INPLACE, Part.TRANSPOSED, Part.INVALID),
        samples=3,
        flaws=PRESETS[preset],
    )
    path = tmp_path / "x.shadowcov"
    assert sweep(wish, plan(wish), path, jobs=2, limits=Limits(600.0, 8 << 30), **QUIET)
    found, unexplained = set(), []
    for case, outcome in CoverageFile.open(path).results():
        for finding in outcome.findings:
            if finding.kind in FAILURES and (case.operator, finding.kind) not in GAPS:
                found |= flaws_of(case, finding, preset)
                if not flaws_of(case, finding, preset):
                    unexplained.append((str(case), finding))
    assert unexplained == []
    assert found == set(CALLED[preset])
