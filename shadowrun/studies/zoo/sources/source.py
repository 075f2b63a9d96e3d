"""What all sources share: candidates in, programs out, and each candidate that is left out has its reason."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.intercept.untrusted.op_allowlist import Refused
from shadowrun.store.plain_json import NotStorable
from shadowrun.studies.zoo import input_values
from shadowrun.studies.zoo.graph import Graph, Runner, from_json, to_json
from shadowrun.studies.zoo.program import Program, Stage, program_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["RUNS", "Collected", "LeftOut", "checked", "reason_of"]

RUNS: Final = "runs on generated values"


class LeftOut(Exception):  # noqa: N818 - a reason, caught inside
    """A candidate that makes no program; the message is the reason."""


class Collected:
    """Collects programs of a source, and what was left out at each step.

    Attributes:
        programs: What came out.
    """

    def __init__(self, source: str) -> None:
        self.programs: list[Program] = []
        self._source = source
        self._stages: dict[str, tuple[int, int, list[tuple[str, str]]]] = {}

    def add(self, name: str, graph: Graph, count: int = 1) -> None:
        """Take a graph as a program if it runs on generated values; else note why not."""
        self.try_step(RUNS, name, lambda: self._add(name, checked(graph), (), count))

    def add_checked(self, name: str, graph: Graph, made_from: tuple[str, ...] = (), count: int = 1) -> None:
        """Take a graph that was `checked`."""
        self.count_step(RUNS, name)
        self._add(name, graph, made_from, count)

    def add_data(self, name: str, content: Any, count: int = 1) -> None:
        """Take the JSON of a graph that was `checked` in another process."""
        self.try_step(RUNS, name, lambda: self._add(name, from_json(content), (), count))

    def _add(self, name: str, graph: Graph, made_from: tuple[str, ...] = (), count: int = 1) -> None:
        self.programs.append(program_of(name, self._source, graph, made_from, count))

    def try_step(self, step: str, name: str, make: Callable[[], Any]) -> Any:
        """Count a step of one candidate; returns what `make` does, None where it raised: that is left out."""
        try:
            made = make()
        except Exception as error:
            self.count_step(step, name, reason_of(error))
            return None
        self.count_step(step, name)
        return made

    def count_step(self, step: str, name: str, why_not: str = "") -> None:
        """Count one candidate of a step."""
        n_in, n_out, left_out = self._stages.get(step, (0, 0, []))
        if why_not:
            left_out.append((name, why_not))
        self._stages[step] = n_in + 1, n_out + (not why_not), left_out

    def sort(self, names: Sequence[str]) -> None:
        """Order programs by the first word of their names, whatever process was first."""
        order = {name: k for k, name in enumerate(names)}
        self.programs.sort(key=lambda p: order[p.name.partition("/")[0]])

    def counted(
        self, step: str, n_in: int, left_out: Sequence[tuple[str, str]] = (), *, n_out: int | None = None
    ) -> None:
        """Add a step that was counted elsewhere; with `n_out`, what was left out is too much to name."""
        self._stages[step] = n_in, n_in - len(left_out) if n_out is None else n_out, list(left_out)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Counts of each step, in the order in which they were first tried."""
        return tuple(Stage(self._source, step, n, out, tuple(left)) for step, (n, out, left) in self._stages.items())


def checked(graph: Graph) -> Graph:
    """The graph as a file would give it, if it runs on generated values.

    Raises:
        LeftOut: It does not.
    """
    try:
        again = from_json(json.loads(json.dumps(to_json(graph))))
    except (Refused, NotStorable, ValueError) as error:
        raise LeftOut(f"no file can hold it: {error}") from error
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            Runner(again)(input_values.make_inputs(again.inputs))
    except Exception as error:
        raise LeftOut(f"it does not run on generated values: {reason_of(error)}") from error
    return again


def reason_of(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return text[:200] if isinstance(error, LeftOut) else f"{type(error).__name__}: {text}"[:200]
