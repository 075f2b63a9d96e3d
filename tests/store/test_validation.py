"""Data files are untrusted: a file that differs from what shadowrun writes is refused, quickly and in one line."""

from __future__ import annotations

import io
import json
import os
import sqlite3
from typing import TYPE_CHECKING

import pytest

import shadowrun
from shadowrun.cli.main import main
from shadowrun.errors import DataFileError
from shadowrun.store import validation
from shadowrun.store.datafile import DataFile
from shadowrun.studies.sweep.cases import Case, CaseFinding, CaseOutcome, Kind, Part
from shadowrun.studies.sweep.coverage_file import CoverageFile, SweepInfo
from shadowrun.types import Cause, Phase, RunInfo, Status, TensorDiff, TensorMeta, Verdict

if TYPE_CHECKING:
    from pathlib import Path

META = TensorMeta("f32", (2, 3))
ENDLESS = "with recursive n (i) as (select 1 union all select i + 1 from n) select i"
VIEW = (
    f"create view call as {ENDLESS} as seq, 0 as step, 1 as context_id, 1 as verdict_id, 1 as ref_ns, 1 as target_ns, "
    "null as drift_abs, null as drift_rel from n"
)


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "x.shadowrun"
    data = DataFile.create(path, RunInfo("npu", "cpu"))
    place = data.context_id("aten::mm", "f32[2, 3]", ("f32",), "[2, 3]", "Net", Phase.FORWARD, "a.py:1 in f", "npu:0")
    for seq in range(10):
        data.add((seq, 0, place, data.verdict_id(Verdict(Status.MISMATCH, Cause.LAYOUT)), 1.0, 1.0, -1.0, -1.0))
        data.add_diffs(seq, [TensorDiff("output 0", META, META, 6, 1, 1, 0.1, 0.1, 0.1, 3, worst_index=(1, 2))])
    data.close()
    return path


@pytest.fixture
def sweep(tmp_path) -> Path:
    path = tmp_path / "x.shadowcov"
    file = CoverageFile.begin(path, SweepInfo("npu", "cpu"))
    file.add(
        Case("exp", "float32", Part.FORWARD, 0),
        CaseOutcome.from_findings([CaseFinding(Kind.MISMATCH, "aten::exp")], "f32[2]"),
    )
    file.close()
    return path


def edit(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for sql in statements:
        connection.execute(sql)
    connection.close()


def refused(path: Path) -> str:
    """The message."""
    with pytest.raises(DataFileError) as error:
        CoverageFile.open(path) if path.suffix == ".shadowcov" else shadowrun.load(path)
    assert error.value.slug == "data-file-corrupt"
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("statements", "said"),
    [
        (
            ["alter table call rename to was", VIEW],
            "it has the table 'was'",
        ),
        (["create view more as select 1"], "it has the view 'more', which shadowrun did not make"),
        (["create trigger t after insert on op begin delete from op; end"], "it has the trigger 't'"),
        (["create index i on op (length(name))"], "it has the index 'i'"),
        (["create index i on op (name)"], "it has the index 'i'"),
        (["alter table op add column more as (hex(name))"], "it has the table 'op'"),
        (["alter table op add column more text default 'x'"], "it has the table 'op'"),
        (["alter table op add column more text check (length(more) > 0)"], "it has the table 'op'"),
        (["create table more (a)"], "it has the table 'more'"),
        (["create virtual table more using fts5 (a)"], "it has the table 'more'"),
        (["drop table diff"], "it lacks the table 'diff'"),
        (["drop table region"], "it lacks the table 'region'"),
        (["drop table diff", f"create view diff as {ENDLESS} from n"], "it has the view 'diff'"),
        (["drop table region", "create table region (op_id integer primary key, backend, site)"], "region"),
        (["drop table op", "create table op (id integer primary key, name text not null)"], "it has the table 'op'"),
        (["pragma user_version = 4"], "it has the table 'api'"),
        (["pragma user_version = 5"], "it has the table 'api'"),
        (["pragma user_version = 0"], "there is no schema 0"),
        (["pragma user_version = -7"], "there is no schema -7"),
    ],
)  # fmt: skip
def test_another_schema(path, statements, said):
    edit(path, *statements)
    assert said in refused(path)


def test_comments_and_spaces_of_a_schema_do_not_matter(path):
    edit(
        path,
        "pragma writable_schema = on",
        "update sqlite_master set sql = replace(sql, ' not null', '\tnot /* x */\nnull -- y\n')",
    )
    assert shadowrun.load(path).counts()[Status.MISMATCH] == 10


