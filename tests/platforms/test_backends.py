"""The table of backends: each row is complete, and what reads it agrees."""

import re
from pathlib import Path

import pytest
import torch

from shadowrun.platforms import known_devices, parse, settings, unsupported
from shadowrun.platforms.backends import BACKENDS, DISPATCH_KEYS, FUNCTIONALIZING, RESERVED_NAMES, backend_of

MESSAGES = Path(__file__).parents[2] / "docs" / "messages.md"


@pytest.mark.parametrize("row", BACKENDS.values(), ids=lambda row: row.device_type)
def test_a_row_is_complete(row):
    assert row.device_type in known_devices()
    assert hasattr(torch._C.DispatchKey, row.dispatch_key)
    assert set(row.settings) <= set(settings._ACCEPTED)
    for types, pattern, _ in row.missing_kernel:
        assert types
        assert re.compile(pattern.replace("NAME", "(x)")).groups <= 1


def test_every_setting_belongs_to_a_device():
    assert set(settings._ACCEPTED) == {name for row in BACKENDS.values() for name in row.settings}
    assert str(parse("cuda[tf32=on]")) == "cuda[tf32=on]"


def test_a_device_type_without_a_row_has_no_special_facts():
    row = backend_of("brand_new")
    assert (row.package, row.streams, row.functionalizes, row.settings) == ("", False, False, ())
    assert not BACKENDS.keys() & set(RESERVED_NAMES)


def test_what_is_derived_from_the_rows():
    assert {"lazy", "xla"} == FUNCTIONALIZING
    assert {"CPU", "CUDA", "PrivateUse1", "Lazy", "XLA"} <= set(DISPATCH_KEYS)
    assert len(unsupported._patterns()) > sum(len(row.missing_kernel) for row in BACKENDS.values())


def test_the_message_on_unknown_settings_names_every_device_that_has_some():
    section = MESSAGES.read_text(encoding="utf-8").split("### unknown-setting\n")[1].partition("###")[0]
    for row in BACKENDS.values():
        assert not row.settings or f"`{row.device_type}`" in section
