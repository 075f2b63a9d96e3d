"""The counters that backends keep of their own fallbacks."""

import sys
import types

import pytest

from shadowrun.platforms import torchplatform
from shadowrun.platforms.fallback import counter_reader, increased


def test_only_increases_count():
    assert increased({"aten::a": 1, "aten::b": 2}, {"aten::a": 1, "aten::b": 3, "aten::c": 1}) == ["aten::b", "aten::c"]


def test_devices_without_counters_have_no_reader():
    assert counter_reader("cuda") is None
    assert counter_reader("sim") is None


def test_xla_s_counters_are_read_where_it_is_loaded(monkeypatch):
    read = counter_reader("xla")
    assert read() == {}
    metrics = types.ModuleType("torch_xla.debug.metrics")
    values = {"aten::nonzero": 3, "CachedCompile": 7}
    metrics.counter_names = lambda: list(values)
    metrics.counter_value = values.__getitem__
    monkeypatch.setitem(sys.modules, "torch_xla.debug.metrics", metrics)
    assert read() == {"aten::nonzero": 3}


@pytest.mark.parametrize(
    ("op", "key", "route"),
    [
        ("aten::relu", "CPU", "kernel"),
        ("aten::matmul", "CPU", "math kernel"),
        ("aten::relu", "NoSuchKey", ""),
    ],
)
def test_the_dispatch_table(op, key, route):
    assert torchplatform.kernel_route(op, key) == route
