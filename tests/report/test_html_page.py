"""The HTML report in a browser: what it filters, sorts and opens; its widths and contrasts; without its script."""

from __future__ import annotations

import ast
import html
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import shadowrun
from shadowrun import report
from shadowrun.report.document import (
    Column,
    Document,
    Entries,
    Entry,
    Fact,
    Facts,
    Limits,
    Note,
    Records,
    Section,
    Table,
    render,
)  # fmt: skip
from shadowrun.report.document_blocks import naming
from shadowrun.report.formats.help_texts import HELP
from shadowrun.report.formats.html import MAX_BYTES
from shadowrun.run import Run, load
from shadowrun.store import DataFile
from shadowrun.types import Cause, Phase, RunInfo, Status, TensorDiff, TensorMeta, Verdict
from tests.browser_kit import MISSING, started

IN_A_BROWSER = pytest.mark.skipif(bool(MISSING), reason=MISSING)

SHOWN = "[...document.querySelectorAll('article[id^=f]')].filter(a => a.checkVisibility()).map(a => a.id)"
CONTRAST = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def browser():
    with started() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(sample, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    Run(sample.build(compiled=True)).write(path)
    return path


@pytest.fixture
def opened(browser, page):
    browser.resize(1280)
    browser.open(page)
    yield browser
    assert browser.console() == []


def choose(browser, name, value):
    browser.run(
        "const tools = document.getElementById('findings');"
        "tools.querySelector(arguments[0]).value = arguments[1];"
        "tools.querySelector(arguments[0]).dispatchEvent(new Event('input', {bubbles: true}))",
        name, value,
    )  # fmt: skip


@IN_A_BROWSER
@pytest.mark.parametrize(("width", "dark"), [*itertools.product((390, 1280, 3840), (False, True))])
def test_it_fits_and_can_be_read(browser, page, width, dark):
    browser.resize(width, dark=dark)
    browser.open(page)
    browser.run("for (const d of document.querySelectorAll('details')) d.open = true")
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run(CONTRAST) == {}
    assert browser.console() == []


@IN_A_BROWSER
def test_findings_are_filtered_by_what_they_have_in_common(opened):
    everything = opened.run(f"return {SHOWN}")
    assert len(everything) == 11
    choose(opened, "select[name=status]", "mismatch")
    assert len(opened.run(f"return {SHOWN}")) == 6
    choose(opened, "select[name=phase]", "backward")
    assert opened.run("return document.querySelector('#findings output').textContent") == "3 of 11"
    assert opened.run("return document.getElementById('unsupported').hidden") is True
    choose(opened, ".search", "t_copy")
    (only,) = opened.run(f"return {SHOWN}")
    assert "aten::t_copy" in opened.run("return document.getElementById(arguments[0]).textContent", only)
    opened.run("document.querySelector('#findings .clear').click()")
    assert opened.run(f"return {SHOWN}") == everything


@IN_A_BROWSER
def test_findings_are_sorted(opened):
    choose(opened, "select.sort", "ULP")
    figures = opened.run("""
        const articles = [...document.querySelectorAll("#mismatch article")];
        return articles.map(article => new Map(JSON.parse(article.dataset.ranks)).get("ULP"));
    """)
    assert figures == sorted(figures, reverse=True)
    assert figures[:2] == [8_388_608, 73_912]


@IN_A_BROWSER
def test_figures_that_json_lacks_leave_the_script_of_a_page_whole(tmp_path):
    """NaN and infinities on one side have an excess of infinity, of which JSON.parse knows nothing."""
    data, meta = DataFile.create(tmp_path / "x.shadowrun", RunInfo("npu", "cpu")), TensorMeta("f32", (2,), (1,))
    for seq, excess in enumerate((float("inf"), float("nan"), 3.0, -1.0)):
        place = data.context_id(f"aten::op{seq}", "", ("f32",), "", "", Phase.FORWARD, "a.py:1 in f", "npu")
        data.add_diffs(seq, [TensorDiff("output 0", meta, meta, 2, 1, 1, 1.0, excess_actual=excess)])
        verdict = data.verdict_id(Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "wrong", "evidence"))
        data.add((seq, 0, place, verdict, 1.0, 1.0, -1.0, -1.0))
    data.close()
    page = report.render(load(tmp_path / "x.shadowrun"), "html")
    ranks = re.findall(r'data-(?:ranks|facets)="([^"]*)"', page)
    assert len(ranks) >= 8
    for text in ranks:
        json.loads(html.unescape(text), parse_constant=pytest.fail)


