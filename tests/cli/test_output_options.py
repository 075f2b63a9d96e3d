"""One grammar of output options: -o FILE by extension, -f FORMAT to standard output, for each command with a report."""

import argparse
import csv
import io
import json
from pathlib import Path

import pytest
import torch

import shadowrun
from shadowrun.cli import main as cli
from shadowrun.cli.main import main
from shadowrun.report import FORMATS, ISSUE_FORMATS
from tests import forked
from tests.studies.sweep.test_support_command import WRONG, write

NO_REPORT = {
    "combine": "writes a data file",
    "repro": "writes scripts",
    "record": "writes a recording",
    "completion": "prints a script",
    "campaign": "has actions, see below",
}
"""Commands without a report; -o of the first three names what they write."""
REPORTS = sorted(set(cli.COMMANDS) - set(NO_REPORT))
WITH_FINDINGS = (
    *("run", "report", "export", "demo", "compile", "sweep", "diff"),
    *("support", "slowdown", "determinism"),
)
"""Commands whose reports CI services take, too; of a campaign, `report`."""


def formats_of(name):
    return (*FORMATS, *ISSUE_FORMATS) if name in WITH_FINDINGS else FORMATS


def options_of(name):
    (commands,) = (a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {option: action for action in commands.choices[name]._actions for option in action.option_strings}


@pytest.mark.parametrize("name", REPORTS)
def test_every_command_with_a_report_has_both_options(name):
    options = options_of(name)
    output, form = options["-o"], options["-f"]
    assert output is options["--output"]
    assert form is options["--format"]
    assert (output.default, output.metavar) == ([], "FILE")
    assert isinstance(output, argparse._AppendAction)
    assert tuple(form.choices) == formats_of(name)
    assert form.default is None
    assert not {"--json", "--csv", "--markdown", "--html"} & set(options)


def test_the_actions_of_a_campaign_that_report_have_both_options():
    (commands,) = (a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    (actions,) = (a for a in commands.choices["campaign"]._actions if isinstance(a, argparse._SubParsersAction))
    for name in ("run", "resume", "status", "report", "reproduce"):
        assert {"-o", "--output", "-f", "--format"} <= {
            o for a in actions.choices[name]._actions for o in a.option_strings
        }


def test_every_command_and_action_imports_modules():
    (commands,) = (a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    parsers = dict(commands.choices)
    (actions,) = (a for a in parsers.pop("campaign")._actions if isinstance(a, argparse._SubParsersAction))
    for parser in (*parsers.values(), *actions.choices.values()):
        assert "--import" in {option for action in parser._actions for option in action.option_strings}, parser.prog


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    with shadowrun.compare("cpu[threads=1]", file=folder / "run"):
        torch.ones(3, 3) @ torch.ones(3, 3)
    for name, found in (("a", []), ("b", [WRONG])):
        from shadowrun.studies.sweep.cases import Part

        write(folder / name, f"npu:{name}", {("exp", Part.FORWARD): [found], ("sin", Part.FORWARD): [[]]})
    for name in ("c.shadowrec", "d.shadowrec"):
        with shadowrun.record(folder / name):
            torch.ones(3, 3) @ torch.ones(3, 3)
    assert main(["zoo", "add", "modules", "nn.Linear", "--zoo", str(folder / "z.shadowzoo")]) == 0
    return folder


def check(form, text):
    """A report of a format, with more than its frame."""
    assert len(text) > (40 if form in FORMATS else 2), text
    if form == "json":
        assert json.loads(text)["format"] >= 1
    elif form == "csv":
        head, *rows = csv.reader(io.StringIO(text))
        assert len(head) > 2
        assert all(len(row) == len(head) for row in rows)
    elif form == "codequality":
        assert isinstance(json.loads(text), list)
    elif form == "sarif":
        assert json.loads(text)["version"] == "2.1.0"
    else:
        start = {"txt": "shadowrun  ", "md": "# ", "html": "<!DOCTYPE html>", "junit": "<?xml", "github": "::"}[form]
        assert text.startswith(start)


def all_formats(name, folder):
    """Options that have a command write its report in each format that it has."""
    return [word for form in formats_of(name) for word in ("-o", f"{form}:{folder / f'all.{form}'}")]


def check_all(name, folder):
    for form in formats_of(name):
        check(form, (folder / f"all.{form}").read_text(encoding="utf-8"))


READING = {
    "report": ["report", "run"],
    "export": ["export", "run"],
    "coverage": ["coverage", "run"],
    "explain": ["explain", "aten::add"],
    "explain call": ["explain", "run", "0"],
    "known": ["known", "run"],
    "static": ["static", "mps", "run"],
    "slowdown": ["slowdown", "run", "--rounds", "3", "--ops", "aten::mm"],
    "support": ["support", "a", "b"],
    "support --diff": ["support", "--diff", "a", "b"],
    "diff": ["diff", "c.shadowrec", "d.shadowrec"],
    "classes": ["classes", "c.shadowrec", "d.shadowrec"],
    "replay": ["replay", "c.shadowrec", "--target", "cpu"],
    "zoo list": ["zoo", "list", "--zoo", "z.shadowzoo"],
    "platforms": ["platforms"],
    "platforms --flaws": ["platforms", "--flaws"],
}


@pytest.mark.parametrize("name", READING)
def test_every_format_of_what_reads(name, files, tmp_path, monkeypatch, capsys):
    argv = [str(files / word) if (files / word).exists() else word for word in READING[name]]
    monkeypatch.chdir(tmp_path)
    forms = formats_of(name)
    assert main([*argv, *(word for form in forms for word in ("-o", f"{form}:x.{form}"))]) == 0
    assert capsys.readouterr().out == "", "files were named, and no format for standard output"
    for form in forms:
        check(form, Path(f"x.{form}").read_text(encoding="utf-8"))
    assert main([*argv, "-f", "json"]) == 0
    check("json", capsys.readouterr().out)


PROGRAM = "import torch; torch.compile(torch.relu, backend='aot_eager')(torch.ones(2)) @ torch.ones(2)"
MEASURING = {
    "run": ["run", "--target", "cpu[threads=1]", "-o", ..., "x.py"],
    "compile": ["compile", "-o", ..., "x.py"],
    "sweep": ["sweep", "--target", "cpu", "--ops", "sin", "--samples", "1", "--parts", "forward", "-o", ...],
    "study": ["study", "order", "--target", "cpu", "--shape", "sum=8", "-o", ...],
    "demo": ["demo", "--preset", "clean", "-o", ...],
}


@pytest.mark.parametrize("name", MEASURING)
def test_every_format_of_what_measures(name, tmp_path):
    """It also prints the report, whatever files are named: in the format that -f asks for."""
    (tmp_path / "x.py").write_text(PROGRAM, encoding="utf-8")
    before, after = MEASURING[name][: MEASURING[name].index(...) - 1], MEASURING[name][MEASURING[name].index(...) + 1 :]
    done = forked.shadowrun(*before, "-f", "md", *all_formats(name, tmp_path), *after, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    check("md", done.stdout)
    check_all(name, tmp_path)


TRIED_ELSEWHERE = ("determinism", "mitigate")
"""Where their tests run them: each run is of many processes."""


def test_every_command_with_a_report_is_tried():
    assert {*(name.partition(" ")[0] for name in (*READING, *MEASURING)), *TRIED_ELSEWHERE} == set(REPORTS)


@pytest.mark.parametrize("name", ["report", "coverage", "static", "support", "platforms"])
@pytest.mark.parametrize(
    ("output", "words"), [("x.pdf", "unknown-format"), ("no/folder/x.md", "unwritable-report"), ("-", "unknown-format")]
)
def test_an_output_that_cannot_be_written_is_refused_first(name, output, words, files, capsys):
    argv = [str(files / word) if (files / word).exists() else word for word in READING[name]]
    assert main([*argv, "-o", output]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert said.out == ""


@pytest.mark.parametrize("name", ["coverage", "platforms", "zoo list", "known", "explain"])
def test_a_report_without_findings_has_no_format_of_findings(name, files, capsys):
    argv = [str(files / word) if (files / word).exists() else word for word in READING[name]]
    for option in (["-o", "x.sarif"], ["-o", "junit:x"], ["-f", "github"]):
        with pytest.raises(SystemExit, match="2"):
            main([*argv, *option])
        assert "x" in capsys.readouterr().err


def test_a_format_before_the_file_goes_before_its_extension(files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = str(files / "run")
    assert (
        main(["report", data, "-o", "codequality:a.json", "-o", "b.sarif.json", "-o", "github:-", "-o", "c.xml"]) == 0
    )
    assert capsys.readouterr().out.startswith("::notice")
    check("codequality", Path("a.json").read_text(encoding="utf-8"))
    check("sarif", Path("b.sarif.json").read_text(encoding="utf-8"))
    check("junit", Path("c.xml").read_text(encoding="utf-8"))


def test_the_summary_of_a_step_is_appended_to(files, tmp_path, monkeypatch, capsys):
    """GitHub names a file without extension, and drops one of more than 1 MiB."""
    summary = tmp_path / "step_summary_a1b2"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    for _ in range(2):
        assert main(["report", str(files / "run"), "-o", str(summary)]) == 0
    once = summary.stat().st_size // 2
    assert summary.read_text(encoding="utf-8").count("# cpu\\[threads=1\\] against cpu") == 2
    summary.write_bytes(b"x\n" * (2**19 - once // 4))
    assert main(["report", str(files / "run"), "-o", str(summary)]) == 0
    assert summary.stat().st_size <= 2**20
    assert "more lines: a summary has 1 MiB" in summary.read_text(encoding="utf-8")
    assert capsys.readouterr().out == ""


def test_a_page_that_a_file_gets_is_not_printed_too(files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = ["classes", str(files / "c.shadowrec"), str(files / "d.shadowrec"), "-f", "html"]
    assert main([*argv, "-o", "page.html"]) == 0
    assert capsys.readouterr().out == ""
    check("html", Path("page.html").read_text(encoding="utf-8"))
    assert main([*argv, "-o", "table.csv"]) == 0
    check("html", capsys.readouterr().out)
    assert main([*argv, "-o", "html:-"]) == 0
    check("html", capsys.readouterr().out)
