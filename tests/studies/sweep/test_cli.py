"""The command: options, errors, formats and exit statuses."""

import csv
import io
import json

import pytest

from shadowrun.cli.main import main
from shadowrun.cli.studies import sweep as command
from shadowrun.report.document import render
from shadowrun.studies.sweep import opinfo
from shadowrun.studies.sweep.cases import FAILURES, NOT_INVARIANT, Case, CaseFinding, CaseOutcome, Kind, Part
from shadowrun.studies.sweep.coverage_file import CoverageFile, SweepInfo
from shadowrun.studies.sweep.reports.report import support_share, sweep_document
from shadowrun.studies.sweep.reports.support import SupportTable

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listed(capsys, *argv):
    """The tasks of a sweep."""
    capsys.readouterr()
    assert main(["sweep", "--list", "--ops", "sin*", "--parts", "forward", *argv]) == 0
    return capsys.readouterr().out.splitlines()


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
        (["--target", "sim", "--shard", "0/2"], "outside of 2 shards"),
        (["--target", "sim", "--shard", "two"], "use I/N"),
        (["--target", "sim", "--shard", "1/" + "9" * 5000], "use I/N"),
        (["--target", "sim", "--ops", "sin", "--shard", "9/9"], "this shard has none"),
        (["--target", "sim", "--fail-on", "everything"], "everything"),
        (["--target", "sim", "-o", "no/folder/x.json"], "folder"),
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


def test_shards(capsys, monkeypatch):
    """Together they have each task once; the number may be that of a job, where the shard asks for it."""
    for name in ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX", "CIRCLE_NODE_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CI_NODE_INDEX", "2")  # as GitLab counts: from 1
    monkeypatch.setenv("CI_NODE_TOTAL", "5")
    whole = listed(capsys)
    first, second = (listed(capsys, "--shard", f"{number}/2") for number in (1, 2))
    assert len(whole) > 2
    assert (first, second) == (whole[::2], whole[1::2])
    assert listed(capsys, "--shard", "/2") == second


def test_a_sweep_of_the_cpu_against_itself(capsys, empty_folder):
    argv = ["sweep", "--target", "cpu", "--ops", "sin", "--samples", "2", "--parts", "forward,backward", "--jobs", "1"]
    assert main([*argv, "-o", "x.json"]) == 0
    text = capsys.readouterr().out
    assert "cpu against cpu" in text
    assert "1 of 1 operators full (100.0 %)" in text
    document = json.loads((empty_folder / "x.json").read_text())
    assert document["format"] == 1
    assert document["operators"][0]["support"] == "full"
    assert document["info"]["complete"] is True
    # Again: from the file alone.
    assert main([*argv, "-o", "x.md", "-o", "x.csv"]) == 0
    assert "| float32 | forward | 1 |" in (empty_folder / "x.md").read_text()
    assert main([*argv[:2], "cpu[threads=1]", *argv[3:]]) == 2
    assert "coverage-file-other" in capsys.readouterr().err


LACKS = CaseFinding(
    Kind.UNSUPPORTED, "aten::sin", "aten::sin.out", "missing operator", "no kernel", "Error: it <lacks> | it"
)
TABLE = SupportTable.from_results(
    [
        (Case("exp", "float32", Part.FORWARD, 0), CaseOutcome()),
        (Case("sin", "float32", Part.FORWARD, 0), CaseOutcome()),
        (Case("sin", "float32", Part.OUT, 0), CaseOutcome.from_findings([LACKS], "f32[3]")),
        (Case("sin", "bfloat16", Part.OUT, 0), CaseOutcome.from_findings([LACKS], "bf16[3]")),
        (Case("rand", "float32", Part.FORWARD, 0), CaseOutcome.from_findings([CaseFinding(Kind.UNVERIFIED)])),
    ]
)
INFO = SweepInfo("npu", "cpu", versions={"torch": "2.13"}, complete=True)


def test_text():
    text = render(sweep_document(TABLE, INFO), "txt")
    lines = text.splitlines()
    assert "npu against cpu" in text
    at = lines.index("sin  [partial]: unsupported operator in aten::sin.out")
    assert [line.split(maxsplit=1) for line in lines[at + 1 : at + 4]] == [
        ["cases", "bfloat16 out 1/1, float32 out 1/1"],
        ["why", "missing operator: no kernel (Error: it <lacks> | it)"],
        ["first", "sample 0 of out, bf16[3]"],
    ]
    assert "not complete" not in text
    assert "not complete" in render(sweep_document(TABLE, SweepInfo("npu", "cpu")), "txt")
    assert max(map(len, lines)) <= 200
    header = next(line for line in lines if line.startswith("dtype"))
    assert "unsupported" in header


