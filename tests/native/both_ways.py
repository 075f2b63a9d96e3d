"""A program compared with itself twice in one process: by the handler in C, and by Python."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

import shadowrun
from shadowrun.intercept import attribution
from shadowrun.numerics import bits
from shadowrun.recording import recorder
from shadowrun.replay import comparator
from shadowrun.replay.paths import native_handler, same_device
from tests.transparency.checking import Outcome, differences, seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun import Comparison

WAYS = {"compared": {}, "recorded": {"replay": False}}


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    """Comparisons that begin inside use no C on the path of a call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_handler, "core", None)
        patch.setattr(attribution, "core", None)
        patch.setattr(recorder, "context_key", recorder._python_key)
        patch.setattr(bits, "_native_plainly_equal", None)
        for user in (bits, same_device, comparator):
            patch.setattr(user, "plainly_equal", bits._plainly_equal)
        yield


def both_ways(program: Callable[[Comparison], Any], **options: Any) -> Comparison:
    """Run a program each way and hold the two against each other; returns the comparison by the compiled handler."""
    with in_python():
        once(program, **options)  # some warnings come once for each process
        slowly, other = once(program, **options)
    quickly, run = once(program, **options)
    assert run._replayer.native_handler is not None
    assert other._replayer.native_handler is None
    assert differences(slowly, quickly) == []
    assert quickly.warned == slowly.warned
    assert skipped(run) == skipped(other)
    for mine, theirs in zip(records(run), records(other), strict=True):  # one by one: that names the one
        assert mine == theirs
    return run


def once(program: Callable[[Comparison], Any], **options: Any) -> tuple[Outcome, Comparison]:
    """What a program saw while it was compared with itself, where its warnings came included."""
    seed()
    state: dict[str, Any] = {}
    error = ""
    run = shadowrun.compare("cpu", ref="cpu", **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with run:
                # The second time, the compiled handler knows the lines and forms that Python saw first.
                state["out"] = [program(run), program(run)]
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
    warned = [f"{w.category.__name__}: {w.message} {w.filename}:{w.lineno}" for w in caught]
    return Outcome(state, error, warned, (torch.get_rng_state().tolist(),)), run


def records(run: Comparison) -> list[str]:
    """All that a record holds but times."""
    return [repr((r.call, r.verdict, r.diffs, r.missing_kernel)) for r in run.records()]


def skipped(run: Comparison) -> list[tuple[Any, ...]]:
    """The calls that were only counted, with their reasons."""
    sql = "select op.name, device, reason, n from skipped join op on op.id = op_id order by 1, 2, 3"
    run.counts()  # writes what waits
    return list(run._data.query(sql))


def handled(run):
    """Whether calls went by the compiled handler: it counts its own time."""
    return run._replayer.native_handler is not None and run._replayer.native_handler.own_ns > 0
