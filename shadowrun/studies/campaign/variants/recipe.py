"""A variant as a recipe: the program it starts from and what was done to it, in some 200 bytes of JSON.

Example:
    >>> Recipe("0a1b2c3d4e5f", (Mutation("insert", (3, 0, "tanh")),), 5).to_json()
    ['0a1b2c3d4e5f', [['insert', 3, 0, 'tanh']], 5]
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

__all__ = ["Mutation", "Params", "Recipe"]

Params: TypeAlias = "tuple[Any, ...]"
"""Numbers, texts, None, and tuples of these."""

_ID: Final = re.compile(r"[0-9a-f]{1,64}")
_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,30}")
# A recipe may come from a file of someone else: everything of it that is followed has a bound.
_MAX_MUTATIONS: Final = 64
_MAX_VALUES: Final = 4096
_MAX_DEPTH: Final = 8
_MAX_TEXT: Final = 200
_MAX_INT: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change.

    Attributes:
        name: Of the mutator.
        params: Its parameters: plain values and tuples of these.
    """

    name: str
    params: Params = ()


@dataclass(frozen=True, slots=True)
class Recipe:
    """What makes a variant.

    Attributes:
        program: Id of the program.
        mutations: In the order of their application.
        seed: Of the values of the inputs.
    """

    program: str
    mutations: tuple[Mutation, ...] = ()
    seed: int = 0

    def to_json(self) -> list[Any]:
        """As plain JSON: program, mutations, seed."""
        return [self.program, [[m.name, *map(_listed, m.params)] for m in self.mutations], self.seed]

    @classmethod
    def from_json(cls, data: Any) -> Recipe:
        """The recipe of `to_json`. The data may come from anyone; whether its mutations fit is seen when it is built.

        Raises:
            ValueError: It is no recipe; the text says what is wrong.
        """
        if not (isinstance(data, list) and len(data) == 3 and isinstance(data[1], list)):
            raise ValueError("a recipe is a list of program, mutations and seed")
        program, mutations, seed = data
        if not (isinstance(program, str) and _ID.fullmatch(program)):
            raise ValueError(f"{ascii(program)[:80]} is no id of a program")
        if type(seed) is not int or not 0 <= seed < _MAX_INT:
            raise ValueError(f"{ascii(seed)[:80]} is no seed")
        if len(mutations) > _MAX_MUTATIONS:
            raise ValueError(f"{len(mutations)} mutations; {_MAX_MUTATIONS} at most")
        budget = [_MAX_VALUES]
        return cls(program, tuple(_mutation(row, budget) for row in mutations), seed)


def _mutation(row: Any, budget: list[int]) -> Mutation:
    if not (isinstance(row, list) and row and isinstance(row[0], str) and _NAME.fullmatch(row[0])):
        raise ValueError(f"{ascii(row)[:80]} is no mutation")
    return Mutation(row[0], tuple(_checked(v, budget, _MAX_DEPTH) for v in row[1:]))


def _checked(value: Any, budget: list[int], depth: int) -> Any:
    budget[0] -= 1
    if budget[0] < 0 or depth == 0:
        raise ValueError("a recipe with too many values")
    if isinstance(value, list):
        return tuple(_checked(v, budget, depth - 1) for v in value)
    plain = value is None or type(value) in (bool, float) or (type(value) is int and abs(value) <= _MAX_INT)
    if plain or (isinstance(value, str) and len(value) <= _MAX_TEXT):
        return value
    raise ValueError(f"{ascii(value)[:80]} is no parameter of a mutation")


def _listed(value: Any) -> Any:
    return [_listed(v) for v in value] if type(value) is tuple else value
