"""Changes torch's own sample calls, and makes those that a file may have made; run by test_guard_pages.py.

python -m tests.untrusted.guarded_calls SEED SECONDS [PART PARTS] [--out], with the library preloaded.

With --out, each operator writes to results that it is given (``out=``): of another size, dtype or layout, or in the
memory of its inputs.

A process for many calls: where one ends it, the next goes on behind that call. Prints the operators that did,
and how many calls were taken and made.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import itertools
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

from shadowrun.intercept.untrusted.checked_calls import _Copies, check_call
from shadowrun.intercept.untrusted.op_allowlist import Refused, check_operator
from shadowrun.operators.vendor_ops import COUNTERPARTS
from tests.untrusted.unsampled_calls import unsampled

MAX_ELEMENTS, MAX_CALLS, MAX_MEMORY = 5000, 6, 3 << 30
NUMBERS = (0, 1, -1, 2, 3, 7, 64, 1000, 10**6, 2**31, 2**62, -(2**63), True, torch.tensor(3), torch.float32)
FLOATS = (float("nan"), float("inf"), float("-inf"), 1e30, -1e9, 5.0, -5.0)
LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)


class Kept(TorchDispatchMode):
    """Keeps calls that a file may have made."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kept = self.calls.setdefault(func, [])
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if len(kept) < MAX_CALLS and all(t.numel() <= MAX_ELEMENTS for t in tensors):
            with contextlib.suppress(Refused):
                check_operator(func)
                kept.append(
                    tree_map(lambda v: v.detach().clone() if isinstance(v, torch.Tensor) else v, (args, kwargs or {}))
                )
        return func(*args, **(kwargs or {}))


def backward(out):
    outs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    if outs:
        torch.autograd.backward([t.abs().sum() for t in outs])


def programs():
    """What torch's samples of operators lack: recurrent layers, attention, sparse tensors, optimizers."""
    nn, x, table = torch.nn, torch.randn(5, 2, 4), torch.randn(4, 4).relu()
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        yield lambda kind=kind: kind(4, 3, 2, bidirectional=True)(x)[0]
        yield lambda kind=kind: kind(4, 3)(nn.utils.rnn.pack_padded_sequence(x, [5, 3]))[0].data
    yield lambda: nn.MultiheadAttention(4, 2)(x, x, x)[0]
    yield lambda: nn.TransformerEncoderLayer(4, 2, 8).eval()(x)
    yield lambda: nn.EmbeddingBag(5, 3, sparse=True)(torch.tensor([1, 2]), torch.tensor([0]))
    yield lambda: nn.Embedding(5, 3, sparse=True)(torch.tensor([1, 2]))
    for layout in LAYOUTS:
        for call in (
            *(torch.mm, torch.mul, torch.add, torch.sparse.mm, torch.Tensor.sparse_mask, torch.sparse.spsolve),
            *(lambda s, _: torch.sparse.sum(s, 0), lambda s, _: torch.sparse.softmax(s, 1), lambda s, _: s @ s),
            *(lambda s, t: torch.addmm(t, s, t), lambda s, t: torch.sparse.sampled_addmm(s, t, t), lambda s, _: s[0]),
            *(lambda s, _: s.to_dense(), lambda s, _: torch.cat([s, s]), lambda s, t: torch.mv(s, t[0])),
            *(lambda s, t: torch.sparse.mm(s, t, "amax"), lambda s, t: t + s, torch.hspmm),
            *(
                lambda s, t: torch.sspaddmm(s, s, t),
                lambda s, _: s.to_sparse_csr(),
                lambda s, _: s.to_sparse_bsr((2, 2)),
            ),
            *(lambda s, _: s.index_select(0, torch.tensor([1, 2])), lambda s, _: s.coalesce(), lambda s, _: s.t()),
        ):
            yield lambda call=call, layout=layout: call(table.to_sparse(layout=layout).requires_grad_(), table)
    for kind in ("SGD", "Adam", "AdamW", "Adagrad"):
        for how in ("fused", "foreach"):
            parameter = nn.Parameter(table.clone())
            parameter.grad = table.clone()
            yield getattr(torch.optim, kind)([parameter], lr=0.1, **{how: True}).step


