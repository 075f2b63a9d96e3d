"""Without flaws the device trains to the bits of the CPU."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3, bias=False), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
        )  # fmt: skip

    def forward(self, x):
        return self.body(x)


class Transformer(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True, activation="gelu")
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        h = self.layer(self.embedding(x))
        h = h + self.attention(h, h, h)[0]
        h = h + F.scaled_dot_product_attention(h, h, h, is_causal=True)
        return self.head(h.mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.recurrent = kind(6, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.recurrent(x)[0][:, -1])


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 5))


CASES = {
    "mlp-sgd": (mlp, lambda: torch.randn(8, 6), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "mlp-adam-single": (mlp, lambda: torch.randn(8, 6), lambda p: torch.optim.Adam(p, foreach=False)),
    "mlp-adam-fused": (mlp, lambda: torch.randn(8, 6), lambda p: torch.optim.AdamW(p, fused=True)),
    "cnn": (Cnn, lambda: torch.randn(4, 1, 8, 8), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "transformer": (Transformer, lambda: torch.randint(11, (4, 6)), lambda p: torch.optim.AdamW(p, foreach=True)),
}


def train(model, x, target, optimizer, steps=3):
    losses = []
    with sdpa_kernel(SDPBackend.MATH):  # the CPU's fused attention exists on no other device
        for _ in range(steps):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), target)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("case", CASES)
def test_training_is_bit_identical_to_the_cpu(case):
    build, data, optimizer = CASES[case]
    torch.manual_seed(1)
    ours = build().train()
    x, target = data(), torch.tensor([0, 1, 2, 3] * 2)[: 8 if "mlp" in case else 4]
    theirs = copy.deepcopy(ours).to("sim")
    a = train(ours, x, target, optimizer(ours.parameters()))
    b = train(theirs, x.to("sim"), target.to("sim"), optimizer(theirs.parameters()))
    assert a == b
    for (name, p), q in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert q.device.type == "sim"
        assert torch.equal(p, q.cpu()), name


def test_every_call_of_training_with_dropout_replays_to_the_same_bits(replayer):
    model = Transformer(dropout=0.2).to("sim").train()
    x, target = torch.randint(11, (4, 6)).to("sim"), torch.tensor([0, 1, 2, 3]).to("sim")
    optimizer = torch.optim.AdamW(model.parameters())
    with replayer("cpu") as mode:
        train(model, x, target, optimizer, steps=1)
    assert len(mode.checked) > 100
    assert not mode.different


def test_the_device_is_a_replay_target_of_a_cpu_program(replayer):
    torch.manual_seed(0)
    model, x = Cnn(), torch.randn(4, 1, 8, 8)
    with replayer("sim") as mode:
        train(model, x, torch.tensor([0, 1, 2, 3]), torch.optim.SGD(model.parameters(), 0.1))
    assert len(mode.checked) > 100
    assert not mode.different


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_networks_train_as_on_the_cpu_to_rounding(kind):
    torch.manual_seed(0)
    ours = Recurrent(kind)
    theirs = copy.deepcopy(ours).to("sim")
    x, target = torch.randn(4, 5, 6), torch.tensor([0, 1, 2, 3])
    train(ours, x, target, torch.optim.SGD(ours.parameters(), 0.1))
    train(theirs, x.to("sim"), target.to("sim"), torch.optim.SGD(theirs.parameters(), 0.1))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(q.cpu(), p)


def test_encoder_layer_in_evaluation_takes_the_fused_path():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        expected, actual = layer(x), copy.deepcopy(layer).to("sim")(x.to("sim"))
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_grad_scaler_match_the_cpu(dtype):
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))
    theirs = copy.deepcopy(ours).to("sim")
    x, target = torch.randn(8, 6), torch.arange(8) % 5
    results = []
    for device, model in (("cpu", ours), ("sim", theirs)):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler(device, init_scale=256.0)
        with torch.autocast(device, dtype=dtype):
            out = model(x.to(device))
            loss = F.cross_entropy(out.float(), target.to(device))
        assert out.dtype == dtype
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        results.append([p.detach().cpu() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.ops.aten.adaptive_max_pool3d(x, (2, 2, 2)),
        lambda x: torch.ops.aten.replication_pad2d(x[0], (1, 1, 1, 1)),
        lambda x: torch.ops.aten.max_pool3d(x, (2, 2, 2)),
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
        lambda x: torch.ops.aten.conv3d.padding(x, x[..., 1:, 1:, 1:], None, (1, 1, 1), "same"),
        lambda x: torch.cdist(x[0], x[0]),
        torch.exp,
    ],
)
def test_autocast_gives_the_dtypes_of_the_cpu(call, dtype):
    """Also for inputs of the other short dtype, which the CPU widens in its list of float32 operators."""

    def dtypes(device):
        x = torch.ones(1, 1, 4, 4, 4, dtype=torch.bfloat16, device=device)
        with torch.autocast(device, dtype=dtype):
            out = call(x)
        return [t.dtype for t in (out if isinstance(out, tuple) else (out,))]

    assert dtypes("sim") == dtypes("cpu")


def test_young_device_trains_where_unsupported_calls_are_answered(sim, replayer):
    """The demonstration's device: a mode that answers missing operators lets both models train."""
    from shadowrun.sim.catalogue import PRESETS

    torch.manual_seed(0)
    cnn, transformer = Cnn().to("sim"), Transformer(0.1).to("sim")
    target = torch.tensor([0, 1, 2, 3]).to("sim")
    with (  # noqa: PT031
        sim.flaws(*PRESETS["young"]),
        pytest.warns(UserWarning, match="fall back"),
        replayer("cpu", answer=True) as mode,
    ):
        train(cnn, torch.randn(4, 1, 8, 8).to("sim"), target, torch.optim.SGD(cnn.parameters(), 0.1, momentum=0.9))
        optimizer = torch.optim.AdamW(transformer.parameters())
        train(transformer, torch.randint(11, (4, 6)).to("sim"), target, optimizer)
    assert mode.unsupported == {"aten::max_pool2d_with_indices_backward", "aten::_foreach_lerp_.Scalar"}
    assert {"aten::gelu", "aten::addmm", "aten::threshold_backward", "aten::embedding_dense_backward"} <= mode.different
