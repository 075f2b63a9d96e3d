"""Peak memory of a run on the CPU, which torch keeps no count of: its profiler tells of each allocation."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import ProfilerActivity, profile

from shadowrun.compiled import torchcompile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["peak_on_cpu"]


def peak_on_cpu(run: Callable[[], object]) -> int:
    """Most bytes that a run holds at a time beyond those that it began with; 0 where the profiler is in use already.

    Memory that does not come from torch's allocator, such as that of a runtime of a backend's own, is not in it.
    """
    if torchcompile.profiler_is_on():  # there is one for a process: a second would end it
        return 0
    # There is one cycle; on torch 2.11, it warns of the events of others unless it is told to keep them.
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with _stderr_closed():
        profiler.start()
    try:
        run()
    finally:
        with _stderr_closed():
            profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return _peak(events)


@contextlib.contextmanager
def _stderr_closed() -> Iterator[None]:
    """Some builds of torch write lines for tracing tools to file descriptor 2 whenever a profiler starts or stops."""
    try:
        saved = os.dup(2)
    except OSError:  # a program without it
        yield
        return
    try:
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _peak(events: Iterable[dict[str, Any]]) -> int:
    """The highest sum of what was allocated and freed, in the order of time."""
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]" and _on_cpu(e)]
    held = most = 0
    for _, n_bytes in sorted(changes, key=lambda change: change[0]):
        held += n_bytes
        most = max(most, held)
    return most


def _on_cpu(event: dict[str, Any]) -> bool:
    return bool(event.get("args", {}).get("Device Type") == 0)