def test_tables_are_sorted_by_what_their_figures_mean(opened):
    column = """
        const table = document.querySelector("#operators table"), heads = [...table.querySelectorAll("thead th")];
        const at = heads.findIndex(h => h.textContent.startsWith(arguments[0]));
        heads[at].querySelector("button").click();
        return [heads[at].ariaSort, [...table.querySelectorAll("tbody tr")].map(r => r.cells[at].textContent)];
    """
    order, texts = opened.run(column, "target")
    assert order == "descending"
    micro = [float(t.split()[0]) * {"ms": 1000, "µs": 1}[t.split()[1]] if t != "-" else -1 for t in texts]
    assert micro == sorted(micro, reverse=True)
    assert {"9.22 ms", "-"} < set(texts)
    order, texts = opened.run(column, "operator")
    assert order == "ascending"
    assert texts == sorted(texts)


@IN_A_BROWSER
def test_a_table_shows_the_rows_with_some_words(opened):
    shown = opened.run("""
        const box = document.querySelector("#operators .table"), search = box.querySelector(".search");
        search.value = "SOFTMAX mismatch";
        search.dispatchEvent(new Event("input", {bubbles: true}));
        return [...box.querySelectorAll("tbody tr")].filter(r => !r.hidden).map(r => r.cells[0].textContent);
    """)
    assert shown == ["aten::_softmax"]


@IN_A_BROWSER
def test_operators_are_filtered_by_their_outcome(opened):
    shown = opened.run("""
        const tools = document.querySelector("#operators .tools");
        for (const choice of tools.querySelectorAll(".choice")) choice.checked = choice.value === "fallback";
        tools.dispatchEvent(new Event("input"));
        const rows = [...document.querySelectorAll("#operators tbody tr")];
        return rows.filter(row => !row.hidden).map(row => row.cells[0].textContent);
    """)
    assert shown == ["aten::cumsum"]


@IN_A_BROWSER
def test_a_command_is_copied(opened):
    opened.run("navigator.clipboard.writeText = async text => { window.copied = text; }")
    command = "const code = document.createElement('code'); code.textContent = 'shadowrun repro x';"
    command += "const button = Object.assign(document.createElement('button'), {className: 'copy'});"
    command += "document.querySelector('dd').append(code, button);"
    command += "document.querySelector('dd').replaceChildren(code, button); button.click(); return window.copied"
    assert opened.run(command) == "shadowrun repro x"


@IN_A_BROWSER
def test_pictures_and_trees_are_within_the_page_on_a_phone(browser, page):
    browser.resize(390)
    browser.open(page)
    wide = """
        const outside = node => node.getBoundingClientRect().right > innerWidth + 1;
        return [...document.querySelectorAll("figure, .tree .row, .table")].filter(outside).map(node => node.className);
    """
    assert browser.run(wide) == []


@IN_A_BROWSER
def test_a_link_opens_what_is_folded_or_filtered_away(opened):
    choose(opened, "select[name=status]", "unsupported")
    opened.run("document.getElementById('fold').click()")
    opened.run("location.hash = '#finding-9'")
    state = (
        "const f = document.getElementById('finding-9'); return [f.checkVisibility(), f.querySelector('details').open]"
    )
    assert opened.run(state) == [True, True]


@IN_A_BROWSER
def test_what_a_figure_means_is_shown_on_the_spot(opened):
    text = "const help = document.querySelector('#operators a.help[href=\"#help-ulp\"]'); help.click();"
    text += "const tip = document.getElementById('tip'); return [tip.matches(':popover-open'), tip.textContent]"
    shown, words = opened.run(text)
    assert shown
    assert words.startswith("Units in the last place")


@IN_A_BROWSER
def test_without_script_all_is_there(browser, page):
    browser.javascript(on=False)
    try:
        browser.open(page)
    finally:
        browser.javascript(on=True)
    assert len(browser.run(f"return {SHOWN}")) == 11
    assert (
        browser.run("return [...document.querySelectorAll('.tools, button')].filter(n => n.checkVisibility()).length")
        == 0
    )
    assert browser.run("return document.querySelectorAll('details:not([name]) > summary').length") > 20


def document(*blocks):
    return Document("many", blocks, {}, Records((), ()))


