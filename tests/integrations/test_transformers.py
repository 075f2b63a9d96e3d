"""`TrainerCallback` in transformers' own `Trainer`."""

import warnings

import pytest
import torch

import shadowrun
from tests.integrations.frameworks_kit import Kept, Rows, assert_is_over, by_step, net, run_on_two_ranks

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from shadowrun.integrations.transformers import TrainerCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()
        self.n_evaluated = 0

    def forward(self, x, labels):
        self.n_evaluated += not self.training
        y = self.net(x)
        return {"loss": (y - labels).square().mean(), "logits": y}


def trainer_with(tmp_path, *callbacks, model=None, **arguments):
    options = {
        "output_dir": str(tmp_path), "max_steps": 4, "per_device_train_batch_size": 2, "report_to": [],
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "use_cpu": True, "seed": 0,
    }  # fmt: skip
    return transformers.Trainer(
        model=model or Model(),
        args=transformers.TrainingArguments(**{**options, **arguments}),
        train_dataset=Rows(),
        eval_dataset=Rows(2),
        callbacks=list(callbacks),
    )


def test_each_step_of_the_optimizer_is_one(tmp_path):
    callback = TrainerCallback("cpu[mkldnn=off]")
    trainer_with(tmp_path, callback).train()
    assert by_step(callback.run) == dict.fromkeys(range(4), 2)
    assert [step.step for step in callback.run.steps()] == [0, 1, 2, 3]
    assert_is_over()


def test_gradient_accumulation_is_one_step(tmp_path):
    callback = TrainerCallback("cpu[mkldnn=off]")
    trainer_with(tmp_path, callback, gradient_accumulation_steps=3, max_steps=2).train()
    # Two layers, and three micro-batches; the second step has only one batch left of the epoch.
    assert list(by_step(callback.run)) == [0, 1]
    assert by_step(callback.run)[0] == 6
    assert len(callback.run.steps()) == 2


def test_an_evaluation_is_no_step(tmp_path):
    callback, model = TrainerCallback("cpu[mkldnn=off]"), Model()
    trainer = trainer_with(tmp_path, callback, model=model, eval_strategy="steps", eval_steps=1)
    trainer.train()
    trainer.evaluate()
    assert model.n_evaluated == 5
    assert by_step(callback.run) == dict.fromkeys(range(4), 2)
    assert len(callback.run.steps()) == 4


def test_options_are_those_of_compare(tmp_path):
    file = tmp_path / "run.shadowrun"
    callback = TrainerCallback("cpu[mkldnn=off]", "cpu", steps=[1, 3], file=file)
    trainer_with(tmp_path, callback).train()
    assert sorted(by_step(shadowrun.load(file))) == [1, 3]
    with pytest.raises(shadowrun.UsageError, match="no option 'stepz'"):
        TrainerCallback("cpu", stepz=1)


def test_the_training_is_the_same(tmp_path):
    plain, compared = trainer_with(tmp_path), trainer_with(tmp_path, TrainerCallback("cpu[mkldnn=off]"))
    for trainer in (plain, compared):
        trainer.train()
    pairs = zip(plain.model.parameters(), compared.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_figures_in_the_trainers_own_log(tmp_path):
    callback = TrainerCallback("cpu[mkldnn=off]", every=1)
    trainer = trainer_with(tmp_path, callback)
    callback.log_to(trainer)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "shadowrun/findings" in row]
    assert logged[-1]["step"] == 4
    assert logged[-1]["shadowrun/mismatches"] == 0
    assert logged[-1]["shadowrun/overhead"] > 0
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [1, 2, 3, 4]


def test_a_comparison_that_cannot_start_is_one_warning(tmp_path):
    callback = TrainerCallback("cpu[mkldnn=off]", log_to=(kept := Kept()))
    trainer = trainer_with(tmp_path, callback)
    with shadowrun.compare("cpu[mkldnn=off]"), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.train()
    texts = [str(w.message) for w in seen if w.category is shadowrun.ShadowrunWarning]
    assert len(texts) == 1
    assert "not compared from here on, NestingError" in texts[0]
    assert trainer.state.global_step == 4
    assert kept.rows == []


def test_a_second_training_goes_on(tmp_path):
    callback = TrainerCallback("cpu[mkldnn=off]")
    trainer = trainer_with(tmp_path, callback, max_steps=2)
    trainer.train()
    trainer.train()
    assert sorted(by_step(callback.run)) == [0, 1, 2, 3]


def test_the_optimizers_line_is_the_users(tmp_path):
    callback = TrainerCallback("cpu[mkldnn=off]")
    trainer_with(tmp_path, callback, max_steps=1).train()
    sites = {r.call.site for r in callback.run.records() if r.call.phase is shadowrun.Phase.OPTIMIZER}
    assert sites
    assert all("test_transformers.py" in site for site in sites), sites


PROGRAM = """
import transformers
from shadowrun.integrations.transformers import TrainerCallback
from tests.integrations.test_transformers import Model, Rows

def main():
    callback = TrainerCallback("cpu[mkldnn=off]", file="run.shadowrun", every=1)
    arguments = transformers.TrainingArguments(
        "out", max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, eval_strategy="steps", eval_steps=1, logging_steps=1,
    )
    trainer = transformers.Trainer(
        model=Model(), args=arguments, train_dataset=Rows(16), eval_dataset=Rows(4), callbacks=[callback]
    )
    callback.log_to(trainer)
    trainer.train()
    n = sum("shadowrun/findings" in row for row in trainer.state.log_history)
    # Not to standard output, where lines of two processes may mix.
    with open(f"rank.{trainer.args.process_index}", "w") as file:
        file.write(str(n > 0))
"""


def test_ranks_have_their_files_and_rank_0_logs(forked_processes, tmp_path):
    done = run_on_two_ranks(tmp_path, PROGRAM)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank.{rank}").read_text() for rank in range(2)] == ["True", "False"]
    for rank in range(2):
        run = shadowrun.load(tmp_path / f"run.{rank}.shadowrun")
        assert run.info.rank == rank
        assert [step.step for step in run.steps()] == [0, 1]
