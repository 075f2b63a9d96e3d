"""Before a graph of a device is recorded, all calls that wait are compared: no thread may touch the device then."""

import pytest
import torch

import shadowrun
from shadowrun import Status


@pytest.fixture
def graph(clean_sim, monkeypatch):
    class Graph:
        def __init__(self):
            self.waiting = None

        def capture_begin(self, pool=None, capture_error_mode="global"):
            self.waiting = not self.pipeline.idle
            return pool, capture_error_mode

    monkeypatch.setattr(torch.sim, "SIMGraph", Graph, raising=False)
    with clean_sim.asynchronous():
        yield Graph


def test_nothing_waits_when_a_recording_begins(graph):
    plain = vars(graph)["capture_begin"]
    x = torch.rand(512, 512, device="sim")
    with shadowrun.compare("sim") as run:
        for _ in range(20):
            x = (x @ x).tanh()
        recorded = graph()
        recorded.pipeline = run._replayer._paths._pipeline
        assert recorded.capture_begin("pool", capture_error_mode="relaxed") == ("pool", "relaxed")
        assert recorded.waiting is False
        assert run._replayer._paths._asynchronous._snapshots._budget.held == 0
    assert vars(graph)["capture_begin"] is plain
    assert run.counts()[Status.MATCH] >= 40


def test_a_recording_goes_on_whatever_happens_to_us(graph, monkeypatch):
    with shadowrun.compare("sim") as run:
        recorded = graph()
        recorded.pipeline = run._replayer._paths._pipeline
        monkeypatch.setattr(run._replayer._paths, "settle", lambda: 1 / 0)
        assert recorded.capture_begin() == (None, "global")
        monkeypatch.undo()
