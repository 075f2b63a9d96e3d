"""Calls that a file may have made read and write inside of their tensors: a page of memory ends what does not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SECONDS = 40


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="needs Linux and a C compiler")
@pytest.mark.parametrize("options", [[], ["0", "8", "--out"]], ids=["inputs", "results"])
def test_no_call_leaves_its_tensors(tmp_path, options):
    library = tmp_path / "guard.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", library, HERE / "guard_pages.c", "-lpthread"]
    subprocess.run(command, check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    command = [sys.executable, "-m", "tests.untrusted.guarded_calls", "1", str(SECONDS), *options]
    found = subprocess.run(command, env=environment, cwd=HERE.parents[1], check=True, capture_output=True, text=True)
    said = json.loads(found.stdout.splitlines()[-1])
    assert said["made"] > 100
    # Divisions of integers, limits of memory and time end a process, too, and leave no tensor.
    assert not [end for end in said["ended"] if end[1] in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)]
