"""Files of older schemas hold after the upgrade what they held before."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path

import pytest

import shadowrun
from shadowrun.store import DataFile
from shadowrun.store.combine import combine_files
from shadowrun.store.schema import SCHEMA_VERSION
from shadowrun.types import Cause, Phase, RunInfo, Status, TensorDiff, TensorMeta, Verdict

V4 = Path(__file__).parent / "schema-4.sql"
"""What `build` wrote when the schema was 4."""
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
    return [
        *map(repr, run.records()),
        repr(run.info),
        *(repr(list(data.query(f"select * from {table}"))) for table in tables),
    ]


@pytest.fixture
def new(tmp_path):
    path = tmp_path / "new.shadowrun"
    build(path)
    return path


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "old.shadowrun"
    connection = sqlite3.connect(path)
    connection.executescript(V4.read_text())
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


def test_users_see_values(new):
    """The view needs no shadowrun."""
    connection = sqlite3.connect(new)
    found = connection.execute("select seq, position, name, max_abs, worst_actual, excess_actual from diff").fetchall()
    connection.close()
    assert found[0] == (1, 0, "output 0", 2.0**-32, -0.75, -1)
    assert found[2] == (2, 1, "output 1", "nan", 0.0, -1)
    assert found[3] == (2, 2, "self", 1e-300, 1e38, 0.5)
