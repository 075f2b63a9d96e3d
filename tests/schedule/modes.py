"""A mode of the program's own."""

from shadowrun.intercept import torchapi


class Counting(torchapi.DispatchMode):
    """Counts the calls that it sees."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        return func(*args, **(kwargs or {}))
