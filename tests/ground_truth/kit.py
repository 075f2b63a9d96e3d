"""What the programs share: a device, sizes and random numbers that depend on the program's number only."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

SIZES = (8, 13, 32, 27, 64, 50)
"""Width of a program by its number: even numbers are multiples of vectors and blocks, odd ones are not."""

FAMILIES: dict[str, Callable] = {}


@dataclass(frozen=True)
class Program:
    """A family with a number, which sets sizes and seeds; programs with odd numbers are held out."""

    family: str
    number: int

    @property
    def name(self):
        return f"{self.family}-{self.number}"

    @property
    def held_out(self):
        return self.number % 2 == 1

    def __call__(self, device):
        """Run, and give every value that a user would look at."""
        torch.manual_seed(self.number)
        return FAMILIES[self.family](Kit(device, self.number))


def program(function):
    """Registers a family under the function's name."""
    FAMILIES[function.__name__.removesuffix("_").replace("_", "-")] = function
    return function


class Kit:
    """Inputs for one program."""

    def __init__(self, device, number):
        self.device = device
        self.number = number
        self.size = SIZES[number]
        self.batch = 3 + 2 * number
        self.generator = torch.Generator().manual_seed(1000 + number)

    def randn(self, *shape, dtype=torch.float32):
        return torch.randn(*shape, generator=self.generator).to(self.device, dtype)

    def rand(self, *shape):
        return torch.rand(*shape, generator=self.generator).to(self.device)

    def randint(self, high, *shape):
        return torch.randint(0, high, shape, generator=self.generator).to(self.device)

    def tensor(self, values, dtype=None):
        return torch.tensor(values, dtype=dtype).to(self.device)

    def train(self, model, optimizer, loss_of, steps=3, clip=None):
        """Train a model; gives losses, gradients, weights and buffers."""
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=False)
            optimizer.step()
            losses.append(loss.detach())
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return [*losses, *grads, *(v.detach() for v in model.state_dict().values())]


def same(actual, expected):
    """Whether two lists of results have the same bits."""
    return len(actual) == len(expected) and all(map(_same, actual, expected))


def _same(a, e):
    if not isinstance(a, torch.Tensor) or not isinstance(e, torch.Tensor):
        return a == e
    if (a.shape, a.dtype, a.stride(), a.device) != (e.shape, e.dtype, e.stride(), e.device):
        return False
    a, e = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for t in (a, e))
    return a.tobytes() == e.tobytes()
