"""Writes that no schema declares, and results on memory that was known before, are rows of a recording."""

from __future__ import annotations

import threading
import warnings

import numpy as np
import pytest
import torch

import shadowrun
from shadowrun import sim
from shadowrun.intercept.plan import make_plan
from shadowrun.recording import undeclared_writes
from shadowrun.recording.digests.pending_digests import PendingDigests
from shadowrun.recording.digests.tensor_digest import digest
from shadowrun.recording.file_format.recording_file import read
from shadowrun.recording.model import Kind
from shadowrun.recording.undeclared_writes import UndeclaredWrites
from shadowrun.report.document import render
from shadowrun.studies.diff.compare import Outcome, is_undeclared
from shadowrun.studies.diff.recordings import diff_recordings
from shadowrun.studies.diff.report import recordings_document

ADD, ADD_, COPY_, MM_OUT = (
    make_plan(op, number)
    for number, op in enumerate(
        (
            *(torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor),
            *(torch.ops.aten.copy_.default, torch.ops.aten.mm.out),
        )
    )
)


@pytest.fixture(params=["native", "pure"])
def watch(request, monkeypatch):
    """One whose schedule is that of C, and one whose is that of Python."""
    if request.param == "pure":
        monkeypatch.setattr(undeclared_writes, "core", None)
    return UndeclaredWrites(PendingDigests())


def called(watch, plan, args, kwargs=None, *, by=lambda: None):
    """What a call is found to have written; `by` stands for its kernel."""
    kwargs = kwargs or {}
    watched = watch.begin_call(plan, args, kwargs)
    by()
    watch.end_call()
    return watch.writes_of(plan, args, kwargs, watched)


# -- what is watched -----------------------------------------------------------------------------


def test_a_write_to_an_input_is_found(watch):
    x, y = torch.rand(3, 4), torch.rand(3, 4)
    assert called(watch, ADD, (x, y)) == []
    (found,) = called(watch, ADD, (x, y), by=lambda: y.numpy().__setitem__((2, 3), 7.0))
    assert (found.argument, found.memory is y) == (1, True)
    assert found.digest[1] == digest(y).rungs.tobytes()


def test_arguments_of_lists_and_keywords_are_watched(watch):
    plan = make_plan(torch.ops.aten.cat.default, 9)
    x, y = torch.rand(3), torch.rand(3)
    assert [f.argument for f in called(watch, plan, ([x, y],), by=lambda: y.numpy().fill(0))] == [1]
    out, part = torch.zeros(4, 2), torch.zeros(2, 2)
    given = (part, part), {"out": out[1:3]}
    assert called(watch, MM_OUT, *given, by=lambda: out[1:3].numpy().fill(1)) == []
    (found,) = called(watch, MM_OUT, *given, by=lambda: out[3].numpy().fill(1))
    assert found.argument == 2


@pytest.mark.parametrize("at", [0, 3, 8, 11])
def test_memory_next_to_a_written_view_is_watched(watch, at):
    table = torch.zeros(12)
    view = table[4:8]
    assert called(watch, ADD_, (view, 1), by=lambda: view.numpy().fill(1)) == []
    (found,) = called(watch, ADD_, (view, 1), by=lambda: table.numpy().__setitem__(at, 5.0))
    assert (found.argument, found.memory.dtype) == (0, torch.uint8)


def test_the_guard_is_bounded(watch):
    table = torch.zeros(1000)
    view = table[500:501]
    far = 500 + 1 + 256 // 4
    assert called(watch, ADD_, (view, 1), by=lambda: table.numpy().__setitem__(far, 5.0)) == []
    assert called(watch, ADD_, (view, 1), by=lambda: table.numpy().__setitem__(far - 1, 5.0))


def test_what_lies_between_written_elements_is_watched(watch):
    table = torch.zeros(6, 6)
    column = table[:, 2]
    assert called(watch, ADD_, (column, 1), by=lambda: column.numpy().fill(1)) == []
    assert called(watch, ADD_, (column, 1), by=lambda: table.numpy().__setitem__((3, 3), 5.0))


def test_an_argument_next_to_a_written_one_is_no_undeclared_write(watch):
    first, second = torch.rand(20).split(10)
    assert called(watch, COPY_, (first, second), by=lambda: first.numpy().fill(1)) == []
    (found,) = called(watch, COPY_, (first, second), by=lambda: second.numpy().fill(1))
    assert found.argument == 0
    # One that overlaps too.
    table = torch.rand(20)
    assert called(watch, ADD_, (table[:10], table[5:15]), by=lambda: table[:10].numpy().fill(1)) == []


def test_expanded_and_transposed_arguments(watch):
    x, y = torch.rand(1, 4).expand(3, 4), torch.rand(4, 3).t()
    assert called(watch, ADD, (x, y)) == []
    assert len(called(watch, ADD, (x, y), by=lambda: (x[:1].numpy().fill(1), y.numpy().fill(1)))) == 2


