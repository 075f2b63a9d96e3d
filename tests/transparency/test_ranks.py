"""Two gloo ranks: the same losses and weights, and a data file for each rank."""

import subprocess
import sys

import pytest

RANKS = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp, shadowrun, os
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
def steps(kind):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(8,16), nn.ReLU(), nn.Linear(16,4))
    if kind=="ddp": m = DDP(m)
    else:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.device_mesh import init_device_mesh
        fully_shard(m, mesh=init_device_mesh("cpu",(2,)))
    o = torch.optim.SGD(m.parameters(), lr=.1); out=[]
    for k in range(3):
        x = torch.full((4,8), dist.get_rank()+k+1.0)
        l = m(x).square().mean(); o.zero_grad(); l.backward(); o.step(); out.append(l.detach())
    return out + [(p.to_local() if hasattr(p,"to_local") else p).detach().clone() for p in m.parameters()]
def rank(r, d, kind):
    run = shadowrun.compare("cpu[threads=1]", file=d+"/run.shadowrun")
    dist.init_process_group("gloo", rank=r, world_size=2, init_method="file://"+d+"/s")
    a = steps(kind)
    with run: b = steps(kind)
    same = all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    i = run.info
    os.write(1, f"{kind} {r} {same} {i.rank} {i.world_size} {i.notes}\\n".encode())
    assert os.path.exists(f"{d}/run.{r}.shadowrun") and not os.path.exists(d + "/run.shadowrun")
    dist.destroy_process_group()
if __name__=="__main__":
    import tempfile
    mp.spawn(rank, (tempfile.mkdtemp(), sys.argv[1]), nprocs=2)
"""


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks(kind, tmp_path):
    program = tmp_path / "ranks.py"
    program.write_text(RANKS)
    done = subprocess.run([sys.executable, str(program), kind], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"{kind} {rank} True {rank} 2 ()" in done.stdout
