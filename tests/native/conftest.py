"""Programs by the compiled handler and by Python, with faults in their replays."""

from __future__ import annotations

import contextlib

import pytest

import shadowrun
from shadowrun.replay import quick, shared, short
from tests.native.both_ways import in_python


@pytest.fixture(params=["compiled", "python"])
def either(request):
    """Each test that takes this runs by the compiled handler and by Python."""
    with contextlib.nullcontext() if request.param == "compiled" else in_python():
        yield request.param


@pytest.fixture
def replays(monkeypatch):
    """Have replays of an operator do something else: ``replays(operator, function of run, args and kwargs)``."""

    def plant(func, answer):
        def instead(original):
            def call(run, *rest):
                plan = shadowrun.current()._replayer.plans.get(id(func))
                if plan is None or run is not plan.run:
                    return original(run, *rest)
                return answer(run, *rest[-2:])

            return call

        monkeypatch.setattr(quick, "_again", instead(quick._again))
        for module in (short, shared):
            monkeypatch.setattr(module, "unheard", instead(module.unheard))

    return plant
