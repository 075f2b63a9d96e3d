"""`shadowrun repro`: from a recorded run to scripts that another person can run."""

import ast
import html
import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shadowrun
from shadowrun import UsageError, report
from shadowrun.analysis import wording
from shadowrun.cli.main import main
from shadowrun.repro import script

pytestmark = pytest.mark.usefixtures("forked_processes")

NAN = float("nan")


@pytest.fixture
def recorded(clean_sim, tmp_path, monkeypatch):
    """A folder with a run that has three findings; the device still has their flaws."""
    monkeypatch.chdir(tmp_path)
    with clean_sim.flaws("maximum-drops-nan", "missing-cumsum", "nll-loss-falls-back-silently"):
        with shadowrun.compare("sim", file=".shadowrun"):
            x = torch.full((4, 6), NAN).to("sim")
            torch.maximum(x, torch.zeros(6).to("sim"))
            x.cumsum(1)
            torch.nn.functional.cross_entropy(torch.randn(3, 5).to("sim"), torch.tensor([0, 1, 2]).to("sim"))
        yield tmp_path


@pytest.fixture
def untried(monkeypatch):
    """Scripts are written, not run."""
    tried = []

    def run(path, *_):
        tried.append(path)
        return subprocess.CompletedProcess(str(path), 1, "as it should", "")

    monkeypatch.setattr(script, "run_script", run)
    return tried


def scripts():
    return sorted(str(p) for p in Path("repro").glob("*/repro.py"))


def run_script(path, **environment):
    """In a process of its own."""
    return subprocess.run(
        [sys.executable, path], capture_output=True, text=True, check=False, timeout=600, env=os.environ | environment
    )


def edit(sql, *values):
    connection = sqlite3.connect(".shadowrun")
    connection.execute(sql, values)
    connection.commit()
    connection.close()


def edit_info(**changes):
    connection = sqlite3.connect(".shadowrun")
    (text,) = connection.execute("select value from meta where key = 'info'").fetchone()
    connection.close()
    edit("update meta set value = ? where key = 'info'", json.dumps(json.loads(text) | changes))


def test_a_script_for_each_finding(recorded, untried, capsys):
    assert main(["repro"]) == 0
    shown = capsys.readouterr().out
    assert [p.split("/")[1] for p in scripts()] == [
        "01-aten-cumsum-unsupported",
        "02-aten-maximum-mismatch",
        "03-aten-nll_loss_forward-fallback",
    ]
    assert len(untried) == 3
    assert "2. mismatch aten::maximum: repro/02-aten-maximum-mismatch/repro.py (self f32[1, 1], other f32[1])" in shown
    folder = Path("repro/02-aten-maximum-mismatch")
    inputs = torch.load(folder / "inputs.pt", weights_only=True)
    assert inputs["self"].isnan().all()
    assert inputs["other"].tolist() == [0.0]
    versions = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
    assert versions["versions"]["torch"] == torch.__version__
    assert versions["target"]["simulated_flaws"] == [
        "maximum-drops-nan",
        "missing-cumsum",
        "nll-loss-falls-back-silently",
    ]


def test_the_script_is_tried_and_says_what_is_wrong(new_processes, recorded, capsys):
    """The real thing: new processes, with and without the flaw."""
    assert main(["repro", "--finding", "aten::max*", "-o", "repro"]) == 0
    shown = capsys.readouterr().out
    assert "exits 1 here" in shown
    assert "output 0[0, 0]: 0 on sim, nan on cpu" in shown
    (path,) = scripts()
    fixed = run_script(path, SIM_FLAWS="")
    assert (fixed.returncode, fixed.stderr) == (0, "")
    text = Path(path).read_text(encoding="utf-8")
    assert "test_repro.py" in ast.get_docstring(ast.parse(text))
    assert "in the run self f32[4, 6], other f32[6]" in text
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    assert imported == {"os", "sys", "pathlib", "torch", "shadowrun"}


