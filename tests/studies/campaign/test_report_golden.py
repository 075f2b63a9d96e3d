"""Reports of a campaign against golden files.

``SHADOWRUN_GOLDEN=1 pytest tests/studies/campaign/test_report_golden.py`` writes them anew; read the diff.
"""

import difflib
import os
from pathlib import Path

import pytest

from shadowrun.report.document import render
from shadowrun.report.formats.terminal import render_terminal
from shadowrun.studies.campaign.causes.cause_report import cause_document
from shadowrun.studies.campaign.report import campaign_document
from tests.golden.campaign import campaign
from tests.golden_kit import content

GOLDEN = Path(__file__).parents[2] / "golden"
FAIL_ON = frozenset({"mismatch", "crash"})


@pytest.fixture(scope="module")
def summary():
    return campaign()


def check(name, text):
    golden, text = GOLDEN / name, content(text)
    if os.environ.get("SHADOWRUN_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    expected = golden.read_text(encoding="utf-8")
    changes = difflib.unified_diff(expected.splitlines(), text.splitlines(), name, "actual", lineterm="", n=1)
    assert text == expected, "\n".join(changes)


@pytest.mark.parametrize("kind", ["txt", "md", "json", "csv", "html"])
def test_the_report(summary, kind):
    check(f"campaign.{kind}", render(campaign_document(summary, folder="c", fail_on=FAIL_ON), kind))


@pytest.mark.parametrize("kind", ["txt", "md", "json", "html"])
def test_the_page_of_a_root_cause(summary, kind):
    number = next(n for n, c in enumerate(summary.root_causes, 1) if c.signature.op == "aten::mm")
    check(f"campaign-cause.{kind}", render(cause_document(number, summary.root_causes[number - 1], summary), kind))


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_but_a_command_or_the_gate_is_wider_than_the_terminal(summary, width):
    text = render_terminal(campaign_document(summary, folder="c"), width=width, colour=False)
    assert max(map(len, text.splitlines())) <= width
