"""The second chain: twins by storage, for views, in-place writes, resizes; it does not grow."""

import gc

import pytest
import torch
from torch import nn

import shadowrun
from shadowrun.intercept import torchapi
from shadowrun.intercept.plan import make_plan
from shadowrun.platforms.device import resolve
from shadowrun.replay.call import Call, CallRun, Role
from shadowrun.replay.drift import Drift
from shadowrun.replay.executor import Executor
from shadowrun.replay.paths import native_handler, same_device

aten = torch.ops.aten
ON_TARGET = Role(torch.device("cpu"), on_target=True, on_ref=False, shared=True)


class Chain:
    """A program on the target that computes ``wrong(result)`` where the reference computes the result."""

    def __init__(self, max_bytes=1 << 30):
        cpu = Executor(resolve("cpu"))
        self.drifting = Drift(cpu, cpu, max_bytes)
        self.chain = self.drifting._of_ref

    def call(self, func, *args, wrong=lambda t: t, **kwargs):
        plan = make_plan(func, 0)
        self.drifting.take_inputs(Call(plan, args, kwargs, ON_TARGET))
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            out.copy_(wrong(out))
        self.drift = self.drifting.after(plan, CallRun(args, kwargs, out, 0))
        return out

    def add(self, x, n=1.0, **kwargs):
        return self.call(aten.add.Tensor, x, n, **kwargs)


def test_an_error_lives_on_in_right_operators():
    c = Chain()
    x = torch.zeros(4)
    y = c.add(x, wrong=lambda t: t + 0.5)
    assert c.drift == (0.5, 0.5)
    z = c.add(y)
    assert c.drift == (0.5, 0.25)
    c.call(aten.mul.Tensor, z, 2)
    assert c.drift[0] == 1.0
    c.add(torch.zeros(4))
    assert c.drift == (0, 0), "what comes from elsewhere carries none"


def test_views_lie_on_the_twin_of_their_base():
    c = Chain()
    y = c.add(torch.zeros(2, 3), wrong=lambda t: t + torch.arange(6.0).view(2, 3))
    for view, error in ((y.t(), 5.0), (y[1], 5.0), (y[0, :2], 1.0), (y.view(-1)[:1], 0.0), (y[:0], 0.0)):
        c.add(view)
        assert c.drift[0] == error


def test_writing_in_place_writes_to_the_twin():
    c = Chain()
    y = c.add(torch.zeros(3), wrong=lambda t: t + 1)
    c.call(aten.mul_.Tensor, y, 2)
    assert c.drift[0] == 2
    c.call(aten.add_.Tensor, y[:1], 1)
    assert c.drift[0] == 2
    c.call(aten.zero_.default, y)
    assert c.drift[0] == 0
    c.add(y)
    assert c.drift[0] == 0


def test_out_arguments_and_lists_write_to_the_twin():
    c = Chain()
    out = torch.empty(3)
    y = c.add(torch.zeros(3), wrong=lambda t: t + 1)
    c.call(aten.mul.out, y, torch.tensor(3.0), out=out)
    assert c.drift[0] == 3
    c.add(out)
    assert c.drift[0] == 3
    c.call(aten._foreach_mul_.Scalar, [y, out], 2.0)
    assert c.drift[0] == 6


def test_a_resized_storage_gets_a_twin_of_the_user_s_values():
    c = Chain()
    y = c.add(torch.zeros(2), wrong=lambda t: t + 1)
    y.resize_(100).fill_(5)
    c.add(y)
    assert c.drift[0] == 0


def test_reseeding_goes_on_from_the_user_s_values():
    c = Chain()
    y = c.add(torch.zeros(2), wrong=lambda t: t + 1)
    c.chain.reseed(make_plan(aten.add.Tensor, 0), CallRun((), {}, y, 0))
    c.add(y)
    assert c.drift[0] == 0


def test_other_layouts_of_a_result_are_adopted():
    c = Chain()
    x = torch.zeros(3, 4)
    plan = make_plan(aten.add.Tensor, 0)
    c.drifting.take_inputs(Call(plan, (x, 1), {}, ON_TARGET))
    mine = torch.full((4, 3), 7.0).t()  # the user's device chose other strides
    assert c.drifting.after(plan, CallRun((x, 1), {}, mine, 0))[0] == 6
    c.add(mine)
    assert c.drift[0] == 6


def test_an_input_that_drifted_out_of_the_domain_goes_on_from_the_user_s():
    c = Chain()
    index = c.add(torch.zeros(1, dtype=torch.long), 0, wrong=lambda t: t - 0)
    wrong = c.call(aten.mul.Tensor, c.add(index, 99, wrong=lambda t: t * 0), 1)
    assert c.drift[0] == 99
    c.call(aten.index_select.default, torch.ones(3), 0, wrong)
    assert c.drift == (-1, -1)


