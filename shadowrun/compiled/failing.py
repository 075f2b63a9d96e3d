"""Which node of a graph a compiler cannot compile, or cannot run once it is compiled.

The shortest prefix of the graph that fails as the whole does, by bisection: a compilation for each halving.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.compiled.backend import compile_graph
from shadowrun.compiled.graph import operator_name, place
from shadowrun.compiled.ladder import first_line
from shadowrun.compiled.localise import ALONE, TOGETHER, Culprit, Localised
from shadowrun.compiled.probes import computed, prefix, recorded, single
from shadowrun.compiled.snapshot import undisturbed_draws

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from shadowrun.compiled.backend import Region
    from shadowrun.compiled.probes import Probe

__all__ = ["failing_node"]


def failing_node(
    region: Region,
    compiler: Callable[..., Any],
    *,
    until: float = float("inf"),
    tell: Callable[[str, int, int], None] = lambda _what, _done, _of: None,
) -> Localised:
    """Find the node that brings a region's exception in.

    Args:
        region: It; its first call that failed is known.
        compiler: What cannot compile it.
        until: `time.perf_counter()` at which no further compilation begins.
        tell: Told what is being done, and how many compilations of at most how many are done.
    """
    with undisturbed_draws():
        return _Search(region, compiler, until, tell).run()


class _Search:
    def __init__(self, region: Region, compiler: Any, until: float, tell: Any) -> None:
        assert region.error is not None
        assert region.failing is not None
        self._graph, self._snapshot = region.graph, region.failing
        self._stage, self._raised = region.error
        self._compiler = compiler
        self._until, self._tell = until, tell
        self._began = time.perf_counter()
        self._n = 0

    def run(self) -> Localised:
        values = recorded(self._graph, self._snapshot)
        nodes = computed(self._graph.module.graph, values)
        good, bad = 0, len(nodes)
        self._most = 2 + len(nodes).bit_length()
        error: BaseException | None = None
        while bad - good > 1 or error is None:
            if time.perf_counter() >= self._until:
                between = f"between {nodes[good].name} and {nodes[bad - 1].name}" if nodes else "unknown"
                return self._ended((), complete=False, note=f"Out of time; the node that fails is {between}.")
            middle = bad if error is None else (good + bad) // 2
            probe = prefix(self._graph, self._snapshot, values, nodes[:middle]) if nodes else None
            raised = None if probe is None else self._fails(f"the first {middle} of {len(nodes)} nodes", probe)
            if raised is not None:
                bad, error = middle, raised
            elif error is None:
                return self._ended((), note="The graph's nodes compile without what it writes to its inputs.")
            else:
                good = middle
        node = nodes[bad - 1]
        by_itself = self._fails(f"{node.name} alone", single(self._graph, self._snapshot, values, node))
        return self._ended((self._culprit(node, error, TOGETHER if by_itself is None else ALONE),))

    def _fails(self, what: str, probe: Probe) -> BaseException | None:
        """The exception, if it is of the same class and comes from the same stage."""
        self._tell(what, self._n, self._most)
        self._n += 1
        stage = "compile"
        try:
            code = compile_graph(self._compiler, probe.graph.module, probe.snapshot.fresh())
            stage = "runtime"
            with torch.no_grad():
                code(*probe.snapshot.fresh())
        except Exception as error:
            return error if stage == self._stage and type(error) is type(self._raised) else None
        return None

    def _culprit(self, node: fx.Node, error: BaseException, how: str) -> Culprit:
        site, module = place(node)
        return Culprit(node.name, operator_name(node), site, module, how, first_line(error))

    def _ended(self, culprits: tuple[Culprit, ...], *, complete: bool = True, note: str = "") -> Localised:
        return Localised(culprits, complete, time.perf_counter() - self._began, self._n, note)