def stand_ins():
    """Calls of other devices, for which the CPU computes something of its own."""
    x, weights = torch.randn(5, 2, 3), [torch.randn(16, 3), torch.randn(16, 4), torch.randn(16), torch.randn(16)]
    state, q = torch.randn(1, 2, 4), torch.randn(1, 2, 4, 8)
    rnn = (2, 4, 0, 1, False, 0.0, False, False, [], None)
    image, channels = torch.randn(2, 3, 4, 4), torch.ones(3)
    grid = torch.rand(2, 5, 5, 2)
    calls = {
        "_cudnn_rnn": (x, weights, 4, None, state, state, *rnn),
        "_cudnn_rnn_backward": (
            *(x, weights, 4, x[0], state, state, torch.randn(5, 2, 4), torch.randn(5, 2, 4), None, None, *rnn, x[0]),
            [True] * 4,
        ),
        "_scaled_dot_product_efficient_attention": (q, q, q, None, False),
        "_scaled_dot_product_flash_attention": (q, q, q),
        "_scaled_dot_product_cudnn_attention": (q, q, q, None, False),
        "_scaled_dot_product_efficient_attention_backward": (
            *(q, q, q, q, None, q, q[..., 0], torch.tensor(1), torch.tensor(1), 0.0, [True] * 4),
        ),
        "cudnn_batch_norm": (image, channels, channels, channels, channels, True, 0.1, 1e-5),
        "cudnn_batch_norm_backward": (image, image, channels, channels, channels, channels, channels, 1e-5, channels),
        "cudnn_grid_sampler": (image, grid),
        "cudnn_grid_sampler_backward": (image, grid, torch.randn(2, 3, 5, 5)),
    }
    return {getattr(torch.ops.aten, name).default: [(args, {})] for name, args in calls.items()}


def samples(part, parts):
    """Calls of each operator, forward and backward; of every so many entries of torch's database."""
    with Kept() as kept:
        for program in programs():
            with contextlib.suppress(Exception):  # a layout without this operator
                backward(program())
        for info in op_db[part::parts]:
            for dtype in (torch.float32, torch.int64, torch.complex64, torch.bfloat16):
                if dtype not in info.dtypes:
                    continue
                needs = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
                with contextlib.suppress(Exception):  # a sample that needs what is not here
                    for given in itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=needs), MAX_CALLS):
                        backward(info.op(given.input, *given.args, **given.kwargs))
    found = {func: calls for func, calls in kept.calls.items() if calls} | stand_ins()
    for func, calls in itertools.islice(unsampled().items(), part, None, parts):
        found.setdefault(func, []).extend(calls)
    return found


def with_results(calls):
    """The same calls of the overloads that take their results (``out=``), with results that fit."""
    found = {}
    for func, kept in calls.items():
        taken = [(a.name, str(a.type)) for a in func._schema.arguments]
        packet = getattr(getattr(torch.ops, func.namespace), func._opname)
        for overload in (getattr(packet, name) for name in packet.overloads()):
            declared = overload._schema.arguments
            results = [a.name for a in declared if a.is_out]
            if not results or [(a.name, str(a.type)) for a in declared if not a.is_out] != taken:
                continue
            for args, kwargs in kept:
                with contextlib.suppress(Refused, RuntimeError, ValueError, TypeError, NotImplementedError):
                    check_operator(overload)
                    with torch.no_grad():
                        made = func(*copied(args), **copied(kwargs))
                    outs = [made] if len(results) == 1 else list(made)
                    found.setdefault(overload, []).append((args, kwargs | dict(zip(results, outs, strict=True))))
    return found


def result_of(chance, value, inputs):
    """In the place of a result: one of another form, or the memory of an input or of another result."""
    if isinstance(value, (list, tuple)):
        return [result_of(chance, v, inputs) for v in value]
    if not isinstance(value, torch.Tensor):
        return value
    kind = chance.randrange(10)
    n = chance.choice((0, 0, 1, 1, 2, max(0, value.numel() - 1)))
    dense = [t for t in inputs if t.layout is torch.strided and not t.is_conj() and not t.is_neg()]
    if kind < 3 and value.layout is torch.strided:
        dim = chance.choice((0, 1, value.dim()))
        return value.new_zeros(n).reshape([-1] + [1] * (dim - 1)) if dim or n != 1 else value.new_zeros(())
    if kind < 5 and dense:
        shared = chance.choice(dense)
        with contextlib.suppress(RuntimeError):  # strides that are no multiple
            shared = shared.view(value.dtype)
        return chance.choice((shared, shared.reshape(-1)[:n], shared.reshape(-1)[n:], shared.reshape(-1)[n:n]))
    if kind == 5 and value.layout is torch.strided:  # elements with gaps, in memory that is no longer than needed
        gapped = value.new_zeros([2 * k for k in value.shape])
        return gapped[tuple(slice(0, None, 2) for _ in value.shape)]
    return changed(chance, value) if kind < 9 else value


def changed(chance, value):
    """The value with another size, dtype, layout or content."""
    if isinstance(value, torch.Tensor):
        try:
            return _changed(chance, value)
        except (RuntimeError, IndexError, ValueError, TypeError):  # of a layout that cannot be changed so
            return value
    if isinstance(value, (list, tuple)) and value:
        value = list(value)
        at = chance.randrange(len(value))
        return chance.choice(
            (value[:-1], [*value, value[0]], [*value[:at], changed(chance, value[at]), *value[at + 1 :]])
        )
    return chance.choice((*NUMBERS, *FLOATS))