def test_what_looks_like_a_comment_in_a_string_is_none(path):
    hidden = "update sqlite_master set sql = replace(sql, 'name text not null', 'name text default ''--'' not null')"
    edit(path, "pragma writable_schema = on", hidden)
    # Each table with a name has it; the first is named.
    assert any(f"'{table}'" in refused(path) for table in ("api", "tensor", "op"))


@pytest.mark.parametrize(
    ("table", "ours", "theirs"),
    [
        # To SQLite a space beyond ASCII is part of a name: types, and no condition, are left.
        ("context", "not null references op", "not' || char(160) || 'null references op"),
        ("call", "integer primary key", "integer' || char(8195) || 'primary key"),
        ("diff", "rmse real", "rmse' || char(133) || 'real"),
    ],
    ids=["no-not-null", "no-key", "column"],
)
def test_a_schema_is_read_as_sqlite_reads_it(path, table, ours, theirs):
    changed = f"update sqlite_master set sql = replace(sql, '{ours}', '{theirs}') where name = '{table}'"
    edit(path, "pragma writable_schema = on", changed)
    assert f"{table!r}, which shadowrun did not make" in refused(path)


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("update outcome set status = 'odd'", "outcome.status"),
        ("update outcome set cause = 'odd'", "outcome.cause"),
        ("update outcome set explanation = x'ff'", "outcome.explanation"),
        ("update context set phase = 'odd'", "context.phase"),
        ("update context set module = cast(x'ff' as text)", "context.module"),
        ("update call set step = 'x'", "call.step"),
        ("update call set ref_ns = -5", "call.ref_ns"),
        ("update call set seq = 9223372036854775807 where seq = 9", "call.seq"),
        ("update call set drift_abs = 'much'", "call.drift_abs"),
        ("update call set context_id = 77", "a row of call refers to a missing row of context"),
        ("update form set shape = '[1e9]'", "form.shape"),
        ("update form set shape = '[[[1]]]'", "form.shape"),
        ("update form set stride = printf('[%.*c]', 9000, '1')", "form.stride"),
        ("update form set device = printf('%.*c', 1001, 'x')", "form.device"),
        # SQLite counts the characters of a text up to the first NUL.
        ("update form set device = 'a' || char(0) || printf('%.*c', 9000, 'x')", "form.device"),
        ("update tensor set name = 'a' || char(0) || printf('%.*c', 9000, 'x')", "tensor.name"),
        ("update diff set max_ulp = 9e999", "diff.max_ulp"),
        ("update diff set max_abs = 'x'", "diff.max_abs"),
        ("update diff set worst_index = '[x]'", "diff.worst_index"),
        ("update diff set position = 65536", "diff.position"),
        ("update verdict set confidence = 'sure'", "verdict.confidence"),
        ("delete from meta", "no run information"),
        ("update meta set value = '['", "JSONDecodeError"),
        ("update meta set value = '[1]'", "is not of type dict"),
        ("update meta set value = '{\"target\": 1, \"ref\": \"cpu\"}'", "1 is not of type str"),
        ("update meta set value = '{\"target\": \"npu\"}'", "TypeError"),
        ("update meta set value = json_set(value, '$.world_size', 999999999)", "rank 0 of 999999999"),
        ("update meta set value = json_set(value, '$.budget', json('{\"ratio\": 1}'))", "the budget lacks"),
        ("update meta set value = json_set(value, '$.config', json('{\"slow_ratio\": \"x\"}'))", "slow_ratio"),
        ("update meta set value = replace(value, '\"argv\": []', '\"argv\": ' || printf('%.*c', 9999, '['))", "rror"),
        ("insert into source values (0, 'a', '{}', 0)", "its information cannot be read"),
    ],
)  # fmt: skip
def test_a_value_that_shadowrun_does_not_write(path, sql, said):
    edit(path, sql)
    assert said in refused(path)


def test_a_name_may_have_a_thousand_characters_of_any_alphabet(path):
    edit(path, "update form set device = replace(printf('%.*c', 1000, 'x'), 'x', char(128512))")
    assert shadowrun.load(path).findings()


@pytest.mark.parametrize("rows", ["(0, 0), (1, 0)", "(0, 0), (1, -5)", "(0, 0), (2, 10)", "(0, 0), (1, 4)", "(1, 0)"])
def test_runs_of_a_combined_file_have_blocks_in_order(path, rows):
    edit(
        path,
        f"insert into source select v.column1, 'a', value, v.column2 from meta, (values {rows}) v",
    )
    said = refused(path)
    assert any(words in said for words in ("runs are not in order", "belongs to no run", "source.first_seq"))


