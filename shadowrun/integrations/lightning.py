"""`Callback`: compare the training steps of Lightning's `Trainer`."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from shadowrun.integrations.training import ComparedTraining

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from shadowrun.comparison import Comparison
    from shadowrun.config import Options

__all__ = ["Callback"]


def _lightning() -> Any:
    """Lightning under the name that the program uses: each name has classes of its own."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in names:
        if name in sys.modules:
            return sys.modules[name]
    try:
        return importlib.import_module(names[0])
    except ImportError:
        return importlib.import_module(names[1])


_Base: Any = _lightning().Callback


class Callback(_Base):  # type: ignore[misc]
    """Compares each training step of a Lightning `Trainer`; validation, tests and the sanity check are not compared.

    A step ends where ``trainer.global_step`` has grown: all batches of a gradient accumulation are one. No failure of
    shadowrun raises into the training.

    Args:
        target, ref: Platforms, as for `shadowrun.compare`.
        log_to: Logger of the figures; see `shadowrun.integrations.log_to`. None logs to the trainer's own loggers, and
            False logs nothing.
        every: Log at each so many steps.
        **options: Those of `shadowrun.compare`.

    Attributes:
        run: The comparison: ``callback.run.write("report.html")`` after ``trainer.fit(model)``.

    Raises:
        UsageError: A wrong option.
        PlatformError: Unknown or absent platform.

    Example:
        >>> callback = Callback("npu", file="train.shadowrun", steps=[0, 100])  # doctest: +SKIP
        >>> Trainer(callbacks=[callback]).fit(model)  # doctest: +SKIP
    """

    def __init__(
        self, target: Any, ref: Any = "cpu", *, log_to: Any = None, every: int = 10, **options: Unpack[Options]
    ) -> None:
        self._training = ComparedTraining(target, ref, options, log_to or None, every)
        self._own_loggers = log_to is None
        self._n_steps = 0

    @property
    def run(self) -> Comparison:
        """The comparison."""
        return self._training.run

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """The training begins, after the sanity check."""
        self._n_steps = trainer.global_step
        self._training.begin()
        if self._own_loggers:
            self._own_loggers = False
            for logger in trainer.loggers:
                self._training.log_to(logger)

    def on_train_batch_start(self, *_: Any) -> None:
        """A batch comes."""
        self._training.resume()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """A batch is done; the optimizer may have stepped."""
        if trainer.global_step != self._n_steps:
            self._n_steps = trainer.global_step
            self._training.end_step(self._n_steps)

    def on_validation_start(self, *_: Any) -> None:
        """A validation begins, perhaps within a gradient accumulation."""
        self._training.pause()

    def on_train_end(self, *_: Any) -> None:
        """The training is over."""
        self._training.finish()

    def on_exception(self, *_: Any) -> None:
        """The training has raised."""
        self._training.finish()
