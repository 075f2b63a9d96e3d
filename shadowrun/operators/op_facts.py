"""What a row of the table of operators says, field by field."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["OpFacts", "OpenElements"]


class OpenElements(enum.StrEnum):
    """Which elements of a result the definition of an operator leaves open."""

    INDEX_TIE = "indices: of equal values, any"
    WINDOW_TIE = "indices: of equal values in a window, any"
    FREQUENCY_TIE = "of equally frequent values, any"
    DUPLICATE_INDICES = "elements written more than once: any of the values"
    CONVERSION = "numbers outside the range of the integer dtype: any"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFacts:
    """What is known of one operator.

    Attributes:
        name: Base name; filled in by `facts`.
        ulp_bound: Greatest distance between two correct results in units in the last place; 0: nothing is rounded;
            None: reductions, contractions, norms and whatever cancels, which the float64 oracle decides.
        ulp_bound_complex: The same for complex inputs of an exact operator.
        source: Where the bound comes from.
        exact_unless: Arguments that, where given, make an exact operator round.
        only_moves: It returns elements unchanged, also the payload of a NaN. Selections do not: of two
            NaNs, a maximum is either, and so is a scatter to one place.
        zero_sign: The sign of a zero result is defined, if the operator has a bound. IEEE 754 and Annex F of C define
            it for element-wise arithmetic and copies; not for maxima and sorting, to which both zeros are equal.
        depends_on_dtype: The exact result in float64 is another than in the dtype of the call.
        arithmetic: A short chain of IEEE operations on each element; optimizers are.
        rounds_once: One IEEE operation.
        chain: Its result on magnitudes bounds the sum of the magnitudes of its terms.
        subtracts_from: Argument from which such a chain subtracts: with its sign changed, magnitudes add up.
        accumulates: It reduces or contracts: its error grows with the number of terms.
        n_factors: Of how many inputs each term is a product, for operators that are linear in each of these inputs: a
            sum 1, a matrix product 2; 0 for all others. On squared inputs these give the sum of the squared terms.
        one_stage: One sum or one short formula: nothing but its result has to be rounded.
        several_stages: Kernels keep values between stages in 16 bits; what this does to all elements is known.
        smooth: A kernel may keep a constant in 16 bits; its condition is no worse than that rounding.
        plain_product: A matrix product that may be split into blocks with partial sums in 16 bits.
        factors: Names of the two arguments whose product it sums, where short 16-bit sums are held to float32.
        adds_self: Something is added to that product.
        adds_at: Argument with the indices at which it adds in memory, each addition rounded.
        attention, convolution, transposed, backward: What it is, by its name.
        fast_convolution: Kernels may use Winograd or FFT, whose errors are larger and spread like noise.
        resamples: Weights are computed from coordinates; that noise is no sign of 16-bit accumulation.
        norm: ``row``: statistics of each row; ``channel``: a factor and a shift of each channel,
            which some kernels round.
        normalizes: ``softmax`` or ``norm``: elements of a row share statistics.
        norm_gradient: Its gradients of weight and bias are sums over rows.
        loss_gradient: A formula on each element, though its name says that it accumulates.
        absolute_error: (constant, slope) of an error relative to the input, not to the result, in unit roundoffs: the
            formula that most libraries use cancels.
        recurrent: Cells of a recurrent network: each step approximates its gates, and the next step starts from there.
        squares_deviations: The error of the mean is squared: all that is left of constant data.
        rounds_coordinates: The position of a sample is rounded: an error of the size of the local slope.
        log_likelihood_gradient: ``g - exp(o) * sum(g)``: near o = 0 the terms cancel.
        from_numbers: Numbers among the arguments from which it computes all elements, in the dtype of the result: each
            may be off by a unit roundoff there, and so may what cancels.
        spectrum: Position of the eigenvalues or singular values: rounding the matrix moves all of them by as much.
        by_equation: Positions of the results that are judged by the equation that defines them.
        any_order: Positions of the results whose elements may come in any order.
        unique_up_to: In what these results may differ.
        not_unique: Positions of the results that no equation verifies: workspaces.
        open_elements: Elements that the definition leaves open.
        saved: Positions of the results that a kernel saves for its own backward: some leave them empty where that has
            no use for them, and some keep the statistics of a 16-bit input in float32.
        atomic: The order of additions varies between runs on CUDA (`torch.use_deterministic_algorithms` lists it).
        unstable: Why two runs on the same inputs may differ on any device.
        lists: It takes lists of tensors, item by item.
        skip: Why its calls are never replayed.
        view: It shares its input's memory, though its schema does not say so.
        uninitialised: Its values mean nothing; the form is checked.
        uninitialised_returns: Positions of the results whose values mean nothing.
        hidden_writes: Arguments that it writes to, though its schema does not say so.
        on_cpu: Arguments that lie on the CPU whatever the device of the call.
        returns_number: It returns a number to Python: a result on the CPU is no fallback.
        distribution: What it samples; drawn values are checked for plausibility.
        device_specific: It exists for one kind of device only, so that its lack elsewhere means nothing.
    """

    name: str = ""
    # Rounding of single elements
    ulp_bound: int | None = None
    ulp_bound_complex: int | None = None
    source: str = ""
    exact_unless: tuple[str, ...] = ()
    only_moves: bool = False
    zero_sign: bool = True
    depends_on_dtype: bool = False
    arithmetic: bool = False
    rounds_once: bool = False
    chain: bool = False
    subtracts_from: str = ""
    # Sums
    accumulates: bool = False
    n_factors: int = 0
    one_stage: bool = False
    several_stages: bool = False
    smooth: bool = False
    plain_product: bool = False
    factors: tuple[str, ...] = ()
    adds_self: bool = False
    adds_at: str = ""
    # Families
    attention: bool = False
    convolution: bool = False
    transposed: bool = False
    backward: bool = False
    fast_convolution: bool = False
    resamples: bool = False
    norm: str = ""
    normalizes: str = ""
    norm_gradient: bool = False
    loss_gradient: bool = False
    # Formulas that cancel
    recurrent: bool = False
    absolute_error: tuple[float, float] | None = None
    squares_deviations: bool = False
    rounds_coordinates: bool = False
    log_likelihood_gradient: bool = False
    from_numbers: tuple[str, ...] = ()
    spectrum: int | None = None
    # What the definition leaves open
    by_equation: tuple[int, ...] = ()
    any_order: tuple[int, ...] = ()
    unique_up_to: str = ""
    not_unique: tuple[int, ...] = ()
    open_elements: OpenElements | None = None
    saved: tuple[int, ...] = ()
    atomic: bool = False
    unstable: str = ""
    # How a call is treated
    lists: bool = False
    skip: str = ""
    view: bool = False
    uninitialised: bool = False
    uninitialised_returns: tuple[int, ...] = ()
    hidden_writes: tuple[str, ...] = ()
    on_cpu: tuple[str, ...] = ()
    returns_number: bool = False
    distribution: str = ""
    device_specific: bool = False

    @property
    def keeps_zero_sign(self) -> bool:
        """Whether the sign of a zero result is defined; that of a sum is not, whose start may be either zero."""
        return self.ulp_bound is not None and self.zero_sign