@pytest.mark.parametrize(("wanted", "number"), [("3", 1), ("aten::*", 3), ("all", 3), ("*loss*", 1)])
def test_choosing(recorded, untried, wanted, number):
    assert main(["repro", "--finding", wanted, "--no-minimise"]) == 0
    assert len(untried) == number


def test_several_findings(recorded, untried):
    assert main(["repro", "--finding", "3", "--finding", "aten::cum*", "--finding", "1", "--no-minimise"]) == 0
    assert [p.split("/")[1][:2] for p in scripts()] == ["01", "03"]


@pytest.fixture
def products(clean_sim, tmp_path, monkeypatch):
    """A run in a file whose name a shell takes apart: its second product is the worst."""
    monkeypatch.chdir(tmp_path)
    with clean_sim.flaws("matmul-in-bf16", "missing-cumsum"):
        with shadowrun.compare("sim", file="my $HOME run.shadowrun") as run:
            for factor in (1.0105, 1.0117, 1.0090):
                x = torch.ones(8, 8)
                x[0, 0] = factor
                torch.mm(x, torch.ones(8, 8))
            x.cumsum(0)
        yield [record.call.seq for record in run.records(op="aten::mm")]


@pytest.mark.parametrize("kind", ["txt", "md", "html"])
def test_every_command_of_a_report_can_be_pasted(products, untried, kind):
    text = report.render(shadowrun.load("my $HOME run.shadowrun"), kind)
    text = html.unescape(text)
    commands = re.findall(r"shadowrun repro [^`<\n]*", text)
    assert {command.split(" --")[1] for command in commands} == {"finding 1", "finding 2", f"call {products[1]}"}
    for command in dict.fromkeys(commands):
        pasted = subprocess.run(["sh", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True)
        assert main([*pasted.stdout.split("\0")[1:-1], "--no-minimise"]) == 0
    assert [p.split("/")[1] for p in scripts()] == [
        "01-aten-cumsum-unsupported", "02-aten-mm-mismatch", f"call-{products[1]}-aten-mm-mismatch"
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["txt", "md", "html"])
def test_findings_have_the_numbers_that_repro_takes(products, kind):
    run = shadowrun.load("my $HOME run.shadowrun")
    text = re.sub(r"<[^>]*>|\\", "", report.render(run, kind))
    for finding in run.findings():
        assert f"{finding.number}. {finding.op}" in text
    assert [finding.number for finding in run.findings()] == [1, 2]


def test_what_a_ledger_excuses_does_not_move_the_numbers(products, untried, capsys):
    ledger = Path("ledger.toml")
    ledger.write_text('[[known]]\noperator = "aten::cumsum"\nplatform = "sim"\nreason = "not yet"\n')
    run = shadowrun.load("my $HOME run.shadowrun", known=ledger)
    assert [(f.number, f.op) for f in run.findings()] == [(2, "aten::mm")]
    assert main(["repro", "my $HOME run.shadowrun", "--known", str(ledger), "--finding", "2", "--no-minimise"]) == 0
    assert "2. mismatch aten::mm" in capsys.readouterr().out


def test_the_script_of_a_call_has_its_inputs(products, untried):
    assert main(["repro", "my $HOME run.shadowrun", "--call", str(products[1]), "--no-minimise"]) == 0
    (path,) = scripts()
    kept = torch.load(Path(path).parent / "inputs.pt", weights_only=True)
    assert kept["self"][0, 0] == torch.tensor(1.0117)


def test_a_call_that_was_not_kept(products, capsys):
    assert main(["repro", "my $HOME run.shadowrun", "--call", str(products[2])]) == 2
    assert (
        f"Call {products[2]} has no captured inputs: the first and the worst call of each finding have. "
        f"The nearest are: {products[1]} (aten::mm)"
        in capsys.readouterr().err.replace(f"{products[2] + 1} (aten::cumsum), ", "")
    )
    assert main(["repro", "my $HOME run.shadowrun", "--call", "9999"]) == 2
    assert "Call 9999 was not recorded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "command"),
    [
        (Path(".shadowrun"), "shadowrun repro --finding 1"),
        (Path("a/b.shadowrun"), "shadowrun repro a/b.shadowrun --finding 1"),
        (Path("it's"), "shadowrun repro 'it'\"'\"'s' --finding 1"),
        (Path("-x"), "shadowrun repro ./-x --finding 1"),
        (None, "shadowrun repro --finding 1"),
    ],
)
def test_commands(data, command):
    assert wording.shell_command("repro", data, "--finding", "1") == command


