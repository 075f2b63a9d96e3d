"""Plain values in files: they come back as they were, and what is none is refused both ways."""

import json
import sys

import pytest
import torch

from shadowrun.store import plain_json
from shadowrun.store.plain_json import NotStorable

CONSTANTS = {v for v in vars(torch).values() if isinstance(v, (torch.dtype, torch.layout, torch.memory_format))}


def there_and_back(value):
    encoded = json.loads(json.dumps(plain_json.encode(value)))
    return plain_json.decode(*encoded.popitem()) if isinstance(encoded, dict) else encoded


@pytest.mark.parametrize("value", [True, 3, -0.5, float("inf"), "x", None, 1 - 2j, torch.device("cuda", 1)], ids=str)
def test_they_come_back_as_they_were(value):
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)


def test_all_constants_of_torch_come_back():
    assert len(CONSTANTS) > 20
    assert all(there_and_back(value) is value for value in CONSTANTS)


@pytest.mark.parametrize("value", [object(), torch.finfo(torch.half), [1], {"a": 1}, torch.ones(1), len])
def test_anything_else_is_not_kept(value):
    with pytest.raises(NotStorable, match=rf"^{type(value).__name__}$"):
        plain_json.encode(value)


@pytest.mark.parametrize(
    ("kind", "content"),
    [("torch", "load"), ("torch", "no_such"), ("torch", "float_power"), ("tuple", [1]), ("set", [])],
)
def test_what_is_none_does_not_come_back(kind, content):
    with pytest.raises(ValueError, match=kind):
        plain_json.decode(kind, content)


def test_a_name_of_others_imports_nothing():
    """`torch.onnx` and such are imported when they are looked up in torch."""
    before = set(sys.modules)
    for name in ("_inductor", "_export", "onnx", "_dynamo", "compiler"):
        with pytest.raises(ValueError, match="torch"):
            plain_json.decode("torch", name)
    assert set(sys.modules) == before
