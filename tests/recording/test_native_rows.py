"""Calls that are recorded in C, and by Python: the same bytes; and nothing of the program is held."""

from __future__ import annotations

import contextlib
import gc
import sqlite3
import warnings
import weakref

import pytest
import torch

import shadowrun
from shadowrun.intercept import attribution
from shadowrun.native import core, tensors
from shadowrun.recording import call_recorder, data_flow, native_calls, undeclared_writes
from shadowrun.recording.call_results import CallInputs
from shadowrun.recording.file_format import block_buffer
from shadowrun.recording.file_format.recording_file import read
from tests.models import assert_same, digits, tokens, train

needs_c = pytest.mark.skipif(core is None or not tensors.reads_places, reason="needs the C extension")


@pytest.fixture(autouse=True)
def all_in_c(monkeypatch):
    """No call goes to Python only to be watched."""
    monkeypatch.setattr(undeclared_writes, "may_watch", lambda plan: False)


@contextlib.contextmanager
def in_python():
    """Recordings that begin inside use C for digests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_calls, "core", None)
        patch.setattr(attribution, "core", None)
        patch.setattr(data_flow, "_new_storage_rows", data_flow._StorageRows)
        patch.setattr(data_flow, "_forget_freed", data_flow._forget_freed_in_python)
        patch.setattr(block_buffer, "_key", block_buffer._python_key)
        yield


def training(make, **flags):
    def program(run):
        torch.manual_seed(0)
        model, _, loss_of = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **flags)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of().backward()
            optimizer.step()
            run.step()

    return program


def views_and_writes(run):
    x = torch.zeros(4, 6)
    x[1].fill_(2)
    x.t()[2:].mul_(3)
    y = x.view(2, 12)
    y += 1
    x.t_()
    x.add_(1)
    a, b = x.split(3)
    b.mul_(a.sum())
    z = x.detach().clone()
    z.resize_(3)
    torch.empty(3).fill_(1)
    z[torch.tensor([0, 1])] = 5
    x.unbind(), torch.stack([x, x]), torch.cat((x, x), 1), x.clone().set_(z)


def arguments(run):
    x = torch.rand(3, 4)
    for number in (0.0, -0.0, float("nan"), float("inf"), 1, True, 2**40, 1 + 2j):
        x * number
    x.sum(0), x.sum(1, keepdim=True), x.to(torch.float64), x.to("cpu", torch.int32), x.argmax()
    x.index_select(0, torch.tensor([0])), x.max(0), x.topk(2), x[None, :, [0, 1]], x[:, None]
    torch.nn.functional.pad(x, (1, 2)), torch.full_like(x, 3), torch.arange(3), torch.rand(3).bernoulli_(0.5)


def kinds(run):
    x = torch.randn(4, 4)
    x.item if x.numel() == 1 else x.sum().item()
    torch.equal(x, x), x.t().contiguous(), x.t() @ x, x.expand(2, 4, 4).sum()
    c = torch.complex(x, x)
    c.conj() * c, c.imag.neg(), torch.view_as_real(c)
    x.half() + 1, x.bfloat16() + 1, x.double() + 1, x.bool() | True, torch.zeros(0, 3) + 1, torch.tensor(3.0) + 1
    x.to(torch.float8_e4m3fn).float()
    torch.nn.functional.batch_norm(x, x.mean(0), x.var(0), training=True)
    torch.nn.functional.max_pool2d(x[None, None], 2, return_indices=True)
    with torch.inference_mode():
        y = x + 1
        y.mul_(2)
        y + x
    with contextlib.suppress(RuntimeError):
        x.add_(torch.ones(3))
    x + 1
    torch.mm(x, x, out=y.clone())
    torch.func.vmap(torch.sum)(x)
    torch.utils._python_dispatch  # noqa: B018
    x.to_sparse().to_dense() + 1
    torch._foreach_add([x, x], 1), torch._foreach_mul_([x, x.clone()], 2)
    w = torch.nn.Parameter(torch.ones(4))
    (w * x).sum().backward()
    w.data.mul_(2)
    w * 2


def unequal_results(run):
    """More calls than a block has."""
    x = torch.ones(2, requires_grad=True)
    for step in range(700):
        y = x * step
        y.sum().backward()
        run.step()


def on_an_accelerator(run):
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.GELU(), torch.nn.Linear(8, 3)
    model = torch.nn.Sequential(*layers).to("sim")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        x = torch.randn(5, 6).to("sim")
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        x[1].fill_(2)
        x.t()[2:].mul_(3)
        a, b = x.split(3)
        (
            a.sum().item(),
            (b * 2).cpu() + 1,
            x.half() + x,
            x.bool() | True,
            x[:0] + 1,
            x.t().contiguous(),
            x + torch.ones(()),
        )
        x.sum().to("cpu"), torch.ones(3).to("sim") * 2, torch.full((2,), 3.0, device="sim") + 1
        run.step()


PROGRAMS = {
    "an accelerator": on_an_accelerator,
    "digits": training(digits),
    "tokens": training(tokens),
    "foreach": training(digits, foreach=True),
    "fused": training(tokens, fused=True),
    "views and writes": views_and_writes,
    "arguments": arguments,
    "kinds": kinds,
    "several blocks": unequal_results,
}


def content(path):
    """All that is in the file but the description of the process."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        tables = ("context", "form", "kernel", "block", "content", "captured")
        return {table: connection.execute(f"select * from {table}").fetchall() for table in tables}


