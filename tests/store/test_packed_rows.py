"""A run in memory packs its newest calls: whoever reads sees all of them, and what leaves is summed as before."""

from __future__ import annotations

import math

import pytest

from shadowrun.run import Run
from shadowrun.store import DataFile
from shadowrun.types import Cause, Phase, RunInfo, Status, TensorDiff, TensorMeta, Verdict

INFO = RunInfo("npu", "cpu")
MATCH = Verdict(Status.MATCH)
FORM = TensorMeta("f32", (1,), (1,))


def record(data, n, first=0):
    """Calls of three contexts: matches, some without times, some with drift, and every tenth rounded."""
    numbers = [data.context_id(f"aten::op{k}", "", (), "", "", Phase.FORWARD, "", "cpu") for k in range(3)]
    for seq in range(first, first + n):
        rounded = seq % 10 == 3
        verdict = Verdict(Status.MATCH, Cause.ROUNDING, "", f"call {seq}") if rounded else MATCH
        if rounded:
            data.add_diffs(seq, [TensorDiff(f"output {seq}", FORM, FORM, n_elements=1, max_abs=seq / 8)])
        us = -1.0 if seq % 7 == 0 else 0.25 * seq
        drift = 0.5 if seq % 11 == 0 else -1.0
        data.add((seq, seq // 10, numbers[seq % 3], data.verdict_id(verdict), us, us + 1, drift, drift))
    data.flush()


def figures(data):
    run = Run(data)
    return [
        (s.op, s.n_calls, s.n_match, s.ref_total_us, s.ref_min_us, s.target_total_us, s.target_min_us, s.max_abs)
        for s in run.summary()
    ]


def test_all_calls_can_be_read_as_they_were_added():
    data = DataFile.create(None, INFO)
    record(data, 2500)
    read = list(Run(data).records())
    assert [r.call.seq for r in read] == list(range(2500))
    assert [r.call.step for r in read] == [seq // 10 for seq in range(2500)]
    assert all(type(r.call.seq) is int and type(r.call.step) is int for r in read)
    assert read[13].diffs[0].max_abs == 13 / 8
    record(data, 10, first=2500)  # and what comes after a reader
    assert len(list(Run(data).records())) == 2510


@pytest.mark.parametrize("reads", [False, True], ids=["never read meanwhile", "read meanwhile"])
def test_sums_of_what_left_are_those_of_all(reads):
    whole, folded = DataFile.create(None, INFO), DataFile.create(None, INFO, max_records=400)
    for k in range(12):
        for data in (whole, folded):
            record(data, 250, first=250 * k)
        if reads and k == 5:
            assert figures(whole) == figures(folded)
    assert figures(whole) == figures(folded)
    kept = [r.call.seq for r in Run(folded).records()]
    assert len(kept) <= 401
    assert kept[-1] == 2999
    assert len(kept) >= 300


def test_a_verdict_of_a_packed_call_stays():
    """Those that no call in the database has any more are let go: not those of calls that are not there yet."""
    data = DataFile.create(None, INFO, max_records=2000)
    record(data, 1500)
    list(Run(data).records())
    record(data, 1500, first=1500)
    assert data.failure == ""
    assert all(r.verdict.evidence == f"call {r.call.seq}" for r in Run(data).records() if r.verdict.cause)


def test_figures_that_are_no_numbers_come_back():
    data = DataFile.create(None, INFO)
    number = data.context_id("aten::mm", "", (), "", "", Phase.FORWARD, "", "cpu")
    data.add((0, 0, number, data.verdict_id(MATCH), 1.0, 1.0, math.nan, math.inf))
    data.flush()
    (read,) = Run(data).records()
    assert math.isnan(read.drift_abs)
    assert read.drift_rel == math.inf
