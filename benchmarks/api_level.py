"""What `api=True` costs: processor time of a compared step with it and without, in turns, on one thread.

``python benchmarks/api_level.py``
"""

import argparse
import statistics
import time

import torch
from torch import nn

import shadowrun


def mlp():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), (16, 64)


def transformer():
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (8, 32, 128)


def milliseconds(make, api, seconds):
    """Median of the steps of one comparison."""
    model, shape = make()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(shape)
    times = []
    with shadowrun.compare("cpu", api=api) as run:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times) < 12:
            began = time.process_time()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            times.append(1e3 * (time.process_time() - began))
            run.step()
    return statistics.median(times[5:])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for make in (mlp, transformer):
        for api in (False, True):  # not counted
            milliseconds(make, api, 0.5)
        pairs = [[milliseconds(make, api, options.seconds) for api in (False, True)] for _ in range(options.rounds)]
        ratios = [with_api / without for without, with_api in pairs]
        shown = ", ".join(f"{a:.2f} / {b:.2f} ms" for a, b in pairs)
        print(f"{make.__name__}: without / with: {shown}; ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