def test_a_shape_without_elements_has_no_worst_place(path):
    edit(path, "update form set shape = '[0, 3]'")
    assert next(iter(shadowrun.load(path).records())).diffs[0].worst_index == ()


@pytest.mark.parametrize(
    "sql",
    [
        "update result set kind = 'odd'", "update result set part = 'odd'", "update result set sample = -3",
        "update finding set cause = 'odd'", "update finding set message = x'00'", "update operator set name = 5.5e3",
        "update result_finding set finding_id = 9", "update meta set value = '{}'", "create view v as select 1",
        "drop table task", "update meta set value = json_set(value, '$.seed', 'x')",
    ],
)  # fmt: skip
def test_a_coverage_file_that_shadowrun_does_not_write(sweep, sql):
    edit(sweep, sql) if "5.5e3" not in sql else edit(sweep, "update operator set name = x'35'")
    refused(sweep)


def test_a_query_has_an_end(path, monkeypatch):
    monkeypatch.setattr(validation, "_STEPS", 1_000_000)
    monkeypatch.setattr(validation, "_STEPS_PER_BYTE", 0)
    data = DataFile.open(path)
    for _ in range(20):  # each query has a budget of its own
        assert len(list(data.query("select 1 from call a, call b, call c"))) == 1000
    with pytest.raises(DataFileError, match="interrupted"):
        data.query(f"{ENDLESS} from n")


def naming_journal(path: Path, victim: Path, head: bytes) -> None:
    """A journal that ends in a name, which SQLite would remove."""
    name = str(victim).encode()
    tail = b"\x00\x00\x00\x03" + name + len(name).to_bytes(4, "big") + (sum(name) % 2**32).to_bytes(4, "big")
    path.with_name(path.name + "-journal").write_bytes(head + tail + MAGIC)


MAGIC = bytes.fromhex("d9d505f920a163d7")
HEAD = (MAGIC + b"".join(n.to_bytes(4, "big") for n in (0, 0, 1, 512, 4096))).ljust(512, b"\x00")


@pytest.mark.parametrize(
    "head", [HEAD, HEAD[:100], b"x"], ids=["long", "short", "shortest"]
)  # SQLite looks for a name in short ones, too
@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("kind", ["path", "sweep"])
def test_a_journal_that_names_another_file_is_not_rolled_back(request, tmp_path, kind, head, through):
    """SQLite would remove that file; it looks for a name in short journals, too."""
    path = request.getfixturevalue(kind)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    naming_journal(path, victim, head)
    if through:  # SQLite looks next to the target of the link
        (tmp_path / "links").mkdir()
        link = tmp_path / "links" / f"y{path.suffix}"
        link.symlink_to(path)
        path = link
    assert "names another file" in refused(path)
    assert victim.read_text() == "precious"


