"""The public surface is pinned: a name that appears or goes is a decision, not an accident."""

import dataclasses
import subprocess
import sys

import pytest

import shadowrun

NAMES = [
    "Cause",
    "Comparison",
    "Config",
    "DataFileError",
    "FindingsError",
    "NestingError",
    "NonFinite",
    "NonFiniteError",
    "OpCall",
    "OpRecord",
    "Phase",
    "PlatformError",
    "Run",
    "RunInfo",
    "ShadowrunError",
    "ShadowrunWarning",
    "Status",
    "TensorDiff",
    "UsageError",
    "Verdict",
    "combine",
    "compare",
    "compile_check",
    "current",
    "load",
    "nan_track",
    "record",
]
METHODS = {
    "compare_and_record": False,
    "start": True,
    "stop": True,
    "step": True,
    "records": True,
    "summary": True,
    "findings": True,
    "first_divergence": True,
    "coverage": True,
    "counts": True,
    "write": True,
    "notes": True,
    "info": True,
}


def test_the_names():
    assert sorted(shadowrun.__all__) == NAMES
    assert len(NAMES) <= 27
    for name in NAMES:
        assert getattr(shadowrun, name) is not None
    assert set(NAMES) <= set(dir(shadowrun))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="comparison_of"):
        _ = shadowrun.comparison_of


def test_what_a_comparison_offers():
    run = shadowrun.compare("cpu")
    for name, offered in METHODS.items():
        assert hasattr(run, name) is offered, name


def test_the_options_are_those_of_the_config():
    from shadowrun.config import Options

    assert set(Options.__annotations__) == {f.name for f in dataclasses.fields(shadowrun.Config)}


def test_every_public_name_is_documented():
    for name in NAMES:
        doc = getattr(shadowrun, name).__doc__
        assert doc, name
        assert doc.strip().splitlines()[0].endswith((".", ":")), name


def test_importing_does_not_import_torch():
    code = "import sys, shadowrun; shadowrun.Config; print('torch' in sys.modules, 'rich' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["False", "False"]
