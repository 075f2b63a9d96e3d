"""Metamorphic relations: a platform is compared with itself, without a reference.

Each operator call of a variant is made twice on the platform, in two forms whose results must agree: a batch and one
of its items (`slice`), a batch and its items in another order (`permutation`), contiguous and other memory (`layout`),
a vector and its single elements (`tail`), a call and its in-place form (`in-place`). Vector loops and their tails
round differently, and so do matrix products of other sizes: the judge decides whether rounding explains a difference,
as it does in the sweep (`studies.sweep.invariance`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.intercept.plan import OpPlan, make_plan
from shadowrun.intercept.untrusted.op_allowlist import Refused
from shadowrun.numerics.form import dtype_name
from shadowrun.studies.campaign.mutators.execution import RELATIONS
from shadowrun.studies.campaign.mutators.inplace_and_out import in_place_form
from shadowrun.studies.sweep.batch_arguments import batch_arguments
from shadowrun.studies.sweep.cases import Part
from shadowrun.studies.sweep.inputs import transposed
from shadowrun.studies.sweep.invariance import (
    Invariance,
    LayoutVariant,
    Pair,
    TargetUnsupported,
    flattened,
    map_tensors,
)
from shadowrun.types import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.platforms.device import Platform
    from shadowrun.studies.sweep.invariance import VariantMismatch

__all__ = ["EXPLANATIONS", "PARTS", "REFERENCE_FORM", "RELATIONS", "Metamorphic", "Violation"]

PARTS: Final = {"slice": Part.SLICE, "layout": Part.LAYOUT, "tail": Part.TAIL}
# Each call of a variant is made at least twice more: of long programs, the first ones.
_MAX_CALLS: Final = 64
# Elements of a call that are computed alone: each is a call.
_MAX_TAIL: Final = 48
EXPLANATIONS: Final = {
    "slice": "in a batch and alone differ",
    "permutation": "in another order of the batch differ",
    "layout": "strided and contiguous inputs differ",
    "tail": "vector body and scalar tail differ",
    "in-place": "in place and not in place differ",
}
REFERENCE_FORM: Final = {
    "slice": "alone",
    "permutation": "in order",
    "layout": "contiguous",
    "tail": "element by element",
    "in-place": "not in place",
}
"""The form of each pair that is trusted."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A call of which two forms differ by more than rounding explains.

    Attributes:
        op: ``aten::add.Tensor``.
        dtype: Of its first floating tensor, else of its first; empty for none.
        relation: One of `RELATIONS`.
        explanation: What differs, in words.
        cause: Cause that the judge names; may be empty.
        message: The judge's evidence.
    """

    op: str
    dtype: str
    relation: str
    explanation: str
    cause: str
    message: str


class Metamorphic:
    """Checks relations on a platform.

    Args:
        platform: Platform under test.
    """

    def __init__(self, platform: Platform) -> None:
        self._invariance = Invariance(platform, _MAX_TAIL, checked=True)
        self._plans: dict[torch._ops.OpOverload, OpPlan] = {}

    def check(
        self,
        program: Callable[[], Any],
        relation: str,
        on_target: Callable[[], None] = lambda: None,
        on_op: Callable[[str], None] = lambda _: None,
    ) -> tuple[list[Violation], int]:
        """Check a relation on each operator call of a program.

        Args:
            program: Runs the variant on the CPU.
            relation: One of `RELATIONS`.
            on_target: Called when the program has run on the CPU and before the target runs.
            on_op: Called with the name of each operator before it is called on the target.

        Returns:
            The violations, and the number of pairs that were compared.

        Raises:
            Exception: Any exception of the program.
        """
        calls = self.calls(program)
        on_target()
        violations: list[Violation] = []
        n_pairs = 0
        for plan, args, kwargs in calls:
            on_op(plan.name)
            try:
                for pair, of in self._pairs(relation, plan, args, kwargs):
                    n_pairs += 1
                    mismatch = self._invariance.compare(of, pair)
                    if mismatch is not None and mismatch.verdict.status is Status.MISMATCH:
                        violations.append(_violation(relation, plan, args, mismatch))
                        # One violation of a call is enough: its other pairs show the same fault.
                        break
            # A form that the target does not take: that it lacks the operator is found where it runs the program. Or a
            # form that no kernel may get.
            except (TargetUnsupported, Refused):
                continue
        return violations, n_pairs

    def calls(self, program: Callable[[], Any]) -> list[tuple[OpPlan, tuple[Any, ...], dict[str, Any]]]:
        """The calls of a program of which pairs are made, with copies of their inputs."""
        return self._invariance.calls(program, _MAX_CALLS)

    def first_mismatch(
        self, relation: str, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> VariantMismatch | None:
        """The first pair of a call that differs by more than rounding explains; None if all agree."""
        try:
            for pair, of in self._pairs(relation, plan, args, kwargs):
                mismatch = self._invariance.compare(of, pair)
                if mismatch is not None and mismatch.verdict.status is Status.MISMATCH:
                    return mismatch
        except (TargetUnsupported, Refused):
            return None
        return None

    def _pairs(
        self, relation: str, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[Pair, OpPlan]]:
        """Pairs of results, with the operator that the judge computes exactly."""
        if relation in PARTS:
            yield from ((pair, plan) for pair in self._invariance.pairs(PARTS[relation], plan, args, kwargs))
        elif relation == "permutation":
            yield from ((pair, plan) for pair in self._permuted(plan, args, kwargs))
        else:
            yield from ((pair, plan) for pair in self._in_place(plan, args, kwargs))

    def _permuted(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Pair]:
        """The batch backwards; of an element-wise operator, all elements backwards."""
        if torch.Tag.pointwise in plan.func.tags:
            flat = flattened(args, kwargs)
            if flat is None:
                return
            args, kwargs, n = flat
            places = tuple(i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.dim())
            other = map_tensors(args, kwargs, lambda t: t.flip(0) if t.dim() else t)
        else:
            places, n = batch_arguments(plan.func, args, kwargs)
            if n < 2:
                return
            other = tuple(a.flip(0) if i in places else a for i, a in enumerate(args)), kwargs
        names, straight = self._invariance.results(plan, args, kwargs, first=True)
        _, turned = self._invariance.results(plan, *other)
        # Results without a batch dimension, as statistics over the batch, are sums in another order.
        kept = 0
        while kept < len(straight) and _has_batch(straight[kept], turned[kept], n):
            kept += 1
        if kept:
            # The results in order are turned, and not the inputs once more: the target must compute each form once.
            back = tuple(v.flip(0) for v in straight[:kept] if isinstance(v, torch.Tensor))
            variant = LayoutVariant(args, kwargs, "reversed", places)
            yield Pair(variant, names[:kept], *other, turned[:kept], back)

    def _in_place(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Pair]:
        op = in_place_form(plan.func)
        if op is None or not isinstance(args[0], torch.Tensor):
            return
        names, fresh = self._invariance.results(plan, args, kwargs, first=True)
        if len(fresh) != 1 or not isinstance(fresh[0], torch.Tensor):
            return
        if fresh[0].shape != args[0].shape or fresh[0].dtype is not args[0].dtype:
            return
        if op not in self._plans:
            self._plans[op] = make_plan(op, len(self._plans))
        first, rest = args[0].contiguous(), args[1:]
        for change, target in (("in place", first), ("in place, transposed", transposed(first))):
            # A target that lacks the form lacks an operator: no relation between two results.
            _, written = self._invariance.results(self._plans[op], (target, *rest), kwargs, first=True)
            variant = LayoutVariant(args, kwargs, change, written_by=self._plans[op])
            yield Pair(variant, names, args, kwargs, written, fresh)


def _has_batch(a: Any, b: Any, n: int) -> bool:
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape and a.shape[:1] == (n,)


def _violation(relation: str, plan: OpPlan, args: tuple[Any, ...], mismatch: VariantMismatch) -> Violation:
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    first = next((t for t in tensors if t.is_floating_point() or t.is_complex()), tensors[0] if tensors else None)
    dtype = dtype_name(first.dtype) if first is not None else ""
    verdict = mismatch.verdict
    cause = str(verdict.cause or "")
    return Violation(plan.name, dtype, relation, EXPLANATIONS[relation], cause, verdict.evidence[:300])
