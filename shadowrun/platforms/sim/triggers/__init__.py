"""Ordinary user code on which each flaw matters, in files named as in `catalogue`.

Each trigger takes a device's name and runs as well on ``"cpu"``. Those of missing operators raise on a device
that has the flaw.
"""

from shadowrun.platforms.sim.triggers import exceptional, form, kernel, memory, precision, support, training
from shadowrun.platforms.sim.triggers.base import TRIGGERS

__all__ = ["TRIGGERS", "exceptional", "form", "kernel", "memory", "precision", "support", "training"]
