"""Memory of strided tensors by sizes and strides, held against torch."""

import pytest
import torch

from shadowrun.strided import contiguous_strides, span

LAYOUTS = [
    torch.zeros(()),
    torch.zeros(0),
    torch.zeros(2, 0, 3),
    torch.zeros(1),
    torch.zeros(5, 4).T,
    torch.zeros(5, 4)[1:4, ::2],
    torch.zeros(3, 1).expand(3, 6),
    torch.zeros(40).as_strided((3, 4), (2, 3)),
    torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
]


@pytest.mark.parametrize("t", LAYOUTS, ids=lambda t: f"{tuple(t.shape)}-{t.stride()}")
def test_the_span_is_the_memory_that_torch_takes_for_the_layout(t):
    taken = torch.empty_strided(t.shape, t.stride(), dtype=torch.uint8).untyped_storage().nbytes()
    assert span(t.shape, t.stride()) == taken


@pytest.mark.parametrize("t", [t for t in LAYOUTS if t.numel()], ids=lambda t: f"{tuple(t.shape)}-{t.stride()}")
def test_contiguous_strides_are_those_of_torch(t):
    assert tuple(contiguous_strides(t.shape)) == torch.empty(t.shape).stride()


def test_a_stride_for_each_size():
    with pytest.raises(ValueError, match="zip"):
        span((2, 3), (1,))
