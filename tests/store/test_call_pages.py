"""Calls read from the pages of a file are those that SQLite reads, and nothing else is taken for a call."""

from __future__ import annotations

import contextlib
import itertools
import random
import sqlite3
import struct
from typing import TYPE_CHECKING

import pytest

from shadowrun.native import core
from shadowrun.run import combine, load
from shadowrun.store import DataFile, call_pages, groups
from shadowrun.types import Cause, Phase, RunInfo, Status, TensorDiff, TensorMeta, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.skipif(core is None, reason="native code reads the pages")

META = TensorMeta("f32", (2,), (1,))
SPECIAL = [-1.0, 0.0, 1.0, 0.5, 3e300, float("inf"), float("nan"), 2.0**60]
ALL = """
select seq, step, context_id, outcome_id, ref_ns, target_ns, drift_abs, drift_rel
from call join verdict v on v.id = verdict_id order by seq
"""


@pytest.fixture(autouse=True)
def pages_of_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_pages, "MIN_BYTES", 0)
    monkeypatch.setattr(call_pages, "LEAVES", 5)


def record(path: Path, n: int, rank: int = 0, drifts: Callable[[int], bool] = lambda seq: seq % 40 == 0) -> Path:
    draw = random.Random(rank)
    data = DataFile.create(path, RunInfo("npu", "cpu", rank=rank, world_size=2))
    contexts = [
        data.context_id(f"aten::op{k % 3}", "", ("f32",), "", f"net.{k % 7}", Phase.FORWARD, f"a.py:{k} in f", "npu")
        for k in range(300)
    ]
    match = data.verdict_id(Verdict(Status.MATCH))
    for seq in range(n):
        verdict = match
        if seq % 50 == 1:
            data.add_diffs(seq, [TensorDiff("output 0", META, META, 2, 1, 1, draw.random(), 0.5)])
            verdict = data.verdict_id(Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "wrong", f"evidence {seq}"))
        times = [draw.choice([-1.0, 0.0, 0.001, 3.25, 1e9, draw.random() * 100]) for _ in range(2)]
        drift = draw.choice(SPECIAL), draw.choice(SPECIAL)
        data.add((seq, seq // 900, draw.choice(contexts), verdict, *times, *(drift if drifts(seq) else (-1.0, -1.0))))
    data.close()
    return path


def of_query(path: Path) -> list[tuple]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return [tuple(map(str, (-1.0 if v is None else float(v) for v in row))) for row in connection.execute(ALL)]


@pytest.mark.parametrize("n", [1, 150, 20_000])
def test_pages_hold_what_a_query_gives(tmp_path: Path, n: int) -> None:
    data = DataFile.open(record(tmp_path / "a.shadowrun", n))
    pieces = list(data.call_arrays() or ())
    assert len(pieces) >= n / 1000
    assert [tuple(map(str, row)) for piece in pieces for row in piece.tolist()] == of_query(data.path)


def test_reports_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [record(tmp_path / f"run.{rank}.shadowrun", 9000 + rank, rank) for rank in range(2)]
    combine(paths, tmp_path / "run.shadowrun")
    for path in (*paths, tmp_path / "run.shadowrun"):
        found = {}
        for least in (0, 1 << 40):
            monkeypatch.setattr(call_pages, "MIN_BYTES", least)
            run = load(path)
            assert (run._data.call_arrays() is None) == (least > 0)
            series = run.charts()
            groups_of_run = sorted(groups.read_groups(run._data), key=lambda g: (g.context_id, g.outcome_id))
            assert sum(g.n for g in groups_of_run) == series.n_calls > 8000
            run.write(tmp_path / "report.html")
            text = (tmp_path / "report.html").read_text(encoding="utf-8")
            heat = series.heat and (series.heat.modules, sorted(series.heat.cells.items()))
            found[least] = [*map(repr, (groups_of_run, run.summary(), series.graph, heat)), *text.splitlines()]
        for one, other in zip(*found.values(), strict=True):
            assert one == other


@pytest.mark.parametrize("some", [True, False])
def test_accumulated_errors_are_asked_for_where_a_call_has_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, some: bool
) -> None:
    path, asked = record(tmp_path / "a.shadowrun", 6000, drifts=lambda seq: some and 3000 < seq < 3100), []
    data, query = DataFile.open(path), DataFile.query
    monkeypatch.setattr(DataFile, "query", lambda self, sql, *args: (asked.append(sql), query(self, sql, *args))[1])
    found = groups.read_groups(data)
    assert sum("drift_rel is not null" in sql for sql in asked) == some
    assert any(g.drift_rel != -1 for g in found) == some
    steps = load(path).drift()
    assert sum("drift_rel >= 0" in sql for sql in asked) == some
    assert bool(steps) == some


@pytest.mark.parametrize(
    "change",
    [
        "update call set step = 'x' where seq = 7000",
        "update call set ref_ns = 1.5 where seq = 7000",
        "update call set target_ns = -1 where seq = 7000",
        "update call set drift_abs = 'inf' where seq = 7000",
        "update call set drift_rel = x'6e616e' where seq = 7000",
        "update call set drift_rel = -2.0 where seq = 7000",
        "update call set step = 9007199254740993 where seq = 7000",
    ],
)
def test_other_values_are_left_to_sqlite(tmp_path: Path, change: str) -> None:
    path = record(tmp_path / "a.shadowrun", 8000)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert call_pages.find(connection) is not None
        connection.execute(change)
        connection.commit()
        assert call_pages.find(connection) is None


def test_a_file_that_is_recorded_is_read_to_its_present_end(tmp_path: Path) -> None:
    path = record(tmp_path / "a.shadowrun", 3000)
    data = DataFile.open(path)
    again = DataFile.create(path, RunInfo("npu", "cpu"), append=True)
    for seq in range(3000, 5000):
        again.add((seq, 9, 1, 1, 1.0, 1.0, -1.0, -1.0))
    again.close()
    assert sum(len(piece) for piece in data.call_arrays() or ()) == 5000


def leaves_of(path: Path) -> tuple[list[bytes], int]:
    content = path.read_bytes()
    (size,) = struct.unpack(">H", content[16:18])
    pages = [content[at : at + size] for at in range(size, len(content), size)]
    return [page for page in pages if page[0] == 13 and core.call_rows(page, size, size, -1.0)], size


def test_damaged_pages_give_no_call_of_another_form(tmp_path: Path) -> None:
    leaves, size = leaves_of(record(tmp_path / "a.shadowrun", 2000))
    draw = random.Random(3)
    refused = 0
    for _ in range(20_000):
        page = bytearray(draw.choice(leaves))
        for _ in range(draw.choice([1, 1, 3, 20])):
            page[draw.choice([draw.randrange(60), draw.randrange(size)])] = draw.randrange(256)
        # At the end of its memory: a read past it would be found by a sanitizer, or by the values.
        rows = core.call_rows(bytes(page), size, size, -1.0)
        refused += rows is None
        numbers = [] if rows is None else list(struct.iter_unpack("8d", rows))
        assert all(a[0] < b[0] for a, b in itertools.pairwise(numbers))
        for seq, step, *_, ref_ns, target_ns, drift_abs, drift_rel in numbers:
            assert 0 <= seq < 2**47
            assert step >= 0
            assert step % 1 == 0
            assert all(ns == -1 or (ns >= 0 and ns % 1 == 0) for ns in (ref_ns, target_ns))
            assert not any(drift < 0 and drift != -1 for drift in (drift_abs, drift_rel))
    assert 5000 < refused < 20_000


@pytest.mark.parametrize(("size", "usable"), [(0, 0), (512, 513), (1 << 17, 512), (1000, 400), (512, -1)])
def test_pages_of_no_size(size: int, usable: int) -> None:
    with pytest.raises(ValueError, match="no pages"):
        core.call_rows(bytes(2048), size, usable, -1.0)
