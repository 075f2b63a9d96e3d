"""A variant compiled by torch.compile against the same variant in eager mode, on one device.

The program as a whole is compiled once and judged; its graphs are compiled one by one only where it is not right.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from shadowrun.compiled.check import compile_check
from shadowrun.compiled.outcome import CompileReport, RegionOutcome
from shadowrun.errors import UsageError
from shadowrun.intercept.untrusted.checked_calls import graphs_of_file
from shadowrun.studies.sweep.cases import Kind
from shadowrun.studies.zoo.graph import DEVICE, Ref, Runner
from shadowrun.studies.zoo.input_values import make_inputs
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from shadowrun.studies.campaign.variants.variant import Variant
    from shadowrun.studies.zoo.graph import Graph

__all__ = ["as_module", "check_compiled", "compiled"]

_LIMIT_S: Final = 120.0
_FAILED: Final = {
    RegionOutcome.COMPILE_ERROR: "compile error",
    RegionOutcome.RUNTIME_ERROR: "runtime error",
}


def check_compiled(variant: Variant, backend: str, device: torch.device) -> tuple[str, str, list[tuple[str, ...]]]:
    """Compile a variant, and compare it with eager.

    Args:
        variant: The variant; its graph is compiled as one function.
        backend: Of torch.compile; ``inductor:dynamic`` with sizes as symbols.
        device: Where both run.

    Returns:
        Status (as in `runner.Result`), the reason, and findings as op, dtype, kind, cause, explanation, message.
    """
    try:
        report = compiled(variant, backend, device)
    except UsageError as error:  # it fails in eager mode
        return "invalid", str(error)[:300], []
    return _read(report, backend)


def compiled(variant: Variant, backend: str, device: torch.device, *, regions: bool = False) -> CompileReport:
    """Compile a variant as one function.

    Args:
        variant: The variant.
        backend: Of torch.compile; ``inductor:dynamic`` with sizes as symbols.
        device: Where it runs.
        regions: Whether to look for the operator at fault, which takes a compilation for each step.

    Raises:
        UsageError: It fails in eager mode.
    """
    name, _, option = backend.partition(":")
    graph = variant.graph
    _check_eager(variant, device)
    inputs = _inputs(variant, device)
    if variant.execution.backward:
        for described, t in zip(graph.inputs, inputs, strict=True):
            t.requires_grad_(described.requires_grad)

    with graphs_of_file():
        return compile_check(
            as_module(graph, device, cloned=variant.execution.backward and graph.writes),
            *inputs,
            backend=name,
            # None, not False: torch decides by itself then, which is its default.
            dynamic=True if option == "dynamic" else None,
            train=variant.execution.backward,
            # Stages compile the program again for each: a campaign asks whether it is right, and the script's search
            # asks where.
            ladder=False,
            regions=regions,
            time_limit_s=_LIMIT_S,
        )


def as_module(graph: Graph, device: torch.device, *, cloned: bool = False) -> fx.GraphModule:
    """A graph as code of its own: Dynamo compiles no code of shadowrun once a comparison was made.

    Args:
        graph: The graph.
        device: Of what it makes without inputs.
        cloned: Copy the inputs that require gradients: an in-place call on a leaf raises.
    """
    code = fx.Graph()
    inputs = [code.placeholder(f"x{k}") for k in range(len(graph.inputs))]
    if cloned:
        inputs = [
            # A leaf that requires gradients cannot be written to.
            code.call_function(torch.clone, (x,)) if i.requires_grad else x
            for x, i in zip(inputs, graph.inputs, strict=True)
        ]
    made: list[fx.Node] = []

    def value(given: Any) -> Any:
        if type(given) is Ref:
            if given.node < 0:
                return inputs[-1 - given.node]
            result = made[given.node]
            is_several = _returns_several(graph.nodes[given.node].op)
            return code.call_function(operator.getitem, (result, given.output)) if is_several else result
        if type(given) is tuple:
            return [value(v) for v in given]
        return device if given is DEVICE else given

    for node in graph.nodes:
        args, kwargs = tuple(map(value, node.args)), {k: value(v) for k, v in node.kwargs}
        made.append(code.call_function(node.op, args, kwargs))
    code.output([value(ref) for ref in graph.outputs])
    return fx.GraphModule(torch.nn.Module(), code)


def _returns_several(op: torch._ops.OpOverload) -> bool:
    returns = schema_of(op).returns
    return len(returns) > 1 or (len(returns) == 1 and str(returns[0].type).startswith("List"))


def _check_eager(variant: Variant, device: torch.device) -> None:
    """Run it once without compilation, where each call is looked at: compiled code does not look.

    Raises:
        UsageError: It fails.
    """
    try:
        with torch.no_grad():
            Runner(variant.graph, device)(_inputs(variant, device))
    except Exception as error:  # whatever the graph does on its values
        raise UsageError(f"It fails in eager mode: {type(error).__name__}: {error}", slug="no-repro") from error


def _inputs(variant: Variant, device: torch.device) -> list[torch.Tensor]:
    return [t.to(device) for t in make_inputs(variant.graph.inputs, variant.recipe.seed)]


def _read(report: CompileReport, backend: str) -> tuple[str, str, list[tuple[str, ...]]]:
    if report.outcome in _FAILED:
        error = report.error or next((r.error for r in report.regions if r.error), "")
        kind, _, message = error.partition(":")
        what = f"{backend}: {kind.strip() or _FAILED[report.outcome]}"
        return "finding", "", [(_place(report), "", Kind.ERROR, "", what, message.strip()[:300])]
    if report.outcome is RegionOutcome.MISMATCH:
        verdicts = [r.verdict for r in report.regions if r.outcome is RegionOutcome.MISMATCH] or [report.verdict]
        v = verdicts[0]
        finding = (_place(report), "", Kind.MISMATCH, str(v.cause or ""), f"{backend}: {v.explanation}", v.evidence)
        return "finding", "", [tuple(text[:300] for text in finding)]
    if report.outcome is RegionOutcome.UNVERIFIED:
        return "unverified", f"{report.verdict.explanation}: {report.verdict.evidence}"[:300], []
    # A graph break runs eagerly and is equal to itself: that is no compiled variant that passed.
    if not report.n_graphs:
        return (
            "unverified",
            f"nothing was compiled: {'; '.join(report.graph_breaks) or 'Dynamo made no graph'}"[:300],
            [],
        )
    return "ok", "", []


def _place(report: CompileReport) -> str:
    """The operator at fault, where the search named one: ``aten::add.Tensor``."""
    culprits = [c for r in report.regions if r.localised is not None for c in r.localised.culprits]
    if not culprits:
        return ""
    space, _, rest = culprits[0].op.partition(".")
    return f"{space}::{rest.removesuffix('.default')}"
