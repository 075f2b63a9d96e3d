"""Digests of tensors on a GPU are those of the CPU, and a recorded program does not notice them."""

from __future__ import annotations

import warnings

import pytest
import torch

import shadowrun
from shadowrun.recording.digests.number_formats import NUMBER_FORMATS
from shadowrun.recording.digests.pending_digests import PendingDigests, digest_method
from shadowrun.recording.digests.tensor_digest import digest_when_settled, pack, unpack
from shadowrun.recording.file_format.recording_file import read
from tests.recording.test_digests import REAL, SHAPES, agree, random_bits


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_layout(dtype, shape):
    t = random_bits(dtype, (40, 61), special=0.1)
    here, there = (SHAPES[shape](x) for x in (t, t.to("cuda")))
    assert there.is_cuda
    found, wanted = pack(there, 3), pack(here, 3)
    agree(unpack(found), unpack(wanted))
    assert found[3] == wanted[3]


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("n", [1, 31, 33, 256, 257, 8192, 70_000, 9_000_001])
def test_any_size(dtype, n):
    t = random_bits(dtype, (n,), seed=n, special=0.01)
    agree(unpack(pack(t.to("cuda"))), unpack(pack(t)))


def test_complex_numbers():
    t = torch.randn(50, 40, dtype=torch.complex64, device="cpu")
    for here, there in ((t, t.to("cuda")), (t.conj(), t.to("cuda").conj()), (t.mT, t.to("cuda").mT)):
        agree(unpack(pack(there)), unpack(pack(here)))


def test_all_dtypes_are_digested_on_the_device():
    ways = {dtype: digest_method("cuda", dtype).__name__ for dtype in NUMBER_FORMATS}
    assert "_on_host" not in ways.values(), ways


def test_values_are_those_of_the_time_of_the_call():
    """Each tensor is overwritten on its stream as soon as its digest is asked for."""
    waiting, expected, found = PendingDigests(1 << 20), [], []
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    for k in range(300):
        with torch.cuda.stream(streams[k % 3]):
            values = torch.full((1000 + k,), float(k), device="cuda")
            found.append(digest_when_settled(values, 0, waiting))
            values.fill_(-1)
        expected.append(pack(torch.full((1000 + k,), float(k), device="cpu")))
    for one, wanted in zip(found, expected, strict=True):
        agree(unpack(one.get()), unpack(wanted))


def training(run):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Dropout(0.3), torch.nn.GELU(), torch.nn.Linear(30, 5))
    model = model.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 20, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        run()
    return [*losses, *(p.detach() for p in model.parameters()), torch.cuda.get_rng_state()]


def test_a_recorded_program_computes_the_same_bits(tmp_path):
    plain = training(lambda: None)
    with shadowrun.record(tmp_path / "a.shadowrec") as run:
        recorded = training(run.step)
    with shadowrun.record(tmp_path / "b.shadowrec") as run:
        training(run.step)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert run.skipped.keys() <= {"profiler mark"}
    a, b = read(tmp_path / "a.shadowrec"), read(tmp_path / "b.shadowrec")
    assert len(a.calls) > 100
    assert a.rungs.tolist() == b.rungs.tolist()
    assert a.rungs.all()
    assert a.processes[0].provenance == b.processes[0].provenance


def test_a_graph_is_captured_while_a_recording_runs(tmp_path):
    static = torch.ones(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with shadowrun.record(tmp_path / "a.shadowrec") as run:
            static.mul(2)
            with torch.cuda.graph(graph):
                y = static * 3
                z = torch.full((4,), 5.0, device="cuda") + y[:4]
            static.fill_(7)
            graph.replay()
            result = z + 1
    assert result.tolist() == [27.0] * 4
    assert run.skipped["captured into a graph"] >= 3
