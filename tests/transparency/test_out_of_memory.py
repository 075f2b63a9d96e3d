"""Copies of a comparison take no memory that the program's own call needs, and are bounded on one device too."""

import os
import subprocess
import sys

import pytest
import torch

import shadowrun
from shadowrun import Status
from shadowrun.replay import input_copies

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space")

LIMITED = """
import contextlib, resource, sys, warnings, torch
warnings.simplefilter("ignore")
import shadowrun
from shadowrun import Status
torch.set_num_threads(1)
MIB = 1 << 20
def compared():
    return shadowrun.compare(sys.argv[1]) if len(sys.argv) > 1 else contextlib.nullcontext()
with compared():
    torch.ones(4).add_(1)
def limited(mib):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + mib * MIB, -1))
"""
GROWS = """
limited(850)
with compared() as run:
    x = torch.ones(64 * MIB)  # 256 MiB
    y = torch.cat([x, x])  # 512 MiB
print(float(y[-1]))
"""
DRAWS = """
x = torch.ones(64 * MIB)
limited(450)
torch.manual_seed(3)
with compared() as run:
    y = torch.bernoulli(x, 0.5)  # 256 MiB
print(float(y[:1000].sum()), float(torch.rand(())))
"""


def run(program, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED + program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("program", [GROWS, DRAWS])
@pytest.mark.parametrize("target", ["sim", "cpu"])
def test_a_call_without_memory_for_its_copies_runs_without_them(program, target):
    plain = run(program)
    assert run(program, target) == plain


def test_it_is_told():
    out = run(GROWS + "print(run.counts()[Status.UNVERIFIED])", "sim")
    assert out == "1.0\n1\n"


class _NoRoom:
    """Stands for an operator that lacks memory when it is called first, and may have written something by then."""

    def __init__(self, op, first):
        self.op, self.first, self.calls = op, first, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == 1:
            self.first(*args)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
        return self.op(*args, **kwargs)


def _written_to(target, call, name, first):
    """The counts of the call, and how often its operator ran."""
    with shadowrun.compare(target) as run:
        call()
        (plan,) = (p for p in run._replayer.plans.values() if p.name == name)
        op = plan.run
        lacking = _NoRoom(op, first)
        try:
            object.__setattr__(plan, "run", lacking)
            call()
        finally:
            object.__setattr__(plan, "run", op)
    return run.counts(), lacking.calls


@pytest.mark.parametrize("target", ["sim", "cpu", "cpu[deterministic=on]"])
@pytest.mark.parametrize("call", ["one", "several"])
def test_what_the_call_writes_to_is_as_it_was_before_it_runs_again(clean_sim, target, call):
    x = torch.zeros(1 << 20)
    one = (lambda: x.add_(1)), "aten::add_.Tensor"
    several = (lambda: torch._foreach_add_([x], 1)), "aten::_foreach_add_.Scalar"
    chosen = one if call == "one" else several
    counts, n = _written_to(target, *chosen, lambda *_: None)
    assert torch.equal(x, torch.full_like(x, 2))
    assert n == 2
    assert counts[Status.UNVERIFIED] == 1
    assert counts[Status.MATCH] >= 1
    assert counts[Status.ERROR] == 0
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        _written_to(target, *chosen, lambda *_: x.numpy().__setitem__(7, 5.0))
    assert x[7:9].tolist() == [5, 3]


def test_results_beyond_max_bytes_are_not_computed_twice():
    x = torch.ones(1 << 20)
    with shadowrun.compare("cpu", max_bytes=2 << 20) as run:
        x * 2  # the short way
        torch.sort(x)  # several results
        torch.rand_like(x)  # drawn
        x[:4] * 2
    assert [run.counts()[s] for s in (Status.UNVERIFIED, Status.MATCH)] == [3, 1]
    with shadowrun.compare("sim", max_bytes=6 << 20) as run:
        torch.cat([x[: 1 << 19], x[: 1 << 19], x, x[:4]])
        x[:4] * 2
    assert [run.counts()[s] for s in (Status.UNVERIFIED, Status.MATCH)] == [1, 1]


@pytest.mark.parametrize("target", ["sim", "cpu"])
def test_the_gaps_of_a_slice_count_where_they_are_copied(clean_sim, target):
    x = torch.zeros(1 << 20)[::128]
    with shadowrun.compare(target, max_bytes=2 << 20) as run:
        x.copy_(torch.ones(1 << 13))
        x.cumsum_(0)
    assert run.counts()[Status.UNVERIFIED] == 2


def test_what_is_out_of_memory():
    assert input_copies.is_out_of_memory(MemoryError())
    assert input_copies.is_out_of_memory(torch.OutOfMemoryError("CUDA"))
    assert input_copies.is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not input_copies.is_out_of_memory(RuntimeError("size mismatch"))
