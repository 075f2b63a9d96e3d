"""Comparisons in training frameworks; each module imports its framework only when it is imported itself.

`shadowrun.integrations.transformers.TrainerCallback`, `shadowrun.integrations.lightning.Callback`,
`shadowrun.integrations.accelerate.compare`, and `log_to` for any logger.
"""

from shadowrun.integrations.loggers import log_to

__all__ = ["log_to"]
