"""The facts of an operator in words, each bound with its source; and the page of all operators in the documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shadowrun.judge.rounding import rounding_bounds
from shadowrun.operators.fact_table import ROWS
from shadowrun.operators.facts import facts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadowrun.operators.facts import OpFacts

__all__ = ["describe", "page"]

_HIGHAM = "Higham & Mary 2019: errors grow as sqrt(n) u"
_MEASURED = "measured on right and faulty kernels, judge/rounding/bounds.py"
_BACKWARD_STABLE = "Higham, Accuracy and Stability, 2nd ed., chapters 9, 19, 20; Golub & Van Loan, sections 8.1 and 8.6"
_DETERMINISM = "torch.use_deterministic_algorithms lists it"


def describe(row: OpFacts) -> list[tuple[str, str, str]]:
    """The facts on an operator: label, text and source of each that is not the default."""
    return [*_rounding(row), *_sums(row), *_cancellation(row), *_left_open(row), *_treatment(row)]


def _rounding(row: OpFacts) -> Iterator[tuple[str, str, str]]:
    if row.ulp_bound == 0:
        unless = f", unless {' or '.join(row.exact_unless)} is given" if row.exact_unless else ""
        yield "bound", f"0 ULP: exact{unless}", row.source
    elif row.ulp_bound is not None:
        yield "bound", f"{row.ulp_bound} ULP in real dtypes", row.source
    else:
        yield "bound", "none in ULP: the float64 oracle decides", "what reduces, contracts or cancels has no such bound"
    # Apart from the real bound: kernels compute a complex result from several rounded real ones.
    if row.ulp_bound_complex is not None:
        yield "complex bound", f"{row.ulp_bound_complex} ULP", "as hypot, OpenCL C 3.0"
    if row.ulp_bound != 0:
        yield from _oracle_bound(row)
    if row.keeps_zero_sign:
        yield "sign of zero", "defined: another sign is wrong", "IEEE 754; Annex F of C"
    if row.only_moves:
        yield "moves", "returns elements unchanged, also the payload of a NaN", "IEEE 754, 5.5.1"
    if row.depends_on_dtype:
        yield "dtype", "the exact result in float64 differs: the oracle cannot confirm the target", ""
    if row.arithmetic and not row.rounds_once:
        yield "arithmetic", "a short chain of IEEE operations on each element", ""


def _oracle_bound(row: OpFacts) -> Iterator[tuple[str, str, str]]:
    if row.accumulates and not row.recurrent:
        wide = f"{rounding_bounds.BOUND:g} + {rounding_bounds.ROOT:g} sqrt(n) units of rounding for n terms"
        yield "oracle bound", wide, f"{_HIGHAM}; {_MEASURED}"
    else:
        yield (
            "oracle bound",
            f"{rounding_bounds.rounding_bound(row, rounding_bounds.FULL_MANTISSA):g} units of rounding",
            _MEASURED,
        )
    # By the judge's own functions: a page that repeated its numbers would be wrong after the next measurement.
    coarse = rounding_bounds.COARSE_SUM_BOUND if rounding_bounds.is_made_of_sums(row) else rounding_bounds.COARSE_BOUND
    yield "oracle bound, 16 bits", f"{coarse:g} units of rounding", _MEASURED


def _sums(row: OpFacts) -> Iterator[tuple[str, str, str]]:
    if row.accumulates:
        yield "accumulates", "a sum or a contraction: its error grows with the number of terms", ""
    if row.n_factors:
        kind = "a product of two inputs" if row.n_factors > 1 else "an element of one input"
        yield "terms", f"each is {kind}: squared inputs give the size of the rounding error", ""
    if row.one_stage:
        yield "stages", "one: only its result is rounded", ""
    if row.several_stages:
        yield "stages", "several: kernels may round in between", ""
    if row.smooth:
        yield "constants", "may be kept in 16 bits where the result is", ""
    if row.factors:
        text = f"below 64 terms in 16 bits, the sum of {' times '.join(row.factors)} is held to float32"
        yield "short product", text, "one step of a matrix unit takes 16 to 64 terms"
    if row.adds_at:
        yield "adds in memory", f"at {row.adds_at}, each addition rounded in the dtype of the result", ""
    if row.recurrent:
        yield "recurrent", "each step approximates its gates, and the next step starts from there", _MEASURED
    if row.fast_convolution:
        yield "fast algorithms", "Winograd and FFT are accepted where their errors are spread like noise", _MEASURED
    if row.norm == "channel":
        yield "norm", "some kernels round one factor and one shift of each channel", ""
    elif row.norm == "row":
        yield "norm", "the statistics of a row must not be rounded to 16 bits", ""
    if row.atomic:
        yield "order of additions", "varies between runs on CUDA", _DETERMINISM


def _cancellation(row: OpFacts) -> Iterator[tuple[str, str, str]]:
    if row.absolute_error is not None:
        constant, slope = row.absolute_error
        size = " + ".join(p for p in (f"{constant:g}" if constant else "", f"{slope:g} |x|" if slope else "") if p)
        yield "absolute error", f"{size} unit roundoffs", "the formula that most libraries use cancels"
    if row.squares_deviations:
        yield "absolute error", "the square of 4 unit roundoffs of the greatest input", "the error of the mean, squared"
    if row.rounds_coordinates:
        yield "absolute error", "a unit roundoff times extent and greatest input", "coordinates of samples are rounded"
    if row.log_likelihood_gradient:
        yield "absolute error", "a unit roundoff of exp(o) sum(g)", "g - exp(o) sum(g) cancels near o = 0"
    if row.from_numbers:
        yield "absolute error", f"a unit roundoff of {' and of '.join(row.from_numbers)}", "all elements come from them"
    if row.spectrum is not None:
        text = f"a unit roundoff of the norm of the matrix, for output {row.spectrum}"
        yield "absolute error", text, "Weyl: rounding the matrix moves each value by as much"


def _left_open(row: OpFacts) -> Iterator[tuple[str, str, str]]:
    if row.by_equation:
        yield "judged by equation", _outputs(row.by_equation), _BACKWARD_STABLE
    if row.any_order:
        yield "any order", _outputs(row.any_order), ""
    if row.unique_up_to:
        yield "unique up to", row.unique_up_to, ""
    if row.not_unique:
        yield "workspace", f"{_outputs(row.not_unique)}: a difference is no mismatch", ""
    if row.open_elements is not None:
        yield "left open", str(row.open_elements), ""
    if row.saved:
        yield "saved for backward", f"{_outputs(row.saved)}: may be empty, or in another precision", ""
    if row.unstable:
        yield "not repeatable", row.unstable, ""


def _treatment(row: OpFacts) -> Iterator[tuple[str, str, str]]:
    if row.skip:
        yield "not replayed", row.skip, ""
    if row.view:
        yield "view", "shares its input's memory, though its schema does not say so: only the form is checked", ""
    if row.uninitialised:
        yield "uninitialised", "its values mean nothing: only the form is checked", ""
    if row.uninitialised_returns:
        yield "uninitialised", f"{_outputs(row.uninitialised_returns)}: not compared", ""
    if row.hidden_writes:
        yield "hidden writes", f"{', '.join(row.hidden_writes)}: written, though its schema does not say so", ""
    if row.on_cpu:
        yield "on the CPU", f"{', '.join(row.on_cpu)}: on the host whatever the device of the call", ""
    if row.returns_number:
        yield "returns a number", "its result on the CPU is no fallback", ""
    if row.distribution:
        yield "random", f"{row.distribution}: drawn values are checked for plausibility", ""
    if row.device_specific:
        yield "one device only", "no other device needs it", ""


def _outputs(positions: tuple[int, ...]) -> str:
    return ", ".join(f"output {k}" for k in positions)


_HEAD: Final = """\
# Facts on each operator

