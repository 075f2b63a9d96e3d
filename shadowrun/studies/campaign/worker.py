"""A worker process of a campaign: makes recipes by number, runs them, and sends short lines.

Its messages are lists: ``["v", number, program, identity, duplicate of, why it cannot be made, mutators, recipe]`` for
each variant, then ``["r", number, target, status, reason, findings, oracles, operators, calls, microseconds]`` for each
target. Which case is in hand stands in the page that it shares with the pool, as ``[number, target]``, where the target
-1 is the making of the variant.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from shadowrun.errors import ShadowrunError
from shadowrun.studies.campaign.seen_variants import SeenVariants

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.studies.campaign.run_variants import RunnerSettings
    from shadowrun.studies.campaign.variants.variant import Variant
    from shadowrun.studies.isolation.worker_side import Channel

__all__ = ["ENTRY", "Maker", "VariantWorker", "Verdicts", "runner_settings", "start"]

ENTRY: Final = "shadowrun.studies.campaign.worker:start"
# Messages go through a pipe line by line and into the store: an exception may hold the text of a whole tensor.
_MAX_TEXT: Final = 300


class Maker(Protocol):
    """What makes variants: `generate.Generator`."""

    def variant(self, i: int, /) -> Variant:
        """Variant number `i`."""


class Verdicts(Protocol):
    """What runs variants: `runner.VariantRunner`."""

    def run(self, variant: Variant, target: int, on_target: Callable[[], None], on_op: Callable[[str], None], /) -> Any:
        """Run one on a target."""


def start(settings: dict[str, Any], channel: Channel) -> Callable[[dict[str, Any]], None]:
    """Prepare a worker; gives the function that runs a task.

    Args:
        settings: Of `CampaignSettings.for_workers`.
        channel: To the pool.

    Raises:
        ShadowrunError: A platform is absent, or the programs are not those of the campaign.
    """
    from shadowrun.studies.campaign.run_variants import VariantRunner
    from shadowrun.studies.campaign.variants.programs import lazily
    from shadowrun.studies.campaign.variants.recipe_generator import Generator

    runner = VariantRunner(runner_settings(settings))
    maker = Generator(lazily(Path(settings["programs"])), settings["seed"], settings["mutators"])
    return VariantWorker(settings, channel, maker, runner).run


def runner_settings(settings: dict[str, Any]) -> RunnerSettings:
    """Platforms as `runner.VariantRunner` takes them.

    Args:
        settings: Of `CampaignSettings.for_workers`, as JSON has it.
    """
    from shadowrun.studies.campaign.run_variants import RunnerSettings

    flaws = settings["flaws"]
    return RunnerSettings(
        targets=tuple(settings["targets"]),
        ref=settings["ref"],
        flaws=None if flaws is None else tuple(flaws),
        backends=tuple(settings["compile"]),
        threads=settings["threads"],
        call_limit_s=settings["call_limit_s"],
    )


class VariantWorker:
    """Runs ranges of recipes.

    Args:
        settings: As in `start`.
        channel: To the pool.
        maker: Makes variants.
        runner: Runs them.
    """

    def __init__(self, settings: dict[str, Any], channel: Channel, maker: Maker, runner: Verdicts) -> None:
        self._channel = channel
        # A compiled one runs on the same platform.
        backends = ("", *settings["compile"])
        self._targets = [(target, backend) for backend in backends for target in settings["targets"]]
        self._used: set[int] = set()
        self._maker, self._runner = maker, runner
        self._claims = SeenVariants(Path(settings["claims"]), settings["n_claims"])

    def run(self, task: dict[str, Any]) -> None:
        """Run recipes from start to stop; the first of them from a target on."""
        first = task["target"]
        for number in range(task["start"], task["stop"]):
            self._variant(number, first)
            first = 0

    def _variant(self, number: int, first: int) -> None:
        step = self._channel.step
        # First of all: what ends the process from here on is the outcome of this case.
        step.begin([number, -1])
        variant = self._made(number)
        if variant is not None:
            for target in range(first, len(self._targets)):
                step.begin([number, target])
                if not self._result(variant, number, target):
                    break
        step.end()

    def _made(self, number: int) -> Variant | None:
        """The variant, if it is to be run; what is known of it is sent."""
        try:
            variant = self._maker.variant(number)
            # 64 bits, as SQLite stores an integer; signed for the same reason.
            identity = int.from_bytes(bytes.fromhex(variant.identity()[:16]), "big", signed=True)
            recipe = variant.recipe.to_json()
        except Exception as error:  # a fault of shadowrun must not end the campaign
            # By name: the module of `tracing.Invalid` imports torch, and this one need not.
            known = type(error).__name__ == "Invalid"
            text = str(error) if known else f"shadowrun failed to make it: {type(error).__name__}: {error}"
            self._channel.send(["v", number, None, None, -1, text[:_MAX_TEXT], [], None])
            return None
        # After the variant was made and before it runs: duplicates are known by what they compute, not by their
        # recipe.
        lowest = self._claims.mark_seen(identity, number)
        mutators = [m.name for m in variant.recipe.mutations]
        text = json.dumps(recipe, separators=(",", ":"))
        before = lowest if lowest < number else -1
        self._channel.send(["v", number, variant.recipe.program, identity, before, None, mutators, text])
        return None if lowest < number else variant

    def _result(self, variant: Variant, number: int, target: int) -> bool:
        """Run it on a target and send the result; False if it needs no other target."""
        try:
            r = self._runner.run(variant, target, self._channel.step.on_target, self._channel.step.in_op)
            findings = [list(dataclasses.astuple(f)) for f in r.findings]
            line = [r.status, r.reason, findings, r.oracles, dict(r.ops), r.n_calls, int(r.cpu_ms * 1000)]
        except ShadowrunError as error:
            line = ["failed", f"{error}"[:_MAX_TEXT], [], -1, {}, 0, 0]
        except Exception as error:  # a fault of shadowrun must not end the campaign
            line = ["failed", f"{type(error).__name__}: {error}"[:_MAX_TEXT], [], -1, {}, 0, 0]
        is_first = target not in self._used
        self._used.add(target)
        lost = ""
        if line[0] == "failed" or any(found[2] == "error" for found in line[2]):
            spec, backend = self._targets[target]
            lost = _lost_device(spec) or _lost_backend(backend)
        if not lost or is_first:
            self._channel.send(["r", number, target, *line])
        if lost:
            if is_first:  # nothing before it can be the cause: the exception is its own
                self._channel.step.end()
            # The pool starts another process: no call of this one can succeed any more.
            self._channel.send({"lost": lost})
            os._exit(1)
        # What the reference refuses, it refuses for every target.
        return bool(line[0] != "invalid")


def _lost_backend(backend: str) -> str:
    """Why a compiler or its runtime works no more, as IREE's after one exception; empty if it does."""
    if not backend:
        return ""
    import torch

    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.add, (graph.placeholder("x"), 1)))
    # A module of its own: Dynamo compiles no code of shadowrun once a comparison was made.
    plus_one = torch.fx.GraphModule(torch.nn.Module(), graph)
    try:
        torch.compiler.reset()
        torch.compile(plus_one, backend=backend.partition(":")[0])(torch.ones(2))
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0][:_MAX_TEXT]
    return ""


def _lost_device(spec: str) -> str:
    """Why a device answers no more, as after an assertion in a kernel of CUDA; empty if it does."""
    from shadowrun.platforms import parse

    device = parse(spec).device_string
    if device.startswith("cpu"):
        return ""
    import torch

    lost = ""
    for _ in range(2):  # a queue reports the exception of an earlier call once, with the next call
        try:
            torch.ones(2, device=device).cpu()
        except NotImplementedError:  # a device may lack these operators: that is no loss
            return ""
        except Exception as error:
            lost = f"{type(error).__name__}: {error}".partition("\n")[0][:_MAX_TEXT]
        else:
            return ""
    return lost
