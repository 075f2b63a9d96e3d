"""The calls to time: those of a recorded run with their counts, or one of each operator of torch's test database.

Of the database (OpInfo), element-wise operators and reductions get about a million elements, so that the kernel
dominates the time. All other operators get the largest of their samples, which are small: a time of a few microseconds
is the overhead of a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.errors import UsageError
from shadowrun.intercept.untrusted.op_allowlist import Refused
from shadowrun.repro.call_replayer import operator
from shadowrun.store.datafile import DataFile
from shadowrun.store.records import REGION
from shadowrun.studies.slowdown.timing import FunctionJob, OperatorJob
from shadowrun.studies.sweep import opinfo
from shadowrun.studies.sweep.exceptional_inputs import ordinary
from shadowrun.studies.sweep.inputs import is_plain, leaves, printed
from shadowrun.studies.sweep.recorded_calls import UnreadableCall, sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from shadowrun.studies.sweep.inputs import Sample

__all__ = ["Call", "CallMix", "Entry", "entries", "names_of", "read_mix"]

# A run in memory folds its oldest matches: of these only the number of each context is kept.
# By the number of the operator: SQLite would write a name of a megabyte to the disk for each of its contexts.
_CALLS = """
select op_id, inputs, max(shapes), sum(n) from (
    select context_id, count(*) as n from call group by context_id
    union all select context_id, n from folded
) join context on context.id = context_id
group by op_id, inputs
"""


@dataclass(frozen=True, slots=True)
class Call:
    """A call signature of a run.

    Attributes:
        op: Operator, ``aten::add.Tensor``.
        inputs: As recorded, ``f32[8, 16], f32[16]``.
        n: Calls of it in the run.
        shapes: Shapes of all its tensors; `inputs` shortens long lists.
    """

    op: str
    inputs: str
    n: int
    shapes: str = ""

    @property
    def summary(self) -> Call:
        """The call itself, which is already short."""
        return self

    def job(self, seed: int) -> OperatorJob:
        """The call with newly sampled values.

        Raises:
            UnreadableCall: The call cannot be rebuilt.
        """
        try:
            plan = operator(self.op)
        except AttributeError:
            raise UnreadableCall(f"this process has no operator {self.op}") from None
        except Refused as why:
            raise UnreadableCall(str(why)) from None
        made = sample(self.op, self.inputs, seed, self.shapes)
        return OperatorJob(plan, made.args, dict(made.kwargs or {}))


@dataclass(frozen=True, slots=True)
class CallMix:
    """The calls of a run, with their counts.

    Attributes:
        calls: The most frequent first.
        n_steps: Steps of the run, 1 if it recorded none.
        target, ref: Platforms of the run.
    """

    calls: tuple[Call, ...]
    n_steps: int
    target: str
    ref: str


def read_mix(path: Path) -> CallMix:
    """Read the calls of a run, without compiled regions, whose kernels are no operators.

    Raises:
        DataFileError: Missing, or no data file.
    """
    # Grouped by the text of the inputs: lists that it shortens alike count as one call.
    data = DataFile.open(path)
    names = dict(data.query("select id, name from op"))
    rows = [Call(names[op], inputs, n, shapes) for op, inputs, shapes, n in data.query(_CALLS)]
    calls = tuple(sorted((c for c in rows if not c.op.startswith(REGION)), key=lambda c: (-c.n, c.op, c.inputs)))
    (n_steps,) = next(iter(data.query("select count(distinct step) from step")))
    return CallMix(calls, max(1, n_steps), data.info.target, data.info.ref)


# A million elements, by number of dimensions.
_SHAPES = {1: (1 << 20,), 2: (1024, 1024), 3: (64, 128, 128), 4: (16, 16, 64, 64)}
# Least share of finite results for a large input; with fewer, the largest sample is used instead.
_MIN_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Entry:
    """One operator of the database.

    Attributes:
        op: Its name with its variant, ``linalg.norm.subgradients_at_zero``.
        dtype: ``float32``.
        sample: The inputs.
    """

    op: str
    dtype: str
    sample: Sample

    @property
    def summary(self) -> Call:
        """The call with its inputs as text, ``f32[1024, 1024], dim=1``."""
        return Call(self.op, printed(self.sample), 1)

    def job(self, _: int) -> FunctionJob:
        """The forward call."""
        return FunctionJob(opinfo.database()[self.op].op, self.sample)


def names_of(patterns: Sequence[str], dtype: str) -> list[str]:
    """Operators of the database.

    Args:
        patterns: Globs; none for all.
        dtype: Dtype that the operators must support on the CPU, ``float32``.

    Raises:
        UsageError: No operator fits, or the database cannot be imported.
    """
    names = [
        name
        for name, info in opinfo.database().items()
        if dtype in opinfo.dtypes(info) and (not patterns or any(fnmatchcase(name, p) for p in patterns))
    ]
    if not names:
        raise UsageError(
            f"No operator of torch's database fits --ops {','.join(patterns) or '*'} in {dtype}: "
            "`shadowrun sweep --list` names them.",
            slug="sweep-nothing",
        )
    return names


def entries(names: Iterable[str], dtype: str, seed: int) -> Iterator[Entry]:
    """One call for each operator, generated lazily; operators without samples are skipped."""
    for name in names:
        sample = _chosen(name, dtype, seed)
        if sample is not None:
            yield Entry(name, dtype, sample)


def _chosen(name: str, dtype: str, seed: int) -> Sample | None:
    try:
        samples = opinfo.samples(name, dtype, seed, None, grad=False)
    except Exception:  # some samples need a device or a library that is absent
        return None
    if not samples:
        return None
    largest = max(samples, key=_n_elements)
    # The largest sample: the others are edge cases, such as empty tensors.
    return _enlarged(name, largest) or largest


def _n_elements(sample: Sample) -> int:
    return sum(t.numel() for t in leaves(tuple(sample)) if t.layout is torch.strided)


def _enlarged(name: str, sample: Sample) -> Sample | None:
    """The same call on about a million elements, if the operator accepts any shape."""
    info = opinfo.database()[name]
    kind = type(info).__name__
    if kind not in ("UnaryUfuncInfo", "BinaryUfuncInfo", "ReductionOpInfo"):
        return None
    tensors = [t for t in leaves(tuple(sample)) if is_plain(t)]
    if not all(t.is_floating_point() for t in tensors) or not isinstance(sample.input, torch.Tensor):
        return None
    shape = _SHAPES.get(sample.input.dim())
    if shape is None:
        return None
    large = sample.changed(lambda t: _large(t, shape))
    return large if large is not None and _is_valid(info, large) else None


def _large(t: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    # Most domains (log, sqrt, powers) have the positive numbers.
    return ordinary(shape, t.dtype).abs() if is_plain(t) and t.dim() else t


def _is_valid(info: Any, sample: Sample) -> bool:
    """Whether the CPU accepts the sample and most results are finite; if not, the operator has a narrower domain."""
    x, args, kwargs = sample
    try:
        with torch.no_grad():
            out = info.op(x, *args, **kwargs)
    except Exception:
        return False
    results = [t for t in leaves([out]) if t.is_floating_point() and t.numel()]
    return all(float(t.isfinite().double().mean()) >= _MIN_SHARE for t in results)
