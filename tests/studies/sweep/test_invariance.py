"""A platform against itself: vector body and scalar tail, layouts, slices of a batch."""

import pytest
import torch

from shadowrun.studies.sweep.batch_arguments import batch_arguments
from shadowrun.studies.sweep.cases import NOT_INVARIANT, Kind, Part
from shadowrun.types import Cause
from tests.studies.sweep.test_probes import failures, found

pytestmark = pytest.mark.usefixtures("clean_sim")
ATEN = torch.ops.aten


def test_a_wrong_tail_is_found(clean_sim):
    clean_sim.enable(flaws=["silu-tail"])
    shown = found("nn.functional.silu", Part.TAIL)
    assert [(f.kind, f.op, f.cause) for f in shown] == [(Kind.MISMATCH, "aten::silu", Cause.LAYOUT)]
    assert shown[0].explanation == "vector body and scalar tail differ"
    assert "inputs" in shown[0].message


def test_strides_that_are_ignored_are_found(clean_sim):
    clean_sim.enable(flaws=["leaky-relu-ignores-strides"])
    shown = failures(found("nn.functional.leaky_relu", Part.LAYOUT))
    assert {(f.kind, f.op, f.explanation) for f in shown} == {
        (Kind.MISMATCH, "aten::leaky_relu", "strided and contiguous inputs differ")
    }
    assert not failures(found("nn.functional.relu", Part.LAYOUT))


def test_an_item_that_depends_on_its_batch_is_found(clean_sim):
    """The flaw is in every 1024th element of a whole: in a batch another one of an item than alone."""
    clean_sim.enable(flaws=["layer-norm-block-edge"])
    x = torch.randn(5, 700)
    shown = run(Part.SLICE, lambda: torch.nn.functional.layer_norm(x, (700,)))
    assert [(f.kind, f.op, f.explanation) for f in failures(shown)][:1] == [
        (Kind.MISMATCH, "aten::native_layer_norm", "in a batch and alone differ")
    ]


def test_batch_dependent_rounding_is_reported_and_is_no_failure():
    """The CPU decides whether `mm` of one row uses another algorithm than `mm` of many; the sweep reports it if so."""
    a, b = torch.randn(64, 512), torch.randn(512, 96)
    one = torch.cat([a[k : k + 1] @ b for k in (0, 32, 63)])
    whole = (a @ b)[[0, 32, 63]]
    shown = run(Part.SLICE, lambda: a @ b)
    finding = [f for f in shown if f.explanation == NOT_INVARIANT]
    assert bool(finding) == (not torch.equal(one, whole))
    assert {(f.kind, f.cause) for f in shown} <= {(Kind.PASS, Cause.ROUNDING)}


@pytest.mark.parametrize("name", ["cosh", "sinh", "fmod", "remainder"])
def test_real_kernels_of_the_cpu(name):
    """Reported exactly where torch itself shows it: vectors and single elements of other classes."""
    from shadowrun.studies.sweep.exceptional_inputs import exceptional

    values = exceptional(torch.float32)
    pairs = [t.contiguous() for t in (values.repeat_interleave(values.numel()), values.repeat(values.numel()))]
    given = [values] if name in ("cosh", "sinh") else pairs
    function = getattr(torch, name)
    whole = function(*given)
    alone = torch.cat([function(*(t[k : k + 1] for t in given)) for k in range(whole.numel())])
    same = torch.equal(whole.isnan(), alone.isnan()) and torch.equal(whole.isinf(), alone.isinf())
    shown = failures(found(name, Part.TAIL, target="cpu[threads=1]"))
    assert bool(shown) != same
    assert {(f.op.partition(".")[0], f.cause) for f in shown} <= {(f"aten::{name}", Cause.EXCEPTIONAL_VALUES)}


def test_random_operators_and_views_are_left_alone():
    x = torch.randn(8, 8)
    assert run(Part.TAIL, lambda: torch.nn.functional.dropout(x)) in (None, [])
    assert run(Part.LAYOUT, lambda: x.view(64)) is None
    assert run(Part.SLICE, x.sum) is None


def test_what_the_target_cannot_run_is_unverified(clean_sim):
    clean_sim.enable(flaws=["missing-cumsum"])
    assert {f.kind for f in found("cumsum", Part.LAYOUT)} == {Kind.UNVERIFIED}


@pytest.mark.parametrize(
    ("func", "args", "places"),
    [
        (ATEN.mm.default, (torch.ones(3, 2), torch.ones(2, 5)), (0,)),
        (ATEN.addmm.default, (torch.ones(5), torch.ones(3, 2), torch.ones(2, 5)), (1,)),
        (ATEN.addmm.default, (torch.ones(3, 5), torch.ones(3, 2), torch.ones(2, 5)), (0, 1)),
        (ATEN.bmm.default, (torch.ones(3, 2, 2), torch.ones(3, 2, 5)), (0, 1)),
        (ATEN.sum.dim_IntList, (torch.ones(3, 2), [1]), (0,)),
        (ATEN.sum.dim_IntList, (torch.ones(3, 2), [-2]), ()),
        (ATEN.sum.default, (torch.ones(3, 2),), ()),
        (ATEN._softmax.default, (torch.ones(3, 2), 0, False), ()),
        (ATEN._softmax.default, (torch.ones(3, 2), -1, False), (0,)),
        (ATEN.avg_pool2d.default, (torch.ones(3, 4, 4), [2, 2]), ()),
        (ATEN.add.Tensor, (torch.ones(3), torch.ones(3)), ()),
    ],
)
def test_which_inputs_have_a_batch(func, args, places):
    assert batch_arguments(func, args, {}) == (places, 3 if places else 0)


def run(part, function):
    """Findings for a function that closes over its inputs."""
    from shadowrun.studies.sweep.run_case import CaseRunner

    trial = CaseRunner("sim", "cpu", 60.0, lambda: None)
    return trial.run(part, lambda _device: function)
