"""Records the program in fresh processes, one after another, with chosen thread counts and a load on the machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shadowrun.studies.isolation.process import own_command

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["DEFAULT_THREADS", "ProcessRun", "busy_machine", "record_once"]

DEFAULT_THREADS: Final = 0
"""As many threads as torch chooses."""
_THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# It ends with its parent, also where that is killed.
_BUSY: Final = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(10**6): pass"
_MAX_MESSAGE: Final = 200


@dataclass(frozen=True, slots=True)
class ProcessRun:
    """One process of the program.

    Attributes:
        threads: Its thread count; `DEFAULT_THREADS` for torch's choice.
        number: Of the run among those with this thread count.
        path: Its recording; None if there is none.
        status: Exit status; negative for a signal.
        message: Last line of its standard error, for a status that is not 0.
    """

    threads: int
    number: int
    path: Path | None
    status: int
    message: str = ""


@contextlib.contextmanager
def busy_machine(n: int) -> Iterator[None]:
    """Keep `n` processors busy by processes that compute nothing of use."""
    # Without `site`: a process of load need not import what an environment adds to each start of Python.
    command = [sys.executable, "-P", "-S", "-c", _BUSY]
    processes = [subprocess.Popen(command) for _ in range(n)]  # noqa: S603 - our own text
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def record_once(program: Sequence[str], folder: Path, threads: int, number: int) -> ProcessRun:
    """Record the program in a fresh process; its output is not shown.

    Args:
        program: ``script.py`` and its arguments, or ``-m``, a module and its arguments; options of `shadowrun record`
            may come before.
        folder: Gets the recording, ``threads=2.run=003.shadowrec``.
        threads: Thread count of the process.
        number: Number of the run.
    """
    count = "default" if threads == DEFAULT_THREADS else str(threads)
    path = folder / f"threads={count}.run={number:03}.shadowrec"
    # The recording of an earlier command, or a link of anyone's, must not count where this process writes none.
    path.unlink(missing_ok=True)
    # On small inputs MKL would use fewer threads than it was set to.
    variables = dict.fromkeys(_THREAD_VARIABLES, str(threads)) | {"MKL_DYNAMIC": "FALSE"} if threads else {}
    done = subprocess.run(  # noqa: S603 - the user's own program
        [*own_command(), "record", "-o", str(path), *program],
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    # The closing line of `record` comes last.
    said = next((line for line in reversed(lines) if " calls" not in line or "next: " not in line), "")
    found = path if path.is_file() else None
    return ProcessRun(threads, number, found, done.returncode, said[:_MAX_MESSAGE] if done.returncode else "")
