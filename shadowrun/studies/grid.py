"""Many platforms on one machine: the program recorded once for each combination of settings, each in a process."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shadowrun.errors import DataFileError, UsageError
from shadowrun.platforms import resolve
from shadowrun.platforms.cpu import missing_instructions
from shadowrun.platforms.fingerprint import fingerprint
from shadowrun.platforms.settings import PYTHON, environment
from shadowrun.platforms.spec import parse
from shadowrun.recording.file_format.recording_file import read
from shadowrun.recording.file_format.recording_writer import SUFFIX
from shadowrun.report import save
from shadowrun.report.document import Column, Document, Fact, Limits, Note, Records, Table
from shadowrun.store.atomic_write import refuse_links
from shadowrun.studies.isolation.process import own_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from shadowrun.platforms.spec import PlatformSpec

__all__ = ["Cell", "grid_document", "machine_fact", "platforms_of", "record_grid"]

RECORDED: Final = "recorded"
FILE: Final = "grid.json"
# Version of the form of `grid.json`.
_FORMAT: Final = 1
_MAX_PLATFORMS: Final = 10_000
_MAX_NAME: Final = 120
_MAX_NOTE: Final = 300
_LOG_TAIL: Final = 4000


@dataclass(frozen=True, slots=True)
class Cell:
    """A platform of the grid, and what became of it.

    Attributes:
        platform: ``cpu[isa=avx2,threads=1]``.
        file: Its recording, without the folder.
        outcome: ``recorded``, ``exit status 3``, ``SIGILL`` or ``cannot run here``; empty while it has not run.
        seconds: How long its process ran.
        n_calls: Calls in its recording.
        note: The last line that it wrote where it failed.
    """

    platform: str
    file: str
    outcome: str = ""
    seconds: float = 0.0
    n_calls: int = 0
    note: str = ""


def platforms_of(grid: Sequence[str], each: Sequence[str]) -> list[PlatformSpec]:
    """The product of settings, then single platforms.

    Args:
        grid: ``threads=1,2``, one for each setting.
        each: ``cpu[threads=1,isa=avx2]``.

    Raises:
        PlatformError: An unknown setting or a wrong value.
        UsageError: No platform, too many, or one that is not the CPU.
    """
    axes: list[list[str]] = []
    for text in grid:
        key, equals, values = text.partition("=")
        words = [value.strip() for value in values.split(",")]
        if not equals or not key.strip() or not all(words):
            raise UsageError(f"--grid {text!r}: write a setting with its values, such as threads=1,2.", slug="bad-grid")
        axes.append([f"{key.strip()}={word}" for word in words])
    n = len(each)
    if axes:
        # Counted before any is made: ten settings of ten values are ten billion platforms.
        product = 1
        for axis in axes:
            product *= len(axis)
        n += product
    if n > _MAX_PLATFORMS:
        raise UsageError(f"The grid has {n:,} platforms; at most {_MAX_PLATFORMS:,} are recorded.", slug="bad-grid")
    texts = [f"cpu[{','.join(combination)}]" for combination in itertools.product(*axes)] if axes else []
    # Each once: equal platforms have one canonical text.
    found = {str(spec): spec for spec in map(parse, (*texts, *each))}
    for spec in found.values():
        if spec.device_type != "cpu" or any(key == PYTHON for key, _ in spec.settings):
            raise UsageError(
                f"--each {str(spec)!r}: a grid is of the CPU's settings, in this interpreter. Record other devices and "
                "other interpreters one by one, by `shadowrun record`.",
                slug="bad-grid",
            )
    return list(found.values())


def record_grid(
    platforms: Sequence[PlatformSpec],
    arguments: Sequence[str],
    folder: Path,
    *,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[Cell]:
    """Record the program on each platform.

    Args:
        platforms: See `platforms_of`.
        arguments: Of ``shadowrun record``: its options, then the program and its own.
        folder: Gets the recordings, the output of each process, and `grid.json`.
        jobs: Processes at a time.
        progress: Called with the number of platforms done and of all.

    Returns:
        A cell for each platform.

    Raises:
        UsageError: The folder is a link.
    """
    refuse_links(folder)
    folder.mkdir(parents=True, exist_ok=True)
    cells = [Cell(spec.public, name) for spec, name in zip(platforms, _names(platforms), strict=True)]
    lock, running, n_done = threading.Lock(), set[subprocess.Popen[bytes]](), 0

    def run(number: int) -> None:
        nonlocal n_done
        cell = _record_one(cells[number], platforms[number], arguments, folder, running)
        with lock:
            cells[number] = cell
            n_done += 1
            _write(folder, cells)
            if progress is not None:
                progress(n_done, len(cells))

    _write(folder, cells)
    if progress is not None:
        progress(0, len(cells))
    pool = ThreadPoolExecutor(max(1, jobs))
    try:
        for future in [pool.submit(run, number) for number in range(len(cells))]:
            future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in tuple(running):
            process.kill()
        raise
    finally:
        pool.shutdown()
    return cells


def _names(platforms: Sequence[PlatformSpec]) -> Iterator[str]:
    """File names, each its own."""
    taken: set[str] = set()
    for spec in platforms:
        text = "_".join(part.replace("=", "-") for part in spec.public.partition("[")[2].rstrip("]").split(","))
        name = base = re.sub(r"[^\w.+-]+", "-", text).strip("-.")[:_MAX_NAME] or "cpu"
        for number in itertools.count(2):
            # Some file systems take `A` and `a` for one name.
            if name.lower() not in taken:
                break
            name = f"{base}_{number}"
        taken.add(name.lower())
        yield name + SUFFIX


def _record_one(
    cell: Cell,
    spec: PlatformSpec,
    arguments: Sequence[str],
    folder: Path,
    running: set[subprocess.Popen[bytes]],
) -> Cell:
    variables = environment(spec.settings)
    if (missing := missing_instructions(variables)) is not None:
        name, value, flags = missing
        note = f"{name}={value} needs instructions that this processor lacks: {flags}"
        return dataclasses.replace(cell, outcome="cannot run here", note=note)
    path, log = folder / cell.file, folder / f"{cell.file}.log"
    # The recording of an earlier grid must not count where this process writes none.
    path.unlink(missing_ok=True)
    command = [*own_command(), "record", "--platform", str(spec), "-o", str(path), *arguments]
    began = time.perf_counter()
    log.unlink(missing_ok=True)  # "x": a link of that name, in a folder from elsewhere, would be written through
    with log.open("xb") as output:
        process = subprocess.Popen(  # noqa: S603 - this interpreter, and the user's program
            command, env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        running.add(process)
        try:
            status = process.wait()
        finally:
            running.discard(process)
    seconds = round(time.perf_counter() - began, 3)
    n_calls = _n_calls(path)
    outcome = RECORDED if status == 0 and n_calls else _outcome(status)
    note = "" if outcome == RECORDED else _last_line(log)
    return dataclasses.replace(cell, outcome=outcome, seconds=seconds, n_calls=n_calls, note=note)


def _n_calls(path: Path) -> int:
    try:
        return len(read(path).calls)
    except DataFileError:  # a process that failed early has written none
        return 0


def _outcome(status: int) -> str:
    if status >= 0:
        return f"exit status {status}" if status else "nothing recorded"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _last_line(log: Path) -> str:
    lines = log.read_bytes()[-_LOG_TAIL:].decode(errors="replace").strip().splitlines()
    # The closing line of `record` comes last, whatever became of the program.
    said = (line for line in reversed(lines) if not (line.startswith("shadowrun: ") and "; next: " in line))
    return next(said, "")[:_MAX_NOTE]


def _write(folder: Path, cells: Sequence[Cell]) -> None:
    found = {"format": _FORMAT, "platforms": [dataclasses.asdict(cell) for cell in cells]}
    save(json.dumps(found, indent=1), folder / FILE)


def grid_document(cells: Sequence[Cell], folder: str) -> Document:
    """The table of a grid."""
    n_recorded = sum(cell.outcome == RECORDED for cell in cells)
    columns = (
        *(Column("platform"), Column("outcome"), Column("calls", "number"), Column("seconds", "number")),
        *(Column("file", detail=1), Column("note", detail=1)),
    )
    head = tuple(field.name for field in dataclasses.fields(Cell))
    table = Table(
        columns,
        tuple((c.platform, c.outcome, f"{c.n_calls:,}", f"{c.seconds:.1f}", c.file, c.note) for c in cells),
        noun="platforms",
        limits=Limits(100, 1000, 1000),
    )
    summary = f"{n_recorded} of {len(cells)} platforms recorded in {folder}; next: shadowrun classes {folder}"
    return Document(
        "grid of platforms",
        (Note(summary), table),
        {"format": _FORMAT, "platforms": [dataclasses.asdict(cell) for cell in cells]},
        Records(head, tuple(tuple(dataclasses.asdict(c).values()) for c in cells)),
    )


def machine_fact() -> Fact:
    """Processor, instruction sets and libraries: measured figures hold for these."""
    facts = fingerprint(resolve("cpu"))
    words = (
        *(facts["cpu"], f"{facts['cores']} cores", f"flags {facts['cpu_flags']}", facts["cpu_capability"]),
        *(f"torch {facts['torch']}", f"MKL {facts['mkl'] or 'none'}", f"oneDNN {facts['onednn'] or 'none'}"),
    )
    return Fact("machine", ", ".join(words))
