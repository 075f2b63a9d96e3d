"""The shortest script of a finding, for an issue tracker: inputs as numbers, one call, both results printed.

`script.render` writes the script that checks itself and exits 1. This text only shows the fault, in a dozen lines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.repro.quoting import Code, code, dotted_name, joined, literal
from shadowrun.repro.script import templates

if TYPE_CHECKING:
    from shadowrun.repro.platform_setup import PlatformSetup
    from shadowrun.repro.script import ScriptSpec

__all__ = ["MAX_LINES", "snippet"]

MAX_LINES: Final = 15
# Of all inputs together: more would not be read.
_MAX_ELEMENTS: Final = 32
_KINDS: Final = ("mismatch", "raises", "accepts", "ends")
_SIMULATED: Final = "from shadowrun import sim; sim.enable({}, flaws={})  # the device is simulated"
_WIDE: Final = (torch.float64, torch.complex128)


def snippet(spec: ScriptSpec, flaws: tuple[str, ...] | None = None) -> str:
    """A script of at most 15 lines that shows a fault.

    Inputs that are too many to be read as numbers, or that have strides of their own, are loaded from the
    ``inputs.pt`` of the long script.

    Args:
        spec: What the long script shows.
        flaws: Those of the simulated target; None for a real one.

    Returns:
        The text; empty where the fault needs more than one call, or processes with different settings.
    """
    if spec.kind == "graph":
        return _short(_of_graph(spec))
    if spec.kind == "itself":
        return _short(_of_itself(spec, flaws))
    target, ref = spec.target, spec.ref
    if spec.kind not in _KINDS or target is None or ref is None or ref.environment or ref.settings:
        return ""
    # Variables hold from the start of a process, and settings from their line on: the two calls would need two
    # processes.
    if target.environment and target.settings:
        return ""
    setup = [code(_SIMULATED, target.device, list(flaws))] if flaws is not None else []
    if flaws is None and target.starting and not target.environment:
        setup.append(target.starting)
    inputs = _written_out(spec)
    if inputs is None:
        setup.append(code('INPUTS = torch.load("inputs.pt", weights_only=True)'))
        inputs = _loaded(spec)
    text = (
        templates()
        .get_template("snippet.py.txt")
        .render(
            title=spec.title,
            environment=" ".join(f"{k}={v}" for k, v in target.environment.items()),
            setup=setup,
            digits=_digits(_tensors(spec)),
            inputs=inputs,
            lines=spec.lines,
            results=dict(spec.results),
            sides=_sides(spec, target, ref),
        )
    )
    return _short(text)


def _of_graph(spec: ScriptSpec) -> str:
    """A graph compiled and in eager mode, on the same inputs."""
    given = spec.inputs["inputs"]
    tensors = [v for v in given if isinstance(v, torch.Tensor)]
    if any(t.device.type not in ("cpu", "cuda") for t in tensors):
        return ""  # the script would have to set the device up first
    inputs = code('torch.load("inputs.pt", weights_only=True)["inputs"]')
    if _can_be_written(tensors) and not any(t.requires_grad for t in tensors):
        inputs = code("[{}]", joined(_literal_input(v) for v in given))
    return (
        templates()
        .get_template("snippet_graph.py.txt")
        .render(
            title=spec.title,
            setup=[*(code("import {}", dotted_name(name)) for name in spec.imports), *filter(None, spec.setup)],
            digits=_digits(tensors),
            graph=spec.values["graph"],
            inputs=inputs,
            options=spec.values["options"],
        )
    )


def _of_itself(spec: ScriptSpec, flaws: tuple[str, ...] | None) -> str:
    """A platform in two ways."""
    target = spec.target
    if target is None or any(isinstance(value, list) for value in spec.inputs.values()):
        return ""
    setup = [code(_SIMULATED, target.device, list(flaws))] if flaws is not None else []
    setup += [target.starting] if flaws is None and target.starting else []
    inputs = _written_out(spec)
    if inputs is None:
        setup.append(code('INPUTS = torch.load("inputs.pt", weights_only=True)'))
        inputs = _loaded(spec)
    return (
        templates()
        .get_template("snippet_itself.py.txt")
        .render(
            title=spec.title,
            environment=" ".join(f"{k}={v}" for k, v in target.environment.items()),
            setup=[*setup, *target.settings],
            digits=_digits(_tensors(spec)),
            device=target.device,
            inputs=inputs,
            lines=spec.lines,
            results=dict(spec.results),
            n=max((t.numel() for t in _tensors(spec)), default=0),
            **spec.values,
        )
    )


def _literal_input(value: Any) -> Code:
    return _numbers(value, code("{}", str(value.device))) if isinstance(value, torch.Tensor) else literal(value)


def _short(text: str) -> str:
    # A longer text is no short one: the script itself is there for what does not fit.
    return text if len(text.splitlines()) <= MAX_LINES else ""


def _digits(tensors: list[torch.Tensor]) -> int:
    # So many digits tell each number of the format from its neighbours: with four, a small difference was invisible.
    return 17 if any(t.dtype in _WIDE for t in tensors) else 9


def _sides(spec: ScriptSpec, target: PlatformSetup, ref: PlatformSetup) -> list[tuple[str, str, list[Code]]]:
    """Name, device and settings of each call, in order."""
    if target.environment:
        return [(target.device, target.device, [])]
    # The reference first: settings hold from there on, and what raises or ends the process comes last.
    sides = [(ref.name, ref.device, list[Code]()), (target.name, target.device, list(target.settings))]
    if spec.kind == "accepts":  # here the reference is what raises
        return sides if target.settings else sides[::-1]
    return sides


def _written_out(spec: ScriptSpec) -> dict[str, Any] | None:
    """Inputs as code; None where they are too many, or have a layout that numbers do not show."""
    if not _can_be_written(_tensors(spec)):
        return None
    return {name: _each(spec, name, _numbers) for name in spec.inputs}


def _can_be_written(tensors: list[torch.Tensor]) -> bool:
    return all(map(_is_simple, tensors)) and sum(map(_n_written, tensors)) <= _MAX_ELEMENTS


def _loaded(spec: ScriptSpec) -> dict[str, Any]:
    return {
        name: code("[t.to({}, copy=True) for t in INPUTS[{}]]", _place(spec, name), name)
        if isinstance(value, list)
        else code("INPUTS[{}].to({}, copy=True)", name, _place(spec, name))
        for name, value in spec.inputs.items()
    }


def _each(spec: ScriptSpec, name: str, made: Any) -> Code:
    value, place = spec.inputs[name], _place(spec, name)
    if isinstance(value, list):
        return code("[{}]", joined(made(t, place) for t in value))
    written: Code = made(value, place)
    return written


def _numbers(t: torch.Tensor, place: Code) -> Code:
    if not t.numel():
        return code("torch.empty({}, dtype={}, device={})", list(t.shape), t.dtype, place)
    if _is_uniform(t):
        return code("torch.full({}, {}, dtype={}, device={})", list(t.shape), t.flatten()[0].item(), t.dtype, place)
    return code("torch.tensor({}, dtype={}, device={})", t.tolist(), t.dtype, place)


def _place(spec: ScriptSpec, name: str) -> Code:
    return code('"cpu"') if name in spec.on_cpu else code("device")


def _tensors(spec: ScriptSpec) -> list[torch.Tensor]:
    values = [v for value in spec.inputs.values() for v in (value if isinstance(value, list) else [value])]
    return [v for v in values if isinstance(v, torch.Tensor)]


def _n_written(t: torch.Tensor) -> int:
    return 1 if _is_uniform(t) else t.numel()


def _is_uniform(t: torch.Tensor) -> bool:
    # Only where all bits agree: the signs of zeros, and the payloads of NaN, count.
    if t.numel() < 2 or t.dtype == torch.complex32:
        return False
    raw = t.contiguous().view(-1).view(torch.uint8).view(t.numel(), t.element_size())
    return bool((raw == raw[0]).all())


def _is_simple(t: torch.Tensor) -> bool:
    dense = t.layout is torch.strided and t.is_contiguous() and not t.is_quantized and not t.is_conj()
    return dense and t.dtype != torch.complex32 and not t.is_neg() and t.numel() <= 1 << 20
