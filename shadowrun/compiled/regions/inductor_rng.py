"""Inductor's random numbers, computed again, so that the eager run of a region gets the same ones.

Inductor samples seeds from the generator and computes a number from each seed and the element's index by Philox 4x32
with 10 rounds (Salmon et al., SC 2011); eager samples each number from the generator. Inductor's CPU code is in
``torch/csrc/inductor/cpp_prefix.h`` with ``ATen/core/PhiloxRNGEngine.h``, seen on 2.11 and 2.13. Numbers on other
devices are not computed here: regions with random numbers there stay random.
"""

from __future__ import annotations

import contextlib
import math
import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import fx

from shadowrun.compiled.graph import copy_graph
from shadowrun.compiled.rounding import is_random

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["is_random_node", "philox", "recorded_random_numbers", "with_inductor_rng"]

_ROUNDS: Final = 10
_KEYS: Final = (0x9E3779B9, 0xBB67AE85)
_FACTORS: Final = (0xD2511F53, 0xCD9E8D57)
_LOW: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_SCALE: Final = np.float32(4.6566127342e-10)
_SEEDS = torch.iinfo(torch.int64)


def with_inductor_rng(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of Inductor's graph with the random numbers of its compiled code, from the same random state.

    Left as it is where some draw is on another device than the CPU.
    """
    new = copy_graph(module)
    for node in new.graph.nodes:
        make = _REPLACED.get(str(node.target))
        if make is None:
            continue
        # Only Inductor's CPU code is computed again here: regions on other devices stay random.
        if any(isinstance(a, torch.device) and a.type != "cpu" for a in node.args):
            return module
        node.target = make
    new.recompile()
    return new


@contextlib.contextmanager
def recorded_random_numbers() -> Iterator[list[torch.Tensor]]:
    """What graphs that `with_inductor_rng` gave draw inside, in order."""
    # Thread-local: two threads may run graphs at the same time.
    before, _recording.numbers = _recording.numbers, []
    try:
        yield _recording.numbers
    finally:
        _recording.numbers = before


class _Recording(threading.local):
    numbers: list[torch.Tensor] | None = None


_recording = _Recording()


def is_random_node(node: fx.Node) -> bool:
    """Whether a node is random; in a graph that `with_inductor_rng` gave, too."""
    return node.target in _REPLACED.values() or is_random(node.target, node.args, node.kwargs)


def philox(seed: int, n: int) -> tuple[NDArray[np.uint64], ...]:
    """Four words of 32 bits for each of the counters 0 to n - 1 under one key, in 64-bit integers."""
    c0, c1, c2, c3 = np.arange(n, dtype=np.uint64), *(np.zeros(n, np.uint64) for _ in range(3))
    k0, k1 = seed & 0xFFFFFFFF, 0  # the CPU code cuts seeds to 32 bits
    for _ in range(_ROUNDS):
        left, right = c0 * np.uint64(_FACTORS[0]), c2 * np.uint64(_FACTORS[1])
        c0, c1 = (right >> _HALF) ^ c1 ^ np.uint64(k0), right & _LOW
        c2, c3 = (left >> _HALF) ^ c3 ^ np.uint64(k1), left & _LOW
        k0, k1 = (k0 + _KEYS[0]) & 0xFFFFFFFF, (k1 + _KEYS[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _uniform(words: NDArray[np.uint64]) -> torch.Tensor:
    # Inductor's C++ drops the sign bit and scales by a rounded 2**-31; any other constant gives other numbers.
    return torch.from_numpy((words & np.uint64(0x7FFFFFFF)).astype(np.float32) * _SCALE)


def _seeds(count: int, device: torch.device) -> torch.Tensor:
    return torch.randint(_SEEDS.min, _SEEDS.max, [count], device=device)


def _seed(device: torch.device) -> torch.Tensor:
    return _seeds(1, device)[0]


def _random(size: Sequence[int], seed: torch.Tensor, mode: str, **_: Any) -> torch.Tensor:
    numbers = _numbers(size, int(seed), mode)
    if _recording.numbers is not None:
        _recording.numbers.append(numbers)
    return numbers


def _numbers(size: Sequence[int], seed: int, mode: str) -> torch.Tensor:
    # Counter-based: each number depends on its seed and index only, not on the order of kernels.
    words = philox(seed, math.prod(size))
    if mode == "rand":
        return _uniform(words[0]).reshape(tuple(size))
    # By torch's operators, so that what their rounding may do is measured like that of any other.
    # As PhiloxRNGEngine.h: from [0, 1) to (0, 1], since the logarithm of 0 is infinite.
    u1, u2 = 1 - _uniform(words[0]), 1 - _uniform(words[1])
    radius = (-2.0 * u1.log().double()).sqrt()
    return (radius * (2.0 * math.pi * u2.double()).cos()).to(torch.float32).reshape(tuple(size))


def _randint(low: int, high: int, size: Sequence[int], seed: torch.Tensor) -> torch.Tensor:
    words = philox(int(seed), math.prod(size))
    # As `randint64_cpu` in cpp_prefix.h: two words, and the remainder of their 64 bits.
    numbers = (words[0] | (words[1] << _HALF)) % np.uint64(high - low)
    return torch.from_numpy(numbers.astype(np.int64) + low).reshape(tuple(size))


_REPLACED: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "prims.inductor_seed.default": _seed,
    "prims.inductor_seeds.default": _seeds,
    "prims.inductor_random.default": _random,
    "prims.inductor_randint.default": _randint,
}
