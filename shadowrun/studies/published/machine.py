"""This machine in one line, for all studies."""

from __future__ import annotations

from shadowrun.platforms import resolve
from shadowrun.platforms.fingerprint import fingerprint
from shadowrun.report.document import Fact

__all__ = ["machine_fact"]


def machine_fact() -> Fact:
    """Processor, instruction sets and libraries: measured figures hold for these."""
    facts = fingerprint(resolve("cpu"))
    words = (
        *(facts["cpu"], f"{facts['cores']} cores", f"flags {facts['cpu_flags']}", facts["cpu_capability"]),
        *(f"torch {facts['torch']}", f"MKL {facts['mkl'] or 'none'}", f"oneDNN {facts['onednn'] or 'none'}"),
    )
    return Fact("machine", ", ".join(words))
