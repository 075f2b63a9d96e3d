"""What a change broke (--baseline, --fail-on new), the first finding (--fail-fast), and `shadowrun known`."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

import shadowrun
from shadowrun import sim
from shadowrun.analysis import Baseline, Change
from shadowrun.cli.main import main
from shadowrun.errors import StoppedAtFinding, UsageError
from shadowrun.run import Run
from shadowrun.settings import KnownLine
from tests import forked
from tests.golden import sample

PROGRAM = """
import sys, torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = torch.lerp(layer(x), x, 0.5)
        return x
net = Net()
try:
    for step in range(3):
        net(torch.randn(2, 4))
        print("step", step, "ended")
finally:
    print("sum when leaving:", (torch.ones(3) + 1).sum().item())
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "p.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shadowrun_run(*options, program=("p.py",)):
    return forked.shadowrun("run", "--target", "sim", *options, *program)


def test_only_what_is_new_fails(folder):
    """One command after another, as a CI would run them."""
    assert shadowrun_run("--flaws", "missing-lerp", "--data", "main").returncode == 1
    same = shadowrun_run("--flaws", "missing-lerp", "--baseline", "main", "--fail-on", "new", "-o", "same.json")
    assert same.returncode == 0, same.stderr
    assert json.loads(Path("same.json").read_text("utf-8"))["since_baseline"]["name"] == "main"
    # The baseline is also the file that the run replaces.
    new = shadowrun_run(
        *("--flaws", "missing-lerp,matmul-in-bf16", "--baseline", "main", "--data", "main", "--fail-on", "new"),
        *("-o", "new.sarif"),
    )
    assert new.returncode == 1
    assert "FAILED: 3 findings new since main (1 unsupported, 1 mismatch not counted)" in new.stderr
    assert "new: aten::addmm (mismatch)" in new.stderr
    results = json.loads(Path("new.sarif").read_text("utf-8"))["runs"][0]["results"]
    assert {r["ruleId"]: (r["baselineState"], r["level"]) for r in results} == {
        "mismatch/reduced-precision": ("new", "error"),
        "unsupported/missing-operator": ("unchanged", "warning"),
    }
    refused = shadowrun_run("--fail-on", "new")
    assert refused.returncode == 2
    assert "--baseline" in refused.stderr


def test_the_program_is_ended_at_the_first_finding_and_may_leave_in_order(folder):
    done = shadowrun_run("--flaws", "missing-lerp", "--fail-fast", "-o", "r.json")
    assert done.returncode == 1
    assert "step 0 ended" not in done.stdout
    assert "sum when leaving: 6.0" in done.stdout, "operators on the way out run"
    assert "stopped at the first finding that fails the run: unsupported of aten::lerp.Scalar at p.py:11" in done.stderr
    assert "Traceback" not in done.stderr
    report = json.loads(Path("r.json").read_text("utf-8"))
    assert report["gate"]["line"] == "FAILED: stopped at the first of these; 1 unsupported"
    assert report["info"]["complete"]
    assert [f["n_calls"] for f in report["findings"]] == [1]
    again = shadowrun_run(
        *("--flaws", "missing-lerp", "--fail-fast", "--baseline", ".shadowrun", "--fail-on", "new", "--data", "second")
    )
    assert again.returncode == 0, "the baseline has it"
    assert "step 2 ended" in again.stdout


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x))


def steps_until_stop(run, n=5):
    net, done = Net(), 0
    try:
        with run:
            for _ in range(n):
                net(torch.randn(2, 4)).sum().backward()
                run.step()
                done += 1
    except StoppedAtFinding:
        return done
    return n


@pytest.fixture
def in_bf16():
    with sim.flaws("matmul-in-bf16"):
        yield


@pytest.mark.parametrize("ref", ["cpu", "cpu[threads=1]"])
def test_it_stops_whatever_the_path(ref, in_bf16):
    assert steps_until_stop(shadowrun.compare("sim", ref, fail_fast=True)) == 0
    assert steps_until_stop(shadowrun.compare("sim", ref, fail_fast=["unsupported"])) == 5
    assert steps_until_stop(shadowrun.compare("sim", ref)) == 5


def test_it_stops_a_program_on_the_target(in_bf16):
    x = torch.randn(4, 4, device="sim")
    with pytest.raises(StoppedAtFinding, match="mismatch of aten::mm"), shadowrun.compare("sim", fail_fast=True) as run:
        for _ in range(100):
            x = x @ x
            x = x / x.norm()
    assert not run.gate().passed
    # A second start compares again.
    assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))
    with run:
        torch.ones(2) + 1
    assert run.counts()["match"] > 1


def test_known_issues_do_not_stop_it(tmp_path, in_bf16):
    ledger = tmp_path / "shadowrun.toml"
    ledger.write_text('[[known]]\noperator = "aten::addmm"\nplatform = "sim"\nreason = "ticket"\n', encoding="utf-8")
    run = shadowrun.compare("sim", fail_fast=["mismatch"], known=ledger, ops="aten::addmm")
    assert steps_until_stop(run) == 5
    assert run.known().findings


