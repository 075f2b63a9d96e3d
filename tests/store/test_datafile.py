"""The data file: what is written comes back, whatever happens to the process or the disk."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from shadowrun.errors import DataFileError
from shadowrun.run import Run, load
from shadowrun.store import DataFile
from shadowrun.store.records import first_mismatch
from shadowrun.store.schema import SCHEMA, SCHEMA_VERSION
from shadowrun.types import Cause, OpCall, OpRecord, Phase, RunInfo, Status, TensorDiff, TensorMeta, Verdict

INFO = RunInfo(
    "npu", "cpu", config={"atol": math.inf, "rtol": math.nan}, argv=("a.py",), notes=("note",), wall_s=2.0, own_s=1.0
)
MATCH = Verdict(Status.MATCH)
WRONG = Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "wrong", "by 3", 0.5)


def context(data: DataFile, op: str = "aten::mm", module: str = "Net.fc") -> int:
    return data.context_id(op, "f32[2, 3], 1.0", ("f32",), "[2, 3]", module, Phase.BACKWARD, "a.py:1 in f", "npu:0")


def record(data: DataFile, seq: int, verdict: Verdict = MATCH, **where) -> None:
    data.add((seq, 0, context(data, **where), data.verdict_id(verdict), 1.0, 2.0, -1.0, -1.0))


def nasty_diff() -> TensorDiff:
    meta = TensorMeta("f64", (2, 3), (3, 1), "npu:0", "sparse_coo")
    return TensorDiff(
        "self", meta, TensorMeta("f32", ()), 6, 5, 4, math.inf, math.nan, math.nan, 2**64 - 2**40, 0, 1, 2, 3, 4,
        (1, 2), math.nan, -math.inf, math.inf, 0.5, "stride (3, 1) against ()",
    )  # fmt: skip


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_record_comes_back_as_it_was(tmp_path: Path, in_memory: bool) -> None:
    data = DataFile.create(None if in_memory else tmp_path / "x.shadowrun", INFO)
    diffs = (nasty_diff(), TensorDiff("output 0", TensorMeta("i64", (1,)), TensorMeta("i64", (1,))))
    data.add_diffs(7, diffs)
    data.add((7, 3, context(data), data.verdict_id(WRONG, "aten::mm.out"), 1.5, -1.0, math.nan, math.inf))
    data.close()
    (found,) = Run(data).records()
    call = OpCall(7, 3, 0, "aten::mm", "f32[2, 3], 1.0", "Net.fc", Phase.BACKWARD, "a.py:1 in f", "npu:0")
    # repr, because NaN equals nothing, itself included.
    assert repr(found) == repr(OpRecord(call, WRONG, diffs, "aten::mm.out", 1.5, -1.0, math.nan, math.inf))


def test_run_info_comes_back_with_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "x.shadowrun"
    DataFile.create(path, INFO).close()
    info = load(path).info
    assert info.complete
    assert (info.argv, info.notes, info.wall_s) == (("a.py",), ("note",), 2.0)
    assert info.config == {"atol": "inf", "rtol": "nan"}


def test_filters(tmp_path: Path) -> None:
    data = DataFile.create(tmp_path / "x.shadowrun", INFO)
    record(data, 0, op="aten::mm", module="Net.a")
    record(data, 1, WRONG, op="aten::addmm", module="Net.b")
    record(data, 2, op="aten::relu", module="Net.b")
    data.close()
    run = load(data.path)

    def seqs(**filters) -> list[int]:
        return [r.call.seq for r in run.records(**filters)]

    assert seqs(op="aten::*mm") == [0, 1]
    assert seqs(op="aten::[!m]*", module="Net.b") == [1, 2]
    assert seqs(op="nothing") == []
    assert seqs(status="mismatch") == [1]
    assert seqs(status=[Status.MATCH, Status.MISMATCH]) == [0, 1, 2]
    assert seqs(step=1) == []
    assert seqs(seq=2) == [2]


def test_records_are_fetched_in_pieces_without_gaps() -> None:
    data = DataFile.create(None, INFO)
    number, verdict = context(data), data.verdict_id(MATCH)
    for seq in range(2500):
        data.add((seq, 0, number, verdict, 1.0, 1.0, -1.0, -1.0))
    data.flush()
    assert [r.call.seq for r in Run(data).records()] == list(range(2500))


def test_the_first_mismatch_is_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataFile.create(None, INFO)
    for seq in range(100):
        record(data, seq, WRONG if seq % 10 == 3 else MATCH)
    data.flush()
    read, query = [], data.query

    def counted(sql, values=()):
        rows = list(query(sql, values))
        read.append(len(rows))
        return iter(rows)

    monkeypatch.setattr(data, "query", counted)
    found = first_mismatch(data)
    assert found is not None
    assert found.call.seq == 3
    # With the differences of that call.
    assert sum(read) <= 2


def test_rows_are_flushed_by_number_and_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataFile.create(None, INFO)
    now = time.monotonic()
    monkeypatch.setattr("shadowrun.store.datafile.time.monotonic", lambda: now)
    data.flush()
    number, verdict = context(data), data.verdict_id(MATCH)
    for seq in range(999):
        data.add((seq, 0, number, verdict, 1.0, 1.0, -1.0, -1.0))
    assert len(data.rows) == 999
    data.add((999, 0, number, verdict, 1.0, 1.0, -1.0, -1.0))
    assert len(data.rows) == 0
    now += 0.6
    data.add((1000, 0, number, verdict, 1.0, 1.0, -1.0, -1.0))
    assert len(data.rows) == 0
    assert data.n_records == 1001


KILLED = """
import os, signal, sys
from pathlib import Path
from shadowrun.store import DataFile
from shadowrun.types import *
data = DataFile.create(Path(sys.argv[1]), RunInfo("npu", "cpu"))
number = data.context_id("aten::mm", "", (), "", "", Phase.FORWARD, "", "cpu")
verdict = data.verdict_id(Verdict(Status.MATCH))
for seq in range(2500):
    data.rows.append((seq, 0, number, verdict, 1.0, 1.0, -1.0, -1.0))
    if len(data.rows) == 1000:
        data.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_what_it_flushed(tmp_path: Path) -> None:
    path = tmp_path / "x.shadowrun"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, cwd=Path(__file__).parents[2])
    assert ended.returncode == -signal.SIGKILL
    run = load(path)
    assert run.counts()[Status.MATCH] == 2000
    assert not run.info.complete


