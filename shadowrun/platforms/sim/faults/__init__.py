"""What the flaws do to the kernels, in files named as in `catalogue`. Importing it fills `bench.FAULTS`."""

from shadowrun.platforms.sim.faults import exceptional, fatal, form, kernel, memory, precision, support, training

__all__ = ["exceptional", "fatal", "form", "kernel", "memory", "precision", "support", "training"]
