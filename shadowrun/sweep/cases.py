"""What a sweep runs: cases, by operator, dtype, part and sample. Imports no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["ANY_DTYPE", "DERIVED", "INVARIANCE", "PARTS", "PROBES", "Case", "Part", "Task"]

ANY_DTYPE = "any"
"""In the place of a dtype for invalid inputs, which the database gives once for an operator."""


class Part(enum.StrEnum):
    """What of an operator a case tries."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Gradients of all inputs that can have one."""
    INPLACE = "inplace"
    OUT = "out"
    """``out=``: of the right shape for even samples, empty and resized for odd ones."""
    TRANSPOSED = "transposed"
    """Inputs with the same values, transposed in memory."""
    STRIDED = "strided"
    """Inputs with the same values, transposed in memory and with gaps."""
    STRIDED_INPLACE = "strided_inplace"
    CHANNELS_LAST = "channels_last"
    ZERO_DIM = "zero_dim"
    """Each input tensor cut down to one element without dimensions."""
    EMPTY = "empty"
    """Each input tensor cut down to none in its first dimension."""
    MEMORY = "memory"
    """What calls do to memory beside their results, in place on a strided view too; nothing else is judged."""
    INVALID = "invalid"
    """Inputs that the operator must refuse."""
    PROBE = "probe"
    """NaN, infinities, zeros, subnormals and the edges of the range."""
    TAIL = "tail"
    """The target alone: element by element against all at once, on the inputs of `PROBE`."""
    LAYOUT = "layout"
    """The target alone: strided inputs against contiguous ones."""
    SLICE = "slice"
    """The target alone: a slice of a batch against the same in the batch."""


INVARIANCE = frozenset((Part.TAIL, Part.LAYOUT, Part.SLICE))
"""Parts in which the target is compared with itself."""
PROBES = (Part.PROBE, Part.TAIL, Part.LAYOUT, Part.SLICE)
"""Parts that ``--probe`` asks for."""
PARTS = tuple(part for part in Part if part not in PROBES)
"""Parts that are run unless others are asked for."""
DERIVED = frozenset(
    {
        *(Part.OUT, Part.INPLACE, Part.TRANSPOSED, Part.STRIDED, Part.STRIDED_INPLACE),
        *(Part.CHANNELS_LAST, Part.ZERO_DIM, Part.EMPTY, Part.MEMORY),
        *PROBES,
    }
)
"""Parts whose inputs are made from those of the database: whether they are valid, only the reference can tell."""


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One try.

    Attributes:
        operator: Name in torch's database with its variant, ``linalg.norm.subgradients_at_zero``, or of a
            recorded call, ``aten::add.Tensor``.
        dtype: ``float32``; `ANY_DTYPE` for invalid inputs.
        part: What it tries.
        sample: Number of the operator's sample inputs, from 0, the same for the same seed.
    """

    operator: str
    dtype: str
    part: Part
    sample: int

    def __str__(self) -> str:
        """``softmax float32 forward 3``."""
        return f"{self.operator} {self.dtype} {self.part} {self.sample}"


@dataclass(frozen=True, slots=True)
class Task:
    """What one worker process is handed: parts of an operator in a dtype.

    Attributes:
        operator, dtype: As in `Case`.
        parts: Which.
        done: Part and sample of the cases that need not be run again.
    """

    operator: str
    dtype: str
    parts: tuple[Part, ...]
    done: frozenset[tuple[Part, int]] = frozenset()
