"""What ends or blocks the process: kept out of the catalogue, since no comparison inside that process can report it.

They are for what runs operators in processes of its own, such as `shadowrun sweep`.
"""

from __future__ import annotations

from shadowrun.platforms.sim.flaw import Flaw

__all__ = ["FLAWS"]


def _flaw(name: str, description: str, operators: tuple[str, ...]) -> Flaw:
    return Flaw(name, "fatal", description, "none: what a young driver does", operators, ("error",), None)


FLAWS = (
    _flaw(
        "erfinv-crashes", "erfinv ends the process by SIGSEGV", ("aten::erfinv", "aten::erfinv_", "aten::erfinv.out")
    ),
    _flaw("digamma-hangs", "digamma never returns", ("aten::digamma", "aten::digamma_", "aten::digamma.out")),
    _flaw("i0-hogs-memory", "i0 takes more and more memory", ("aten::i0", "aten::i0_", "aten::i0.out")),
)
