"""Keeps the inputs of the first and of the worst call of each finding, within a budget, to show them alone later."""

from __future__ import annotations

import contextlib
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.torchapi import with_isolated_warnings
from shadowrun.replay.context import SLOW, InputsFile
from shadowrun.replay.copies import mirror, written_to
from shadowrun.store import captured_inputs
from shadowrun.store.captured_inputs import StoredCall
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shadowrun.intercept.plan import OpPlan
    from shadowrun.store.datafile import DataFile

__all__ = ["Capturing"]

_CPU = torch.device("cpu")
# One large call must not use up what later findings need.
_SHARE = 4  # of the budget, for one call
# A full disk fails each time, and each try costs copies of all inputs.
_MAX_FAILURES = 3
# So often the worst call of a finding gives way to a worse one; then only to one that is twice as bad: where each call
# is worse than the last, each would be written.
_MAX_WORSE = 64
_FAULTS = (Status.MISMATCH, Status.UNSUPPORTED, Status.ERROR, Status.FALLBACK)
# Neither bugs of shadowrun nor draws can be shown by the inputs alone.
_NO_INPUTS_HELP = (Cause.HARNESS, Cause.RANDOMNESS)
_NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class _Worst:
    """The worst call of a finding so far, and the file of its inputs; None where that is the first call's."""

    severity: float
    kept: InputsFile | None = None
    n_replaced: int = 0

    def is_replaceable_by(self, severity: float) -> bool:
        return severity > (self.severity if self.n_replaced < _MAX_WORSE else 2 * self.severity)


class Capturing:
    """Writes inputs of failing calls to a folder next to the data file.

    Args:
        data: The data file.
        budget: Bytes for the whole run; a call may take a quarter of it.
    """

    def __init__(self, data: DataFile, budget: int) -> None:
        self._data = data
        self._left = budget
        self._max_call_bytes = budget // _SHARE
        self._worst: dict[tuple[Any, ...], _Worst] = {}
        self._number = -1
        self._failures = 0
        # The comparing thread and the calling threads both keep inputs.
        self._lock = threading.Lock()

    def bytes_for_inputs(self, plan: OpPlan, verdict: Verdict, severity: float = 0.0) -> int | None:
        """Bytes that the inputs of a call may take; None where they are not wanted: `keep_inputs` would keep nothing.

        Args:
            plan: The operator.
            verdict: What became of the call.
            severity: How bad it is; see `store.schema.severity`.
        """
        if (verdict.status not in _FAULTS and verdict is not SLOW) or verdict.cause in _NO_INPUTS_HELP:
            return None
        worst = self._worst.get(_kind(plan, verdict))
        if worst is not None and not worst.is_replaceable_by(severity):
            return None
        return max(0, min(self._max_call_bytes, self._left))

    def keep_inputs(
        self, plan: OpPlan, verdict: Verdict, inputs: Any, written: Sequence[torch.Tensor] = (), severity: float = 0.0
    ) -> InputsFile | None:
        """Keep the inputs of a call if it is the first of its kind, or worse than all before; never raises.

        Args:
            plan: The operator.
            verdict: What became of the call.
            inputs: Its arguments as before the call, on any device.
            written: Those that the call writes to, in addition to those of the operator's schema.
            severity: How bad it is; see `store.schema.severity`.

        Returns:
            What was kept; None where nothing was.
        """
        if self._left <= 0 or inputs is None or not self.bytes_for_inputs(plan, verdict, severity):
            return None
        try:
            with self._lock:
                # Copying calls operators, whose warnings are not the program's.
                kept: InputsFile | None = with_isolated_warnings(self._keep, (), (plan, inputs, written))
        except Exception:  # too large, of an odd kind, or the disk is full: a later call may do
            return None
        return None if kept is None else self._remember(_kind(plan, verdict), kept, severity)

    def _remember(self, kind: tuple[Any, ...], kept: InputsFile, severity: float) -> InputsFile:
        """The first call's inputs stay; of the others only those of the worst."""
        worst = self._worst.get(kind)
        if worst is None:
            self._worst[kind] = _Worst(severity)
            return kept
        former, worst.severity = worst.kept, severity
        worst.n_replaced += 1
        if former is not None:
            with contextlib.suppress(OSError):
                # The finding's other file: two for each finding are enough.
                (self._data.tensors / former.file).unlink()
                self._left += former.n_bytes
            kept = InputsFile(kept.file, kept.n_bytes, former.file)
        worst.kept = kept
        return kept

    def _keep(self, plan: OpPlan, inputs: Any, written: Sequence[torch.Tensor]) -> InputsFile | None:
        args, kwargs = inputs
        max_bytes = min(self._max_call_bytes, self._left)
        # The inputs may lie on a device, and the file has to load without it.
        args, kwargs = mirror(args, kwargs, _CPU, max_bytes, written=[*written_to(plan, args, kwargs), *written])
        call = StoredCall(plan.name, _detached(args), {k: _detached(v) for k, v in kwargs.items()})
        folder = self._data.tensors
        if self._number < 0:
            # Asked late: most runs keep nothing and never read the folder.
            self._number = captured_inputs.free_number(folder)
        name = f"{self._number}.pt"
        try:
            n_bytes = captured_inputs.save(folder, name, call)
        except OSError:
            self._failures += 1
            if self._failures >= _MAX_FAILURES:
                self._left = 0
            return None
        if n_bytes > self._left:  # a file takes a little more than its tensors
            (folder / name).unlink()
            return None
        self._number += 1
        self._left -= n_bytes
        return InputsFile(name, n_bytes)


def _kind(plan: OpPlan, verdict: Verdict) -> tuple[Any, ...]:
    """The same for two calls of one finding: figures in an explanation change from call to call."""
    return plan.index, verdict.status, verdict.cause, _NUMBER.sub("#", verdict.explanation)


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (list, tuple)):
        return tuple(_detached(v) for v in value)
    return value
