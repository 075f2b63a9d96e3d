"""The programs of the benchmarks: training steps, generation, single operators; all on the CPU, with fixed seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

__all__ = ["WORKLOADS", "Program", "Step", "Workload", "chosen", "single_operators"]

Step = Callable[[], object]


@dataclass(frozen=True)
class Program:
    """A program that was built.

    Attributes:
        step: What is timed.
        model: Of the step; some tools need it.
    """

    step: Step
    model: nn.Module | None = None


@dataclass(frozen=True)
class Workload:
    """Something to time.

    Attributes:
        name: In tables.
        make: Builds it.
        inner: Runs of it for one timing, so that one is long enough for the clock, and has some thousand calls: what
            a tool puts off for that long is paid for as often as in a long run.
        trains: It is a step with an optimizer, which `step()` of a tool ends.
    """

    name: str
    make: Callable[[], Program]
    inner: int
    trains: bool = True

    def build(self) -> Program:
        """Make the program, with the same weights and data each time."""
        torch.manual_seed(0)
        return self.make()


def _training(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[], torch.Tensor]) -> Program:
    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Program(step, model)


def micro_mlp() -> Program:
    """16-32-32-4, batch 8, AdamW."""
    return _mlp(16, 32, 4, batch=8)


def tiny_mlp() -> Program:
    """64-128-128-10, batch 32, AdamW."""
    return _mlp(64, 128, 10, batch=32)


def _mlp(n_in: int, hidden: int, n_out: int, batch: int) -> Program:
    model = nn.Sequential(
        nn.Linear(n_in, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, n_out)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(batch, n_in), torch.randint(0, n_out, (batch,))

    return _training(model, optimizer, lambda: F.cross_entropy(model(x), y))


def transformer() -> Program:
    """Two encoder blocks, d 128, 8 sequences of 64 tokens, dropout, AdamW."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
    model = nn.ModuleDict(
        {"embed": nn.Embedding(256, 128), "encoder": nn.TransformerEncoder(layer, 2), "head": nn.Linear(128, 256)}
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (8, 64))

    def loss_of() -> torch.Tensor:
        logits = model["head"](model["encoder"](model["embed"](tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    return _training(model, optimizer, loss_of)


def cnn() -> Program:
    """Three convolutions with batch norm, 16 images of 32 x 32, SGD with momentum."""

    def block(i: int, o: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))

    model = nn.Sequential(block(3, 32), block(32, 64), block(64, 64), nn.Flatten(), nn.Linear(64 * 16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))

    return _training(model, optimizer, lambda: F.cross_entropy(model(x), y))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config)


def llama() -> Program:
    """A Llama of 4 layers, d 256, 2 sequences of 64 tokens, AdamW."""
    model = _llama().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 1024, (2, 64))

    return _training(model, optimizer, lambda: model(input_ids=tokens, labels=tokens).loss)


def generation() -> Program:
    """The same Llama, 16 tokens one by one from a prompt of 16, with a KV cache."""
    model = _llama().eval()
    prompt = torch.randint(0, 1024, (1, 16))

    def step() -> object:
        with torch.no_grad():
            out = model(input_ids=prompt, use_cache=True)
            cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
            for _ in range(16):
                out = model(input_ids=token, past_key_values=cache, use_cache=True)
                cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
        return token

    return Program(step, model)


WORKLOADS = (
    Workload("micro MLP 16-32-32-4, AdamW", micro_mlp, 20),
    Workload("tiny MLP 64-128-128-10, AdamW", tiny_mlp, 10),
    Workload("transformer, 2 blocks, d 128, AdamW", transformer, 3),
    Workload("CNN with batch norm, SGD", cnn, 8),
    Workload("Llama, 4 layers, d 256, AdamW", llama, 2),
    Workload("Llama, 16 tokens with KV cache", generation, 1, trains=False),
)


def single_operators() -> tuple[Workload, ...]:
    """``torch.add`` of 1 to 16 Mi elements."""

    def add(n: int) -> Callable[[], Program]:
        def make() -> Program:
            a, b = torch.rand(n), torch.rand(n)
            return Program(lambda: torch.add(a, b))

        return make

    sizes = {1: "1 element", 1 << 10: "1 Ki", 1 << 14: "16 Ki", 1 << 18: "256 Ki", 1 << 20: "1 Mi", 1 << 24: "16 Mi"}
    return tuple(
        Workload(f"add, {text}", add(n), max(1, min(1000, (1 << 22) // n)), trains=False) for n, text in sizes.items()
    )


def chosen(workloads: Sequence[Workload], pattern: str) -> list[Workload]:
    """Those whose name fits, whatever the case."""
    return [w for w in workloads if fnmatchcase(w.name.lower(), pattern.lower())]
