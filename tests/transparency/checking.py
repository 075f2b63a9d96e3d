"""Runs one case plainly and observed, and lists what is not the same to the last bit."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import shadowrun
from shadowrun import Cause, Status
from shadowrun.comparison.nan_track import NanTrack
from shadowrun.comparison.record import RecordRun
from shadowrun.intercept import torchapi
from shadowrun.numerics.bits import Uncomparable, bits_equal
from tests.transparency.cases import Case, cases, seed, used_devices

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Outcome:
    """All that a program can see of a run."""

    state: dict[str, Any]
    error: str
    warned: list[str]
    streams: tuple[Any, ...]


@dataclass
class Result:
    """What became of one entry of a database in one dtype.

    Attributes:
        cases: Programs run; each is either identical or in one of the first four lists.
        calls: Operator calls that were replayed and compared, or recorded.
        different: Programs that shadowrun changed.
        crashed: Programs that could not be run.
        unmade: Samples that the database itself cannot make in a dtype that it names; no comparison was running.
        by_torch: Programs that any dispatch mode changes, one that does nothing included, and that shadowrun changes
            in just the same way: torch takes other paths where a mode is active.
        unstable: Programs that are not the same twice by themselves.
        false_reports: Reported by a comparison of a platform with itself; failures of a recording.
        unverified: Calls that were not compared, by reason.
    """

    db: str
    dtype: str
    op: str
    cases: int = 0
    identical: int = 0
    calls: int = 0
    different: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    unmade: list[str] = field(default_factory=list)
    by_torch: list[str] = field(default_factory=list)
    unstable: list[str] = field(default_factory=list)
    false_reports: list[str] = field(default_factory=list)
    unverified: dict[str, int] = field(default_factory=dict)


Observed = shadowrun.Comparison | RecordRun | NanTrack


def check(run: Observed, db: str, name: str, info: Any, dtype: str, samples: int | None, device: str = "cpu") -> Result:
    """Run all cases of an entry plainly and under a comparison or recording, which gets a step of its own."""
    result = Result(db, dtype, name)
    before = _n_calls(run)
    failures = _failures(run)
    step = run._recorder.step
    generated: Iterator[Case] = cases(db, info, dtype, samples, device)
    while True:
        try:
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")
                case = next(generated, None)
        except Exception as error:  # the database cannot make its samples here: said, not hidden
            result.unmade.append(f"{type(error).__name__}: {str(error)[:200]}")
            break
        if case is None:
            break
        _check_case(run, case, result)
    run.step()
    result.calls = _n_calls(run) - before
    if isinstance(run, RecordRun | NanTrack):
        result.false_reports += [f"{n} calls: {why}" for why, n in (_failures(run) - failures).items()]
        return result
    for record in run.records(status=[Status.MISMATCH, Status.ERROR, Status.UNVERIFIED], step=step):
        verdict = record.verdict
        text = f"{record.call.op}: {verdict.explanation}"
        if verdict.status is Status.UNVERIFIED and verdict.cause is not Cause.HARNESS:
            result.unverified[text] = result.unverified.get(text, 0) + 1
        else:
            where = record.diffs[0].detail if record.diffs else ""
            line = f"{verdict.status} {text} ({verdict.cause}) {verdict.evidence} {where} on {record.call.inputs}"
            result.false_reports.append(line[:700])
    return result


def _n_calls(run: Observed) -> int:
    # Not `counts`, which reads all calls of the run again.
    return run.n_calls if isinstance(run, RecordRun | NanTrack) else run.last_call() + 1


def _failures(run: Observed) -> Counter[str]:
    """Calls that a recording lost by a fault of its own."""
    if not isinstance(run, RecordRun | NanTrack):
        return Counter()
    return Counter({reason: n for reason, n in run.skipped.items() if "failure" in reason})


def _check_case(run: Observed, case: Case, result: Result) -> None:
    try:
        kind, found = classify(case, run)
    except NotPrepared as error:
        if "out=" not in case.label:
            result.cases += 1
            result.crashed.append(f"{case.label}: {error}")
        return
    result.cases += 1
    if kind == "identical":
        result.identical += 1
    else:
        getattr(result, kind).append(f"{case.label}: {'; '.join(found[:3])}"[:600])


def classify(case: Case, run: contextlib.AbstractContextManager[Any]) -> tuple[str, list[str]]:
    """What a mode does to a program: a kind, named as in `Result`, and in words what is not the same.

    What torch changes is found by running the program under a mode that does nothing: no list of operators says it.
    """
    plain = execute(case, None)
    observed = execute(case, run)
    found = differences(plain, observed, form_only=case.form_only)
    if not found:
        return "identical", []
    # Once more, all of it: some warnings are given once per process.
    again, idle, observed = execute(case, None), execute(case, IdleMode()), execute(case, run)
    own = differences(plain, again, form_only=case.form_only, warned=False)
    if own or (case.unstable and not differences(plain, observed, form_only=True)):
        return "unstable", own or found
    if not differences(again, observed, form_only=case.form_only):
        return ("identical", []) if all(d.startswith("warnings") for d in found) else ("different", found)
    by_torch = differences(again, idle, form_only=case.form_only)
    # `linalg.matrix_rank(out=)` writes nothing under a mode: what differs under the idle mode is not checked.
    form_only = case.form_only or differences(idle, execute(case, IdleMode())) != []
    if found := differences(idle, observed, form_only=form_only):
        return "different", found
    return "by_torch", by_torch


class IdleMode(torchapi.DispatchMode):  # type: ignore[no-untyped-call]
    """The least that a dispatch mode can do: what it changes, torch changes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for t in types):
            return NotImplemented
        return func(*args, **(kwargs or {}))


