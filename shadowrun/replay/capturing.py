"""Keeps the inputs of the first call of each finding, within a budget, so that it can be shown alone later."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.torchapi import unheard
from shadowrun.replay.mirror import mirror, written_to
from shadowrun.store import tensors
from shadowrun.store.tensors import Captured
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shadowrun.intercept.plan import OpPlan
    from shadowrun.store.datafile import DataFile

__all__ = ["SLOW", "Capturing"]

SLOW = Verdict(Status.MATCH, Cause.SLOW)
"""Stands for a call that was right and far slower on the target."""

_CPU = torch.device("cpu")
_SHARE = 4  # of the budget, for one call
_MOST_FAILURES = 3
_FAULTS = (Status.MISMATCH, Status.UNSUPPORTED, Status.ERROR, Status.FALLBACK)
_NO_INPUTS_HELP = (Cause.HARNESS, Cause.RANDOMNESS)
_NUMBER = re.compile(r"\d+")


class Capturing:
    """Writes inputs of failing calls beside the data file.

    Args:
        data: The data file.
        budget: Bytes for the whole run; a call may take a quarter of it.
    """

    def __init__(self, data: DataFile, budget: int) -> None:
        self._data = data
        self._left = budget
        self._most = budget // _SHARE
        self._seen: set[tuple[Any, ...]] = set()
        self._number = -1
        self._failures = 0
        self._lock = threading.Lock()

    def room(self, plan: OpPlan, verdict: Verdict) -> int | None:
        """Bytes that the inputs of a call may take; None where they are not wanted: `keep` would keep nothing.

        Args:
            plan: The operator.
            verdict: What became of the call.
        """
        if (verdict.status not in _FAULTS and verdict is not SLOW) or verdict.cause in _NO_INPUTS_HELP:
            return None
        return None if _kind(plan, verdict) in self._seen else max(0, min(self._most, self._left))

    def keep(
        self, plan: OpPlan, verdict: Verdict, inputs: Any, written: Sequence[torch.Tensor] = ()
    ) -> tuple[str, int] | None:
        """Keep the inputs of a call if it is the first of its kind; never raises.

        Args:
            plan: The operator.
            verdict: What became of the call.
            inputs: Its arguments as before the call, on any device.
            written: Those that the call writes to, beside those of the operator's schema.

        Returns:
            Name and size of the file; None where nothing was kept.
        """
        if self._left <= 0 or inputs is None or not self.room(plan, verdict):
            return None
        try:
            with self._lock:
                kept: tuple[str, int] | None = unheard(self._keep, (), (plan, inputs, written))
        except Exception:  # too large, of an odd kind, or the disk is full: a later call may do
            return None
        if kept is not None:
            self._seen.add(_kind(plan, verdict))
        return kept

    def _keep(self, plan: OpPlan, inputs: Any, written: Sequence[torch.Tensor]) -> tuple[str, int] | None:
        args, kwargs = inputs
        most = min(self._most, self._left)
        args, kwargs = mirror(args, kwargs, _CPU, most, written=[*written_to(plan, args, kwargs), *written])
        call = Captured(plan.name, _detached(args), {k: _detached(v) for k, v in kwargs.items()})
        folder = self._data.tensors
        if self._number < 0:
            self._number = tensors.free_number(folder)
        name = f"{self._number}.pt"
        try:
            n_bytes = tensors.save(folder, name, call)
        except OSError:
            self._failures += 1
            if self._failures >= _MOST_FAILURES:
                self._left = 0
            return None
        if n_bytes > self._left:  # a file takes a little more than its tensors
            (folder / name).unlink()
            return None
        self._number += 1
        self._left -= n_bytes
        return name, n_bytes


def _kind(plan: OpPlan, verdict: Verdict) -> tuple[Any, ...]:
    """The same for two calls of one finding: figures in an explanation change from call to call."""
    return plan.index, verdict.status, verdict.cause, _NUMBER.sub("#", verdict.explanation)


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (list, tuple)):
        return tuple(_detached(v) for v in value)
    return value
