"""Regions that torch.compile made, compared with eager while a program runs them compiled.

An option of Inductor makes torch wrap each region in a higher-order operator, which is called only while a dispatch
mode is active; code of other backends is wrapped in `other_backends.py`. Beginning or ending a comparison compiles
nothing again.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from shadowrun.compiled import torchcompile
from shadowrun.compiled.accuracy import judge
from shadowrun.compiled.compile_spec import INDUCTOR, CompileSpec
from shadowrun.compiled.dynamo_graph import DynamoGraphRun, EagerFailed
from shadowrun.compiled.graph import Graph, Snapshot, copy_graph, nbytes, node_origin, preserved_rng, without_layouts
from shadowrun.compiled.regions import other_backends, torchregions
from shadowrun.compiled.regions.captured_region import capture
from shadowrun.compiled.regions.inductor_rng import recorded_random_numbers, with_inductor_rng
from shadowrun.compiled.regions.other_backends import (
    CompiledDynamoGraph,
    OpTracker,
    first_user_line,
    graph_in_compilation,
    ops_are_compared,
    without_shadow_mode,
)
from shadowrun.compiled.rounding import RandomResults
from shadowrun.intercept import higher_order
from shadowrun.intercept.plan import Action, OpKind, OpPlan
from shadowrun.replay.call import Call, Role, Treatment
from shadowrun.store.captured_inputs import NOT_KEPT, NotStorable
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shadowrun.compiled.regions.other_backends import BackendRegion
    from shadowrun.intercept.attribution import Origin
    from shadowrun.recording.recorder import Recorder
    from shadowrun.replay.context import InputsFile
    from shadowrun.replay.replayer import Replayer

__all__ = ["Regions"]

# Numbers of their plans begin behind those of operators.
_FIRST_INDEX: Final = 1 << 20
_NAME: Final = "compiled::graph"
_BEFORE: Final = "compiled before the comparison began"
_OTHER_RANDOM_NUMBERS: Final = Verdict(
    Status.UNVERIFIED, Cause.RANDOMNESS, "compiled code has other random numbers than eager"
)
# Calls of each of Dynamo's graphs that are compared with the graph before decompositions, gradients too.
_MAX_DYNAMO_CALLS: Final = 2
_DECOMPOSITION_FAULT: Final = "decompositions, or what is made of forward and backward together"
_NOT_COMPARED: Final = "decompositions not compared: "
_OWN_BACKWARD: Final = "backward is the backend's own, and torch does not show it"


def _role(inputs: Sequence[Any]) -> Role:
    """The device of a region; it is neither platform's: compiled code is compared with eager, on that device."""
    tensors = (t for t in inputs if isinstance(t, torch.Tensor))
    device = next((t.device for t in tensors), torch.device("cpu"))
    return Role(device, on_target=False, on_ref=False, shared=False)


@dataclass(slots=True)
class _Region:
    """What is known of a region; `held` keeps its id its own."""

    held: Any
    plan: OpPlan
    graph: Graph | None
    compile_spec: CompileSpec
    is_plain: bool = True
    owner: CompiledDynamoGraph | None = None


@dataclass(frozen=True, slots=True)
class _PendingCall:
    """A call that will be judged, and what it began with."""

    region: _Region
    origin: Origin
    inputs: list[Any]
    refused: str
    snapshot: Snapshot | None


