"""An operator and a backend that build and load a library as Triton does: the linker runs in the current folder."""

import ctypes
import os
import subprocess
from pathlib import Path

import torch

from tests.compiled import faulty


def build() -> None:
    """Build one, once a process, in a folder that the environment names."""
    folder = Path(os.environ.get("BUILD_IN", ""), str(os.getpid()))
    if "BUILD_IN" not in os.environ or folder.exists():
        return
    folder.mkdir()
    folder.joinpath("a.c").write_text("int a(void) { return 1; }")
    subprocess.check_call(["gcc", "-shared", "-fPIC", str(folder / "a.c"), "-o", str(folder / "a.so")])
    ctypes.CDLL(str(folder / "a.so"))


@torch.library.custom_op("building::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """An operator."""
    build()
    return x * 2


def tanh_is_wrong(graph, inputs):
    """A backend."""
    build()
    return faulty.tanh_is_wrong(graph, inputs)
