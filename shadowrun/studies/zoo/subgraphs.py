"""Frequent subgraphs of programs, as programs: one to six operators that feed each other, with the views between them.

Two occurrences are the same pattern if operators, attributes and wiring are equal; sizes may differ. A pattern is
frequent if two programs have it, and counts once for each occurrence. Of each of the most frequent patterns, some
occurrences with different sizes become programs, whose inputs get fills fitted to the values that were there.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch

from shadowrun.intercept.plan import Action, OpPlan, make_plan
from shadowrun.studies.zoo import input_values
from shadowrun.studies.zoo.capture import tensors_in
from shadowrun.studies.zoo.graph import Graph, Input, Node, Ref, Runner, from_json, refs_in, to_json
from shadowrun.studies.zoo.infer_fill import described
from shadowrun.studies.zoo.sources.isolated_readers import Candidate, IsolatedCalls
from shadowrun.studies.zoo.sources.source import RUNS, Collected, LeftOut, checked
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shadowrun.studies.zoo.program import Program

__all__ = ["MAX_OPERATORS", "SOURCE", "mine_subgraphs"]

SOURCE: Final = "subgraphs"
MAX_OPERATORS: Final = 6
# Subgraphs of one size that are looked at for one operator: of hubs there would be millions.
_EACH: Final = 6
# Programs made of one pattern, with inputs of different sizes.
_FORMS: Final = 3
# Programs that a subgraph names as its origin.
_NAMED: Final = 8
# Calls of a program that are looked at.
_MAX_NODES: Final = 3000
# Values of a program that are kept at once, to describe the inputs of its subgraphs. With no bound, the two programs of
# longformer left 2.1 GB behind: what is freed between small objects that stay goes not back.
_MAX_BYTES: Final = 1 << 28
# Patterns whose counts are kept, some 200 bytes each. Above, half are forgotten, those of the fewest programs: one that
# comes again is counted from then on.
_MAX_COUNTED: Final = 1 << 20


# Occurrences, and programs with one, by pattern.
_Counts: TypeAlias = dict[str, tuple[int, int]]


@dataclass(slots=True)
class _Pattern:
    """Occurrences of one pattern.

    Attributes:
        count: How many.
        programs: Ids of some of them.
        graphs: Of different sizes, as JSON and with a name, by these.
    """

    count: int
    programs: dict[str, None] = field(default_factory=dict)
    graphs: dict[str, tuple[str, Any]] = field(default_factory=dict)


def mine_subgraphs(
    programs: Sequence[Program],
    on_progress: Callable[..., None] = lambda *_: None,
    *,
    max_operators: int = MAX_OPERATORS,
    min_programs: int = 2,
    most: int = 2000,
    isolated: bool = False,
) -> Collected:
    """Subgraphs that occur several times in these programs.

    Args:
        programs: Where they come from; each runs once, on generated values.
        on_progress: Called with done, total and name.
        max_operators: Most operators of one; views do not count.
        min_programs: Programs that have to have it.
        most: Patterns that become programs, those that occur most often first.
        isolated: Look at each program in a worker process with limits of time and memory.

    Returns:
        Programs in the order of their counts, and what was left out.
    """
    found = Collected(SOURCE)
    # Graphs of all patterns took 2.2 GB on 1,200 programs.
    counts: _Counts = {}
    # Twice over the programs: of a million patterns only counts are kept, and graphs of the frequent ones are cut then.
    usable = [Candidate(p.name, p) for p in programs if p.source != SOURCE]
    skipped: set[str] = set()
    patterns: dict[str, _Pattern] = {}

    def graph_of(one: Candidate) -> dict[str, Any]:
        return {"graph": to_json(one.given.graph), "most": max_operators}

    def counted(one: Candidate, here: dict[str, int]) -> None:
        for key, n in here.items():
            count, n_programs = counts.get(key, (0, 0))
            counts[key] = count + n, n_programs + 1
        _forget(counts, _MAX_COUNTED)
        found.count_step("program looked at", one.name)

    def skip(one: Candidate, why: str) -> None:
        skipped.add(one.name)
        found.count_step("program looked at", one.name, why)

    def graph_and_patterns(one: Candidate) -> dict[str, Any]:
        full = [key for key, pattern in patterns.items() if len(pattern.graphs) == _FORMS]
        # Made at each turn, and not once: what is full by now needs no graph, which is most of a worker's answer.
        return {**graph_of(one), "wanted": list(patterns), "full": full}

    def taken(one: Candidate, here: dict[str, Any]) -> None:
        for key in here["seen"]:
            if len(patterns[key].programs) < _NAMED:
                patterns[key].programs[one.given.id] = None
        # One program may have more forms of a pattern than are still wanted: each of them was told to be cut.
        for key, forms, name, graph in here["cut"]:
            if len(patterns[key].graphs) < _FORMS:
                patterns[key].graphs.setdefault(forms, (name, graph))
        found.count_step("program run", one.name)

    def progress(before: int) -> Callable[..., None]:
        total = 2 * len(usable)
        return lambda done, _, name: on_progress(min(before + done, total), total, name)

    with IsolatedCalls(isolated=isolated) as processes:
        processes.each(occurrences, usable, graph_of, counted, skip, progress(0))
        # The sort is stable: patterns of one count stay in the order of the programs.
        frequent = sorted((key for key, (_, n) in counts.items() if n >= min_programs), key=lambda key: -counts[key][0])
        patterns |= {key: _Pattern(counts[key][0]) for key in frequent[:most]}
        found.counted(f"patterns that {min_programs} programs have", len(counts), n_out=len(frequent))
        found.counted(f"the {most} most frequent", len(frequent), n_out=len(patterns))
        runnable = [one for one in usable if one.name not in skipped]
        not_run = partial(_leave_out, found, "program run")
        processes.each(cut, runnable, graph_and_patterns, taken, not_run, progress(len(usable)))
        made = [
            Candidate(name, (graph, pattern))
            for pattern in patterns.values()
            for name, graph in pattern.graphs.values()
        ]

        def keep(one: Candidate, graph: Any) -> None:
            _, pattern = one.given
            found.add_checked(one.name, from_json(graph), tuple(pattern.programs), pattern.count)

        fails = partial(_leave_out, found, RUNS)
        processes.each(run_again, made, lambda one: one.given[0], keep, fails, progress(2 * len(usable)))
    return found


def _leave_out(found: Collected, step: str, one: Candidate, why: str) -> None:
    found.count_step(step, one.name, why)


def _forget(counts: _Counts, most: int) -> None:
    """Where there are too many patterns, keep half: those that most programs have."""
    if len(counts) > most:
        best = sorted(counts, key=lambda key: counts[key][::-1], reverse=True)[: most // 2]
        kept = {key: counts[key] for key in best}
        counts.clear()
        counts.update(kept)


def occurrences(given: dict[str, Any]) -> dict[str, int]:
    """How often a program has each pattern, by its key."""
    one = _Wired(from_json(given["graph"]))
    return Counter(one.key(one.with_views(chosen)).hex() for chosen in one.connected(given["most"]))


def cut(given: dict[str, Any]) -> dict[str, Any]:
    """Keys of the wanted patterns that a program has, and graphs of occurrences: key, forms of inputs, name, graph."""
    one = _Ran(from_json(given["graph"]))
    wanted, full = set(given["wanted"]), set(given["full"])
    forms_of: dict[str, set[str]] = {}
    made = []
    for chosen in one.connected(given["most"]):
        members = one.with_views(chosen)
        key = one.key(members).hex()
        if key not in wanted:
            continue
        known = forms_of.setdefault(key, set())
        if key not in full and len(known) < _FORMS and (forms := repr(one.forms(members))) not in known:
            known.add(forms)
            made.append((key, forms, one.name(chosen), to_json(one.cut(members, chosen))))
    return {"seen": list(forms_of), "cut": made}


def run_again(graph: Any) -> Any:
    """A subgraph that runs on generated values."""
    return to_json(checked(from_json(graph)))


class _Wired:
    """A program as operators that feed each other; it does not run."""

    def __init__(self, graph: Graph) -> None:
        if len(graph.nodes) > _MAX_NODES:
            raise LeftOut(f"more than {_MAX_NODES} calls")
        self._graph = graph
        self._plans = [_plan(node.op) for node in graph.nodes]
        self._is_view = [plan.action is Action.VIEW for plan in self._plans]
        # Sizes count as attributes, but for those of views, which only follow the shapes.
        self._words = [_words(node, sizes=is_view) for node, is_view in zip(graph.nodes, self._is_view, strict=True)]
        self._refs = [tuple(node.refs()) for node in graph.nodes]
        # Operators that feed each other, through views or not.
        reached = [self._reached(at) for at in range(len(graph.nodes))]
        self._producers, self._views = ([pair[k] for pair in reached] for k in (0, 1))
        self._neighbours: list[set[int]] = [set() for _ in graph.nodes]
        for at, producers in enumerate(self._producers):
            if not self._is_view[at]:
                for producer in producers:
                    self._neighbours[at].add(producer)
                    self._neighbours[producer].add(at)

    def _reached(self, at: int) -> tuple[list[int], list[int]]:
        """Operators whose results a call takes, through views or not, and these views."""
        found: dict[int, None] = {}
        views: dict[int, None] = {}
        waiting = [r.node for r in self._refs[at]]
        while waiting:
            node = waiting.pop()
            if node >= 0 and self._is_view[node]:
                if node not in views:
                    views[node] = None
                    waiting += [r.node for r in self._refs[node]]
            elif node >= 0:
                found[node] = None
        return list(found), list(views)

    def connected(self, most: int) -> Iterator[tuple[int, ...]]:
        """Sets of operators that feed each other: for each operator, those in which it is the first."""
        for root, is_view in enumerate(self._is_view):
            if is_view:
                continue
            level: list[tuple[int, ...]] = [(root,)]
            for _ in range(most):
                yield from level
                grown = dict.fromkeys(
                    tuple(sorted({*chosen, new}))
                    for chosen in level
                    for at in chosen
                    for new in sorted(self._neighbours[at])
                    # Each set is found once, from its first operator.
                    if new > root and new not in chosen
                )
                level = list(grown)[:_EACH]

    def with_views(self, chosen: tuple[int, ...]) -> list[int]:
        """The calls of a set, with the views that lead to each, in order."""
        return sorted({*chosen, *(view for at in chosen for view in self._views[at])})

    def key(self, members: list[int]) -> bytes:
        """Hash of operators, attributes and wiring, without sizes."""
        inside: dict[int, int] = {}
        outside: dict[Ref, int] = {}
        parts = []
        for place, at in enumerate(members):
            parts.append(self._words[at])
            for ref in self._refs[at]:
                known = inside.get(ref.node)
                if known is None:
                    # Inputs by the order in which they are first read: the same wiring gives the same key in any
                    # program.
                    parts.append(f"<{outside.setdefault(ref, len(outside))}")
                else:
                    parts.append(f"{known}.{ref.output}")
            inside[at] = place
        return hashlib.blake2b(" ".join(parts).encode(), digest_size=12).digest()


class _Ran(_Wired):
    """A program that ran once, with all its values.

    Raises:
        LeftOut: They take more than `_MAX_BYTES`.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self._n_bytes = 0
        self._keep(sum(math.prod(i.shape) * i.dtype.itemsize for i in graph.inputs))
        self._inputs = input_values.make_inputs(graph.inputs)
        self._results: list[Any] = []
        self._described: dict[tuple[Ref, bool], Input] = {}
        # Where something is written to, the values that an input had before would be lost.
        keep = _copied if graph.writes else _as_is
        first = [keep(t) for t in self._inputs]

        def call(op: Any, args: Sequence[Any], kwargs: Any) -> Any:
            out = op(*args, **kwargs)
            if not self._is_view[len(self._results)]:
                self._keep(sum(t.nbytes for t in tensors_in(out)))
            self._results.append(keep(out))
            return out

        with torch.no_grad():
            Runner(graph, call=call)(self._inputs)
        self._inputs = first

    def _keep(self, n_bytes: int) -> None:
        self._n_bytes += n_bytes
        if self._n_bytes > _MAX_BYTES:
            raise LeftOut(f"more than {_MAX_BYTES >> 20} MiB of values")

    def forms(self, members: list[int]) -> Any:
        """Shapes and dtypes of what it takes."""
        return tuple((tuple(t.shape), t.dtype) for t in map(self._value, self._taken(members)))

    def _taken(self, members: list[int]) -> list[Ref]:
        inside = set(members)
        refs = (r for at in members for r in self._refs[at])
        return list(dict.fromkeys(r for r in refs if r.node not in inside))

    def _value(self, ref: Ref) -> torch.Tensor:
        found = self._inputs[-1 - ref.node] if ref.node < 0 else self._results[ref.node]
        found = found[ref.output] if isinstance(found, (tuple, list)) else found
        if not isinstance(found, torch.Tensor):
            raise LeftOut("a call takes what is no tensor")
        return found

    def name(self, chosen: tuple[int, ...]) -> str:
        """``mm → add → relu``."""
        return " → ".join(self._graph.nodes[at].name.split("::")[1] for at in chosen)

    def cut(self, members: list[int], chosen: tuple[int, ...]) -> Graph:
        """The subgraph as a graph of its own; its results are those that none of its calls takes."""
        taken = self._taken(members)
        written = self._written(members)
        numbers = {at: place for place, at in enumerate(members)}
        places = {ref: Ref(-1 - k) for k, ref in enumerate(taken)}

        def moved(ref: Ref) -> Ref:
            return Ref(numbers[ref.node], ref.output) if ref.node in numbers else places[ref]

        used = {producer for at in chosen for producer in self._producers[at]}
        outputs = tuple(Ref(numbers[at], k) for at in chosen if at not in used for k in self._outputs(at))
        nodes = tuple(Node(n.op, n.args, n.kwargs).mapped(moved) for n in (self._graph.nodes[at] for at in members))
        inputs = tuple(self._input(k, ref, ref not in written) for k, ref in enumerate(taken))
        return Graph(inputs, nodes, outputs)

    def _outputs(self, at: int) -> list[int]:
        found = self._results[at]
        flat = found if isinstance(found, (tuple, list)) else (found,)
        return [k for k, t in enumerate(flat) if isinstance(t, torch.Tensor)]

    def _written(self, members: list[int]) -> set[Ref]:
        """What a member writes to, through views."""
        found: set[Ref] = set()
        inside = set(members)
        for at in members:
            plan = self._plans[at]
            if not plan.mutated or self._is_view[at]:
                continue
            node = self._graph.nodes[at]
            named = {a.name: v for a, v in zip(schema_of(node.op).arguments, node.args, strict=False)}
            named |= dict(node.kwargs)
            waiting = [r for a in plan.mutated for r in refs_in(named.get(a.name))]
            while waiting:
                ref = waiting.pop()
                if ref.node not in inside:
                    found.add(ref)
                else:
                    waiting += list(self._graph.nodes[ref.node].refs())
        return found

    def _input(self, k: int, ref: Ref, differentiable: bool) -> Input:
        known = self._described.get((ref, differentiable))
        if known is None:
            t = self._value(ref)
            given = self._graph.inputs[-1 - ref.node] if ref.node < 0 else None
            wanted = differentiable and (t.is_floating_point() or t.is_complex())
            known = described("", t, role=given.role if given else "input", requires_grad=wanted)
            if given is not None:
                known = Input("", known.shape, known.dtype, given.fill, known.strides, 0, wanted, given.role)
            self._described[ref, differentiable] = known
        # By place: a subgraph of two programs has the same values.
        return Input(f"x.{k}", *(getattr(known, f) for f in _FIELDS))


