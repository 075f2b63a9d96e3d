"""Before a graph of a device is recorded, all calls that wait are compared: no thread may touch the device then."""

import pytest
import torch

import shadowrun
from shadowrun import Status


@pytest.fixture
def graph(clean_sim, monkeypatch):
    class Graph:
        def __init__(self):
            self.waiting = self.pipeline = None
            self.ended = False

        def capture_begin(self, pool=None, capture_error_mode="global"):
            # Torch fills the seed of the graph here, before the stream captures.
            self.seed = torch.zeros(1, device="sim").fill_(7)
            self.waiting = self.pipeline is not None and not self.pipeline.idle
            return pool, capture_error_mode

        def capture_end(self):
            self.ended = True

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
        monkeypatch.setattr(run._replayer._paths, "drain", lambda: 1 / 0)
        assert recorded.capture_begin() == (None, "global")
        monkeypatch.undo()


@pytest.mark.parametrize(
    "options",
    [{}, {"asynchronous": False}, {"drift": True}, {"budget": 50.0}, {"ref": "sim[deterministic=off]"}],
    ids=str,
)
def test_calls_of_a_recording_are_run_and_counted(graph, options):
    x = torch.rand(8, 8, device="sim")
    with shadowrun.compare("sim", **options) as run:
        x.cos()
        recorded = graph()
        recorded.capture_begin()
        torch.ones(3).exp()
        y = x.sin()
        recorded.capture_end()
        z = y.tan()
    assert recorded.ended
    assert torch.equal(z, x.sin().tan())
    skipped = run._data.query("select name, reason from skipped join op on op.id = op_id")
    counted = {name for name, reason in skipped if reason.startswith("recorded into a graph")}
    assert counted >= {"aten::fill_.Scalar", "aten::sin", "aten::exp"}
    assert {r.call.op for r in run.records(status=Status.MATCH)} >= {"aten::cos", "aten::tan"}
    assert not {"aten::sin", "aten::exp"} & {r.call.op for r in run.records()}
    assert run.counts()[Status.MISMATCH] == run.counts()[Status.ERROR] == 0


def test_a_recording_that_fails_to_begin_ends(graph):
    def refuse(self, *_):
        raise RuntimeError("no graph")

    graph.capture_begin = refuse
    with shadowrun.compare("sim") as run:
        with pytest.raises(RuntimeError, match="no graph"):
            graph().capture_begin()
        torch.rand(4, device="sim").sin()
    assert [r.verdict.status for r in run.records(op="aten::sin")] == [Status.MATCH]


def test_a_block_that_ends_within_a_recording_hides_nothing_of_the_next(graph):
    x, run = torch.rand(4, device="sim"), shadowrun.compare("sim")
    with run:
        graph().capture_begin()
        x.cos()
    with run:
        x.sin()
    assert [r.verdict.status for r in run.records(op="aten::sin")] == [Status.MATCH]
