"""Stand-alone scripts that show one finding: a few lines of plain torch, the inputs, and the versions."""

from shadowrun.repro.builder import write_script
from shadowrun.repro.script import Repro, ReproOptions

__all__ = ["Repro", "ReproOptions", "write_script"]
