"""Each operator on channels-last inputs against itself on contiguous ones, one pair of calls at a time.

No setting of a platform says in which layout a program keeps its images, so this needs no second platform: the same
kernels library takes other ways for the two layouts, and both are right.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map_only

from shadowrun.judge.judge import Judge
from shadowrun.operators.case import Case, exact_copy, flat_results
from shadowrun.types import OpCall, OpRecord, Phase, Status, Verdict

_LEAST = 4
_ONE_LAYOUT = ("aten::_scaled_dot_product_flash_attention_for_cpu",)
"""Kernels (and their backward) that read whole rows: what attention calls before it lays its inputs so."""


def channels_last(t):
    """A copy in NHWC order; a leaf stays a leaf with its gradient."""
    with torch.no_grad():
        copied = t.detach().to(memory_format=torch.channels_last)
    return copied.requires_grad_(t.requires_grad)


class ChannelsLast(TorchDispatchMode):
    """Runs each call on images a second time, with other layouts of its inputs, and judges the pair."""

    def __init__(self):
        super().__init__()
        self._records = []
        self._step = 0
        self._judge = Judge()

    def step(self):
        """Pairs from here on belong to the next case."""
        self._step += 1

    def records(self):
        """One for each pair."""
        return self._records

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        fresh = not any(a.alias_info for a in func._schema.arguments)
        views = any(r.alias_info for r in func._schema.returns)
        if not fresh or views or not tree_any(_is_image, (args, kwargs)):
            return func(*args, **kwargs)
        drawn = torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.name()
        if drawn or func.name().startswith(_ONE_LAYOUT):
            return func(*args, **kwargs)
        before = tree_map_only(torch.Tensor, _contiguous, (args, kwargs))
        out = func(*args, **kwargs)
        verdict, diffs = self._pair(func, *before)
        shapes = ", ".join(f"{t.dtype}{list(t.shape)}" for t in args if isinstance(t, torch.Tensor))
        call = OpCall(len(self._records), self._step, 0, func.name(), shapes, "", Phase.FORWARD, "")
        self._records.append(OpRecord(call, verdict, diffs))
        return out

    def _pair(self, func, args, kwargs):
        def contiguous(args, kwargs):
            return _results(func, args, kwargs)

        def images(args, kwargs):
            return _results(func, *tree_map_only(torch.Tensor, _laid_out, (args, kwargs)))

        try:
            actual = images(args, kwargs)
        except RuntimeError as error:
            # `_unsafe_view`, and what else is defined on strides.
            return Verdict(Status.UNVERIFIED, explanation=f"not in this layout: {str(error)[:60]}"), ()
        expected = contiguous(args, kwargs)
        names = flat_results(func, (), args, kwargs, func(*args, **kwargs))[0]
        case = Case(func, args, kwargs, (), names, actual, expected, images, contiguous, same_device=True)
        return self._judge(case)


def _is_image(t):
    return isinstance(t, torch.Tensor) and t.dim() == _LEAST and t.device.type == "cpu"


def _contiguous(t):
    return exact_copy(t).contiguous()


def _laid_out(t):
    return channels_last(t) if _is_image(t) else t.detach().clone()


def _results(func, args, kwargs):
    """Results in the contiguous layout: that of the result follows the inputs', and is no difference here."""
    found = flat_results(func, (), args, kwargs, func(*args, **kwargs))[1]
    return tuple(v.contiguous() if isinstance(v, torch.Tensor) else v for v in found)
