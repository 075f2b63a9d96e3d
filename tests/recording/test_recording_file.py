"""A recording is read as it was written; what is damaged or hostile is refused with a clear error."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
import subprocess
import sys
import zlib

import numpy as np
import pytest

from shadowrun.errors import DataFileError
from shadowrun.recording.file_format import block_reader, recording_file, recording_writer
from shadowrun.recording.file_format.recording_file import read
from shadowrun.recording.file_format.recording_writer import Block, Writer
from shadowrun.recording.model import CALL, RESULT, Context, Form, Kind, Process, sample_positions
from shadowrun.types import Phase


def block(first):
    """Two calls: a product of two leaves, and a view of its result."""
    calls = np.zeros(2, CALL)
    calls["n_results"], calls["n_inputs"], calls["context"], calls["kernel"] = (3, 1), (2, 1), (0, 1), -1
    results = np.zeros(4, RESULT)
    results["kind"] = (Kind.LEAF, Kind.LEAF, Kind.RESULT, Kind.VIEW)
    results["base"] = (-1, -1, -1, first + 2)
    results["n_rungs"], results["n_samples"] = (24, 24, 24, 0), (2, 2, 4, 0)
    rungs = np.arange(72, dtype=np.uint64) + np.uint64(first)
    return Block(
        calls,
        results,
        np.array([first, first + 1, first + 2], np.int64),
        rungs,
        np.arange(8, dtype=np.uint64),
        np.empty(0, np.uint64),
    )


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.shadowrec"
    process = Process("a.shadowrec", provenance={"script": "12"}, skipped={"random": 3})
    writer = Writer(path, process)
    writer.context(0, Context("aten::mm", "fc", Phase.FORWARD, "a.py:1", "cpu", "[]"))
    writer.context(1, Context("aten::t", "fc", Phase.FORWARD, "a.py:2", "cpu", "[]"))
    writer.form(0, Form("float32", (2, 2), (2, 1)))
    writer.block(block(0))
    writer.block(block(4))
    writer.finish(dataclasses.replace(process, complete=True))
    return path


def test_what_is_written_is_read(path):
    recording = read(path)
    assert recording.processes == (
        Process("a.shadowrec", complete=True, provenance={"script": "12"}, skipped={"random": 3}, n_calls=4),
    )
    assert [k.op for k in recording.call_keys()] == ["aten::mm", "aten::t"] * 2
    assert recording.inputs_of(2).tolist() == [4, 5]
    assert recording.results_of(3) == range(7, 8)
    # A view has the ladder of what it is a view of.
    assert recording.source(7) == 6
    assert recording.ladder(7).tolist() == list(range(4 + 48, 4 + 72))
    assert recording.samples_of(3).tolist() == [4, 5, 6, 7]
    assert recording.form_of(0) == Form("float32", (2, 2), (2, 1))


def test_a_process_that_is_killed_leaves_its_blocks(path, tmp_path):
    script = f"""
import os, signal
from tests.recording.test_recording_file import *
writer = Writer(__import__("pathlib").Path({str(tmp_path / "b.shadowrec")!r}), Process("b.shadowrec"))
for number, op in enumerate(("aten::mm", "aten::t")):
    writer.context(number, Context(op, "", Phase.FORWARD, "", "cpu", "[]"))
writer.form(0, Form("float32", (2, 2), (2, 1)))
writer.block(block(0))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    recording = read(tmp_path / "b.shadowrec")
    assert (len(recording.calls), recording.processes[0].complete) == (2, False)


def test_reading_imports_no_torch(path):
    code = "import sys; from pathlib import Path; from shadowrun.recording.file_format.recording_file import read; "
    code += "read(Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 0


def changed(path, sql, *values):
    with sqlite3.connect(path) as connection:
        connection.execute(sql, values)
    connection.close()


def packed(array):
    return zlib.compress(array.tobytes())


def rows(**columns):
    results = block(0).results.copy()
    for name, values in columns.items():
        results[name] = values
    return packed(results)


