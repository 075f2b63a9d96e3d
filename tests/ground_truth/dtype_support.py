"""Which operators of torch's database the CPU runs in 16 bits: by the database, in fact, and with which results.

python -m tests.ground_truth.dtype_support FILE [--op GLOB] [--samples N]

Each entry that has float32 runs on its float32 samples, with the floats cast. Each operator inside is judged against
the same on float32 copies of its inputs, rounded once. FILE gets lines of JSON, the first when an entry begins; started
again, this goes on behind it, also where that entry ended the process.
"""

import argparse
import contextlib
import fnmatch
import json
import sys
import warnings
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from shadowrun.judge.judge import Judge
from shadowrun.studies.sweep import opinfo
from shadowrun.studies.sweep.inputs import Sample, copied
from shadowrun.types import Cause, Status
from tests.case_kit import make_case
from tests.ground_truth.short_dtypes import SHORT, rounded_once

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CPU = torch.device("cpu")
_NEVER = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}


class Deviating(TorchDispatchMode):
    """Judges each operator with 16-bit inputs against its float32 result, rounded once.

    Attributes:
        found: Operators whose 16-bit result no correct implementation could have returned.
    """

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        plain = all(type(t) is torch.Tensor and t.layout is torch.strided for t in given)
        named = not func.is_view and not _NEVER & set(func.tags) and "empty" not in func.name()
        if named and plain and any(t.dtype in SHORT for t in given):
            self._judge(func, args, kwargs)
        return func(*args, **kwargs)

    def _judge(self, func, args, kwargs):
        ideal = rounded_once(func)
        if ideal is None:
            return
        state = torch.get_rng_state()
        try:
            fresh_args, fresh_kwargs = tree_map(
                lambda v: v.clone() if isinstance(v, torch.Tensor) else v, (args, kwargs)
            )
            verdict, _ = Judge()(make_case(func, ideal, *fresh_args, **fresh_kwargs))
        except Exception:  # no float32 form, or not this dtype: the call itself shows it
            return
        finally:
            torch.set_rng_state(state)
        if verdict.status is Status.MISMATCH and verdict.cause is Cause.REFERENCE:
            self.found.add(func.name())


def cast(sample, dtype):
    """A float32 sample in another dtype."""

    def each(value):
        if isinstance(value, torch.Tensor):
            return value.detach().to(dtype) if value.dtype is torch.float32 else value
        return dtype if value is torch.float32 else value

    return Sample(*tree_map(each, tuple(sample)), stays=sample.stays)


def ran(function, sample, mode):
    """What came of one sample: empty if it ran, else the exception."""
    x, args, kwargs = copied(sample, _CPU, grad=False)
    try:
        with torch.no_grad(), mode:
            function(x, *args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]
    return ""


def examine(name, n_samples):
    """Lines on an entry, one for each dtype."""
    info = opinfo.database()[name]
    made = opinfo.samples(name, "float32", 0, n_samples, grad=False)
    valid = [s for s in made if not ran(info.op, s, contextlib.nullcontext())]
    for word, dtype in DTYPES.items():
        mode = Deviating()
        errors = [ran(info.op, cast(s, dtype), mode) for s in valid]
        yield {
            "operator": name,
            "dtype": word,
            "claimed": word in opinfo.dtypes(info),
            "samples": len(valid),
            "refused": sum(map(bool, errors)),
            "error": next(filter(None, errors), ""),
            "deviating": sorted(mode.found),
        }


def main(arguments=None):
    """Examine what is not yet in the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--op", default="*", help="glob of entries")
    parser.add_argument("--samples", type=int, default=3)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    lines = options.file.read_text(encoding="utf-8").splitlines() if options.file.exists() else []
    begun = {json.loads(line)["operator"] for line in lines}
    with options.file.open("a", encoding="utf-8") as file:
        for name, info in opinfo.database().items():
            if name in begun or "float32" not in opinfo.dtypes(info) or not fnmatch.fnmatchcase(name, options.op):
                continue
            # Who dies in it has said its name.
            print(json.dumps({"operator": name}), file=file, flush=True)
            for line in examine(name, options.samples):
                print(json.dumps(line), file=file, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
