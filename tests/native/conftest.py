"""Programs by the compiled handler and by Python, with faults in their replays."""

from __future__ import annotations

import contextlib

import pytest

import shadowrun
from shadowrun.replay.paths import native_handler, same_device
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

        monkeypatch.setattr(native_handler, "_replay", instead(native_handler._replay))
        monkeypatch.setattr(same_device, "with_isolated_warnings", instead(same_device.with_isolated_warnings))

    return plant
