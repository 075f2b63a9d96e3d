"""Instructions of a step, plain and under shadowrun, counted by valgrind: other work on the machine changes nothing.

Several windows of steps in one process. What makes windows differ is switched off here, not in the product: Python's
clock stands still (later checks of memory effects are due by it), no call is slow or large by its time, hashes have no
seed, addresses are not random, and there is no garbage collection.

With --against, also for another checkout of the project, with its own native code, in a second process. With --tricks,
also without each way of reaching into torch that only saves time, in turn.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.progress import track

sys.path.insert(0, str(Path(__file__).parent))  # `-P` keeps the checkout that is counted before this one
from workloads import WORKLOADS, chosen

ROOT = Path(__file__).resolve().parents[1]
MODES = {"plain": None, "replay=False": {"replay": False}, "isolated": {}}
WARM_UP, STEPS, WINDOWS = 8, 10, 5
TRICKS = {
    "without the dispatch slot": "install_dispatch_slot",
    "without torch's stable C shim": "setup_shim",
    "without _is_alias_of": "",
    "without native code": "",
}
"""To the function of the C extension that sets a trick up."""
_MARK = "getppid"  # a function of the C library that nothing else calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="FOLDER", help="another checkout of the project")
    parser.add_argument("--workload", default="tiny MLP*", metavar="GLOB", help="one of the programs of workloads.py")
    parser.add_argument("--tricks", action="store_true", help="also without each trick at torch's internals, in turn")
    parser.add_argument("--trick", default="", help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not chosen(WORKLOADS, options.workload):
        parser.error(f"--workload {options.workload!r}: use the name of one of {[w.name for w in WORKLOADS]}")
    if options.child:
        _switch_off(options.trick)
        _run_windows(options.workload)
        return 0
    if shutil.which("valgrind") is None or shutil.which("setarch") is None:
        parser.error("valgrind and setarch are needed, and not both are here")
    runs = {(ROOT, ""): ROOT.name}
    if options.against:
        other = Path(options.against).resolve()
        runs[other, ""] = other.name
    if options.tricks:
        runs |= {(ROOT, trick): trick for trick in TRICKS}
    counted = [_count(*run, options.workload) for run in track(runs, "valgrind", transient=True)]
    windows = f"median of {WINDOWS} windows of {STEPS} steps (range)"
    print(f"{options.workload}: instructions of a step in thousands, {windows}\n")
    print("| checkout | " + " | ".join(MODES) + " |\n|---|" + "---:|" * len(MODES))
    for name, found in zip(runs.values(), counted, strict=True):
        print(f"| {name} | " + " | ".join(_cell(found[mode]) for mode in MODES) + " |")
    return 0


def _cell(counts: list[int]) -> str:
    least, median, greatest = (n / STEPS / 1e3 for n in (min(counts), statistics.median(counts), max(counts)))
    return f"{median:,.1f} ({least:,.1f} to {greatest:,.1f})"


def _count(folder: Path, trick: str, workload: str) -> dict[str, list[int]]:
    """Instructions of each window by mode, of the shadowrun in a folder."""
    env = os.environ | {
        "PYTHONPATH": str(folder),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "SHADOWRUN_NATIVE": "0" if trick == "without native code" else "1",
    }
    with tempfile.TemporaryDirectory() as made:
        tool = ["valgrind", "--tool=callgrind", f"--dump-before={_MARK}", f"--callgrind-out-file={made}/out"]
        program = [sys.executable, "-P", __file__, "--child", "--trick", trick, "--workload", workload]
        done = subprocess.run(["setarch", "-R", *tool, *program], env=env, capture_output=True, text=True, check=False)
        labels = done.stdout.split("\n")[:-1]
        if done.returncode or len(labels) != len(MODES) * (WINDOWS + 1):
            raise SystemExit(f"valgrind, exit status {done.returncode}, {len(labels)} windows:\n{done.stderr[-2000:]}")
        found: dict[str, list[int]] = {}
        for number, label in enumerate(labels, 1):
            text = Path(f"{made}/out.{number}").read_text(encoding="utf-8")
            totals = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
            assert totals is not None
            found.setdefault(label, []).append(int(totals[1]))
    return found


def _switch_off(trick: str) -> None:
    """Take a trick away before anything of shadowrun looks for it."""
    import torch

    from shadowrun.native import core

    if trick == "without _is_alias_of":
        del torch._C._is_alias_of
    if setup := TRICKS.get(trick):
        setattr(core, setup, lambda *_: None)


def _run_windows(workload: str) -> None:
    """Prints for each mark in which mode the instructions before it were; an empty line where they are of none."""
    stopped = time.monotonic()
    time.monotonic = lambda: stopped
    stopped_ns = time.perf_counter_ns()
    time.perf_counter_ns = lambda: stopped_ns

    import torch

    import shadowrun

    torch.set_num_threads(1)
    step = chosen(WORKLOADS, workload)[0].build().step
    gc.disable()

    def mark(label: str) -> None:
        os.getppid()
        print(label, flush=True)

    def windows(mode: str, end_step, flush) -> None:
        for number in range(WINDOWS + 1):
            for _ in range(STEPS if number else WARM_UP):
                step()
                end_step()
            flush()
            mark(mode if number else "")

    for mode, settings in MODES.items():
        if settings is None:
            windows(mode, lambda: None, lambda: None)
            continue
        with shadowrun.compare("cpu", slow_ratio=1e9, max_bytes=1 << 40, **settings) as run:
            windows(mode, run.step, run._recorder.flush)


if __name__ == "__main__":
    sys.exit(main())