BOMB = zlib.compress(bytes(10**8), 1)
DAMAGES = {
    "a view without end": ("update block set results = ? where id = 1", rows(base=(-1, -1, -1, 3))),
    "a form": ("update block set results = ? where id = 1", rows(form=(0, 0, 0, 1))),
    "a kind": ("update block set results = ? where id = 1", rows(kind=9)),
    "a ladder": ("update block set rungs = ? where id = 1", b"12345678"),
    "an input": ("update block set inputs = ? where id = 1", packed(np.array([0, 1, 99], np.int64))),
    "a bomb": ("update block set calls = ? where id = 1", BOMB),
    "a count": ("update block set n_calls = ? where id = 1", 2**40),
    "no zlib": ("update block set calls = ? where id = 1", b"x"),
    "a phase": ("update context set phase = ? where id = 1", "sideways"),
    "a long name": ("update context set module = ?", "x" * 10_001),
    "a long name after a NUL": ("update context set module = ?", "a\0" + "x" * 40_000),
    "a shape": ("update form set shape = ?", "[1e9]"),
    "information": ("update process set info = ?", "[" * 100_000),
    "no samples": ("update block set samples = ? where id = 1", b""),
    "a bomb of samples": ("update block set sample_tops = ? where id = 1", BOMB),
    "too few tops": ("update block set sample_tops = ? where id = 1", zlib.compress(bytes(7))),
    "no tops": ("update block set sample_tops = ? where id = 1", b""),
    "a trigger": ("create trigger t after insert on block begin select 1; end",),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_refused(path, name):
    changed(path, *DAMAGES[name])
    with pytest.raises(DataFileError) as caught:
        read(path)
    assert caught.value.slug == "data-file-corrupt"


@pytest.mark.parametrize("content", [b"", b"text", b"SQLite format 3\0" + bytes(100)])
def test_what_is_no_recording_is_refused(tmp_path, content):
    path = tmp_path / "a.shadowrec"
    path.write_bytes(content)
    with pytest.raises(DataFileError) as caught:
        read(path)
    assert caught.value.slug == "data-file-not-ours"
    with pytest.raises(DataFileError) as caught:
        read(tmp_path / "missing.shadowrec")
    assert caught.value.slug == "data-file-missing"


def test_nothing_but_a_recording_is_replaced(tmp_path, path):
    other = tmp_path / "b.shadowrec"
    other.write_text("mine")
    link = tmp_path / "c.shadowrec"
    link.symlink_to(path)
    for taken in (other, link, tmp_path / "missing" / "d.shadowrec"):
        with pytest.raises(DataFileError) as caught:
            Writer(taken, Process("b"))
        assert caught.value.slug == "data-file-unwritable"
    assert other.read_text() == "mine"
    Writer(path, Process("again")).finish(Process("again"))
    assert read(path).processes[0].name == "again"


@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 1000, 10**12])
def test_samples_lie_in_the_tensor_and_apart(n):
    found = sample_positions(n)
    assert len(found) == min(n, 64)
    assert len(set(found.tolist())) == len(found)
    assert all(0 <= i < n for i in found.tolist())


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "bfloat16", "float32", "complex64", "float64", "float8_e4m3fn", "?"]
)
def test_samples_are_kept_at_the_width_of_their_dtype(tmp_path, dtype):
    width = {"bool": 1, "uint8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float32": 4, "complex64": 4}.get(dtype, 8)
    path = tmp_path / "a.shadowrec"
    writer = Writer(path, Process("a.shadowrec"))
    for number in (0, 1):
        writer.context(number, Context("aten::mm", "", Phase.FORWARD, "", "cpu", "[]"))
    writer.form(0, Form(dtype, (2, 2), (2, 1)))
    given = block(0)
    given.samples[:] = 2 ** (8 * width) - 1
    given.results["n_rungs"] = 0
    writer.block(dataclasses.replace(given, rungs=given.rungs[:0]))
    writer.finish(Process("a.shadowrec"))
    assert read(path).samples.tolist() == [2 ** (8 * width) - 1] * 8
    with contextlib.closing(sqlite3.connect(path)) as connection:
        lower, tops = connection.execute("select samples, sample_tops from block").fetchone()
    assert (len(lower), zlib.decompress(tops)) == (8 * (width - 1), bytes([255]) * 8)


def test_samples_of_several_dtypes_in_turn(tmp_path):
    dtypes = ["float32", "bool", "int64", "uint4", "bfloat16"]
    results = np.zeros(40, RESULT)
    results["form"], results["n_samples"], results["base"] = np.arange(40) * 7 // 3 % 5, np.arange(40) % 9, -1
    limits = np.array([2**32 - 1, 255, 2**64 - 1, 0, 2**16 - 1], np.uint64)
    limits = np.repeat(limits[results["form"]], results["n_samples"])
    samples = np.random.default_rng(0).integers(0, 2**64, len(limits), np.uint64) & limits
    calls = np.zeros(1, CALL)
    calls["n_results"], calls["kernel"] = 40, -1
    path, empty = tmp_path / "a.shadowrec", np.empty(0, np.uint64)
    writer = Writer(path, Process("a.shadowrec"))
    writer.context(0, Context("aten::mm", "", Phase.FORWARD, "", "cpu", "[]"))
    for number, dtype in enumerate(dtypes):
        writer.form(number, Form(dtype, (64,), (1,)))
    writer.block(Block(calls, results, empty.view(np.int64), empty, samples, empty))
    writer.finish(Process("a.shadowrec"))
    assert read(path).samples.tolist() == samples.tolist()


