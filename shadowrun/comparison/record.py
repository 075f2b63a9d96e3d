"""`record()`: one pass over a program that keeps digests of all results, to be compared on another machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict

import torch

from shadowrun.comparison.active_run import OnePassRun, prepare_process
from shadowrun.comparison.output import distributed_rank, file_of_rank
from shadowrun.comparison.steps import Steps
from shadowrun.config import Config
from shadowrun.errors import DataFileError, PlatformError, ShadowrunWarning, UsageError
from shadowrun.intercept.attribution import Attribution
from shadowrun.intercept.patches import SubclassConstructor
from shadowrun.intercept.threads import Threads
from shadowrun.platforms.cpu import instruction_sets
from shadowrun.platforms.device import resolve
from shadowrun.platforms.fingerprint import fingerprint
from shadowrun.recording.call_recorder import CallRecorder
from shadowrun.recording.captured_inputs import CapturedInputs
from shadowrun.recording.file_format.block_buffer import BlockBuffer
from shadowrun.recording.file_format.recording_writer import SUFFIX, Writer
from shadowrun.recording.kernel_tracer import KernelTracer
from shadowrun.recording.model import OUTPUTS_BYTES, Process
from shadowrun.recording.provenance import Provenance, at_start
from shadowrun.recording.step_outputs import StepOutputs
from shadowrun.schedule.selection import Selection, check_operators
from shadowrun.store.lock import FileLock
from shadowrun.torch_versions import warn_of_untested

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from os import PathLike

    from typing_extensions import Unpack

    from shadowrun.intercept.dispatch import ShadowMode

__all__ = ["RecordRun", "record"]

_MAX_ROWS: Final = 1 << 20


class RecordOptions(TypedDict, total=False):
    """Keyword arguments of `record`, which says what they mean."""

    steps: int | Iterable[int] | None
    schedule: Callable[[int], Any] | None
    modules: str | Iterable[str] | None
    ops: str | Iterable[str] | None
    rows: int
    capture: int | None
    kernels: bool


class RecordRun(OnePassRun):
    """A recording, running or finished. Made by `record`.

    Use it as a context manager, as a decorator, or by `start` and `stop`. It can be started again after a stop: calls
    add up. It cannot be nested.

    Attributes:
        path: File that is written; known once it was started, since each rank of a distributed run has its own.
        platform: Spec of the platform that the program is run as; empty where it runs as it is.
        captured: Counts of the calls whose inputs are kept.
        outputs: Counts of the steps whose last results are kept.
    """

    _made_by = "record"
    _recorder: CallRecorder

    def __init__(self, path: Path, config: Config, rows: int, capture: int | None, *, kernels: bool = False) -> None:
        self.path = path
        self.platform = ""
        self._wanted = path
        self._config = config
        self._rows = rows
        self._capture = capture
        self._kernels = kernels
        self._selection = Selection(config)
        self._attribution = Attribution()
        # Torch cannot construct a tensor subclass by its old constructor under a dispatch mode.
        self._constructor = SubclassConstructor()
        self._mode: ShadowMode | None = None
        self._marks_steps = False
        self._assemble()

    def _assemble(self) -> None:
        """Make what belongs to one file."""
        self._pid = os.getpid()
        self._process = Process(self._wanted.name)
        self._fingerprints: dict[str, dict[str, Any]] = {}
        self._start_digests: dict[str, str] = {}
        self._provenance = Provenance()
        self.captured = CapturedInputs(self._capture or 0)
        self.outputs = StepOutputs(0 if self._capture == 0 else OUTPUTS_BYTES)
        self._recorder = CallRecorder(
            self._attribution,
            self._selection,
            self._provenance,
            self._rows,
            self._first_call_on,
            self.captured,
            self.outputs,
            KernelTracer() if self._kernels else None,
        )
        self._threads = Threads(self._recorder, self._attribution)
        self._steps = Steps(self._recorder, self._recorder, self._selection)
        self._writer: Writer | None = None
        self._buffer: BlockBuffer | None = None
        self._claim: FileLock | None = None

    # -- running -----------------------------------------------------------------------------------

    def __repr__(self) -> str:
        state = "running" if self._mode is not None else "stopped"
        return f"<shadowrun.RecordRun {self.path.name}, {self.n_calls} calls, {state}>"

    @property
    def n_calls(self) -> int:
        """Calls that were recorded so far."""
        return 0 if self._buffer is None else self._buffer.n_calls

    @property
    def skipped(self) -> dict[str, int]:
        """Calls that were not recorded, by reason."""
        return dict(self._recorder.skipped)

    # -- inside --------------------------------------------------------------------------------------

    def _end_step(self) -> None:
        self._threads.find_untracked_if_new()
        with contextlib.suppress(Exception):
            self._follow_rank()  # a program may destroy its process group before the end
        self._steps.end(time.perf_counter_ns())

    def _open(self) -> None:
        """Open the file of this rank, or go on with it."""
        if self._writer is not None and self._claim is not None:
            self._claim.renew()
            self._writer.resume()
            return
        rank, world = distributed_rank()
        claim = FileLock(file_of_rank(self._wanted, rank, world))
        try:
            self._process = Process(
                name=claim.path.name,
                rank=rank,
                world_size=world,
                started=datetime.now(UTC).isoformat(timespec="seconds"),
                argv=(Path(sys.argv[0]).name, *sys.argv[1:]) if sys.argv else (),
                options=self._printable(),
            )
            self._start_digests = at_start()
            # The host's facts are in each recording, also where all calls run on an accelerator.
            self._first_call_on(torch.device("cpu"))
            self._writer = Writer(claim.path, self._described(complete=False))
        except BaseException:
            claim.release()
            raise
        self._claim, self.path = claim, claim.path
        self._buffer = BlockBuffer(self._writer, self._before_block)

    def _printable(self) -> dict[str, Any]:
        names = ("steps", "modules", "ops")
        printed = self._config.printable()
        found = {name: printed[name] for name in names if printed[name] is not None}
        own = {"rows": self._rows, "capture": self._capture, "kernels": self._kernels, "platform": self.platform}
        return found | {name: value for name, value in own.items() if value}

    def _first_call_on(self, device: torch.device) -> None:
        """Note a device before the program's first call there."""
        with contextlib.suppress(PlatformError):  # meta: it computes no values
            self._fingerprints[str(device)] = fingerprint(resolve(str(device)))

    def _before_block(self) -> None:
        if self._provenance.changed and self._writer is not None:
            self._provenance.changed = False
            self._writer.describe(self._described(complete=False))

    def _described(self, *, complete: bool) -> Process:
        # Where the program's tensors live: on the first accelerator that it used, if any.
        facts = next((f for f in reversed(self._fingerprints.values()) if f["device"] != "cpu"), None)
        facts = facts or next(iter(self._fingerprints.values()), {})
        return dataclasses.replace(
            self._process,
            complete=complete,
            # `classes` explains platforms by single flags, of which a fingerprint has a digest only.
            fingerprint=facts | {"cpu_flag_list": instruction_sets()},
            provenance=self._start_digests | self._provenance.digests,
            skipped=dict(self._recorder.skipped),
            not_captured=dict(self.captured.not_kept),
        )

    def _describe(self) -> str:
        return f"A recording ({self._wanted.name})"

    def _prepare(self) -> Callable[[], None]:
        if self._pid != os.getpid():  # a forked child: the file is the parent's
            _inherited.append(self._writer)
            self._assemble()
        prepare_process()
        self._open()
        assert self._buffer is not None
        return functools.partial(self._recorder.start, self._buffer)

    def _finish(self) -> None:
        failure = self._recorder.failure
        try:
            if self._writer is not None:
                self._recorder.flush()
                self._follow_rank()
                self._close(self._writer, complete=not failure)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        finally:
            if self._claim is not None:
                self._claim.release()
        if failure:
            with contextlib.suppress(ShadowrunWarning):
                warnings.warn(
                    f"shadowrun could not record everything: {failure}. Your program was not affected.",
                    ShadowrunWarning,
                    stacklevel=3,
                )

    def _follow_rank(self) -> None:
        """Note the rank if the program has made its process group since the start."""
        rank, world = distributed_rank()
        if world > 1:
            self._process = dataclasses.replace(self._process, rank=rank, world_size=world)

    def _close(self, writer: Writer, *, complete: bool) -> None:
        """Finish the file, which gets the name of its rank if that was not known when it was opened."""
        rank, world = self._process.rank, self._process.world_size
        wanted = file_of_rank(self._wanted, rank, world)
        claim = None
        if self._claim is not None and wanted != self._claim.wanted:
            # A link or a folder in the place of that lock: the file keeps its name.
            with contextlib.suppress(DataFileError):
                claim = FileLock(wanted)
        if claim is not None:
            self._process = dataclasses.replace(self._process, name=claim.path.name)
        writer.finish(self._described(complete=complete))
        if claim is not None and self._claim is not None:
            writer.move(claim.path)
            self._claim.release()
            self._claim, self.path = claim, claim.path

    def _stop_in_child(self) -> None:
        super()._stop_in_child()
        if self._claim is not None:
            self._claim.release()