@pytest.mark.parametrize("wanted", ["0", "4", "aten::nothing", ""])
def test_a_finding_that_is_not_there(recorded, capsys, wanted):
    assert main(["repro", "--finding", wanted]) == 2
    assert "1 aten::cumsum, 2 aten::maximum" in capsys.readouterr().err


def test_without_minimising(recorded, untried):
    run = shadowrun.load(".shadowrun")
    finding = next(f for f in run.findings() if f.op == "aten::maximum")
    made = run.repro(finding, "here", minimise=False)
    assert made.inputs == "self f32[4, 6], other f32[6]"
    assert made.shows_fault is True


def test_a_run_without_findings(tmp_path, monkeypatch, clean_sim, capsys):
    monkeypatch.chdir(tmp_path)
    with shadowrun.compare("sim", file=".shadowrun"):
        torch.ones(2).to("sim") + 1
    assert main(["repro"]) == 0
    assert "There are no findings" in capsys.readouterr().out


def test_a_target_that_is_not_here(recorded, capsys):
    """The script is written all the same, with what the data file has."""
    edit_info(target="mtia", target_fingerprint={})
    assert main(["repro", "--finding", "aten::maximum"]) == 0
    shown = capsys.readouterr().out
    assert "was not tried" in shown
    assert "nothing was minimised or tried: Platform 'mtia' is absent on this machine" in shown
    (path,) = scripts()
    ended = run_script(path)
    assert ended.returncode == 2
    assert "there is no mtia here" in ended.stdout


def test_a_script_for_a_cpu_with_settings(tmp_path):
    with shadowrun.compare("cpu[flush_denormal=on]", file=tmp_path / "run.shadowrun"):
        torch.full((8,), 1e-30) * torch.full((8,), 1e-10)
    run = shadowrun.load(tmp_path / "run.shadowrun")
    made = run.repro(run.findings()[0], tmp_path / "repro")
    assert made.shows_fault is True
    assert "e-4" in made.said
    text = made.script.read_text(encoding="utf-8")
    assert "torch.set_flush_denormal(True)" in text
    assert "import shadowrun" not in text
    assert "from shadowrun" not in text


def test_a_script_for_platforms_with_processes_of_their_own(tmp_path):
    """Other instructions round differently: with a tolerance of 0, that is wrong."""
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    with shadowrun.compare("cpu[isa=default]", "cpu", rtol=0, atol=0, file=tmp_path / "run.shadowrun"):
        for function in (torch.exp, torch.tanh, torch.log1p, torch.softmax):
            function(x.abs(), *([1] if function is torch.softmax else []))
    run = shadowrun.load(tmp_path / "run.shadowrun")
    made = run.repro(run.findings()[0], tmp_path / "r", time_limit_s=3)
    assert made.shows_fault is True
    assert "ATEN_CPU_CAPABILITY" in made.script.read_text(encoding="utf-8")


def test_no_inputs_were_kept(tmp_path, monkeypatch, clean_sim, capsys):
    monkeypatch.chdir(tmp_path)
    with clean_sim.flaws("missing-cumsum"), shadowrun.compare("sim", file=".shadowrun", capture=False):
        torch.ones(2).to("sim").cumsum(0)
    assert main(["repro"]) == 2
    assert "No inputs of aten::cumsum (unsupported) were captured: the run" in capsys.readouterr().out
    assert shadowrun.load(".shadowrun").findings()[0].commands == ()


