"""`nan_track()`: find the calls that make NaN and infinities, in one pass and without a reference."""

from __future__ import annotations

import contextlib
import time
import warnings
from typing import TYPE_CHECKING, Final

from shadowrun.comparison.active_run import OnePassRun, prepare_process
from shadowrun.comparison.steps import Steps
from shadowrun.config import Config
from shadowrun.errors import NonFiniteError, ShadowrunWarning, UsageError
from shadowrun.intercept.attribution import Attribution
from shadowrun.intercept.patches import SubclassConstructor
from shadowrun.intercept.threads import Threads
from shadowrun.recording.nonfinite import NonFiniteObserver
from shadowrun.schedule.selection import Selection
from shadowrun.torch_versions import warn_of_untested

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.intercept.dispatch import ShadowMode
    from shadowrun.recording.nonfinite import NonFinite

__all__ = ["NanTrack", "nan_track"]

_MAX_PLACES: Final = 1000
_REACTIONS: Final = ("warn", "raise", "keep")
_MAX_SHOWN: Final = 10


class NanTrack(OnePassRun):
    """Looks for NaN and infinities. Made by `nan_track`; a context manager, a decorator, or `start` and `stop`."""

    _made_by = "nan_track"
    _recorder: NonFiniteObserver

    def __init__(self, on_found: str | Callable[[NonFinite], None]) -> None:
        self._on_found = on_found
        self._attribution = Attribution()
        selection = Selection(Config.from_options(settings=False, known=False))
        self._recorder = NonFiniteObserver(self._attribution, selection, self._react, _MAX_PLACES)
        self._threads = Threads(self._recorder, self._attribution)
        self._steps = Steps(self._recorder, self._recorder, selection)
        # Torch cannot construct a tensor subclass by its old constructor under a dispatch mode.
        self._constructor = SubclassConstructor()
        self._mode: ShadowMode | None = None
        self._marks_steps = False
        self._warned = False

    def found(self) -> list[NonFinite]:
        """One entry for each place that makes or gets NaN or infinities, the earliest call first."""
        return self._recorder.found()

    @property
    def n_calls(self) -> int:
        """Operator calls that were intercepted."""
        return self._recorder.n_calls

    @property
    def skipped(self) -> dict[str, int]:
        """Calls that were not looked at, by reason."""
        return dict(self._recorder.skipped)

    def __str__(self) -> str:
        found = self.found()
        if not found:
            return f"No NaN and no infinity in the results of {self.n_calls:,} calls."
        lines = [str(one) for one in found[:_MAX_SHOWN]]
        more = [f"… and {len(found) - _MAX_SHOWN} more places: found() lists all."] if len(found) > _MAX_SHOWN else []
        return "\n".join((*lines, *more))

    def __repr__(self) -> str:
        state = "running" if self._mode is not None else "stopped"
        return f"<shadowrun.NanTrack {len(self._recorder.found())} places in {self.n_calls} calls, {state}>"

    # -- inside --------------------------------------------------------------------------------------

    def _react(self, one: NonFinite) -> None:
        if callable(self._on_found):
            self._on_found(one)
        elif self._on_found == "raise":
            raise NonFiniteError(str(one), one)
        elif self._on_found == "warn" and not self._warned:
            self._warned = True
            warnings.warn(f"{one}. Later places are in found().", ShadowrunWarning, stacklevel=2)

    def _end_step(self) -> None:
        self._threads.find_untracked_if_new()
        self._steps.end(time.perf_counter_ns())
        self._recorder.flush()  # of an accelerator: one host sync in a step

    def _describe(self) -> str:
        return "A search for NaN (nan_track)"

    def _prepare(self) -> Callable[[], None]:
        prepare_process()
        return self._recorder.start

    def _finish(self) -> None:
        self._recorder.flush()
        if self._recorder.failure:
            with contextlib.suppress(ShadowrunWarning):
                warnings.warn(
                    f"shadowrun could not look at all calls: {self._recorder.failure}. Your program was not affected.",
                    ShadowrunWarning,
                    stacklevel=3,
                )


def nan_track(on_found: str | Callable[[NonFinite], None] = "warn") -> NanTrack:
    """Find the operator calls that make NaN and infinities, without a reference device.

    A place is noted if a result has NaN (or an infinity) and no input had any, or if an input from outside of the block
    had some. A mask that is filled with ``-inf`` as an argument is not noted. The program's results stay as they are.

    Args:
        on_found: ``"warn"``: one warning, at the first place. ``"raise"``: `NonFiniteError` at the call; on an
            accelerator at the end of its step, since an earlier answer would need a host sync for each call.
            ``"keep"``: nothing. Or a function that is called with the first `NonFinite` of each place.

    Returns:
        A context manager that is also a decorator and an object with start(), stop() and step(). Its ``found()`` lists
        the places.

    Raises:
        UsageError: Another value of `on_found`.

    Example:
        >>> import torch, shadowrun
        >>> with shadowrun.nan_track("keep") as track:
        ...     _ = torch.zeros(2).log() * 0
        >>> [(one.op, one.kind) for one in track.found()]
        [('aten::log', 'Inf'), ('aten::mul.Tensor', 'NaN')]
    """
    if not callable(on_found) and on_found not in _REACTIONS:
        raise UsageError(
            f"on_found={on_found!r}: use {', '.join(map(repr, _REACTIONS))}, or a function.", slug="bad-option"
        )
    warn_of_untested(stacklevel=2)
    return NanTrack(on_found)