def test_nan_and_infinity_on_one_side_are_an_infinite_error():
    c = Chain()
    c.add(torch.zeros(2), wrong=lambda t: t * float("nan"))
    assert c.drift == (float("inf"), float("inf"))
    c.add(torch.full((2,), float("nan")))
    assert c.drift == (0, 0)


def test_conjugates_and_symbolic_zeros():
    c = Chain()
    y = c.call(aten.mul.Tensor, torch.tensor([1 + 2j]), 1, wrong=lambda t: t + 1j)
    c.call(aten._to_copy.default, y.conj())
    assert c.drift[0] == 1
    c.call(aten._to_copy.default, y.imag)
    assert c.drift[0] == 1
    c.call(aten._to_copy.default, torch.ops.aten._efficientzerotensor([2]))
    assert c.drift[0] == 0


def test_layouts_without_a_storage_are_not_followed():
    c = Chain()
    sparse = torch.eye(2).to_sparse()
    plan = make_plan(aten.neg.default, 0)
    c.drifting.take_inputs(Call(plan, (sparse,), {}, ON_TARGET))
    assert c.drifting.after(plan, CallRun((sparse,), {}, sparse.neg(), 0)) == (-1, -1)


def test_twins_die_with_the_storage_and_not_before():
    gc.collect()
    c = Chain()
    y = c.add(torch.zeros(1000), wrong=lambda t: t + 1)
    view = y[10:20]
    held = c.chain._held
    del y
    assert c.chain._held == held, "a view keeps the storage"
    c.add(view)
    assert c.drift[0] == 1
    del view
    gc.collect()
    assert (len(c.chain._twins), c.chain._held) == (0, 0)