def test_a_combined_file_names_the_files_of_its_runs(recorded):
    combined = shadowrun.combine([".shadowrun"], "all.shadowrun")
    with pytest.raises(UsageError, match=r"give the data file of one of its runs, '.shadowrun'"):
        combined.repro(combined.findings()[0], "repro")


def test_lost_inputs(recorded, capsys):
    for path in Path(".shadowrun.tensors").iterdir():
        path.unlink()
    assert main(["repro", "--finding", "1"]) == 2
    assert "are gone: keep the folder '.shadowrun.tensors' next to the data file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("update capture set file = '../.shadowrun.tensors/0.pt'", "is not a name of captured inputs"),
        ("update op set name = 'aten::from_file' where name = 'aten::cumsum'", "are those of aten::cumsum"),
    ],
)
def test_a_data_file_that_was_changed(recorded, capsys, sql, message):
    edit(sql)
    assert main(["repro", "--finding", "1"]) == 2
    assert message in capsys.readouterr().out


def test_text_of_others_stays_text_in_a_script(recorded, untried):
    """What a data file says of modules and lines must not become code."""
    evil = '"""\nimport os\nos.abort()\n"""\\'
    edit("update context set module = ?", evil)
    edit("update site set text = ? || id", evil)
    edit("update verdict set evidence = ?", evil)
    edit("update outcome set explanation = ?", evil)
    assert main(["repro", "--no-minimise"]) == 0
    for path in scripts():
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
        assert "abort" in ast.get_docstring(tree)
        assert not any(isinstance(node, ast.Attribute) and node.attr == "abort" for node in ast.walk(tree))


def test_the_flaws_are_those_of_the_run_and_a_running_comparison_does_not_see_the_replays(recorded, clean_sim, untried):
    run = shadowrun.load(".shadowrun")
    finding = next(f for f in run.findings() if f.op == "aten::maximum")
    with clean_sim.flaws("sqrt-nan-is-zero"):
        with shadowrun.compare("sim") as running:
            made = run.repro(finding, "here")
        assert clean_sim.active() == ("sqrt-nan-is-zero",)
    assert made.inputs == "self f32[1, 1], other f32[1]"
    assert made.notes == ()
    assert list(running.records()) == []


def test_a_call_that_is_right_here_is_said_to_be(recorded, clean_sim, monkeypatch):
    """As on a device whose driver was mended meanwhile."""
    facts = json.loads(next(shadowrun.load(".shadowrun")._data.query("select value from meta where key = 'info'"))[0])
    edit_info(target_fingerprint=facts["target_fingerprint"] | {"simulated_flaws": []})
    monkeypatch.setattr(script, "run_script", lambda path, *_: subprocess.CompletedProcess(str(path), 0, "", ""))
    run = shadowrun.load(".shadowrun")
    for finding in run.findings():
        made = run.repro(finding, f"here/{finding.kind}")
        assert made.shows_fault is False
        assert any("0 of 4 replays show it" in note for note in made.notes)


def test_tolerances_by_operator_are_not_kept_so_half_of_what_was_seen_is_the_bound(clean_sim, tmp_path, untried):
    rule = {"aten::tanh": {"rtol": 0.0, "atol": 0.0}}
    with clean_sim.flaws("tanh-one-ulp-off"):
        with shadowrun.compare("sim", file=tmp_path / "run.shadowrun", tolerance=rule, settings=False):
            torch.tensor([0.5, 3.0]).to("sim").tanh()
        run = shadowrun.load(tmp_path / "run.shadowrun")
        (finding,) = run.findings()
        made = run.repro(finding, tmp_path / "repro")
    bound = re.search(r'ALLOWED = {"output 0": (.*)}', made.script.read_text(encoding="utf-8"))
    assert float(bound[1]) == pytest.approx(finding.worst.max_abs / 2)
    assert "0 of 4 replays show it" in made.notes[0]
