"""What a comparison costs in memory, each measured in a process of its own (`memory.py`)."""

import json
import subprocess
import sys

import pytest

MIB = 1 << 20
RESULT = 64 * MIB
"""Of the largest call: one more result is alive while two are compared, and a copy of it where they lie apart."""
CONSTANT = 32 * MIB


def measured(*what):
    command = [sys.executable, "-W", "ignore", "-m", "tests.transparency.memory", *map(str, what)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("options", [["cpu"], ["cpu[threads=1]", "file"], ["cpu", "drift"]], ids=" ".join)
def test_ten_thousand_steps_of_a_small_model_hardly_grow_the_process(options):
    target, *more = options
    found = measured("steps", target, 10_000, *more)
    assert found["calls"] > 10_000 * 30
    assert found["grown"] < 5 * MIB, found


@pytest.mark.parametrize(
    ("target", "max_mib", "unverified"), [("cpu", 1024, False), ("sim", 1024, False), ("sim", 100, True)]
)
def test_the_peak_is_bounded(target, max_mib, unverified):
    found = measured("peak", target, max_mib)
    more = found["compared"] - found["plain"]
    copies = min(max_mib * MIB, 3 * RESULT)  # no call of the program has more than that in tensors
    assert RESULT // 2 < more < copies + 2 * RESULT + CONSTANT, found
    assert bool(found.get("unverified")) is unverified
    assert found["match"] > 8
