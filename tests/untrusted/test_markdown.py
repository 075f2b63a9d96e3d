"""Markdown shows texts of a file as they are: a real parser finds no markup of theirs, and services nothing to link."""

from __future__ import annotations

import importlib.util
import re

import pytest
from markdown_it import MarkdownIt

from shadowrun.report.document import (
    Column,
    Document,
    Entries,
    Entry,
    Fact,
    Facts,
    GateLine,
    Listing,
    Note,
    Records,
    Section,
    Table,
    render,
)
from shadowrun.studies.slowdown.calls import Call
from shadowrun.studies.slowdown.table import Slowdown, slowdown_document
from shadowrun.studies.slowdown.timing import TimedCall
from shadowrun.studies.static.coverage import StaticCoverage, StaticOperator, static_document
from shadowrun.studies.sweep.cases import Case, CaseFinding, CaseOutcome, Kind, Part
from shadowrun.studies.sweep.coverage_file import CoverageFile, SweepInfo
from shadowrun.studies.sweep.reports.report import sweep_document
from shadowrun.studies.sweep.reports.support import SupportTable

LINKIFIES = importlib.util.find_spec("linkify_it") is not None
GFM = MarkdownIt("gfm-like", {"html": True, "linkify": LINKIFIES})
if LINKIFIES:
    GFM.linkify.set({"fuzzy_link": False})  # it takes `model.py` for a site of Paraguay; GitHub does not
# As in GitHub's documentation on autolinks and mentions; not those of the renderer.
SERVICES = re.compile(
    r"https?://|ftp://|www\.|[\w.+-]+@[\w.]+|@\w|(?:\w+/\w+)?#\d|GH-\d|TICKET-\d|\$[^$]+\$|:(?:100|\+1|smile):"
    r"|\b[0-9a-f]{40}\b|!\d|(?<!\w)[~%]\w"
    # As in GitLab's on references, differences and the table of contents.
    r"|\[(?!env:)[a-z_]+:|\*iteration:|\w/\w+>|\[toc\]|\{\+.*\+\}|\{-.*-\}|\[\+.*\+\]|\[-.*-\]",
    re.IGNORECASE,
)
BLOCKS = {
    "inline", "heading", "paragraph", "blockquote", "bullet_list", "list_item", "fence",
    "table", "thead", "tbody", "tr", "th", "td",
}  # fmt: skip
TEXTS = [
    "~~struck~~ ~one~", "http://e.example/x", "(see https://e.example).", "www.e.example WWW.e.example", "ftp://e.example",
    "me@e.example", "mailto:me@e.example", "@octocat @org/team", "#1 owner/repo#1 GH-1 gh-2 TICKET-7", "o/r@deadbeef1",
    "$x^2$ $$y$$ $`z`$", "0123456789abcdef0123456789abcdef01234567", ":100: :+1: a::smile::b", "!1 ~bug %v1 &2",
    "# PASSED", "## PASSED ##", "- item", "+ item", "* item", "1. item", "2) item", "---", "===", "- - -", "> quote",
    "- [ ] task", "[!NOTE] x", "[x]: http://e.example", "[x](http://e.example)", "![i](//e.example/i.png)", "[^1]",
    "<b>bold</b>", "<http://e.example>", "<!-- gone", "&#x202E;x &lt; &amp;", "**b** __b__ *i* _i_", "`code` ``x`",
    "```", "~~~", "a | b || c", r"a\|b\ \` \@x \\", "x|@y|z", "`@x` ``@y", "@`", "@x\\", "|---|", "[@x]: ('@y')!",
    "| http://e.example |", "aten::add.Tensor", "model.py:12 in f", "f32[64, 8]", "x_y *_z_* 2*3*4", "1.5 ms", "-0.5",
    "12", "2026-11-30T10:00:00Z", "/close", "/assign @root", "[vulnerability:1] x[work_item:g/p/1]",
    '[cadence:"plan a"] ([feature_flag:1]).', '*iteration:1 a*iteration:"plan b"', "group/project> (g/sub/project>)",
    "[TOC]", "[toc]", "{+ a +} {- b -} [+ c +] [- d -] [-e-]", "[[[a:1]]] [b_c:[d:1] [env:e:1]",
    "[-1, 2] x[1:2] cpu[env:A=1]",
]  # fmt: skip


def document(text: str) -> Document:
    """The text wherever a report may have one."""
    blocks = (
        Note(text), Note(text, "warn"), Facts((Fact(text, text), Fact("run", text, command=True))),
        Table((Column("operator", "name"), Column("why")), ((text, text), ("aten::mm", text)), 3, text),
        Entries((Entry(text, (Fact("why", text),), text, "1", listing=Listing((text,))),), 2, text),
        Section(text, (Note("x"),), text),
    )  # fmt: skip
    return Document(text, blocks, {}, Records((), ()), GateLine(text, passed=True))


