"""Weights and inputs have the same bits on every instruction set and version of torch."""

import hashlib
import subprocess
import sys

import pytest
import torch

from shadowrun.studies.zoo.graph import Fill, Input
from shadowrun.studies.zoo.input_values import KINDS, make_input

FILLS = [Fill(kind, 0.25, 2.0) for kind in KINDS]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
# Computed once with torch 2.13 and AVX2; every other version has to give the same.
SEEN_ON_2_13 = "2d639746140fe328"


def digest():
    """Of the bits of all kinds of values in all dtypes, one odd size so that vector loops have tails."""
    found = hashlib.sha256()
    for fill in FILLS:
        for dtype in DTYPES:
            t = make_input(Input(f"layers.0.{fill.kind}", (5, 37), dtype, fill), 3)
            found.update(t.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def test_the_bits_are_those_of_another_version_of_torch():
    assert digest() == SEEN_ON_2_13


@pytest.mark.skipif("CPU capability usage: DEFAULT" in torch.__config__.show(), reason="there is one instruction set")
def test_the_bits_are_those_of_another_instruction_set():
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; import runpy, torch;"
        "assert 'CPU capability usage: DEFAULT' in torch.__config__.show();"
        f"print(runpy.run_path({__file__!r})['digest']())"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], env={"ATEN_CPU_CAPABILITY": "default"}, capture_output=True, text=True, check=True
    )
    assert out.stdout.split()[0] == digest()


if __name__ == "__main__":
    print(torch.__version__, digest())
