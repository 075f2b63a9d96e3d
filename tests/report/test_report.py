"""Reports against golden files, and the promises that hold for any run.

``SHADOWRUN_GOLDEN=1 pytest tests/report`` writes the golden files anew; read the diff before committing it.
"""

from __future__ import annotations

import base64
import difflib
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shadowrun import report
from shadowrun.errors import UsageError
from shadowrun.report.document import Document, Fact, Facts, Records, render
from shadowrun.report.formats.terminal import render_terminal
from shadowrun.report.formatting import overhead, percent
from shadowrun.report.run_report import run_document
from shadowrun.run import Run
from shadowrun.store import DataFile
from shadowrun.types import Cause, Phase, RunInfo, Status, TensorDiff, TensorMeta, Verdict
from tests.golden_kit import content

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def run(sample) -> Run:
    return Run(sample.build())


def scrub(text: str) -> str:
    """Versions and the start are those of the made-up run; only what differs between machines goes."""
    return re.sub(r"\d{4}-\d\d-\d\dT[\d:]+Z", "<time>", content(text))


def check(name: str, text: str) -> None:
    golden, actual = GOLDEN / name, scrub(text)
    if os.environ.get("SHADOWRUN_GOLDEN"):
        golden.write_text(actual, encoding="utf-8")
    expected = golden.read_text(encoding="utf-8")
    changes = difflib.unified_diff(expected.splitlines(), actual.splitlines(), name, "actual", lineterm="", n=1)
    assert actual == expected, "\n".join(changes)


@pytest.mark.parametrize("kind", ["txt", "md", "json", "csv", "html"])
def test_golden(run: Run, kind: str) -> None:
    check(f"report.{kind}", report.render(run, kind))


@pytest.mark.parametrize("width", [80, 120])
def test_golden_terminal(run: Run, width: int) -> None:
    text = render_terminal(run_document(run), width=width, colour=False)
    assert max(map(len, text.splitlines())) <= width
    check(f"terminal-{width}.txt", text)