def test_the_oldest_twins_go_when_there_are_too_many():
    c = Chain(max_bytes=2000)
    kept = [c.add(torch.zeros(100), wrong=lambda t: t + 1) for _ in range(10)]
    assert c.chain._held <= 2000
    c.add(kept[-1])
    assert c.drift[0] == 1
    c.add(kept[0])
    assert c.drift[0] == 0, "made anew from the user's values"


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_the_chain_does_not_grow_over_200_steps(clean_sim, device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    x = torch.randn(3, 4).to(device)
    sizes = []
    target = "sim" if device == "sim" else "cpu[threads=1]"
    with shadowrun.compare(target, ref="cpu", drift=True) as run:
        for _ in range(200 if device == "cpu" else 40):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            run.step()
            chains = run._replayer._drift._of_target, run._replayer._drift._of_ref
            sizes.append((sum(len(c._twins) for c in chains), sum(c._held for c in chains)))
    assert sizes[-1] == sizes[5]
    assert sizes[-1][0] < 60
    assert max(r.drift_abs for r in run.records()) < 1e-5


def test_what_happened_between_two_blocks_was_not_seen():
    x = torch.zeros(3)
    run = shadowrun.compare("cpu[threads=1]", ref="cpu", drift=True)
    with run:
        y = x + 1
    y.fill_(7)
    with run:
        y.neg()
    assert [r.drift_abs for r in run.records(op="aten::neg")] == [0]


def chain_of_products(device, run, n=4):
    torch.manual_seed(0)
    x, w = torch.randn(8, 8).to(device), (torch.randn(8, 8) / 3).to(device)
    with run:
        for _ in range(n):
            x = (x @ w).tanh()
    return x.cpu()


def test_a_program_on_the_reference_drifts_as_the_same_one_on_the_target(clean_sim):
    with clean_sim.flaws("matmul-in-bf16"):
        there = shadowrun.compare("sim", drift=True)
        wrong = chain_of_products("sim", there)
        here = shadowrun.compare("sim", drift=True)
        right = chain_of_products("cpu", here)
    assert not torch.equal(wrong, right)
    of = {run: [r.drift_abs for r in run.records(op="aten::tanh")] for run in (there, here)}
    assert of[here] == pytest.approx(of[there])
    assert of[here][-1] == pytest.approx(float((wrong - right).abs().max()))


def test_a_training_on_the_reference_drifts(clean_sim):
    def train(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x = torch.randn(16, 8).to(device)
        with shadowrun.compare("sim", drift=True) as run:
            for _ in range(4):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
        return run, [p.detach().cpu().sum().item() for p in model.parameters()]

    with clean_sim.flaws("matmul-in-bf16"):
        (there, wrong), (here, right) = train("sim"), train("cpu")
    assert wrong != right
    assert [s.step for s in here.drift()] == [0, 1, 2, 3]
    assert [s.drift_rel for s in here.drift()] == pytest.approx([s.drift_rel for s in there.drift()], rel=0.2)
    assert here.drift()[-1].drift_rel > here.drift()[0].drift_rel > 0
    clean = train("cpu")[0].drift()
    assert max(s.drift_rel for s in clean) < 1e-5


def test_what_the_program_reads_back_from_the_target_goes_on_in_the_reference_s_chain(clean_sim):
    with clean_sim.flaws("matmul-in-bf16"), shadowrun.compare("sim", drift=True) as run:
        x = torch.randn(8, 8)
        ((x.to("sim") @ x.to("sim")).cpu() + 1).neg()
    of = {op: [r.drift_abs for r in run.records(op=op)][-1] for op in ("aten::mm", "aten::add.Tensor", "aten::neg")}
    assert of["aten::mm"] == of["aten::add.Tensor"] == of["aten::neg"] > 0


def test_a_program_on_neither_has_two_chains(clean_sim):
    torch.manual_seed(0)
    x = torch.randn(8, 8)
    with clean_sim.flaws("matmul-in-bf16"), shadowrun.compare("sim", ref="cpu[threads=1]", drift=True) as run:
        (x @ x).neg()
    assert [r.drift_abs > 0 for r in run.records()] == [True, True]


def test_an_operator_that_the_target_lacks_goes_on_from_the_program_s_values(clean_sim):
    with clean_sim.flaws("matmul-in-bf16", "missing-cumsum"), shadowrun.compare("sim", drift=True) as run:
        x = torch.randn(8, 8)
        (x @ x).cumsum(0).neg()
    of = {r.call.op: r.drift_abs for r in run.records()}
    assert of["aten::mm"] > 0
    assert of["aten::neg"] == 0


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("options", [{"steps": [0, 3]}, {"ops": ["aten::mul*", "aten::add.*"]}])
def test_what_is_not_compared_leaves_no_stale_values(clean_sim, device, options):
    x = torch.ones(3).to(device)
    with shadowrun.compare("sim", drift=True, **options) as run:
        for _ in range(4):
            y = x * 2
            x.sub_(0.5)
            y + x
            run.step()
    assert {r.drift_abs for r in run.records()} <= {0.0, -1.0}


def train(target, ref="cpu"):
    """Steps of a small network, with views, in-place writes, dropout and lists; drift of each compared call."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(288, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with shadowrun.compare(target, ref=ref, drift=True) as run:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 3, 8, 8)).square().mean().backward()
            optimizer.step()
            run.step()
    return [(r.call.op, r.verdict.status, r.verdict.cause, r.drift_abs, r.drift_rel) for r in run.records()]


@pytest.mark.parametrize("target", ["cpu", "cpu[mkldnn=off]"])
def test_calls_that_are_not_followed_get_the_drift_of_those_that_are(target, monkeypatch):
    found = train(target)
    monkeypatch.setattr(Drift, "follows_all", True)
    assert found == train(target)
    drifts = {drift for *_, drift, _ in found}
    assert (drifts == {0.0}) == (target == "cpu")


def test_one_wrong_replay_drifts_on_in_calls_that_match(monkeypatch):
    def train_with_a_wrong_replay():
        n = 0

        def replay(function, modes, args=(), kwargs=None):
            nonlocal n
            out = torchapi.with_isolated_warnings(function, modes, args, kwargs or {})
            n += isinstance(out, torch.Tensor) and out.shape == (2, 8, 6, 6)
            if n == 5:
                n += 1
                out.mul_(1.5)
            return out

        for module in (native_handler, same_device):
            monkeypatch.setattr(module, "with_isolated_warnings", replay)
        return train("cpu")

    found = train_with_a_wrong_replay()
    wrong = next(i for i, (_, status, *_) in enumerate(found) if status is shadowrun.Status.MISMATCH)
    assert all(drift == 0.0 for *_, drift, _ in found[:wrong])
    later = [(op, drift) for op, status, _, drift, _ in found[wrong + 1 :] if status is shadowrun.Status.MATCH]
    assert sum(drift > 0.0 for _, drift in later) > 20


def test_a_chain_that_returns_to_the_values_of_the_program_is_no_longer_followed():
    c = Chain()
    y = c.add(torch.zeros(4), wrong=lambda t: t + 0.5)
    assert c.drifting.has_diverged
    plan = make_plan(aten.zero_.default, 0)
    call = Call(plan, (y,), {}, ON_TARGET)
    c.drifting.reseed(plan, CallRun((y,), {}, y, 0))
    assert not c.drifting.has_diverged
    assert not c.drifting.must_follow(call)
    assert c.drifting.diverge(call, CallRun((y,), {}, y, 0), CallRun((y + 1,), {}, None, 0)) == (
        1.0,
        pytest.approx(0.4),
    )
    assert c.drifting.must_follow(call)
