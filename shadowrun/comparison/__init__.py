"""The only place where the stages meet: `compare()`, and what it returns."""

from shadowrun.comparison.comparison import Comparison, compare, current

__all__ = ["Comparison", "compare", "current"]
