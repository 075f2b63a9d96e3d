"""The programs of the benchmark: small ordinary user code, each in several sizes and seeds."""

from tests.ground_truth import programs_data, programs_training  # noqa: F401 - fill FAMILIES
from tests.ground_truth.kit import FAMILIES, SIZES, Program

__all__ = ["PROGRAMS"]

PROGRAMS = {p.name: p for number in range(len(SIZES)) for p in (Program(f, number) for f in FAMILIES)}
