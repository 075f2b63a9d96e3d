"""Shapes of results that a call is given (``out=``), where the kernel of the CPU neither resizes nor looks at them.

Products and solutions of sparse matrices skip what dense ones check, the sizes of their other inputs too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadowrun.intercept.untrusted.argument_checks import ArgumentCheck, NamedArguments

__all__ = ["FAMILIES"]


def _like_self(given: NamedArguments) -> Iterator[str]:
    x, out = given.get("self"), given.get("out")
    if isinstance(x, torch.Tensor) and isinstance(out, torch.Tensor) and x.shape != out.shape:
        yield "out has another shape than self, and is not resized"


def _sparse_product(matrix: str) -> ArgumentCheck:
    """Of a matrix and a vector.

    Args:
        matrix: Name of the matrix's argument.
    """

    def check(given: NamedArguments) -> Iterator[str]:
        mat, vec, out = given.get(matrix), given.get("vec"), given.get("out")
        if not isinstance(mat, torch.Tensor) or mat.layout is torch.strided or "out" not in given:
            return
        if mat.dim() != 2 or (isinstance(vec, torch.Tensor) and vec.shape != mat.shape[1:]):
            yield f"vec has not one value for each column of {matrix}, which is sparse"
        # `mv` calls `addmv` with its result as the first term too, and one element is a term for all rows.
        elif matrix == "self" and isinstance(out, torch.Tensor) and out.numel() and out.shape != mat.shape[:1]:
            yield "out has not one value for each row of self, which is sparse, and is not resized"

    return check


def _sparse_solution(given: NamedArguments) -> Iterator[str]:
    b, a, x = given.get("self"), given.get("A"), given.get("X")
    if not isinstance(a, torch.Tensor) or a.layout is torch.strided or "X" not in given:
        return
    if a.dim() != 2 or a.shape[0] != a.shape[1]:
        yield "A is sparse, and not square"
    elif isinstance(b, torch.Tensor) and b.shape[:-1] != a.shape[1:]:
        yield "self has not one row for each column of A, which is sparse"
    elif isinstance(b, torch.Tensor) and isinstance(x, torch.Tensor) and x.shape != b.shape:
        yield "X has another shape than self, and is not resized where A is sparse"


FAMILIES: Final[dict[str, ArgumentCheck]] = {
    "rrelu_with_noise": _like_self,
    "mv": _sparse_product("self"),
    "addmv": _sparse_product("mat"),
    "triangular_solve": _sparse_solution,
}
"""By a pattern of names without namespace and overload. Found by results of other shapes before and behind a guard page
(``guarded_calls --out``); of the operators with an ``out=`` of their own for sparse matrices, the others look."""