def _changed(chance, value):
    kind, shape = chance.randrange(10), list(value.shape)
    layout = value.layout
    if layout is not torch.strided:
        dense = changed(chance, value.to_dense())
        return chance.choice((dense, dense.to_sparse(layout=chance.choice((layout, *LAYOUTS)))))
    if kind < 3 and shape:
        at = chance.randrange(len(shape))
        shape[at] = chance.choice((0, 1, shape[at] + 1, 2 * shape[at], 50 * shape[at], max(0, shape[at] - 1)))
        flat = value.flatten() if value.numel() else value.new_zeros(1)
        return flat[torch.arange(torch.Size(shape).numel()) % flat.numel()].reshape(shape)
    if kind == 3:
        return value.to(chance.choice(DTYPES))
    if kind == 4 and value.dim() > 1:
        return value.transpose(0, -1)
    if kind == 8 and value.dim() and value.numel():  # one element, or row, in the place of all
        dim = chance.randrange(value.dim())
        return value.narrow(dim, 0, 1).clone().expand_as(value)
    if kind == 9 and value.dim():
        return value.repeat_interleave(2, -1)[..., ::2]
    if kind == 5 and value.dim() == 2 and not chance.randrange(4):
        return value.to_sparse(layout=chance.choice(LAYOUTS))
    if kind == 6 and value.dtype is torch.bool:
        return torch.full_like(value, 255, dtype=torch.uint8).view(torch.bool)
    if kind == 6 and value.is_floating_point() and value.numel():
        value = value.clone(memory_format=torch.contiguous_format)
        value.view(-1)[chance.randrange(value.numel())] = chance.choice(FLOATS)
    if value.numel() and value.dtype is torch.int64:
        value = value.clone()
        value.view(-1)[chance.randrange(value.numel())] = chance.choice((-1, 10**6, 2**62))
    return value


def call_of(chance, calls):
    func = chance.choice(sorted(calls, key=str))
    args, kwargs = copy.copy(chance.choice(calls[func]))
    args, results = list(args), [a.name for a in func._schema.arguments if a.is_out]
    for _ in range(chance.choice((0, 0, 1) if results else (1, 1, 2))):
        if args:
            at = chance.randrange(len(args))
            args[at] = changed(chance, args[at])
    for name in results:
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        kwargs = kwargs | {name: result_of(chance, kwargs[name], inputs)}
    return func, args, kwargs


def copied(values):
    """Copies with the strides of the tensors: kernels may believe that memory is dense."""
    copies = _Copies()
    return tree_map(lambda v: copies.copy(v) if isinstance(v, torch.Tensor) else v, values)


def place_of_page(n, args, kwargs):
    """A page behind each tensor, or before; where MKL gets a sparse matrix, a vector lies between (guard_pages.c)."""
    if n % 2:
        return 2
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return 3 if any(t.layout in LAYOUTS[1:] for t in tensors) else 1


def make(calls, seed, n, page, until):
    """Make calls from number `n` on; ends with the process."""
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
    (taken,) = struct.unpack("q", page[8:])
    while time.monotonic() < until:
        page[:] = struct.pack("qq", n, taken)
        signal.alarm(20)  # a number of a file may ask for any time
        func, args, kwargs = call_of(random.Random(f"{seed} {n}"), calls)
        n += 1
        own = COUNTERPARTS.get(func.name())
        try:
            check_call(func, args, kwargs, stand_in=own)
        except (Refused, MemoryError):
            continue
        taken += 1
        library.guard_set(place_of_page(n, args, kwargs))
        try:
            with torch.no_grad():
                placed = copied((args, kwargs))
                (own or func)(*placed[0], **placed[1])
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, MemoryError):
            pass
        finally:
            placed = None
            library.guard_set(0)
    os._exit(0)


def _shown(value):
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"{value.dtype} {list(value.shape)} {value.stride() if value.layout is torch.strided else value.layout}"


def main(seed, seconds, part=0, parts=1, *, out=False):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    calls, ended, n = samples(part, parts), [], 0
    calls = with_results(calls) if out else calls
    page, until = mmap.mmap(-1, 16), time.monotonic() + seconds
    while time.monotonic() < until:
        pid = os.fork()
        if not pid:
            make(calls, seed, n, page, until)
        _, status = os.waitpid(pid, 0)
        n = struct.unpack("q", page[:8])[0] + 1
        if os.WIFSIGNALED(status):
            func, args, kwargs = call_of(random.Random(f"{seed} {n - 1}"), calls)
            shown = [_shown(v) for v in tree_leaves((args, kwargs))]
            ended.append([func.name(), os.WTERMSIG(status), shown])
    print(json.dumps({"made": n, "taken": struct.unpack("q", page[8:])[0], "ended": ended}))


if __name__ == "__main__":
    given = [a for a in sys.argv[1:] if a != "--out"]
    main(int(given[0]), float(given[1]), *map(int, given[2:]), out="--out" in sys.argv)
