"""A program that makes new shapes for ever: no table of a comparison grows with them beyond its bound."""

from __future__ import annotations

import collections
import gc

import pytest
import torch

import shadowrun
from shadowrun.intercept import attribution, call_sites
from shadowrun.judge import remembered_bounds
from shadowrun.judge.cause import known_roundings
from shadowrun.judge.rounding import bias_over_calls
from shadowrun.recording import recorder
from shadowrun.replay import memory_effects
from shadowrun.replay.paths import native_handler, same_device
from shadowrun.store import write_buffer

TABLES = (dict, list, set, collections.OrderedDict, collections.Counter, collections.defaultdict, collections.deque)
BOUND, N_SHAPES, FURTHER = 120, 500, 150
BOUNDS = (
    (recorder, "_MAX_CONTEXTS"),
    (memory_effects, "_MAX_SIGNATURES"),
    (remembered_bounds, "MAX_CONTEXTS"),
    (known_roundings, "MAX_CONTEXTS"),
    (bias_over_calls, "MAX_KINDS"),
    (write_buffer, "MAX_REMEMBERED"),
    (attribution, "_MAX_LINKS"),
    (call_sites, "_MAX_SITES"),
)


def large_tables():
    """Sizes of what holds more than the bounds allow, by the table, and the tables themselves."""
    gc.unfreeze()  # tables that exist since the tests were collected may grow too
    found = {id(o): o for o in gc.get_objects() if type(o) in TABLES and len(o) > 2 * BOUND}
    return {i: len(o) for i, o in found.items()}, found


@pytest.fixture
def last_bit(monkeypatch):
    """Each result of a replay differs, so that what is known of differences grows too."""
    isolated = same_device.with_isolated_warnings

    def rerun(function, modes, args=(), kwargs=None):
        out = isolated(function, modes, args, kwargs or {})
        changed = args[0] if out is None and args else out
        if isinstance(changed, torch.Tensor) and changed.dtype is torch.float32 and changed.numel():
            changed.view(torch.int32).bitwise_xor_(1)
        return out

    for user in (same_device, native_handler):
        monkeypatch.setattr(user, "with_isolated_warnings", rerun)


@pytest.mark.parametrize("options", [{}, {"drift": True}, {"replay": False}, {"budget": 2.0}], ids=str)
def test_no_table_grows_with_new_shapes(tmp_path, monkeypatch, last_bit, options):
    for module, name in BOUNDS:
        monkeypatch.setattr(module, name, BOUND)
    x, weight = torch.randn(N_SHAPES + 1), torch.randn(N_SHAPES + 1)
    with shadowrun.compare("cpu", ref="cpu", file=tmp_path / "run.shadowrun", **options) as run:
        for n in range(1, N_SHAPES + 1):
            part = x[:n].clone().requires_grad_()
            (part * weight[:n]).sum().backward()
            part.detach().add_(weight[:n])
            if n % 50 == 0:
                run.step()
            if n == N_SHAPES - FURTHER:
                run._recorder.flush()
                before, _ = large_tables()
        # Rows that wait for the next flush are no table: they are written after a second.
        run._recorder.flush()
        sizes, tables = large_tables()
        # Growth, not size: the process has tables of its own, which the collector may begin to track at any time.
        grown = [tables[i] for i, size in sizes.items() if size - before.get(i, size) > FURTHER / 2]
        found = [f"{type(o).__name__} of {len(o)}: {next(iter(o))!r:.200}" for o in grown]
    assert found == []
    assert sum(run.counts().values()) > 2 * N_SHAPES
