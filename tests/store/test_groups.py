"""The pass over all calls: exact whatever the pieces, in combined files too; medians of more calls than are kept."""

from __future__ import annotations

import random
import statistics
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shadowrun.analysis.call_groups import MAX_TIMES, Medians
from shadowrun.run import Run, combine, load
from shadowrun.store import DataFile, call_pages, groups
from shadowrun.store import groups as scanning
from shadowrun.store.packed_rows import scan_arrays
from shadowrun.types import Cause, Phase, RunInfo, Status, TensorDiff, TensorMeta, Verdict

if TYPE_CHECKING:
    from pathlib import Path

META = TensorMeta("f32", (2,), (1,))


def record(path: Path | None, rank: int, times: list[float], differ: dict[int, float], world: int = 2) -> DataFile:
    data = DataFile.create(path, RunInfo("npu", "cpu", rank=rank, world_size=world))
    numbers = [
        data.context_id(f"aten::op{n}", "", ("f32",), "", "", Phase.FORWARD, "a.py:1 in f", "npu") for n in range(3)
    ]
    match = data.verdict_id(Verdict(Status.MATCH))
    for seq, us in enumerate(times):
        verdict = match
        if seq in differ:
            data.add_diffs(seq, [TensorDiff("output 0", META, META, 2, 1, 1, differ[seq], differ[seq])])
            verdict = data.verdict_id(Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "wrong"))
        data.add(
            (seq, seq // 10, numbers[seq % 3], verdict, us, -1.0 if seq % 7 == 0 else 2 * us, -1.0, float(seq % 5))
        )
    data.close()
    return data


def facts(found: list[groups.Group]) -> list[tuple]:
    return [
        (g.context_id, g.outcome_id, g.n, g.first_seq, g.n_target, g.worst_seq, g.max_abs, g.drift_rel) for g in found
    ]


@pytest.mark.parametrize("piece", [1, 7, 50])
def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    times = [float(1 + seq % 13) for seq in range(200)]
    data = record(None, 0, times, {30: 0.5, 33: 0.9, 36: 0.9, 40: 0.1})
    whole = groups.read_groups(data)
    for module in (scanning, groups):
        monkeypatch.setattr(module, "PIECE", piece)
    monkeypatch.setattr(scanning, "_CALLS", scanning._CALLS.replace("limit 20000", f"limit {piece}"))
    monkeypatch.setattr(groups, "_SEVERITIES", groups._SEVERITIES.replace("limit 20000", f"limit {piece}"))
    assert facts(groups.read_groups(data)) == facts(whole)
    of_op0 = next(g for g in whole if g.n == 64)
    assert (of_op0.first_seq, of_op0.first_step, of_op0.n_ref) == (0, 0, 64)
    assert of_op0.ref_us_total == sum(times[seq] for seq in range(0, 200, 3) if seq not in (30, 33, 36))
    # Of two equally bad calls, the first is the worst.
    assert [(g.worst_seq, g.n) for g in whole if g.severity > 0] == [(33, 3), (40, 1)]


def test_runs_of_a_combined_file_are_kept_apart(tmp_path: Path) -> None:
    paths = [tmp_path / f"run.{rank}.shadowrun" for rank in range(2)]
    for rank, path in enumerate(paths):
        record(path, rank, [1.0 + rank] * (1500 + rank), {100: 0.5, 103: 0.9 - rank / 10})
    run = combine(paths, tmp_path / "run.shadowrun")
    found = groups.read_groups(run._data)
    assert sum(g.n for g in found) == 3001
    assert {g.sources for g in found} == {(0, 1)}
    assert [(g.n, g.worst_seq, g.ref_us_min) for g in found if g.severity > 0] == [(4, 103, 1.0)]
    parts = [sum(row.n_calls for row in load(path).summary()) for path in paths]
    assert parts == [1500, 1501]


def test_medians_are_exact_while_all_times_are_kept() -> None:
    times = [float(us) for us in random.Random(1).sample(range(10_000), 999)]
    rows = {row.op: row for row in Run(record(None, 0, times, {})).summary()}
    assert rows["aten::op0"].ref_median_us == statistics.median(times[0::3])
    expected = [2 * us for seq, us in enumerate(times) if seq % 3 == 1 and seq % 7]
    assert rows["aten::op1"].target_median_us == statistics.median(expected)


@pytest.mark.parametrize("in_arrays", [False, True])
@pytest.mark.parametrize("at_once", [3, 20_000])
def test_medians_of_more_times_than_are_kept_are_close(at_once: int, in_arrays: bool) -> None:
    source = random.Random(2)
    times = [source.lognormvariate(0, 1) for _ in range(20 * MAX_TIMES)]
    medians = Medians({1: "aten::mm"})
    for start in range(0, len(times), at_once):
        some = times[start : start + at_once]
        medians.observe(1, np.array(some) if in_arrays else some, [])
    assert len(medians._times["aten::mm"][0]._kept) <= MAX_TIMES
    ((median, none),) = medians.by_op().values()
    assert none == -1.0
    below = sum(ns < 1e3 * median for ns in times) / len(times)
    assert abs(below - 0.5) < 0.005


def test_many_runs_need_no_more_sums_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_pages, "MIN_BYTES", 0)
    paths = [tmp_path / f"run.{rank}.shadowrun" for rank in range(12)]
    for rank, path in enumerate(paths):
        record(path, rank, [1.0 + rank] * 1500, {100: 0.5}, world=12)
    one = load(paths[0])._data
    data = combine(paths, tmp_path / "run.shadowrun")._data
    by_rows = groups.scan(data.query, data.block)
    pieces = data.call_arrays()
    assert pieces is not None
    by_arrays = scan_arrays(pieces, data.block, None, None)
    for sums in (by_rows, by_arrays):
        assert sums.keys() == groups.scan(one.query, one.block).keys()
        assert sum(s.n for s in sums.values()) == 12 * 1500
        assert {tuple(s.sources) for s in sums.values()} == {tuple(range(12))}


def test_the_first_call_of_many_runs_is_that_of_the_earliest_step() -> None:
    sums = groups.Sums(5, 3, 0)
    for seq, step, source in ((9, 0, 0), (2000, 1, 1), (4000, 1, 2), (6000, 2, 3)):
        sums.begin_run(seq, step, source)
    # The second is of the run that the sums began with, whose first call is known.
    assert (sums.first_seq, sums.first_step, sums.sources) == (2000, 1, [0, 1, 2, 3])