def test_a_journal_of_a_killed_process_is_rolled_back(tmp_path: Path) -> None:
    """Killed in the middle of a write: the file is half new, and its journal holds the old pages."""
    path, copy = tmp_path / "x.shadowrun", tmp_path / "copy.shadowrun"
    data = DataFile.create(path, INFO)
    record(data, 0)
    data.flush()
    data.connection.execute("pragma cache_size = 1")  # spill to the file before the commit
    data.connection.execute("begin")
    data.connection.executemany("insert into op values (?, ?)", ((n, f"{n}" * 50) for n in range(3, 900)))
    for name in (path.name, path.name + "-journal"):
        shutil.copy(tmp_path / name, tmp_path / name.replace("x.", "copy."))
    data.connection.execute("rollback")
    assert copy.read_bytes() != path.read_bytes()
    assert (tmp_path / "copy.shadowrun-journal").stat().st_size > 0
    assert [r.call.op for r in load(copy).records()] == ["aten::mm"]


def test_reading_while_another_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.shadowrun"
    data = DataFile.create(path, INFO)
    record(data, 0)
    data.flush()
    run = load(path)
    reading = run.records()
    assert next(reading).call.seq == 0
    record(data, 1)
    data.flush()  # a reader in the middle of its records holds no lock
    assert data.failure == ""
    assert run.counts()[Status.MATCH] == 2


def test_rows_wait_while_the_file_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.shadowrun"
    data = DataFile.create(path, INFO)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("begin exclusive")
    record(data, 0)
    data.flush()
    assert (len(data.rows), data.failure) == (1, "")
    tried = []
    monkeypatch.setattr(data._pending, "write", lambda *_: tried.append(1))
    now = data._flushed_at
    monkeypatch.setattr("shadowrun.store.datafile.time.monotonic", lambda: now)
    for _ in range(100):
        data.flush()  # does not wait for the lock again at each call
    assert tried == []
    monkeypatch.undo()
    other.execute("commit")
    other.close()
    data.close()
    assert load(path).counts()[Status.MATCH] == 1


