"""Files that the documentation names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PATH = re.compile(r"`((?:[a-z_]+/)*[a-z_0-9]+\.(?:py|c|h)|(?:[a-z_]+/)+)`")
HISTORY = ("CHANGELOG.md",)


def named(text):
    """Paths in backticks: ``replay/copies.py``, ``judge/``."""
    return [name for name in PATH.findall(text) if not name.startswith(("build/", "docs/_build", "torch/"))]


def exists(name):
    return any((ROOT / base / name).exists() for base in ("", "shadowrun", "tests", "docs"))


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in HISTORY], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_files_that_a_page_names_exist(page):
    users_own = ("train.py", "script.py", "repro.py", "model.py", "conftest.py", "my_plugin.py")
    missing = [n for n in named(page.read_text(encoding="utf-8")) if not exists(n) and n not in users_own]
    assert missing == []


def test_a_missing_file_is_seen():
    assert [n for n in named("see `replay/behind.py` and `judge/`") if not exists(n)] == ["replay/behind.py"]
