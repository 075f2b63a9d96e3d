"""The command: options, errors, formats and exit statuses."""

import csv
import io
import json

import pytest

from shadowrun.cli import sweep as command
from shadowrun.cli.main import main
from shadowrun.sweep import opinfo
from shadowrun.sweep.cases import Case, Part
from shadowrun.sweep.coveragefile import CoverageFile, SweepInfo
from shadowrun.sweep.outcome import FAILURES, NOT_INVARIANT, Finding, Kind, Outcome
from shadowrun.sweep.report import as_csv, as_json, as_markdown, as_text, closing_line
from shadowrun.sweep.support import SupportTable


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys, *argv):
    """What standard error says of a wrong use."""
    try:
        status = main(["sweep", *argv])
    except SystemExit as end:  # argparse
        status = end.code
    assert status == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--target"),
        (["--target", "nowhere"], "Unknown device"),
        (["--target", "sim", "--ops", "nothing_like_it"], "sweep-nothing"),
        (["--target", "sim", "--dtypes", "float23"], "float23"),
        (["--target", "sim", "--dtypes", ","], "names no dtype"),
        (["--target", "sim", "--parts", "forwards"], "channels_last"),
        (["--target", "sim", "--parts", ""], "channels_last"),
        (["--target", "sim", "--samples", "0"], "--samples"),
        (["--target", "sim", "--timeout", "-1"], "--timeout"),
        (["--target", "sim", "--memory", "nan"], "--memory"),
        (["--target", "sim", "--jobs", "many"], "--jobs"),
        (["--target", "sim", "--fail-on", "everything"], "everything"),
        (["--target", "sim", "--json", "no/folder/x.json"], "folder"),
        (["--target", "sim", "--from", "none.shadowrun"], "data-file-missing"),
        (["--target", "sim", "--ops", "sin", "--file", "no/folder/x"], "coverage-file"),
        (["--target", "cpu", "--flaws", "missing-cumsum"], "--flaws"),
    ],
)
def test_wrong_use(capsys, argv, words):
    text = refused(capsys, *argv)
    assert words in text
    assert "Traceback" not in text


def test_other_files_are_not_replaced(capsys, empty_folder):
    (empty_folder / "mine.txt").write_text("a text of mine that is long enough")
    for more in ([], ["--restart"]):
        assert "coverage-file" in refused(capsys, "--target", "sim", "--ops", "sin", "--file", "mine.txt", *more)
    assert (empty_folder / "mine.txt").read_text() == "a text of mine that is long enough"


def test_the_database_may_be_missing(capsys, monkeypatch):
    opinfo.database.cache_clear()
    monkeypatch.setattr(opinfo, "_MODULE", "torch.testing._internal.there_is_no_such_module")
    text = refused(capsys, "--target", "sim")
    assert "pip install 'shadowrun[sweep]'" in text
    opinfo.database.cache_clear()


