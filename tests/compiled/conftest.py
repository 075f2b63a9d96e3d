"""What tests of compiled code share."""

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.fixture
def fresh_dynamo():
    """Nothing is compiled yet, counters are at 0, the random state is always the same; nothing stays."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
