"""Files of older schemas hold after the upgrade what they held before."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path

import pytest

import shadowrun
from shadowrun.store import DataFile
from shadowrun.store.combine.combine_files import combine_files
from shadowrun.store.schema import SCHEMA_VERSION
from shadowrun.types import Cause, Phase, RunInfo, Status, TensorDiff, TensorMeta, Verdict

OLD = {version: Path(__file__).parent / f"schema-{version}.sql" for version in (4, 5, 6, 7)}
"""What `build` wrote when the schema was 4 to 7."""
INFO = RunInfo("npu", "cpu", {"name": "N"}, {"threads": 2}, {"torch": "2.13.0"}, ("a.py",), {}, 0, 1, "2026-01-01")
META = TensorMeta("f32", (3, 4), (4, 1), "npu:0")
DIFFS = (
    TensorDiff("output 0", META, META, 12, 5, 0, 2.0**-32, 0.1, math.pi, 3, 20, worst_index=(2, 3), worst_actual=-0.75),
    TensorDiff("output 1", META, TensorMeta("f32", (5,)), 5, 5, 5, math.nan, math.inf, 0.0, 2**70, detail="shape"),
    TensorDiff(
        "self", META, META, 12, 1, 0, 1e-300, 5e-324, 0.25, 1, 2, 1, 2, 3, 4, (7, 7), 1e38, -1e38, 0.5, 1 / 3, "x", 9
    ),
)


def build(path: Path) -> None:
    """All that a record can hold."""
    data = DataFile.create(path, INFO)
    places = [
        data.context_id(op, "f32[3, 4]", ("f32",), "[3, 4]", "Net.fc", Phase.FORWARD, "a.py:1 in f", "npu:0")
        for op in ("aten::mm", "compiled::graph 0")
    ]
    match = data.verdict_id(Verdict(Status.MATCH))
    rounded = data.verdict_id(Verdict(Status.MATCH, Cause.ROUNDING, "", "at most 3 ULP"))
    wrong = data.verdict_id(Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "wrong", "evidence", 0.5), "a kernel")
    data.add((0, 0, places[0], match, 3.141, 12345.678, -1.0, -1.0))
    data.add((1, 0, places[0], rounded, 0.001, -1.0, 0.25, math.nan))
    data.add_diffs(1, DIFFS[:1])
    data.add((2, 1, places[0], wrong, -1.0, 1e7 + 0.003, math.inf, 1e-9))
    data.add_diffs(2, DIFFS)
    data.add((3, 1, places[1], match, 0.0, 7.0, 0.0, 0.0))
    data.add_capture(2, "0.pt", 100)
    data.add_region("compiled::graph 0", "inductor", 5, "a.py:2 in g")
    data.add_step(0, 0.5, 0.25)
    data.add_step(1, 0.75, 0.125)
    data.add_skipped({("aten::view", "npu:0", "view"): 7})
    data.close()
    assert not data.failure


def held(path: Path) -> list[str]:
    """All of it, as text: NaN is not equal to itself."""
    data = DataFile.open(path)
    run = shadowrun.load(path)
    tables = ("region", "capture", "step", "skipped")
    rows = (repr(list(data.query(f"select * from {table}"))) for table in tables)
    # The run's information is JSON: fields that came later have their defaults.
    return [*map(repr, run.records()), *rows, repr(run.info)]


@pytest.fixture
def new(tmp_path):
    path = tmp_path / "new.shadowrun"
    build(path)
    return path


@pytest.fixture(params=OLD)
def old(tmp_path, request):
    path = tmp_path / "old.shadowrun"
    connection = sqlite3.connect(path)
    connection.executescript(OLD[request.param].read_text())
    connection.close()
    return path


def test_a_record_comes_back_bit_by_bit(new):
    first, second, third, fourth = shadowrun.load(new).records()
    assert [r.ref_time_us for r in (first, second, third, fourth)] == [3.141, 0.001, -1.0, 0.0]
    assert [r.target_time_us for r in (first, second, third, fourth)] == [12345.678, -1.0, 1e7 + 0.003, 7.0]
    assert (first.drift_abs, third.drift_abs, fourth.drift_rel) == (-1.0, math.inf, 0.0)
    assert math.isnan(second.drift_rel)
    assert list(map(repr, third.diffs)) == list(map(repr, DIFFS))


def test_the_old_file_is_read_and_left_alone(old, new):
    before = old.read_bytes()
    assert held(old) == held(new)
    assert old.read_bytes() == before
    assert not list(old.parent.glob("*.part"))


def test_the_old_file_is_combined(old, new, tmp_path):
    both = [tmp_path / f"{path.stem}.all.shadowrun" for path in (old, new)]
    for path, out in zip((old, new), both, strict=True):
        combine_files([path], out)
    first, second = ([*map(repr, shadowrun.load(out).records())] for out in both)
    assert first == second
    assert first == [*map(repr, shadowrun.load(new).records())]


def test_the_old_file_is_appended_to(old, new):
    data = DataFile.create(old, INFO, append=True)
    assert (data.next_seq, data.next_step) == (4, 2)
    data.add_diffs(4, DIFFS)
    data.add((4, 2, 1, data.verdict_id(Verdict(Status.MATCH)), 1.0, 1.0, -1.0, -1.0))
    data.add_capture(4, "1.pt", 5)
    data.close()
    assert not data.failure
    *earlier, last = shadowrun.load(old).records()
    assert list(map(repr, earlier)) == [*map(repr, shadowrun.load(new).records())]
    assert list(map(repr, last.diffs)) == list(map(repr, DIFFS))
    connection = sqlite3.connect(old)
    assert connection.execute("pragma user_version").fetchone() == (SCHEMA_VERSION,)
    assert connection.execute("pragma integrity_check").fetchone() == ("ok",)
    connection.close()


@pytest.mark.parametrize("old", [4], indirect=True)
def test_a_file_without_the_later_tables(old, new):
    """As schema 2 left them."""
    connection = sqlite3.connect(old)
    connection.executescript("drop table capture; drop table region; pragma user_version = 2;")
    connection.close()
    assert held(old)[:4] == held(new)[:4]
    data = DataFile.create(old, INFO, append=True)
    data.add_capture(2, "0.pt", 100)
    data.close()
    assert not data.failure


def test_a_refused_run_leaves_the_old_file_alone(old):
    before = old.read_bytes()
    with pytest.raises(shadowrun.DataFileError, match="cannot be appended"):
        DataFile.create(old, RunInfo("other", "cpu"), append=True)
    assert old.read_bytes() == before


def test_a_damaged_old_file_is_named(old):
    whole = old.read_bytes()
    old.write_bytes(whole[:8192] + b"\xa5" * (len(whole) - 8192))
    with pytest.raises(shadowrun.DataFileError, match="damaged"):
        list(shadowrun.load(old).records())


def edited(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for sql in ("pragma writable_schema = on", *statements):
        connection.execute(sql)
    connection.close()


@pytest.mark.parametrize("old", [5], indirect=True)
@pytest.mark.parametrize(
    ("sql", "column"),
    [
        ("update packed_diff set max_abs = -1", "max_abs"),  # divided by 2^127: NULL
        ("update packed_diff set worst_actual = 125", "worst_actual"),  # 2^125: of the other sign
        ("update packed_diff set excess_actual = 126", "excess_actual"),
    ],
)
def test_a_number_that_cannot_be_unpacked_is_refused(old, sql, column):
    edited(old, sql)
    with pytest.raises(shadowrun.DataFileError, match=f"diff.{column} has a value that shadowrun does not write"):
        shadowrun.load(old)


@pytest.mark.parametrize("old", [5], indirect=True)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("packed_diff.id as id", "packed_diff.id as' || char(133) || 'id"),
        # To SQLite the text ends there: each difference would be shown with each tensor.
        ("on tensor.id", "--' || char(0) || char(10) || 'on tensor.id"),
    ],
    ids=["column", "comment"],
)
def test_a_view_of_schema_5_is_read_as_sqlite_reads_it(old, ours, theirs):
    edited(old, f"update sqlite_master set sql = replace(sql, '{ours}', '{theirs}') where name = 'diff'")
    with pytest.raises(shadowrun.DataFileError, match="'diff', which shadowrun did not make"):
        shadowrun.load(old)


def test_users_see_values(new):
    """To read them takes no shadowrun."""
    connection = sqlite3.connect(new)
    sql = "select seq, position, name, max_abs, worst_actual, excess_actual from diff join tensor on id = tensor_id"
    found = connection.execute(f"{sql} order by seq, position").fetchall()
    connection.close()
    assert found[0] == (1, 0, "output 0", 2.0**-32, -0.75, None)
    assert found[2] == (2, 1, "output 1", "nan", 0.0, None)
    assert found[3] == (2, 2, "self", 1e-300, 1e38, 0.5)


ODD = [
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    5e-324,
    1e300,
    -1e300,
    0.1,
    2.0**53 + 2,
    -1.0,
    *(0.1 * 3.0**e for e in range(-80, 80)),
]


def test_each_figure_comes_back_bit_by_bit(tmp_path):
    data = DataFile.create(tmp_path / "x.shadowrun", INFO)
    kind = data.context_id("aten::mm", "", (), "", "", Phase.FORWARD, "", "cpu")
    for seq, value in enumerate(ODD):
        size = abs(value)
        figures = {"max_abs": size, "max_rel": size, "rmse": size, "worst_actual": value, "worst_expected": -value}
        figures |= {"excess_actual": value, "excess_expected": size}
        data.add_diffs(seq, [TensorDiff("self", META, META, 12, **figures)])
        data.add((seq, 0, kind, data.verdict_id(Verdict(Status.MATCH)), 1.0, 1.0, value, -1.0))
    data.close()
    records = list(shadowrun.load(tmp_path / "x.shadowrun").records())
    for value, record in zip(ODD, records, strict=True):
        (diff,) = record.diffs
        assert repr((diff.worst_actual, diff.worst_expected)) == repr((value, -value))
        assert {repr(f) for f in (diff.max_abs, diff.max_rel, diff.rmse, diff.excess_expected)} == {repr(abs(value))}
        assert repr(diff.excess_actual + 0.0) == repr(record.drift_abs + 0.0) == repr(value + 0.0)


def test_a_file_of_schema_7_gets_the_table_of_times(tmp_path):
    old, out = tmp_path / "old.shadowrun", tmp_path / "all.shadowrun"
    connection = sqlite3.connect(old)
    connection.executescript(OLD[7].read_text())
    assert not connection.execute("select * from sqlite_master where name = 'moment'").fetchall()
    connection.close()
    data = DataFile.create(old, INFO, append=True)
    data.add((4, 2, 1, data.verdict_id(Verdict(Status.MATCH)), 1.0, 1.0, -1.0, -1.0))
    data.add_moment(4, (10, 20, None, 30, 40, 50))
    data.close()
    combine_files([old, old], out)
    combined = DataFile.open(out)
    moments = list(combined.query("select * from moment order by seq"))
    assert moments == [(seq, 10, 20, None, 30, 40, 50) for seq in (4, 4 + combined.block)]
