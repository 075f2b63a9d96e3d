"""The programs of the studies: nets built from code, with weights and inputs from numpy, equal on all machines.

``python -m shadowrun.studies.published.programs casts`` runs one; `shadowrun record` records it on each platform. Each
variant of a study (a dtype, a size, a distribution) is a module of its own, whose name begins the path of its calls.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    Variant = tuple[str, nn.Module, torch.Tensor]

__all__ = ["STUDIES", "ResNet18", "SmallNet", "main", "variants"]

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
N_SAMPLES = 3
"""Inputs of a net, one at a time, as published."""


class SmallNet(nn.Sequential):
    """Three convolutions and two linear layers for (N, 3, 32, 32)."""

    def __init__(self, activation: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__(
            *(nn.Conv2d(3, 32, 3), activation(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3), activation(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 64, 3), activation(), nn.Flatten()),
            *(nn.Linear(1024, 64), activation(), nn.Linear(64, 10), nn.Softmax(1)),
        )


class _Block(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), nn.BatchNorm2d(n_out)
        self.conv2, self.bn2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False), nn.BatchNorm2d(n_out)
        # Two modules and not one: calls are matched by their module's path, and one module would be called twice.
        self.act1, self.act2 = activation(), activation()
        self.skip = nn.Sequential()
        if stride != 1:
            self.skip = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))
        out: torch.Tensor = self.act2(y + self.skip(x))
        return out


class ResNet18(nn.Sequential):
    """ResNet-18 in its form for CIFAR-10, (N, 3, 32, 32), 11.2 million parameters."""

    def __init__(self, activation: Callable[[], nn.Module] = nn.ReLU) -> None:
        sizes = ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1))
        blocks, n_in = [], 64
        for n_out, stride in sizes:
            blocks.append(_Block(n_in, n_out, stride, activation))
            n_in = n_out
        super().__init__(
            # Without ImageNet's first pool and stride of 2: images of CIFAR-10 have 32 x 32 points.
            *(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), activation()),
            *blocks,
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10), nn.Softmax(1)),
        )


_NETS: dict[str, Callable[..., nn.Module]] = {"small": SmallNet, "resnet18": ResNet18}


def _he(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    return rng.standard_normal(shape) * float(np.sqrt(2 / np.prod(shape[1:])))


def _xavier(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    limit = np.sqrt(6 / (np.prod(shape[1:]) + shape[0] * np.prod(shape[2:])))
    return rng.uniform(-limit, limit, shape)


def _linear(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    limit = 1 / np.sqrt(np.prod(shape[1:]))
    return rng.uniform(-limit, limit, shape)


_SCHEMES = {"he": _he, "xavier": _xavier, "linear": _linear}


def _filled(net: nn.Module, scheme: str = "he") -> nn.Module:
    """The net with weights of numpy's generator; torch's own would depend on its version."""
    # Another numpy may draw other numbers (NEP 19); the provenance of the recordings then says so.
    rng = np.random.default_rng(7)
    with torch.no_grad():
        for parameter in net.parameters():
            # Vectors are biases and the scales of batch norm: these keep their 0 and 1, biases get small values.
            if parameter.dim() > 1:
                parameter.copy_(torch.from_numpy(_SCHEMES[scheme](rng, tuple(parameter.shape))))
            elif parameter.shape and not bool((parameter == 1).all()):
                parameter.copy_(torch.from_numpy(0.01 * rng.standard_normal(tuple(parameter.shape))))
    # Batch norm in training takes statistics of one image, and would hide what the layers before it do.
    return net.eval()


def _image(sample: int) -> torch.Tensor:
    # By numpy: torch's random numbers depend on the instruction set, and each platform would get another image.
    rng = np.random.default_rng(100 + sample)
    return torch.from_numpy(rng.standard_normal((1, 3, 32, 32)).astype(np.float32))


def _conv(weights: npt.NDArray[Any]) -> nn.Module:
    """A convolution without bias and padding."""
    filters, channels, side, _ = weights.shape
    conv = nn.Conv2d(channels, filters, side, bias=False)
    with torch.no_grad():
        conv.weight.copy_(torch.from_numpy(weights))
    return conv.eval()


def _casts(*, quick: bool) -> Iterator[Variant]:
    for net, make in _NETS.items():
        if quick and net != "small":
            continue
        for name, dtype in _DTYPES.items():
            yield f"{net}:{name}", _filled(make()).to(dtype), _image(0).to(dtype)


def _cores(*, quick: bool) -> Iterator[Variant]:
    yield "small", _filled(SmallNet()), _image(0)
    if not quick:
        yield "resnet18", _filled(ResNet18()), _image(0)


def _resnet18(*, quick: bool) -> Iterator[Variant]:
    yield ("small", _filled(SmallNet()), _image(0)) if quick else ("resnet18", _filled(ResNet18()), _image(0))


def _activations(*, quick: bool) -> Iterator[Variant]:
    for net, make in _NETS.items():
        if quick and net != "small":
            continue
        for name, activation in (("relu", nn.ReLU), ("sigmoid", nn.Sigmoid)):
            for sample in range(1 if quick else N_SAMPLES):
                # Each activation with the scheme that is made for it.
                scheme = "he" if name == "relu" else "xavier"
                yield f"{net}:{name}:{sample}", _filled(make(activation), scheme), _image(sample)


def _untrained(*, quick: bool) -> Iterator[Variant]:
    for net, make in _NETS.items():
        if quick and net != "small":
            continue
        for scheme in _SCHEMES:
            yield f"{net}:{scheme}", _filled(make(), scheme), _image(0)


def _multiplications(*, quick: bool) -> Iterator[Variant]:
    """Convolutions of f filters, k x k, over 3 channels and i x i outputs: f k² 3 i² multiplications."""
    for exponent in range(3, 7 if quick else 9):
        for side, filters in ((2, 1), (2, 16), (5, 1), (5, 16)):
            i = max(1, round((10**exponent / (filters * side**2 * 3)) ** 0.5))
            rng = np.random.default_rng(exponent)
            weights = rng.random((filters, 3, side, side), np.float32)
            x = torch.from_numpy(rng.random((1, 3, i + side - 1, i + side - 1), np.float32))
            yield f"1e{exponent}:k{side}f{filters}", _conv(weights), x


def _distributions(*, quick: bool) -> Iterator[Variant]:
    """One layer of ResNet-18, 3 distributions of weights, 4 of inputs."""
    channels = 16 if quick else 128
    rng = np.random.default_rng(11)
    shape = (channels, channels, 3, 3)
    weights = {"he": _he(rng, shape), "glorot": _xavier(rng, shape), "normal": rng.normal(-0.019, 0.226, shape)}
    # The output of a ReLU stands for the published captured input: there is no trained net here.
    rectified = np.maximum(rng.standard_normal((1, channels, 16, 16)), 0)
    inputs = {
        "rectified": rectified,
        "permuted1": rng.permutation(rectified.reshape(-1)).reshape(rectified.shape),
        "permuted2": rng.permutation(rectified.reshape(-1)).reshape(rectified.shape),
        "uniform": rng.random(rectified.shape),
    }
    for kind, w in weights.items():
        for name, x in inputs.items():
            yield f"{kind}:{name}", _conv(w.astype(np.float32)), torch.from_numpy(x.astype(np.float32))


STUDIES: dict[str, Callable[..., Iterator[Variant]]] = {
    "activations": _activations,
    "casts": _casts,
    "cores": _cores,
    "distributions": _distributions,
    "multiplications": _multiplications,
    "resnet18": _resnet18,
    "untrained": _untrained,
}
"""Name of a study to its variants: name, module and input."""


def variants(study: str, *, quick: bool) -> list[str]:
    """Names of a study's variants, without running them."""
    return [name for name, _, _ in STUDIES[study](quick=quick)]


class _Named(nn.Module):
    """Gives a variant its name in the paths of its calls."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.add_module(name, module)
        self._only = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.get_submodule(self._only)(x)
        return out


def main(arguments: list[str]) -> None:
    """Run every variant of a study once."""
    with torch.no_grad():
        for name, module, x in STUDIES[arguments[0]](quick="--quick" in arguments):
            _Named(name, module)(x)


if __name__ == "__main__":
    main(sys.argv[1:])
