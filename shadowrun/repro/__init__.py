"""Stand-alone scripts that show one finding: a few lines of plain torch, the inputs, and the versions."""

from shadowrun.repro.builder import make
from shadowrun.repro.script import Repro

__all__ = ["Repro", "make"]
