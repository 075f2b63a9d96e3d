"""Figures as tables in Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from targets import limit_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["markdown", "put_between_marks"]

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
_LONGEST_REASON = 40


def markdown(found: dict[str, Any]) -> str:
    """All tables for which there are figures."""
    machine = found["machine"]
    measured = (
        f"Measured with Python {machine['python']} and torch {machine['torch']} on one thread of a machine with "
        f"{machine['cores']} cores ({machine['cpu']}) and load {machine['load']}; medians of up to {found['rounds']} "
        "pairs."
    )
    blocks = [measured]
    steps = [w for w in found["workloads"] if not w["single"]]
    single = [w for w in found["workloads"] if w["single"]]
    if steps:
        blocks += [
            "**A step under a tool, in plain steps**: processor time (wall), share of calls. ✓ and ✗: our target.",
            _by_tool(steps, lambda w, t, f: f"{f['cpu']:.2f} ({f['wall']:.2f})" + _share(f) + _mark(w, t, f["cpu"])),
        ]
        if any(f.get("peak_mb_above_plain") is not None for w in steps for f in w["tools"].values()):
            blocks += ["**Peak memory above the plain step's, MB.**", _by_tool(steps, _peak, plain=False)]
    if single:
        blocks += [
            "**What one call of `torch.add` takes longer, µs** of processor time (on the wall).",
            _by_tool(
                single,
                lambda w, t, f: (
                    f"{_us(f['added_cpu_us'])} ({_us(f['added_wall_us'])})" + _mark(w, t, f["added_cpu_us"])
                ),
            ),
        ]
    if found.get("rates"):
        blocks += [
            "**Comparing two tensors, and digesting one**, against the C function on the same memory.",
            _rates(found["rates"]),
        ]
    if found.get("startup"):
        rows = [
            [r["name"], f"{r['cpu_ms']:.0f}" if r["cpu_ms"] else "n/a", f"{r['wall_ms']:.0f}"] for r in found["startup"]
        ]
        blocks += ["**Starting up, ms.**", _table(["", "processor", "wall"], rows)]
    if found["targets"]:
        blocks += ["**Targets.**", _targets(found["targets"])]
    blocks += _problems(found["workloads"])
    return "\n\n".join(blocks) + "\n"


def _share(figures: dict[str, Any]) -> str:
    share = figures.get("verified_share")
    return "" if share is None else f", {100 * share:.2g} % of calls"


def put_between_marks(path: Path, text: str) -> None:
    """Write the tables; a page that has marks for them keeps the rest of its text."""
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    whole = f"{before}{BEGIN}\n\n{text}\n{END}{after}" if begin and end else text
    path.write_text(whole, encoding="utf-8")


def _by_tool(workloads: Sequence[dict[str, Any]], cell: Any, *, plain: bool = True) -> str:
    """Tools down, workloads across; the plain program's time on top."""
    head = ["", *(w["name"] for w in workloads)]
    names = dict.fromkeys(name for w in workloads for name in w["tools"])
    rows = [["plain", *(_plain(w) for w in workloads)]] if plain else []
    for name in names:
        row = [f"**{name}**" if any(w["tools"].get(name, {}).get("ours") for w in workloads) else name]
        for w in workloads:
            figures = w["tools"].get(name, {"error": "-"})
            row.append(_reason(figures["error"]) if "error" in figures else cell(w, name, figures))
        rows.append(row)
    return _table(head, rows)


def _plain(workload: dict[str, Any]) -> str:
    figures = next((f for f in workload["tools"].values() if "plain_cpu_ms" in f), None)
    if figures is None:
        return "-"
    ms = figures["plain_cpu_ms"]
    return f"{_us(1e3 * ms)} µs" if ms < 1 else f"{ms:.1f} ms"


def _peak(workload: dict[str, Any], tool: str, figures: dict[str, Any]) -> str:  # noqa: ARG001 - as its neighbours
    value = figures.get("peak_mb_above_plain")
    return "n/a" if value is None else f"{max(value, 0.0) + 0.0:.1f}"


def _us(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 100 else f"{value:,.0f}".replace(",", " ")


def _mark(workload: dict[str, Any], tool: str, value: float) -> str:
    limit = limit_of(tool, workload["name"], single=workload["single"])
    return "" if limit is None else f" {'✓' if value <= limit else '✗'} ≤ {limit:g}"


def _reason(error: str) -> str:
    """In a word or so; all of it is in the JSON."""
    word = error.partition(":")[0]
    return word if len(word) <= _LONGEST_REASON else word[:_LONGEST_REASON] + "…"


def _rates(rows: Iterable[dict[str, Any]]) -> str:
    head = ["", "size", "function", "µs", "GB/s", "against", "GB/s", "rate"]
    return _table(
        head,
        [
            [
                *(r["name"], r["size"], f"`{r['function']}`", _us(r["us"]), f"{r['gb_s']:.2f}"),
                *(f"`{r['against']}`", f"{r['gb_s_against']:.2f}", f"{r['rate']:.2f}"),
            ]
            for r in rows
        ],
    )


def _targets(targets: Iterable[dict[str, Any]]) -> str:
    rows = []
    for t in targets:
        sign = "≥" if t["at_least"] else "≤"
        rows.append(
            [t["what"], f"{t['measured']:.3g}", f"{sign} {t['limit']:.3g} {t['unit']}", "✓" if t["met"] else "✗"]
        )
    return _table(["what", "measured", "target", "met"], rows)


def _problems(workloads: Iterable[dict[str, Any]]) -> list[str]:
    lines = [
        f"- {w['name']}, {tool}: {f['problems']}"
        for w in workloads
        for tool, f in w["tools"].items()
        if "problems" in f
    ]
    return ["**Not as meant:**\n\n" + "\n".join(lines)] if lines else []


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