One row for each operator on which the judge or the plan of a call needs facts. Written by
`shadowrun explain --page` from the table (`shadowrun/operators/fact_table.py`); `shadowrun explain aten::mm` prints one
row with the source of each bound. In-place, out and foreach variants share a row. [Verdicts](verdicts.md) says what the
judge does with it.

Not in the table: operators with the defaults. They have no bound in ULP, so the float64 oracle decides, with
{bound:g} units of rounding, {bound:g} + sqrt(*n*) for sums of *n* terms, {coarse:g} and {coarse_sum:g} in 16 bits
([bounds](verdicts.md#truth-and-conditioning)).

| operator | bound | other facts |
|---|---|---|
"""
_ELSEWHERE: Final = ("bound", "oracle bound", "oracle bound, 16 bits")
_IN_SHORT: Final = {
    "sign of zero": "sign of zero defined",
    "accumulates": "sum",
    "moves": "only moves elements",
    "arithmetic": "arithmetic",
    "terms": "linear in each factor",
}


def page() -> str:
    """The page of the documentation, in Markdown."""
    head = _HEAD.format(
        bound=rounding_bounds.BOUND, coarse=rounding_bounds.COARSE_BOUND, coarse_sum=rounding_bounds.COARSE_SUM_BOUND
    )
    return head + "".join(_line(name) for name in ROWS)


def _line(name: str) -> str:
    row = facts(name)
    listed = [(label, text) for label, text, _ in describe(row) if label not in _ELSEWHERE]
    words = [_IN_SHORT.get(label, f"{label}: {text}") for label, text in listed]
    bound = "" if row.ulp_bound is None else f"{row.ulp_bound} ULP"
    return f"| `{name}` | {bound} | {'; '.join(words)} |\n".replace("|x|", "\\|x\\|")
