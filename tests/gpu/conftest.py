"""Tests that need a GPU of CUDA's or ROCm's, run by themselves: `pytest tests/gpu`.

Elsewhere, and among other tests, they are skipped: where the simulated device is registered, torch's backward fails on
tensors of CUDA's (it knows one accelerator).
"""

import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(scope="session", autouse=True)
def sim_device():
    """Not registered here."""


@pytest.fixture(autouse=True)
def same_algorithms():
    """One algorithm each time, so that two runs of a program can be held together."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if hasattr(torch, "sim"):
        pytest.skip("the simulated device is registered: run these tests by themselves")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
