"""What the loss would be with one operator right, against what it is with a device on which that operator is right."""

import copy

import pytest
import torch
from torch import nn

import shadowrun

BOTH = ("matmul-in-bf16", "gelu-by-tanh")


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 32), nn.Linear(32, 4)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return self.c(self.drop(nn.functional.gelu(self.b(self.norm(self.a(x))))))


def loss_of(net, x, y):
    return (net(x) - y).square().mean()


def train(sim, flaws, device="sim", n=8, dropout=0.0, loss=loss_of, drift=True):
    """A run, and the state of the network and the batch at the start of each step."""
    torch.manual_seed(1)
    net, before = Net(dropout).to(device), []
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    with sim.flaws(*flaws), shadowrun.compare("sim", drift=drift, settings=False, known=False) as run:
        for _ in range(n):
            x, y = torch.randn(8, 16), torch.randn(8, 4)
            before.append((copy.deepcopy({name: t.cpu() for name, t in net.state_dict().items()}), x, y))
            value = loss(net, x.to(device), y.to(device))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            run.step()
    return run, before, [p.detach().cpu() for p in net.parameters()]


def error_at(sim, flaws, before):
    """Deviation of the loss on a device with some flaws, from the CPU's."""
    state, x, y = before

    def on(device):
        net = Net()
        net.load_state_dict(state)
        return loss_of(net.to(device), x.to(device), y.to(device)).item()

    with sim.flaws(*flaws):
        return abs(on("sim") - on("cpu"))


@pytest.mark.parametrize("device", ["sim", "cpu"])
def test_it_is_what_another_device_would_give(clean_sim, device):
    run, before, _ = train(clean_sim, BOTH, device)
    repairs = run.info.repairs
    assert set(repairs) == {"aten::mm", "aten::addmm", "aten::gelu"}
    gelu = repairs["aten::gelu"]
    assert gelu["n_steps"] == gelu["n_calls"] >= 2
    # Which steps tried it follows from the order; their sums must be among those of the true errors.
    errors = [(error_at(clean_sim, BOTH, b), error_at(clean_sim, BOTH[:1], b)) for b in before]
    sums = [(errors[i][0] + errors[j][0], errors[i][1] + errors[j][1]) for i in range(1, 8) for j in range(i + 1, 8)]
    if device == "sim":
        assert any((gelu["error"], gelu["without"]) == pytest.approx(s, rel=0.01, abs=1e-7) for s in sums)
    # Products in bf16 are most of the error, and those of backward come after the loss.
    addmm, mm = repairs["aten::addmm"], repairs["aten::mm"]
    assert addmm["without"] < 0.3 * addmm["error"]
    assert (mm["n_calls"], mm["error"]) == (0, mm["without"])


def test_one_flaw_is_all_of_the_error(clean_sim):
    run, _, _ = train(clean_sim, BOTH[1:])
    gelu = run.info.repairs["aten::gelu"]
    assert gelu["error"] > 1e-6
    assert gelu["without"] < 1e-3 * gelu["error"]


def test_the_program_is_not_touched(clean_sim):
    plain = train(clean_sim, BOTH, drift=False)[2]
    assert all(map(torch.equal, plain, train(clean_sim, BOTH)[2]))


def test_a_dropout_is_followed_by_its_mask(clean_sim):
    run, _, _ = train(clean_sim, BOTH[1:], dropout=0.5)
    gelu = run.info.repairs["aten::gelu"]
    assert not gelu["lost"]
    assert gelu["without"] < 1e-3 * gelu["error"]


def test_other_draws_on_the_way_lose_the_step_and_a_missing_operator_does_not(clean_sim):
    def noisy(net, x, y):
        return (nn.functional.gelu(net(x)) * 1.0).bernoulli_(0.5).sub(net(x)).square().mean()

    run, _, _ = train(clean_sim, BOTH[1:], loss=noisy, n=3)
    assert run.info.repairs["aten::gelu"]["lost"].startswith("aten::bernoulli")

    def missing(net, x, y):
        return (net(x).cumsum(0) - y).square().mean()

    run, _, _ = train(clean_sim, (*BOTH[1:], "missing-cumsum"), loss=missing, n=3)
    gelu = run.info.repairs["aten::gelu"]
    assert not gelu["lost"]
    assert gelu["without"] < 1e-3 * gelu["error"]


def test_one_step_measures_nothing(clean_sim):
    assert train(clean_sim, BOTH, n=1)[0].info.repairs == {}


def test_under_settings_of_the_cpu():
    """A forward pass on two settings: nothing is wrong, so nothing is tried."""
    net, x = Net(), torch.randn(8, 16)
    with shadowrun.compare("cpu[threads=1]", drift=True, settings=False, known=False) as run:
        for _ in range(3):
            net(x).sum().backward()
            run.step()
    assert run.info.repairs == {}
