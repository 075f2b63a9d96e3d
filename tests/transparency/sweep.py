"""The transparency sweep: torch's own databases of operators, modules and optimizers, with and without shadowrun.

``python -m tests.transparency.sweep`` runs the full tier: every sample of every entry, in worker processes, so that a
crash costs one entry and is named. ``--tier fast`` takes the first two samples. The result is ``transparency.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import shadowrun
from tests.transparency.cases import DATABASES, DTYPES, operators
from tests.transparency.checking import Result, check

CHUNK = 60
TIMEOUT_S = 300
FAST_SAMPLES = 2
ONLY_VERSIONS = re.compile(r"[^:]*: (\S+: version \d+ became \d+(; |$))+")
"""Where a mode is active, torch's formulas write to fresh memory what they wrote in place: dozens, and all alike."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is compared with what, and where the program runs."""

    target: str = "cpu"
    ref: str = "cpu"
    device: str = "cpu"
    samples: int | None = None
    record: bool = False
    """Run under `shadowrun.record`, which compares nothing."""
    kernels: bool = False
    """With `record`: also the kernel of each call."""
    api: bool = False
    """Compare with ``api=True``."""
    nan_track: bool = False
    """Run under `shadowrun.nan_track`, which compares nothing either."""

    @property
    def uses_sim(self) -> bool:
        """Whether the simulated device takes part."""
        return "sim" in (self.target, self.ref, self.device)


def sweep(db: str, dtype: str, names: list[str], setup: Setup) -> Any:
    """Check entries of a database in this process, one after another; gives a `Result` for each."""
    infos = operators(db, dtype)
    with shown_always(), warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        # Operators of others are compared where they are named.
        named = {"ops": "*"} if db in ("custom", "hop") else {}
        run: Any
        if setup.record:
            run = shadowrun.record(Path(folder) / "sweep.shadowrec", kernels=setup.kernels, **named)
        elif setup.nan_track:
            run = shadowrun.nan_track("keep")
        else:
            run = shadowrun.compare(setup.target, ref=setup.ref, api=setup.api, **named)
        for name in names:
            yield check(run, db, name, infos[name], dtype, setup.samples, setup.device)


