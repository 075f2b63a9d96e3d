"""What is left of a damaged data file is what it was, and says what is missing."""

from __future__ import annotations

import importlib.util
import os
import sqlite3
import tracemalloc
from pathlib import Path

import pytest
import torch

import shadowrun
from shadowrun.cli.main import main
from shadowrun.store.connect import connect_existing
from shadowrun.store.datafile import DataFile
from shadowrun.store.salvage import salvaged
from shadowrun.store.validation import COLUMNS

HERE = Path(__file__).parent
PAGE = 4096
OLD = ("schema-1", "schema-4", "schema-5")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    spec = importlib.util.spec_from_file_location("sample", HERE.parent / "golden" / "sample.py")
    sample = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sample)
    folder = tmp_path_factory.mktemp("whole")
    found = {name: folder / f"{name}.shadowrun" for name in ("run", "other", "combined", *OLD)}
    data = sample.build(found["run"], steps=40, compiled=True)
    for seq in range(10_000, 13_000):  # several pages of calls below one
        data.add((seq, 41, 1, 1, 1.0, 2.0, -1.0, -1.0))
    data.close()
    sample.build(found["other"]).close()
    shadowrun.combine([found["run"], found["other"]], found["combined"])
    for name in OLD:
        connection = sqlite3.connect(found[name])
        connection.executescript((HERE / f"{name}.sql").read_text())
        connection.close()
    return found


def tables(connection: sqlite3.Connection) -> dict[str, list]:
    return {table: connection.execute(f"select * from {table}").fetchall() for table in COLUMNS if table != "meta"}


@pytest.mark.parametrize("name", ["run", "combined", *OLD])
def test_of_a_whole_file_nothing_is_missing(files, name):
    whole, found = connect_existing(files[name]), salvaged(files[name])
    assert tables(found) == tables(whole)
    note = found.execute("select value from meta").fetchone()[0]
    assert "Salvaged from a damaged file: 0 of its" in note
    assert "Rows left out" not in note
    whole.close(), found.close()
    assert "Salvaged" not in str(shadowrun.load(files[name], salvage=True).info.notes)


def in_part(path: Path, records: dict) -> int:
    """Each record that comes back is one of these; returns how many do."""
    run = shadowrun.load(path, salvage=True)
    back = list(run.records())
    assert all(repr(r.verdict) == repr(records[r.call.seq].verdict) for r in back)
    assert all(r.call.op == records[r.call.seq].call.op for r in back)
    run.findings(), run.coverage(), run.summary()
    return len(back)


@pytest.mark.parametrize("name", ["run", "schema-4", "schema-5"])
def test_cut_at_a_page(files, name, tmp_path):
    whole = files[name].read_bytes()
    records = {r.call.seq: r for r in shadowrun.load(files[name]).records()}
    path = tmp_path / "x.shadowrun"
    counts = []
    for n in [*range(PAGE, len(whole) - PAGE, 5 * PAGE), len(whole) - PAGE]:
        path.write_bytes(whole[:n])
        with pytest.raises(shadowrun.DataFileError, match="report --salvage") as error:
            shadowrun.load(path)
        assert error.value.slug == "data-file-corrupt"
        counts.append(in_part(path, records))
    assert counts == sorted(counts)
    assert counts[0] == 0
    if name == "run":
        assert counts[-1] > len(records) * 0.9


def test_any_page_may_be_lost(files, tmp_path):
    whole = files["run"].read_bytes()
    records = {r.call.seq: r for r in shadowrun.load(files["run"]).records()}
    path = tmp_path / "x.shadowrun"
    counts = []
    for at in [*range(0, 20 * PAGE, 2 * PAGE), *range(20 * PAGE, len(whole), 7 * PAGE)]:
        keep = 100 if at == 0 else 0  # the header: without it, the kind of the file is unknown
        path.write_bytes(whole[: at + keep] + bytes(PAGE - keep) + whole[at + PAGE :])
        counts.append(in_part(path, records))
    counts.sort()
    assert counts[len(counts) // 2] > len(records) * 0.8


def test_the_report_says_what_is_missing(files, tmp_path, capsys):
    path = tmp_path / "x.shadowrun"
    whole = files["run"].read_bytes()
    path.write_bytes(whole[:-PAGE])
    assert main(["report", str(path)]) == 2
    assert "`shadowrun report --salvage`" in capsys.readouterr().err
    assert main(["report", str(path), "--salvage"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Salvaged from a damaged file: 1 of its {len(whole) // PAGE} pages are missing or unreadable" in text


def test_what_is_left_of_a_run_does_not_pass(tmp_path):
    path = tmp_path / "x.shadowrun"
    with shadowrun.compare("cpu", file=path):
        for _ in range(3000):
            torch.ones(2).relu()
    assert shadowrun.load(path, salvage=True).gate().passed
    path.write_bytes(path.read_bytes()[:-PAGE])
    gate = shadowrun.load(path, salvage=True).gate()
    assert not gate.passed
    assert gate.line.startswith("FAILED: only part of a damaged data file could be read; ")


def test_without_its_information_a_run_is_unknown(files, tmp_path):
    path = tmp_path / "x.shadowrun"
    path.write_bytes(files["run"].read_bytes())
    connection = sqlite3.connect(path)
    connection.execute("update meta set value = '['")
    connection.commit()
    connection.close()
    run = shadowrun.load(path, salvage=True)
    assert (run.info.target, sum(run.counts().values()) > 3000) == ("unknown", True)
    assert "What the run was (platforms, versions, options) is lost." in run.info.notes[0]


def test_numbers_that_lead_to_nothing_are_left_out(files, tmp_path):
    path = tmp_path / "x.shadowrun"
    path.write_bytes(files["run"].read_bytes())
    connection = sqlite3.connect(path)
    connection.execute("update call set context_id = 999999 where seq >= 12000")
    connection.execute("update verdict set evidence = x'ff' where id = 2")
    connection.commit()
    connection.close()
    run = shadowrun.load(path, salvage=True)
    assert "Rows left out" in run.info.notes[0]
    assert max(r.call.seq for r in run.records()) == 11_999


def test_a_file_of_another_program_is_not_salvaged(tmp_path):
    path = tmp_path / "x.shadowrun"
    path.write_bytes(b"SQLite format 3\0" + bytes(5000))
    with pytest.raises(shadowrun.DataFileError) as error:
        DataFile.open(path, salvage=True)
    assert error.value.slug == "data-file-not-ours"


@pytest.mark.skipif(os.name != "posix", reason="files with holes")
def test_a_file_of_holes_is_not_read_into_memory(files, tmp_path):
    """It may be of any size, and weighs nothing when it is sent."""
    path = tmp_path / "x.shadowrun"
    path.write_bytes(files["run"].read_bytes()[:-PAGE])
    os.truncate(path, 2**30)
    tracemalloc.start()
    try:
        assert len(list(shadowrun.load(path, salvage=True).records())) > 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**28
    os.truncate(path, 2**40)
    with pytest.raises(shadowrun.DataFileError) as error:
        shadowrun.load(path, salvage=True)
    assert error.value.slug == "data-file-corrupt"
