"""Scripts of root causes, made in worker processes: one that crashes or hangs costs its own root cause only.

Of a verdict that says that a process ended, the first job ends its process on purpose, and a second one, in a fresh
process, writes the script of the call that the first had in hand.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shadowrun.studies.campaign.causes.cause_report import CauseFile, folder_name, write_cause
from shadowrun.studies.campaign.causes.root_causes import Signature
from shadowrun.studies.campaign.variants.recipe import Recipe
from shadowrun.studies.isolation.pool import Limits, Pool, RemainingTask, WorkerFailure
from shadowrun.studies.sweep.cases import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shadowrun.studies.campaign.campaign_folder import CampaignFolder
    from shadowrun.studies.campaign.causes.root_causes import RootCause
    from shadowrun.studies.isolation.worker_side import Channel

__all__ = ["ENTRY", "SHORT", "Job", "start", "write_scripts"]

ENTRY: Final = "shadowrun.studies.campaign.causes.script_jobs:start"
SHORT: Final = "short.py"
_WRITE, _CATCH, _END = "write", "catch", "end"
_ENDS: Final = (Kind.CRASH, Kind.TIMEOUT, Kind.OUT_OF_MEMORY)
# For mutations that are dropped, and for the script, which is run once.
_SLACK_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Job:
    """A script to write.

    Attributes:
        number: Of the root cause, for the reader.
        cause: The root cause.
        recipe: Of its smallest variant.
        stage: ``write``; of a process that ends, ``catch`` and then ``end``.
    """

    number: int
    cause: RootCause
    recipe: Recipe
    stage: str


def write_scripts(
    folder: CampaignFolder,
    chosen: Sequence[tuple[int, RootCause, Recipe]],
    out: Path,
    *,
    minimise: bool = True,
    time_limit_s: float = 30.0,
    jobs: int = 1,
    on_written: Callable[[int, RootCause, CauseFile], None],
) -> None:
    """Write the scripts of root causes.

    Args:
        folder: The campaign; its platforms are started.
        chosen: Number, root cause and recipe of its smallest variant.
        out: Gets a folder for each.
        minimise: Whether to drop mutations and make inputs smaller.
        time_limit_s: For the inputs of one.
        jobs: Worker processes.
        on_written: Called for each as it is written.

    Raises:
        PlatformError: A platform is absent.
    """
    s = folder.settings
    # Not in the folder of the scripts, which may have such a file from elsewhere: any operator is called again from it.
    with tempfile.TemporaryDirectory(prefix="shadowrun-") as caught:
        settings = s.for_workers(folder.programs.absolute(), 1) | {
            "out": str(out.absolute()),
            "caught": caught,
            "minimise": minimise,
            "time_limit_s": time_limit_s,
            "limits": [s.timeout_s, s.memory_bytes],
        }
        work = _Work(chosen, out, on_written)
        limits = Limits(_SLACK_S + s.timeout_s + time_limit_s, s.memory_bytes)
        pool: Pool[Job] = Pool(ENTRY, settings, jobs, limits, work)
        try:
            pool.run()
        finally:
            pool.close()


class _Work:
    """The jobs, as a pool runs them."""

    def __init__(
        self,
        chosen: Sequence[tuple[int, RootCause, Recipe]],
        out: Path,
        on_written: Callable[[int, RootCause, CauseFile], None],
    ) -> None:
        self._left = [Job(n, c, r, _CATCH if c.signature.kind in _ENDS else _WRITE) for n, c, r in reversed(chosen)]
        self._out, self._on_written = out, on_written

    def next(self) -> Job | None:
        """The next root cause."""
        return self._left.pop() if self._left else None

    def line(self, task: Job) -> dict[str, Any]:
        """A job as its worker gets it."""
        return {
            "number": task.number,
            "stage": task.stage,
            "signature": dataclasses.astuple(task.cause.signature),
            "explanations": task.cause.explanations,
            # The reference's own fault is shown there: that needs no device.
            "target": -1 if -1 in task.cause.targets else task.cause.smallest.target,
            "recipe": task.recipe.to_json(),
            "folder": folder_name(task.cause.signature),
        }

    def receive(self, task: Job, line: dict[str, Any]) -> None:
        """What was written."""
        notes = tuple(line.pop("notes"))
        made = CauseFile(str(task.cause.signature), n_mutations=len(task.recipe.mutations), notes=notes, **line)
        self._write(task, made)

    def ended(self, task: Job) -> None:
        """All of a job was run."""
        # A crash that does not come back cannot be shown by a script.
        if task.stage == _CATCH:
            self._write(task, self._without(task, "the variant does not end its process any more"))

    def lost(self, task: Job, failure: WorkerFailure) -> RemainingTask[Job] | None:
        """The process of a job has ended: on purpose, or its root cause gets no script."""
        if task.stage == _CATCH:
            # As planned: the call before the end is in its file now, and another process writes the script from it.
            return RemainingTask(dataclasses.replace(task, stage=_END), fresh=True)
        why = f"{failure.kind} while its script was made: {failure.explanation}"
        self._write(task, self._without(task, f"{why}; run the variant again with `shadowrun campaign reproduce`"))
        return None

    def pause(self) -> bool:
        """It stops when all is written."""
        return False

    def _without(self, task: Job, note: str) -> CauseFile:
        return CauseFile(
            str(task.cause.signature), json.dumps(task.recipe.to_json()), len(task.recipe.mutations), notes=(note,)
        )

    def _write(self, task: Job, made: CauseFile) -> None:
        write_cause(self._out / folder_name(task.cause.signature), made)
        self._on_written(task.number, task.cause, made)


def start(settings: dict[str, Any], channel: Channel) -> Callable[[dict[str, Any]], None]:
    """Prepare a worker process; gives the function that runs a job.

    Args:
        settings: Of `write_scripts`.
        channel: To the pool.

    Raises:
        ShadowrunError: The programs cannot be read.
    """
    from shadowrun.studies.campaign.variants.program_draft import Library
    from shadowrun.studies.campaign.variants.programs import lazily
    from shadowrun.studies.campaign.worker import runner_settings

    library = Library({p.id: p for p in lazily(Path(settings["programs"]))})
    return _Writer(settings, channel, library, runner_settings(settings)).run


class _Writer:
    """Writes scripts, in a worker process."""

    def __init__(self, settings: dict[str, Any], channel: Channel, library: Any, platforms: Any) -> None:
        self._settings, self._channel = settings, channel
        self._library, self._platforms = library, platforms

    def run(self, task: dict[str, Any]) -> None:
        """Do one job."""
        from shadowrun.repro.script import ReproOptions
        from shadowrun.store.atomic_write import write_text
        from shadowrun.studies.campaign.causes import scripts

        self._channel.step.begin([task["number"], task["target"]])
        wanted = scripts.Wanted(
            Signature(*task["signature"]), tuple(task["explanations"]), task["target"], Recipe.from_json(task["recipe"])
        )
        folder = Path(self._settings["out"]) / task["folder"]
        caught = Path(self._settings["caught"]) / task["folder"]
        seconds, n_bytes = self._settings["limits"]
        try:
            if task["stage"] == _CATCH:
                # A kernel may hold the interpreter's lock: the default action of the signal needs no Python.
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, seconds)
                scripts.catch_call(wanted, self._library, self._platforms, caught)
                signal.setitimer(signal.ITIMER_REAL, 0)
                return
            if task["stage"] == _END:
                made = scripts.write_end_script(wanted, self._platforms, caught, folder, (seconds, n_bytes))
            else:
                options = ReproOptions(self._settings["minimise"], self._settings["time_limit_s"])
                made = scripts.write_script(wanted, self._library, self._platforms, folder, options)
        except Exception as error:  # no root cause may cost the others their scripts
            signal.setitimer(signal.ITIMER_REAL, 0)
            made = scripts.CauseScript(wanted.recipe, note=f"{type(error).__name__}: {error}"[:400])
        repro = made.repro
        if made.text and repro is not None:
            write_text(repro.script.with_name(SHORT), made.text)
        exits = -1 if repro is None or repro.shows_fault is None else int(repro.shows_fault)
        self._channel.send(
            {
                "recipe": json.dumps(made.recipe.to_json()),
                "text": made.text,
                "inputs": "" if repro is None else repro.inputs,
                "script": "" if repro is None else str(repro.script.relative_to(folder)),
                "exits": exits,
                "said": "" if repro is None else repro.said,
                "notes": [note for note in (made.note, *(repro.notes if repro is not None else ())) if note],
            }
        )
        self._channel.step.end()
