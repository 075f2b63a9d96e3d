"""Every message has an entry in docs/messages.md, and says what it must say."""

import ast
import functools
import re
from pathlib import Path

import pytest

from shadowrun.config import Config
from shadowrun.errors import NestingError, PlatformError, ShadowrunError, UsageError

ROOT = Path(__file__).parents[1]


def slugs_of(tree):
    """Constants given as ``slug=``, and those at the place of a parameter that is called ``slug``."""
    positions = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = [argument.arg for argument in node.args.args]
            if "slug" in names:
                positions[node.name] = names.index("slug")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "slug" and isinstance(keyword.value, ast.Constant):
                    yield keyword.value.value
            if isinstance(node.func, ast.Name) and node.func.id in positions:
                argument = node.args[positions[node.func.id]]
                assert isinstance(argument, ast.Constant), ast.unparse(node)
                yield argument.value


@functools.cache
def used():
    found = set()
    for file in sorted((ROOT / "shadowrun").rglob("*.py")):
        found.update(slugs_of(ast.parse(file.read_text(encoding="utf-8"))))
    return found


def documented():
    text = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")
    return re.findall(r"^### (.+)$", text, re.MULTILINE)


def test_every_slug_is_documented_and_every_entry_is_used():
    assert sorted(documented()) == sorted(used())


def test_the_scan_sees_slugs():
    code = "def f(a, slug): ...\nf(1, 'given-by-place')\nraise E('x', slug='given-by-name')"
    assert set(slugs_of(ast.parse(code))) == {"given-by-place", "given-by-name"}
    assert {"bad-spec", "data-file-missing", "sim-unknown-flaw"} <= used()


def test_links_inside_messages_lead_somewhere():
    text = (ROOT / "docs" / "messages.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "docs" / target).is_file(), target


def test_every_error_carries_its_slug():
    with pytest.raises(TypeError):
        ShadowrunError("no slug")
    assert PlatformError("x", slug="y").slug == "y"
    assert issubclass(PlatformError, UsageError)
    assert issubclass(NestingError, UsageError)


@pytest.mark.parametrize(
    ("options", "sentence", "slug"),
    [
        ({"shedule": None}, "compare() has no option 'shedule'. Did you mean 'schedule'? Options: ", "unknown-option"),
        ({"on_unsupported": "ignore"}, "on_unsupported='ignore': use one of 'fallback', 'raise'.", "bad-option"),
        ({"rtol": 0.1}, "Give rtol and atol together or neither, as in torch.testing.assert_close.", "bad-option"),
        ({"rtol": -1, "atol": 0}, "rtol=-1: use a finite number >= 0.", "bad-option"),
        ({"rtol": 0, "atol": float("nan")}, "atol=nan: use a finite number >= 0.", "bad-option"),
        ({"schedule": 3}, "schedule=3 is not callable: give what torch.profiler.schedule(...) returns.", "bad-option"),
        ({"steps": -1}, "steps=-1: use a step number >= 0 or several, such as range(3).", "bad-option"),
        ({"steps": 0.5}, "steps=0.5: use a step number", "bad-option"),
        ({"ops": []}, "ops=[]: use a glob pattern or several.", "bad-option"),
        ({"max_bytes": 0}, "max_bytes=0: use a whole number >= 1.", "bad-option"),
        ({"slow_ratio": 1}, "slow_ratio=1: use a number > 1.", "bad-option"),
        ({"asynchronous": "yes"}, "asynchronous='yes': use None, True or False.", "bad-option"),
        ({"call_limit_s": 0}, "call_limit_s=0: use a number > 0 and up to", "bad-option"),
        ({"call_limit_s": float("nan")}, "call_limit_s=nan: use a number > 0 and up to", "bad-option"),
    ],
)
def test_options(options, sentence, slug):
    with pytest.raises(UsageError) as caught:
        Config.from_options(**options)
    assert sentence in str(caught.value)
    assert caught.value.slug == slug


def test_nested_compare():
    import shadowrun

    with (
        shadowrun.compare("cpu[threads=1]"),
        pytest.raises(NestingError, match="comparisons and recordings cannot be nested") as caught,
        shadowrun.compare("cpu"),
    ):
        pass
    assert "(cpu[threads=1] against cpu)" in str(caught.value)
    assert "Stop the first" in str(caught.value)
    assert shadowrun.current() is None
