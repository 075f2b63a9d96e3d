"""Kernel paths per layer: which kernel ran for each call on each platform, and how it multiplies."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shadowrun.recording.kernel_paths import path_of
from shadowrun.recording.model import NONE, Kind
from shadowrun.report.document import Column, Limits, Section, Table
from shadowrun.studies.classes.equivalence import common_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shadowrun.recording.model import Key, Recording
    from shadowrun.report.document import Cell
    from shadowrun.studies.classes.platforms import Platform

__all__ = ["LayerKernels", "PlatformGroup", "groups_of", "kernel_data", "kernel_section", "layer_kernels", "layer_name"]


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
            # The step is no part of the place: training runs the same kernels in each step.
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


# Groups of platforms that the table has columns for; CSV and JSON have all platforms.
_MAX_GROUPS: Final = 12
_UNKNOWN: Final = "?"
_ALL: Final = Limits(100, 200, 1000)


def kernel_section(layers: Sequence[LayerKernels], platforms: Sequence[str]) -> Section:
    """Layer by platform to path, the platforms of each column, and the names of the kernels.

    Args:
        layers: At least one.
        platforms: Their names.
    """
    groups = groups_of(layers)
    shown = groups[:_MAX_GROUPS]
    columns = (
        *(Column("layer", "name"), Column("step", "number", detail=1), Column("classes", "number")),
        *(Column(str(number)) for number in range(1, len(shown) + 1)),
    )
    rows: list[tuple[Cell, ...]] = [
        (layer_name(layer), str(layer.key.step), str(layer.n_classes), *(g.paths[i] or _UNKNOWN for g in shown))
        for i, layer in enumerate(layers)
    ]
    members = tuple(
        (str(number), str(len(group.numbers)), ", ".join(platforms[n] for n in group.numbers))
        for number, group in enumerate(groups, 1)
    )
    rest = len(groups) - len(shown)
    lead = (
        "Which path each layer took. A column is a group of platforms that ran equal kernels in all of these layers"
        + (f"; {rest} more groups are in CSV and JSON" if rest else "")
        + f". {_UNKNOWN}: the kernel's name does not show its path. Classes are those of the layer's result."
    )
    return Section(
        "Kernel paths per layer",
        (
            Table(columns, tuple(rows), noun="layers", limits=_ALL),
            Table(
                (Column("column", "number"), Column("platforms", "number"), Column("which")),
                members,
                noun="groups",
                limits=_ALL,
            ),
            _kernels(layers),
        ),
        lead,
        len(layers),
    )


def _kernels(layers: Sequence[LayerKernels]) -> Table:
    """Each kernel with the number of layers and platforms that ran it."""
    ran_in: dict[str, list[int]] = {}
    ran_on: dict[str, set[int]] = {}
    for i, layer in enumerate(layers):
        for number, name in enumerate(layer.kernels):
            if not ran_in.setdefault(name, []) or ran_in[name][-1] != i:
                ran_in[name].append(i)
            ran_on.setdefault(name, set()).add(number)
    rows = tuple(
        (name or "not known", path_of(name) or _UNKNOWN, str(len(own)), str(len(ran_on[name])))
        for name, own in ran_in.items()
    )
    columns = Column("kernel", "name"), Column("path"), Column("layers", "number"), Column("platforms", "number")
    return Table(columns, rows, noun="kernels", limits=_ALL)


def kernel_data(layers: Sequence[LayerKernels], platforms: Sequence[str]) -> list[dict[str, object]]:
    """For JSON: each layer with path and kernel of each platform."""
    return [
        {
            "layer": layer_name(layer),
            "module": layer.key.module,
            "op": layer.key.op,
            "phase": layer.key.phase,
            "step": layer.key.step,
            "occurrence": layer.key.occurrence,
            "n_classes": layer.n_classes,
            "platforms": [
                {"platform": name, "path": path, "kernel": kernel, "digest": digest}
                for name, path, kernel, digest in zip(platforms, layer.paths, layer.kernels, layer.digests, strict=True)
            ],
        }
        for layer in layers
    ]


def layer_name(layer: LayerKernels) -> str:
    """Module and operator, with phase and number where these are not forward and 0."""
    key = layer.key
    name = f"{key.module}/{key.op}" if key.module else key.op
    name = f"{name} #{key.occurrence}" if key.occurrence else name
    return name if key.phase == "forward" else f"{name} ({key.phase})"