# Writers of parent processes, kept so that no destructor closes them: SQLite forbids that in a forked child.
_inherited: list[Any] = []


def record(file: str | PathLike[str], **options: Unpack[RecordOptions]) -> RecordRun:
    """Record digests of the results of every operator call, to compare this run with one on another machine.

    Args:
        file: File to write, ``a.shadowrec``. In a distributed run each rank writes its own, ``a.1.shadowrec``.
        **options: `steps`, `schedule`, `modules` and `ops` as in `compare`. `rows`: also keep a ladder for each of the
            first so many indices of the leading dimension of each result, dimensions of size 1 left out. `capture`:
            keep inputs of calls, up to so many bytes in all, for `shadowrun replay`. The results of each step's last
            call are kept in any case, up to 1 MiB a step and 4 MiB in all, unless `capture` is 0. `kernels`: also keep
            the name of the kernel that ran for each call; a call then takes 100 to 200 µs more, and on an accelerator
            it is waited for.

    Returns:
        A context manager that is also a decorator and an object with start(), stop() and step(). The program runs
        once; its results, gradients and random streams stay as they are.

    Raises:
        UsageError: Unknown or wrong option.
        DataFileError: The file cannot be written.

    Example:
        >>> import torch, shadowrun
        >>> with shadowrun.record("doctest.shadowrec") as run:  # doctest: +SKIP
        ...     _ = torch.ones(2, 2) @ torch.ones(2, 2)
    """
    if callable(file):
        raise TypeError('Name the file: @shadowrun.record("a.shadowrec"), not @shadowrun.record.')
    given: dict[str, Any] = dict(options)
    known = sorted(RecordOptions.__annotations__)
    for name in given:
        if name not in known:
            raise UsageError(
                f"record() has no option {name!r}. Options: {', '.join(known)}.",
                slug="unknown-option",
            )
    rows = given.pop("rows", 0)
    if isinstance(rows, bool) or not isinstance(rows, int) or not 0 <= rows <= _MAX_ROWS:
        raise UsageError(f"rows={rows!r}: use a whole number from 0 to {_MAX_ROWS}.", slug="bad-option")
    capture = given.pop("capture", None)
    if capture is not None and (isinstance(capture, bool) or not isinstance(capture, int) or capture < 0):
        raise UsageError(f"capture={capture!r}: use a number of bytes, such as 100_000_000.", slug="bad-option")
    kernels = given.pop("kernels", False)
    if not isinstance(kernels, bool):
        raise UsageError(f"kernels={kernels!r}: use True or False.", slug="bad-option")
    path = Path(file)
    if path.suffix != SUFFIX:
        raise UsageError(f"The recording {str(path)!r}: give it a name that ends in {SUFFIX}.", slug="bad-option")
    config = Config.from_options(**given, settings=False, known=False)
    check_operators(config.ops or ())
    warn_of_untested(stacklevel=2)
    return RecordRun(path, config, rows, capture, kernels=kernels)
