"""Whether a correct device could have returned what a flaw made of a 16-bit product, worked out without the judge."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_HALF = (torch.float16, torch.bfloat16)
_LONG = 64
"""From here on a correct device may round partial sums: whether it could have returned this is left to the judge."""


class Products(TorchDispatchMode):
    """Looks at every 16-bit product of a program.

    Attributes:
        worst: Most roundings that an element is away from the float64 product.
        n: Products seen.
        long: One of them has too many terms to say.
    """

    def __init__(self):
        super().__init__()
        self.worst, self.n, self.long = 0.0, 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name in {"mm", "bmm", "addmm", "baddbmm"} and args[-1].dtype in _HALF:
            self._look(name, args, kwargs, out)
        return out

    def _look(self, name, args, kwargs, out):
        *added, a, b = (t.detach().cpu().double() for t in args)
        alpha, beta = kwargs.get("alpha", 1), kwargs.get("beta", 1)
        product, term = alpha * (a @ b), beta * added[0] if added else 0.0
        unit = torch.finfo(out.dtype).eps / 2
        # One rounding of the result to either neighbour; the product, and its multiple, may be rounded before.
        roundings = (product + term).abs() + (len(added) + (alpha != 1)) * product.abs()
        possible = 2 * unit * roundings + a.shape[-1] * 2.0**-23 * (abs(alpha) * (a.abs() @ b.abs()))
        off = (out.detach().cpu().double() - product - term).abs() / (possible + torch.finfo(out.dtype).tiny)
        self.worst = max(self.worst, float(off.max()) if off.numel() else 0.0)
        self.long |= a.shape[-1] >= _LONG
        self.n += 1


def only_rounding(flaw, run):
    """Why a program in which a flaw changes bits is none in which it matters, or nothing.

    Args:
        flaw: The flaw; others than of 16-bit products always matter where they change bits.
        run: Runs the program under the flaw.
    """
    if flaw.name != "matmul-accumulates-in-half":
        return ""
    with Products() as seen:
        run()
    if seen.long or seen.worst > 1:
        return ""
    return f"all {seen.n} products are within {seen.worst:.2f} of what rounding to either neighbour allows"
