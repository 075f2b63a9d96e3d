"""Statistics by numerics/diff.py alone, and the comparison of those in C with them."""

from __future__ import annotations

import dataclasses

import pytest

from shadowrun.numerics import diff as diff_module


def by_specification(actual, expected):
    """`diff` without the C extension."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diff_module, "format_of", lambda _dtype: None)
        patch.setattr(diff_module, "native_diff", None)
        return diff_module.diff("x", actual, expected)


def same(got, wanted, message=""):
    """Bit for bit; only the last digits of the root mean square error may differ.

    Both add float64 squares, in another order: C 16 sums in parallel, numpy pairwise.
    """
    for field in dataclasses.fields(wanted):
        a, e = getattr(got, field.name), getattr(wanted, field.name)
        assert type(a) is type(e), (message, field.name, a, e)
        if field.name == "rmse":
            assert a == pytest.approx(e, rel=1e-12, abs=1e-300, nan_ok=True), (message, a, e)
        else:
            assert a == e or (a != a and e != e), (message, field.name, a, e)