def test_a_terminal_lists_the_first_failures_or_all():
    many = SupportTable.from_results(
        (Case(f"op{i}", "float32", Part.OUT, 0), CaseOutcome.from_findings([LACKS], "f32[3]")) for i in range(30)
    )
    assert "… and 10 more failures: --all, or -o FILE, lists all" in render(sweep_document(many, INFO), "txt")
    for text in (render(sweep_document(many, INFO, everything=True), "txt"), render(sweep_document(many, INFO), "md")):
        assert text.count("sample 0 of out") == 30


def test_markdown_is_escaped():
    text = render(sweep_document(TABLE, INFO), "md")
    assert "### sin: \\[partial\\]: unsupported operator in aten::sin.out" in text
    assert "- **cases**: bfloat16 out 1/1, float32 out 1/1" in text
    assert "it &#60;lacks&#62; &#124; it" in text


def test_csv():
    rows = list(csv.reader(io.StringIO(render(sweep_document(TABLE, INFO), "csv"))))
    assert rows[0] == ["operator", "operator_support", "dtype", "part", "support", "failing", "why"]
    assert ["exp", "full", "float32", "forward", "full", "", ""] in rows
    assert len(rows) == 6


def test_json():
    document = json.loads(render(sweep_document(TABLE, INFO), "json"))
    assert document["operators_by_support"] == {"full": 1, "partial": 1, "none": 0, "untested": 1}
    sin = next(o for o in document["operators"] if o["name"] == "sin")
    assert sin["failing"][0]["finding"]["kernel"] == "aten::sin.out"


def test_share_of_operators_that_are_full():
    assert support_share(TABLE) == "1 of 2 operators full (50.0 %)"
    assert support_share(SupportTable.from_results([])) == "0 of 0 operators full"


def test_words_of_the_gate_cover_all_failures():
    assert sorted(kind for kinds in command._GROUPS.values() for kind in kinds) == sorted(FAILURES)
    assert tuple(command._GROUPS) == command.KINDS


@pytest.mark.parametrize(("fail_on", "status"), [("unsupported", 1), ("crash,mismatch", 0), ("none", 0)])
def test_gate(capsys, fail_on, status):
    assert command._passes(TABLE, command.options.kinds_reader(command.KINDS)(fail_on)) == status
    assert ("2 unsupported" in capsys.readouterr().err) == bool(status)


def test_interrupted(capsys, monkeypatch, empty_folder):
    """Ctrl-C: what is known is shown and kept, and how to go on is said."""
    from shadowrun.studies.isolation import pool

    def interrupted(self):
        self.work._on_result(Case("sin", "float32", Part.FORWARD, 0), CaseOutcome())
        raise KeyboardInterrupt

    monkeypatch.setattr(pool.Pool, "run", interrupted)
    assert main(["sweep", "--target", "cpu", "--ops", "sin", "--jobs", "1"]) == 130
    shown = capsys.readouterr()
    assert "resumes the sweep" in shown.err
    assert "1 cases" in shown.out
    file = CoverageFile.open(empty_folder / ".shadowcov")
    assert not file.info.complete
    assert len(list(file.results())) == 1


def test_probes_and_recorded_calls_exclude_each_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "--target", "sim", "--probe", "--from", "run.shadowrun"]) == 2
    assert "use only one of them" in capsys.readouterr().err


def test_probe_runs_its_own_parts_only(capsys):
    assert main(["sweep", "--target", "sim", "--probe", "--ops", "abs", "--list"]) == 0
    assert capsys.readouterr().out.split(maxsplit=2)[2].strip() == "probe, tail, layout, slice"


def test_operators_that_depend_on_the_batch_are_told(capsys, monkeypatch, empty_folder):
    from shadowrun.studies.isolation import pool

    def one_case(self):
        finding = CaseFinding(Kind.PASS, "aten::bmm", explanation=NOT_INVARIANT)
        self.work._on_result(Case("bmm", "float32", Part.SLICE, 0), CaseOutcome((finding,)))

    monkeypatch.setattr(pool.Pool, "run", one_case)
    assert main(["sweep", "--target", "cpu", "--ops", "bmm", "--parts", "slice", "--jobs", "1"]) == 0
    assert "not batch-invariant, which is no failure: 1 operators (aten::bmm)" in capsys.readouterr().out


def test_a_clean_simulated_device_has_backward_passes(capsys):
    """Without `--preset`, which names it, the device was none that torch counts as an accelerator."""
    few = ["--ops", "add", "--samples", "1", "--dtypes", "float32", "--parts", "backward", "--jobs", "1"]
    assert main(["sweep", "--target", "sim", *few]) == 0
    assert "1 of 1 operators full" in capsys.readouterr().out
