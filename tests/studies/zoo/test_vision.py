"""Models of torchvision and timm, by a package of this test in the place of torchvision."""

import sys

import pytest

from shadowrun.cli.main import main
from shadowrun.studies.zoo.program import read_zoo

MODELS = '''\
import torch


class Net(torch.nn.Module):
    """It needs images of 64 pixels."""

    def __init__(self, num_classes):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, stride=2)
        self.norm = torch.nn.BatchNorm2d(4)
        self.fc = torch.nn.Linear(4 * 31 * 31, num_classes)

    def forward(self, image):
        return self.fc(self.norm(self.conv(image)).relu().flatten(1))


class Dies(Net):
    def forward(self, image):
        import os

        os.abort()


def list_models(module):
    assert module.__name__ == "torchvision.models"
    return ["net", "large", "dies", "other"]


def get_model(name, weights, num_classes):
    assert weights is None
    if name == "large":
        return torch.nn.Linear(10_000, 10_000)
    return {"net": Net, "dies": Dies}[name](num_classes)
'''


@pytest.fixture
def torchvision(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "site" / "torchvision").mkdir(parents=True)
    (tmp_path / "site" / "torchvision" / "__init__.py").write_text("")
    (tmp_path / "site" / "torchvision" / "models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("torchvision", "torchvision.models"):
        sys.modules.pop(name, None)


def test_small_models_become_programs_and_others_have_their_reason(torchvision, capsys):
    assert main(["zoo", "add", "torchvision"]) == 0
    assert "2 programs of torchvision" in capsys.readouterr().err
    zoo = read_zoo(torchvision / ".shadowzoo")
    programs = {p.name: p for p in zoo.programs.values()}
    assert sorted(programs) == ["net/Net forward", "net/Net training-step"]
    forward = programs["net/Net forward"].graph
    assert {i.shape for i in forward.inputs if i.role == "input"} == {(2, 3, 64, 64)}
    assert "aten::convolution" in [node.name for node in forward.nodes]
    left_out = {what: why for stage in zoo.stages for what, why in stage.left_out}
    assert left_out["large"] == "it has 100,010,000 parameters, more than 12,000,000"
    assert left_out["dies"] == "crash: signal 6 (SIGABRT)"
    assert left_out["other"].startswith("KeyError")


def test_a_package_that_is_not_installed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "timm", None)
    assert main(["zoo", "add", "timm"]) == 2
    assert "timm cannot be imported" in capsys.readouterr().err
