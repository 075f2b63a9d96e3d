"""Two gloo ranks: the same losses and weights, each collective once, and a data file for each rank."""

import sqlite3
import subprocess
import sys

import shadowrun

COMMON = """
import os, sys, tempfile
import torch, torch.distributed as dist, torch.multiprocessing as mp, shadowrun
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

def join(r, store):
    # A file for each group: in one that was used before, a rank may find where the other one was to be met then.
    dist.init_process_group("gloo", rank=r, world_size=2, init_method="file://" + store.replace(" ", "_"))

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # one write: lines of two processes do not mix

if __name__ == "__main__":
    # Forked before anything ran: torch is imported once.
    mp.start_processes(rank, (sys.argv[1],), nprocs=2, start_method="fork")
"""

TRAINING = """
def model_of(kind):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (2,))
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard
        return fully_shard(model, mesh=mesh)
    for layer, placement in ((model[0], Shard(0)), (model[2], Replicate())):
        for name, p in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [placement])))
    return model

def loss_of(kind, model, x):
    if kind != "dtensor":
        return model(x).square().mean()
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    mesh = model[0].weight.device_mesh
    x = distribute_tensor(torch.cat([x, x + 1]), mesh, [Replicate()])
    hidden = model[1](model[0](x))
    rows = hidden.redistribute(mesh, [Shard(0)])  # from columns to rows: an all-to-all
    return model[2](rows).square().mean().redistribute(mesh, [Replicate()]).to_local()

def steps(kind):
    torch.manual_seed(0)
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=.1, foreach=kind != "dtensor")
    out = []
    for k in range(3):
        loss = loss_of(kind, model, torch.full((4, 8), (kind != "dtensor") * dist.get_rank() + k + 1.0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(loss.detach())
    return out + [(p.to_local() if hasattr(p, "to_local") else p).detach().clone() for p in model.parameters()]

def collectives():
    return dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()

def rank(r, d):
    join(r, d + "/store")
    for kind in ("ddp", "fsdp", "dtensor"):
        train(r, d + "/" + kind, kind)
    dist.destroy_process_group()

def train(r, d, kind):
    run = shadowrun.compare("cpu[threads=1]", file=d + ".shadowrun", slow_ratio=1e9)
    n = [collectives()]
    a = steps(kind)
    n.append(collectives())
    with run:
        b = steps(kind)
    n.append(collectives())
    same = all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert n[1] > n[0]
    say(kind, r, same, n[2] - n[1] == n[1] - n[0], run.info.rank, run.info.world_size, run.info.notes)
    assert os.path.exists(f"{d}.{r}.shadowrun") and not os.path.exists(d + ".shadowrun")
"""

LATE = """
def rank(r, d):
    for kind in ("known by a step", "known at the end", "never known"):
        begin(r, d, kind)

def begin(r, d, kind):
    with shadowrun.compare("cpu[threads=1]", file=f"{d}/{kind}.shadowrun") as run:
        for k in range(20 + r):
            torch.full((3,), float(k)).exp()
        if kind == "never known":
            list(run.records())
            open(f"{d}/here.{r}", "w").close()
            while not os.path.exists(f"{d}/here.{1 - r}"):
                pass
            os._exit(0)
        join(r, f"{d}/store of {kind}")
        dist.all_reduce(torch.ones(2))
        if kind == "known by a step":
            run.step()
            assert os.path.exists(f"{d}/{kind}.{r}.shadowrun")
        torch.ones(3).exp()
    dist.barrier()
    dist.destroy_process_group()
    say(kind, r, run.info.rank, run.info.world_size, run.info.notes, len(list(run.records(op="aten::exp"))))
"""


def ranks(program, folder):
    path = folder / "ranks.py"
    path.write_text(COMMON.replace("if __name__", program + "\nif __name__"))
    done = subprocess.run(
        [sys.executable, str(path), str(folder)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


def test_two_ranks_train_as_without(tmp_path):
    kinds = ("ddp", "dtensor", "fsdp")
    assert ranks(TRAINING, tmp_path) == [f"{kind} {r} True True {r} 2 ()" for kind in kinds for r in (0, 1)]
    for file in [f"{kind}.{r}.shadowrun" for kind in kinds for r in (0, 1)]:
        run = shadowrun.load(tmp_path / file)
        assert not run.findings()
        assert len(list(run.records(op="aten::*mm*"))) >= 3


def test_a_group_made_after_the_comparison_began(tmp_path):
    """Nobody knew the ranks: both began in files of their own, which then get the names that they should have."""
    kinds = ("known at the end", "known by a step")
    assert ranks(LATE, tmp_path) == [f"{kind} {r} {r} 2 () {21 + r}" for kind in kinds for r in (0, 1)]
    for kind in kinds:
        assert sorted(p.name for p in tmp_path.glob(kind + "*")) == [f"{kind}.{r}.shadowrun" for r in (0, 1)]
    for r, path in [(r, tmp_path / f"{kind}.{r}.shadowrun") for kind in kinds for r in (0, 1)]:
        run = shadowrun.load(path)
        assert run.info.rank == r
        assert run.info.complete
        assert len(list(run.records(op="aten::exp"))) == 21 + r
        assert sqlite3.connect(path).execute("pragma integrity_check").fetchone() == ("ok",)

    # Both were killed before they had ranks: no file was shared, and their locks delay no process.
    first, second = sorted(tmp_path.glob("never known*.shadowrun"), key=lambda p: len(p.name))
    assert first.name == "never known.shadowrun"
    assert second.name.startswith("never known.pid")
    found = {len(list(shadowrun.load(path).records(op="aten::exp"))) for path in (first, second)}
    assert found == {20, 21}
    with shadowrun.compare("cpu", file=first) as run:
        pass
    # Threads that tests before this one left in the process are named in a note of their own.
    notes = [note for note in run.info.notes if "began unnoticed" not in note]
    assert len(notes) == 1, "which is that it compares the CPU with itself"
    assert [p.name for p in tmp_path.glob("*-lock")] == [second.name + "-lock"]
