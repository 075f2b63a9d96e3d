"""Kernel paths per layer: which kernel ran for each call on each platform, and how it multiplies."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.recording.kernel_paths import path_of
from shadowrun.recording.model import NONE, Kind
from shadowrun.studies.classes.equivalence import common_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shadowrun.recording.model import Key, Recording
    from shadowrun.studies.classes.platforms import Platform

__all__ = ["LayerKernels", "PlatformGroup", "groups_of", "layer_kernels"]


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """A call that all platforms have, with the kernel of each.

    Attributes:
        key: Of the call; of the first step in which these kernels ran.
        kernels: Name for each platform; empty where it is not known.
        paths: ``direct``, ``GEMM``, ``Winograd`` or ``FFT`` for each platform; empty where the name does not show it.
        digests: Of its first result on each platform, 16 hexadecimal digits; empty where it was not digested.
    """

    key: Key
    kernels: tuple[str, ...]
    paths: tuple[str, ...]
    digests: tuple[str, ...]

    @property
    def n_classes(self) -> int:
        """Different results."""
        return len(set(self.digests))


@dataclass(frozen=True, slots=True)
class PlatformGroup:
    """Platforms that ran equal kernels in all layers.

    Attributes:
        numbers: Their places in the list of platforms.
        paths: Path of each layer.
    """

    numbers: tuple[int, ...]
    paths: tuple[str, ...]


def layer_kernels(platforms: Sequence[Platform]) -> list[LayerKernels]:
    """Calls that multiply (a kernel of theirs has a path), in the order of the first platform.

    A call that runs the same kernels in several steps is listed once. Of platforms with several recordings, the first
    counts.
    """
    if not any(platform.recordings[0].kernels for platform in platforms):
        return []
    found: dict[tuple[object, ...], LayerKernels] = {}
    for key in common_keys(platforms)[0]:
        calls = [platform.calls[0][key] for platform in platforms]
        recordings = [platform.recordings[0] for platform in platforms]
        kernels = tuple(_kernel(r, c) for r, c in zip(recordings, calls, strict=True))
        paths = tuple(map(path_of, kernels))
        if any(paths):
            digests = tuple(_digest(r, c) for r, c in zip(recordings, calls, strict=True))
            place = key.rank, key.phase, key.module, key.op, key.occurrence, kernels
            found.setdefault(place, LayerKernels(key, kernels, paths, digests))
    return list(found.values())


def groups_of(layers: Sequence[LayerKernels]) -> list[PlatformGroup]:
    """Platforms by the kernels of all layers, in first-seen order."""
    n = len(layers[0].kernels) if layers else 0
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number in range(n):
        groups[tuple(layer.kernels[number] for layer in layers)].append(number)
    return [PlatformGroup(tuple(own), tuple(layer.paths[own[0]] for layer in layers)) for own in groups.values()]


def _kernel(recording: Recording, call: int) -> str:
    number = int(recording.calls["kernel"][call])
    return recording.kernels[number] if number != NONE else ""


def _digest(recording: Recording, call: int) -> str:
    for row in recording.results_of(call):
        if recording.results["kind"][row] != Kind.LEAF:
            ladder = recording.ladder(row)
            return f"{int(ladder[0]):016x}" if len(ladder) else ""
    return ""
