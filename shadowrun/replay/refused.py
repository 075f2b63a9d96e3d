"""Calls that the reference refuses: does it lack the operator, or is the call invalid, and the target answered it?

A device that reads beside an index, or multiplies what does not fit, returns something that means nothing. That is a
finding of its own kind, where it is sure that the call is invalid: the message is about an index that is out of range,
or torch's meta kernel, which no platform has a part in, refuses the inputs too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from shadowrun.platforms.remote import Unsendable, WorkerDied
from shadowrun.platforms.unsupported import classify, first_sentence, limit_of_host
from shadowrun.replay.counterparts import COUNTERPARTS
from shadowrun.replay.equivalents import EQUIVALENTS
from shadowrun.replay.views import view_on_meta
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from shadowrun.intercept.plan import OpPlan

__all__ = ["reference_raised", "refused"]

_OUT_OF_RANGE = re.compile(
    r"\bind(?:ex|ices)\b.*\bout of (?:range|bounds)|out of bounds|Dimension out of range", re.IGNORECASE | re.DOTALL
)


def reference_raised(error: Exception) -> Verdict:
    """The verdict on a call that the reference cannot run."""
    why = f"the reference cannot run it: {type(error).__name__}"
    if isinstance(error, (Unsendable, WorkerDied)):
        why = f"the reference cannot run it: {error}"
    return Verdict(Status.UNVERIFIED, None, why, str(error)[:300])


def refused(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Verdict:
    """The verdict on a call that the target answered, and the reference did not.

    Args:
        plan: The operator.
        args: Positional inputs, as before the call.
        kwargs: Inputs by name.
        error: What the reference raised.
    """
    if not _is_invalid(plan, args, kwargs, error):
        return reference_raised(error)
    raised = type(error).__name__
    evidence = f"the target answers, and the reference raises {raised}: {first_sentence(str(error), 240)}"
    return Verdict(Status.MISMATCH, Cause.NO_ERROR, f"answered where the reference raises {raised}", evidence, 0.9)


def _is_invalid(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> bool:
    ours = isinstance(error, (Unsendable, WorkerDied, Warning)) or bool(limit_of_host(error))
    if ours or plan.custom or plan.name in COUNTERPARTS or plan.name in EQUIVALENTS or not classify(error).supported:
        return False
    if isinstance(error, IndexError) or _OUT_OF_RANGE.search(str(error)):
        return True
    try:
        view_on_meta(plan, args, kwargs)
    except NotImplementedError:
        return False
    except Exception as meta:
        return "meta" not in str(meta).lower()  # it wants values
    return False