class NotPrepared(Exception):
    """The inputs of a case could not be made on this device."""


def execute(case: Case, mode: contextlib.AbstractContextManager[Any] | None) -> Outcome:
    """Run a case once, from the same seeds."""
    state: dict[str, Any] = {}
    error = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            state["inputs"], program = case.prepare()
        except Exception as failure:
            raise NotPrepared(f"{type(failure).__name__}: {str(failure)[:200]}") from failure
    seed()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            with mode or contextlib.nullcontext():
                program(state)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
    streams = (torch.get_rng_state().tolist(), random.getstate(), *(d.get_rng_state().tolist() for d in used_devices()))
    texts = [f"{w.category.__name__}: {w.message}" for w in warned]
    return Outcome(state, error, texts, streams)


def differences(plain: Outcome, observed: Outcome, *, form_only: bool = False, warned: bool = True) -> list[str]:
    """What is not the same in two outcomes, in words."""
    found = []
    if plain.error != observed.error:
        found.append(f"exception {plain.error[:200]!r} became {observed.error[:300]!r}")
    if plain.streams != observed.streams:
        found.append("random streams")
    left, right = list(_leaves("", plain.state)), list(_leaves("", observed.state))
    if [path for path, _ in left] != [path for path, _ in right]:
        found.append(f"structure {[p for p, _ in left][:8]} became {[p for p, _ in right][:8]}")
    else:
        for (path, a), (_, b) in zip(left, right, strict=True):
            found += [f"{path}: {text}" for text in _unlike(a, b, form_only=form_only)]
        if _aliases(left) != _aliases(right):
            found.append("aliasing")
    if warned and plain.warned != observed.warned:
        found.append(f"warnings {plain.warned[:2]} became {observed.warned[:3]}"[:300])
    return found


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, v in value.items():
            yield from _leaves(f"{path}.{key}", v)
    elif isinstance(value, (list, tuple)):
        for i, v in enumerate(value):
            yield from _leaves(f"{path}[{i}]", v)
    else:
        yield path, value
        if isinstance(value, torch.Tensor) and value.is_leaf and value.grad is not None:
            yield f"{path}.grad", value.grad


def _unlike(a: Any, b: Any, *, form_only: bool) -> Iterator[str]:
    if type(a) is not type(b):
        yield f"{type(a).__name__} became {type(b).__name__}"
    elif isinstance(a, torch.Tensor):
        form_a, form_b = _form(a), _form(b)
        if form_a != form_b:
            yield from (f"{k} {form_a[k]} became {form_b[k]}" for k in form_a if form_a[k] != form_b[k])
        elif not form_only and not _same_bits(a.detach(), b.detach()):
            yield "values"
    elif isinstance(a, torch.Generator):
        if not torch.equal(a.get_state(), b.get_state()):
            yield "generator state"
    elif isinstance(a, (int, float, complex, str)) and not bits_equal(a, b):  # type: ignore[arg-type]
        yield f"{a!r} became {b!r}"


def _form(t: torch.Tensor) -> dict[str, Any]:
    plain = t.layout is torch.strided and not t.is_nested
    return {
        "dtype": t.dtype,
        "shape": tuple(t.shape) if not t.is_nested else t.dim(),
        "layout": t.layout,
        "device": t.device,
        "stride": t.stride() if plain else (),
        "offset": t.storage_offset() if plain else 0,
        "storage bytes": t.untyped_storage().nbytes() if plain and not t.is_meta else 0,
        "bits": (t.is_conj(), t.is_neg(), t._is_zerotensor(), t.is_inference()),
        "grad": (t.requires_grad, t.is_leaf, type(t.grad_fn).__name__),
        "version": None if t.is_inference() else t._version,
    }


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.device.type != "cpu":
        try:
            a, b = a.cpu(), b.cpu()
        except RuntimeError:  # layouts that cannot leave the device: their form was compared
            return True
    try:
        return bits_equal(a, b)
    except Uncomparable:
        return torch.equal(a.to_dense(), b.to_dense())


def _aliases(leaves: list[tuple[str, Any]]) -> list[int]:
    """For each tensor, the first that lies on the same storage."""
    first: dict[int, int] = {}
    found = []
    for i, (_, t) in enumerate(leaves):
        if isinstance(t, torch.Tensor) and t.layout is torch.strided and not t.is_nested and not t.is_meta:
            found.append(first.setdefault(t.untyped_storage()._cdata, i))
    return found
