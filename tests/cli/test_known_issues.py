"""Ledger and tolerances as a user has them: files next to the program, and the exit status."""

import json
from pathlib import Path

import pytest

from shadowrun.cli.main import main
from tests import forked

PROGRAM = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(16, 16), torch.nn.Linear(16, 8)
    def forward(self, x):
        return torch.softmax(self.decoder(torch.tanh(self.encoder(x))), -1)
torch.manual_seed(0)
Net().to("sim")(torch.randn(4, 16).to("sim")).sum().item()
"""
ENCODER = '[[known]]\noperator = "addmm"\nplatform = "sim"\nmodule = "*.encoder"\nreason = "bf16, ticket 1"\n'
REST = '[[known]]\noperator = "aten::*"\nplatform = "sim"\nstatus = "mismatch"\nreason = "ticket 2"\n'


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A folder with the program and its data file, recorded with no settings."""
    folder = tmp_path_factory.mktemp("known")
    (folder / "prog.py").write_text(PROGRAM, encoding="utf-8")
    (folder / "down").mkdir()
    ended = run(folder)
    assert ended.returncode == 1
    assert "FAILED: 2 mismatches\n" in ended.stderr
    return folder


def run(folder, *options):
    """In a process of its own: it has flaws."""
    flaws = "--flaws", "matmul-in-bf16,softmax-error"
    return forked.shadowrun("run", *flaws, *options, folder / "prog.py", folder=folder)


@pytest.fixture
def folder(recorded, monkeypatch):
    monkeypatch.chdir(recorded / "down")
    yield recorded
    for name in ("shadowrun.toml", "pyproject.toml"):
        (recorded / name).unlink(missing_ok=True)


def exported(*options):
    assert main(["export", "-f", "json", "-o", "x.json", "../.shadowrun", *options]) == 0
    return json.loads(Path("x.json").read_text(encoding="utf-8"))


def test_a_recorded_run_is_read_with_todays_ledger(folder, capsys):
    assert not exported()["known"]["findings"]
    (folder / "shadowrun.toml").write_text(ENCODER, encoding="utf-8")
    found = exported()
    assert [(f["op"], f["modules"]) for f in found["known"]["findings"]] == [("aten::addmm", ["Net.encoder"])]
    assert {(f["op"], *f["modules"]) for f in found["findings"]} == {
        ("aten::addmm", "Net.decoder"),
        ("aten::_softmax", "Net"),
    }
    assert not found["passed"]
    assert found["first_divergence"]["call"]["module"] == "Net.decoder"
    assert len(exported("--no-known")["findings"]) == 2, "both modules in one"
    Path("other.toml").write_text(ENCODER + REST, encoding="utf-8")
    found = exported("--known", "other.toml")
    assert (found["passed"], found["findings"]) == (True, [])
    assert main(["report", "../.shadowrun", "--known", "other.toml"]) == 0
    assert "PASSED: " in capsys.readouterr().out
    assert main(["report", "../.shadowrun", "--known", "nothing.toml"]) == 2
    assert "shadowrun explain settings-missing" in capsys.readouterr().err


def test_the_gate_of_a_run(folder):
    (folder / "shadowrun.toml").write_text(ENCODER + REST, encoding="utf-8")
    ended = run(folder)
    assert ended.returncode == 0, ended.stderr
    assert "(3 known mismatches not counted)" in ended.stdout
    assert run(folder, "--no-known").returncode == 1
    assert run(folder, "--no-settings").returncode == 1


def test_the_tolerance_that_a_report_names_lets_the_program_pass(folder):
    rules = "".join(
        f'"{f["op"]}" = {{rtol = {f["min_tolerance"]["rtol"]}, atol = 0}}\n' for f in exported()["findings"]
    )
    (folder / "pyproject.toml").write_text("[tool.shadowrun.tolerance]\n" + rules, encoding="utf-8")
    before = (folder / ".shadowrun").read_bytes()
    data = str(folder / "down" / "y.shadowrun")
    assert run(folder, "--data", data).returncode == 0
    assert run(folder, "--data", data, "--no-settings").returncode == 1
    assert run(folder, "--data", data, "--rtol", "0", "--atol", "1e-9").returncode == 1
    assert (folder / ".shadowrun").read_bytes() == before


def test_a_mistake_in_the_file_stops_before_the_program_runs(folder):
    (folder / "shadowrun.toml").write_text('[tolerance]\n"mm" = {rtol = 1, atol = "x"}\n', encoding="utf-8")
    ended = run(folder)
    assert ended.returncode == 2
    assert "shadowrun.toml, tolerance of 'mm': atol = 'x': use a finite number >= 0." in ended.stderr
