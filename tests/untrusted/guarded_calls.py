"""Changes torch's own sample calls, and makes those that a file may have made; run by test_guard_pages.py.

A process for many calls: where one ends it, the next goes on behind that call. Prints the operators that did.
"""

from __future__ import annotations

import copy
import ctypes
import json
import mmap
import os
import random
import resource
import signal
import struct
import sys
import time
import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from shadowrun.intercept.argument_places import has_places
from shadowrun.intercept.checked_calls import check_call
from shadowrun.intercept.op_allowlist import Refused
from tests.untrusted.test_calls_of_files import PROGRAMS

MAX_ELEMENTS, MAX_CALLS, MAX_MEMORY = 5000, 6, 3 << 30
NUMBERS = (0, 1, -1, 2, 3, 7, 64, 1000, 10**6, 2**31, 2**62, -(2**63), True, torch.tensor(3), torch.float32)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)


class Kept(TorchDispatchMode):
    """Keeps calls of operators that are looked at."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kept = self.calls.setdefault(func, [])
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        is_small = all(t.layout is torch.strided and t.numel() <= MAX_ELEMENTS for t in tensors)
        if len(kept) < MAX_CALLS and is_small and has_places(func._schema.name):
            kept.append(
                tree_map(lambda v: v.detach().clone() if isinstance(v, torch.Tensor) else v, (args, kwargs or {}))
            )
        return func(*args, **(kwargs or {}))


def samples():
    """Calls of each operator, forward and backward."""
    with Kept() as kept:
        for info in op_db:
            if info.name not in PROGRAMS or torch.float32 not in info.dtypes:
                continue
            try:
                for given in list(info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd))[
                    :MAX_CALLS
                ]:
                    out = info.op(given.input, *given.args, **given.kwargs)
                    outs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
                    if outs:
                        torch.autograd.backward([t.abs().sum() for t in outs])
            except Exception:  # a sample that needs what is not here
                continue
    return {func: calls for func, calls in kept.calls.items() if calls}


def changed(chance, value):
    """The value with another size, dtype, layout or content."""
    if isinstance(value, torch.Tensor):
        kind, shape = chance.randrange(6), list(value.shape)
        if kind < 3 and shape:
            at = chance.randrange(len(shape))
            shape[at] = chance.choice((0, 1, shape[at] + 1, 2 * shape[at], max(0, shape[at] - 1)))
            flat = value.flatten() if value.numel() else value.new_zeros(1)
            return flat[torch.arange(torch.Size(shape).numel()) % flat.numel()].reshape(shape)
        if kind == 3:
            return value.to(chance.choice(DTYPES))
        if kind == 4 and value.dim() > 1:
            return value.transpose(0, -1)
        if value.numel() and value.dtype is torch.int64:
            value = value.clone()
            value.view(-1)[chance.randrange(value.numel())] = chance.choice((-1, 10**6, 2**62))
        return value
    if isinstance(value, (list, tuple)) and value:
        value = list(value)
        at = chance.randrange(len(value))
        return chance.choice(
            (value[:-1], [*value, value[0]], [*value[:at], changed(chance, value[at]), *value[at + 1 :]])
        )
    return chance.choice(NUMBERS)


def call_of(chance, calls):
    func = chance.choice(sorted(calls, key=str))
    args, kwargs = copy.copy(chance.choice(calls[func]))
    args = list(args)
    for _ in range(chance.choice((1, 1, 2))):
        if args:
            at = chance.randrange(len(args))
            args[at] = changed(chance, args[at])
    return func, args, kwargs


def make(calls, seed, n, page, until):
    """Make calls from number `n` on; ends with the process."""
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
    while time.monotonic() < until:
        page[:8] = struct.pack("q", n)
        signal.alarm(20)  # a number of a file may ask for any time
        func, args, kwargs = call_of(random.Random(f"{seed} {n}"), calls)
        n += 1
        try:
            check_call(func, args, kwargs)
        except (Refused, MemoryError):
            continue
        library.guard_set(1)
        try:
            with torch.no_grad():
                placed = tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, (args, kwargs))
                func(*placed[0], **placed[1])
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, MemoryError):
            pass
        finally:
            placed = None
            library.guard_set(0)
    os._exit(0)


def main(seed, seconds):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    calls, ended, n = samples(), [], 0
    page, until = mmap.mmap(-1, 8), time.monotonic() + seconds
    while time.monotonic() < until:
        pid = os.fork()
        if not pid:
            make(calls, seed, n, page, until)
        _, status = os.waitpid(pid, 0)
        n = struct.unpack("q", page[:8])[0] + 1
        if os.WIFSIGNALED(status):
            func, args, _ = call_of(random.Random(f"{seed} {n - 1}"), calls)
            shown = [str(list(t.shape) if isinstance(t, torch.Tensor) else t) for t in tree_leaves(args)]
            ended.append([func.name(), os.WTERMSIG(status), shown])
    print(json.dumps({"made": n, "ended": ended}))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
