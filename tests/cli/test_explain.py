"""`shadowrun explain`: the facts on an operator, and the rung that decided on a call."""

import json
import os
import re
import sqlite3
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch

import shadowrun
from shadowrun.cli.commands.explain import find_page, page_names
from shadowrun.cli.main import main
from shadowrun.errors import UsageError
from shadowrun.judge.describe_facts import describe, page
from shadowrun.operators.fact_table import ROWS
from shadowrun.operators.facts import facts
from shadowrun.schedule.selection import why_unknown

ROOT = Path(__file__).parents[2]


@pytest.fixture
def recorded(clean_sim, tmp_path, monkeypatch):
    """A folder with a run that has two wrong operators and one that is missing; the device still has their flaws."""
    monkeypatch.chdir(tmp_path)
    with clean_sim.flaws("maximum-drops-nan", "matmul-in-bf16", "missing-cumsum"):
        with shadowrun.compare("sim", file=".shadowrun") as run:
            x = torch.full((4, 6), float("nan")).to("sim")
            torch.maximum(x, torch.zeros(6).to("sim"))
            a = torch.randn(32, 64).to("sim")
            (a @ a.T).exp().cumsum(1)
        yield run


def explain(*argv):
    return main(["explain", *map(str, argv)])


def read(capsys):
    """What was printed, on one line: a terminal wraps where it likes."""
    return " ".join(capsys.readouterr().out.split())


def finding_of(run, op):
    return next(finding for finding in run.findings() if finding.op == op)


def edit_info(**changes):
    connection = sqlite3.connect(".shadowrun")
    (text,) = connection.execute("select value from meta where key = 'info'").fetchone()
    connection.execute("update meta set value = ? where key = 'info'", (json.dumps(json.loads(text) | changes),))
    connection.commit()
    connection.close()


# -- operators ---------------------------------------------------------------------------------------


def test_an_operator_with_its_bounds_and_their_sources(capsys):
    assert explain("aten::exp") == 0
    shown = read(capsys)
    assert "3 ULP in real dtypes" in shown
    assert "source: OpenCL C 3.0" in shown
    assert "replayed and compared: aten::exp, aten::exp.out" in shown
    assert explain("_linalg_eigh") == 0
    shown = read(capsys)
    assert "judged by equation output 1" in shown
    assert "sign or phase" in shown


def test_an_operator_with_defaults_says_so(capsys):
    assert explain("aten::softmax.int") == 0
    shown = read(capsys)
    assert "no row in the operator table" in shown
    assert "decomposed into other operators" in shown


@pytest.mark.parametrize("name", ["aten::nosuchoperator", "nosuchoperator"])
def test_an_operator_that_torch_does_not_have(name, capsys):
    assert explain(name) == 2
    assert "shadowrun explain unknown-operator" in capsys.readouterr().err


def test_every_row_is_described():
    for name in ROWS:
        words = describe(facts(name))
        assert all(label and text for label, text, _ in words), name
        bound = {label: source for label, _, source in words}["bound"]
        assert bound, name


def test_each_fact_of_a_row_has_its_words():
    """A field that the table sets and nothing says would be missing from page and command."""
    unsaid = {"name", "source", "rounds_once", "chain", "plain_product", "adds_self", "zero_sign", "norm_gradient"}
    for name, row in ROWS.items():
        fields = {f for f in row.__slots__ if getattr(row, f) != getattr(type(row)(), f)} - unsaid
        assert fields == set() or len(describe(row)) > 1 or fields == {"ulp_bound"}, (name, fields)


def test_the_page_of_the_documentation_is_the_table(capsys):
    assert explain("--page") == 0
    assert (ROOT / "docs" / "operators.md").read_text(encoding="utf-8") == capsys.readouterr().out == page()


# -- calls -------------------------------------------------------------------------------------------


