"""Files of ranks in one: nothing is lost, nothing is mixed up, and what cannot be combined is named."""

from __future__ import annotations

import dataclasses
import math
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import shadowrun
from shadowrun import report
from shadowrun.errors import DataFileError, ShadowrunWarning
from shadowrun.run import Run, combine, load
from shadowrun.store import DataFile
from shadowrun.store import connect as opening
from shadowrun.store.combine.combine_files import choose, name_together
from shadowrun.store.combine.combined_runs import ranges
from shadowrun.types import Cause, Phase, RunInfo, Status, TensorDiff, TensorMeta, Verdict

MATCH = Verdict(Status.MATCH)
WRONG = Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "wrong by 3", "evidence", 0.5)
V1 = Path(__file__).parent / "schema-1.sql"


def info(rank: int = 0, world: int = 4, **changes) -> RunInfo:
    made = RunInfo(
        "npu",
        "cpu",
        {"name": "Simulated NPU", "driver": "7"},
        {"threads": 2},
        {"torch": "2.13.0"},
        ("train.py",),
        {"slow_ratio": 10.0},
        rank,
        world,
        f"2026-01-01T00:00:0{rank % 10}",
        2.0 + rank,
        1.0,
    )
    return dataclasses.replace(made, **changes)


def build(path: Path, about: RunInfo, wrong: tuple[int, ...] = (), n: int = 10, end: bool = True, **options) -> Path:
    """`n` calls of two operators; those in `wrong` mismatch."""
    data = DataFile.create(path, about, **options)
    contexts = [
        data.context_id(op, f"f32[{about.rank}]", ("f32",), "[2]", "Net.fc", Phase.FORWARD, "a.py:1 in f", "npu:0")
        for op in (f"aten::only{about.rank}", "aten::mm")
    ]
    for seq in range(n):
        meta = TensorMeta("f32", (seq, about.rank), (1, 1), f"npu:{about.rank}")
        if seq in wrong:
            diff = TensorDiff("output 0", meta, meta, 4, 3, 2, seq + about.rank / 10, math.nan, worst_index=(1,))
            data.add_diffs(seq, [diff])
        verdict = data.verdict_id(WRONG if seq in wrong else MATCH, "aten::k" if seq in wrong else "")
        data.add((seq, seq // 5, contexts[seq % 2], verdict, 1.0 + seq, 2.0, -1.0, math.nan))
    data.add_step(0, 0.0, 1.0 + about.rank)
    data.add_skipped({("aten::view", f"npu:{about.rank}", "view"): 2})
    if end:
        data.close()
    data.flush()
    data.connection.close()
    return path


def ranks(folder: Path, world: int = 4, wrong: dict[int, tuple[int, ...]] | None = None) -> list[Path]:
    return [
        build(folder / f"run.{rank}.shadowrun", info(rank, world), (wrong or {}).get(rank, ())) for rank in range(world)
    ]


def test_every_record_comes_back_with_its_rank(tmp_path: Path) -> None:
    paths = ranks(tmp_path, wrong={1: (3, 4), 3: (9,)})
    run = combine(reversed(paths), tmp_path / "run.shadowrun")
    assert [source.info.rank for source in run.sources()] == [0, 1, 2, 3]
    expected = []
    for source, path in zip(run.sources(), paths, strict=True):
        for record in load(path).records():
            call = dataclasses.replace(record.call, seq=record.call.seq + source.first_seq)
            expected.append(dataclasses.replace(record, call=call))
    # repr, because NaN equals nothing.
    assert repr(list(run.records())) == repr(expected)
    assert [r.call.rank for r in run.records(status="mismatch")] == [1, 1, 3]
    assert [r.call.seq for r in run.records(op="aten::only2")] == [2000, 2002, 2004, 2006, 2008]
    assert next(run.records(seq=3009)).call.rank == 3


def test_sums_are_those_of_the_parts(tmp_path: Path) -> None:
    paths = ranks(tmp_path, wrong={0: (1,), 2: (1, 5)})
    run = combine(paths, tmp_path / "run.shadowrun")
    parts = [load(path) for path in paths]
    for status in Status:
        assert run.counts()[status] == sum(part.counts()[status] for part in parts)
    assert run.counts()[Status.SKIPPED] == 8
    assert re.search(r"^aten::view +8 ", report.render(run, "txt").partition("Skipped on purpose")[2], re.MULTILINE)
    (mm,) = (row for row in run.summary() if row.op == "aten::mm")
    assert (mm.n_calls, mm.n_mismatch, mm.max_abs) == (20, 3, 5.2)
    assert mm.ref_total_us == sum(row.ref_total_us for part in parts for row in part.summary() if row.op == "aten::mm")
    assert run.coverage().n_operators == 5
    assert [(step.step, step.wall_s) for step in run.steps()] == [(0, 4.0)]
    ids = run._data.query("select count(*) from op union all select count(*) from site")
    assert list(ids) == [(6,), (1,)]


def test_one_finding_for_all_ranks_and_one_for_a_single_rank(tmp_path: Path) -> None:
    paths = ranks(tmp_path, wrong={0: (1,), 1: (1,), 2: (1, 2), 3: (1,)})
    run = combine(paths, tmp_path / "run.shadowrun")
    findings = {finding.op: finding for finding in run.findings()}
    assert set(findings) == {"aten::mm", "aten::only2"}
    assert (findings["aten::mm"].runs, findings["aten::mm"].seen_on) == ((0, 1, 2, 3), "ranks 0-3")
    assert (findings["aten::only2"].seen_on, findings["aten::only2"].everywhere) == ("rank 2 only", False)
    for kind in ("txt", "md", "html"):
        text = report.render(run, kind)
        assert "ranks 0-3" in text
        assert "rank 2 only: wrong by 3" in text or kind == "md"
        assert "rank 2 only" in text
        assert "4 files: ranks 0-3 of 4" in text


def test_the_first_divergence_is_that_of_the_earliest_rank(tmp_path: Path) -> None:
    paths = ranks(tmp_path, wrong={0: (7,), 2: (3,), 3: (3,)})
    first = combine(paths, tmp_path / "run.shadowrun").first_divergence()
    assert (first.call.rank, first.call.seq) == (2, 2003)
    finding = load(tmp_path / "run.shadowrun").findings()[0]
    assert (finding.first_seq, finding.first_step) == (2003, 0)


def test_combined_files_can_be_combined_and_added_to(tmp_path: Path) -> None:
    paths = ranks(tmp_path, wrong={1: (3,), 2: (5,)})
    combine(paths[:2], tmp_path / "a.shadowrun")
    combine(paths[2:3], tmp_path / "b.shadowrun")
    twice = combine([tmp_path / "a.shadowrun", tmp_path / "b.shadowrun", paths[3]], tmp_path / "c.shadowrun")
    added = combine(paths[2:], tmp_path / "a.shadowrun", append=True)
    at_once = combine(paths, tmp_path / "d.shadowrun")
    for run in (twice, added):
        assert repr(list(run.records())) == repr(list(at_once.records()))
        assert run.sources() == at_once.sources()
        assert run.findings() == at_once.findings() or repr(run.findings()) == repr(at_once.findings())


def test_a_run_that_is_there_already_is_refused(tmp_path: Path) -> None:
    paths = ranks(tmp_path)
    combine(paths[:2], tmp_path / "a.shadowrun")
    assert slug(lambda: combine(paths[1:], tmp_path / "a.shadowrun", append=True))[0] == "combine-twice"
    assert len(load(tmp_path / "a.shadowrun").sources()) == 2


def test_no_run_is_recorded_into_a_combined_file(tmp_path: Path) -> None:
    combine(ranks(tmp_path), tmp_path / "run.shadowrun")
    assert slug(lambda: DataFile.create(tmp_path / "run.shadowrun", info(), append=True))[0] == "data-file-append"


def test_folded_sums_come_along(tmp_path: Path) -> None:
    paths = [
        build(tmp_path / f"run.{rank}.shadowrun", info(rank, 2), (99,), n=3000, fold=True, max_records=100)
        for rank in range(2)
    ]
    run = combine(paths, tmp_path / "run.shadowrun")
    assert len(list(run.records())) < 1000
    assert run.counts()[Status.MATCH] == 2 * 2999
    (mm,) = (row for row in run.summary() if row.op == "aten::mm")
    assert mm.ref_total_us == sum(1.0 + seq for seq in range(1, 3000, 2)) * 2


def test_blocks_are_wide_enough(tmp_path: Path) -> None:
    paths = [build(tmp_path / f"run.{rank}.shadowrun", info(rank, 2), (), n=1001) for rank in range(2)]
    run = combine(paths, tmp_path / "run.shadowrun")
    assert [source.first_seq for source in run.sources()] == [0, 10_000]
    assert sum(run.counts().values()) == 2 * 1001 + 4


def test_what_ranks_differ_in_is_noted_and_kept(tmp_path: Path) -> None:
    odd = {
        "target_fingerprint": {"name": "Simulated NPU", "driver": "8"},
        "config": {"slow_ratio": 5.0},
        "notes": ("N.",),
    }
    paths = [
        build(tmp_path / f"run.{rank}.shadowrun", info(rank, 5, **(odd if rank == 2 else {})), end=rank != 1)
        for rank in (0, 1, 2, 4)
    ]
    run = combine(paths, tmp_path / "run.shadowrun")
    assert run.info.notes == (
        "The files of rank 3 of 5 are not among those that were combined.",
        "Had not ended, or was killed: rank 1 only.",
        "The runs differ in target, driver: 7 (ranks 0-1, 4); 8 (rank 2 only).",
        "The runs differ in options, slow_ratio: 10.0 (ranks 0-1, 4); 5.0 (rank 2 only).",
        "rank 2: N.",
    )
    assert run.info.target_fingerprint == {"name": "Simulated NPU"}
    assert [source.info.target_fingerprint["driver"] for source in run.sources()] == ["7", "7", "8", "7"]
    assert not run.info.complete
    assert (run.info.wall_s, run.info.world_size) == (6.0, 5)
    assert run.findings() == []


def test_runs_that_are_no_ranks_are_told_apart_by_file(tmp_path: Path) -> None:
    paths = [build(tmp_path / f"{name}.shadowrun", info(0, 1, argv=(name,)), (n,)) for n, name in enumerate("ab")]
    run = combine(paths, tmp_path / "all.shadowrun")
    assert sorted(finding.seen_on for finding in run.findings()) == ["a.shadowrun only", "b.shadowrun only"]
    assert run.info.wall_s == 4.0


def test_devices_of_other_numbers_are_one_platform_and_others_are_not(tmp_path: Path) -> None:
    paths = [build(tmp_path / f"run.{n}.shadowrun", info(n, 2, target=f"npu:{n}")) for n in range(2)]
    assert combine(paths, tmp_path / "run.shadowrun").info.target == "npu"
    paths.append(build(tmp_path / "other", info(target="cuda")))
    name, text = slug(lambda: combine(paths, tmp_path / "all.shadowrun"))
    assert name == "combine-platforms"
    assert "'run.0.shadowrun' compares npu:0 with cpu, and 'other' cuda with cpu" in text
    assert not (tmp_path / "all.shadowrun").exists()


def slug(action) -> tuple[str, str]:
    with pytest.raises(DataFileError) as caught:
        action()
    return caught.value.slug, str(caught.value)


def damage(path: Path, how: str) -> None:
    whole = path.read_bytes()
    if how == "data-file-missing":
        path.unlink()
    elif how == "data-file-not-ours":
        path.write_text("precious")
    elif how == "data-file-corrupt":
        path.write_bytes(whole[:8192] + b"\xa5" * (len(whole) - 8192))
    else:
        later = sqlite3.connect(path)
        later.execute("pragma user_version = 99")
        later.close()


@pytest.mark.parametrize("how", ["data-file-missing", "data-file-not-ours", "data-file-corrupt", "data-file-newer"])
def test_a_bad_file_is_named_and_left_out_on_demand_only(tmp_path: Path, how: str) -> None:
    paths, out = ranks(tmp_path, wrong={2: (1,)}), tmp_path / "run.shadowrun"
    damage(paths[1], how)
    name, text = slug(lambda: combine(paths, out))
    assert (name, "run.1.shadowrun" in text) == (how, True)
    assert sorted(file.name for file in tmp_path.iterdir() if "run.s" in file.name) == []
    with pytest.warns(ShadowrunWarning, match=r"left out: .*run\.1\.shadowrun"):
        run = combine(paths, out, ignore_errors=True)
    assert [source.info.rank for source in run.sources()] == [0, 2, 3]
    assert [r.call.rank for r in run.records(status="mismatch")] == [2]
    assert "rank 1 of 4 are not among" in run.info.notes[0]


def test_nothing_to_combine(tmp_path: Path) -> None:
    out = tmp_path / "run.shadowrun"
    assert slug(lambda: combine(tmp_path, out))[0] == "combine-nothing"
    assert slug(lambda: combine([tmp_path / "gone"], out, ignore_errors=True))[0] == "combine-nothing"
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_neither_replaced_nor_lost(tmp_path: Path) -> None:
    paths, out = ranks(tmp_path), tmp_path / "run.shadowrun"
    build(out, info(0, 1))
    before = out.read_bytes()
    assert slug(lambda: combine(paths, out))[0] == "combine-exists"
    damage(paths[3], "data-file-corrupt")
    assert slug(lambda: combine(paths, out, force=True))[0] == "data-file-corrupt"
    assert out.read_bytes() == before
    assert len(combine(paths[:3], out, force=True).sources()) == 3
    (tmp_path / "precious").write_text("x")
    assert slug(lambda: combine(paths[:3], tmp_path / "precious", force=True))[0] == "data-file-not-ours"
    assert slug(lambda: combine(paths[:3], tmp_path / "no" / "x"))[0] == "data-file-unwritable"


def test_a_journal_of_a_killed_rank_is_rolled_back(tmp_path: Path) -> None:
    import shutil

    path = tmp_path / "x"
    data = DataFile.create(path, info(1, 2))
    data.flush()
    data.connection.execute("pragma cache_size = 1")
    data.connection.execute("begin")
    data.connection.executemany("insert into op values (?, ?)", ((n, f"{n}" * 50) for n in range(3, 900)))
    for name in ("", "-journal"):
        shutil.copy(f"{path}{name}", tmp_path / f"run.1.shadowrun{name}")
    data.connection.execute("rollback")
    run = combine([build(tmp_path / "run.0.shadowrun", info(0, 2)), tmp_path / "run.1.shadowrun"], tmp_path / "run.x")
    assert list(run._data.query("select count(*) from op")) == [(3,)]


def old_file(path: Path) -> Path:
    """A file as shadowrun wrote it before combining was known."""
    connection = sqlite3.connect(path)
    connection.executescript(V1.read_text())
    connection.close()
    return path


def test_files_of_schema_1_are_read_combined_and_appended_to(tmp_path: Path) -> None:
    old = old_file(tmp_path / "run.0.shadowrun")
    run = load(old)
    assert run.sources() == ()
    assert run.counts()[Status.MISMATCH] == 1
    assert run.findings()[0].worst.n_from_zero == -1
    assert run.steps()[0].wall_s == 1.5
    other = build(tmp_path / "run.1.shadowrun", info(1, 2), (3,))
    combined = combine([old, other], tmp_path / "run.shadowrun")
    assert combined.counts()[Status.MISMATCH] == 2
    assert [r.diffs[0].n_from_zero for r in combined.records(status="mismatch")] == [-1, 0]
    data = DataFile.create(old, run.info, append=True)
    meta = TensorMeta("f32", (1,), (1,))
    data.add_diffs(data.next_seq, [TensorDiff("output 0", meta, meta, n_from_zero=1)])
    number = data.context_id("aten::mm", "", (), "", "", Phase.FORWARD, "", "npu")
    data.add((data.next_seq, data.next_step, number, data.verdict_id(WRONG), 1.0, 1.0, -1.0, -1.0))
    data.add_step(data.next_step, 2.0, 2.5)
    data.close()
    assert data.failure == ""
    assert [r.diffs[0].n_from_zero for r in load(old).records(status="mismatch")] == [-1, 1]
    assert [step.wall_s for step in Run(data).steps()] == [1.5, 2.5]


def test_which_files_are_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run.10.shadowrun", "run.9.shadowrun", "run.shadowrun", "x.txt", "run.9.shadowrun-journal"):
        Path(name).touch()

    def names(*given, out="out") -> list[str]:
        return [path.name for path in choose(given, Path(out))]

    assert names(".") == names("run.*.shadowrun") == ["run.9.shadowrun", "run.10.shadowrun"]
    assert names("run.9.shadowrun", tmp_path) == ["run.9.shadowrun", "run.10.shadowrun"]
    assert names("*.shadowrun", out="run.shadowrun") == ["run.9.shadowrun", "run.10.shadowrun"]
    assert slug(lambda: names("gone.*.shadowrun"))[0] == "combine-nothing"
    assert name_together(choose(["."], None)) == Path("run.shadowrun")
    assert name_together([Path("d/.shadowrun.0"), Path("d/.shadowrun.12")]) == Path("d/.shadowrun")
    assert name_together([Path("a.0.shadowrun"), Path("b.0.shadowrun")]) == Path(".shadowrun")
    assert ranges([7, 0, 1, 2, 5]) == "0-2, 5, 7"


def test_combining_needs_no_torch(tmp_path: Path) -> None:
    ranks(tmp_path, 2)
    code = "import sys, shadowrun; shadowrun.combine('.', 'x'); print(sorted({'torch', 'rich'} & set(sys.modules)))"
    root = Path(shadowrun.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(root)},
        check=True,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("pages", [1, 3, 24])
def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch, pages):
    paths = [build(tmp_path / f"run.{k}.shadowrun", info(k, 2), n=500) for k in range(2)]

    class Full(sqlite3.Connection):
        def executescript(self, *args):
            if self.execute("pragma database_list").fetchone()[2]:  # not one in memory
                self.execute(f"pragma max_page_count = {pages}")
            return super().executescript(*args)

    connect = sqlite3.connect
    monkeypatch.setattr(opening.sqlite3, "connect", lambda *a, **k: connect(*a, **{"factory": Full} | k))
    out = tmp_path / "out.shadowrun"
    with pytest.raises(DataFileError, match="full") as error:
        combine(paths, out)
    assert error.value.slug == "data-file-unwritable"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in paths)
