"""Stand-alone scripts that show one finding: a few lines of plain torch, the inputs, and the versions."""

from shadowrun.repro.builder import write_script
from shadowrun.repro.script import Repro, ReproOptions, why_no_inputs

__all__ = ["Repro", "ReproOptions", "why_no_inputs", "write_script"]
