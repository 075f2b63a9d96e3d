"""Results of each step's last call that both recordings have in all elements: their exact distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from shadowrun.numerics.raw_numbers import decoded
from shadowrun.recording.model import Kind
from shadowrun.studies.diff.rounding import distances

if TYPE_CHECKING:
    import numpy.typing as npt

    from shadowrun.recording.model import Recording
    from shadowrun.studies.diff.compare import Difference

__all__ = ["OutputDistance", "output_distances"]

MAX_OUTPUTS: Final = 1000


@dataclass(frozen=True, slots=True)
class OutputDistance:
    """How far two results are apart; NaN where the dtype has no such distance.

    Attributes:
        pair: Number of the pair of calls.
        position: Which of the call's results.
        n_elements, n_differ: Elements, and those with other bits.
        ulp: Greatest distance in units in the last place.
        relative: Greatest relative difference of an element.
        absolute: Greatest absolute difference.
    """

    pair: int
    position: int
    n_elements: int
    n_differ: int
    ulp: float
    relative: float
    absolute: float


def output_distances(difference: Difference) -> tuple[OutputDistance, ...]:
    """Of the first results of steps' last calls, up to `MAX_OUTPUTS`, equal ones too, in program order."""
    a, b, results = difference.first, difference.second, difference.results
    at_end = [_ends_step(v.recording) for v in (a, b)]
    calls = [v.call[rows] for v, rows in ((a, results.first), (b, results.second))]
    kept = [np.isin(v.source[rows], list(v.recording.outputs)) for v, rows in ((a, results.first), (b, results.second))]
    wanted = results.known & ((kept[0] & kept[1]) | (at_end[0][calls[0]] & at_end[1][calls[1]]))
    found = []
    for k in np.flatnonzero(wanted).tolist():
        one = _distance(a.recording, int(results.first[k]), b.recording, int(results.second[k]), int(results.pair[k]))
        if one is not None:
            found.append(one)
        if len(found) == MAX_OUTPUTS:
            break
    return tuple(found)


def _distance(a: Recording, x: int, b: Recording, y: int, pair: int) -> OutputDistance | None:
    p, q = a.elements_of(x), b.elements_of(y)
    dtype = a.form_of(a.source(x)).dtype
    if p is None or q is None or len(p) != len(q) or dtype != b.form_of(b.source(y)).dtype:
        return None
    n_differ = p != q
    if dtype.startswith("complex"):
        # Real and imaginary parts lie side by side, and either makes the element differ.
        n_differ = n_differ.reshape(-1, 2).any(axis=1)
    measured = distances(p[None], q[None], dtype)
    ulp, relative, absolute = (float(column[0]) for column in measured[:3]) if measured else (np.nan,) * 3
    if not measured:
        numbers = [decoded(bits, dtype) for bits in (p, q)]
        if numbers[0] is not None and numbers[1] is not None:
            absolute = float(np.abs(numbers[0] - numbers[1]).max(initial=0.0))
    position = int(a.results["position"][x])
    return OutputDistance(pair, position, len(n_differ), int(n_differ.sum()), ulp, relative, absolute)


def _ends_step(recording: Recording) -> npt.NDArray[np.bool_]:
    """Whether each call is the last of its step and process with a result that has a digest: (n_calls,)."""
    found = np.zeros(len(recording.calls), bool)
    made = recording.results["kind"] != Kind.LEAF
    has = np.zeros(len(recording.calls), bool)
    of_call = np.repeat(np.arange(len(recording.calls)), recording.calls["n_results"])
    digested = recording.results["n_rungs"][recording.sources] > 0
    has[of_call[made & digested]] = True
    for process in recording.processes:
        calls = process.first_call + np.flatnonzero(has[process.first_call : process.first_call + process.n_calls])
        steps = recording.calls["step"][calls]
        found[calls[np.append(steps[1:] != steps[:-1], True)] if len(calls) else calls] = True
    return found
