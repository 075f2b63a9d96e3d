"""`compare`: a comparison of a training loop with accelerate, logged to the accelerator's trackers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import shadowrun
from shadowrun.integrations.loggers import log_to as _log_to

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from shadowrun.comparison import Comparison
    from shadowrun.config import Options

__all__ = ["compare"]


def compare(
    accelerator: Any,
    target: Any,
    ref: Any = "cpu",
    *,
    log_to: Any = None,
    every: int = 10,
    **options: Unpack[Options],
) -> Comparison:
    """`shadowrun.compare` for a loop with an `Accelerator`: steps are those of its optimizer.

    Micro-batches inside ``accelerator.accumulate(model)`` end no step, nor does a step that a gradient scaler left out.
    Call `pause` before an evaluation and `start` after it.

    Args:
        accelerator: The `Accelerator`.
        target: Platform under test, as for `shadowrun.compare`.
        ref: Trusted platform.
        log_to: Logger of the figures; None logs to the accelerator's trackers, and False logs nothing.
        every: Log at each so many steps.
        **options: Those of `shadowrun.compare`.

    Returns:
        The comparison, a context manager.

    Raises:
        UsageError: A wrong option.
        PlatformError: Unknown or absent platform.

    Example:
        >>> with compare(accelerator, "npu", file="train.shadowrun") as run:  # doctest: +SKIP
        ...     train(model, accelerator)
    """
    run = shadowrun.compare(target, ref, **options)
    if log_to is not False:
        _log_to(run, accelerator if log_to is None else log_to, every)
    return run