def test_a_call_whose_inputs_were_kept_is_judged_again(recorded, capsys):
    finding = finding_of(recorded, "aten::mm")
    assert explain(finding.captured) == 0
    shown = read(capsys)
    assert f"call {finding.captured} of aten::mm: mismatch" in shown
    as_recorded, again = shown.split("judged again here: ")
    for part in (as_recorded, again):
        assert "decided by float64 oracle" in part
    assert again.startswith("mismatch, reduced precision, inputs rounded to bf16")
    assert "(limit 40 units)" in again
    assert "closeness" in again


def test_a_finding_by_its_number(recorded, capsys):
    finding = finding_of(recorded, "aten::maximum")
    assert explain(".shadowrun", "--finding", finding.number) == 0
    shown = read(capsys)
    assert shown.count("decided by ULP bound") == 2
    assert "NaN treated as missing" in shown
    assert explain("--finding", finding.number) == 0
    assert read(capsys) == shown


def test_what_was_not_judged_says_so(recorded, capsys):
    assert explain("--finding", finding_of(recorded, "aten::cumsum").number) == 0
    assert "the call was not judged" in read(capsys)


def wrong_product(sim, **options):
    """A run with a product in bfloat16; the device is right again."""
    with sim.flaws("matmul-in-bf16"), shadowrun.compare("sim", file=".shadowrun", **options) as run:
        a = torch.randn(32, 64).to("sim")
        a @ a.T
    return run