def test_memory_that_was_exchanged_is_left_out(watch):
    x = torch.rand(4)
    assert called(watch, ADD, (x, x), by=lambda: x.set_(torch.rand(4))) == []


@pytest.mark.parametrize("make", [lambda: torch.rand(3).to_sparse(), lambda: torch.empty(3, device="meta")])
def test_tensors_without_plain_memory_are_left_out(watch, make):
    assert called(watch, ADD, (make(), 1)) == []


def test_shared_memory_is_left_out(watch):
    x = torch.rand(4).share_memory_()
    assert called(watch, ADD, (x, 1), by=lambda: x.numpy().fill(1)) == []


def test_memory_that_a_collective_got_is_left_out(watch):
    x, y = torch.rand(4), torch.rand(4)
    watch.leave_out(x)
    assert [f.argument for f in called(watch, ADD, (x, y), by=lambda: (x.numpy().fill(1), y.numpy().fill(1)))] == [1]


def test_a_call_beside_another_is_not_watched(watch):
    x, y = torch.rand(4), torch.rand(4)
    other = watch.begin_call(ADD, (y, y), {})
    assert called(watch, ADD, (x, x), by=lambda: x.numpy().fill(1)) == []
    y.numpy().fill(1)
    watch.end_call()
    assert watch.writes_of(ADD, (y, y), {}, other) == []


# -- how often -----------------------------------------------------------------------------------


def watched(watch, plan, n, make):
    found = []
    for number in range(1, n + 1):
        args = make(number)
        if watch.begin_call(plan, args, {})[1]:
            found.append(number)
        watch.end_call()
    return found


def test_later_calls_of_a_signature_are_watched_ever_more_seldom(watch):
    x = torch.rand(4)
    assert watched(watch, ADD, 600, lambda _: (x, x)) == [1, 2, 8, 64, 512]


def test_shapes_that_change_for_ever_are_watched_at_a_bounded_rate(watch):
    numbers = watched(watch, ADD, 4000, lambda number: (torch.empty(1, number), 1))
    assert numbers[: undeclared_writes.FREE] == list(range(1, undeclared_writes.FREE + 1))
    assert len(numbers) <= undeclared_writes.FREE + 4000 // undeclared_writes.SHARE
    assert numbers[-1] > 3800


def test_new_signatures_of_an_operator_with_many_calls_are_found(watch):
    shapes = [torch.empty(n) for n in range(1, 17)]
    assert watched(watch, ADD, 4000, lambda _: (torch.empty(99), 1))
    numbers = watched(watch, ADD, 16_000, lambda number: (shapes[number % 16], 1))
    assert {number % 16 for number in numbers} == set(range(16))


def test_an_operator_that_did_it_is_watched_in_each_call(watch):
    x = torch.rand(4)
    assert called(watch, ADD, (x, x), by=lambda: x.numpy().fill(2))
    assert watched(watch, ADD, 5, lambda _: (x, x)) == [1, 2, 3, 4, 5]


def test_large_arguments_are_left_out(watch, monkeypatch):
    monkeypatch.setattr(undeclared_writes, "_MAX_BYTES", 100)
    x, y = torch.zeros(20), torch.zeros(20)
    assert [f.argument for f in called(watch, ADD, (x, y), by=lambda: (x.numpy().fill(1), y.numpy().fill(1)))] == [0]


# -- in recordings ---------------------------------------------------------------------------------


def undeclared(recording):
    call = np.repeat(np.arange(len(recording.calls)), recording.calls["n_results"])
    return [recording.context_of(int(call[row])).op for row in np.flatnonzero(is_undeclared(recording.results))]


def norm(device):
    x = torch.rand(4, 6).to(device)
    for _ in range(4):
        y = torch.layer_norm(x, (6,))
    return x + y


def scale(device):
    table = torch.rand(4, 6).to(device)
    table[1:3].mul_(0.5)
    return table.abs()


def copy(device):
    kept = torch.rand(4, 6).to(device)
    changed = kept.clone().add_(1)
    return kept.abs() + changed


FLAWS = {
    "layer-norm-centres-its-input": (norm, "aten::native_layer_norm", "undeclared write in tensor argument 0"),
    "mul-writes-past-the-view": (scale, "aten::mul_.Tensor", "undeclared write in tensor argument 0"),
    "clone-aliases": (copy, "aten::clone", "result 0 lies in the memory of an earlier tensor"),
}


def recorded(path, program, *flaws):
    torch.manual_seed(0)
    with sim.flaws(*flaws), shadowrun.record(path) as run:
        result = program("sim")
    assert "failure of shadowrun" not in run.skipped
    return read(path), result.cpu()


