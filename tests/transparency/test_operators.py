"""The fast tier of the sweep: nothing that a program can see changes, and a platform matches itself.

The full tier, every sample in every dtype: ``nox -s transparency``.
"""

import pytest

from tests.transparency.cases import DATABASES
from tests.transparency.sweep import Setup, names_of, sweep

N_SHARDS = 6
SLICES = [
    # database, dtype, samples, every n-th entry, offset
    *(("op", "float32", 1, N_SHARDS, shard) for shard in range(N_SHARDS)),
    ("op", "bfloat16", 1, 12, 1),
    ("op", "complex64", 1, 9, 2),
    ("op", "int64", 1, 9, 3),
    *((db, "float32", 1, 1 if db in ("hop", "custom") else 3, 0) for db in DATABASES if db != "op"),
]


def problems(results):
    """What changed, crashed or was reported, of all operators."""
    kinds = ("different", "crashed", "false_reports")
    return [f"{kind}: {r.op} {line}" for r in results for kind in kinds for line in getattr(r, kind)]


@pytest.mark.parametrize(("db", "dtype", "samples", "every", "offset"), SLICES)
def test_nothing_changes_and_nothing_is_reported(one_thread, db, dtype, samples, every, offset):
    names = names_of(db, dtype)[offset::every]
    results = list(sweep(db, dtype, names, Setup(samples=samples)))
    assert problems(results) == []
    assert [r.op for r in results] == names
    n_cases = sum(r.cases for r in results)
    assert n_cases >= len(names)
    assert sum(r.identical for r in results) > 0.8 * n_cases or db in ("custom", "foreach", "module")
    assert sum(r.calls for r in results) > len(names)


PLATFORMS = [("cpu[threads=1]", "cpu"), ("cpu[mkldnn=off]", "cpu"), ("sim", "cpu"), ("sim", "sim")]


@pytest.mark.parametrize(("target", "device"), PLATFORMS)
def test_other_platforms_change_nothing_and_mismatch_nowhere(clean_sim, target, device):
    names = names_of("op", "float32")[5::24]
    results = list(sweep("op", "float32", names, Setup(target, "cpu", device, 1)))
    found = [
        f"{what}: {r.op} {line}"
        for r in results
        for what in ("different", "false_reports")
        for line in getattr(r, what)
    ]
    assert found == []
    assert sum(r.identical for r in results) > 0.7 * sum(r.cases for r in results)


@pytest.mark.parametrize(
    ("db", "dtype", "every", "offset"),
    [("op", "float32", 4, 1), ("op", "bfloat16", 12, 3), ("op", "complex64", 9, 1), ("op", "int64", 9, 4)]
    + [(db, "float32", 1 if db in ("hop", "custom") else 3, 1) for db in DATABASES if db != "op"],
)
def test_recording_changes_nothing_and_fails_nowhere(one_thread, db, dtype, every, offset):
    names = names_of(db, dtype)[offset % every :: every]
    results = list(sweep(db, dtype, names, Setup(samples=1, record=True)))
    assert problems(results) == []
    assert sum(r.calls for r in results) > len(names)