def test_a_full_disk_ends_the_recording_and_not_the_program(tmp_path: Path) -> None:
    path = tmp_path / "x.shadowrun"
    data = DataFile.create(path, INFO)
    record(data, 0)
    data.flush()
    pages = data.connection.execute("pragma page_count").fetchone()[0]
    data.connection.execute(f"pragma max_page_count = {pages + 2}")
    number, verdict = context(data), data.verdict_id(MATCH)
    for seq in range(1, 5001):
        data.add((seq, 0, number, verdict, 1.0, 1.0, -1.0, -1.0))
    data.close()
    assert "full" in data.failure
    assert data.n_records == 5001
    assert (len(data.rows), data._waiting["context"]) == (0, [])
    assert "recording ended early" in Run(data).info.notes[-1]
    assert load(path).counts()[Status.MATCH] >= 1
    assert load(path).info.notes[-1] == f"recording ended early: {data.failure}"
    load(path).write(path.with_suffix(".txt"))
    assert "still going on" not in path.with_suffix(".txt").read_text(encoding="utf-8")


def test_a_forked_worker_does_not_write(tmp_path: Path) -> None:
    data = DataFile.create(tmp_path / "x.shadowrun", INFO)
    pid = os.fork()
    if pid == 0:
        try:
            record(data, 7)
            data.flush()
            data.close()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    record(data, 0)
    data.close()
    assert data.failure == ""
    assert [r.call.seq for r in load(data.path).records()] == [0]


def slug(action) -> tuple[str, str]:
    with pytest.raises(DataFileError) as caught:
        action()
    return caught.value.slug, str(caught.value)


def test_missing() -> None:
    assert slug(lambda: load("/nowhere/x.shadowrun"))[0] == "data-file-missing"


def test_missing_folder() -> None:
    name, text = slug(lambda: DataFile.create(Path("/nowhere/x.shadowrun"), INFO))
    assert name == "data-file-unwritable"
    assert "/nowhere" in text


def test_folder_that_cannot_be_written() -> None:
    # /proc, because the tests may run as root, whom permissions do not stop.
    assert slug(lambda: DataFile.create(Path("/proc/x.shadowrun"), INFO))[0] == "data-file-unwritable"


@pytest.mark.parametrize("content", ["text", "sqlite", "folder"])
def test_what_is_not_ours_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.shadowrun"
    if content == "folder":
        path.mkdir()
    elif content == "text":
        path.write_text("precious")
    else:
        other = sqlite3.connect(path)
        other.execute("create table precious (x)")
        other.close()
    before = None if content == "folder" else path.read_bytes()
    assert slug(lambda: load(path))[0] == "data-file-not-ours"
    assert slug(lambda: DataFile.create(path, INFO))[0] == "data-file-not-ours"
    assert slug(lambda: DataFile.create(path, INFO, append=True))[0] == "data-file-not-ours"
    assert before is None or path.read_bytes() == before


def test_ours_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.shadowrun"
    data = DataFile.create(path, INFO)
    record(data, 0)
    data.close()
    DataFile.create(path, INFO).close()
    assert sum(load(path).counts().values()) == 0


def test_an_empty_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.shadowrun"
    path.touch()  # as made by tempfile
    DataFile.create(path, INFO).close()
    assert load(path).info.complete


def test_newer_schema(tmp_path: Path) -> None:
    path = tmp_path / "x.shadowrun"
    DataFile.create(path, INFO).close()
    later = sqlite3.connect(path)
    later.execute("pragma user_version = 99")
    later.close()
    name, text = slug(lambda: load(path))
    assert name == "data-file-newer"
    assert f"written by schema 99; this shadowrun reads up to {SCHEMA_VERSION}: upgrade" in text


@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_corrupt(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.shadowrun"
    data = DataFile.create(path, INFO)
    for seq in range(500):
        record(data, seq)
    data.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:5000] if damage == "cut" else whole[:4096] + b"\xa5" * (len(whole) - 4096))
    assert slug(lambda: list(load(path).records()))[0] == "data-file-corrupt"


def test_append_goes_on_numbering(tmp_path: Path) -> None:
    path = tmp_path / "x.shadowrun"
    first = DataFile.create(path, INFO)
    record(first, 41)
    first.add_step(5, 0.0, 1.0)
    first.add_skipped({("aten::view", "npu:0", "view"): 2})
    first.close()
    second = DataFile.create(path, INFO, append=True)
    assert (second.next_seq, second.next_step) == (42, 6)
    record(second, second.next_seq, WRONG)
    second.add_skipped({("aten::view", "npu:0", "view"): 3})
    second.close()
    run = load(path)
    assert [(r.call.seq, r.verdict.status) for r in run.records()] == [(41, "match"), (42, "mismatch")]
    assert run.counts()[Status.SKIPPED] == 5
    assert (run.info.wall_s, run.info.own_s) == (4.0, 2.0)


