"""Types of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Bools", "Floats"]

Floats = npt.NDArray[np.floating[Any]]
Bools = npt.NDArray[np.bool_]