def test_list(capsys):
    assert (
        main(["sweep", "--list", "--ops", "softmax*", "--dtypes", "float32,int64", "--parts", "forward,invalid"]) == 0
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["softmax", "float32", "forward"] in lines
    assert ["softmax.with_dtype", "int64", "forward"] in lines
    assert not any(line[0] == "sin" for line in lines)


def test_a_sweep_of_the_cpu_against_itself(capsys, empty_folder):
    argv = ["sweep", "--target", "cpu", "--ops", "sin", "--samples", "2", "--parts", "forward,backward", "--jobs", "1"]
    assert main([*argv, "--json", "x.json"]) == 0
    text = capsys.readouterr().out
    assert "cpu against cpu" in text
    assert "1 of 1 operators full (100.0 %)" in text
    document = json.loads((empty_folder / "x.json").read_text())
    assert document["format"] == 1
    assert document["operators"][0]["support"] == "full"
    assert document["info"]["complete"] is True
    # Again: from the file alone.
    assert main([*argv, "--markdown", "x.md", "--csv", "x.csv"]) == 0
    assert "| float32 | forward | 1 |" in (empty_folder / "x.md").read_text()
    assert main([*argv[:2], "cpu[threads=1]", *argv[3:]]) == 2
    assert "coverage-file-other" in capsys.readouterr().err


LACKS = Finding(
    Kind.UNSUPPORTED, "aten::sin", "aten::sin.out", "missing operator", "no kernel", "Error: it <lacks> | it"
)
TABLE = SupportTable.of(
    [
        (Case("exp", "float32", Part.FORWARD, 0), Outcome()),
        (Case("sin", "float32", Part.FORWARD, 0), Outcome()),
        (Case("sin", "float32", Part.OUT, 0), Outcome.of([LACKS], "f32[3]")),
        (Case("sin", "bfloat16", Part.OUT, 0), Outcome.of([LACKS], "bf16[3]")),
        (Case("rand", "float32", Part.FORWARD, 0), Outcome.of([Finding(Kind.UNVERIFIED)])),
    ]
)
INFO = SweepInfo("npu", "cpu", versions={"torch": "2.13"}, complete=True)


def test_text():
    text = as_text(TABLE, INFO)
    assert "npu against cpu" in text
    assert "sin [partial]: unsupported operator in aten::sin.out: bfloat16 out 1/1, float32 out 1/1" in text
    assert "first: sample 0 of out, bf16[3]" in text
    assert "not complete" not in text
    assert "not complete" in as_text(TABLE, SweepInfo("npu", "cpu"))
    assert max(map(len, text.splitlines())) <= 200
    header = next(line for line in text.splitlines() if line.startswith("dtype"))
    assert "unsupported" in header


def test_markdown_is_escaped():
    text = as_markdown(TABLE, INFO)
    assert "| sin | partial | float32 | out | 1/1 | unsupported operator | aten::sin.out |" in text
    assert "it &lt;lacks> \\| it" in text


def test_csv():
    rows = list(csv.reader(io.StringIO(as_csv(TABLE))))
    assert rows[0] == ["operator", "operator_support", "dtype", "part", "support", "failing", "why"]
    assert ["exp", "full", "float32", "forward", "full", "", ""] in rows
    assert len(rows) == 6


def test_json():
    document = json.loads(as_json(TABLE, INFO))
    assert document["operators_by_support"] == {"full": 1, "partial": 1, "none": 0, "untested": 1}
    sin = next(o for o in document["operators"] if o["name"] == "sin")
    assert sin["failing"][0]["finding"]["kernel"] == "aten::sin.out"


def test_closing_line():
    assert closing_line(TABLE) == "1 of 2 operators full (50.0 %)"
    assert closing_line(SupportTable.of([])) == "0 of 0 operators full"


def test_words_of_the_gate_cover_all_failures():
    assert sorted(kind for kinds in command._GROUPS.values() for kind in kinds) == sorted(FAILURES)
    assert tuple(command._GROUPS) == command.KINDS


@pytest.mark.parametrize(("fail_on", "status"), [("unsupported", 1), ("crash,mismatch", 0), ("none", 0)])
def test_gate(capsys, fail_on, status):
    assert command._passes(TABLE, command._kinds(fail_on)) == status
    assert ("2 unsupported" in capsys.readouterr().err) == bool(status)


def test_interrupted(capsys, monkeypatch, empty_folder):
    """Ctrl-C: what is known is shown and kept, and how to go on is said."""
    from shadowrun.sweep import pool

    def interrupted(self, tasks):
        self._on_result(Case("sin", "float32", Part.FORWARD, 0), Outcome())
        raise KeyboardInterrupt

    monkeypatch.setattr(pool.Pool, "run", interrupted)
    assert main(["sweep", "--target", "cpu", "--ops", "sin", "--jobs", "1"]) == 130
    shown = capsys.readouterr()
    assert "goes on where it stopped" in shown.err
    assert "1 cases" in shown.out
    file = CoverageFile.open(empty_folder / ".shadowcov")
    assert not file.info.complete
    assert len(list(file.results())) == 1


def test_probes_and_recorded_calls_exclude_each_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "--target", "sim", "--probe", "--from", "run.shadowrun"]) == 2
    assert "Leave one of them out" in capsys.readouterr().err


def test_probe_runs_its_own_parts_only(capsys):
    assert main(["sweep", "--target", "sim", "--probe", "--ops", "abs", "--list"]) == 0
    assert capsys.readouterr().out.split(maxsplit=2)[2].strip() == "probe, tail, layout, slice"


def test_operators_that_depend_on_the_batch_are_told(capsys, monkeypatch, empty_folder):
    from shadowrun.sweep import pool

    def one_case(self, tasks):
        told = Finding(Kind.PASS, "aten::bmm", explanation=NOT_INVARIANT)
        self._on_result(Case("bmm", "float32", Part.SLICE, 0), Outcome((told,)))

    monkeypatch.setattr(pool.Pool, "run", one_case)
    assert main(["sweep", "--target", "cpu", "--ops", "bmm", "--parts", "slice", "--jobs", "1"]) == 0
    assert "not batch-invariant, which is no failure: 1 operators (aten::bmm)" in capsys.readouterr().out
