"""`nan_track`: the call that makes NaN or infinities is named, and what only passes them on is not."""

import math
import threading
import warnings

import pytest
import torch
from torch import nn

import shadowrun
from shadowrun import sim


def places(track):
    return [(one.op, one.kind, one.how) for one in track.found()]


def test_the_call_that_makes_nan_is_named_with_module_line_and_range():
    class Root(nn.Module):
        def forward(self, x):
            return x.sqrt()

    net = nn.Sequential(nn.Linear(2, 2, bias=False), Root())
    net[0].weight.data.copy_(-torch.eye(2))
    with shadowrun.nan_track("keep") as track:
        net(torch.tensor([[4.0, 9.0]])).sum().backward()
    first = track.found()[0]
    assert (first.op, first.kind, first.how, first.module, first.phase) == (
        "aten::sqrt",
        "NaN",
        "born",
        "Sequential.1",
        "forward",
    )
    assert "test_nonfinite.py" in first.site
    assert first.inputs == ("f32[1, 2] in [-9, -4]",)
    assert (first.n_elements, first.of_elements) == (2, 2)
    assert places(track) == [("aten::sqrt", "NaN", "born")], "sum and backward pass it on"


def test_a_backward_that_makes_nan_has_the_phase_and_line_of_its_forward():
    x = torch.zeros(3, requires_grad=True)
    with shadowrun.nan_track("keep") as track:
        (x.sqrt() * 0).sum().backward()
    assert (track.found()[0].phase, track.found()[0].kind) == ("backward", "NaN")
    assert "test_nonfinite.py" in track.found()[0].site


def test_what_comes_from_outside_is_entered_once_and_not_born():
    x = torch.tensor([1.0, math.nan])
    with shadowrun.nan_track("keep") as track:
        y = x * 2
        (y + 1).relu_().exp()
        x - 1
    assert places(track) == [("aten::mul.Tensor", "NaN", "entered")]


def test_nan_that_infinities_make_is_born_and_a_mask_is_neither():
    with shadowrun.nan_track("keep") as track:
        mask = torch.ones(2, 2, dtype=torch.bool).triu(1)
        torch.zeros(2, 2).masked_fill(mask, -math.inf).softmax(-1)
        big = torch.full((2,), 3e38) * 10
        big - big
    assert places(track) == [("aten::mul.Tensor", "Inf", "born"), ("aten::sub.Tensor", "NaN", "born")]


def test_finite_values_whose_sum_overflows_are_no_infinities():
    with shadowrun.nan_track("keep") as track:
        torch.full((4,), 3e38) * 1.0
        torch.full((8,), 60000.0, dtype=torch.float16) * 1.0
    assert places(track) == []
    assert str(track).startswith("No NaN and no infinity in the results of")


def test_complex_results_are_looked_at_too():
    z = torch.ones(2, dtype=torch.complex64)
    with warnings.catch_warnings(), shadowrun.nan_track("keep") as track:
        warnings.simplefilter("error")
        z.t().clone()[::2].mul_(2)
        (z * 3e38 * 10).real.contiguous()
        torch.empty(4, dtype=torch.complex64)[::2].copy_(z)
    assert {(one.op, one.how) for one in track.found()} == {("aten::mul.Tensor", "born")}
    assert {one.kind for one in track.found()} >= {"Inf"}


def test_a_call_that_writes_in_place_over_nan_ends_it():
    x = torch.zeros(2)
    with shadowrun.nan_track("keep") as track:
        x.log_()
        x.add_(1)
        x.zero_()
        y = x + 1
        y.log_().log_().log_()  # 0, -inf, nan
    assert places(track) == [
        ("aten::log_", "Inf", "born"),
        ("aten::log_", "Inf", "born"),
        ("aten::log_", "NaN", "born"),
    ]


def test_calls_of_a_place_are_counted_and_steps_numbered():
    with shadowrun.nan_track("keep") as track:
        for k in range(4):
            torch.full((1,), float(k - 2)).log()
            track.step()
    found = track.found()
    assert [(one.kind, one.step, one.n_calls) for one in found] == [("NaN", 0, 2), ("Inf", 2, 1)]


