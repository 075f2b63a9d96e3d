"""A worker whose variants are numbers: what becomes of one is said by the environment, and by its number."""

import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from shadowrun.studies.campaign.variants.recipe import Mutation, Recipe
from shadowrun.studies.campaign.worker import VariantWorker

ENTRY = "tests.studies.campaign.fake_worker:start"
KNOBS = "SHADOWRUN_TEST_CAMPAIGN"


class Invalid(Exception):  # as that of `tracing`, which imports torch
    pass


@dataclass
class Finding:
    op: str
    dtype: str = "f32"
    kind: str = "mismatch"
    cause: str = "implementation"
    explanation: str = "words"
    message: str = "evidence"
    phase: str = "forward"


@dataclass
class Result:
    status: str = "ok"
    reason: str = ""
    findings: tuple = ()
    oracles: int = 0
    ops: dict = field(default_factory=dict)
    n_calls: int = 5
    cpu_ms: float = 1.5


@dataclass
class Variant:
    recipe: Recipe
    number: int
    equal_to: int

    def identity(self):
        return f"{(self.equal_to + 1) * 0x9E3779B97F4A7C15 % 2**64:016x}{0:016x}"


class Fake:
    def __init__(self, knobs, channel):
        self.knobs = knobs
        self.channel = channel

    def does(self, what, number):
        return number in self.knobs.get(what, ())

    def variant(self, i):
        if self.does("crash while made", i):
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.does("cannot be made", i):
            raise Invalid("no such thing")
        recipe = Recipe(f"{i % 7:012x}", (Mutation("insert", (i,)), Mutation("shape")), i)
        every = self.knobs.get("equal every", 10)
        return Variant(recipe, i, i - every // 2 if i % every == every - 1 else i)

    def run(self, variant, target, on_target, on_op):
        n = variant.number
        time.sleep(self.knobs.get("seconds", 0))
        on_op("aten::neg")
        if self.does("crash on the reference", n):
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.does("invalid", n):
            return Result("invalid", "the reference raises")
        on_target()
        on_op("aten::erfinv")
        if self.does("raises", n):
            raise RuntimeError("a fault of ours")
        if self.does("crash", n):
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.does("hang", n):
            time.sleep(1000)
        if self.does("kill itself", n):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.does("leave", n):
            os._exit(7)
        if self.does("fork", n):
            if os.fork() == 0:
                time.sleep(1000)  # it keeps the pipes open
            os._exit(9)
        if self.does("print", n):
            for _ in range(300):
                os.write(1, b"x" * (1 << 20))
                os.write(2, b"x" * (1 << 20))
        if self.does("eat", n):
            kept = []
            while True:
                kept.append(bytearray(os.urandom(1 << 20) * 16))
        if self.does("lose the device", n) and not Path(self.knobs["mark"]).exists():
            Path(self.knobs["broken"]).touch()
        if "broken" in self.knobs and Path(self.knobs["broken"]).exists():
            # As a device does after a failed assertion: no call succeeds in any process until it is reset.
            self.channel.send({"lost": "no answer"})
            os._exit(1)
        if self.does("crash once", n):
            mark = Path(self.knobs["mark"])
            if not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGABRT)
        ops = {f"aten::op{(n + k) % 50}": "ok" for k in range(4)}
        if n % 25 == target:
            return Result("finding", "", (Finding(f"aten::op{n % 3}"), Finding("aten::neg")), 5, ops)
        return Result(ops=ops)


def start(settings, channel):
    fake = Fake(json.loads(os.environ.get(KNOBS, "{}")), channel)
    return VariantWorker(settings, channel, fake, fake).run
