"""Two settings of one accelerator are compared on it; what differs is brought over."""

import pytest
import torch

import shadowrun
from shadowrun import Cause, Status
from shadowrun.platforms import torchplatform
from shadowrun.platforms.device import device_settings
from shadowrun.replay.memory_effects import MemoryEffects
from shadowrun.replay.paths import two_settings
from shadowrun.sim.stream import STREAM
from tests.models import assert_same, digits, tokens, train


@pytest.fixture(autouse=True, params=[False, True], ids=["", "behind"])
def sim(request, clean_sim):
    if not request.param:
        yield clean_sim
        return
    with clean_sim.asynchronous():
        yield clean_sim


def untimed(run):
    return [f for f in run.findings() if f.kind != "slow"]


def waits():
    return sum(STREAM.waits.values())


@pytest.mark.parametrize("make", [digits, tokens])
def test_training_is_unchanged_and_matches(make):
    plain = train(make, "sim", steps=3)
    run = shadowrun.compare("sim", ref="sim[deterministic=off]")
    assert_same(train(make, "sim", steps=3, run=run), plain)
    assert untimed(run) == []
    counts = run.counts()
    assert counts[Status.MATCH] > 80
    assert counts[Status.ERROR] == counts[Status.MISMATCH] == 0


@pytest.mark.parametrize(("target", "ref"), [("sim[tf32=on]", "sim"), ("sim[tf32=on]", "sim[tf32=off]")])
def test_tf32_is_found_in_products_and_nowhere_else(target, ref):
    plain = train(tokens, "sim", steps=1)
    run = shadowrun.compare(target, ref=ref)
    assert_same(train(tokens, "sim", steps=1, run=run), plain)
    found = {(f.op, f.cause, f.explanation) for f in untimed(run)}
    assert {op for op, _, _ in found} <= {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
    assert {(cause, why) for _, cause, why in found} == {(Cause.REDUCED_PRECISION, "inputs rounded to tf32")}
    assert {r.call.module for r in run.records(status=Status.MISMATCH)} > {"Tokens.head"}


def test_the_program_runs_on_the_target_too():
    x = torch.randn(32, 32).to("sim")
    with shadowrun.compare("sim", ref="sim[tf32=on]") as run:
        x @ x
    assert [(r.call.op, r.verdict.status, r.verdict.cause) for r in run.records()] == [
        ("aten::mm", Status.MISMATCH, Cause.REFERENCE)
    ]


def test_flags_are_fetched_in_batches(monkeypatch):
    x = torch.randn(16, 16).to("sim")

    def chain(n):  # one line, whose first calls are also looked at for what they do to memory
        for _ in range(n):
            x.add(1).mul_(2)

    with shadowrun.compare("sim", ref="sim[deterministic=off]") as run:
        chain(3)
        run.step()
        before = waits()
        chain(50)
        if torch.sim.is_asynchronous():
            assert waits() == before
        run.step()
        if torch.sim.is_asynchronous():
            assert 0 < waits() - before < 5
    assert run.counts()[Status.MATCH] == 106


def test_equal_results_stay_on_the_device(monkeypatch):
    """Also in the first calls of each kind, which are looked at for what they do to memory."""
    to_host = []
    original = two_settings.mirror
    looked = []

    def mirror(args, kwargs, device, *others, **named):
        if device.type == "cpu":
            to_host.append([getattr(a, "shape", a) for a in args])
        return original(args, kwargs, device, *others, **named)

    monkeypatch.setattr(two_settings, "mirror", mirror)
    run = shadowrun.compare("sim", ref="sim[deterministic=off]")
    check = MemoryEffects.check
    monkeypatch.setattr(MemoryEffects, "check", lambda self, *args: looked.append(args) or check(self, *args))
    train(tokens, "sim", steps=2, run=run)
    assert run.counts()[Status.MATCH] > 100
    assert looked
    assert to_host == [[torch.Size([])]] * 2  # the losses, which the program reads itself


def test_little_memory_and_small_batches(monkeypatch):
    monkeypatch.setattr(two_settings, "_MAX_PENDING", 3)
    run = shadowrun.compare("sim[tf32=on]", ref="sim", max_bytes=100_000)
    train(digits, "sim", steps=2, run=run)
    assert run.counts()[Status.ERROR] == 0
    reasons = {r.verdict.explanation.partition(":")[0] for r in run.records(status=Status.UNVERIFIED)}
    assert reasons <= {"budget", "no float64 oracle"}
    assert {f.cause for f in untimed(run)} == {Cause.REDUCED_PRECISION}


def test_a_drawing_operator_draws_the_same_and_moves_the_stream_once():
    torch.sim.manual_seed(1)
    plain = [torch.rand(8, device="sim").cpu() for _ in range(3)]
    torch.sim.manual_seed(1)
    with shadowrun.compare("sim", ref="sim[tf32=on]") as run:
        drawn = [torch.rand(8, device="sim").cpu() for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(plain, drawn, strict=True))
    assert run.counts()[Status.MISMATCH] == 0
    assert run.counts()[Status.MATCH] >= 3


def test_what_the_program_writes_later_is_not_what_is_compared():
    x = torch.randn(16, 16).to("sim")
    with shadowrun.compare("sim", ref="sim[tf32=on]") as run:
        for _ in range(10):
            y = x * 2
            y.zero_()
            x.add_(1)
    assert run.counts()[Status.MATCH] == 30


def test_an_exception_is_the_program_s_own():
    x = torch.randn(4, 4).to("sim")
    with shadowrun.compare("sim", ref="sim[tf32=on]") as run, pytest.raises(RuntimeError, match="multiplied"):
        x @ torch.ones(3, 3, device="sim")
    assert run.counts()[Status.ERROR] == 0


def test_cuda_s_settings_are_put_back_exactly():
    def now():
        return (
            torchplatform.cuda_precisions(),
            torchplatform.deterministic_state(),
            torch.get_float32_matmul_precision(),
        )

    before = now()
    with device_settings("cuda", (("deterministic", True), ("tf32", True))):
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
        assert torch.are_deterministic_algorithms_enabled()
        assert torchplatform.mkldnn_precision() == before[0][-1]
    assert now() == before
    with device_settings("cuda", (("tf32", False),)):
        assert not torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cudnn.allow_tf32
    assert now() == before