def test_an_unknown_kind_is_refused():
    with pytest.raises(UsageError, match="fail_fast='mistmatch'"):
        shadowrun.compare("cpu", fail_fast="mistmatch")


def test_changes_of_a_run_with_its_baseline():
    run, same = Run(sample.build()), Run(sample.build())
    run.baseline = same.as_baseline("yesterday")
    since = run.since_baseline()
    assert {c.change for c in since.changes} == {Change.SAME}
    assert since.failing(["new", "worse"]) == []
    assert run.gate(["new"]).passed
    empty = Run(sample.build(), [KnownLine("*", "*", "ticket")])
    empty.baseline = Baseline("nothing", "npu against cpu", {})
    # The ledger excuses them in this run, whatever the baseline has.
    assert empty.gate(["new"]).passed
    del run.baseline.findings[next(iter(run.baseline.findings))]
    gate = run.gate(["new", "unsupported"])
    assert not gate.passed
    assert "2 unsupported, 1 finding new since yesterday" in gate.line


@pytest.fixture
def recorded(folder):
    """A run with two findings, and no ledger."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with sim.flaws("missing-lerp", "matmul-in-bf16"), shadowrun.compare("sim", file="data"):
        net(torch.randn(2, 4)).lerp(torch.ones(2, 4), 0.5)
    return folder


def lines_of(path="shadowrun.toml"):
    return tomllib.loads(Path(path).read_text("utf-8")).get("known", [])


def test_a_ledger_is_begun_extended_and_cleaned(recorded, capsys):
    assert main(["known", "data"]) == 1
    assert re.search("findings without a line +2\\n", capsys.readouterr().out)
    assert main(["known", "data", "--init", "--kinds", "mismatch", "--reason", "ticket 12", "--dry-run"]) == 0
    assert not Path("shadowrun.toml").exists()
    assert main(["known", "data", "--init", "--kinds", "mismatch", "--reason", "ticket 12"]) == 0
    assert lines_of() == [
        {"operator": "aten::addmm", "platform": "sim", "status": "mismatch", "module": "Sequential.*",
         "reason": "ticket 12"}
    ]  # fmt: skip
    assert main(["known", "data"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"aten::addmm +mismatch +Sequential\.\* +sim +matched +2 +ticket 12", said)
    assert re.search("findings without a line +1\n", said)
    assert main(["known", "data", "-f", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [use["state"] for use in found["lines"]] == ["matched"]
    assert [f["op"] for f in found["findings_without_line"]] == ["aten::lerp.Scalar"]
    ledger = Path("shadowrun.toml")
    stale = """# of the line below
[[known]] # x
operator = "aten::add*"
platform = "sim"
reason = "old"
expires = 2020-01-01
# of the next
"""
    ledger.write_text(f"# kept\n{stale}{ledger.read_text('utf-8')}# the end\n", encoding="utf-8")
    assert main(["known", "data", "--update", "--prune", "--expires", "2099-01-31"]) == 0
    text = ledger.read_text("utf-8")
    assert [line["operator"] for line in lines_of()] == ["aten::addmm", "aten::lerp.Scalar"]
    assert str(lines_of()[1]["expires"]) == "2099-01-31"
    assert "accepted on" in lines_of()[1]["reason"]
    for comment in ("# kept", "# of the line below", "# of the next", "# the end"):
        assert comment in text
    assert main(["known", "data"]) == 0
    assert shadowrun.load("data").findings() == []


def test_a_ledger_is_begun_once(recorded, capsys):
    assert main(["known", "data", "--init"]) == 0
    assert main(["known", "data", "--init"]) == 2
    assert "add to it by --update" in capsys.readouterr().err
    assert main(["known", "data", "--init", "--ledger", "other.toml"]) == 0
    assert len(lines_of("other.toml")) == 2
    assert main(["known", "data", "--prune"]) == 2
    capsys.readouterr()
    assert main(["known", "data", "--update", "-f", "json"]) == 2
    assert "print no report" in capsys.readouterr().err


def test_lines_of_pyproject_have_its_prefix(recorded):
    Path("pyproject.toml").write_text('[project]\nname = "x"\n', encoding="utf-8")
    assert main(["known", "data", "--update", "--ledger", "pyproject.toml"]) == 0
    table = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))
    assert table["project"] == {"name": "x"}
    assert len(table["tool"]["shadowrun"]["known"]) == 2


def test_names_of_a_file_become_no_patterns(folder, capsys, monkeypatch):
    """A data file from somebody else must not bring a line that excuses more than it names."""
    import dataclasses

    run = Run(sample.build())
    finding = run.findings()[0]
    bad = [dataclasses.replace(finding, op="aten::*"), dataclasses.replace(finding, modules=("[a-z]*",), n_modules=1)]
    monkeypatch.setattr(Run, "findings", lambda _: bad)
    monkeypatch.setattr(shadowrun, "load", lambda *_, **__: run)
    assert main(["known", "data", "--init"]) == 0
    (line,) = lines_of()
    assert line["operator"] == finding.op
    assert "module" not in line
    assert "no line for aten::*" in capsys.readouterr().out