_FIELDS: Final = ("shape", "dtype", "fill", "strides", "offset", "requires_grad", "role")
_plans: dict[Any, OpPlan] = {}


def _plan(op: Any) -> OpPlan:
    found = _plans.get(op)
    if found is None:
        found = _plans[op] = make_plan(op, 0)
    return found


def _words(node: Node, *, sizes: bool) -> str:
    """Hash of an operator and its attributes without references; with `sizes`, without numbers: those of views."""
    row = node.name, [_attribute(a, sizes=sizes) for a in node.args], [(k, _attribute(v)) for k, v in node.kwargs]
    return hashlib.blake2b(repr(row).encode(), digest_size=12).hexdigest()


def _attribute(value: Any, *, sizes: bool = False) -> Any:
    """An argument for comparison: numbers by type too, as 1 and True are equal."""
    if type(value) is Ref:
        return "reference"
    if type(value) is tuple:
        holds = any(True for _ in refs_in(value))
        return tuple(map(_attribute, value)) if holds or not sizes else "sizes"
    if sizes and type(value) is int:
        return "size"
    return type(value).__name__, repr(value) if isinstance(value, float) else value


def _as_is(value: Any) -> Any:
    return value


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [_copied(v) for v in value] if isinstance(value, (tuple, list)) else value
