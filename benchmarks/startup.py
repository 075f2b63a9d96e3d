"""Start-up time that shadowrun adds: the command line, and the import compared with torch's."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

__all__ = ["measure_startup"]

_IMPORT = """
import json, time, torch
found = {}
for name, code in (("import shadowrun", "import shadowrun"), ("and shadowrun.compare", "shadowrun.compare")):
    cpu, wall = time.process_time(), time.perf_counter()
    exec(code)
    found[name] = [1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - wall)]
print(json.dumps(found))
"""
_COMMAND = "import sys; from shadowrun.cli.main import main; sys.exit(main(sys.argv[1:]))"
_NOTHING = [sys.executable, "-c", "pass"]


def measure_startup(rounds: int) -> list[dict[str, Any]]:
    """Milliseconds on the processor and on the wall, medians."""
    commands = {"python -c pass (floor)": _NOTHING}
    # `--version` imports torch, to say which of its names are missing.
    for option in ("--help", "--version"):
        commands[f"shadowrun {option}"] = [sys.executable, "-c", _COMMAND, option]
    timings: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for command in commands.values():
        _run(command)  # files come into the cache, and are compiled
    for _ in range(rounds):
        for name, command in commands.items():
            timings[name].append(_run(command))
    for _ in range(max(2, rounds // 2)):
        out = subprocess.run([sys.executable, "-c", _IMPORT], check=True, capture_output=True, text=True)
        for name, (cpu, wall) in json.loads(out.stdout).items():
            timings.setdefault(name, []).append((cpu, wall))
    return [
        {
            "name": name,
            "cpu_ms": statistics.median(cpu for cpu, _ in found),
            "wall_ms": statistics.median(wall for _, wall in found),
            "rounds": len(found),
        }
        for name, found in timings.items()
    ]


def _run(command: list[str]) -> tuple[float, float]:
    wall = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    if not hasattr(os, "wait4"):  # not on Windows
        process.wait()
        return 0.0, 1e3 * (time.perf_counter() - wall)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return 1e3 * (usage.ru_utime + usage.ru_stime), 1e3 * (time.perf_counter() - wall)
