"""Stand-alone scripts that show one finding: a few lines of plain torch, the inputs, and the versions."""

from shadowrun.repro.making import Repro, make

__all__ = ["Repro", "make"]
