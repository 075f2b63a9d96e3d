"""The coverage file: what is written is read, a second start resumes, and other files stay unchanged."""

import sqlite3

import pytest

from shadowrun.errors import DataFileError
from shadowrun.studies.sweep.cases import Case, CaseFinding, CaseOutcome, Kind, Part, Support
from shadowrun.studies.sweep.coverage_file import ALL, CoverageFile, SweepInfo
from shadowrun.studies.sweep.reports.support import SupportTable

INFO = SweepInfo("npu", "cpu", versions={"torch": "2.13.0"})
WRONG = CaseFinding(Kind.MISMATCH, "aten::exp", "", "implementation", "", "1 element")
LACKS = CaseFinding(
    Kind.UNSUPPORTED, "aten::sin", "aten::sin.out", "missing operator", "no kernel", "NotImplementedError"
)


def case(operator, sample, part=Part.FORWARD, dtype="float32"):
    return Case(operator, dtype, part, sample)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "x.shadowcov"
    file = CoverageFile.begin(path, INFO)
    file.add(case("exp", 0), CaseOutcome())
    file.add(case("exp", 1), CaseOutcome.from_findings([WRONG, LACKS, WRONG], "f32[2]"))
    file.add(case("sin", 0), CaseOutcome.from_findings([LACKS], "f32[3]"))
    file.finish("exp", "float32", Part.FORWARD, ALL, 7)
    file.add_time(1.5, 2.5, complete=True)
    file.close()
    read = CoverageFile.open(path)
    assert read.info == SweepInfo("npu", "cpu", versions={"torch": "2.13.0"}, wall_s=1.5, cpu_s=2.5, complete=True)
    assert list(read.results()) == [
        (case("exp", 0), CaseOutcome()),
        (case("exp", 1), CaseOutcome((LACKS, WRONG), "f32[2]")),
        (case("sin", 0), CaseOutcome((LACKS,), "f32[3]")),
    ]
    assert read.finished() == {("exp", "float32", Part.FORWARD): ALL}
    assert read.done()["exp", "float32"] == {(Part.FORWARD, 0), (Part.FORWARD, 1)}
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        assert connection.execute("select n_duplicates from task").fetchall() == [(7,)]


def test_a_second_start_goes_on(tmp_path):
    path = tmp_path / "x.shadowcov"
    first = CoverageFile.begin(path, INFO)
    first.add(case("exp", 0), CaseOutcome.from_findings([WRONG], "f32[2]"))
    first.add_time(1.0, 1.0, complete=False)
    first._connection.close()  # as a kill would
    first._claim.release()
    second = CoverageFile.begin(path, INFO)
    second.add(case("exp", 1), CaseOutcome.from_findings([WRONG], "f32[2]"))
    second.add_time(2.0, 1.0, complete=True)
    second.close()
    read = CoverageFile.open(path)
    assert [c.sample for c, _ in read.results()] == [0, 1]
    assert read.info.wall_s == 3.0
    assert len(list(read._rows("select * from finding"))) == 1


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (SweepInfo("mps", "cpu", versions=INFO.versions), "target"),
        (SweepInfo("npu", "cuda", versions=INFO.versions), "ref"),
        (SweepInfo("npu", "cpu", seed=1, versions=INFO.versions), "seed"),
        (SweepInfo("npu", "cpu", source="run.shadowrun", versions=INFO.versions), "source"),
        (SweepInfo("npu", "cpu", versions={"torch": "2.11.0"}), "2.11.0"),
    ],
)
def test_another_sweep_is_refused(tmp_path, other, word):
    path = tmp_path / "x.shadowcov"
    CoverageFile.begin(path, INFO).close()
    with pytest.raises(DataFileError, match=word) as caught:
        CoverageFile.begin(path, other)
    assert caught.value.slug == "coverage-file-other"


def test_other_files_are_left_alone(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("mine, and longer than a header")
    database = tmp_path / "other.db"
    with sqlite3.connect(database) as connection:
        connection.execute("create table mine (x)")
    for path in (text, database, tmp_path):
        before = path.read_bytes() if path.is_file() else None
        for use in (CoverageFile.open, lambda p: CoverageFile.begin(p, INFO)):
            with pytest.raises(DataFileError) as caught:
                use(path)
            assert caught.value.slug == "coverage-file"
        assert before is None or path.read_bytes() == before
    with pytest.raises(DataFileError, match="does not exist"):
        CoverageFile.open(tmp_path / "none")
    with pytest.raises(DataFileError, match="cannot be written"):
        CoverageFile.begin(tmp_path / "no" / "folder", INFO)


def test_a_newer_file_is_refused(tmp_path):
    path = tmp_path / "x.shadowcov"
    CoverageFile.begin(path, INFO).close()
    with sqlite3.connect(path) as connection:
        connection.execute("pragma user_version = 99")
    with pytest.raises(DataFileError, match="99"):
        CoverageFile.open(path)


def test_classes_of_support():
    results = [
        (case("full", 0), CaseOutcome()),
        (case("full", 1), CaseOutcome.from_findings([CaseFinding(Kind.UNVERIFIED)])),
        (case("partial", 0), CaseOutcome()),
        (case("partial", 0, Part.OUT), CaseOutcome.from_findings([LACKS], "f32[3]")),
        (case("partial", 1, Part.OUT), CaseOutcome.from_findings([LACKS, WRONG], "f32[4]")),
        (case("none", 0), CaseOutcome.from_findings([WRONG])),
        (case("none", 1), CaseOutcome.from_findings([CaseFinding(Kind.HARNESS)])),
        (case("untested", 0), CaseOutcome.from_findings([CaseFinding(Kind.NOT_VALID)])),
    ]
    table = SupportTable.from_results(reversed(results))
    assert {o.name: o.support for o in table.operators} == {
        "full": Support.FULL, "partial": Support.PARTIAL, "none": Support.NONE, "untested": Support.UNTESTED,
    }  # fmt: skip
    partial = next(o for o in table.operators if o.name == "partial")
    assert partial.parts == {("float32", Part.FORWARD): Support.FULL, ("float32", Part.OUT): Support.NONE}
    assert [(f.part, f.finding, f.n, f.of, f.first.sample, f.inputs) for f in partial.failing] == [
        (Part.OUT, LACKS, 2, 2, 0, "f32[3]"),
        (Part.OUT, WRONG, 1, 2, 1, "f32[4]"),
    ]
    assert table.totals[Kind.HARNESS] == 1
    assert table.counts["float32", Part.OUT] == {Kind.UNSUPPORTED: 2}


def test_two_sweeps_do_not_write_one_file(tmp_path):
    path = tmp_path / "x.shadowcov"
    first = CoverageFile.begin(path, INFO)
    with pytest.raises(DataFileError, match="being written by another"):
        CoverageFile.begin(path, INFO)
    first.add(case("exp", 0), CaseOutcome())
    CoverageFile.open(path).close()  # reading it is no trouble
    first.close()
    CoverageFile.begin(path, INFO).close()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_full_disk_is_told(tmp_path):
    file = CoverageFile.begin(tmp_path / "x", INFO)
    file._connection.execute("pragma max_page_count = 1")
    with pytest.raises(DataFileError, match="cannot be written any more"):
        for number in range(10_000):
            file.add(case("exp", number), CaseOutcome.from_findings([WRONG], "f32[2]"))
    file.close()
