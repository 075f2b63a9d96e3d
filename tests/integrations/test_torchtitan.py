"""The class of docs/howto/frameworks.md, on a stand-in for torchtitan's `Trainer` with its loop."""

import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.integrations.frameworks_kit import assert_is_over, by_step, net

PAGE = Path(__file__).parents[2] / "docs/howto/frameworks.md"


class Trainer:
    """As torchtitan 0.3: `train` calls `train_step` and may validate; a step has several micro-batches."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        steps: int = 3

    def __init__(self, raises_at=-1):
        self.model = net()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.raises_at = raises_at

    def train(self):
        for step in range(self.Config().steps):
            if step == self.raises_at:
                self.train_step(iter([]))
            self.train_step(iter([torch.randn(2, 4), torch.randn(2, 4)]))
            self.model(torch.randn(2, 4))  # the validation

    def train_step(self, data_iterator):
        self.optimizer.zero_grad()
        for _ in range(2):
            self.model(next(data_iterator)).sum().backward()
        self.optimizer.step()


@pytest.fixture
def compared(monkeypatch, tmp_path):
    """The class of the page."""
    module = types.ModuleType("torchtitan.trainer")
    module.Trainer = Trainer
    monkeypatch.setitem(sys.modules, "torchtitan", types.ModuleType("torchtitan"))
    monkeypatch.setitem(sys.modules, "torchtitan.trainer", module)
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(from dataclasses.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    names = {"__name__": "example"}
    exec(code.replace('"npu"', '"cpu[mkldnn=off]"').replace(", budget=1.2", ""), names)
    return names["ComparedTrainer"]


def test_steps_and_no_validation(compared):
    trainer = compared()
    trainer.train()
    assert by_step(trainer.run) == dict.fromkeys(range(3), 4)
    assert Path("train.shadowrun").is_file()
    assert_is_over()


def test_an_exception_ends_the_comparison(compared):
    trainer = compared(raises_at=1)
    with pytest.raises(StopIteration):
        trainer.train()
    assert sorted(by_step(trainer.run)) == [0]
    assert_is_over()
