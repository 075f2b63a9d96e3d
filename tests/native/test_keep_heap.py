"""`keep_heap`: glibc keeps free memory at the end of the heap, and SHADOWRUN_KEEP_HEAP=0 leaves it as it was."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from shadowrun import native

pytestmark = [
    pytest.mark.skipif(native.core is None, reason="there is no compiled part"),
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc"),
]

PROGRAM = """
import ctypes, resource, sys
from shadowrun import native

c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def faults():
    '''Pages that two rounds of filling and freeing 30 MiB were given by the system.'''
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(2):
        blocks = [c.malloc(10 << 20) for _ in range(3)]
        for block in blocks:
            ctypes.memset(block, 1, 10 << 20)
        for block in blocks:
            c.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
given = faults()
if sys.argv[1] == "kept":
    native.core.keep_heap()
elif sys.argv[1] == "compared":
    import shadowrun
    shadowrun.compare("cpu").__enter__().stop()
faults()
print(given, faults())
"""


def pages(way: str, **environment: str) -> list[int]:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, way], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return [int(n) for n in run.stdout.split()]


def test_freed_memory_stays_for_the_next_call():
    before, after = pages("kept")
    assert before > 5000  # each page of both rounds
    assert after < 500
    assert min(pages("as it is")) > 5000


def test_bounds_that_the_user_has_set_stay():
    assert min(pages("kept", MALLOC_TRIM_THRESHOLD_="131072")) > 5000


def test_a_comparison_keeps_the_heap_unless_told_not_to():
    assert pages("compared")[1] < 500
    assert min(pages("compared", SHADOWRUN_KEEP_HEAP="0")) > 5000
