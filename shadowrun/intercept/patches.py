"""Attributes that are replaced while a comparison runs, and given back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Patches"]


class Patches:
    """Replaced attributes of classes and modules."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute by what `make` gives for it."""
        original = vars(owner)[name]
        patched = make(original)
        setattr(owner, name, patched)
        self._made.append((owner, name, original, patched))

    def take_back(self) -> None:
        """Put the originals back, except where somebody else has replaced ours meanwhile (and may still call it)."""
        while self._made:
            owner, name, original, patched = self._made.pop()
            if vars(owner)[name] is patched:
                setattr(owner, name, original)
