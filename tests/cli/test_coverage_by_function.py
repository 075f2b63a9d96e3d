"""`shadowrun run --api` and `shadowrun coverage --api`."""

import json

import pytest

from shadowrun.cli.main import main

PROGRAM = """
import torch
x = torch.ones(4, requires_grad=True)
torch.lerp(torch.sin(x), x, 0.5).sum().backward()
"""


@pytest.fixture
def recorded(tmp_path, monkeypatch, clean_sim):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")

    def run(*options):
        with clean_sim.flaws("missing-lerp"):
            return main(["run", "--target", "sim", "--fail-on", "none", *options, "train.py"])

    return run


def test_functions_full_and_none(recorded, capsys):
    recorded("--api")
    capsys.readouterr()
    assert main(["coverage", "--api", "-f", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    grades = {f["function"]: f["grade"] for f in data["coverage"]["functions"]}
    assert grades["torch.sin"] == "full"
    assert grades["torch.lerp"] in ("partial", "none")
    assert data["percent"]["full"] < 100
    assert main(["coverage", "--api", "--fail-under", "100"]) == 1
    printed = capsys.readouterr()
    assert "aten::lerp" in printed.out
    assert "function coverage" in printed.err
    assert main(["coverage", "--api", "-f", "csv"]) == 0
    assert capsys.readouterr().out.startswith("function,grade,")


def test_a_run_without_functions_is_refused(recorded, capsys):
    recorded()
    capsys.readouterr()
    assert main(["coverage", "--api"]) == 2
    assert "record it with api=True (shadowrun run --api)" in capsys.readouterr().err
