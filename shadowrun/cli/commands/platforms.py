"""List the platforms that this machine has or lacks, with versions and fingerprints.

Examples:
  shadowrun platforms
  shadowrun platforms -f json
  shadowrun platforms --flaws     the flaws of the simulated accelerator
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.cli import options

if TYPE_CHECKING:
    import argparse

    from shadowrun.report.document import Document

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The list to print, and the output."""
    parser.add_argument("--flaws", action="store_true", help="list the flaws and presets of the simulated device")
    options.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the list; returns the exit status."""
    options.check_outputs(args.output)
    options.print_report(_flaws() if args.flaws else _platforms(), args)
    return 0


def _platforms() -> Document:
    from shadowrun.intercept import torch_operators, torchapi  # noqa: F401 - look up the torch APIs that `versions` has
    from shadowrun.platforms import devices, resolve
    from shadowrun.platforms.fingerprint import fingerprint, versions
    from shadowrun.report.document import (
        Block,
        Column,
        Document,
        Limits,
        Note,
        Records,
        Section,
        Table,
        status_span,
    )
    from shadowrun.torch_versions import untested

    found = devices()
    numbers = {name: version for name, version in versions().items() if version}
    # A device that computes on the CPU has the CPU's fingerprint, and is not started only to be listed.
    started = [d.device_type for d in found if d.available and not _is_like_cpu(d.device_type)]
    fingerprints = {device: fingerprint(resolve(device)) for device in started}
    states = {d.device_type: "present" if d.available else "absent" for d in found}
    rows = tuple((d.device_type, (status_span(states[d.device_type]),), d.detail) for d in found)
    columns = (Column("platform", "name"), Column("state"), Column("description, or why it is absent"))
    blocks: list[Block] = [Note(", ".join(f"{name} {version}" for name, version in numbers.items()))]
    blocks += [Note(note, "warn") for note in [untested()] if note]
    blocks.append(Table(columns, rows, limits=Limits(200, 200, 200)))
    for device, facts in fingerprints.items():
        pairs = tuple((key, str(value)) for key, value in facts.items())
        table = Table((Column("property"), Column("value")), pairs, limits=Limits(200, 200, 200))
        blocks.append(Section(f"Fingerprint of {device}", (table,)))
    data = {
        "format": 1,
        "versions": numbers,
        "platforms": [{"device_type": d.device_type, "present": d.available, "detail": d.detail} for d in found],
        "fingerprints": fingerprints,
    }
    records = Records(
        ("platform", "state", "detail"), tuple((d.device_type, states[d.device_type], d.detail) for d in found)
    )
    return Document("platforms of this machine", tuple(blocks), data, records)


def _is_like_cpu(device_type: str) -> bool:
    from shadowrun.platforms.backends import backend_of

    return device_type != "cpu" and backend_of(device_type).computes_on_cpu


def _flaws() -> Document:
    from shadowrun.report.document import Column, Document, Limits, Records, Section, Table
    from shadowrun.sim import CATALOGUE, PRESETS

    limits = Limits(500, 500, 500)
    presets = tuple((preset, str(len(names)), ", ".join(names)) for preset, names in PRESETS.items())
    columns = (Column("preset", "name"), Column("flaws", "number"), Column("names"))
    sections = [Section("Presets (--preset)", (Table(columns, presets, limits=limits),))]
    flaws = [(flaw.name, flaw.kind, flaw.description, flaw.issue) for flaw in CATALOGUE.values()]
    columns = (Column("flaw", "name"), Column("description"), Column("seen in", detail=1))
    for kind in dict.fromkeys(flaw.kind for flaw in CATALOGUE.values()):
        rows = tuple((name, text, issue) for name, of, text, issue in flaws if of == kind)
        sections.append(
            Section(f"{kind.capitalize()} (--flaws)", (Table(columns, rows, limits=limits),), count=len(rows))
        )
    head = ("flaw", "kind", "description", "issue")
    data = {
        "format": 1,
        "presets": {preset: list(names) for preset, names in PRESETS.items()},
        "flaws": [dict(zip(head, flaw, strict=True)) for flaw in flaws],
    }
    return Document("flaws of the simulated accelerator", tuple(sections), data, Records(head, tuple(flaws)))
