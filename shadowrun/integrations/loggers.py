"""`log_to`: figures of a comparison in TensorBoard, W&B, MLflow, accelerate, or any object with `log`."""

from __future__ import annotations

import inspect
import os
import time
import warnings
from typing import TYPE_CHECKING, Any

from shadowrun.errors import ShadowrunWarning, UsageError, brief
from shadowrun.types import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shadowrun.comparison import Comparison
    from shadowrun.types import RunInfo

__all__ = ["FigureLog", "figures", "log_to", "warn"]

# Reading the figures takes longer the longer the run is, so their share of its time is limited.
_MAX_SHARE = 0.02


def figures(run: Comparison) -> dict[str, float]:
    """Findings, mismatches and unsupported calls so far, calls compared, and the overhead."""
    counts = run.counts()
    values: dict[str, float] = {
        "findings": len(run.findings()),
        "mismatches": counts.get(Status.MISMATCH, 0),
        "unsupported": counts.get(Status.UNSUPPORTED, 0),
        "calls": sum(n for status, n in counts.items() if status is not Status.SKIPPED),
    }
    overhead = _overhead(run.info)
    if overhead:
        values["overhead"] = overhead
    return {f"shadowrun/{name}": float(value) for name, value in values.items()}


def _overhead(info: RunInfo) -> float:
    """Time of the program in units of its time without shadowrun; 0 if not measured."""
    if info.budget:
        return float(info.budget["achieved"])
    alone = info.wall_s - info.own_s
    return info.wall_s / alone if alone > 0 else 0.0


def log_to(run: Comparison, logger: Any, every: int = 1) -> None:
    """Log the figures of a comparison at the end of its steps, and when it stops.

    Args:
        run: The comparison.
        logger: A TensorBoard `SummaryWriter`, the module or a run of W&B, the module of MLflow, an `Accelerator`, a
            logger of Lightning, a `Trainer` of transformers, or any object with ``log(values, step=...)``.
        every: Log at each so many steps. Steps are left out where the figures, which are read from the data file,
            would take more than 2 % of the time.

    Raises:
        UsageError: The logger has none of these methods, or `every` is not a whole number >= 1.
    """
    log = FigureLog(logger, every)

    def after_step(comparison: Comparison) -> None:
        log.add(comparison, comparison.step_number, last=not comparison.running)

    run.after_step(after_step)


class FigureLog:
    """Sends `figures` to a logger. What the logger raises becomes one warning.

    In a distributed run, only rank 0 logs: its figures are those of its own calls.
    """

    def __init__(self, logger: Any, every: Any) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise UsageError(f"every={brief(every)}: use a whole number of steps >= 1.", slug="bad-logger")
        self._send = _sender(logger)
        self._every = every
        self._n_steps = 0
        self._step = -1
        self._cost_ns = 0
        self._ended_ns = 0
        self._warned = False

    def add(self, run: Comparison, step: int, *, last: bool = False) -> None:
        """Log a step that ended.

        Args:
            run: The comparison.
            step: Its number in the log.
            last: Log it in any case, unless it was logged.
        """
        self._n_steps += 1
        began_ns = time.perf_counter_ns()
        # Reading takes longer the longer the run is.
        is_due = self._n_steps % self._every == 0 and self._cost_ns <= _MAX_SHARE * (began_ns - self._ended_ns)
        if step == self._step or not (is_due or last) or _rank() > 0:
            return
        try:
            self._send(figures(run), step)
            self._step = step
        except Exception as error:
            if not self._warned:
                self._warned = True
                warn(f"the logger raised {type(error).__name__}: {brief(str(error))}")
        self._ended_ns = time.perf_counter_ns()
        self._cost_ns = self._ended_ns - began_ns


def warn(problem: str) -> None:
    """One warning, which never raises, not even where warnings are errors."""
    try:
        text = f"shadowrun: {problem}. Your program was not affected."
        warnings.warn(text, ShadowrunWarning, stacklevel=2)
    except ShadowrunWarning:
        pass


def _sender(logger: Any) -> Callable[[Mapping[str, float], int], object]:
    """The function that sends values of a step to a logger."""
    add_scalar, log, log_metrics, log_dict = (
        method if callable(method := getattr(logger, name, None)) else None
        for name in ("add_scalar", "log", "log_metrics", "log_dict")
    )
    if add_scalar is not None:
        return lambda values, step: [add_scalar(name, value, step) for name, value in values.items()]
    # By their parameters: `log` of a Lightning module takes a name and a value, and `log_metrics` of transformers'
    # Trainer the name of a data set.
    if log is not None and _n_required(log) < 2:
        if _takes_step(log):
            return lambda values, step: log(dict(values), step=step)
        control = getattr(logger, "control", None)
        return lambda values, _: _log_keeping(control, log, dict(values))
    if log_metrics is not None and _takes_step(log_metrics):
        return lambda values, step: log_metrics(dict(values), step=step)
    if log_dict is not None:
        return lambda values, _: log_dict(dict(values))
    raise UsageError(
        f"{brief(logger)} is no logger: give an object with log(values, step=...), log_metrics or add_scalar, such as "
        "a SummaryWriter, a run of W&B, the module mlflow or an Accelerator.",
        slug="bad-logger",
    )


def _log_keeping(control: Any, log: Callable[..., object], values: dict[str, float]) -> None:
    """Log without that transformers' Trainer takes its own log of this step, with the loss, for done."""
    # That log gathers the loss of all ranks: a rank that leaves it out has the others fail.
    was_due = getattr(control, "should_log", None)
    try:
        log(values)
    finally:
        if was_due is not None:
            control.should_log = was_due


def _parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of a function in C
        return []


def _n_required(function: Callable[..., object]) -> int:
    """Number of parameters that need a value, `step` apart."""
    needed = (p for p in _parameters(function) if p.default is p.empty and p.name != "step")
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in needed)


def _takes_step(function: Callable[..., object]) -> bool:
    return any(p.name == "step" or p.kind is p.VAR_KEYWORD for p in _parameters(function))


def _rank() -> int:
    """This process's place in a distributed run."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0
