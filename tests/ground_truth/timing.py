"""Programs whose times are judged."""

from contextlib import contextmanager

import torch

from shadowrun import Cause


@contextmanager
def timed(flaw):
    """How often to run a flaw's program so that its time is judged: once, or, of a slow operator, often.

    On a busy machine the threads of a call wait for each other for 20 ms and more, in every call: one thread does not.
    """
    if flaw is None or flaw.cause is not Cause.SLOW:
        yield 1
        return
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield 20
    finally:
        torch.set_num_threads(n_threads)
