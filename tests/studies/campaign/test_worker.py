"""What a worker sends after a compiler, or its runtime, works no more."""

from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

from shadowrun.studies.campaign import worker
from shadowrun.studies.campaign.run_variants import RunnerSettings, VariantRunner
from shadowrun.studies.campaign.seen_variants import SeenVariants
from shadowrun.studies.campaign.variants.recipe import Recipe
from shadowrun.studies.campaign.variants.variant import Execution, Variant
from shadowrun.studies.zoo.graph import Graph, Input, Node, Ref
from tests.studies.campaign.fake_worker import Finding, Result
from tests.studies.campaign.fake_worker import Variant as Fake

X = Input("x", (3,))


class Ended(Exception):
    pass


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs variants on a compiled target; gives the kinds of its messages."""
    SeenVariants(tmp_path / "claims", 10).close()
    settings = {"targets": ["cpu"], "compile": ["broken"], "claims": str(tmp_path / "claims"), "n_claims": 10}

    def run(*results):
        sent = []
        step = SimpleNamespace(on_target=None, in_op=None, end=lambda: sent.append("end"))
        channel = SimpleNamespace(step=step, send=lambda line: sent.append(line if isinstance(line, dict) else line[0]))
        left = iter(results)
        one = worker.VariantWorker(settings, channel, None, SimpleNamespace(run=lambda *_: next(left)))

        def ended(_):
            raise Ended

        monkeypatch.setattr(worker.os, "_exit", ended)
        try:
            for number in range(len(results)):
                one._result(Fake(None, number, number), number, 1)
        except Ended:
            sent.append("exit")
        return sent

    return run


RAISED = Result("finding", findings=(Finding("aten::mm", kind="error"),))


def test_a_broken_runtime_costs_the_process_and_the_variant_is_tried_again(run, monkeypatch):
    monkeypatch.setattr(worker, "_lost_backend", lambda backend: f"{backend} is spoiled")
    assert run(Result(), RAISED, Result()) == ["r", {"lost": "broken is spoiled"}, "exit"]
    # In a fresh process nothing before it can be the cause.
    assert run(RAISED) == ["r", "end", {"lost": "broken is spoiled"}, "exit"]


def test_an_exception_after_which_it_works_is_a_result(run, monkeypatch):
    monkeypatch.setattr(worker, "_lost_backend", lambda _: "")
    assert run(Result(), RAISED, Result()) == ["r", "r", "r"]


def test_a_backend_is_asked_for_one_sum():
    one = Variant(Recipe("0a"), Graph((X,), (Node(torch.ops.aten.neg.default, (Ref(-1),)),), (Ref(0),)), Execution())
    assert VariantRunner(RunnerSettings(("cpu[threads=1]",))).run(one).status == "ok"
    counters.clear()
    assert worker._lost_backend("eager") == ""
    assert counters["frames"]["ok"] == 1  # compiled, also after a comparison
    assert worker._lost_backend("eager") == worker._lost_backend("") == ""
    assert "nonsense" in worker._lost_backend("nonsense")
