import sys

from hypothesis import given
from hypothesis import strategies as st

from shadowrun.studies.campaign.causes.root_causes import Seen, Signature, root_causes, signature
from shadowrun.studies.campaign.causes.scripts import ddmin
from shadowrun.studies.campaign.run_variants import VariantFinding

MM = VariantFinding("aten::mm", "f32", "mismatch", "reduced precision", "inputs rounded to bf16", "evidence", "forward")


def test_a_signature_leaves_out_evidence_and_explanation_but_not_the_exception():
    other = VariantFinding("aten::mm", "f64", "mismatch", "reduced precision", "inputs rounded to tf32", "", "backward")
    assert signature(MM) == signature(other) == Signature("mismatch", "aten::mm", "float", "reduced precision", "")
    raised = VariantFinding("aten::mm", "bf16", "error", "", "RuntimeError", "no memory")
    assert signature(raised) == Signature("error", "aten::mm", "16-bit float", "", "RuntimeError")


def test_findings_of_one_signature_are_one_root_cause():
    seen = [Seen(n, 0, 10 - n % 3, MM) for n in range(9)]
    (cause,) = root_causes(reversed(seen), 1)
    assert (cause.n_variants, cause.first, cause.smallest.number, cause.smallest.size) == (9, 0, 2, 8)
    assert not cause.is_framework
    assert str(cause.signature) == "mismatch aten::mm, float: reduced precision"


def test_what_each_platform_shows_is_a_flaw_of_the_framework():
    both = [Seen(1, 0, 3, MM), Seen(2, 1, 3, MM)]
    assert root_causes(both, 2)[0].is_framework
    assert not root_causes(both, 3)[0].is_framework
    # With one target, nothing tells a flaw of the framework from one of the platform.
    assert not root_causes(both[:1], 1)[0].is_framework
    assert root_causes([Seen(1, -1, 3, MM)], 1)[0].is_framework


def test_what_a_platform_lacks_is_one_line_for_each_operator_after_all_else():
    missing = [VariantFinding("aten::erf", dtype, "silent fallback", "silent fallback") for dtype in ("f32", "bf16")]
    causes = root_causes([Seen(1, 0, 3, missing[0]), Seen(2, 0, 3, missing[1]), Seen(3, 0, 3, MM)], 1)
    assert [(c.signature.op, c.n_variants, c.is_missing) for c in causes] == [
        ("aten::mm", 1, False),
        ("aten::erf", 2, True),
    ]
    # A dtype that an operator lacks is not the operator.
    no_half = VariantFinding("aten::erf", "f16", "unsupported dtype", "missing dtype")
    assert str(root_causes([Seen(1, 0, 3, no_half)], 1)[0].signature).startswith("unsupported dtype aten::erf, 16-bit")


def mul(op, dtype, explanation, number, cause="flushed subnormals"):
    return Seen(number, 0, 3, VariantFinding(op, dtype, "mismatch", cause, explanation))


def test_forms_and_dtypes_of_one_fault_are_one_root_cause():
    flush = "subnormals are zero"
    found = [
        mul("aten::mul.Tensor", "f32", flush, 5),
        mul("aten::mul_.Tensor", "c64", flush, 2),
        mul("aten::mul.Scalar", "bf16", flush, 9),
        mul("aten::mul.Scalar", "bf16", "", 9),
    ]
    (cause,) = root_causes(found, 1)
    assert (str(cause.signature), cause.n_variants, cause.first) == (
        "mismatch aten::mul_.Tensor, complex: flushed subnormals",
        3,
        2,
    )
    assert {s.op for s in cause.others} == {"aten::mul.Tensor", "aten::mul.Scalar"}
    assert cause.smallest.finding.op == "aten::mul_.Tensor"  # the recipe shows the signature
    assert root_causes(reversed(found), 1) == [cause]


def test_other_faults_of_one_operator_stay_apart():
    apart = [
        mul("aten::mm", "f32", "inputs rounded to bf16", 1, "reduced precision"),
        mul("aten::mm", "f16", "accumulated in f16", 2, "reduced precision"),  # explained in another way
        mul("aten::mm", "f32", "inputs rounded to bf16", 3, "implementation"),
        mul("aten::mm", "f32", "", 4, "metadata"),
        mul("aten::mm", "f16", "", 5, "metadata"),  # nothing but the operator is the same
        mul("aten::bmm", "f32", "inputs rounded to bf16", 6, "reduced precision"),
        Seen(7, 0, 3, VariantFinding("aten::mm", "f32", "error", "", "RuntimeError", "no memory for 5 blocks")),
        Seen(8, 0, 3, VariantFinding("aten::mm", "f16", "error", "", "RuntimeError", "no memory for 71 blocks")),
        Seen(9, 0, 3, VariantFinding("aten::mm", "i64", "error", "", "RuntimeError", "invalid argument")),
    ]
    assert len(root_causes(apart, 1)) == len(apart) - 1


def test_groups_are_one_fault_by_way_of_a_third():
    found = [
        mul("aten::mul.Tensor", "f32", "a", 1),
        mul("aten::mul_.Tensor", "c64", "b", 2),
        mul("aten::mul.Scalar", "bf16", "c", 3),
        mul("aten::mul.Tensor", "f32", "b", 4),
        mul("aten::mul.Tensor", "f32", "c", 5),
        mul("aten::add.Tensor", "f32", "c", 6),
    ]
    assert [c.n_variants for c in root_causes(found, 1)] == [5, 1]


def test_a_store_with_many_explanations_takes_a_time_in_proportion():
    def lines(n):
        found = [mul("aten::mm", str(i), str(i), i) for i in range(n)]  # no dtype of torch, no two alike
        count = 0

        def trace(frame, event, _):
            nonlocal count
            count += event == "line" and frame.f_code.co_filename == root_causes.__code__.co_filename
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            causes = root_causes(found, 1)
        finally:
            sys.settrace(before)
        assert len(causes) == n
        return count

    assert lines(400) < 5 * lines(100)


def test_the_worst_verdict_comes_first():
    crash = VariantFinding("aten::mm", "f32", "crash")
    causes = root_causes([*(Seen(n, 0, 3, MM) for n in range(5)), Seen(9, 0, 3, crash)], 1)
    assert [c.signature.kind for c in causes] == ["crash", "mismatch"]


@given(st.lists(st.integers(0, 30), max_size=12, unique=True), st.data())
def test_ddmin_finds_what_is_needed(items, data):
    needed = set(data.draw(st.lists(st.sampled_from(items), max_size=4))) if items else set()
    assert set(ddmin(items, lambda s: needed <= set(s))) == needed


def test_ddmin_ends_after_its_tries():
    calls = []

    def holds(subset):
        calls.append(subset)
        return len(subset) > 40

    assert len(ddmin(range(64), holds, max_tries=10)) > 40
    assert len(calls) <= 80