def test_append_refuses_other_platforms(tmp_path: Path) -> None:
    path = tmp_path / "x.shadowrun"
    DataFile.create(path, INFO).close()
    name, text = slug(lambda: DataFile.create(path, RunInfo("cuda", "cpu"), append=True))
    assert name == "data-file-append"
    assert "compares npu with cpu" in text


def test_nothing_is_appended_through_a_link(tmp_path: Path) -> None:
    """In a folder from elsewhere, `.shadowrun` may lead to another run of the user's."""
    path, link = tmp_path / "other.shadowrun", tmp_path / ".shadowrun"
    DataFile.create(path, INFO).close()
    whole = path.read_bytes()
    link.symlink_to(path)
    name, text = slug(lambda: DataFile.create(link, INFO, append=True))
    assert (name, "is a link" in text) == ("data-file-append", True)
    assert path.read_bytes() == whole


def test_the_schema_in_the_documentation_is_the_schema() -> None:
    page = (Path(__file__).parents[2] / "docs" / "datafile.md").read_text()
    assert f"```sql\n{SCHEMA}```" in page


def test_the_query_in_the_documentation_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "datafile.md").read_text()
    query = page.split("```sql\n")[1].split("```")[0]
    data = DataFile.create(None, INFO)
    data.add_diffs(0, (nasty_diff(),))
    record(data, 0, WRONG)
    data.flush()
    assert list(data.query(query)) == [("aten::mm", "a.py:1 in f", "wrong", 1, math.inf)]


def test_reading_needs_no_torch_rich_or_jinja2() -> None:
    code = (
        "import sys; from shadowrun.run import load; "
        "print(sorted({'torch', 'rich', 'jinja2', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("moved", [False, True])
def test_the_connection_is_closed_before_finalizers_run(tmp_path, monkeypatch, moved):
    """Those of a cycle run in any order, and Python 3.13's of a connection warns of one that is open."""
    monkeypatch.delattr(DataFile, "__del__")
    data = DataFile.create(tmp_path / "a", INFO)
    if moved:
        data.move(tmp_path / "b")
    connection, data.cycle = data.connection, [data]
    del data
    gc.collect()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("select 1")


def test_a_cycle_with_its_connection_is_collected_without_a_warning():
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        data = DataFile.create(None, INFO)
        data.cycle = [data]
        del data
        gc.collect()
    assert [str(w.message) for w in heard if "database" in str(w.message)] == []


@pytest.mark.parametrize("in_file", [True, False])
def test_half_a_character_loses_nothing(tmp_path: Path, in_file: bool) -> None:
    """As `os.listdir` has it in a name that is not UTF-8."""
    odd = "layer\udce9"
    path = tmp_path / "x.shadowrun"
    for k in range(2 if in_file else 1):
        data = DataFile.create(path if in_file else None, dataclasses.replace(INFO, argv=(odd,)), append=True)
        meta = TensorMeta("f32", (2,), device=odd)
        for seq in (2 * k, 2 * k + 1):
            place = data.context_id(f"aten::{odd}", odd, ("f32",), "[2]", odd, Phase.FORWARD, f"s{odd}.py:1", "cpu")
            verdict = data.verdict_id(Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, odd, odd), odd)
            data.add_diffs(seq, [TensorDiff("self", meta, meta, detail=odd)])
            data.add((seq, 0, place, verdict, 1.0, 1.0, -1.0, -1.0))
        data.add_region(odd, odd, 1, odd)
        data.add_skipped({(odd, odd, odd): 1})
        data.close()
        assert not data.failure
    run = load(path) if in_file else Run(data)
    assert [r.call.module for r in run.records()] == ["layer\\udce9"] * (4 if in_file else 2)
    assert run.info.argv == (odd,)
    run.write(tmp_path / "r.md")
    run.write(tmp_path / "r.json")


def test_whatever_fails_in_a_flush_ends_the_recording_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataFile.create(tmp_path / "x.shadowrun", INFO)
    record(data, 0)
    monkeypatch.setattr(data._pending, "write", lambda *_: 1 // 0)
    data.flush()
    assert "division" in data.failure
