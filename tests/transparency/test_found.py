"""What the sweep over torch's operators found, one small test each."""

import warnings

import pytest
import torch

import shadowrun
from shadowrun import Status
from tests.transparency.sweep import shown_always


def failures(run):
    return [str(r.verdict) for r in run.records(status=[Status.ERROR, Status.MISMATCH])]


def test_statistics_that_the_schema_hides_are_written_once_by_every_overload():
    x, outs = torch.randn(4, 3), [torch.empty(0) for _ in range(3)]
    mean = torch.zeros(3)
    with shadowrun.compare("cpu") as run:
        torch.ops.aten.native_batch_norm.out(
            x, None, None, mean, torch.ones(3), True, 0.5, 1e-5, out=outs[0], save_mean=outs[1], save_invstd=outs[2]
        )
    assert torch.allclose(mean, x.mean(0) / 2)
    assert failures(run) == []


def test_compressed_sparse_results_have_no_strides_to_compare():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.eye(3).to_sparse_csr()
        with shadowrun.compare("cpu") as run:
            x.clone()
    assert failures(run) == []
    assert [r.call.op for r in run.records(status=Status.MATCH)] == ["aten::clone"]


def test_lazy_modules_run():
    with shadowrun.compare("cpu") as run:
        module = torch.nn.LazyLinear(3)
        module.state_dict()
        module(torch.ones(2, 4)).sum().backward()
    assert module.weight.grad.shape == (3, 4)
    assert failures(run) == []


@pytest.mark.parametrize("target", ["cpu", "cpu[mkldnn=off]", "sim"])
@pytest.mark.parametrize("options", [{}, {"drift": True}])
def test_a_replays_warnings_are_not_heard(sim_device, target, options):
    """`std` is one call with one result, `triangular_solve` has two: both ways through the handler."""
    x = torch.eye(3)
    with shown_always(), warnings.catch_warnings(record=True) as heard, shadowrun.compare(target, **options):
        warnings.simplefilter("always")
        x[0, :1].std()
        torch.triangular_solve(x, x)
    assert [str(w.message)[:20] for w in heard] == ["std(): degrees of fr", "torch.triangular_sol"]
    assert {w.filename for w in heard} == {__file__}


def test_a_replays_warning_leaves_the_users_own_to_be_shown_once():
    x = torch.eye(3)
    with shown_always(), warnings.catch_warnings(record=True) as heard, shadowrun.compare("cpu"):
        warnings.simplefilter("once")
        torch.triangular_solve(x, x)
        torch.triangular_solve(x, x)
    assert len(heard) == 1
    assert warnings._showwarnmsg.__module__ == "warnings"


def test_where_warnings_are_errors_the_user_gets_his_own_and_nothing_else():
    x = torch.eye(3)
    with shown_always(), warnings.catch_warnings(), shadowrun.compare("cpu") as run:
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="triangular_solve is deprecated"):
            torch.triangular_solve(x, x)
    assert failures(run) == []


def test_records_keep_their_operators_when_a_comparison_is_started_again():
    """Numbers of operators were given anew at each start, and calls at the same line took each other's names."""
    run, x = shadowrun.compare("cpu"), torch.ones(3)
    for function in (torch.sin, torch.cos, torch.sin):
        with run:
            function(x)
    assert [r.call.op for r in run.records()] == ["aten::sin", "aten::cos", "aten::sin"]


def test_a_draw_with_the_default_probability_is_not_held_to_the_old_contents(sim_device):
    x = torch.full((4096,), 7.0)
    with shadowrun.compare("sim") as run:
        x.bernoulli_()
    assert failures(run) == []