def check_literal(markdown: str, wanted: str, n_headings: int) -> list[str]:
    """The shown lines, among them the wanted one, with no markup but the renderer's; what is no code has no link."""
    lines, tokens = [], GFM.parse(markdown)
    assert sum(token.type == "heading_open" for token in tokens) == n_headings
    kinds = {token.type.removesuffix("_open").removesuffix("_close") for token in tokens}
    assert kinds <= BLOCKS
    n_items = sum(token.type == "list_item_open" for token in tokens)
    assert n_items == len(re.findall(r"^- \*\*", markdown, re.MULTILINE))
    for token in tokens:
        children = token.children or []
        assert {child.type for child in children} <= {"text", "code_inline", "strong_open", "strong_close"}, token
        assert not [child for child in children if child.type == "text" and SERVICES.search(child.content)], token
        lines.append("".join(child.content for child in children))
    assert any(wanted in line for line in lines)
    return lines


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_shown_as_it_is(text):
    markdown = render(document(text), "md")
    # GitLab obeys a line such as `/close`, unless it is code.
    assert not re.search("^ {0,3}/", re.sub("^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    lines = check_literal(markdown, text, 3)
    assert sum(text in line for line in lines) >= 14, lines


def test_a_parser_that_finds_links_would_find_them():
    """Otherwise the checks above could not fail."""
    for text in ("~~x~~", "[x](http://e.example)", "<b>x</b>", "# x"):
        with pytest.raises(AssertionError):
            check_literal(text, "x", 0)
    for text in ("@octocat", "see #1", "http://e.example", "$x$", r"\[vulnerability:1\]", r"\[-a-\]", r"\[TOC\]"):
        with pytest.raises(AssertionError):
            check_literal(text, text, 0)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("aten::add.Tensor", "aten::add.Tensor"),
        ("aten::add_.Tensor", r"aten::add\_.Tensor"),
        ("ResNet.layer1.0.attn · forward · model.py:12 in f", "ResNet.layer1.0.attn · forward · model.py:12 in f"),
        ("50 % of 1,000: 1.5 ms; a ~ b & c", r"50 % of 1,000: 1.5 ms; a \~ b &#38; c"),
        ("at 10:00:00, C:\\x", r"at 10:00:00, C:\\x"),
        ("debug the target's aten::exp_: 1", "debug the target's `aten::exp_`: 1"),
        ("ask @me (or #12).", "ask `@me` (or `#12`)."),
        ("see [work_item:1].", r"see \[`work_item:1`\]."),
        ("[-1, 2] x[1:2] cpu[env:A=1]: <lambda>", r"\[-1, 2\] x\[1:2\] cpu\[env:A=1\]: &#60;lambda&#62;"),
    ],
)
def test_ordinary_texts_stay_readable(text, wanted):
    assert f"\n{wanted}\n" in render(Document("t", (Note(text),), {}, Records((), ())), "md")


def test_an_entity_is_no_character():
    """It would bring back what was removed: U+202E turns the text around."""
    text = render(Document("&#x202E;DELIAF &rlm;x", (Note("&#8238;x"),), {}, Records((), ())), "md")
    check_literal(text, "&#x202E;DELIAF &rlm;x", 1)
    check_literal(text, "&#8238;x", 1)
    assert GFM.render(text).isascii()


MARKUP = "[/x] [link=http://e.example]a[/link] ![i](http://e.example/i.png) `b` *c* <img src=x>"


def reports(tmp_path):
    failed = TimedCall(Call(MARKUP, MARKUP, 1, MARKUP), None, None, None, MARKUP, True)
    yield slowdown_document(Slowdown.from_timings([failed], 1, 100.0), MARKUP)
    yield static_document(StaticCoverage((MARKUP,), (MARKUP,), (StaticOperator(MARKUP, ("absent",), 1),)), MARKUP)
    file = CoverageFile.begin(tmp_path / "x.shadowcov", SweepInfo(MARKUP, MARKUP, 0, MARKUP, {}, {}, {"torch": MARKUP}))
    for kind in (Kind.MISMATCH, Kind.ERROR):
        found = CaseFinding(kind, MARKUP, MARKUP, "implementation", MARKUP, MARKUP)
        file.add(Case(f"{MARKUP}{kind}", MARKUP, Part.FORWARD, 0), CaseOutcome.from_findings([found], MARKUP))
    yield sweep_document(SupportTable.from_results(file.results()), file.info)
    file.close()


def test_no_name_of_a_report_is_markup(tmp_path):
    for made in reports(tmp_path):
        text = render(made, "md")
        check_literal(text, "`b` *c* <img src=x>", len(re.findall("^#+ ", text, re.MULTILINE)))
