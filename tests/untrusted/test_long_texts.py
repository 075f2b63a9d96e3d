"""A text of a megabyte takes a command moments, whatever it says: no pattern looks at it from each place anew.

A test that hangs is ended after a minute; before, each took hours.
"""

import csv
import io
import signal
import sqlite3

import pytest

from shadowrun.cli.main import main
from shadowrun.report.document import Document, Records, render
from shadowrun.store import DataFile
from shadowrun.studies.campaign.causes.root_causes import without_flaws
from shadowrun.studies.sweep.cases import Case, CaseFinding, CaseOutcome, Kind, Part
from shadowrun.studies.sweep.coverage_file import CoverageFile, SweepInfo
from shadowrun.studies.sweep.recorded_calls import UnreadableCall, read_calls, sample
from shadowrun.types import Cause, Phase, RunInfo, Status, Verdict

N = 1_000_000


@pytest.fixture(autouse=True)
def ended():
    """End a test that hangs."""

    def stop(*_):
        raise AssertionError("it does not end")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def file_with(path, evidence="x", inputs=("f32[2]",), op="aten::cat"):
    """A data file with a mismatch of each of these inputs."""
    data = DataFile.create(path, RunInfo("npu", "cpu"))
    verdict = Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "x", evidence, 0.5)
    for seq, text in enumerate(inputs):
        place = data.context_id(op, text, ("f32",), "[2]", "", Phase.FORWARD, "x.py:1", "npu:0")
        data.add((seq, 0, place, data.verdict_id(verdict, ""), 1.0, 1.0, 1.0, 1.0))
    data.close()
    return path


def test_evidence(tmp_path, capsys):
    path = file_with(tmp_path / "x.shadowrun", evidence="elements of " * N)
    assert main(["explain", str(path), "0", "-f", "json"]) == 0
    assert '"decided_by"' in capsys.readouterr().out


def test_explanation_of_a_call_is_short(tmp_path, capsys):
    """It printed a page for each kilobyte of a name."""
    path = file_with(tmp_path / "x.shadowrun", evidence="a " * N, op=f"aten::{'a' * N}")
    assert main(["explain", str(path), "0", "-f", "txt"]) == 0
    assert len(capsys.readouterr().out) < 5000


@pytest.mark.parametrize(("sql", "status"), [("/* " * N, 0), ("\0" + "[" * N, 2)], ids=["comments", "names"])
def test_schema(tmp_path, capsys, sql, status):
    """SQLite ends a comment that nothing closes with the text, and reads nothing after NUL."""
    path = file_with(tmp_path / "x.shadowrun")
    connection = sqlite3.connect(path)
    connection.execute("pragma writable_schema = on")
    (made,) = connection.execute("select sql from sqlite_master where name = 'site'").fetchone()
    connection.execute("update sqlite_master set sql = ? where name = 'site'", (made + sql,))
    connection.commit()
    connection.close()
    assert main(["coverage", str(path)]) == status
    assert "internal error" not in capsys.readouterr().err


def test_cell_of_a_table():
    cell = "-" + "1" * N + "x"
    text = render(Document("", (), {}, Records(("a",), ((cell,),))), "csv")
    csv.field_size_limit(2 * N)
    assert list(csv.reader(io.StringIO(text))) == [["a"], [f"'{cell}"]]


def test_name_of_a_dtype():
    with pytest.raises(UnreadableCall, match=r"cannot be made|without its value"):
        sample("aten::exp", "a" * N, 0)


@pytest.mark.parametrize("sizes", [["9" * 4000] * 2000, ["9" * 18] * 400_000], ids=["digits", "dimensions"])
def test_sizes_of_a_tensor(sizes):
    """Their product took minutes."""
    with pytest.raises(UnreadableCall, match="no tensor has such a shape"):
        sample("aten::cat", f"f32[{', '.join(sizes)}]", 0)


@pytest.mark.parametrize("text", ["], " * N, "a" * N, f"torch.{'a' * N}"], ids=["brackets", "word", "constant"])
def test_what_cannot_be_read_is_named_in_part(text):
    with pytest.raises(UnreadableCall) as caught:
        sample("aten::cat", text, 0)
    assert len(str(caught.value)) < 1000


def test_flaws_of_a_target():
    assert without_flaws("sim (a-flaw, another), inductor") == "sim, inductor"
    assert without_flaws(" (" * N) == " (" * N


def test_lists_that_were_cut():
    """Each named a hundred thousand entries: together they took all memory."""
    with pytest.raises(UnreadableCall, match="more entries"):
        sample("aten::cat", "[0, … 60000 more], " * 2, 0)


def test_lists_in_lists_that_were_cut():
    """A hundred characters named 10^12 numbers: each list has ten of the one in it."""
    with pytest.raises(UnreadableCall, match="lists in a list"):
        sample("aten::relu", "[" * 6 + "1" + ", … 9 more]" * 6, 0)


def test_inputs_of_one_operator(tmp_path):
    path = file_with(tmp_path / "x.shadowrun")
    connection = sqlite3.connect(path)
    connection.execute(
        "with recursive n(i) as (select 0 union all select i + 1 from n where i < 100000) "
        "insert into context select i + 10, op_id, 'f32[' || i || ']', dtypes, shapes, module, phase, site_id, device "
        "from n, context"
    )
    connection.commit()
    connection.close()
    ((key, calls),) = read_calls(path).items()
    assert key == ("aten::cat", "float32")
    assert len(calls) == len(set(calls)) == 100_001


def test_list_of_what_a_sweep_found(tmp_path, capsys):
    """It printed the whole of a name for each finding."""
    sweep = CoverageFile.begin(tmp_path / "x.shadowcov", SweepInfo("npu", "cpu"))
    found = CaseFinding(Kind.MISMATCH, "a" * N)
    sweep.add(Case("exp", "b" * N, Part.FORWARD, 0), CaseOutcome((found,)))
    sweep.close()
    assert main(["repro", str(tmp_path / "x.shadowcov")]) == 0
    assert len(capsys.readouterr().out) < 5000