def test_raise_warn_and_function():
    with pytest.raises(FloatingPointError, match=r"aten::log makes Inf") as error, shadowrun.nan_track("raise"):
        torch.zeros(1).log()
    assert isinstance(error.value, shadowrun.NonFiniteError)
    assert error.value.found.op == "aten::log"
    with warnings.catch_warnings(record=True) as warned, shadowrun.nan_track():
        warnings.simplefilter("always")
        torch.zeros(1).log()
        torch.full((1,), -1.0).log()
    assert [w.category for w in warned] == [shadowrun.ShadowrunWarning]
    assert "makes Inf" in str(warned[0].message)
    seen = []
    with shadowrun.nan_track(seen.append):
        torch.zeros(1).log()
    assert [one.op for one in seen] == ["aten::log"]
    with pytest.raises(shadowrun.UsageError, match="on_found='stop'"):
        shadowrun.nan_track("stop")


def test_the_program_gets_what_it_gets_without():
    def program():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.LogSoftmax(-1))
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(2, 3)).sum().backward()
            optimizer.step()
        return [*net.parameters(), torch.rand(2)]

    plain = program()
    with shadowrun.nan_track("keep") as track:
        tracked = program()
    assert all(torch.equal(a, b) for a, b in zip(plain, tracked, strict=True))
    assert track.n_calls > 50


def test_threads_that_start_inside_are_followed():
    with shadowrun.nan_track("keep") as track:
        thread = threading.Thread(target=lambda: torch.zeros(1).log())
        thread.start()
        thread.join()
    assert places(track) == [("aten::log", "Inf", "born")]


def test_on_an_accelerator_the_flags_are_read_at_the_end_of_a_step():
    sim.enable("sim")
    x = torch.zeros(2, device="sim")
    bad = torch.tensor([math.nan], device="sim")
    with shadowrun.nan_track("keep") as track:
        y = x.log()
        (y * 0).add_(1)
        bad + 1
        track.step()
        y + 1
    assert places(track) == [
        ("aten::log", "Inf", "born"),
        ("aten::mul.Tensor", "NaN", "born"),
        ("aten::add.Tensor", "NaN", "entered"),
    ]
    with pytest.raises(shadowrun.NonFiniteError), shadowrun.nan_track("raise") as track:
        x.log()
        track.step()


def test_on_an_accelerator_it_raises_within_a_step_where_no_more_calls_can_wait(monkeypatch):
    sim.enable("sim")
    monkeypatch.setattr("shadowrun.recording.nonfinite._MAX_PENDING", 2)
    x = torch.zeros(2, device="sim")
    with pytest.raises(shadowrun.NonFiniteError, match="aten::log"), shadowrun.nan_track("raise"):
        for _ in range(4):
            x.log()
        pytest.fail("not within the step")


def test_it_cannot_be_nested_and_can_be_started_again():
    track = shadowrun.nan_track("keep")
    with track, pytest.raises(shadowrun.NestingError), shadowrun.compare("cpu[threads=1]"):
        pass
    for _ in range(2):
        with track:
            torch.zeros(1).log()
    assert [one.n_calls for one in track.found()] == [2]


@pytest.mark.parametrize("kind", ["permuted", "with gaps", "expanded", "sliced", "reversed order"])
def test_results_of_any_layout_are_looked_at(kind):
    """Where all elements from the first to the last are finite, C decides; else Python looks at the tensor's own."""
    base = torch.arange(1.0, 49.0).view(4, 12)
    x = {
        "permuted": base.t(),
        "with gaps": base[:, ::2],
        "expanded": base[0].expand(3, 12),
        "sliced": base[:, 3:7],
        "reversed order": base.view(2, 2, 12).permute(2, 0, 1),
    }[kind]
    with shadowrun.nan_track("keep") as track:
        x.mul_(1.0) if kind != "expanded" else x * 1.0
        for index in (0, x.shape[0] - 1):
            x[index, -1] = -1.0
            x.sqrt()
            x[index, -1] = 1.0
        if kind in ("with gaps", "sliced"):
            base[1, 1] = math.nan  # in a gap: no element of x
            x.mul_(1.0)
    assert {op for op, _, how in places(track) if how == "born"} == {"aten::sqrt"}
    assert track.found()[0].n_elements == {"expanded": 3, "reversed order": 2}.get(kind, 1)


@pytest.mark.skipif(shadowrun.native.core is None, reason="without the part in C")
def test_permuted_results_and_calls_in_place_stay_in_c():
    x = torch.randn(3, 4, 5).transpose(0, 1)
    with shadowrun.nan_track("keep") as track:
        for _ in range(10):
            x.mul_(1.0)
            x.exp().mul(2.0)
    in_python = track.n_calls - track._recorder._native.n_calls
    assert in_python <= 3, "the first call of each operator"
