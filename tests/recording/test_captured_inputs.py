"""Inputs that a recording keeps: what they are, how many, and what hostile ones end in."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tracemalloc

import pytest
import torch
from torch import nn

import shadowrun
from shadowrun.errors import DataFileError
from shadowrun.recording.captured_inputs import CALLS_EACH
from shadowrun.recording.digests.tensor_digest import digest
from shadowrun.recording.file_format.captured_reader import CapturedFile, TooLarge
from shadowrun.recording.file_format.recording_file import read
from shadowrun.recording.model import NONE, Kind
from shadowrun.replay.copies import tensors_in

MAX = 1 << 30


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.shadowrec"


def train(n_steps=3, on_step=None):
    """A step of each kind: views, expanded and transposed inputs, in-place writes, a fused and a random operator."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    x, y = torch.randn(5, 6), torch.randint(0, 3, (5,))
    for _ in range(n_steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if on_step is not None:
            on_step()
    return [p.detach().clone() for p in model.parameters()]


def captured(path):
    """Call number to operator and inputs, of all calls that have any."""
    recording = read(path)
    with CapturedFile(path) as file:
        return {call: (recording.context_of(call).op, file.load(call, MAX)) for call in sorted(file.calls())}


def ops(path):
    return [op for op, _ in captured(path).values()]


def contents(path):
    with sqlite3.connect(path) as connection:
        found = connection.execute("select digest, bytes from content").fetchall()
    connection.close()
    return dict(found)


# -- what is kept ----------------------------------------------------------------------------------


def test_inputs_are_those_from_before_the_call(path):
    plain = train()
    with shadowrun.record(path, capture=MAX) as run:
        assert all(map(torch.equal, train(on_step=run.step), plain))
    recording, n_compared = read(path), 0
    for call, (op, inputs) in captured(path).items():
        rows = recording.inputs_of(call)
        given = list(tensors_in((*inputs.args, *inputs.kwargs.values())))
        assert len(given) == len(rows), op
        for t, row in zip(given, rows, strict=True):
            form = recording.form_of(row)
            assert (str(t.dtype)[6:], tuple(t.shape), t.stride()) == (form.dtype, form.shape, form.stride)
            is_whole = recording.results["kind"][row] != Kind.VIEW and recording.results["base"][row] == NONE
            if is_whole and len(recording.ladder(row)):
                n_compared += 1
                assert digest(t).rungs.tolist() == recording.ladder(row).tolist(), (call, op)
    assert n_compared > 100
    # Foreach operators overwrite their inputs.
    assert {"aten::_foreach_add_.Tensor", "aten::addmm", "aten::native_layer_norm_backward"} <= set(ops(path))


def test_views_random_draws_and_numbers_have_none(path):
    with shadowrun.record(path, capture=MAX):
        train(1)
        torch.ones(2).sum().item()
    assert not {"aten::t", "aten::empty.memory_format", "aten::bernoulli_.float", "aten::_local_scalar_dense"} & set(
        ops(path)
    )


def test_each_content_is_stored_once(path):
    weight = torch.randn(64, 64)
    with shadowrun.record(path, capture=MAX) as run:
        for _ in range(2):
            torch.mm(weight, weight.t())
        torch.relu(weight)
        weight.clone().sin_()
    assert len(contents(path)) == 1
    assert (run.captured.n_calls, run.captured.n_bytes) == (5, 64 * 64 * 4)
    for digest_of, data in contents(path).items():
        assert hashlib.sha256(data).hexdigest() == digest_of


def test_what_shares_memory_shares_it_again_and_what_does_not_does_not(path):
    base = torch.arange(24.0).reshape(4, 6)
    same = base.clone()
    with shadowrun.record(path, capture=MAX):
        base[:, 1:4].add_(base[:, 2:5].clone())
        torch._foreach_add_([base, same], 1.0)
        base[0].copy_(base[1])
    found = dict(captured(path).values())
    row, other = found["aten::copy_"].args[:2]
    assert row.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert (other.storage_offset() - row.storage_offset(), other.data_ptr() - row.data_ptr()) == (6, 24)
    written, read_from = found["aten::add_.Tensor"].args[:2]
    assert written.stride() == (6, 1)
    assert written.untyped_storage().data_ptr() != read_from.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_layout_comes_back(path, dtype):
    t = torch.arange(60).reshape(3, 4, 5).to(dtype)
    forms = [t, t[1:, ::2], t.transpose(0, 2), t[:1].expand(7, 4, 5), t[:0], t[0, 0, 0]]
    with shadowrun.record(path, capture=MAX):
        for form in forms:
            form.reshape(-1)[:1]
            torch.eq(form, form)
    kept = [inputs.args[0] for op, inputs in captured(path).values() if op == "aten::eq.Tensor"]
    assert len(kept) == len(forms)
    for ours, form in zip(kept, forms, strict=True):
        assert ours.stride() == form.stride()
        assert torch.equal(ours, form)
        assert (ours.data_ptr() - form.data_ptr()) % 64 == 0 or not form.numel()


def test_lazy_conjugation_comes_back(path):
    m = torch.randn(3, 3, dtype=torch.complex64)
    with shadowrun.record(path, capture=MAX):
        torch.mm(m.conj(), m)
    (left, right), _ = next((i.args, i) for op, i in captured(path).values() if op == "aten::mm")
    assert (left.is_conj(), right.is_conj()) == (True, False)
    assert torch.equal(left, m.conj())


def test_sparse_and_subclassed_inputs_are_left_out(path):
    class Mine(torch.Tensor):
        pass

    sparse = torch.eye(3).to_sparse()
    with shadowrun.record(path, capture=MAX):
        torch.sparse.mm(sparse, torch.ones(3, 2))
        torch.ones(2).as_subclass(Mine).sin()
        torch.ones(2).cos()
    assert {"aten::cos"} <= set(ops(path))
    assert all(type(t) is torch.Tensor for _, i in captured(path).values() for t in tensors_in(i.args))


# -- how many --------------------------------------------------------------------------------------


def test_the_first_calls_of_each_signature(path):
    with shadowrun.record(path, capture=MAX) as run:
        for _ in range(5):
            torch.ones(3).exp()
            run.step()
    steps = [int(read(path).calls["step"][call]) for call, (op, _) in captured(path).items() if op == "aten::exp"]
    assert steps == list(range(CALLS_EACH))


def test_the_budget_is_for_all_and_no_call_takes_more_than_half(path):
    with shadowrun.record(path, capture=10_000) as run:
        torch.ones(1300).exp()  # 5200 bytes
        for n in range(1, 40):
            torch.full((100,), float(n)).log()
            torch.full((n,), 2.0).sqrt()
    assert run.captured.n_bytes <= 10_000
    assert sum(map(len, contents(path).values())) == run.captured.n_bytes
    assert "aten::exp" not in ops(path)
    # The second call of a signature must not take what the first calls of others could have.
    assert ops(path).count("aten::sqrt") > ops(path).count("aten::log")


def test_without_capture_no_inputs(path):
    with shadowrun.record(path) as run:
        train(on_step=run.step)
    assert captured(path) == {}
    assert run.captured.n_bytes == 0


# -- selection, processes --------------------------------------------------------------------------


def test_selected_calls_only(path):
    with shadowrun.record(path, capture=MAX, ops="aten::addmm", steps=[1]) as run:
        train(on_step=run.step)
    assert ops(path) == ["aten::addmm"] * 2


def test_the_file_is_for_this_user_only(path):
    before = os.umask(0)
    try:
        with shadowrun.record(path, capture=100):
            torch.ones(2).exp()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


def test_after_a_kill_what_is_there_can_be_replayed(path):
    script = f"""
import os, signal, torch, shadowrun
run = shadowrun.record({str(path)!r}, capture=10**6).start()
for n in range(3000):
    torch.full((3,), float(n)).exp()
    torch.ones(n % 100 + 1).log()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL
    recording = read(path)
    assert not recording.processes[0].complete
    assert len(recording.calls) >= 2000
    assert {"aten::exp", "aten::log"} <= {op for call, (op, _) in captured_up_to(path, len(recording.calls)).items()}


def captured_up_to(path, n_calls):
    recording = read(path)
    with CapturedFile(path) as file:
        kept = (call for call in sorted(file.calls()) if call < n_calls)
        return {call: (recording.context_of(call).op, file.load(call, MAX)) for call in kept}


class _Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda x: x.to_sparse(), "a tensor of layout torch.sparse_coo"),
        (lambda x: x.to_sparse_csr(), "a tensor of layout torch.sparse_csr"),
        (lambda x: torch.nested.nested_tensor([x, x[:1]]), "a nested tensor"),
        (lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged), None),  # a subclass of a plain tensor
        (lambda x: x.as_subclass(_Subclass), "a tensor subclass (_Subclass)"),
        (lambda x: x.to("meta"), "a meta tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_memory_are_counted_by_reason(path, made, reason):
    x = made(torch.eye(4))
    with shadowrun.record(path, capture=MAX) as run:
        expected = x * 2
        torch.ones(3).exp()
    process = read(path).processes[0]
    assert process.complete
    assert "failure of shadowrun" not in process.skipped
    assert process.not_captured == ({reason: 1} if reason else {})
    assert "aten::exp" in ops(path)
    assert run.captured.n_calls >= 1
    assert type(expected) is type(x * 2)


def test_too_large_inputs_are_counted(path):
    with shadowrun.record(path, capture=1000):
        torch.ones(10_000).exp()
        x = torch.ones(110)
        x.exp()
        (x + 1).exp()
        (x + 2).exp()
    counted = read(path).processes[0].not_captured
    assert counted == {"inputs of more bytes than all may take": 1, "no room left for inputs of this size": 1}


def test_replay_says_why_inputs_are_missing(path, capsys):
    from shadowrun.cli.main import main

    x = torch.eye(4).to_sparse()
    with shadowrun.record(path, capture=MAX):
        torch.sparse.mm(x, torch.ones(4, 4))
    assert main(["replay", str(path), "--target", "cpu[threads=1]"]) == 0
    assert "inputs not kept, by reason: a tensor of layout torch.sparse_coo: 1" in capsys.readouterr().out


def test_a_full_disk_ends_the_capture_and_not_the_program(path, monkeypatch):
    from shadowrun.recording.file_format.recording_writer import Writer

    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Writer, "content", full)
    with shadowrun.record(path, capture=MAX) as run:
        torch.ones(3).exp()
        torch.ones(3).log()
    assert len(read(path).calls) == 4
    assert run.captured.n_calls == 1  # `ones`, which reads no tensor


@pytest.mark.parametrize("capture", [-1, 1.5, True, "100MB"])
def test_wrong_sizes(path, capture):
    with pytest.raises(shadowrun.UsageError, match="bytes"):
        shadowrun.record(path, capture=capture)


# -- hostile files ---------------------------------------------------------------------------------


@pytest.fixture
def file(path):
    with shadowrun.record(path, capture=MAX):
        torch.add(torch.ones(4), torch.arange(4.0), alpha=2)
    return path


def edited(path, **changes):
    """Replace parts of the JSON of the captured call; gives its number."""
    with sqlite3.connect(path) as connection:
        call, text = connection.execute("select call, arguments from captured where call = 2").fetchone()
        connection.execute("update captured set arguments = ?", (json.dumps(json.loads(text) | changes),))
    connection.close()
    return call


ROW = [0, 0, "float32", [4], [1], "", "cpu"]
HOSTILE = {
    "a shape beyond the memory": [0, 0, "float32", [400], [1], "", "cpu"],
    "an offset beyond the memory": [0, 1 << 40, "float32", [4], [1], "", "cpu"],
    "a stride beyond the memory": [0, 0, "float32", [2], [1 << 60], "", "cpu"],
    "a negative stride": [0, 0, "float32", [2], [-1], "", "cpu"],
    "a negative size": [0, 0, "float32", [-2], [1], "", "cpu"],
    "a memory that is not there": [7, 0, "float32", [4], [1], "", "cpu"],
    "a wider dtype": [0, 0, "complex128", [4], [1], "", "cpu"],
    "no dtype": [0, 0, "ops", [4], [1], "", "cpu"],
    "a quantized dtype": [0, 0, "qint8", [4], [1], "", "cpu"],
    "a huge number": [0, 0, "float32", [1 << 70], [0], "", "cpu"],
    "texts": ["0", "0", "float32", "4", "1", "", "cpu"],
    "too short": [0, 0, "float32"],
    "other bits": [0, 0, "float32", [4], [1], "evil", "cpu"],
}


@pytest.mark.parametrize("row", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_tensor(file, row):
    call = edited(file, tensors=[row, ROW])
    with CapturedFile(file) as captured_file, pytest.raises(DataFileError, match=f"call {call}"):
        captured_file.load(call, MAX)


@pytest.mark.parametrize(
    "changes",
    [
        {"args": "x"}, {"args": {"tensor": 0}}, {"args": [{"tensor": 9}]}, {"args": [{"module": "os"}]},
        {"kwargs": []}, {"memories": ["00"]}, {"memories": [1]}, {"memories": "x"}, {"tensors": {}},
        {"args": [{"torch": "os"}]}, {"args": [{"device": "npu:-7"}]}, {"args": [{"tensor": "0"}]},
        {"args": [{"tensor": 0, "torch": "float32"}]}, {"memories": ["00"] * 30_000},
    ],
)  # fmt: skip
def test_hostile_arguments(file, changes):
    call = edited(file, **changes)
    with CapturedFile(file) as captured_file, pytest.raises(DataFileError):
        captured_file.load(call, MAX)


@pytest.mark.parametrize(("shape", "stride"), [([1 << 50], [0]), ([0, 1 << 61, 1 << 61], [1, 1, 1])])
def test_a_tensor_without_end_is_too_large(file, shape, stride):
    call = edited(file, tensors=[[0, 0, "float32", shape, stride, "", "cpu"], ROW])
    with CapturedFile(file) as captured_file, pytest.raises(TooLarge):
        captured_file.load(call, MAX)


def test_inputs_beyond_the_bound_are_not_loaded(file):
    with CapturedFile(file) as captured_file, pytest.raises(TooLarge):
        captured_file.load(2, 16)


def test_another_content_under_a_digest(file):
    with sqlite3.connect(file) as connection:
        connection.execute("update content set bytes = zeroblob(length(bytes))")
    connection.close()
    with CapturedFile(file) as captured_file, pytest.raises(DataFileError, match="is another"):
        captured_file.load(2, MAX)


@pytest.mark.parametrize("text", ["", "x", "[]", '{"args": [' + "[" * 100_000, '{"args"', '{"args": 1}', "{" * 10_000])
def test_text_that_is_no_object(file, text):
    with sqlite3.connect(file) as connection:
        connection.execute("update captured set arguments = ?", (text,))
    connection.close()
    with CapturedFile(file) as captured_file, pytest.raises(DataFileError):
        captured_file.load(2, MAX)


def test_no_text_without_end_reaches_python(file):
    """SQLite counts the characters of a text up to the first NUL."""
    with sqlite3.connect(file) as connection:
        connection.execute("update captured set arguments = '{' || char(0) || printf('%.*c', 1 << 24, ' ')")
    connection.close()
    with CapturedFile(file) as captured_file:
        tracemalloc.start()
        with pytest.raises(DataFileError):
            captured_file.load(2, MAX)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 24
