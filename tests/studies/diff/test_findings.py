"""Two runs: findings that are new, gone, worse or the same."""

import json
import subprocess
import sys

import pytest
import torch

import shadowrun
from shadowrun.analysis import Change, FindingInRun, Signature, changes
from shadowrun.cli.main import main


def run_with(clean_sim, path, *flaws):
    torch.manual_seed(0)
    x = torch.randn(8, 8)
    with clean_sim.flaws(*flaws), shadowrun.compare("sim", file=path, slow_ratio=1e9):
        a = x.to("sim")
        torch.nn.functional.gelu(a).sum() + (a @ a).sum()
    return path


@pytest.fixture
def runs(clean_sim, tmp_path):
    clean = run_with(clean_sim, tmp_path / "clean.shadowrun")
    return clean, run_with(clean_sim, tmp_path / "flawed.shadowrun", "gelu-by-tanh")


def said(changes_found):
    return [(str(c.change), c.signature.op) for c in changes_found]


def test_new_gone_and_same(runs):
    clean, flawed = map(shadowrun.load, runs)
    assert said(flawed.changes_since(clean)) == [("new", "aten::gelu")]
    assert said(clean.changes_since(flawed)) == [("gone", "aten::gelu")]
    assert said(flawed.changes_since(flawed)) == [("same", "aten::gelu")]


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (FindingInRun(1, 10, 1e6 + 50, 0), FindingInRun(1, 10, 1e6 + 60, 0), Change.SAME),
        (FindingInRun(1, 10, 1e6 + 50, 0), FindingInRun(1, 10, 1e6 + 500, 0), Change.WORSE),
        (FindingInRun(1, 10, 1e6 + 50, 0), FindingInRun(1, 10, 4e6 + 50, 0), Change.WORSE),
        (FindingInRun(1, 10, 4e6 + 50, 0), FindingInRun(1, 10, 1e6 + 500, 0), Change.SAME),
        (FindingInRun(1, 10, 1e6, 0), FindingInRun(3, 10, 1e6, 0), Change.WORSE),
        (FindingInRun(10, 10, 1e6, 0), FindingInRun(30, 30, 1e6, 0), Change.SAME),
        (None, FindingInRun(1, 1, 0, 0), Change.NEW),
        (FindingInRun(1, 1, 0, 0), None, Change.GONE),
    ],
)
def test_worse(before, after, change):
    key = Signature("mismatch", "aten::mm", "fc", "forward", "precision")
    (found,) = changes(*({} if seen is None else {key: seen} for seen in (before, after)))
    assert found.change is change


@pytest.mark.parametrize(("kind", "status"), [("new", 1), ("worse", 0), ("any", 1)])
def test_fail_on(runs, capsys, kind, status):
    assert main(["diff", *map(str, runs), "--no-known", "--fail-on", kind, "-f", "json"]) == status
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["n_by_change"] == {"new": 1, "worse": 0, "same": 0, "gone": 0}
    assert data["findings"][0]["op"] == "aten::gelu"
    assert ("FAILED: 1 findings are new" in captured.err) is bool(status)


def test_known_issues_fail_nothing(runs, tmp_path):
    ledger = tmp_path / "shadowrun.toml"
    ledger.write_text('[[known]]\noperator = "gelu"\nplatform = "sim"\nreason = "#1"\n')
    assert main(["diff", *map(str, runs), "--known", str(ledger), "--fail-on", "any"]) == 0


def test_kinds_of_recordings_and_maps_are_refused(runs, capsys):
    for options in (["--fail-on", "kernel"], ["--map", "names.toml"]):
        assert main(["diff", *map(str, runs), *options]) == 2
        assert "bad-option" in capsys.readouterr().err


def test_no_torch_is_imported(runs):
    code = "import sys; from shadowrun.cli.main import main; main(['diff', *sys.argv[1:]]); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, *runs], check=False, stdout=subprocess.DEVNULL).returncode == 0
