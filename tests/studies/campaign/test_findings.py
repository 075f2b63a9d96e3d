from hypothesis import given
from hypothesis import strategies as st

from shadowrun.studies.campaign.findings import Seen, Signature, root_causes, signature
from shadowrun.studies.campaign.reduction import ddmin
from shadowrun.studies.campaign.runner import VariantFinding

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
