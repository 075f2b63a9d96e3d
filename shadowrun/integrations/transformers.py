"""`TrainerCallback`: compare the training steps of transformers' `Trainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers

from shadowrun.integrations.training import ComparedTraining

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from shadowrun.comparison import Comparison
    from shadowrun.config import Options

__all__ = ["TrainerCallback"]

_Base: Any = transformers.TrainerCallback


class TrainerCallback(_Base):  # type: ignore[misc]
    """Compares each training step of a `Trainer`; evaluations are not compared.

    A step is one of the optimizer: all micro-batches of a gradient accumulation are one. No failure of shadowrun raises
    into the training.

    Args:
        target, ref: Platforms, as for `shadowrun.compare`.
        log_to: Logger of the figures; see `shadowrun.integrations.log_to`. For the trainer's own log, call
            `log_to(trainer)` once there is a trainer.
        every: Log at each so many steps.
        **options: Those of `shadowrun.compare`.

    Attributes:
        run: The comparison: ``callback.run.write("report.html")`` after ``trainer.train()``.

    Raises:
        UsageError: A wrong option.
        PlatformError: Unknown or absent platform.

    Example:
        >>> callback = TrainerCallback("npu", file="train.shadowrun", steps=[0, 100])  # doctest: +SKIP
        >>> Trainer(model, args, train_dataset=data, callbacks=[callback]).train()  # doctest: +SKIP
    """

    def __init__(
        self, target: Any, ref: Any = "cpu", *, log_to: Any = None, every: int = 10, **options: Unpack[Options]
    ) -> None:
        self._training = ComparedTraining(target, ref, options, log_to, every)

    @property
    def run(self) -> Comparison:
        """The comparison."""
        return self._training.run

    def log_to(self, logger: Any, every: int | None = None) -> None:
        """Also log the figures to this logger, such as the trainer itself.

        Raises:
            UsageError: It is no logger.
        """
        self._training.log_to(logger, every)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The training begins."""
        self._training.begin()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """The first micro-batch of a step comes."""
        self._training.resume()

    def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        """The optimizer has stepped."""
        self._training.end_step(state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """The training is over."""
        self._training.finish()