def test_without_kept_inputs_the_record_alone_is_read(clean_sim, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = wrong_product(clean_sim, capture=False)
    assert explain("--finding", finding_of(run, "aten::mm").number) == 0
    shown = read(capsys)
    assert "its inputs were not kept" in shown
    assert "decided by float64 oracle" in shown
    assert "judged again" not in shown.replace("cannot be judged again", "")


def test_a_call_that_is_right_now(clean_sim, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = wrong_product(clean_sim)
    number, fingerprint = finding_of(run, "aten::mm").captured, run.info.target_fingerprint
    edit_info(target_fingerprint=fingerprint | {"simulated_flaws": []})
    assert explain(number) == 0
    shown = read(capsys)
    assert "another verdict than in the run" in shown


def test_all_formats_of_a_report(recorded, capsys):
    number = finding_of(recorded, "aten::mm").captured
    assert explain(number, "-f", "json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["decided_by"] == {"recorded": "float64 oracle", "judged_again": "float64 oracle"}
    assert data["judged_again"][0]["rung"] == "bits"
    assert explain(number, "-f", "csv", "-o", "steps.html") == 0
    assert capsys.readouterr().out.startswith("from,rung,result,figure,limit,outcome\n")
    assert "float64 oracle" in Path("steps.html").read_text(encoding="utf-8")
    assert explain("aten::exp", "-f", "md") == 0
    assert "3 ULP in real dtypes" in capsys.readouterr().out


def test_from_python(recorded):
    found = recorded.explain(finding_of(recorded, "aten::mm").captured)
    assert found.record.call.op == "aten::mm"
    assert found.verdict is not None
    assert found.verdict.explanation == "inputs rounded to bf16"
    assert found.steps
    assert found.note == ""
    with pytest.raises(UsageError) as caught:
        recorded.explain(10**6)
    assert caught.value.slug == "unknown-call"


@pytest.mark.parametrize(
    ("argv", "slug"),
    [
        ([], "bad-option"),
        (["a", "b", "3"], "bad-option"),
        ([".shadowrun", "7", "--finding", "1"], "bad-option"),
        ([".shadowrun", "seven"], "unknown-call"),
        (["999999"], "unknown-call"),
        (["9" * 30], "unknown-call"),
        (["--finding", "99"], "unknown-finding"),
        (["nowhere.shadowrun", "3"], "data-file-missing"),
        (["3", "--target", "npu"], "bad-option"),
    ],
)
def test_wrong_usage(argv, slug, recorded, capsys):
    assert explain(*argv) == 2
    assert f"shadowrun explain {slug}" in capsys.readouterr().err


# -- files of others ---------------------------------------------------------------------------------


def test_a_platform_that_only_the_file_names_is_not_started(recorded, capsys):
    number = finding_of(recorded, "aten::mm").captured
    edit_info(target="cpu[env:LD_PRELOAD=evil.so]")
    assert explain(number) == 0
    shown = read(capsys)
    assert "not judged again" in shown
    assert "decided by float64 oracle" in shown


def test_texts_of_a_file_are_sanitized(recorded, capsys):
    number = finding_of(recorded, "aten::mm").captured
    connection = sqlite3.connect(".shadowrun")
    for table, column in (("verdict", "evidence"), ("outcome", "explanation")):
        connection.execute(f"update {table} set {column} = {column} || char(27) || '[31m' || char(10) || 'x'")
    connection.commit()
    connection.close()
    assert explain(number, "-f", "txt") == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\nx" not in shown


# -- the documentation -------------------------------------------------------------------------------


def test_every_error_names_the_command_that_prints_its_entry(capsys):
    assert explain("none.shadowrun", "--finding", "1") == 2
    slug = re.search(r"\[shadowrun explain (.*)\]\n$", capsys.readouterr().err)[1]
    assert slug == "data-file-missing"
    assert explain(slug) == 0
    assert "No data file has this name. Record one with shadowrun run --data FILE" in read(capsys)


def test_in_python_the_command_is_below_the_message():
    with pytest.raises(UsageError) as caught:
        shadowrun.compare("cpu", shedule=None)
    assert traceback.format_exception(caught.value)[-1] == "[shadowrun explain unknown-option]\n"


def test_all_entries_and_pages_can_be_printed(capsys):
    assert explain("--list", "-f", "json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"bad-spec", "findings"} <= set(listed["messages"])
    assert {"howto/drift", "verdicts"} <= set(listed["pages"])
    for name in (*listed["messages"], *listed["pages"]):
        text = find_page(name)
        assert text.name == name
        assert text.body
        # What links name can be printed too, with the package alone.
        for linked in re.findall(r"\(`shadowrun explain ([a-z/-]+)`\)", text.body):
            assert find_page(linked) is not None, (name, linked)
        assert not re.findall(r"\]\((?!https?://)[^)]*\)", text.body), name


@pytest.mark.parametrize("shape", ["txt", "md", "html", "json", "csv"])
def test_an_entry_in_every_format(shape, capsys):
    assert explain("unknown-setting", "-f", shape) == 0
    shown = read(capsys)
    assert "CPU settings" in shown
    assert "howto/cpu" in shown
    assert ("<code>cpu</code>" in shown) == (shape == "html")


def test_names_near_an_unknown_one(capsys):
    assert explain("unknown-devise") == 2
    assert "Did you mean 'unknown-device' or " in capsys.readouterr().err
    assert explain("howto/drit") == 2
    assert "Did you mean 'howto/drift'" in capsys.readouterr().err
    assert explain("zzzz-zzzz") == 2
    assert "called 'zzzz-zzzz'. `shadowrun explain --list` lists all." in capsys.readouterr().err


def test_an_operator_of_the_name_of_a_page_stays_one(capsys):
    assert explain("diff") == 0
    assert "facts on aten::diff" in read(capsys)


def test_a_name_has_one_meaning():
    messages, pages = page_names()
    assert not set(messages) & set(pages)
    for name in (*messages, *pages):
        assert why_unknown(f"aten::{name}"), f"{name} is an operator, which could no longer be explained"


def test_an_entry_needs_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch')")
    command = [sys.executable, "-c", "from shadowrun.cli.main import main; main(['explain', 'torch-lacks'])"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "lacks" in done.stdout


def test_the_command_on_an_operator_is_quoted(recorded, capsys):
    connection = sqlite3.connect(".shadowrun")
    connection.execute("update op set name = 'aten::exp;id>PWN #' where name = 'aten::exp'")
    connection.commit()
    connection.close()
    call = next(r.call.seq for r in shadowrun.load(".shadowrun").records() if ";" in r.call.op)
    explain(call)
    assert "shadowrun explain 'aten::exp;id>PWN #'" in read(capsys)