def test_colour_is_asked_for_and_no_color_obeyed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[1;31m" in render_terminal(run_document(run), width=80, colour=True)
    assert "\x1b[" not in render_terminal(run_document(run), width=80, colour=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31m" not in render_terminal(run_document(run), width=80, colour=True)


def test_the_last_line_is_the_verdict(run: Run) -> None:
    assert report.render(run, "txt").splitlines()[-1].startswith("FAILED: 2 unsupported, 1 error, 5 mismatches")


def strict(text: str) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_is_strict_and_spells_out_what_is_not_finite(run: Run) -> None:
    document = strict(report.render(run, "json"))
    softmax = next(f for f in document["findings"] if f["op"] == "aten::_softmax")
    assert softmax["worst"]["worst_actual"] == "nan"
    exp = next(f for f in document["findings"] if f["op"] == "aten::exp")
    assert exp["worst"]["worst_expected"] == "inf"
    assert document["format"] == 1
    assert list(document) == sorted(document)


def test_the_keys_of_the_json_are_documented(run: Run) -> None:
    page = (Path(__file__).parents[2] / "docs" / "datafile.md").read_text()
    table = page.split("## The JSON report")[1]
    assert {
        key for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)
    } == set(strict(report.render(run, "json")))


class Page(HTMLParser):
    """Tags and attributes; fails on tags that are not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parse(text: str) -> Page:
    page = Page()
    page.feed(text)
    assert page.open == []
    return page


def test_html_is_one_file_without_network(run: Run) -> None:
    text = report.render(run, "html")
    page = parse(text)
    assert not re.search(r"https?://|//\w+\.|@import|url\(", text)
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert [attributes for tag, attributes in page.tags if tag == "script"] == [{}]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on") or name == "src"]
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = {attributes["href"] for tag, attributes in page.tags if tag == "a"}
    assert links
    assert links <= {"#" + target for target in ids}


def test_only_the_page_s_own_script_may_run(run: Run) -> None:
    text = report.render(run, "html")
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text


EVIL = "<script>alert(1)</script>[bold]|`*_\x1b[31m"


def hostile(n: int = 1, text: str = EVIL) -> Run:
    """A run whose names are all made to break out."""
    data = DataFile.create(None, RunInfo("npu", "cpu", argv=(text,), notes=(text,), versions={text: text}))
    meta = TensorMeta("f32", (4,))
    for i in range(n):
        op = f"{text}{i}"
        number = data.context_id(op, text, (text,), text, text, Phase.FORWARD, text, text)
        kinds = (Status.UNSUPPORTED, Status.MISMATCH, Status.UNVERIFIED, Status.ERROR, Status.ERROR)
        for j, status in enumerate(kinds):
            seq = i * len(kinds) + j
            cause = Cause.HARNESS if j == 4 else Cause.IMPLEMENTATION
            data.add_diffs(seq, [TensorDiff(text, meta, meta, 4, 1, 1, detail=text)])
            data.add((seq, 0, number, data.verdict_id(Verdict(status, cause, text, text), op), 1.0, 1.0, 1.0, 1.0))
        data.add_skipped({(op, "cpu", text): 1})
    data.close()
    return Run(data)


def test_html_escapes_names() -> None:
    run = hostile()
    for text, n_scripts in ((report.render(run, "html"), 1), (run._repr_html_(), 0)):
        parse(text)
        assert text.count("<script") == n_scripts
        assert "&lt;script&gt;" in text


def test_a_command_stands_apart_from_its_label_and_under_the_texts() -> None:
    facts = Facts((Fact("a label longer than most", "the text"), Fact("one call again", "shadowrun x", command=True)))
    text = render(Document("t", (facts,), {}, Records((), ())), "txt")
    (line,) = (line for line in text.splitlines() if "shadowrun x" in line)
    (above,) = (line for line in text.splitlines() if "the text" in line)
    assert line.index("shadowrun x") == above.index("the text")


def test_markdown_and_text_take_no_markup_from_names() -> None:
    run = hostile()
    markdown = report.render(run, "md")
    assert "<script" not in markdown
    assert not re.search(r"(?<!\\)\[bold", markdown)
    text = report.render(run, "txt")
    assert "[bold]" in text
    assert "\x1b" not in text + markdown + report.render(run, "html")


@functools.cache
def large() -> Run:
    return hostile(500, "x" * 3000)  # its page would have 6 MB


@pytest.mark.parametrize("kind", ["txt", "md", "html"])
def test_reports_are_bounded(kind: str) -> None:
    text = report.render(large(), kind)
    assert len(text.encode()) < {"html": 5_000_000, "md": 1 << 20, "txt": 200_000}[kind]
    assert "more" in text


def test_write_chooses_by_extension(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, start in {"a.json": "{", "a.md": "# npu", "a.HTML": "<!DOCTYPE html>", "a.txt": "shadowrun"}.items():
        run.write(tmp_path / name)
        assert (tmp_path / name).read_text().startswith(start)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.HTML", "a.json", "a.md", "a.txt"]
    run.write("-", format="json")
    assert strict(capsys.readouterr().out)["passed"] is False


def test_errors_of_write(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'x.pdf' names no format: use .* .txt, .md, .json, .csv, .html") as caught:
        run.write("x.pdf")
    assert caught.value.slug == "unknown-format"
    with pytest.raises(UsageError, match="no report format 'pdf'"):
        run.write("x.txt", format="pdf")
    with pytest.raises(UsageError, match="cannot be written") as caught:
        run.write(tmp_path / "missing" / "x.txt")
    assert caught.value.slug == "unwritable-report"


def test_overhead_in_words() -> None:
    assert overhead(RunInfo("a", "b", wall_s=3.42, own_s=2.12)) == (
        "shadowrun took 62 % of the 3.42 s wall time; the program alone would have taken about 1.3 s (×2.6)"  # noqa: RUF001
    )
    assert overhead(RunInfo("a", "b")) == ""
    assert "alone" not in overhead(RunInfo("a", "b", wall_s=1.0, own_s=1.5))


def test_percentages_do_not_claim_all_or_nothing() -> None:
    assert [percent(n, 1000) for n in (0, 1, 500, 999, 1000)] == ["0 %", "< 1 %", "50 %", "> 99 %", "100 %"]


def test_an_unfinished_run_says_so() -> None:
    data = DataFile.create(None, RunInfo("npu", "cpu"))
    assert "The run still records, was killed" in report.render(Run(data), "txt")


def test_internal_failures_are_shown_apart(run: Run) -> None:
    text = report.render(run, "txt")
    assert "3 error 6 unverified 544 skipped 3 own failures" in " ".join(text.split())
    assert "aten::bmm" in text.split("shadowrun's own failures")[1]


@pytest.mark.parametrize("kind", ["txt", "html", "json", "md", "csv"])
def test_an_empty_run_can_be_reported(kind: str) -> None:
    assert report.render(Run(DataFile.create(None, RunInfo("npu", "cpu"))), kind)


def test_reports_need_no_torch(tmp_path: Path, sample) -> None:
    path = tmp_path / "x.shadowrun"
    sample.build(path)
    code = (
        "import sys; from shadowrun.run import load; from shadowrun.report import FORMATS, render; "
        f"run = load({str(path)!r}); [render(run, f) for f in FORMATS]; print('torch' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert out.stdout.strip() == "False"
