"""A reference that computes in a wider dtype: rounding passes, precision that is lost on the way does not."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

import shadowrun
from shadowrun import Cause, PlatformError, Status, sim
from shadowrun.numerics.bits import bits_equal
from shadowrun.numerics.device_statistics import PendingStatistics
from shadowrun.platforms.device import resolve
from shadowrun.replay.comparator import Comparator
from tests.models import assert_same, digits, tokens, train


def untimed(run):
    return [f for f in run.findings() if f.kind != "slow"]


@pytest.mark.parametrize("make", [digits, tokens])
@pytest.mark.parametrize(
    ("device", "ref"),
    [("cpu", "cpu[compute=float64]"), ("sim", "sim[compute=float64]"), ("sim", "cpu[compute=float64,threads=1]")],
)
def test_rounding_is_no_finding_and_the_program_is_unchanged(clean_sim, make, device, ref, monkeypatch):
    fetched, fetch = [], PendingStatistics.fetch
    monkeypatch.setattr(PendingStatistics, "fetch", lambda self: fetched.append(fetch(self)) or fetched[-1])
    plain = train(make, device, steps=2)
    run = shadowrun.compare(device, ref=ref)
    assert_same(train(make, device, steps=2, run=run), plain)
    counts = run.counts()
    assert untimed(run) == []
    assert counts[Status.ERROR] == 0
    assert counts[Status.MATCH] > 50
    # That it computed in another dtype shows: results differ, by rounding.
    on_device = [found.n_different for batch in fetched for found in batch]
    judged = [r for r in run.records(status=Status.MATCH) if r.verdict.cause is Cause.ROUNDING]
    assert sum(map(bool, on_device)) > 10 if on_device else judged


def test_lost_precision_is_found_without_another_device(clean_sim):
    with sim.flaws("matmul-in-bf16"):
        run = shadowrun.compare("sim", ref="sim[compute=float64]")
        train(tokens, "sim", steps=1, run=run)
    assert {f.op for f in untimed(run)} <= {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
    assert {(f.cause, f.explanation) for f in untimed(run)} == {(Cause.REDUCED_PRECISION, "inputs rounded to bf16")}


def test_few_results_leave_the_device(clean_sim, monkeypatch):
    judged, compare = [], Comparator.compare_and_record
    monkeypatch.setattr(
        Comparator,
        "compare_and_record",
        lambda self, call, *a, **k: judged.append(call) or compare(self, call, *a, **k),
    )
    run = shadowrun.compare("sim", ref="sim[compute=float64]")
    train(tokens, "sim", steps=1, run=run)
    on_sim = [call for call in judged if call.role.device_name.startswith("sim")]
    assert 0 < len(on_sim) < run.counts()[Status.MATCH] / 8, len(on_sim)


def one_of(dtype, x, index):
    half = x.to(dtype)
    yield torch.softmax(half, -1)
    yield torch.sum(half, 0, dtype=torch.float32)
    yield half.t()[1:].contiguous(), half.argmax(-1), half[index]
    yield torch.nn.functional.layer_norm(half, (16,))
    yield half.clone().add_(half.t()[:8].t()[:8, :1])
    yield torch.cumsum(half, 0), half.to(torch.float64), half.long(), torch.nan_to_num(half / 0)
    written, factors = half.new_empty(0), torch.empty(0)
    torch.mul(half.t(), half.t(), out=written)
    # It gives what it writes to strides of its own.
    torch.linalg.ldl_factor_ex(
        x[:, :8] @ x[:, :8].T, out=(factors, torch.empty(0, dtype=torch.int), torch.empty(0, dtype=torch.int))
    )
    yield written, factors
    weights = [half.clone(), half.clone()]
    torch._foreach_add_(weights, weights[::-1], alpha=0.5)
    yield weights
    # The next number of this dtype has no meaning in a wider one.
    yield torch.nextafter(x, x + 1)
    yield torch.nn.functional.scaled_dot_product_attention(*[half.view(1, 2, 4, 16)] * 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("compute", ["float32", "float64"])
def test_results_keep_their_form(dtype, compute):
    x, index = torch.randn(8, 16), torch.tensor([1, 3])
    plain = list(one_of(dtype, x, index))
    with shadowrun.compare("cpu", ref=f"cpu[compute={compute}]") as run:
        observed = list(one_of(dtype, x, index))
    pairs = list(zip(tree_leaves(observed), tree_leaves(plain), strict=True))
    assert all(bits_equal(a, b) and a.stride() == b.stride() for a, b in pairs)
    assert run.findings() == [], run.findings()
    assert {r.verdict.status for r in run.records()} <= {Status.MATCH, Status.SKIPPED}


def test_what_has_no_wide_kernel_is_unverified():
    a = torch.randn(16, 16).to(torch.float8_e4m3fn)
    b = torch.randn(16, 16).to(torch.float8_e4m3fn).t()
    with shadowrun.compare("cpu", ref="cpu[compute=float64]") as run:
        torch._scaled_mm(a, b, torch.ones(()), torch.ones(()), out_dtype=torch.float32)
    (record,) = [r for r in run.records() if r.call.op == "aten::_scaled_mm"]
    assert record.verdict.status is Status.UNVERIFIED
    assert record.verdict.explanation.startswith("it does not run in float64")


def test_inputs_that_do_not_fit_in_the_wider_dtype_are_unverified():
    x = torch.randn(1 << 16)
    with shadowrun.compare("cpu", ref="cpu[compute=float64]", max_bytes=300_000) as run:
        x.exp()
    assert [r.verdict.explanation for r in run.records(status=Status.UNVERIFIED)] == [
        "budget: its inputs in the wider dtype exceed max_bytes"
    ]


@pytest.mark.parametrize("spec", ["cpu[compute=float16]", "cpu[compute=float64,isa=default]"])
def test_bad_settings(spec):
    with pytest.raises(PlatformError, match="compute"):
        shadowrun.compare("cpu", ref=spec)


def test_only_comparisons_compute_in_another_dtype():
    with pytest.raises(PlatformError, match="is for comparisons"):
        resolve("cpu[compute=float64]")
