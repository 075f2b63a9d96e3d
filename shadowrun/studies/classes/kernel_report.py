"""The part of a report that shows kernel paths per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shadowrun.recording.kernel_paths import path_of
from shadowrun.report.document import Column, Limits, Section, Table
from shadowrun.studies.classes.layer_kernels import groups_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shadowrun.report.document import Cell
    from shadowrun.studies.classes.layer_kernels import LayerKernels

__all__ = ["kernel_data", "kernel_section", "layer_name"]

_MAX_GROUPS: Final = 12
"""Groups of platforms that the table has columns for; CSV and JSON have all platforms."""
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
