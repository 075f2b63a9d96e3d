"""Numbers with their nouns."""

__all__ = ["plural"]


def plural(n: int, noun: str) -> str:
    """``1 operator``, ``1,234 mismatches``."""
    ending = "" if n == 1 else "es" if noun.endswith("ch") else "s"
    return f"{n:,} {noun}{ending}"
