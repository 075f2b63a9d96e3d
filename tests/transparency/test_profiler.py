"""The program's own profiler counts what it counts under an empty mode: no replays, and none of what they need."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import shadowrun
from shadowrun import Status
from tests.transparency.checking import IdleMode


def _counted(block):
    """Calls of each operator and memory that it took, in a small training step."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Dropout())
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    x = torch.ones(2, 3)
    with block, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(2):
            optimizer.zero_grad()
            out, _ = net(x).sort()
            out.sum().backward()
            optimizer.step()
    found = {e.key: (e.count, e.self_cpu_memory_usage) for e in profiler.key_averages() if e.key.startswith("aten::")}
    return {name: numbers[0] for name, numbers in found.items()}, found


@pytest.mark.parametrize("target", ["cpu", "cpu[threads=1]", "sim"])
@pytest.mark.parametrize("options", [{}, {"drift": True}], ids=str)
def test_replays_are_not_counted(clean_sim, target, options):
    plain, _ = _counted(IdleMode())
    run = shadowrun.compare(target, **options)
    counted, _ = _counted(run)
    assert counted == plain
    assert run.counts()[Status.MATCH] > 10
    assert not run.findings()


def test_memory_of_replays_is_not_counted():
    _, plain = _counted(IdleMode())
    _, compared = _counted(shadowrun.compare("cpu"))
    assert compared == plain


def test_after_a_call_that_raises_it_goes_on():
    with shadowrun.compare("cpu"), profile(activities=[ProfilerActivity.CPU]) as profiler:
        with pytest.raises(RuntimeError):
            torch.ones(3) @ torch.ones(5)
        torch.ones(3).tan()
    assert "aten::tan" in {e.key for e in profiler.key_averages()}