def test_a_commit_that_was_killed_is_rolled_back(path):
    """The journal that it leaves made the recording unreadable."""
    script = f"""
import os, signal, sqlite3
connection = sqlite3.connect({str(path)!r}, isolation_level=None)
connection.execute("pragma cache_size = 1")
connection.execute("begin")
for n in range(50):
    connection.execute("insert into content values (?, '', '[]', zeroblob(9000))", (n,))
connection.execute("delete from context")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert path.with_name(path.name + "-journal").exists()
    assert len(read(path).calls) == 4


def test_views_of_views_are_followed_at_once(path):
    """To follow each from its own place took minutes."""
    n = 50_000
    results = np.zeros(n, RESULT)
    results["base"], results["kind"] = np.arange(-1, n - 1), Kind.VIEW
    calls = np.zeros(1, CALL)
    calls["n_results"], calls["kernel"] = n, -1
    sql = "update block set calls = ?, results = ?, inputs = ?, n_calls = 1, n_results = ?, rungs = ?"
    sql += ", samples = x'', sample_tops = ?"
    changed(path, "delete from block where id = 2")
    changed(path, sql, packed(calls), packed(results), packed(calls[:0]), n, b"", packed(calls[:0]))
    recording = read(path)
    assert {recording.source(row) for row in range(n)} == {0}


def test_columns_in_proportion_to_the_file(path):
    """A megabyte became five gigabytes."""
    n = 1 << 20
    calls = np.zeros(n // 65_535 + 1, CALL)
    calls["n_results"], calls["kernel"] = 65_535, -1
    calls["n_results"][-1] = n % 65_535
    results = np.zeros(n, RESULT)
    results["base"] = -1
    row = (len(calls), n, packed(calls), packed(results), packed(calls[:0]), packed(calls[:0]))
    for _ in range(4):
        changed(path, "insert into block values (null, 0, ?, ?, ?, ?, ?, x'', x'', ?, x'')", *row)
    with pytest.raises(DataFileError, match="far larger than the file"):
        read(path)


def test_samples_in_proportion_to_the_file(path):
    """Samples of one byte are compressed: a row of results may have 255 of them."""
    n = 1 << 18
    calls = np.zeros(n // 65_535 + 1, CALL)
    calls["n_results"], calls["kernel"] = 65_535, -1
    calls["n_results"][-1] = n % 65_535
    results = np.zeros(n, RESULT)
    results["base"], results["n_samples"] = -1, 255
    changed(path, "update form set dtype = 'bool'")
    changed(path, "delete from block")
    tops = zlib.compress(bytes(255 * n))
    row = (len(calls), n, packed(calls), packed(results), packed(calls[:0]), tops)
    changed(path, "insert into block values (null, 0, ?, ?, ?, ?, ?, x'', x'', ?, x'')", *row)
    with pytest.raises(DataFileError, match="far larger than the file"):
        read(path)


def test_an_older_schema_is_named(path):
    changed(path, "pragma user_version = 1")
    with pytest.raises(DataFileError, match="schema 1") as caught:
        read(path)
    assert caught.value.slug == "data-file-older"


def test_processes_and_forms_are_not_multiplied(path, monkeypatch):
    """The forms were gone through for each process."""
    n = 1000
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executemany("insert into process values (?, ?)", ((k, '{"name": ""}') for k in range(1, n)))
        connection.executemany(
            "insert into form values (?, 'int64', '[]', '[]', 'strided', '')", ((k,) for k in range(1, n))
        )
        connection.commit()
    looked_up = []
    monkeypatch.setattr(block_reader, "n_rungs", lambda dtype: looked_up.append(dtype) or 24)
    assert len(read(path).processes) == n
    assert len(looked_up) == n


def test_a_damaged_header_is_damage(path):
    """It was called unreadable."""
    data = bytearray(path.read_bytes())
    data[18] = 2  # wants a write-ahead log
    path.write_bytes(data)
    with pytest.raises(DataFileError) as caught:
        read(path)
    assert caught.value.slug == "data-file-corrupt"


def test_ranks_of_two_files_are_counted_once(path, tmp_path):
    """Each rank was counted in all of them."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executemany(
            "insert into process values (?, ?)", ((k, f'{{"name": "", "rank": {k}}}') for k in range(1, 3000))
        )
        connection.commit()
    with pytest.raises(DataFileError) as caught:
        recording_file.read_all([path, path])
    assert caught.value.slug == "data-file-ranks"
    assert len(str(caught.value)) < 300


@pytest.mark.skipif(recording_writer.core is None, reason="no C extension")
@pytest.mark.parametrize("n_results", [0, 1, 500])
def test_samples_are_split_in_c_as_in_numpy(n_results, monkeypatch):
    rng = np.random.default_rng(n_results)
    results = np.zeros(n_results, RESULT)
    widths = [4, 2, 8, 1, 0]
    results["form"] = rng.integers(0, len(widths), n_results)
    results["n_samples"] = rng.integers(0, 129, n_results)
    samples = rng.integers(0, 2**64, int(results["n_samples"].sum(dtype=np.int64)), np.uint64)
    in_c = recording_writer._split(samples, results, widths)
    with pytest.raises(ValueError, match="do not fit"):
        recording_writer._split(np.zeros(len(samples) + 1, np.uint64), results, widths)
    monkeypatch.setattr(recording_writer, "core", None)
    assert in_c == recording_writer._split(samples, results, widths)
