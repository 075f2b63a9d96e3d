"""The results of each step's last call: which are kept, how many, and what they show of two machines."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import shadowrun
from shadowrun.cli.main import main
from shadowrun.errors import DataFileError
from shadowrun.recording import step_outputs
from shadowrun.recording.file_format.recording_file import read, read_all
from shadowrun.recording.model import OUTPUTS_BYTES

N = 200


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.shadowrec"


def bits(t):
    t = torch.view_as_real(t.detach()) if t.is_complex() else t.detach()
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize])


def kept(recording):
    """Operator to bytes of what is kept."""
    call = np.repeat(np.arange(len(recording.calls)), recording.calls["n_results"])
    return [(recording.context_of(int(call[row])).op, data) for row, data in sorted(recording.outputs.items())]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int64, torch.bool]
)
def test_all_elements_of_the_last_result_are_kept(path, dtype):
    x = torch.randn(N, 3, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    with shadowrun.record(path) as run:
        y = x.t().clone()
    ((op, data),) = kept(read(path))
    assert op == "aten::clone"
    assert data == bits(y).numpy().tobytes()
    assert (run.outputs.n_steps, run.outputs.n_bytes) == (1, y.numel() * y.itemsize)


def test_each_step_has_its_own(path):
    results = []
    with shadowrun.record(path) as run:
        for n in range(3):
            results.append(torch.full((N,), float(n)))
            run.step()
            torch.ones(2)
    recording = read(path)
    assert [np.frombuffer(data, "f4").tolist() for _, data in kept(recording)] == [r.tolist() for r in results]
    assert run.outputs.n_steps == 3


def test_what_an_optimizer_wrote_is_kept(path):
    model = nn.Linear(N, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    with shadowrun.record(path) as run:
        model(torch.ones(3, N)).sum().backward()
        optimizer.step()
        run.step()
    recording = read(path)
    ((op, data),) = kept(recording)
    assert op == "aten::add_.Tensor"
    assert data == bits(model.weight).numpy().tobytes()


def test_of_a_view_its_base_is_kept(path):
    with shadowrun.record(path):
        x = torch.arange(float(N))
        y = x.view(2, -1).t()
    ((op, data),) = kept(read(path))
    assert (op, data) == ("aten::arange", x.numpy().tobytes())
    assert y.shape == (N // 2, 2)


def test_where_the_last_result_is_gone_that_of_an_earlier_call_is_kept(path):
    with shadowrun.record(path):
        y = torch.arange(float(N))
        torch.softmax(y, -1)
    ((op, data),) = kept(read(path))
    assert (op, data) == ("aten::arange", y.numpy().tobytes())


def test_steps_of_which_nothing_is_there_are_looked_at_ever_more_seldom(path, monkeypatch):
    looked, keep = [], step_outputs.StepOutputs._keep
    monkeypatch.setattr(step_outputs.StepOutputs, "_keep", lambda *args: looked.append(step) or keep(*args))
    results = []
    with shadowrun.record(path) as run:
        for step in range(22):
            results += [torch.full((N,), float(step))] if step >= 19 else []
            torch.ones(N)
            run.step()
    assert looked == [0, 2, 5, 10, 19, 20, 21]
    assert run.outputs.n_steps == 3


def test_small_results_need_no_place(path):
    with shadowrun.record(path) as run:
        big = torch.ones(N)
        loss = big.sum()
    recording = read(path)
    assert not recording.outputs
    assert run.outputs.n_steps == 0
    assert recording.elements_of(len(recording.results) - 1).astype(np.uint32).view(np.float32) == loss.item()


def test_nothing_of_the_program_is_held(path):
    with shadowrun.record(path) as run:
        x = torch.arange(float(N))
        storage = weakref.ref(x.untyped_storage())
        run.step()
        del x
        assert storage() is None
        torch.ones(N)
        run.step()


def test_memory_that_was_written_to_unseen_is_not_taken_for_the_result(path):
    with shadowrun.record(path):
        x = torch.arange(float(N))
        x.numpy()[3] = 7
    assert not read(path).outputs


def test_limits(path, monkeypatch):
    with shadowrun.record(path) as run:
        x = torch.ones(OUTPUTS_BYTES // 4 // 4 + 1)
    assert not read(path).outputs
    assert x.numel()
    monkeypatch.setattr(step_outputs, "_LEAST", OUTPUTS_BYTES // 8)
    with shadowrun.record(path) as run:
        for n in range(12):
            x = torch.full((N,), float(n))
            run.step()
    assert len(read(path).outputs) == run.outputs.n_steps == 8
    assert run.outputs.n_bytes == 8 * 4 * N <= OUTPUTS_BYTES


def test_none_are_kept_where_none_are_wanted(path):
    with shadowrun.record(path, capture=0) as run:
        x = torch.ones(N)
    assert not read(path).outputs
    assert run.outputs.n_steps == 0
    assert x.numel() == N


def test_equal_results_are_stored_once(path):
    with shadowrun.record(path) as run:
        for _ in range(3):
            x = torch.ones(N)
            run.step()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("select count(*) from content").fetchone() == (1,)
    assert len(read(path).outputs) == 3
    assert x.numel() == N


def test_ranks_keep_their_rows(tmp_path):
    paths = [tmp_path / f"a.{rank}.shadowrec" for rank in (0, 1)]
    for rank, path in enumerate(paths):
        with shadowrun.record(path):
            x = torch.full((N,), float(rank))
    assert x.numel() == N
    with contextlib.closing(sqlite3.connect(paths[1])) as connection:
        (info,) = connection.execute("select info from process").fetchone()
        connection.execute("update process set info = ?", (json.dumps(json.loads(info) | {"rank": 1}),))
        connection.commit()
    found = [np.frombuffer(data, "f4")[0] for _, data in kept(read_all(paths))]
    assert found == [0.0, 1.0]


@pytest.mark.parametrize(
    ("sql", "is_refused"),
    [
        ("insert into output select 100, digest from output", False),
        ("update output set digest = 'x'", False),
        ("update content set bytes = substr(bytes, 1, 8)", False),
        ("update content set bytes = zeroblob(5000000)", True),
    ],
)
def test_what_does_not_fit_is_no_result(path, sql, is_refused):
    with shadowrun.record(path):
        x = torch.ones(N)
    assert x.numel() == N
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(sql)
        connection.commit()
    if is_refused:
        with pytest.raises(DataFileError, match="more results than"):
            read(path)
    else:
        assert set(read(path).outputs) <= {0}


# -- two machines ----------------------------------------------------------------------------------


def two(tmp_path):
    """A product, and the same with one element of it three ULP and another 2^-10 off."""
    x, w = torch.randn(20, 32, generator=torch.Generator().manual_seed(0)), torch.eye(32)
    made = []
    for name in "ab":
        path = tmp_path / f"{name}.shadowrec"
        with shadowrun.record(path, capture=10**6, ops="aten::clone"):
            y = x.mm(w)
            if name == "b":
                y.view(torch.int32)[3, 4] += 3
                y[5, 6] *= 1 + 2.0**-10
            made.append(y.clone())
    return made


def test_diff_shows_the_exact_distance(tmp_path, capsys):
    a, b = two(tmp_path)
    assert main(["diff", str(tmp_path / "a.shadowrec"), str(tmp_path / "b.shadowrec"), "-f", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (output,) = found["outputs"]
    ulp = int((bits(a).long() - bits(b).long()).abs().max())
    relative = float(((a.double() - b.double()).abs() / torch.maximum(a.double().abs(), b.double().abs())).max())
    assert ulp > 1000
    assert (output["n_elements"], output["n_differ"], output["ulp"]) == (640, 2, ulp)
    assert output["relative"] == pytest.approx(relative)
    assert output["absolute"] == pytest.approx(float((a - b).abs().max()))
    assert main(["diff", str(tmp_path / "a.shadowrec"), str(tmp_path / "b.shadowrec")]) == 0
    text = capsys.readouterr().out
    assert "Results of each step's last call (1)" in text
    assert "2 of 640" in text


def test_a_difference_in_the_last_call_is_judged_by_all_elements(tmp_path, capsys):
    from tests.studies.diff.kit import Tape

    x = np.arange(1, 641, dtype=np.float32)
    for name, off in (("a", 0), ("b", 1)):
        tape = Tape(tmp_path / f"{name}.shadowrec")
        leaf = tape.leaf(x)
        y = np.exp2(x / 64)
        y.view("i4")[631] += off  # not a sample
        tape.keep(tape.call("aten::exp2", [leaf], [y]), y)
        tape.write()
    assert main(["diff", str(tmp_path / "a.shadowrec"), str(tmp_path / "b.shadowrec"), "-f", "json"]) == 0
    first = json.loads(capsys.readouterr().out)["first_divergence"]
    assert (first["min_ulp"], first["max_ulp"], first["is_exact"]) == (1, 1, True)
    assert first["rounding"] == "yes"


def test_classes_show_the_exact_distance(tmp_path, capsys):
    a, b = two(tmp_path)
    ulp = int((bits(a).long() - bits(b).long()).abs().max())
    assert main(["classes", str(tmp_path / "a.shadowrec"), str(tmp_path / "b.shadowrec"), "-f", "txt"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "aten::clone" in line and f"{ulp:,}" in line)
    assert "≤" not in line
    assert "≥" not in line


def test_replay_shows_the_exact_distance(tmp_path, capsys):
    path = tmp_path / "a.shadowrec"
    with shadowrun.record(path, capture=10**6):
        y = torch.linspace(-4, 4, N).tanh()
    assert y.numel() == N
    assert main(["replay", str(path), "--target", "sim", "--flaws", "tanh-one-ulp-off", "-f", "json"]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    (output,) = found["outputs"]
    assert output["op"] == "aten::tanh"
    assert output["is_exact"]
    assert output["min_ulp"] == output["max_ulp"] == 1
