"""What the judge makes of a call is another call: what its kernel believes is looked at before it is made."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shadowrun import judge
from shadowrun.intercept.untrusted import checked_calls
from shadowrun.intercept.untrusted.checked_calls import graphs_of_file
from shadowrun.intercept.untrusted.op_allowlist import Refused
from shadowrun.judge.cause import hypotheses, known_roundings
from shadowrun.judge.cause.hypotheses import ROUNDED_INPUTS, MismatchedCall
from shadowrun.judge.judge import Judge
from shadowrun.judge.oracle import NoOracle, Oracle
from shadowrun.judge.rounding.closeness import ClosenessCheck
from shadowrun.operators.vendor_ops import evaluate, run_changed
from tests.case_kit import make_case

aten = torch.ops.aten
BYTES = 1 << 24
HIDDEN, SHORT = 64, 8


def ran(*_args, **_kwargs):
    pytest.fail("it ran")


def a_grid(far=7e4):
    """Points that fit into float32, and are infinite in float16."""
    grid = torch.rand(1, 4, 4, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    grid[0, 0, 0, 0] = far
    return torch.ones(1, 1, 4, 4), torch.ones(1, 1, 4, 4), grid, 0, 2, False, [True, True]


def of_grid(change=lambda results: results, far=7e4):
    op = aten.grid_sampler_2d_backward.default
    return make_case(op, lambda *args: change(op(*args)), *a_grid(far))


def recurrent(rows=HIDDEN, layers=1):
    """A `_cudnn_rnn`: the CPU computes it by an LSTM, and that reads behind rows of weights that are too short."""
    x, states = torch.ones(5, 2, SHORT), (torch.zeros(layers, 2, HIDDEN), torch.zeros(layers, 2, HIDDEN))
    weights = [torch.ones(4 * HIDDEN, SHORT), torch.ones(4 * HIDDEN, rows), *torch.zeros(2, 4 * HIDDEN).unbind()]
    return x, weights, 4, None, *states, 2, HIDDEN, 0, layers, False, 0.0, False, False, [], None


def to_half(x):
    return x.to(torch.float16).to(x.dtype)


def test_a_place_that_a_rounding_makes_infinite_is_none():
    """The kernel of the backward pass makes the smallest integer of it, and writes there."""
    oracle = Oracle(of_grid(), BYTES)
    with pytest.raises(NoOracle, match="no place"):
        oracle.on_changed_inputs(to_half)
    assert oracle.on_changed_inputs(lambda x: x * 0.5)


def test_a_known_rounding_is_looked_at():
    assert known_roundings._on_rounded_inputs(of_grid(), f"{ROUNDED_INPUTS}fp16", False) is None
    assert known_roundings._on_rounded_inputs(of_grid(far=0.5), f"{ROUNDED_INPUTS}fp16", False) is not None


def test_a_wrong_target_is_a_mismatch_whatever_the_hypotheses_would_do():
    verdict, _ = Judge()(of_grid(lambda results: tuple(3 * v + 5 for v in results)))
    assert verdict.status == "mismatch"


def test_sizes_of_values_are_looked_at(monkeypatch):
    """Closeness asks the operator for sums of magnitudes."""
    check = ClosenessCheck(of_grid(), BYTES)
    assert check._evaluated(lambda t: t * float("inf"), lambda n: n) is None
    assert check._evaluated(lambda t: t * 0.5, lambda n: n) is not None


def test_what_the_cpu_computes_for_another_operator_is_looked_at_inside():
    case = make_case(aten._cudnn_rnn.default, aten._cudnn_rnn.default, *recurrent())
    assert evaluate(case, recurrent(), {})
    with pytest.raises(Refused, match="weights have other shapes"):
        evaluate(case, recurrent(rows=SHORT), {})
    with pytest.raises(NoOracle, match="no float64 oracle"):
        Oracle(case, BYTES).with_argument("bidirectional", True)


def test_composite_operators_are_looked_at_inside():
    op = aten.embedding_backward.default
    case = make_case(op, op, torch.ones(3, 4), torch.tensor([0, 1, 2]), 3, -1, False, False)
    with pytest.raises(Refused, match="not below num_weights"):
        evaluate(case, (torch.ones(3, 4), torch.tensor([0, 1, 10**9]), 3, -1, False, False), {})


def test_a_platform_gets_no_changed_call_that_its_kernel_would_believe():
    case = replace(of_grid(), run_target=ran)
    with pytest.raises(Refused, match="no place"):
        run_changed(case, case.run_target, ((*a_grid()[:2], to_half(a_grid()[2]), 0, 2, False, [True, True]), {}))
    # The hypothesis that an argument was not written makes numbers of NaN, and those of infinities are no places.
    far = a_grid()[2].masked_fill(a_grid()[2] > 1, float("inf"))
    call = MismatchedCall(replace(case, args=(*case.args[:2], far, *case.args[3:])), [], None)
    assert hypotheses._run_target(call, lambda t: t.nan_to_num()) is None


def test_calls_of_a_file_are_looked_at_inside_before_a_platform_gets_them():
    op = aten.embedding_backward.default
    case = make_case(op, op, torch.ones(3, 4), torch.tensor([0, 1, 2]), 3, -1, False, False)
    far = (torch.ones(3, 4), torch.tensor([0, 1, 10**9]), 3, -1, False, False)
    with graphs_of_file(), pytest.raises(Refused, match="not below num_weights"):
        run_changed(case, ran, (far, {}))


def test_the_judge_makes_no_call_another_way():
    """Each call of it is looked at by `evaluate` or `run_changed`, but for repeats of the call as it was."""
    again = r"\.run_(?:target|reference|at_offsets)\((?!\*(?:call\.)?case\.fresh_inputs\(\)\)|\*inputs\))"
    for path in Path(judge.__file__).parent.rglob("*.py"):
        assert not re.findall(again, path.read_text(encoding="utf-8")), path.name
        assert "plan.run" not in path.read_text(encoding="utf-8"), path.name


def test_an_operator_that_checks_its_arguments_itself_is_called_without_a_look(monkeypatch):
    monkeypatch.setattr(checked_calls, "CheckedCalls", ran)
    case = make_case(aten.mm.default, torch.mm, torch.ones(2, 2), torch.ones(2, 2))
    assert evaluate(case, case.args, {})
