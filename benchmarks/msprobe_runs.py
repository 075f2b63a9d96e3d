"""msprobe (mindstudio-probe), in separate processes: it leaves torch patched when it stops.

Three processes for each workload (plain, L0, L1) alternate block by block, so neighbours can be compared almost as in
one process. msprobe collects statistics only, its default; each step is started, stopped and counted as its
documentation requires.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self

__all__ = ["LEVELS", "NAMES", "installed", "measure_msprobe"]

LEVELS = ("L0", "L1")
NAMES = {level: f"msprobe {level}, statistics" for level in LEVELS}
_MEMORY_ROUNDS = 3


def installed() -> bool:
    """Whether the extra `bench` is there."""
    return importlib.util.find_spec("msprobe") is not None


def measure_msprobe(workload: str, rounds: int, *, has_model: bool = True) -> dict[str, dict[str, Any]]:
    """Figures for each level, as `measuring.summary` gives them, by the tools' names.

    Args:
        workload: Its name.
        rounds: Pairs of neighbours.
        has_model: L0 follows modules, and has nothing to do for a single operator.
    """
    if not installed():
        return {name: {"error": "not installed"} for name in NAMES.values()}
    levels = LEVELS if has_model else LEVELS[1:]
    found: dict[str, dict[str, Any]] = {} if has_model else {NAMES["L0"]: {"error": "no module"}}
    with contextlib.ExitStack() as stack:
        children = {level: stack.enter_context(_Child(workload, level)) for level in ("plain", *levels)}
        plain = children.pop("plain")
        plain.ask("ready")
        for level, child in children.items():
            try:
                found[NAMES[level]] = _take_turns(plain, child, rounds)
            except ChildProcessError as error:
                found[NAMES[level]] = {"error": str(error)}
    return found


def _take_turns(plain: _Child, child: _Child, rounds: int) -> dict[str, Any]:
    from measuring import Timing, summary, turns

    child.ask("ready")
    pairs = [(Timing(*plain.ask("block")), Timing(*child.ask("block"))) for _ in turns(rounds)]
    found = summary(pairs)
    memory = [(plain.ask("memory"), child.ask("memory")) for _ in range(min(rounds, _MEMORY_ROUNDS))]
    if all(isinstance(value, float) for pair in memory for value in pair):
        found["peak_mb_above_plain"] = round(statistics.median(b - a for a, b in memory), 2)
    return found


class _Child:
    """A process that builds the workload and runs blocks when it is asked to."""

    def __init__(self, workload: str, level: str) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, __file__, workload, level],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def ask(self, what: str) -> Any:
        """Its answer.

        Raises:
            ChildProcessError: With the exception that it met.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(what + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"it ended: {self._last_words()}"}
        if isinstance(answer, dict):
            raise ChildProcessError(answer["error"])
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        return (self._log.read().strip().splitlines() or ["without a word"])[-1]


def _serve(name: str, level: str, asked: IO[str], answers: IO[str]) -> None:
    """The child: answer each line with one of JSON."""
    import torch
    from measuring import peak_mb, timed
    from workloads import WORKLOADS, single_operators

    torch.set_num_threads(1)
    workload = next(w for w in (*WORKLOADS, *single_operators()) if w.name == name)
    program = workload.build()
    step, n, before, after = program.step, workload.inner, None, None
    with tempfile.TemporaryDirectory() as folder:
        if level != "plain":
            before, after = _msprobe(program, level, Path(folder))
        if before is not None and workload.trains:  # as in a training loop; else once for the whole block
            step, before, after = _within(before, step, after), None, None
        for line in asked:
            what = line.strip()
            try:
                if what == "block":
                    t = timed(step, n, before, after)
                    answer: Any = [t.cpu, t.thread, t.wall]
                elif what == "memory":
                    answer = peak_mb(_within(before, step, after))
                else:
                    timed(step, min(n, 2), before, after)
                    answer = "ready"
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


def _within(before: Any, step: Any, after: Any) -> Any:
    def run() -> None:
        if before is not None:
            before()
        step()
        if after is not None:
            after()

    return run


def _msprobe(program: Any, level: str, folder: Path) -> tuple[Any, Any]:
    """What begins and what ends a step."""
    from msprobe.pytorch import PrecisionDebugger

    config = {
        "task": "statistics",
        "dump_path": str(folder / "dump"),
        "rank": [],
        "step": [],
        "level": level,
        "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    debugger = PrecisionDebugger(config_path=str(path))

    def before() -> None:
        debugger.start(model=program.model)

    def after() -> None:
        debugger.stop()
        debugger.step()

    return before, after


if __name__ == "__main__":
    # What msprobe prints goes to stderr: standard output carries the answers.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answering:
        os.dup2(2, 1)
        _serve(sys.argv[1], sys.argv[2], sys.stdin, answering)