@contextlib.contextmanager
def shown_always() -> Any:
    """Warnings that torch gives once per process are given each time, so that two runs can be held together."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(before)


def names_of(db: str, dtype: str, pattern: str | None = None) -> list[str]:
    """Entries of a database that support a dtype and whose name contains a text."""
    return [n for n in operators(db, dtype) if pattern is None or pattern in n]


def work(spec: dict[str, Any], out: Path) -> None:
    """In a worker: check entries, a line before and a line after each."""
    torch.set_num_threads(spec["threads"])
    setup = Setup(**spec["setup"])
    if setup.uses_sim:
        from shadowrun import sim

        sim.enable("sim")
    with out.open("a") as file:
        results = sweep(spec["db"], spec["dtype"], spec["names"], setup)
        for name in spec["names"]:
            file.write(json.dumps({"begin": name}) + "\n")
            file.flush()
            file.write(json.dumps(dataclasses.asdict(next(results))) + "\n")
            file.flush()


def in_workers(db: str, dtype: str, names: list[str], setup: Setup, threads: int) -> Any:
    """Check entries in worker processes; an entry that kills or hangs its worker is a crash, and the others go on."""
    while names:
        chunk = names[:CHUNK]
        spec = {
            "db": db,
            "dtype": dtype,
            "names": chunk,
            "setup": dataclasses.asdict(setup),
            "threads": threads,
        }
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "results"
            out.touch()
            command = [sys.executable, "-m", "tests.transparency.sweep", "--worker", json.dumps(spec), str(out)]
            log = (Path(folder) / "log").open("w+")
            worker = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ)
            with out.open() as lines:
                done, begun, text = 0, "", ""
                changed = time.monotonic()
                while True:
                    ended = worker.poll() is not None
                    text += lines.read()
                    while "\n" in text:
                        line, _, text = text.partition("\n")
                        changed = time.monotonic()
                        read = json.loads(line)
                        if "begin" in read:
                            begun = read["begin"]
                        else:
                            done += 1
                            yield Result(**read)
                    if ended:
                        break
                    if time.monotonic() - changed > TIMEOUT_S:
                        worker.kill()
                    time.sleep(0.05)
            if done < len(chunk):
                log.seek(0)
                why = f"worker ended with {worker.returncode}: {log.read()[-300:]!r}"
                yield Result(db, dtype, begun or chunk[done], crashed=[why])
                done += 1
            log.close()
        names = names[done:]


def totals(results: list[Result]) -> list[dict[str, Any]]:
    """One row for each database and dtype."""
    rows = []
    key = lambda r: (DATABASES.index(r.db), DTYPES.index(r.dtype))  # noqa: E731
    for (_, _), group in itertools.groupby(sorted(results, key=key), key=key):
        of = list(group)
        rows.append(
            {
                "db": of[0].db,
                "dtype": of[0].dtype,
                "entries": len(of),
                "calls": sum(r.calls for r in of),
                "cases": sum(r.cases for r in of),
                "identical": sum(r.identical for r in of),
                **{
                    what: sum(len(getattr(r, what)) for r in of)
                    for what in ("by_torch", "unstable", "unmade", "different", "crashed", "false_reports")
                },
                "unverified": sum(sum(r.unverified.values()) for r in of),
            }
        )
    return rows


def show(console: Console, results: list[Result], rows: list[dict[str, Any]]) -> None:
    """Print what is not perfect, then the table."""
    for what in ("by_torch", "unstable", "unmade", "crashed", "different", "false_reports"):
        for r in results:
            for line in getattr(r, what):
                if what == "by_torch" and ONLY_VERSIONS.fullmatch(line):
                    continue
                console.print(f"{what}: {r.db} {r.op} {r.dtype} {line}", markup=False, highlight=False, soft_wrap=True)
    reasons: dict[str, int] = {}
    for r in results:
        for text, n in r.unverified.items():
            reasons[text] = reasons.get(text, 0) + n
    for text, n in sorted(reasons.items(), key=lambda item: -item[1]):
        console.print(f"unverified: {n} of {text}", markup=False, highlight=False, soft_wrap=True)
    table = Table(*[name.replace("_", " ") for name in rows[0]] if rows else ["nothing ran"])
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Run a tier and write its result; 1 if anything differs, crashes or is reported falsely."""
    parser = argparse.ArgumentParser(prog="python -m tests.transparency.sweep", description=__doc__)
    parser.add_argument("--tier", choices=["fast", "full"], default="full")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--db", nargs="+", choices=DATABASES, default=list(DATABASES))
    parser.add_argument("--op", help="only entries whose name contains this")
    parser.add_argument("--samples", type=int, help="samples per entry (fast: 2, full: all)")
    parser.add_argument("--every", type=int, default=1, help="only every n-th entry")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--ref", default="cpu")
    parser.add_argument("--device", default="cpu", help="where the program runs")
    parser.add_argument("--record", action="store_true", help="record digests instead of comparing")
    parser.add_argument("--nan-track", action="store_true", help="look for NaN instead of comparing")
    parser.add_argument("--kernels", action="store_true", help="with --record: also the kernel of each call")
    parser.add_argument("--api", action="store_true", help="with api=True: a function mode is on as well")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("transparency.json"))
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        work(json.loads(options.worker[0]), Path(options.worker[1]))
        return 0
    samples = options.samples or (FAST_SAMPLES if options.tier == "fast" else None)
    tools = options.record, options.kernels, options.api, options.nan_track
    setup = Setup(options.target, options.ref, options.device, samples, *tools)
    plan = [
        (db, dtype, names)
        for db in options.db
        for dtype in options.dtype
        if (names := names_of(db, dtype, options.op)[:: options.every])
    ]
    results: list[Result] = []
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Interrupted, it shows and writes what it has.
    with contextlib.suppress(KeyboardInterrupt), Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=sum(len(names) for *_, names in plan))
        for db, dtype, names in plan:
            progress.update(task, description=f"{db} {dtype}")
            for result in in_workers(db, dtype, names, setup, options.threads):
                results.append(result)
                progress.advance(task)
    rows = totals(results)
    show(console, results, rows)
    found = {
        "torch": torch.__version__,
        "setup": dataclasses.asdict(setup),
        "totals": rows,
        "results": [dataclasses.asdict(r) for r in results],
    }
    options.json.write_text(json.dumps(found, indent=1))
    return int(any(row["different"] or row["crashed"] or row["false_reports"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