class Regions:
    """Compares regions while it is started.

    Args:
        recorder: Where to record them: as operators called ``compiled::graph 0``.
        replayer: Decides which to compare, and holds up other calls in a comparison.
        max_bytes: Inputs that may be copied.

    Attributes:
        n_met: Calls of regions met so far, compared or not.
    """

    def __init__(self, recorder: Recorder, replayer: Replayer, max_bytes: int) -> None:
        self._recorder, self._replayer = recorder, replayer
        self._max_bytes = max_bytes
        self.n_met = 0
        self._lock = threading.Lock()
        self._known: dict[int, _Region] = {}
        self._dynamo_graphs: dict[int, CompiledDynamoGraph] = {}
        self._n_wrong = 0  # calls of regions that belong to an unknown graph
        self._wrapping: contextlib.ExitStack | None = None

    def start(self) -> None:
        """Have what is compiled from now on wrapped, and compare what is."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torchregions.wrapped_regions(self._unseen, self._keep_original, _keep_settings))
            stack.enter_context(other_backends.observed_backends(self))
            stack.enter_context(other_backends.counted_precompiled_calls(self))
            higher_order.observe_regions(self.observe)
            self._wrapping = stack.pop_all()

    def stop(self) -> None:
        """Let regions pass."""
        wrapping, self._wrapping = self._wrapping, None
        if wrapping is not None:
            # What waited for the verdicts of its regions: none will come any more.
            for dynamo_graph in self._dynamo_graphs.values():
                self._record_dynamo_graph(dynamo_graph)
            higher_order.observe_regions(None)
            wrapping.close()

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a region of Inductor's for the user, compiled, then eagerly, and record the verdict."""
        code = args[0]
        self.n_met += 1
        # A list of its own: boxed code empties the one that it is given.
        pending = self._begin(lambda: self._of_inductor(code), list(args[1]))
        out = func(*args, **kwargs)
        self._end(pending, out)
        return out

    def observe_backend_region(self, backend_region: BackendRegion, inputs: list[Any], call: Callable[[], Any]) -> Any:
        """The same for a region of another backend."""
        if backend_region.one_by_one or not ops_are_compared():
            return call()
        self.n_met += 1
        pending = self._begin(lambda: self._of_backend(backend_region), inputs)
        if pending is None:
            return call()
        tracker = None if backend_region.opaque else OpTracker()
        out = without_shadow_mode(call) if tracker is None else tracker.run(call)
        self._end(pending, out, backend_region, tracker)
        return out

    def observe_dynamo_graph(
        self, dynamo_graph: CompiledDynamoGraph, inputs: tuple[Any, ...], code: Callable[..., Any]
    ) -> Any:
        """Run one of Dynamo's graphs for the user; its first calls also eagerly, before any decomposition."""
        if dynamo_graph.n_checked >= _MAX_DYNAMO_CALLS or not ops_are_compared():
            return code(*inputs)
        # Copies are taken before the call: compiled code may write to its inputs.
        graph_run, origin = self._begin_dynamo_graph(dynamo_graph, inputs)
        out = code(*inputs)
        if graph_run is not None:
            began_ns = time.perf_counter_ns()
            with self._replayer.between_calls(), preserved_rng(), torchcompile.no_modes():
                self._judge_dynamo_graph(dynamo_graph, graph_run, origin, code)
            self._replayer.add_own_ns(time.perf_counter_ns() - began_ns)
        return out

    def _begin_dynamo_graph(
        self, dynamo_graph: CompiledDynamoGraph, inputs: tuple[Any, ...]
    ) -> tuple[DynamoGraphRun | None, Any]:
        began_ns = time.perf_counter_ns()
        try:
            # The regions of the previous call, its backward too, have been judged by now.
            self._record_dynamo_graph(dynamo_graph)
            with self._lock:
                self._dynamo_graphs[id(dynamo_graph)] = dynamo_graph
                call = Call(self._plan(), inputs, {}, _role(inputs))
            compared, origin = self._replayer.policy.treatment(call) is Treatment.REGION, call.origin
            if not compared:
                return None, origin
            dynamo_graph.n_checked += 1
            dynamo_graph.random_numbers, dynamo_graph.n_wrong = None, self._n_wrong
            tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
            refused = ""
            if any(type(t) not in (torch.Tensor, torch.nn.Parameter) for t in tensors):
                refused = "tensor subclass"
            elif 2 * nbytes(inputs, [k for k, t in enumerate(inputs) if isinstance(t, torch.Tensor)]) > self._max_bytes:
                refused = "more than max_bytes"
            # A second run of a CUDA graph would overwrite the memory of its first results.
            elif dynamo_graph.cuda_graphs and any(t.device.type != "cpu" for t in tensors):
                refused = "CUDA graphs"
            elif torchcompile.has_saved_tensor_hooks():
                refused = "hooks on saved tensors"
            if refused:
                self.count_uncompared(_NOT_COMPARED + refused)
                return None, origin
            with torchcompile.no_modes():
                return DynamoGraphRun(dynamo_graph.module, inputs), origin
        except Exception as error:  # the program must not see it
            self.count_uncompared(f"{_NOT_COMPARED}shadowrun failed: {type(error).__name__}")
            return None, None
        finally:
            self._replayer.add_own_ns(time.perf_counter_ns() - began_ns)

    def _judge_dynamo_graph(
        self, dynamo_graph: CompiledDynamoGraph, graph_run: DynamoGraphRun, origin: Origin, code: Callable[..., Any]
    ) -> None:
        """Keep what is wrong until its regions were judged, the backward too: their findings say more."""
        try:
            known = bool(dynamo_graph.random_numbers) and graph_run.use_random_numbers(
                dynamo_graph.random_numbers or ()
            )
            verdict, judged = graph_run.judge(code)
            if verdict.status is Status.MISMATCH and known and graph_run.has_ties:
                # Inductor chooses for each dropout whether it decides in float32 or in the dtype of the result.
                graph_run.use_random_numbers(dynamo_graph.random_numbers or (), rounded=True)
                verdict, judged = graph_run.judge(code)
                graph_run.is_random, known = True, False
            if verdict.status is Status.MISMATCH:
                if graph_run.is_random and not known:
                    self.count_uncompared(_NOT_COMPARED + "its random numbers differ from those of eager")
                else:
                    wrong = replace(verdict, explanation=_DECOMPOSITION_FAULT)
                    dynamo_graph.seen = (origin, graph_run.snapshot, wrong, judged)
        except EagerFailed:
            self.count_uncompared(_NOT_COMPARED + "its graph does not run eagerly")
        except Exception as error:
            self.count_uncompared(f"{_NOT_COMPARED}another run of it failed: {type(error).__name__}")

    def _record_dynamo_graph(self, dynamo_graph: CompiledDynamoGraph) -> None:
        """Record that a graph of Dynamo's is wrong as a whole, where no region of it is."""
        seen, dynamo_graph.seen = dynamo_graph.seen, None
        # A backward that was compiled when it was first called may be a part of any.
        dynamo_graph.is_wrong |= dynamo_graph.n_checked > 0 and dynamo_graph.n_wrong != self._n_wrong
        # The finding of a region says more than that of the whole graph.
        if seen is None or dynamo_graph.is_wrong:
            return
        origin, snapshot, verdict, judged = seen
        with self._lock:
            region = self._known.get(id(dynamo_graph))
            if region is None:
                graph = Graph(dynamo_graph.module)
                new = _Region(dynamo_graph, self._plan(), graph, dynamo_graph.compile_spec, is_plain=False)
                region = self._new(new, dynamo_graph.backend, dynamo_graph.line)
        context = self._context(_PendingCall(region, origin, list(snapshot.inputs), "", None))
        self._recorder.verdict(context, verdict, tuple(j.diff for j in judged))

    def count_uncompared(self, reason: str = _BEFORE) -> None:
        """Count a call that is not compared."""
        self._recorder.skip(_NAME, "", reason)

    def _unseen(self) -> None:
        self.n_met += 1
        self.count_uncompared()

    def _keep_original(self, module: fx.GraphModule) -> Callable[[Any], None]:
        """Keep a graph as it is before Inductor's passes: on a later copy, their errors would be on both sides."""
        try:
            line, original = first_user_line(module), copy_graph(module)
            for node in original.graph.nodes:  # what else is known of it takes memory
                node.meta = {"place": node_origin(node)}
        except Exception:  # not worth the user's program: torch's own copy will do
            return lambda _: None
        return lambda graph: _ORIGINALS.__setitem__(graph, (original, line))

    def _begin(self, find: Callable[[], _Region], inputs: list[Any]) -> _PendingCall | None:
        """Keep what a call begins with; None where it is not compared."""
        began_ns = time.perf_counter_ns()
        try:
            with self._lock:  # two threads must not give two regions one number
                region = find()
            call = Call(region.plan, tuple(inputs), {}, _role(inputs))
            treatment = self._replayer.policy.treatment(call)
            if treatment is Treatment.COUNT:
                self._recorder.skip(region.plan.name, "", call.reason)
            if treatment is not Treatment.REGION:
                return None
            refused = self._refused(region.graph, inputs)
            with torchcompile.no_modes():
                snapshot = Snapshot.take(inputs, region.graph.written) if region.graph and not refused else None
                return _PendingCall(region, call.origin, inputs, refused, snapshot)
        except Exception as error:  # the program must not see it
            self.count_uncompared(f"shadowrun failed: {type(error).__name__}")
            return None
        finally:
            self._replayer.add_own_ns(time.perf_counter_ns() - began_ns)

    def _end(
        self,
        pending: _PendingCall | None,
        out: Any,
        backend_region: BackendRegion | None = None,
        tracker: OpTracker | None = None,
    ) -> None:
        if pending is None:
            return
        began_ns = time.perf_counter_ns()
        with self._replayer.between_calls(), preserved_rng(), torchcompile.no_modes():
            try:
                self._judge(pending, out, backend_region, tracker)
            except Exception as error:
                text = str(error).partition("\n")[0][:200]
                verdict = Verdict(Status.UNVERIFIED, Cause.HARNESS, "its graph does not run eagerly", text)
                self._recorder.verdict(self._context(pending), verdict)
        self._replayer.add_own_ns(time.perf_counter_ns() - began_ns)

    def _judge(
        self, pending: _PendingCall, out: Any, backend_region: BackendRegion | None, tracker: OpTracker | None
    ) -> None:
        graph, snapshot = pending.region.graph, pending.snapshot
        if graph is None or snapshot is None:
            self._recorder.verdict(self._context(pending), Verdict(Status.UNVERIFIED, None, pending.refused))
            return
        actual = graph.values(out, pending.inputs)
        random_results = RandomResults()
        # On copies of the inputs: the program gets what the compiled code returned.
        eager = OpTracker()
        # The eager run of the whole Dynamo graph has to use the same random numbers.
        with recorded_random_numbers() as random_numbers:
            names, expected = eager.run(lambda: graph.eager(snapshot.fresh(), random_results))
        owner = pending.region.owner
        if owner is not None and random_numbers:
            owner.random_numbers = random_numbers
        verdict, judged = judge(names, actual, expected, graph.runs(snapshot, random_results))
        if backend_region is not None:
            if tracker is not None:
                backend_region.opaque = not tracker.names
                # A backend may keep the graph for a fallback only, so its presence proves nothing: same operators and
                # same bits do.
                backend_region.one_by_one = (
                    verdict == _EQUAL and not tracker.from_inside and tracker.names == eager.names
                )
            if backend_region.one_by_one:  # its operators were compared
                return
            # An autograd.Function of the backend: its backward never passes a compiler that is wrapped here.
            if any(isinstance(getattr(v, "grad_fn", None), torch.autograd.function.BackwardCFunction) for v in out):
                self._recorder.skip(pending.region.plan.name, "", _OWN_BACKWARD)
        is_random = graph.is_random or (backend_region is not None and bool(random_results.kept))
        # Other random numbers than eager's make other results without any fault.
        if verdict.status is Status.MISMATCH and is_random:
            verdict = _OTHER_RANDOM_NUMBERS
        if verdict.status is Status.MISMATCH:
            # A backward that was compiled at its first call may be a part of any graph.
            if owner is None:
                self._n_wrong += 1
            else:
                owner.is_wrong = True
        captured, why_not = self._captured(pending, verdict)
        if why_not:
            verdict = replace(verdict, evidence="; ".join(filter(None, (verdict.evidence, why_not))))
        self._recorder.verdict(self._context(pending), verdict, tuple(j.diff for j in judged), captured=captured)

    def _captured(self, pending: _PendingCall, verdict: Verdict) -> tuple[InputsFile | None, str]:
        """Keep what a script needs to show a call; else why not, where it is wanted."""
        region, graph, snapshot = pending.region, pending.region.graph, pending.snapshot
        room = self._recorder.bytes_for_inputs(region.plan, verdict)
        if room is None or graph is None or snapshot is None:
            return None, ""
        needed = nbytes(snapshot.inputs, graph.written)
        if needed > room:
            most = "nothing" if not room else f"{room / _MIB:.3g} MiB"
            return None, f"{NOT_KEPT}{needed / _MIB:.3g} MiB, where capture= has room for {most}"
        inputs = enumerate(pending.inputs)
        # A graph of plain operators is below autograd: it computes no gradients.
        needs_grad = [k for k, t in inputs if isinstance(t, torch.Tensor) and t.requires_grad and not region.is_plain]
        try:
            shown = capture(graph, snapshot, region.compile_spec, needs_grad=needs_grad, is_plain=region.is_plain)
            written = [snapshot.inputs[k] for k in graph.written]
            kept = self._recorder.keep_inputs(region.plan, verdict, shown.arguments(), written)
        except NotStorable as reason:
            return None, f"{NOT_KEPT}{reason}"
        except Exception as error:  # the verdict stands
            return None, f"{NOT_KEPT}shadowrun failed ({type(error).__name__})"
        return kept, "" if kept else f"{NOT_KEPT}with the graph, capture= has no room for them, or no file was written"

    def _context(self, pending: _PendingCall) -> int:
        inputs = tuple(pending.inputs)
        return self._recorder.context(Call(pending.region.plan, inputs, {}, _role(inputs), pending.origin))

    def _of_inductor(self, code: Any) -> _Region:
        region = self._known.get(id(code))
        if region is None:
            module = torchregions.graph_of(code)
            original, line = (module, "") if module is None else _ORIGINALS.get(module, (module, ""))
            # The copy from before Inductor's passes: the one that torch keeps was made after them, and would hide their
            # errors.
            graph = None if original is None else Graph(without_layouts(copy_graph(with_inductor_rng(original))))
            compile_spec = CompileSpec.by_inductor({} if module is None else _SETTINGS.get(module, {}))
            owner = None if module is None else _OWNERS.get(module)
            region = self._new(_Region(code, self._plan(), graph, compile_spec, owner=owner), INDUCTOR, line)
        return region

    def _of_backend(self, backend_region: BackendRegion) -> _Region:
        region = self._known.get(id(backend_region))
        if region is None:
            graph, spec, is_plain = backend_region.graph, backend_region.compile_spec, backend_region.plain
            new = _Region(backend_region, self._plan(), graph, spec, is_plain, backend_region.owner)
            region = self._new(new, backend_region.backend, backend_region.line)
        return region

    def _plan(self) -> OpPlan:
        n = len(self._known)
        operator = torch.ops.aten.alias.default  # a plan needs one; it is never called
        return OpPlan(operator, operator, _FIRST_INDEX + n, f"{_NAME} {n}", Action.REPLAY, OpKind.REGION)

    def _new(self, region: _Region, backend: str, line: str) -> _Region:
        n_operators = -1 if region.graph is None else region.graph.n_operators
        self._recorder.region(region.plan.name, backend, n_operators, line)
        self._known[id(region.held)] = region
        return region

    def _refused(self, graph: Graph | None, inputs: list[Any]) -> str:
        if graph is None:
            return "torch kept no graph of it"
        tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
        if any(type(t) not in (torch.Tensor, torch.nn.Parameter) for t in tensors):
            return "tensor subclass"
        # Twice: the snapshot, and the copy for the eager run.
        needed = 2 * nbytes(inputs, graph.written)
        return f"inputs of {needed >> 20} MiB, more than max_bytes" if needed > self._max_bytes else ""


def _keep_settings(graph: Any) -> None:
    if (owner := graph_in_compilation()) is not None:
        _OWNERS[graph] = owner
    try:
        _SETTINGS[graph] = torchregions.inductor_settings()
    except Exception:  # a script then compiles with the defaults
        _SETTINGS.pop(graph, None)


_MIB: Final = 1 << 20
_EQUAL: Final = Verdict(Status.MATCH)
# From torch's copy of an Inductor graph to the earlier copy and its line; a later comparison may meet this code.
_ORIGINALS: weakref.WeakKeyDictionary[Any, tuple[fx.GraphModule, str]] = weakref.WeakKeyDictionary()
# Torch's copy of a graph of Inductor's to the graph of Dynamo's that it is a part of.
_OWNERS: weakref.WeakKeyDictionary[Any, CompiledDynamoGraph] = weakref.WeakKeyDictionary()
# Torch's copy of a graph of Inductor's to the settings that it was compiled with.
_SETTINGS: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
