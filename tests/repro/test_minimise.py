"""Inputs get smaller and simpler while a fault stays, and never lose it."""

import time

import torch

from shadowrun.repro.minimise import Minimiser


def minimised(holds, *args, seconds=20.0, **kwargs):
    minimiser = Minimiser(holds, seconds)
    assert holds(args, kwargs)
    found = minimiser.minimise(args, kwargs)
    assert holds(*found)
    return *found, minimiser


def test_dimensions_shrink_together():
    def product(args, _):
        return (args[0] @ args[1]).numel() > 0

    (a, b), _, minimiser = minimised(product, torch.randn(64, 48), torch.randn(48, 32))
    assert (a.shape, b.shape) == ((1, 1), (1, 1))
    assert (a.tolist(), b.tolist()) == ([[0.0]], [[0.0]])
    assert minimiser.finished


def test_the_element_that_matters_stays():
    x = torch.randn(100)
    x[77] = float("nan")
    (found,), _, _ = minimised(lambda args, _: bool(args[0].isnan().any()), x)
    assert found.shape == (1,)
    assert found.isnan().all()


def test_the_last_element_of_a_tail_stays():
    """As a kernel that forgets the tail of sizes that are no multiple of 16."""
    (found,), _, _ = minimised(lambda args, _: args[0].numel() % 16 != 0 and bool(args[0][-1] != 0), torch.randn(35))
    assert found.numel() == 1
    assert found.item() == 1.0


def test_lists_lose_entries_together():
    def third(args, _):
        return len(args[0]) == len(args[1]) and any(t.numel() == 3 for t in args[0])

    tensors = [torch.randn(n) for n in (2, 3, 4)]
    (left, right), _, _ = minimised(third, tensors, [t.clone() for t in tensors])
    assert [len(left), len(right)] == [1, 1]
    assert left[0].numel() == 3


def test_sizes_among_the_arguments_follow():
    def normalised(args, _):
        return torch.nn.functional.layer_norm(*args).numel() > 0

    args, _, _ = minimised(normalised, torch.randn(8, 24), [24])
    assert args[0].shape == (1, 1)
    assert args[1] == [1]


def test_layout_stays_where_it_matters():
    strided = torch.randn(6, 4).t()
    (found,), _, _ = minimised(lambda args, _: not args[0].is_contiguous(), strided)
    assert not found.is_contiguous()
    assert found.numel() == 2
    (plain,), _, _ = minimised(lambda args, _: args[0].numel() > 0, strided)
    assert plain.is_contiguous()


def test_one_tensor_given_twice_stays_one():
    x = torch.randn(8)
    (a, b), _, _ = minimised(lambda args, _: args[0] is args[1], x, x)
    assert a is b
    assert a.numel() == 1


def test_inputs_are_not_written_to_and_runs_are_alike():
    x = torch.randn(5, 7)
    before = x.clone()

    def holds(args, _):
        return float(args[0].abs().max()) > 0.5

    first, second = (minimised(holds, x)[0][0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(x, before)
    assert first.tolist() == [[1.0]]


def test_it_ends_in_time():
    tried = []

    def slow(args, _):
        tried.append(1)
        time.sleep(0.05)
        return args[0].numel() > 0

    _, _, minimiser = minimised(slow, torch.randn(1000, 1000), seconds=0.02)
    assert len(tried) <= 3, "once before, once within the time, once after"
    assert not minimiser.finished
