"""Results of replayed calls as a recording, so that they are compared with the recorded ones as two recordings are."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from shadowrun.recording.digests import digest
from shadowrun.recording.model import CALL, NONE, RESULT, Form, Kind, Process
from shadowrun.recording.recording_file import Block, in_memory
from shadowrun.recording.step_outputs import content_of
from shadowrun.replay.call import argument
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadowrun.intercept.plan import OpPlan
    from shadowrun.recording.digests import Digest
    from shadowrun.recording.model import Context, Recording
    from shadowrun.replay.call import Ran

__all__ = ["ResultRows"]

_WIDE: Final = {float: torch.float64, complex: torch.complex128}
_STATISTICS: Final = (
    *("n_nan", "n_pos_inf", "n_neg_inf", "n_zero", "n_neg_zero", "n_subnormal"),
    *("min", "max", "norm"),
)
_MAX_POSITION: Final = 255


class ResultRows:
    """Collects digests of the results of calls, in the form of the recording that the calls come from.

    Args:
        recording: The recording.
        device: Type of the device that runs the calls.
    """

    def __init__(self, recording: Recording, device: str) -> None:
        self._recording = recording
        self._contexts: list[Context] = [c._replace(device=device if c.device else "") for c in recording.contexts]
        self._forms: dict[Form, int] = {}
        self._calls: list[tuple[int, int, int, int]] = []
        self._results: list[tuple[int, int, int, Digest | None]] = []
        self._kept: set[tuple[int, int]] = set()
        self._outputs: dict[int, bytes] = {}

    def add(self, call: int, plan: OpPlan, ran: Ran, *, stand_in: bool) -> None:
        """Add a call.

        Args:
            call: Its number in the recording.
            plan: The operator.
            ran: Its run here.
            stand_in: Another operator ran for it, whose first result alone is comparable.
        """
        row = self._recording.calls[call]
        context, n_before = int(row["context"]), len(self._results)
        self._kept = self._kept_results(call)
        for position, value in enumerate(_returned(plan, ran)):
            if value is not _WRITTEN:
                self._add(Kind.RESULT, position, value)
        for position, value in enumerate(v for a in plan.mutated for v in _flat(argument(a, ran.args, ran.kwargs))):
            if isinstance(value, torch.Tensor):
                self._add(Kind.WRITTEN, position, value)
        if stand_in:  # a name of its own: the comparison then takes the first result only
            context = len(self._contexts)
            self._contexts.append(self._contexts[int(row["context"])]._replace(op=f"{plan.name} (stand-in)"))
        self._calls.append((int(row["step"]), context, int(row["occurrence"]), len(self._results) - n_before))

    def _kept_results(self, call: int) -> set[tuple[int, int]]:
        """Kind and position of the results of which the recording has all elements."""
        recording = self._recording
        rows = [row for row in recording.results_of(call) if row in recording.outputs] if recording.outputs else []
        return {(int(recording.results["kind"][row]), int(recording.results["position"][row])) for row in rows}

    def _add(self, kind: Kind, position: int, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            # On the CPU: the program may have set another default device.
            value = torch.tensor(value, dtype=_WIDE.get(type(value)), device="cpu")
        is_strided = value.layout is torch.strided and not value.is_nested
        dtype = str(value.dtype).removeprefix("torch.")
        form = Form(dtype, tuple(value.shape), tuple(value.stride()) if is_strided else (), str(value.layout)[6:])
        number = self._forms.setdefault(form, len(self._forms))
        found, position = digest(value), min(position, _MAX_POSITION)
        if found is not None and (int(kind), position) in self._kept:
            self._outputs[len(self._results)] = content_of(value)
        self._results.append((number, int(kind), position, found))

    def recording(self) -> Recording:
        """The calls so far as a recording: call k is the k-th that was added."""
        calls = np.zeros(len(self._calls), CALL)
        for row, values in zip(calls, self._calls, strict=True):
            row["step"], row["context"], row["occurrence"], row["n_results"] = values
        calls["kernel"] = NONE
        results = np.zeros(len(self._results), RESULT)
        results["base"] = NONE
        rungs, samples = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
        for row, (form, kind, position, found) in zip(results, self._results, strict=True):
            row["form"], row["kind"], row["position"] = form, kind, position
            if found is not None:
                row["n_rungs"], row["n_samples"] = len(found.rungs), len(found.samples)
                for name in _STATISTICS:
                    row[name] = getattr(found, name)
                rungs.append(found.rungs)
                samples.append(found.samples)
        none = np.empty(0, np.uint64)
        block = Block(calls, results, np.empty(0, np.int64), np.concatenate(rungs), np.concatenate(samples), none)
        made = in_memory("replay", Process("replay", complete=True), block, self._contexts, list(self._forms))
        return dataclasses.replace(made, outputs=self._outputs)


class _Written:
    """Stands for a return that is an argument which the call wrote to."""


_WRITTEN: Final = _Written()


def _returned(plan: OpPlan, ran: Ran) -> Iterator[Any]:
    """What a call returned, lists taken apart, as the recorder numbers it."""
    returns = schema_of(plan.func).returns
    written = {i for i, r in enumerate(returns) if r.alias_info is not None and r.alias_info.is_write}
    out = (ran.out,) if plan.n_returns == 1 else ran.out if isinstance(ran.out, (list, tuple)) else ()
    for number, value in enumerate(out):
        for v in _flat(value):
            yield _WRITTEN if plan.mutated and number in written else v


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for v in value:
            yield from _flat(v)
    elif value is not None:
        yield value
