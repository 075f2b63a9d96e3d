"""Numbers of differences come back from the file bit by bit, and 32-bit floats take the room of one."""

from __future__ import annotations

import math
import random
import sqlite3
import struct

import pytest

from shadowrun.store.fractions import encode_numbers
from shadowrun.store.schema import number

LIMITS = [sign * m * 2.0**e for sign in (1, -1) for m in (1, 3, 2**24 - 1, 2**24, 2**24 + 1) for e in range(-160, 130)]
ODD = [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1e300, -1e300, 0.1, 1e39, 3.5e38, 2.0**53 + 2, -1.0]


def encoded(values: list[float]) -> list[object]:
    """As columns of one row each; distances from the oracle are others."""
    rows = [((0,), (v, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5)) for v in values]
    return [row[1] for row in encode_numbers(rows)]


def back(columns: list[object]) -> list[float]:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table t (x)")
    connection.executemany("insert into t values (?)", ((column,) for column in columns))
    return [float(x) for (x,) in connection.execute(f"select {number('x')} from t order by rowid")]


def bits(value: float) -> bytes:
    return b"nan" if math.isnan(value) else struct.pack("d", value)


@pytest.mark.parametrize(
    "values", [LIMITS, ODD, [random.Random(k).gauss(0, 10.0 ** (k % 60 - 30)) for k in range(999)]]
)
def test_each_comes_back_bit_by_bit(values):
    found = encoded(values)
    assert [*map(bits, back(found))] == [*map(bits, values)]


def test_floats_of_32_bits_take_four_bytes():
    draw = random.Random(0)
    singles = [
        struct.unpack("f", struct.pack("f", draw.gauss(0, 1) * 2.0 ** draw.randint(-90, 15)))[0] for _ in range(999)
    ]
    assert all(type(column) is int and -(2**31) <= column < 2**31 for column in encoded(singles))


def test_small_fractions_take_two():
    assert encoded([0.0, 1.0, -0.5, 2.0**-32, 3 * 2.0**-40]) == [0, 128, -127, 160, 3 * 128 + 40]


def test_what_the_oracle_was_not_asked_is_none():
    ((*_, before, actual, expected),) = encode_numbers([((), (-1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 0.0))])
    assert (before, actual, expected) == (-128, None, 0)
