"""Tests that need a GPU of CUDA's or ROCm's, run by themselves: `pytest tests/gpu`.

Elsewhere, and among other tests, they are skipped: where the simulated device is registered, torch's backward fails on
tensors of CUDA's (it knows one accelerator).
"""

import os

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "/gpu/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session", autouse=True)
def sim_device():
    """Not registered here."""


@pytest.fixture(autouse=True)
def same_algorithms():
    """One algorithm each time, so that two runs of a program can be held together."""
    if hasattr(torch, "sim"):
        pytest.skip("the simulated device is registered: run these tests by themselves")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
