"""`Callback` in Lightning's own `Trainer`."""

import pytest
import torch
from torch.utils.data import DataLoader

import shadowrun
from tests.integrations.frameworks_kit import Kept, Rows, assert_is_over, by_step, net

lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning")

from shadowrun.integrations.lightning import Callback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(lightning.LightningModule):
    def __init__(self, raises_at=None):
        super().__init__()
        self.net = net()
        self.n_validated = 0
        self.raises_at = raises_at

    def loss(self, batch):
        return (self.net(batch["x"]) - batch["labels"]).square().mean()

    def training_step(self, batch, index):
        if index == self.raises_at:
            raise ValueError("of the program")
        return self.loss(batch)

    def validation_step(self, batch, _):
        self.n_validated += 1
        self.log("val", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(tmp_path, *callbacks, model=None, **options):
    defaults = {
        "max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": tmp_path,
    }  # fmt: skip
    model = model or Model()
    trainer = lightning.Trainer(callbacks=list(callbacks), **{**defaults, **options})
    trainer.fit(model, DataLoader(Rows(), batch_size=2), DataLoader(Rows(2), batch_size=2))
    return model


def test_each_step_of_the_optimizer_is_one_and_validation_is_none(tmp_path):
    callback = Callback("cpu[mkldnn=off]")
    model = fit(tmp_path, callback, val_check_interval=1)
    assert model.n_validated == 5  # the sanity check is one
    assert by_step(callback.run) == dict.fromkeys(range(4), 2)
    assert [step.step for step in callback.run.steps()] == [0, 1, 2, 3]
    assert_is_over()


def test_gradient_accumulation_is_one_step(tmp_path):
    callback = Callback("cpu[mkldnn=off]")
    fit(tmp_path, callback, accumulate_grad_batches=2)
    assert by_step(callback.run) == {0: 4, 1: 4}
    assert len(callback.run.steps()) == 2


def test_validation_within_an_accumulation(tmp_path):
    callback = Callback("cpu[mkldnn=off]")
    fit(tmp_path, callback, accumulate_grad_batches=2, val_check_interval=1)
    assert by_step(callback.run) == {0: 4, 1: 4}


def test_options_are_those_of_compare(tmp_path):
    file = tmp_path / "run.shadowrun"
    fit(tmp_path, Callback("cpu[mkldnn=off]", steps=[1, 3], file=file))
    assert sorted(by_step(shadowrun.load(file))) == [1, 3]


def test_the_training_is_the_same(tmp_path):
    plain, compared = fit(tmp_path), fit(tmp_path, Callback("cpu[mkldnn=off]"))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), compared.parameters(), strict=True))


def test_figures_in_the_trainers_own_loggers(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    fit(tmp_path, Callback("cpu[mkldnn=off]", every=1), logger=logger)
    logger.save()
    text = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text(encoding="utf-8")
    assert "shadowrun/findings" in text
    kept = Kept()
    fit(tmp_path, Callback("cpu[mkldnn=off]", log_to=kept))
    assert kept.rows[-1][0] == 4


def test_an_exception_of_the_program_ends_the_comparison(tmp_path):
    callback = Callback("cpu[mkldnn=off]", file=tmp_path / "run.shadowrun")
    with pytest.raises(ValueError, match="of the program"):
        fit(tmp_path, callback, model=Model(raises_at=2))
    assert_is_over()
    assert sorted(by_step(callback.run)) == [0, 1]


def test_the_other_name_of_lightning(tmp_path):
    """One callback works in the trainers of both names, whichever its class comes from."""
    other = pytest.importorskip("pytorch_lightning", reason="needs pytorch-lightning")

    class Other(other.LightningModule):
        loss, training_step, configure_optimizers = Model.loss, Model.training_step, Model.configure_optimizers

        def __init__(self):
            super().__init__()
            self.net, self.raises_at = net(), None

    callback = Callback("cpu[mkldnn=off]")
    trainer = other.Trainer(
        callbacks=[callback], max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Other(), DataLoader(Rows(), batch_size=2))
    assert sorted(by_step(callback.run)) == [0, 1, 2, 3]