def journal_of_first_page(path: Path, modes: bytes) -> None:
    """A journal that SQLite rolls back: the first page as it is, but for the bytes that say how it is written."""
    data = path.read_bytes()
    size = int.from_bytes(data[16:18], "big")
    page = data[:18] + modes + data[20:size]
    check = 7 + sum(page[k] for k in range(size - 200, 0, -200))
    head = b"".join(n.to_bytes(4, "big") for n in (1, 7, len(data) // size, 512, size))
    record = b"\x00\x00\x00\x01" + page + (check % 2**32).to_bytes(4, "big")
    path.with_name(path.name + "-journal").write_bytes((MAGIC + head).ljust(512, b"\x00") + record)


@pytest.mark.parametrize("kind", ["path", "sweep"])
def test_a_journal_does_not_make_a_write_ahead_log(request, kind):
    """SQLite rolls it back and opens the log in one statement."""
    path = request.getfixturevalue(kind)
    journal_of_first_page(path, b"\x01\x01")
    CoverageFile.open(path).close() if kind == "sweep" else shadowrun.load(path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # it was rolled back
    for modes in (b"\x02\x02", b"\x01\x02"):
        journal_of_first_page(path, modes)
        assert "gives it a write-ahead log" in refused(path)
        assert {p.name for p in path.parent.iterdir()} == {path.name, path.name + "-journal"}


@pytest.mark.parametrize("n_before", [0, 1 << 20, (1 << 20) - 1, (1 << 20) - 18, (1 << 20) - 19, (1 << 20) - 20])
def test_first_pages_are_found_wherever_a_journal_has_them(n_before):
    found = validation._has_other_modes
    page = b"SQLite format 3\x00\x10\x00"
    assert found(io.BytesIO(b"\x00" * n_before + page + b"\x01\x02"))
    assert not found(io.BytesIO(b"\x00" * n_before + page + b"\x01\x01"))


@pytest.mark.skipif(not hasattr(os, "SEEK_DATA"), reason="no holes")
@pytest.mark.parametrize(("n_before", "n_in_hole"), [(1 << 40, 0), (1 << 40, 2), ((1 << 40) - 4096, 4)])
def test_holes_of_a_journal_are_not_read(tmp_path, n_before, n_in_hole):
    """A terabyte of them takes no disk space; pages between them are found, also one whose end is in a hole."""
    found = validation._has_other_modes
    page = b"SQLite format 3\x00\x10\x00"
    for modes, is_other in ((b"\x01\x02", True), (b"\x01\x01", bool(n_in_hole))):
        path = tmp_path / f"{is_other}{modes[1]}"
        with path.open("wb") as file:
            file.seek(n_before + 4096 - len(page + modes) + n_in_hole)
            file.write((page + modes)[: len(page + modes) - n_in_hole])
            file.truncate(n_before * 2)
        with path.open("rb", buffering=0) as file:
            assert found(file) == is_other


@pytest.mark.parametrize("ending", ["-wal", "-shm", "-journal"])
@pytest.mark.parametrize("kind", ["path", "sweep"])
def test_nothing_next_to_a_file_leads_to_another_file(request, tmp_path, kind, ending):
    """Who adds a run would write through the link."""
    path = request.getfixturevalue(kind)
    victim = tmp_path / "victim"
    victim.write_bytes(b"\x00precious")
    path.with_name(path.name + ending).symlink_to(victim)
    refused(path)
    assert victim.read_bytes() == b"\x00precious"


@pytest.mark.parametrize("kind", ["path", "sweep"])
def test_a_file_with_a_write_ahead_log_is_not_ours(request, kind):
    path = request.getfixturevalue(kind)
    edit(path, "pragma journal_mode = wal")
    assert "write-ahead log" in refused(path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
@pytest.mark.parametrize("command", ["report", "repro", "support", "coverage"])
def test_a_pipe_is_not_waited_for(tmp_path, capsys, command):
    os.mkfifo(tmp_path / "x")
    assert main([command, str(tmp_path / "x")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_damaged_file_of_ours_may_be_recorded_over(path):
    path.write_bytes(path.read_bytes()[:5000])
    assert "record the run again" in refused(path)
    DataFile.create(path, RunInfo("npu", "cpu")).close()
    assert shadowrun.load(path).info.target == "npu"


def test_nothing_of_a_file_is_read_before_its_schema_is_known(path, sweep, monkeypatch):
    """A view in the place of the very first table."""
    for file in (path, sweep):
        edit(file, "alter table meta rename to was", f"create view meta as {ENDLESS} as key, i as value from n")
    monkeypatch.setattr(validation, "_STEPS", 1_000_000)
    monkeypatch.setattr(validation, "_STEPS_PER_BYTE", 0)
    for file in (path, sweep):
        assert "which shadowrun did not make" in refused(file)


@pytest.mark.parametrize("field", ["wall_s", "own_s", "behind_s", "config", "budget"])
@pytest.mark.parametrize("value", [10**400, -(10**400), 2**65])
def test_a_number_that_no_float_holds(path, field, value):
    """JSON has whole numbers of any length."""
    connection = sqlite3.connect(path, isolation_level=None)
    ((text,),) = connection.execute("select value from meta").fetchall()
    whole = dict.fromkeys(("ratio", "achieved", "n_signatures", "n_verified", "n_calls", "n_replayed"), 1)
    whole |= {"n_steps": 1, "n_unwatched": value}
    given = {"config": {"slow_ratio": value}, "budget": whole}.get(field, value)
    connection.execute("update meta set value = ?", (json.dumps(json.loads(text) | {field: given}),))
    connection.close()
    refused(path)


@pytest.mark.parametrize("field", ["seed", "wall_s"])
def test_a_number_of_a_sweep_that_no_float_holds(sweep, field):
    connection = sqlite3.connect(sweep, isolation_level=None)
    ((text,),) = connection.execute("select value from meta").fetchall()
    connection.execute("update meta set value = ?", (json.dumps(json.loads(text) | {field: 10**400}),))
    connection.close()
    refused(sweep)