def test_what_is_beyond_the_first_rows_opens():
    rows = tuple((f"op{n}", str(n)) for n in range(30))
    table = Table(
        (Column("operator", "name"), Column("calls", "number")), rows, noun="operators", limits=Limits(html=8)
    )
    text = render(document(Section("Operators", (table,))), "html")
    before, _, after = text.partition("… and 22 more operators</summary>")
    assert "op7<" in before
    assert "op8<" not in before
    assert "op29<" in after
    assert "not in this page" not in text


def test_a_page_is_bounded_whatever_the_run():
    entries = tuple(Entry("x" * 120, (), "y" * 9000, anchor=f"finding-{n}") for n in range(3000))
    table = Table((Column("a"),), tuple(("z" * 9000,) for _ in range(3000)), noun="rows")
    text = render(document(Section("Many", (Entries(entries, noun="findings"), table))), "html")
    assert 100_000 < len(text.encode()) <= MAX_BYTES
    assert "more are not in this page, which is bounded" in text


def test_two_sections_of_one_title_have_two_ids():
    text = render(document(Section("Same", ()), Section("Same", ())), "html")
    assert 'id="same"' in text
    assert 'href="#same-2"' in text


@IN_A_BROWSER
def test_a_section_called_findings_has_no_filter_of_findings(browser, tmp_path):
    """As the difference of two runs has: its script ended at the section, and with it links, copies and helps."""
    rows = tuple((f"row {n}",) for n in range(30))
    path = tmp_path / "diff.html"
    path.write_text(render(document(Section("Findings", (Table((Column("a"),), rows, noun="rows"),))), "html"), "utf-8")
    browser.open(path, "#findings")
    assert browser.console() == []
    assert browser.run("return document.querySelectorAll('.tools .search').length") == 1


@pytest.mark.parametrize("kind", ["txt", "md"])
def test_other_formats_make_no_pictures(sample, kind):
    run = Run(sample.build())
    run.origins = None  # what only pages ask for
    assert report.render(run, kind)


class Places(HTMLParser):
    """Where a page says that something is left out: the innermost tag and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.found: list[tuple[str, str]] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "input"):
            self.tags.append(tag)

    def handle_endtag(self, tag):
        self.tags.pop()

    def handle_data(self, data):
        if re.search(r"… and [\d,]+ more", data):
            self.found.append((self.tags[-1], data))


def test_all_that_is_left_out_opens():
    data = DataFile.create(None, RunInfo("npu", "cpu"))
    verdicts = [
        Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "scaled"),
        Verdict(Status.UNSUPPORTED, Cause.MISSING_OPERATOR, "no kernel"),
        Verdict(Status.UNVERIFIED, None, "budget"),
    ]
    for seq in range(3 * 120):
        op, verdict = f"aten::op{seq % 120}", verdicts[seq // 120]
        number = data.verdict_id(verdict, "aten::missing")
        for n in range(8):
            place = f"net.py:{n} in f"
            context = data.context_id(op, f"f32[{n}]", ("f32",), f"[{n}]", f"Net.{n}", Phase.FORWARD, place, "npu:0")
            data.add((8 * seq + n, seq, context, number, 1.0, 1.0, 0.5, 0.5))
        data.add_skipped({(op, "npu:0", "view"): 1})
    data.close()
    page = Places()
    page.feed(report.render(Run(data), "html"))
    assert {"… and 112 more", "… and 70 more"} & {text for _, text in page.found}
    # The table of steps is followed by one of all of them.
    others = [(tag, text) for tag, text in page.found if tag not in ("summary", "a", "script")]
    assert [text for _, text in others if "steps" not in text] == []


def test_every_column_is_explained():
    """By its name: one text for all reports, unless the column has its own."""
    missing = []
    for path in Path(shadowrun.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "Column"
                and node.args
            ):
                name, own = node.args[0], any(keyword.arg == "help" for keyword in node.keywords)
                if isinstance(name, ast.Constant) and name.value not in HELP and not own:
                    missing.append((path.name, name.value))
    assert not missing


def test_a_sentence_that_names_some_things_opens_the_others():
    text = render(document(Note(naming("Stopped: ", [f"n{i}" for i in range(9)], 4, "."), "warn")), "html")
    assert '<div class="remark"><details class="more"><summary>Stopped: n0, n1, n2, n3 … and 5 more.</summary>' in text
    assert "n4, n5, n6, n7, n8</details></div>" in text
    assert naming("Stopped: ", ["a"], 4, ".") == "Stopped: a."
    fact = Fact("inputs from", "a … and 1 more", opens=("b",))
    assert '<details class="more"><summary>a … and 1 more</summary>b</details>' in render(
        document(Facts((fact,))), "html"
    )
