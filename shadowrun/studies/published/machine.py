"""This machine in one line, and letters for classes: shared by all studies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.platforms import resolve
from shadowrun.platforms.fingerprint import fingerprint
from shadowrun.report.document import Fact

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable
    from typing import TypeVar

    T = TypeVar("T", bound=Hashable)

__all__ = ["letters", "machine_fact"]


def machine_fact() -> Fact:
    """Processor, instruction sets and libraries: measured figures hold for these."""
    facts = fingerprint(resolve("cpu"))
    words = (
        *(facts["cpu"], f"{facts['cores']} cores", f"flags {facts['cpu_flags']}", facts["cpu_capability"]),
        *(f"torch {facts['torch']}", f"MKL {facts['mkl'] or 'none'}", f"oneDNN {facts['onednn'] or 'none'}"),
    )
    return Fact("machine", ", ".join(words))


def letters(items: Iterable[T]) -> dict[T, str]:
    """A, B, …, Z, AA, AB, … for different items, in the order in which they are first seen."""
    found: dict[T, str] = {}
    for item in items:
        if item not in found:
            number, name = len(found) + 1, ""
            while number:
                number, digit = divmod(number - 1, 26)
                name = chr(ord("A") + digit) + name
            found[item] = name
    return found
