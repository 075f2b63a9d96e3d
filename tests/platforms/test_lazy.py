"""A real device that every torch wheel has: `lazy`, whose bugs are real ones too. Each scenario in its own process."""

import json

import pytest

from shadowrun.platforms import torchplatform
from tests import forked

if not torchplatform.lazy_available():
    pytest.skip("this torch was built without lazy tensors", allow_module_level=True)

PRELUDE = """
import json, warnings, torch, shadowrun
from torch import nn
from torch.nn import functional as F
from shadowrun.platforms.device import resolve
resolve("lazy")

def reported(run):
    return {
        "counts": {str(k): v for k, v in run.counts().items()},
        "findings": [[f.kind, f.op, str(f.cause), f.evidence] for f in run.findings()],
        "own": [str(n) for n in run.internal_failures()],
    }

def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 10)
    )

def mlp():
    return nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 10))

def train(make, device, steps=2, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9)):
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = optimizer(model.parameters())
    shape = (3, 16) if make is mlp else (3, 1, 4, 4)
    x, y = torch.randn(shape).to(device), torch.arange(3).to(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().cpu().tolist() for p in model.parameters()], torch.get_rng_state().tolist()
"""


def in_process(body, **environment):
    """Run a script; it prints one JSON value."""
    done = forked.script(PRELUDE + body, **environment)
    assert done.returncode == 0, done.stdout[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_training_on_the_cpu_is_unchanged_and_its_views_are_no_finding():
    reported = in_process("""
same, results = [], []
for make in (mlp, cnn):
    plain = train(make, "cpu")
    with shadowrun.compare("lazy") as run:
        same.append(train(make, "cpu") == plain)
    results.append(reported(run))
    results[-1]["views"] = sum(r.call.op in ("aten::t", "aten::view") for r in run.records())
print(json.dumps([same, results]))
""")
    same, results = reported
    assert same == [True, True]
    for result in results:
        assert result["findings"] == [], result["findings"]
        assert result["own"] == []
        assert result["counts"]["match"] >= 25
        assert result["counts"]["error"] == result["counts"]["unsupported"] == 0


def test_a_program_on_lazy_gives_the_same_losses():
    same, result = in_process("""
def small():
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 10))
plain = train(small, "lazy")
with shadowrun.compare("lazy") as run:
    compared = train(small, "lazy")
print(json.dumps([compared == plain, reported(run)]))
""")
    assert same
    assert result["findings"] == []
    assert result["own"] == []
    assert result["counts"]["match"] >= 25


def test_real_bugs_of_lazy_are_found():
    shuffled, norm, written = in_process("""
with shadowrun.compare("lazy") as run:
    for shape in ((1, 4, 2, 2), (2, 8, 3, 3), (1, 16, 5, 5)):
        F.pixel_shuffle(torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape), 2)
with shadowrun.compare("lazy") as other:
    model = nn.BatchNorm2d(3)
    model(torch.arange(48.0).view(2, 3, 2, 4))
worst = [[d.name, d.n_different] for r in other.records(op="aten::native_batch_norm") for d in r.diffs]
print(json.dumps([reported(run), reported(other), worst]))
""")
    assert [f[:2] for f in shuffled["findings"]] == [["mismatch", "aten::pixel_shuffle"]]
    assert [f[:2] for f in norm["findings"]] == [["mismatch", "aten::native_batch_norm"]]
    assert {name for name, n in written if n} == {"running_mean", "running_var"}


def test_attention_s_cpu_kernel_is_not_called_unsupported():
    (result,) = in_process("""
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
    def forward(self, x):
        q, k, v = (t.unsqueeze(1) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).sum()
torch.manual_seed(0)
model = Attention()
with shadowrun.compare("lazy") as run:
    model(torch.randn(2, 4, 8)).backward()
result = reported(run)
result["ops"] = [[r.call.op, str(r.verdict.status)] for r in run.records(op="*attention*")]
print(json.dumps([result]))
""")
    assert [op for op, _ in result["ops"]] == [
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ]
    assert {status for _, status in result["ops"]} <= {"match", "fallback"}
    assert not [f for f in result["findings"] if f[0] in ("unsupported", "mismatch", "error")], result["findings"]


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_operators_that_fall_back_are_named_with_evidence(device):
    result = in_process(
        f"""
with shadowrun.compare("lazy") as run:
    torch.ones(3).to("{device}").relu().neg()
    x = torch.zeros(3).to("{device}")
    x.lerp_(torch.ones(3).to("{device}"), 0.5)
    assert x.tolist() == [0.5] * 3
print(json.dumps(reported(run)))
""",
        LTC_FORCE_FALLBACK="aten::relu",
    )
    found = {f[1]: f for f in result["findings"]}
    lerp = "aten::lerp_.Scalar" if device == "cpu" else "aten::lerp.Scalar"
    assert set(found) == {"aten::relu", lerp}
    for kind, _, cause, evidence in found.values():
        assert (kind, cause) == ("fallback", "silent fallback")
        assert "aten::_to_cpu was called" in evidence
        assert "own counter of aten::" in evidence
    assert result["own"] == []


def test_draws_are_handed_over_and_the_stream_stays():
    same, result = in_process("""
def draw(device):
    torch.manual_seed(3)
    x = torch.ones(100).to(device)
    values = [F.dropout(x, 0.5).cpu().tolist(), torch.empty(10).to(device).uniform_().cpu().tolist()]
    return values, torch.get_rng_state().tolist()
plain = [draw(d) for d in ("cpu", "lazy")]
with shadowrun.compare("lazy") as run:
    compared = [draw(d) for d in ("cpu", "lazy")]
print(json.dumps([compared == plain, reported(run)]))
""")
    assert result["findings"] == []
    assert same


def test_a_program_on_lazy_does_not_notice_that_it_is_compared():
    """Lazy draws when it is read, batch norm writes when it is read, and one graph is taken for another."""
    same, right, result = in_process("""
def read_at_the_end():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).to("lazy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 6).to("lazy")
    for _ in range(2):
        optimizer.zero_grad()
        y = model(x)
        y.square().sum().backward()
        optimizer.step()
    state = [v.cpu().tolist() for v in (y, *model.state_dict().values())]
    return state, y.mul(2).tolist(), torch.rand(2, device="cpu").tolist()

def one_graph_for_another():
    a, b = torch.tensor([1.0]).to("lazy"), torch.tensor([10.0]).to("lazy")
    u = a - b
    return [(u + a).neg(), u + b][1].item()

plain = [read_at_the_end(), one_graph_for_another()]
with shadowrun.compare("lazy") as run:
    compared = [read_at_the_end(), one_graph_for_another()]
print(json.dumps([plain[0] == compared[0], [plain[1], compared[1]], reported(run)]))
""")
    assert same
    assert right == [1.0, 1.0]
    assert [f[:3] for f in result["findings"]] == [["mismatch", "aten::native_batch_norm", "implementation"]]
    assert result["own"] == []


def test_a_program_on_the_reference_lazy_does_not_notice_either():
    same, result = in_process("""
plain = train(mlp, "lazy")
with shadowrun.compare("cpu[threads=1]", ref="lazy") as run:
    compared = train(mlp, "lazy")
print(json.dumps([compared == plain, reported(run)]))
""")
    assert same
    assert result["findings"] == []
    assert result["own"] == []
    assert result["counts"]["match"] >= 25


def test_calls_left_out_of_a_comparison_give_values_to_those_that_are_in():
    same, result = in_process("""
plain = train(mlp, "lazy")
with shadowrun.compare("lazy", ops="aten::*mm*") as run:
    compared = train(mlp, "lazy")
print(json.dumps([compared == plain, reported(run)]))
""")
    assert same
    assert result["findings"] == []
    assert result["counts"]["match"] >= 4


def test_a_program_that_starts_the_lazy_device_itself(tmp_path):
    script = tmp_path / "lazy.py"
    script.write_text(
        "import torch, torch._lazy.ts_backend\n"
        "torch._lazy.ts_backend.init()\n"
        "print((torch.ones(2, device='lazy') + 1).cpu())\n"
        "try: torch._lazy.ts_backend.init()\n"
        "except RuntimeError as error: print('twice', 'multiple backend fallbacks' in str(error))\n"
    )
    done = forked.shadowrun("run", "--target", "lazy", script, folder=tmp_path)
    assert done.stdout.startswith("tensor([2., 2.])\ntwice True\n"), done.stderr
