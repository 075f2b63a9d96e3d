"""Digests of tensors on an accelerator wait for each other: one launch for each, one host sync for all."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch

import shadowrun
from shadowrun.recording.digests import pending_digests
from shadowrun.recording.digests.digest_operators import Found, digest_parts
from shadowrun.recording.digests.number_formats import NUMBER_FORMATS
from shadowrun.recording.digests.pending_digests import PendingDigest, PendingDigests, digest_method
from shadowrun.recording.digests.tensor_digest import digest_when_settled, pack, unpack
from shadowrun.recording.file_format.recording_file import read
from tests.recording.test_digests import REAL, agree, random_bits


@pytest.fixture(autouse=True)
def device(clean_sim):
    """Ways that were found are forgotten: a test may break one."""
    digest_method.cache_clear()
    yield
    digest_method.cache_clear()


@pytest.fixture
def syncs(monkeypatch):
    """Bytes of each transfer to the host."""
    found, cpu = [], torch.Tensor.cpu

    def counted(t):
        if not t.is_cpu:
            found.append(t.nbytes)
        return cpu(t)

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    return found


def test_many_digests_take_one_host_sync_and_are_of_the_time_of_the_call(syncs):
    waiting, found, wanted = PendingDigests(1 << 18), [], []
    for k in range(200):
        t = random_bits(REAL[k % len(REAL)], (k + 1, 7), k, 0.1)
        there = t.to("sim")
        found.append(digest_when_settled(there, 0, waiting))
        there.view(NUMBER_FORMATS[t.dtype].ints).fill_(1)
        wanted.append(pack(t))
    assert {type(one) for one in found} == {PendingDigest}
    for dtype in REAL:
        digest_method("sim", dtype)
    syncs.clear()
    digests = [one.get() for one in found]
    assert len(syncs) == 1
    for digest, expected in zip(digests, wanted, strict=True):
        agree(unpack(digest), unpack(expected))


def test_memory_on_the_device_does_not_grow():
    waiting = PendingDigests(1 << 14)
    one = digest_when_settled(torch.ones(10).to("sim"), 0, waiting)
    (memory,) = waiting._memories.values()
    address, n_bytes = memory._views[torch.int8].data_ptr(), memory._n_bytes
    t = random_bits(torch.float32, (60, 1000))
    found = [digest_when_settled(t.to("sim"), 3, waiting) for _ in range(3)]
    assert n_bytes == 1 << 14
    assert (memory._views[torch.int8].data_ptr(), memory._n_bytes) == (address, n_bytes)
    for digest in found:
        assert digest.get()[1:] == pack(t, 3)[1:]
    agree(unpack(one.get()), unpack(pack(torch.ones(10))))


def test_a_digest_that_failed_is_not_awaited_for_ever(monkeypatch):
    waiting = PendingDigests()
    lost = digest_when_settled(torch.ones(3).to("sim"), 0, waiting)
    with monkeypatch.context() as patch:

        def broken(*_):
            raise RuntimeError("the device is gone")

        patch.setattr(pending_digests, "digest_method", broken)
        with pytest.raises(RuntimeError, match="the device is gone"):
            lost.get()
    with pytest.raises(RuntimeError, match="a device failed"):
        lost.get()
    after = digest_when_settled(torch.full((3,), 2.0).to("sim"), 0, waiting)
    agree(unpack(after.get()), unpack(pack(torch.full((3,), 2.0))))


def lacking(memory, *rest):
    if not memory.is_cpu:
        raise NotImplementedError("aten::__rshift__.Tensor")
    return digest_parts(memory, *rest)


def wrong(memory, *rest):
    found = digest_parts(memory, *rest)
    return found if memory.is_cpu else Found(found.sums + 1, *found[1:])


@pytest.mark.parametrize("broken", [lacking, wrong])
def test_an_accelerator_that_cannot_digest_is_copied_from(broken, monkeypatch):
    monkeypatch.setattr(pending_digests, "digest_parts", broken)
    t = random_bits(torch.float32, (100, 3), special=0.1)
    agree(unpack(pack(t.to("sim"))), unpack(pack(t)))
    assert digest_method("sim", torch.float32) is pending_digests._on_host


def training(device, path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.ones(5, 6).to(device)
    with shadowrun.record(path) as run:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            run.step()
    return read(path)


def test_a_recording_takes_few_host_syncs(tmp_path, syncs):
    training("sim", tmp_path / "warm.shadowrec")
    syncs.clear()
    recorded = training("sim", tmp_path / "a.shadowrec")
    # One for the block, one for the outputs of each step, and some where a slow machine writes more than one block.
    assert len(syncs) <= 6
    on_cpu = training("cpu", tmp_path / "cpu.shadowrec")
    assert len(recorded.calls) > 60
    assert Counter(recorded.rungs.tolist()) == Counter(on_cpu.rungs.tolist())
    one, other = recorded.processes[0].provenance, on_cpu.processes[0].provenance
    assert "parameter:Sequential.0.weight" in one
    assert one == other


def test_a_device_that_fails_costs_the_block_and_not_the_program(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("the device is gone")

    run = shadowrun.record(tmp_path / "a.shadowrec")
    run.start()
    y = torch.ones(3).to("sim") + 1
    monkeypatch.setattr(pending_digests, "digest_method", broken)
    with pytest.warns(shadowrun.ShadowrunWarning, match="the device is gone"):
        run.stop()
    assert y.cpu().tolist() == [2, 2, 2]
    assert not len(read(tmp_path / "a.shadowrec").calls)


def test_a_call_that_is_dropped_leaves_no_digest_behind(tmp_path, monkeypatch):
    from shadowrun.recording.file_format.block_buffer import BlockBuffer

    def broken(self, *_):
        raise ZeroDivisionError("ours")

    with shadowrun.record(tmp_path / "a.shadowrec") as run:
        x = torch.ones(3).to("sim")
        x + 1
        with monkeypatch.context() as patch:
            patch.setattr(BlockBuffer, "context", broken)
            with pytest.warns(shadowrun.ShadowrunWarning, match="ours"):
                x.double()  # its ladder is longer than that of the next
        x - 1
    assert run.skipped["failure of shadowrun"] >= 1
    recorded = read(tmp_path / "a.shadowrec")
    assert [key.op for key in recorded.call_keys()][-1] == "aten::sub.Tensor"
    assert recorded.rungs[-24:].tolist() == unpack(pack(torch.zeros(3))).rungs.tolist()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_agrees_with_the_operators():
    """Run by Triton's interpreter, which has to be chosen before Triton is imported."""
    code = """
import numpy as np
import torch
from shadowrun.recording.digests.digest_kernel import digest_parts_by_kernel
from shadowrun.recording.digests.digest_operators import Parts, ROW, digest_parts
from shadowrun.recording.digests.number_formats import NUMBER_FORMATS, Encoding
from shadowrun.recording.digests.pending_digests import _agree
from tests.recording.test_digests import random_bits

parts = Parts(*np.array([(0, 5, 0), (ROW, ROW, 0), (2 * ROW, 36 * ROW - 3, 2 * ROW)]).T)
for dtype, form in NUMBER_FORMATS.items():
    if form.encoding is not Encoding.CODES:
        for special in (0.0, 0.3, 1.0):
            memory = random_bits(dtype, (40 * ROW,), 1, special).view(form.ints)
            call = memory, dtype, form, parts, np.array([1, 3, 700])
            assert _agree(digest_parts_by_kernel(*call), digest_parts(*call)), (dtype, special)
            print(dtype)
"""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert len(found.stdout.split()) == 3 * 13