@pytest.mark.parametrize("flaw", FLAWS)
def test_the_first_divergence_is_the_flawed_operator(tmp_path, flaw):
    program, op, text = FLAWS[flaw]
    clean, _ = recorded(tmp_path / "clean.shadowrec", program)
    flawed, result = recorded(tmp_path / "flawed.shadowrec", program, flaw)
    again, _ = recorded(tmp_path / "again.shadowrec", program, flaw)
    assert undeclared(clean) == []
    assert set(undeclared(flawed)) == {op}
    found = diff_recordings(clean, flawed)
    first = found.flow.origins[0].pair
    call = int(found.difference.alignment.pairs[first, 0])
    assert (clean.context_of(call).op, found.difference.outcome(first)) == (op, Outcome.ALGORITHM)
    assert found.provenance.is_same
    shown = render(recordings_document(found, 20), "txt")
    assert f"as declared in the first, {text}" in shown
    # What reads the memory has the flawed call for its parent, and the values that it has.
    last = flawed.results_of(len(flawed.calls) - 1)[-1]
    assert flawed.ladder(last).tolist() == digest(result).rungs.tolist()
    # Two platforms with one flaw agree.
    same = diff_recordings(flawed, again)
    assert not same.flow.origins
    assert same.difference.count(Outcome.EQUAL) == len(flawed.calls)


def test_each_call_of_the_operator_is_a_row(tmp_path):
    flawed, _ = recorded(tmp_path / "a.shadowrec", norm, "layer-norm-centres-its-input")
    rows = np.flatnonzero(flawed.results["kind"] == Kind.OVERWRITTEN)
    # The first has centred it; the others subtract what rounding has left, if anything.
    assert 1 <= len(rows) <= 4


@pytest.fixture
def erfinv():
    """Gives aten::erfinv another kernel on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the kernel that is replaced
        yield lambda kernel: library.impl("erfinv", kernel, "CPU")
        library._destroy()


@pytest.mark.parametrize("watches", [True, False])
def test_on_the_cpu_too_a_result_on_known_memory_is_noted(tmp_path, erfinv, monkeypatch, watches):
    if not watches:  # then each call goes by C
        monkeypatch.setattr(undeclared_writes, "may_watch", lambda _: False)
    erfinv(lambda x: x.detach())
    x = torch.rand(5)
    with shadowrun.record(tmp_path / "a.shadowrec"):
        for _ in range(3):
            torch.erfinv(x + 1)
    assert undeclared(read(tmp_path / "a.shadowrec")) == ["aten::erfinv"] * 3


def test_on_the_cpu_too_a_write_is_noted_in_each_call(tmp_path, erfinv):
    def kernel(x):
        x.numpy()[0] += 1
        return x * 2

    erfinv(kernel)
    x = torch.zeros(5)
    with shadowrun.record(tmp_path / "a.shadowrec"):
        for _ in range(80):
            torch.erfinv(x)
    found = read(tmp_path / "a.shadowrec")
    assert undeclared(found) == ["aten::erfinv"] * 80
    # What a call reads is what the one before has left.
    rows = np.flatnonzero(found.results["kind"] == Kind.OVERWRITTEN)
    assert found.results["max"][rows].tolist() == list(range(1, 81))
    assert found.inputs.tolist()[1:] == rows.tolist()[:-1]


@pytest.fixture
def seen(monkeypatch):
    """Names of the operators whose calls were watched."""
    found, watched = [], UndeclaredWrites._watched

    def noted(self, plan, args, kwargs):
        found.append(plan.name)
        return watched(self, plan, args, kwargs)

    monkeypatch.setattr(UndeclaredWrites, "_watched", noted)
    return found


def test_in_a_recording_the_same_calls_are_watched(tmp_path, seen):
    x, y = torch.zeros(5), torch.zeros(2, 3)
    with shadowrun.record(tmp_path / "a.shadowrec"):
        for _ in range(100):
            x + 1
            y.add_(1)
    assert sorted(seen) == ["aten::add.Tensor"] * 4 + ["aten::add_.Tensor"] * 4  # the first, second, 8th and 64th


def test_a_recording_that_is_started_again_does_not_watch_the_first_calls_again(tmp_path, seen):
    x = torch.zeros(5)
    run = shadowrun.record(tmp_path / "a.shadowrec")
    for _ in range(5):
        with run:
            for _ in range(3):
                x + 1
    assert len(seen) == 3  # the first, second and 8th
    assert run.n_calls == 15


def test_an_operator_that_did_it_is_watched_after_another_start_too(tmp_path, erfinv):
    erfinv(lambda x: x.detach())
    x = torch.rand(5)
    run = shadowrun.record(tmp_path / "a.shadowrec")
    for _ in range(3):
        with run:
            torch.erfinv(x)
    assert undeclared(read(tmp_path / "a.shadowrec")) == ["aten::erfinv"] * 3


def test_threads_that_share_a_tensor_are_no_finding(tmp_path):
    x = torch.zeros(1 << 12)

    def hogwild():
        for _ in range(200):
            x.data.add_(1)  # counted for no other tensor
            x + 1

    with shadowrun.record(tmp_path / "a.shadowrec"):
        threads = [threading.Thread(target=hogwild) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert undeclared(read(tmp_path / "a.shadowrec")) == []
