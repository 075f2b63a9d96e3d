"""Memory of a GPU: a program that fits without a comparison fits with one, under any allocator, two on one GPU."""

import os
import subprocess
import sys

import pytest
import torch

from tests.gpu.test_programs import held

pytestmark = pytest.mark.filterwarnings("ignore")

BEGIN = """
import contextlib, json, sys, warnings, torch
warnings.simplefilter("ignore")
import shadowrun
from shadowrun import Status
from tests.models import tokens, train
MIB = 1 << 20
ref = sys.argv[1]
def compared():
    return shadowrun.compare("cuda", ref=ref) if ref else contextlib.nullcontext()
def counted(run):
    return {str(k): n for k, n in run.counts().items()} if ref else {}
"""
# 1 GiB for everything: inputs and results of the call take 0.75, so that copies of them do not fit.
CROWDED = """
torch.cuda.set_per_process_memory_fraction((1 << 30) / torch.cuda.get_device_properties(0).total_memory)
x = torch.ones(96 * MIB, device="cuda")
with compared() as run:
    y = x * 2
    z = float(y[-1])
print(json.dumps([z, counted(run)]))
"""
TRAINED = """
run = shadowrun.compare("cuda", ref=ref) if ref else None
state = train(tokens, "cuda", steps=4, run=run)
print(json.dumps([float(sum(v.double().abs().sum() for v in state.values())), counted(run)]))
"""
SAME_DEVICE = ("cuda[tf32=off]", "cuda[compute=float64]")


def begin(program, ref, allocator=""):
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if allocator:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = allocator
    command = [sys.executable, "-c", BEGIN + program, ref]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-2000:]
    return __import__("json").loads(out)


@pytest.mark.parametrize("ref", ["cpu", *SAME_DEVICE])
def test_a_call_that_leaves_no_room_for_copies_runs_without_them(ref):
    (plain, _), (compared, counts) = finish(begin(CROWDED, "")), finish(begin(CROWDED, ref))
    assert compared == plain == 2.0
    assert counts["mismatch"] == counts["error"] == 0, counts
    if ref in SAME_DEVICE:
        assert counts["unverified"] >= 1, counts


@pytest.mark.parametrize(
    "allocator", ["backend:cudaMallocAsync", "expandable_segments:True", "max_split_size_mb:32", "backend:native"]
)
@pytest.mark.parametrize("ref", ["cpu", *SAME_DEVICE])
def test_training_is_unchanged_under_other_allocators(ref, allocator):
    processes = [begin(TRAINED, "", allocator), begin(TRAINED, ref, allocator)]
    (plain, _), (compared, counts) = map(finish, processes)
    assert compared == plain
    assert counts["mismatch"] == counts["error"] == 0, counts
    assert counts["match"] > 50


def test_two_processes_share_a_gpu():
    both = [begin(TRAINED, ref) for ref in ("cpu", "cuda[compute=float64]", "")]
    results = list(map(finish, both))
    assert len({state for state, _ in results}) == 1, results
    assert all(counts["mismatch"] == 0 for _, counts in results[:2]), results


@pytest.mark.parametrize("ref", SAME_DEVICE)
def test_copies_of_a_reference_on_the_gpu_are_bounded_and_given_back(ref):
    import shadowrun

    bound = 64 << 20
    x = torch.randn(4 << 20, device="cuda")  # 16 MiB
    before = held()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(20):
        x.sin().mul_(2)
    plain = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with shadowrun.compare("cuda", ref=ref, max_bytes=bound) as run:
        for _ in range(20):
            x.sin().mul_(2)
    peak = torch.cuda.max_memory_allocated()
    assert run.counts()[shadowrun.Status.MATCH] >= 40
    # Pending copies, and the replay of one call on widened inputs with what compares its results.
    assert peak - plain <= 3 * bound + (16 << 20), (peak - plain) >> 20
    del run
    assert held() == before
