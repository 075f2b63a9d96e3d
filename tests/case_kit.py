"""Builds cases without a device: the target is any Python function that stands in for the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from shadowrun.operators.case import Case, exact_copy, flat_results
from shadowrun.operators.vendor_ops import COUNTERPARTS

if TYPE_CHECKING:
    from collections.abc import Callable

_HIDDEN = {"aten::native_batch_norm": ("running_mean", "running_var")}


def make_case(op: Any, target: Callable[..., Any], *args: Any, previous: Any = None, **kwargs: Any) -> Case:
    """A case of `op` on `args` whose target runs `target` with the same arguments (it may write to them).

    Of another device's operator, the CPU has a counterpart.
    """
    target = COUNTERPARTS.get(op.name(), target) if target is op else target
    schema = op._schema
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    written |= set(_HIDDEN.get(op.name(), ()))
    mutated = tuple(a.name for a in schema.arguments if a.name in written)
    names: list[str] = []

    def runner(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(run_args: tuple[Any, ...], run_kwargs: dict[str, Any]) -> Any:
            with torch.no_grad():
                results = function(*run_args, **run_kwargs)
            names[:], values = flat_results(op, mutated, run_args, run_kwargs, results)
            return tuple(exact_copy(v) if isinstance(v, torch.Tensor) else v for v in values)

        return run

    case = Case(
        op,
        args,
        kwargs,
        mutated,
        (),
        (),
        (),
        runner(target),
        runner(COUNTERPARTS.get(op.name(), op)),
        previous_actual=previous,
    )
    expected = case.run_reference(*case.fresh_inputs())
    names_expected = tuple(names)
    actual = case.run_target(*case.fresh_inputs())
    return Case(
        op,
        args,
        kwargs,
        mutated,
        names_expected,
        actual,
        expected,
        case.run_target,
        case.run_reference,
        previous_actual=previous,
    )


@pytest.fixture(name="make_case")
def make_case_fixture() -> Callable[..., Case]:
    return make_case


@pytest.fixture
def give_sim(clean_sim: Any) -> Any:
    """Gives the simulated device a kernel, in Python, until the test ends."""
    library = torch.library.Library("aten", "IMPL")
    yield lambda name, kernel: library.impl(name, kernel, "PrivateUse1")
    library._destroy()
