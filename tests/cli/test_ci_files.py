"""The workflow files to copy, the hook of pre-commit, defaults from the environment and settings, and completion."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shadowrun.cli.commands.run import option_defaults
from shadowrun.cli.main import COMMANDS, build_parser, main

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / "examples" / "ci_workflows"
PROGRAM = "import sys, torch\ntorch.lerp(torch.ones(2), torch.ones(2), 0.5)\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    shim = tmp_path / "bin" / "shadowrun"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m shadowrun "$@"\n', encoding="utf-8")
    shim.chmod(shim.stat().st_mode | stat.S_IXUSR)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        *(("github.yml", "github-workflows"), ("gitlab-ci.yml", "gitlab-ci")),
        *(("sweep-github.yml", "github-workflows"), ("sweep-gitlab-ci.yml", "gitlab-ci")),
    ],
)
def test_workflows_are_valid_by_the_schema_of_the_service(name, schema):
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", str(WORKFLOWS / name)]
    if schema == "gitlab-ci":
        command += ["--data-transform", "gitlab-ci"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def shell_of_github():
    steps = yaml.safe_load((WORKFLOWS / "github.yml").read_text("utf-8"))["jobs"]["compare"]["steps"]
    return {step.get("name", ""): step["run"] for step in steps if "run" in step}


def run_shell(folder, script, **variables):
    environment = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", **variables}
    # As both services call a shell.
    command = ["bash", "-eo", "pipefail", "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_the_shell_lines_of_github(folder):
    """The first run on main, which has no baseline; then a change that breaks an operator."""
    lines = shell_of_github()
    variables = {"SHADOWRUN_TARGET": "sim", "GITHUB_STEP_SUMMARY": str(folder / "summary")}
    first = run_shell(folder, lines["compare"], **variables)
    assert first.returncode == 0, first.stderr
    assert run_shell(folder, lines["baseline of later changes"]).returncode == 0
    broken = run_shell(folder, lines["compare"], **variables, SHADOWRUN_FLAWS="missing-lerp")
    assert broken.returncode == 1, broken.stderr
    assert "::error file=train.py,line=2,title=aten%3A%3Alerp.Scalar" in broken.stdout
    assert "new: aten::lerp.Scalar (unsupported)" in broken.stderr
    assert Path("summary").read_text("utf-8").count("# sim against cpu") == 2
    assert json.loads(Path("shadowrun.sarif").read_text("utf-8"))["runs"][0]["results"][0]["baselineState"] == "new"


def test_the_shell_lines_of_gitlab(folder):
    script = yaml.safe_load((WORKFLOWS / "gitlab-ci.yml").read_text("utf-8"))["compare"]["script"]
    variables = {"SHADOWRUN_TARGET": "sim", "CI_COMMIT_BRANCH": "main", "CI_DEFAULT_BRANCH": "main"}
    done = run_shell(folder, "\n".join(script), **variables)
    assert done.returncode == 0, done.stderr
    assert Path("main.shadowrun").exists()
    assert json.loads(Path("gl-code-quality-report.json").read_text("utf-8")) == []
    assert "<testcase" in Path("junit.xml").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("service", ["github", "gitlab"])
def test_the_shell_lines_of_a_sweep(folder, service):
    """Two of six shards of a few operators, then the report of them, with all its files."""
    if service == "github":
        jobs = yaml.safe_load((WORKFLOWS / "sweep-github.yml").read_text("utf-8"))["jobs"]
        sweep, report = (
            next(step["run"] for step in jobs[job]["steps"] if step.get("name") == job) for job in ("sweep", "report")
        )
        variables = jobs["sweep"]["env"] | {"GITHUB_STEP_SUMMARY": str(folder / "summary")}
        sweeps = [sweep.replace("${{ matrix.shard }}", str(number)) for number in (1, 3)]
    else:
        file = yaml.safe_load((WORKFLOWS / "sweep-gitlab-ci.yml").read_text("utf-8"))
        (sweep,), (report,) = file["sweep"]["script"], file["report"]["script"]
        variables = file["variables"] | {"CI_NODE_TOTAL": "6"}
        sweeps = [f"CI_NODE_INDEX={number}\n{sweep}" for number in (1, 3)]
    variables["SWEEP"] = "--parts forward --samples 1 --flaws missing-cumsum --ops cumsum,exp,sin,cos,tan,abs"
    for script in sweeps:
        done = run_shell(folder, script, **variables)
        assert done.returncode == 0, done.stderr
    done = run_shell(folder, report, **variables)
    assert done.returncode == 1, done.stderr
    # Tasks are in the order of the database.
    cases = Path("junit.xml").read_text("utf-8")
    assert cases.count("<testcase") == 2
    assert 'name="abs [float32 forward]"' in cases
    assert 'name="cumsum: unsupported operator (missing operator)"' in cases
    names = ["coverage.html", "skips.py", "accuracy.csv", "badge.json" if service == "github" else "badge.svg"]
    assert all(Path(name).stat().st_size > 30 for name in names)


def test_the_hook_of_pre_commit(folder, capsys):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    command, *argv = hook["entry"].split()
    assert command == "shadowrun"
    line = '[[known]]\noperator = "aten::x"\nplatform = "npu"\nreason = "ticket"\n'
    ledger = Path("shadowrun.toml")
    for text, status in ((line, 0), (f"{line}expires = 2020-01-31\n", 1), (f"{line}expirs = 1\n", 2)):
        ledger.write_text(text, encoding="utf-8")
        assert main(argv) == status
    assert "expired on 2020-01-31 (ticket)" in capsys.readouterr().err


def test_every_option_of_run_has_a_key_and_a_variable():
    actions = next(a for a in build_parser()._actions if isinstance(a.choices, dict)).choices["run"]._actions
    named = {o[2:]: a for a in actions for o in a.option_strings if o.startswith("--")}
    values = {name: True if action.nargs == 0 else (action.choices or ["1"])[0] for name, action in named.items()}
    table = {name: value for name, value in values.items() if name not in ("help", "settings", "no-settings")}
    env = {f"SHADOWRUN_{name.upper().replace('-', '_')}": str(value) for name, value in table.items()}
    by_table = option_defaults(actions, table, {})
    assert set(by_table) == {named[name].dest for name in table}
    assert option_defaults(actions, {}, env) == by_table


def test_the_command_line_decides_then_the_variable_then_the_file(folder, monkeypatch, capsys):
    Path("pyproject.toml").write_text(
        '[tool.shadowrun.run]\ntarget = "cpu[threads=2]"\nfail-on = ["mismatch"]\noutput = ["a.json"]\ndata = "d"\n'
        "no-replay = false\ncall_limit = 5\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("SHADOWRUN_TARGET", "cpu[threads=1]")
    monkeypatch.setenv("SHADOWRUN_OUTPUT", "b.json")
    assert main(["run", "train.py"]) == 0
    report = json.loads(Path("b.json").read_text("utf-8"))
    assert not Path("a.json").exists(), "the variable decides"
    assert report["info"]["target"] == "cpu[threads=1]"
    assert report["gate"]["fail_on"] == ["mismatch"]
    assert report["info"]["config"]["call_limit_s"] == 5
    assert Path("d").exists()
    assert main(["run", "--target", "cpu", "-o", "c.json", "train.py"]) == 0
    assert json.loads(Path("c.json").read_text("utf-8"))["info"]["target"] == "cpu"
    assert main(["run", "--no-settings", "--target", "cpu", "-o", "c.json", "train.py"]) == 0
    assert json.loads(Path("c.json").read_text("utf-8"))["gate"]["fail_on"] != ["mismatch"]
    capsys.readouterr()


@pytest.mark.parametrize(("line", "message"), [
    ('targt = "sim"', "Did you mean 'target'?"),
    ("drift = 1", "drift = 1: use true or false"),
    ("output = [1]", "use a list of texts"),
    ('on-unsupported = "retry"', "use one of fallback, raise"),
    ("target = true", "use what --target takes"),
])  # fmt: skip
def test_wrong_settings_are_refused(folder, capsys, line, message):
    Path("shadowrun.toml").write_text(f"[run]\n{line}\n", encoding="utf-8")
    assert main(["run", "--target", "cpu", "train.py"]) == 2
    assert message in capsys.readouterr().err
    assert not Path(".shadowrun").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in COMMANDS)
    if shell == "bash":
        subprocess.run(["bash", "-n", "-c", script], check=True)


def test_completion_needs_its_package(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "shadowrun[completion]" in capsys.readouterr().err


def test_colour_in_a_log(folder, monkeypatch, capsys):
    for variables, coloured in (
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ):
        for name in ("FORCE_COLOR", "NO_COLOR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert main(["platforms"]) == 0
        assert ("\x1b[" in capsys.readouterr().out) is coloured
