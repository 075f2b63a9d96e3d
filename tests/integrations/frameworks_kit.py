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


# A thread of gloo releases the tensors of a finished collective. Where these have Python objects and the interpreter
# has begun to shut down, waiting for the GIL ends the thread inside a destructor, and the process aborts: a plain
# program too (torch 2.13, with a delay in these threads). A group that no model holds any more joins its threads when
# it is destroyed; accelerate keeps its group, so that the threads get a second.
_ENDING = """
main()
import gc, time, torch
gc.collect()
torch.distributed.destroy_process_group()
time.sleep(1)
"""


def run_on_two_ranks(folder, program):
    """Run the `main` of a program by torchrun, in a folder."""
    (folder / "train.py").write_text(program + _ENDING, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
