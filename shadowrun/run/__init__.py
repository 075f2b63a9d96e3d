"""The results of a comparison, read from its data file."""

from shadowrun.run.files import combine, load
from shadowrun.run.run import SLOW_RATIO, Run

__all__ = ["SLOW_RATIO", "Run", "combine", "load"]
