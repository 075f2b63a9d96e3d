"""The shortest script of a finding, for an issue tracker: inputs as numbers, one call, both results printed.

`script.render` writes the script that checks itself and exits 1. This text only shows the fault, in a dozen lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.repro.quoting import code, in_docstring, joined
from shadowrun.repro.script import templates

if TYPE_CHECKING:
    from shadowrun.repro.script import ScriptSpec

__all__ = ["snippet"]

_MAX_ELEMENTS: Final = 32
"""Of all inputs together: more would not be read."""
_KINDS: Final = ("mismatch", "raises")
_SIMULATED: Final = "from shadowrun import sim; sim.enable({}, flaws={})  # the device is simulated"


def snippet(spec: ScriptSpec, flaws: tuple[str, ...] | None = None) -> str:
    """A script of at most 15 lines that shows a fault.

    Args:
        spec: What the long script shows.
        flaws: Those of the simulated target; None for a real one.

    Returns:
        The text; empty where the inputs are too large to be written out, or the fault needs more than one call.
    """
    target, ref = spec.target, spec.ref
    if spec.kind not in _KINDS or target is None or ref is None or ref.environment or ref.settings:
        return ""
    inputs = _written_out(spec)
    if inputs is None or (target.environment and target.settings):
        return ""
    setup = [*target.settings] if flaws is None else [code(_SIMULATED, target.device, list(flaws))]
    if flaws is None and target.starting and not target.environment:
        setup.append(target.starting)
    devices = [target.device] if target.environment else [target.device, ref.device]
    if target.settings and not target.environment:
        return ""  # the settings would hold for both calls
    return (
        templates()
        .get_template("snippet.py.txt")
        .render(
            title=in_docstring(spec.title),
            environment=in_docstring(" ".join(f"{k}={v}" for k, v in target.environment.items())),
            setup=setup,
            inputs=inputs,
            lines=spec.lines,
            results=dict(spec.results),
            devices=devices,
        )
    )


def _written_out(spec: ScriptSpec) -> dict[str, Any] | None:
    """Inputs as code; None where they are too large, or have a layout that numbers do not show."""
    left = _MAX_ELEMENTS
    out: dict[str, Any] = {}
    for name, value in spec.inputs.items():
        tensors = value if isinstance(value, list) else [value]
        if not all(isinstance(t, torch.Tensor) and _is_simple(t) for t in tensors):
            return None
        left -= sum(t.numel() for t in tensors)
        place = code("") if name in spec.on_cpu else code(", device=device")
        made = [code("torch.tensor({}, dtype={}{})", t.tolist(), t.dtype, place) for t in tensors]
        out[name] = code("[{}]", joined(made)) if isinstance(value, list) else made[0]
    return out if left >= 0 else None


def _is_simple(t: torch.Tensor) -> bool:
    dense = t.layout is torch.strided and t.is_contiguous() and not t.is_quantized and not t.is_conj()
    # An empty list of numbers has lost its shape.
    return dense and t.dtype != torch.complex32 and (t.numel() > 0 or t.dim() == 1)
