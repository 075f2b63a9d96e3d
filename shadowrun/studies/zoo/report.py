"""What `shadowrun zoo` prints: counts of each step, what was left out, and one program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shadowrun.report.document import Column, Document, Fact, Facts, Limits, Records, Section, Table
from shadowrun.studies.zoo.graph import Device, Ref, to_json

if TYPE_CHECKING:
    from shadowrun.studies.zoo.graph import Graph
    from shadowrun.studies.zoo.program import Program, Zoo

__all__ = ["call_lines", "left_out_document", "program_document", "zoo_document"]

_ALL: Final = Limits(100_000, 100_000, 100_000)
_SHORT: Final = Limits(30, 200, 2000)


def zoo_document(zoo: Zoo, path: str, source: str = "") -> Document:
    """Counts of each source and step; the programs, if no source is named."""
    stages = [s for s in zoo.stages if source in ("", s.source)]
    rows = tuple((s.source, s.name, f"{s.n_in:,}", f"{s.n_out:,}", f"{len(s.left_out):,}") for s in stages)
    columns = (Column("source"), Column("step"), *(Column(name, "number") for name in ("in", "out", "left out")))
    blocks: list[Any] = [
        Facts((Fact("programs", f"{len(zoo.programs):,}"), Fact("digest", zoo.digest))),
        Section("Steps", (Table(columns, rows, noun="steps", limits=_ALL),), "", len(rows)),
    ]
    data: dict[str, Any] = {
        "format": 1,
        "digest": zoo.digest,
        "stages": [
            {
                "source": s.source,
                "step": s.name,
                "in": s.n_in,
                "out": s.n_out,
                "left_out": [list(p) for p in s.left_out],
            }
            for s in stages
        ],
    }
    if not source:
        programs = [(p.id, p.name, p.source, len(p.graph.nodes), p.count) for p in zoo.programs.values()]
        listed = tuple((key, name, of, f"{n:,}", f"{count:,}") for key, name, of, n, count in programs)
        heads = (
            Column("id"),
            Column("program"),
            Column("source"),
            Column("calls", "number"),
            Column("count", "number"),
        )
        blocks.append(Section("Programs", (Table(heads, listed, noun="programs", limits=_SHORT),), "", len(listed)))
        names = ("id", "name", "source", "n_calls", "count")
        data["programs"] = [dict(zip(names, row, strict=True)) for row in programs]
    counts = tuple((s.source, s.name, s.n_in, s.n_out, len(s.left_out)) for s in stages)
    records = Records(("source", "step", "in", "out", "left_out"), counts)
    return Document(f"zoo: {path}", tuple(blocks), data, records)


def left_out_document(zoo: Zoo, source: str) -> Document:
    """What a source left out, and why."""
    rows = tuple((s.name, what, why) for s in zoo.stages if s.source == source for what, why in s.left_out)
    table = Table((Column("step"), Column("candidate"), Column("reason")), rows, noun="candidates", limits=_ALL)
    data = [{"step": step, "candidate": what, "reason": why} for step, what, why in rows]
    section = Section("Left out", (table,), "", len(rows))
    records = Records(("step", "candidate", "reason"), rows)
    return Document(f"zoo: left out of {source}", (section,), {"format": 1, "left_out": data}, records)


def program_document(program: Program, *, calls: bool) -> Document:
    """One program: where it comes from, its inputs, and its calls if asked."""
    graph = program.graph
    inputs = tuple(
        (i.name, str(i.dtype).removeprefix("torch."), str(list(i.shape)), i.role, " ".join(map(_plain, i.fill)))
        for i in graph.inputs
    )
    facts = [Fact("id", program.id), Fact("source", program.source), Fact("calls", f"{len(graph.nodes):,}")]
    if program.made_from:
        facts.append(Fact("from", f"{', '.join(program.made_from)} ({program.count:,} occurrences)"))
    columns = (Column("input"), Column("dtype"), Column("shape"), Column("role"), Column("values"))
    blocks: list[Any] = [
        Facts(tuple(facts)),
        Section("Inputs", (Table(columns, inputs, noun="inputs", limits=_SHORT),), "", len(inputs)),
    ]
    if calls:
        rows = tuple(
            (f"v{at}", node.name, ", ".join((*map(_plain, node.args), *(f"{k}={_plain(v)}" for k, v in node.kwargs))))
            for at, node in enumerate(graph.nodes)
        )
        heads = (Column("result"), Column("operator", "name"), Column("arguments"))
        blocks.append(Section("Calls", (Table(heads, rows, noun="calls", limits=_ALL),), "", len(rows)))
    data = {"format": 1, "id": program.id, "name": program.name, "source": program.source, "graph": to_json(graph)}
    records = Records(("input", "dtype", "shape", "role", "values"), inputs)
    return Document(f"zoo: {program.name}", tuple(blocks), data, records)


def call_lines(graph: Graph) -> list[str]:
    """The calls of a graph, one a line: ``v3 = aten::add.Tensor(v2, x0, alpha=1)``."""
    return [
        f"v{at} = {node.name}({', '.join((*map(_plain, node.args), *(f'{k}={_plain(v)}' for k, v in node.kwargs)))})"
        for at, node in enumerate(graph.nodes)
    ]


def _plain(value: Any) -> str:
    if type(value) is Ref:
        name = f"v{value.node}" if value.node >= 0 else f"x{-1 - value.node}"
        return name if not value.output else f"{name}[{value.output}]"
    if type(value) is tuple:
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, Device):
        return "device"
    return f"{value:g}" if isinstance(value, float) else str(value)
