"""What the tests of all frameworks train and expect."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import shadowrun


class Kept:
    def __init__(self):
        self.rows = []

    def log(self, values, step=None):
        self.rows.append((step, values))


class Rows(Dataset):
    def __init__(self, n=8):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(n, 4, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.x[i, :1]}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def by_step(run):
    """Step to number of forward calls of the first layer's matrix product."""
    found = {}
    for record in run.records(op="aten::addmm"):
        found[record.call.step] = found.get(record.call.step, 0) + 1
    return found


def assert_is_over():
    assert shadowrun.current() is None
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def run_on_two_ranks(folder, program):
    """Run a program by torchrun, in a folder."""
    (folder / "train.py").write_text(program, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
