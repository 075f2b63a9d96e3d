"""A recorder that ends the program at the first finding that fails the run: ``fail_fast`` of `compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shadowrun.recording.recorder import Recorder
from shadowrun.types import Cause

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.intercept.attribution import Attribution
    from shadowrun.recording.capturing import Capturing
    from shadowrun.replay.call import Call
    from shadowrun.store import DataFile
    from shadowrun.types import TensorDiff, Verdict

__all__ = ["FailFastRecorder"]


class FailFastRecorder(Recorder):
    """Looks at each verdict that is no match; a subclass, so that a run without ``fail_fast`` pays nothing.

    Args:
        data, attribution, capturing: As for `Recorder`.
        fails: Whether a call fails the run: by status, operator, module, phase and cause.

    Attributes:
        end_program: Called once, with what was found.
    """

    def __init__(
        self, data: DataFile, attribution: Attribution, capturing: Capturing | None, fails: Callable[..., bool]
    ) -> None:
        super().__init__(data, attribution, capturing)
        self._fails = fails
        self._origins: dict[int, tuple[str, str, str, str]] = {}
        self.end_program: Callable[[str], None] | None = None

    def _new_context(self, key: tuple[Any, ...], call: Call) -> int:
        number = super()._new_context(key, call)
        module, phase, site = call.origin
        self._origins[number] = call.plan.name, module, str(phase), site
        return number

    def verdict(
        self, context: int, verdict: Verdict, diffs: tuple[TensorDiff, ...] = (), *args: Any, **kwargs: Any
    ) -> int:
        """As in `Recorder`; then ask for the end of the program if it fails the run."""
        seq = super().verdict(context, verdict, diffs, *args, **kwargs)
        if self.end_program is None or verdict.cause is Cause.HARNESS:
            return seq
        op, module, phase, site = self._origins.get(context, ("", "", "", ""))
        if self._fails(str(verdict.status), op, module, phase, str(verdict.cause or "")):
            end, self.end_program = self.end_program, None
            where = f" at {site}" if site else ""
            end(f"stopped at the first finding that fails the run: {verdict.status} of {op}{where}")
        return seq