def recorded(program, path, **options):
    torch.manual_seed(0)
    with shadowrun.record(path, **options) as run:
        program(run)
    return content(path), run


@needs_c
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"rows": 3}], ids=["plain", "rows"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_both_ways_write_the_same_bytes(name, options, tmp_path, monkeypatch, clean_sim):
    monkeypatch.setattr(block_buffer, "_FLUSH_S", 1e9)  # blocks end by their sizes only
    with in_python():
        expected, slow = recorded(PROGRAMS[name], tmp_path / "python.shadowrec", **options)
        assert slow._recorder.native_handler is None
    n_left, note = [], CallInputs.note_device
    monkeypatch.setattr(CallInputs, "note_device", lambda *args: n_left.append(1) or note(*args))
    found, fast = recorded(PROGRAMS[name], tmp_path / "c.shadowrec", **options)
    for table, rows in expected.items():
        assert found[table] == rows, table
    assert fast.skipped == slow.skipped
    assert "failure of shadowrun" not in fast.skipped
    one, other = read(tmp_path / "c.shadowrec"), read(tmp_path / "python.shadowrec")
    assert one.processes[0].provenance == other.processes[0].provenance
    assert len(n_left) < len(one.calls)  # some went through C
    if name == "an accelerator":
        devices = [one.context_of(call).device for call in range(len(one.calls))]
        assert devices.count("sim") > 2 * len(n_left)


@needs_c
def test_numbers_of_tensors_and_all_but_the_first_draw_go_by_c(tmp_path, monkeypatch):
    left, note = [], CallInputs.note_device
    monkeypatch.setattr(CallInputs, "note_device", lambda *args: left.append(1) or note(*args))
    concluded = []
    monkeypatch.setattr(call_recorder.CallRecorder, "_conclude", lambda *_: concluded.append(1))
    x = torch.rand(4)
    with shadowrun.record(tmp_path / "a.shadowrec"):
        x.add_(0)
        for _ in range(5):
            x.bernoulli_(0.5)
            x.sum().item(), x.sum().long().item(), x.sum().bool().item()
    assert (len(left), concluded) == (5, [])  # the first call of each operator


@needs_c
def test_the_program_gets_the_same(tmp_path):
    plain = train(digits)
    with shadowrun.record(tmp_path / "a.shadowrec"):
        assert_same(train(digits), plain)


@needs_c
def test_no_tensor_lives_longer(tmp_path):
    with shadowrun.record(tmp_path / "a.shadowrec"):
        x = torch.ones(8)
        for _ in range(3):
            y = x * 2
            z = y.view(2, 4)
            gone = [weakref.ref(t) for t in (y, z)] + [weakref.ref(y.untyped_storage())]
            del y, z
            assert [ref() for ref in gone] == [None] * 3


@pytest.mark.parametrize("way", [pytest.param(contextlib.nullcontext, marks=needs_c), in_python])
def test_storages_that_were_freed_are_soon_forgotten(way):
    with way():
        flow, kept = data_flow.DataFlow(), [torch.zeros(3) for _ in range(20)]
        for row, t in enumerate(kept):
            flow.note_result(t, 0, row)
        for row in range(20, 70):
            flow.note_result(torch.zeros(3), 0, row)
        flow.purge()
        assert [flow.row_of(t, 0) for t in kept] == list(range(20))
        assert len(flow.storages) == len(kept)


@pytest.mark.parametrize("way", [pytest.param(contextlib.nullcontext, marks=needs_c), in_python])
def test_storages_that_lived_long_are_looked_at_less_often(way):
    with way():
        flow, kept = data_flow.DataFlow(), [torch.zeros(3) for _ in range(20)]
        for row, t in enumerate(kept):
            flow.note_result(t, 0, row)
        del t
        n_known = []
        for number in range(8):
            if number == 4:
                kept.clear()
            for row in range(50):
                flow.note_result(torch.zeros(3), 0, row)
            flow.purge()
            n_known.append(len(flow.storages))
    # Looks 1, 3 and 7; what was freed meanwhile is forgotten by the last of them.
    assert n_known == [20] * 6 + [0] * 2


@needs_c
def test_references_are_counted(tmp_path):
    """No object is left over for each call."""

    def calls(n):
        for _ in range(n):
            y = x + 1
            y.mul_(2)
            y.view(2, 4).sum().item()
            with contextlib.suppress(RuntimeError):
                x + bad
        gc.collect()
        return sum(1 for _ in gc.get_objects())

    x, bad = torch.ones(8), torch.ones(3)
    with shadowrun.record(tmp_path / "a.shadowrec"):
        calls(300)
        before = calls(300)
        assert calls(3000) < before + 1000


@needs_c
def test_a_failure_in_c_drops_the_call(tmp_path, monkeypatch):
    broken = []

    def form(self, t, original=block_buffer.BlockBuffer.form):
        if broken and t.dim() == 3:
            raise RuntimeError("broken")
        return original(self, t)

    monkeypatch.setattr(block_buffer.BlockBuffer, "form", form)
    with shadowrun.record(tmp_path / "a.shadowrec") as run:
        x = torch.ones(2, 3)
        broken.append(1)
        with pytest.warns(shadowrun.ShadowrunWarning, match="broken"):
            y = torch.stack([x, x])
        broken.clear()
        z = x + 1
    assert y.shape == (2, 2, 3)
    r = read(tmp_path / "a.shadowrec")
    assert [key.op for key in r.call_keys()] == ["aten::ones", "aten::add.Tensor"]
    assert run.skipped["failure of shadowrun"] >= 1
    assert torch.equal(z, torch.full((2, 3), 2.0))


@needs_c
@pytest.mark.parametrize("tensor", ["plain", "view", "parameter", "inference", "empty", "scalar"])
def test_places_are_what_python_says(tensor):
    x = torch.arange(12.0).reshape(3, 4)
    with torch.inference_mode():
        made_in_inference = torch.ones(2)
    made = {
        "plain": x.add_(1),
        "view": x[1:, ::2],
        "parameter": torch.nn.Parameter(x.t()),
        "inference": made_in_inference,
        "empty": torch.ones(0, 3),
        "scalar": torch.tensor(2, dtype=torch.int8),
    }[tensor]
    storage, version = made.untyped_storage(), -1 if made.is_inference() else made._version
    form = tuple(made.shape), made.stride(), made.dtype
    assert core.place(made) == (storage._cdata, storage.nbytes(), version, made.storage_offset(), *form)


@needs_c
@pytest.mark.parametrize("tensor", ["sparse", "meta", "nested", "number", "subclass"])
def test_other_tensors_have_no_place(tensor):
    from torch.testing._internal.two_tensor import TwoTensor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        made = {
            "sparse": lambda: torch.eye(3).to_sparse(),
            "meta": lambda: torch.empty(3, device="meta"),
            "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "number": lambda: 3,
            "subclass": lambda: TwoTensor(torch.ones(2), torch.ones(2)),
        }[tensor]()
    assert core.place(made) is None
