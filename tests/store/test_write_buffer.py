"""Calls that wait: the class in Python and the one in C do the same, and what is written is what was added."""

from __future__ import annotations

import ast
import math
import random
import re
import sqlite3
import threading
import tracemalloc
from pathlib import Path

import pytest

import shadowrun
from shadowrun.errors import DataFileError
from shadowrun.native import core
from shadowrun.store import DataFile
from shadowrun.store.packed_rows import PackedRows
from shadowrun.store.write_buffer import PendingRows, PythonRows, Rows, unpacked
from shadowrun.types import Phase, RunInfo, Verdict
from shadowrun.types import Status as S

INFO = RunInfo("npu", "cpu")
CLASSES = [PythonRows] if core is None else [PythonRows, core.RowBuffer]
NO_NUMBERS = ["x", None, 1j, [1.0], b"1"]


@pytest.fixture(params=CLASSES, ids=["python", "c"][: len(CLASSES)])
def rows(request):
    return request.param()


def taken(rows, n=None):
    n = len(rows) if n is None else n
    found = list(unpacked(rows.head(n)))
    rows.drop(n)
    return found


def row_of(seq):
    return (seq, seq // 7, seq % 5, seq % 3, seq / 8, -1.0, math.ldexp(1.0, -seq % 900), 5e-324 * seq)


def test_what_stands_in_is_that_of_c_where_there_is_one():
    assert Rows is CLASSES[-1]


def test_rows_come_out_as_they_went_in(rows):
    given = [row_of(seq) for seq in range(300)]
    for row in given:
        rows.append(row)
    assert len(rows) == 300
    assert list(unpacked(rows.head(300))) == given
    assert list(unpacked(rows.head(1))) == given[:1]
    assert len(rows) == 300, "looking takes nothing away"


def test_numbers_are_exact(rows):
    given = (2**53, 2**53 - 1, 2**52 + 1, 7, 0.1, -0.0, math.inf, -math.inf)
    rows.append(given)
    (found,) = taken(rows)
    assert [float(v).hex() for v in found] == [float(v).hex() for v in given]
    rows.step = 2**53 - 1
    rows.add(2**53, 2**53 - 1, 3, 0.1, 1e308)
    assert taken(rows) == [(2**53, 2**53 - 1, 2**53 - 1, 3, 0.1, 1e308, -1.0, -1.0)]


def test_nan_is_a_number(rows):
    rows.add(0, 1, 2, 3.0, 4.0, math.nan, math.nan)
    (found,) = taken(rows)
    assert found[:6] == (0, 0, 1, 2, 3.0, 4.0)
    assert all(map(math.isnan, found[6:]))


def test_rows_have_the_step_that_was_set(rows):
    rows.start(5, 3)
    assert (rows.step, rows.last_step) == (3, -1)
    rows.add(rows.next_seq(), 1, 2, 0.5, 0.25)
    assert (rows.step, rows.last_step) == (3, 3)
    rows.step += 1
    assert (rows.step, rows.last_step) == (4, 3)
    rows.append((rows.next_seq(), 9, 1, 2, 0.5, 0.25, -1.0, -1.0))
    assert rows.last_step == 3, "rows with a step of their own do not count"
    rows.add(rows.next_seq(), 1, 2, 0.5, 0.25, 0.125, 8.0)
    assert (rows.step, rows.last_step) == (4, 4)
    assert taken(rows) == [
        (5, 3, 1, 2, 0.5, 0.25, -1.0, -1.0),
        (6, 9, 1, 2, 0.5, 0.25, -1.0, -1.0),
        (7, 4, 1, 2, 0.5, 0.25, 0.125, 8.0),
    ]
    rows.start(100, 0)
    assert (rows.next_seq(), rows.next_seq(), rows.step, rows.last_step) == (100, 101, 0, -1)
    assert type(rows.step) is int


def test_numbers_begin_at_nought(rows):
    assert [rows.next_seq() for _ in range(3)] == [0, 1, 2]
    assert (len(rows), rows.step, rows.last_step) == (0, 0, -1)


@pytest.mark.parametrize("wrong", [*NO_NUMBERS, 10**400], ids=lambda v: repr(v)[:8])
@pytest.mark.parametrize("place", range(8))
def test_a_bad_value_leaves_nothing(rows, place, wrong):
    rows.append(row_of(1))
    bad = [*row_of(2)[:place], wrong, *row_of(2)[place + 1 :]]
    with pytest.raises((TypeError, OverflowError)):
        rows.append(bad)
    if place != 1:
        del bad[1]
        rows.step = 6
        with pytest.raises((TypeError, OverflowError)):
            rows.add(*bad)
    assert rows.last_step == -1
    assert taken(rows) == [row_of(1)]


@pytest.mark.parametrize("wrong", [(), (1.0,) * 7, (1.0,) * 9, 5, None], ids=str)
def test_a_row_has_eight_numbers(rows, wrong):
    with pytest.raises(TypeError):
        rows.append(wrong)
    for n in (0, 4, 8):
        with pytest.raises(TypeError):
            rows.add(*(1,) * n)
    assert (len(rows), rows.last_step) == (0, -1)


@pytest.mark.parametrize("wrong", NO_NUMBERS, ids=repr)
def test_a_step_is_a_whole_number(rows, wrong):
    rows.step = 4
    with pytest.raises(TypeError):
        rows.step = wrong
    with pytest.raises(TypeError):
        rows.step = 1.5
    with pytest.raises(TypeError):
        rows.start(wrong, 0)
    assert rows.step == 4


def test_it_takes_no_arguments(rows):
    with pytest.raises(TypeError):
        type(rows)(1)


def test_a_value_that_adds_a_row_when_it_is_read(rows):
    class Adding:
        def __float__(self):
            for seq in range(3000):  # more than there is room for
                rows.append(row_of(seq))
            return 7.0

    rows.add(9000, 1, 2, Adding(), 1.0)
    assert len(rows) == 3001
    assert taken(rows) == [*(row_of(seq) for seq in range(3000)), (9000, 0, 1, 2, 7.0, 1.0, -1.0, -1.0)]


def test_many(rows):
    """Grows, shrinks, and grows again, by random pieces."""
    chance = random.Random(0)
    first = last = 0
    for most in (50, 20_000, 3, 5_000):
        for _ in range(8):
            for _ in range(chance.randrange(most)):
                rows.append(row_of(last))
                last += 1
            n = chance.choice([0, chance.randrange(most), most * 2])
            expected = [row_of(seq) for seq in range(first, min(first + n, last))]
            assert taken(rows, n) == expected
            first += len(expected)
            assert len(rows) == last - first


@pytest.mark.parametrize("how", ["drop", "clear", "end"])
def test_memory_is_given_back(rows, how):
    mib, kind = 1 << 20, type(rows)
    tracemalloc.start()
    try:
        many = kind()
        for _ in range(100_000):
            many.add(1, 2, 3, 4.0, 5.0)
        assert tracemalloc.get_traced_memory()[0] > 6 * mib, "this sees what they take"
        if how == "end":
            del many
        else:
            many.drop(99_990) if how == "drop" else many.clear()
            many.append(row_of(1))
        assert tracemalloc.get_traced_memory()[0] < mib
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("n", [0, -1, -(10**30)])
def test_none_are_taken(rows, n):
    rows.append(row_of(1))
    assert rows.head(n) == b""
    rows.drop(n)
    assert taken(rows) == [row_of(1)]


def test_no_more_are_taken_than_there_are(rows):
    assert rows.head(10) == b""
    rows.drop(10)
    rows.append(row_of(1))
    assert len(rows.head(10**30)) == 64
    rows.drop(10**30)
    assert len(rows) == 0
    for method in (rows.head, rows.drop):
        with pytest.raises(TypeError):
            method("1")


def test_all_are_forgotten(rows):
    rows.start(3, 2)
    for _ in range(5000):
        rows.add(rows.next_seq(), 1, 2, 3.0, 4.0)
    rows.clear()
    assert (len(rows), rows.head(9), rows.step, rows.last_step, rows.next_seq()) == (0, b"", 2, 2, 5003)
    rows.append(row_of(1))
    assert taken(rows) == [row_of(1)]


def test_threads_add_while_another_takes(rows):
    n_threads, n_each = 6, 4000
    found, ended = [], threading.Event()

    def add(thread):
        for k in range(n_each):
            rows.add(rows.next_seq(), thread, 0, k, 2.0)

    def take():
        while not ended.is_set() or len(rows):
            found.extend(taken(rows))

    threads = [threading.Thread(target=add, args=(k,)) for k in range(n_threads)]
    taker = threading.Thread(target=take)
    for thread in (taker, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    taker.join()
    assert sorted(row[0] for row in found) == list(range(n_threads * n_each))
    for k in range(n_threads):
        assert [row[4] for row in found if row[2] == k] == list(range(n_each)), "each thread's rows keep their order"


class Watched:
    """A connection that records its statements."""

    def __init__(self, connection):
        self._connection = connection
        self.said = []
        self.meanwhile = None

    def execute(self, sql, *values):
        self.said.append(sql)
        if sql == "commit" and self.meanwhile is not None:
            self.meanwhile = self.meanwhile()
        return self._connection.execute(sql, *values)

    def executemany(self, sql, rows):
        return self._connection.executemany(sql, rows)

    @property
    def in_transaction(self):
        return self._connection.in_transaction


@pytest.fixture
def data():
    """It closes its connection when it goes."""
    return DataFile.create(None, INFO)


def filled(kind, connection, monkeypatch, drift=(-1.0, 0.5)):
    """A `PendingRows` of three calls, of whose tables nothing waits."""
    monkeypatch.setattr("shadowrun.store.write_buffer.Rows", kind)
    pending = PendingRows()
    pending.context("aten::mm", "", (), "", "", Phase.FORWARD, "", "cpu")
    pending.verdict(Verdict(S.MATCH), "")
    pending.write(connection)
    for seq in range(3):
        pending.rows.append((seq, 2, 1, 1, -1.0, 1.25, *(drift if seq == 1 else (-1.0, 0.5))))
    return pending


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    ("drift", "stored"),
    [
        ((-1.0, -1.0), (None, None)),
        ((0.25, 0.0), (0.25, 0.0)),
        ((math.nan, 0.5), ("nan", 0.5)),
        ((0.5, math.nan), (0.5, "nan")),
        ((math.inf, math.nan), (math.inf, "nan")),
        ((math.inf, -math.inf), (math.inf, -math.inf)),
    ],
    ids=str,
)
def test_the_database_gets_whole_numbers_and_all_floats(data, kind, monkeypatch, drift, stored):
    connection = data.connection
    assert filled(kind, connection, monkeypatch, drift).write(connection) == 3
    types = "select typeof(seq), typeof(step), typeof(context_id), typeof(verdict_id), typeof(target_ns) from call"
    assert set(connection.execute(types)) == {("integer",) * 5}
    assert connection.execute("select * from call").fetchall() == [
        (0, 2, 1, 1, None, 1250, None, 0.5),
        (1, 2, 1, 1, None, 1250, *stored),
        (2, 2, 1, 1, None, 1250, None, 0.5),
    ]


def test_no_statement_numbers_its_placeholders():
    """With a sequence of values, Python 3.12 warns of that, and 3.14 raises."""
    package = Path(shadowrun.__file__).parent
    texts = {
        (file.name, node.value)
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert "?" in "".join(text for name, text in texts if name == "write_buffer.py")
    assert [found for found in texts if re.search(r"\?\d", found[1])] == []


@pytest.mark.parametrize("kind", CLASSES)
def test_calls_alone_need_no_transaction_in_memory(data, kind, monkeypatch):
    connection = Watched(data.connection)
    pending, packed = filled(kind, connection, monkeypatch), PackedRows()
    connection.said.clear()
    assert pending.write(connection, packed) == 3
    assert connection.said == []
    assert (len(packed), len(pending.rows)) == (3, 0)
    assert packed.take(3)[:, 0].tolist() == [0, 1, 2]
    pending.region("region", "", 1, "")
    pending.write(connection, packed)
    assert connection.said == ["begin immediate", "commit"]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("packed", [None, PackedRows()], ids=["file", "memory"])
def test_a_call_that_comes_during_a_write_waits_for_the_next(data, kind, packed, monkeypatch):
    connection = Watched(data.connection)
    pending = filled(kind, connection, monkeypatch)
    pending.region("region", "", 1, "")
    connection.meanwhile = lambda: pending.rows.append((9, 2, 1, 1, -1.0, -1.0, -1.0, -1.0))
    assert pending.write(connection, packed) == 3
    assert [row[0] for row in unpacked(pending.rows.head(9))] == [9]
    assert pending.write(connection, packed) == 1
    assert len(pending.rows) == 0


@pytest.mark.parametrize("kind", CLASSES)
def test_what_cannot_be_written_waits(data, kind, monkeypatch):
    connection = data.connection
    pending = filled(kind, connection, monkeypatch)
    pending.region("region", "", 1, "")
    pending.rows.append((0, 2, 1, 1, -1.0, -1.0, -1.0, -1.0))  # a number that is taken
    with pytest.raises(sqlite3.IntegrityError):
        pending.write(connection)
    assert (len(pending.rows), len(pending.tables["region"])) == (4, 1)
    assert connection.execute("select count(*) from call").fetchone() == (0,)
    assert pending.drop() == 4
    assert len(pending.rows) == 0


@pytest.mark.parametrize(("table", "column"), [("call", "seq"), ("call", "step"), ("verdict", "id")])
def test_no_run_is_appended_to_numbers_that_are_not_exact(tmp_path, table, column):
    path = tmp_path / "x.shadowrun"
    data = DataFile.create(path, INFO)
    context = data.context_id("aten::mm", "", (), "", "", Phase.FORWARD, "", "cpu")
    data.add((0, 0, context, data.verdict_id(Verdict(S.MATCH)), 1.0, 1.0, -1.0, -1.0))
    data.close()
    data.connection.execute("pragma foreign_keys = off")
    data.connection.execute(f"update {table} set {column} = {2**53 + 1}")
    with pytest.raises(DataFileError, match="damaged"):
        DataFile.create(path, INFO, append=True)
