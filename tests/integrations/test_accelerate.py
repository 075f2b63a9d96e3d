"""A comparison of loops with accelerate."""

import pytest
import torch
from torch.utils.data import DataLoader

import shadowrun
from tests.integrations.frameworks_kit import Kept, Rows, assert_is_over, by_step, net, run_on_two_ranks

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")

from shadowrun.integrations.accelerate import compare  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def train(accelerator, run, evaluates=False):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(Rows(), batch_size=2))
    with run:
        for batch in batches:
            with accelerator.accumulate(model):
                loss = (model(batch["x"]) - batch["labels"]).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if evaluates:
                run.pause()
                model(batch["x"])
                run.start()
    assert_is_over()
    return run


def test_each_step_of_the_optimizer_is_one():
    accelerator = accelerate.Accelerator(cpu=True)
    run = train(accelerator, compare(accelerator, "cpu[mkldnn=off]"))
    assert by_step(run) == dict.fromkeys(range(4), 2)
    assert len(run.steps()) == 4


def test_gradient_accumulation_is_one_step():
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    run = train(accelerator, compare(accelerator, "cpu[mkldnn=off]"))
    assert by_step(run) == {0: 4, 1: 4}
    assert len(run.steps()) == 2


def test_a_paused_evaluation_is_no_step():
    accelerator = accelerate.Accelerator(cpu=True)
    run = train(accelerator, compare(accelerator, "cpu[mkldnn=off]"), evaluates=True)
    assert by_step(run) == dict.fromkeys(range(4), 2)


def test_figures_in_the_trackers_and_elsewhere(monkeypatch):
    accelerator, kept = accelerate.Accelerator(cpu=True), Kept()
    monkeypatch.setattr(accelerator, "log", kept.log)
    train(accelerator, compare(accelerator, "cpu[mkldnn=off]", every=1))
    other = Kept()
    train(accelerator, compare(accelerator, "cpu[mkldnn=off]", log_to=other))
    train(accelerator, compare(accelerator, "cpu[mkldnn=off]", log_to=False))
    for rows in (kept.rows, other.rows):
        assert rows[-1][0] == 4
        assert rows[-1][1]["shadowrun/mismatches"] == 0
    assert [step for step, _ in kept.rows].count(4) == 1


def test_the_optimizers_line_is_the_users():
    accelerator = accelerate.Accelerator(cpu=True)
    run = train(accelerator, compare(accelerator, "cpu[mkldnn=off]"))
    sites = {r.call.site for r in run.records() if r.call.phase is shadowrun.Phase.OPTIMIZER}
    assert sites
    assert all("test_accelerate.py" in site.partition(" (")[0] for site in sites), sites


PROGRAM = """
import accelerate, torch
from shadowrun.integrations.accelerate import compare
from tests.integrations.frameworks_kit import net

def main():
    accelerator = accelerate.Accelerator(cpu=True)
    class Log:
        def log(self, values, step): print("logged by rank", accelerator.process_index)
    model = net(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    with compare(accelerator, "cpu[mkldnn=off]", file="run.shadowrun", log_to=Log()):
        for _ in range(2):
            accelerator.backward(model(torch.randn(2, 4)).sum())
            optimizer.step()
"""


def test_each_rank_has_a_file_and_one_logs(forked_processes, tmp_path):
    done = run_on_two_ranks(tmp_path, PROGRAM)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split("\n")) - {""} == {"logged by rank 0"}
    for rank in range(2):
        run = shadowrun.load(tmp_path / f"run.{rank}.shadowrun")
        assert run.info.rank == rank
        assert len(run.steps()) == 2
