"""The stage of compilation that causes a deviation: stages added one by one, then Inductor's passes switched off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shadowrun.compiled import torchcompile
from shadowrun.compiled.outcome import CompileStage, RegionOutcome
from shadowrun.types import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.types import Verdict

__all__ = ["OUTCOME_OF", "bisect_stages", "first_line"]

OUTCOME_OF: Final = {
    Status.MATCH: RegionOutcome.OK,
    Status.MISMATCH: RegionOutcome.MISMATCH,
    Status.UNVERIFIED: RegionOutcome.UNVERIFIED,
}
_DECOMPOSED: Final = "aot_eager_decomp_partition"
_RUNGS: Final = ("eager", "aot_eager", _DECOMPOSED)
"""Dynamo's graphs only; and autograd traced ahead; and decompositions with Inductor's partition."""
_OFF: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("without fusion", {"max_fusion_size": 1, "epilogue_fusion": False}),
    ("rounding between fused operators", {"emulate_precision_casts": True}),
    ("without pattern passes", {"pattern_matcher": False}),
    ("without autotuning", {"max_autotune": False, "coordinate_descent_tuning": False}),
)


def bisect_stages(
    run: Callable[[Any], Verdict],
    backend: Any,
    mode: str | None,
    options: dict[str, Any],
    *,
    draws: bool,
    until: Callable[[], bool],
) -> Iterator[CompileStage]:
    """Try each stage; those of the backend itself, with options off, only for Inductor.

    Args:
        run: Compiles the program by a compiler given, runs and judges it; raises what that raises.
        backend: The user's.
        mode: Its mode.
        options: Its options.
        draws: The program draws: decomposed, it has other random numbers, and its results cannot be compared.
        until: Whether there is time for one more.
    """
    rungs: list[tuple[str, Any]] = [
        (n, torchcompile.resolve_backend(n, None, None, None)) for n in _RUNGS if n != backend
    ]
    name = backend if isinstance(backend, str) else getattr(backend, "__name__", "backend")
    rungs.append((name, torchcompile.resolve_backend(backend, mode, options, None)))
    if backend == "inductor":
        for what, off in _OFF:
            # A stage without effect on this mode would cost a compilation.
            if what != "without autotuning" or "autotune" in (mode or ""):
                rungs.append((f"{name} {what}", torchcompile.resolve_backend(backend, mode, {**options, **off}, None)))
    for what, compiler in rungs:
        if not until():
            return
        try:
            verdict = run(compiler)
        except Exception as error:
            yield CompileStage(what, RegionOutcome.COMPILE_ERROR, first_line(error))
            continue
        # Decomposed, the program has other random numbers, so the comparison proves nothing.
        if draws and what == _DECOMPOSED and verdict.status is Status.MISMATCH:
            yield CompileStage(what, RegionOutcome.UNVERIFIED, "its random numbers differ")
            continue
        yield CompileStage(what, OUTCOME_OF[verdict.status], verdict.evidence)


def first_line(error: BaseException) -> str:
    """``RuntimeError: the first line``."""
    # Dynamo wraps what a backend raises.
    cause = getattr(error, "inner_exception", None) or error
    text = str(cause).strip().partition("\n")[0]
    return f"{type(cause).__name__}: {text}"[:300]
