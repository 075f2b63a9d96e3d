"""Kernels that write without the dispatcher: Triton's."""

import pytest
import torch

import shadowrun
from shadowrun import Status

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def double(x, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(x + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


def test_what_a_kernel_writes_unseen_is_no_false_alarm():
    x = torch.randn(1 << 20, device="cuda")
    with shadowrun.compare("cuda") as run:
        for _ in range(3):
            x.sin()
            double[(1024,)](x, x.numel(), 1024)
            x.cos()
    counts = run.counts()
    assert counts[Status.MISMATCH] == counts[Status.ERROR] == 0
    assert counts[Status.MATCH] >= 1
