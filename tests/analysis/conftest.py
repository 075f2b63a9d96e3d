from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def sample():
    """The module that builds the made-up run."""
    spec = importlib.util.spec_from_file_location("sample", Path(__file__).parents[1] / "golden" / "sample.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
