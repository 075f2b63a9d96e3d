"""What a comparison costs in memory, measured in a process of its own.

``python -m tests.transparency.memory steps`` trains a small model for 10,000 steps and prints what the process grew by;
``... peak`` runs calls on tensors of 64 MiB and prints the highest it came to, plainly and compared.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shadowrun

MIB = 1 << 20
WARM_UP = 200
SIDE = 4096


def status(key: str) -> int:
    """A size of this process in bytes: ``VmRSS``, ``VmHWM``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(key)


def resident() -> int:
    """What the process holds, free memory of the allocator given back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return status("VmRSS")


def steps(n: int, target: str, **options: Any) -> dict[str, Any]:
    """Growth in bytes of `n` training steps under a comparison, after a few to warm up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(16, 8), torch.randn(16, 1)
    run = shadowrun.compare(target, **options)
    before = 0
    with run:
        for i in range(n + WARM_UP):
            if i == WARM_UP:
                before = resident()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            run.step()
        after = resident()
        calls = sum(run.counts().values())
    return {"steps": n, "calls": calls, "grown": after - before}


def large(tensor: torch.Tensor) -> None:
    """Calls on large tensors, and nothing of them kept."""
    tensor.add(tensor)
    tensor.mul_(1.5)
    tensor.exp_().clamp_(0, 2)
    tensor.t().contiguous()
    tensor.sum(0)
    torch.cat([tensor[: SIDE // 2], tensor[SIDE // 2 :]])
    tensor[:, ::2].add_(1)
    torch._foreach_mul_([tensor[: SIDE // 2], tensor[SIDE // 2 :]], 0.5)
    tensor.requires_grad_().sigmoid().sum().backward()


def peak(target: str, max_bytes: int, flaws: tuple[str, ...] = ()) -> dict[str, int]:
    """Highest memory of `large` above where it began, plainly and compared."""
    from shadowrun import sim

    sim.enable("sim")
    found = {}
    with sim.flaws(*flaws):
        for name in ("small", "plain", "compared"):
            run = shadowrun.compare(target, max_bytes=max_bytes) if name != "plain" else None
            side = 8 if name == "small" else SIDE  # first, all that is loaded once
            tensor = torch.rand(side, side)
            before = resident()
            Path("/proc/self/clear_refs").write_text("5")  # the highest begins anew
            if run is not None:
                with run:
                    large(tensor)
            else:
                large(tensor)
            found[name] = status("VmHWM") - before
            if run is not None and name == "compared":
                found |= {str(status): n for status, n in run.counts().items() if n}
    return found


if __name__ == "__main__":
    what, *options = sys.argv[1:]
    torch.set_num_threads(1)
    if what == "steps":
        n = int(options[1]) if len(options) > 1 else 10_000
        target = options[0] if options else "cpu"
        with tempfile.TemporaryDirectory() as folder:
            kept = {"file": Path(folder) / "run.shadowrun"} if "file" in options else {}
            print(json.dumps(steps(n, target, drift="drift" in options, **kept)))
    else:
        target, mib, *names = [*options, *["cpu", "1024"][len(options) :]]
        print(json.dumps(peak(target, int(mib) * MIB, tuple(names))))
