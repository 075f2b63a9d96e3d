"""Regions that Inductor compiled, compared with eager while a program runs them compiled.

torch wraps each region in a higher-order operator if it is told to when it compiles, and calls that only while a
dispatch mode is there: so nothing is compiled anew when a comparison begins or ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.compiled import torchcompile
from shadowrun.compiled.graph import Graph, Snapshot, undisturbed_draws
from shadowrun.compiled.judging import judge
from shadowrun.compiled.rounding import Draws
from shadowrun.intercept import higher_order
from shadowrun.intercept.plan import Action, OpPlan
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from shadowrun.replay.recorder import Recorder
    from shadowrun.replay.replayer import Replayer
    from shadowrun.replay.schedule import Selection

__all__ = ["Regions"]

_FIRST_INDEX: Final = 1 << 20
"""Numbers of their plans begin behind those of operators."""
_FRAMES: Final = 3
_OTHER_DRAWS = Verdict(
    Status.UNVERIFIED,
    Cause.RANDOMNESS,
    "compiled code draws otherwise than eager: set torch._inductor.config.fallback_random",
)


class Regions:
    """Compares regions while it is started.

    Args:
        recorder: Where to record them: as operators called ``compiled::graph 0``.
        selection: Which to compare.
        replayer: Whose turn to take.
        max_bytes: Inputs that may be copied.
    """

    def __init__(self, recorder: Recorder, selection: Selection, replayer: Replayer, max_bytes: int) -> None:
        self._recorder, self._selection, self._replayer = recorder, selection, replayer
        self._max_bytes = max_bytes
        self._known: dict[int, tuple[Any, OpPlan, Graph | None]] = {}
        self._wrapping: Any = None

    def start(self) -> None:
        """Have what is compiled from now on wrapped, and compare what is."""
        self._wrapping = torchcompile.wrapped_regions(self._unseen)
        self._wrapping.__enter__()
        higher_order.observe_regions(self.observe)

    def stop(self) -> None:
        """Let regions pass."""
        wrapping, self._wrapping = self._wrapping, None
        if wrapping is not None:
            higher_order.observe_regions(None)
            wrapping.__exit__(None, None, None)

    def _unseen(self) -> None:
        self._recorder.skip("compiled::graph", "", "compiled before the comparison began")

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a region for the user, compiled, then eagerly, and record the verdict."""
        code, inputs = args[0], args[1]
        given = list(inputs)
        taken = None
        try:
            plan, graph = self._plan(code)
            place = self._recorder.place(_FRAMES)
            reason = self._selection.reason_to_skip(plan, place)
            if reason:
                self._recorder.skip(plan.name, "", reason)
                return func(*args, **kwargs)
            device = next((t.device for t in given if isinstance(t, torch.Tensor)), torch.device("cpu"))
            context = self._recorder.context(plan, tuple(given), {}, place, device)
            refused = self._refused(graph, given)
            if refused:
                self._recorder.verdict(context, Verdict(Status.UNVERIFIED, None, refused))
            elif graph is not None:
                with torchcompile.no_modes():
                    taken = graph, context, Snapshot.take(given)
        except Exception as error:  # not the user's affair
            self._recorder.skip("compiled::graph", "", f"shadowrun failed: {type(error).__name__}")
        out = func(*args, **kwargs)
        if taken is not None:
            with self._replayer.between_calls(), undisturbed_draws(), torchcompile.no_modes():
                self._compare(*taken, given, out)
        return out

    def _compare(self, graph: Graph, context: int, snapshot: Snapshot, given: list[Any], out: Any) -> None:
        try:
            actual = graph.values(out, given)
            draws = Draws()
            names, expected = graph.eager(snapshot.fresh(), draws)
            verdict, judged = judge(names, actual, expected, graph.runs(snapshot, draws))
            if verdict.status is Status.MISMATCH and graph.is_random:
                verdict = _OTHER_DRAWS
            self._recorder.verdict(context, verdict, tuple(j.diff for j in judged))
        except Exception as error:
            text = str(error).partition("\n")[0][:200]
            verdict = Verdict(Status.UNVERIFIED, Cause.HARNESS, "its graph does not run eagerly", text)
            self._recorder.verdict(context, verdict)

    def _plan(self, code: Any) -> tuple[OpPlan, Graph | None]:
        found = self._known.get(id(code))
        if found is None:
            n = len(self._known)
            module = torchcompile.graph_of(code)
            operator = torch.ops.aten.alias.default  # a plan needs one; it is never called
            plan = OpPlan(operator, operator, _FIRST_INDEX + n, f"compiled::graph {n}", Action.REPLAY)
            graph = None if module is None else Graph(module)
            found = self._known[id(code)] = (code, plan, graph)  # held, so that its id stays its own
        return found[1], found[2]

    def _refused(self, graph: Graph | None, given: list[Any]) -> str:
        if graph is None:
            return "torch kept no graph of it"
        tensors = [t for t in given if isinstance(t, torch.Tensor)]
        if any(type(t) not in (torch.Tensor, torch.nn.Parameter) for t in tensors):
            return "tensor subclass"
        needed = 2 * sum(t.nbytes for t in tensors if t.layout is torch.strided)
        return f"inputs of {needed >> 20} MiB, more than max_bytes" if needed > self._max_bytes else ""
