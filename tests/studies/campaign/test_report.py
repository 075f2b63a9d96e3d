import json
import re
import shlex
from dataclasses import replace

import pytest

from shadowrun.report.document import render
from shadowrun.studies.campaign.causes.cause_report import CauseFile, cause_document
from shadowrun.studies.campaign.causes.root_causes import Seen, is_compiled, root_causes
from shadowrun.studies.campaign.oracles import FIRED, ORACLES, to_mask
from shadowrun.studies.campaign.report import campaign_document
from shadowrun.studies.campaign.run_variants import VariantFinding
from shadowrun.studies.campaign.summary import Platform, Summary, count_oracles, upper_bound

MM = VariantFinding(
    "aten::mm", "f32", "mismatch", "reduced precision", "inputs rounded to bf16", "4e4 units", "forward"
)
EVIL = VariantFinding("aten::\x1b[31mmm", "f32", "crash", "", "<script>alert(1)</script>", "a|b\nc")


def masks(*sets):
    return [(to_mask(frozenset(names)), n) for names, n in sets]


def summary(findings=(), **changes):
    counted, n_compared, n_fired = count_oracles(
        [*masks(((), 90), (("bitwise", "shadowrun", FIRED), 6), (("bitwise", FIRED), 4)), (-1, 5)]
    )
    sim = Platform(
        "sim (matmul-in-bf16)", {"ok": 94, "finding": 6, "invalid": 1}, {"ok": 38, "unsupported": 2}, 40,
        ("aten::cumsum", "aten::lerp.Scalar"), counted, n_compared, n_fired, {"reduced precision": 6}, 0, 2500.0,
    )  # fmt: skip
    facts = {
        "title": "sim against cpu",
        "stages": (("programs", 120, 100, {"random": 20}),),
        "platforms": (sim,),
        "root_causes": tuple(root_causes(findings, 1)),
        "validity": {"insert": (50, 50), "pad": (20, 15)},
        "n_variants": 101,
        "n_duplicates": 7,
        "is_simulated": True,
        "flaws": ("matmul-in-bf16",),
    }
    return Summary(**(facts | changes))


def test_oracles_are_counted():
    counted, n_compared, n_fired = count_oracles(
        [*masks(((), 90), (("bitwise", "shadowrun", FIRED), 6), (("bitwise", FIRED), 4), (("nnsmith",), 2)), (-1, 5)]
    )
    by_name = {o.name: o for o in counted}
    assert (n_compared, n_fired) == (102, 10)
    assert (by_name["bitwise"].n_differ, by_name["bitwise"].n_missed) == (10, 0)
    assert (by_name["shadowrun"].n_differ, by_name["shadowrun"].n_missed) == (6, 4)
    assert (by_name["nnsmith"].n_missed, by_name["nnsmith"].n_alone) == (10, 2)
    assert [o.name for o in counted] == list(ORACLES)


def test_nothing_is_missed_where_no_flaw_is_planted():
    flawed = render(campaign_document(summary()), "txt")
    clean = summary(flaws=())
    clean = replace(clean, platforms=(replace(clean.platforms[0], name="sim"),))
    text = render(campaign_document(clean), "txt")
    assert "false negatives" in flawed
    assert re.search(r"^bitwise +10 +10.00 %", text, re.MULTILINE)
    assert "false negatives" not in text
    assert "missed" not in text
    assert "each difference that an oracle reports is a false positive" in " ".join(text.split())


def test_a_rate_of_nothing_has_a_bound():
    assert upper_bound(0, 100_000) == pytest.approx(3e-5)
    assert upper_bound(1, 100) is None
    assert upper_bound(0, 0) is None


@pytest.mark.parametrize("kind", ["txt", "md", "json", "csv", "html"])
def test_every_format_has_the_root_cause(kind):
    text = render(campaign_document(summary([Seen(4, 0, 3, MM)])), kind)
    assert "aten::mm" in text
    assert "reduced precision" in text
    if kind == "json":
        data = json.loads(text)
        assert data["root_causes"][0]["n_variants"] == 1
        assert data["definitions"]["valid"]


def test_figures_of_the_tables():
    text = render(campaign_document(summary([Seen(n, 0, 3, MM) for n in range(6)])), "txt")
    for figure in ("5.0 %", "6.00 %", "40.00 %", "75.00 %", "6 variants, first in number 0", "120", "20 random"):
        assert figure in text, figure


def test_texts_of_a_file_are_sanitised():
    document = campaign_document(summary([Seen(4, 0, 3, EVIL)]))
    assert "\x1b" not in render(document, "txt")
    assert "<script>alert" not in render(document, "html")


def test_nothing_found_is_told_with_a_bound():
    text = render(campaign_document(summary()), "txt")
    assert "in 100 compared variants: at most 3 % at 95 %" in text
    assert "false positive" in render(campaign_document(summary(is_simulated=False, flaws=())), "txt")


def test_the_gate():
    found = [Seen(4, 0, 3, MM)]
    assert campaign_document(summary(found)).gate is None
    assert not campaign_document(summary(found), fail_on=frozenset({"mismatch"})).gate.passed
    assert campaign_document(summary(found), fail_on=frozenset({"crash"})).gate.passed
    nothing = summary(n_variants=0, platforms=())
    assert not campaign_document(nothing, fail_on=frozenset({"crash"})).gate.passed


def made(text, **facts):
    (cause,) = root_causes([Seen(4, 0, 3, MM)], 1)
    return {str(cause.signature): CauseFile(str(cause.signature), "[]", text=text, **facts)}


@pytest.mark.parametrize("kind", ["txt", "md", "json", "csv", "html"])
def test_a_page_for_an_issue(kind):
    text = "import torch\n\nif True:\n    print('a  b')\n"
    found = summary([Seen(4, 0, 3, MM)], scripts=made(text, said="1 on sim, 2 on cpu", exits=1))
    page = render(cause_document(1, found.root_causes[0], found), kind)
    assert "inputs rounded to bf16" in page
    assert "1 on sim, 2 on cpu" in page
    if kind == "md":
        title = "# aten::mm returns wrong values on sim (matmul-in-bf16): reduced precision, inputs rounded to bf16\n"
        assert page.startswith(title)
        assert f"```python\n{text}```" in page
    if kind == "json":
        assert json.loads(page)["script"] == text
    if kind in ("txt", "html"):
        assert "    print(" in page


def test_a_script_of_somebody_else_breaks_out_of_no_format():
    evil = "```\n</code><script>alert(1)</script>\n\x1b[31m red\u2028```"
    found = summary([Seen(4, 0, 3, MM)], scripts=made(evil))
    for document in (cause_document(1, found.root_causes[0], found), campaign_document(found)):
        assert render(document, "html").count("<script") == 1
        assert "\x1b" not in render(document, "txt") + render(document, "md") + render(document, "html")
        assert "````python\n```\n" in render(document, "md")


def test_a_recipe_of_somebody_else_is_one_word_of_a_shell():
    evil = '["ab",[["insert","\'; touch PWNED; \'"]],1]'
    scripts = {key: replace(one, recipe=evil + " ") for key, one in made("").items()}
    found = summary([Seen(4, 0, 3, MM)], scripts=scripts, recipes={4: evil})
    page = render(cause_document(1, found.root_causes[0], found), "md")
    shown = [line.partition("`")[2].rstrip("`") for line in page.splitlines() if "PWNED" in line]
    assert [shlex.split(text) for text in shown] == [[evil], [evil + " "]]


def test_what_is_known_is_apart_and_fails_nothing():
    found = [Seen(4, 0, 3, MM), Seen(5, 0, 3, EVIL)]
    key = next(str(c.signature) for c in root_causes(found, 1) if c.signature.op == "aten::mm")
    document = campaign_document(summary(found, known={key: "ticket 123"}), fail_on=frozenset({"mismatch"}))
    assert document.gate.passed
    assert "1 known issue" in document.gate.line
    text = render(document, "txt")
    assert "ticket 123" in text.partition("Known issues (1)")[2]
    assert "Root causes (1)" in text


def test_what_is_new_and_what_is_gone():
    found = [Seen(4, 0, 3, MM)]
    key = str(root_causes(found, 1)[0].signature)
    text = render(campaign_document(summary(found, new=frozenset({key}), gone=("mismatch aten::add",))), "txt")
    assert "1 new, 1 not found again" in text
    assert "the earlier campaign does not have it" in text
    assert "mismatch aten::add" in text.partition("Not found again (1)")[2].partition("Platforms")[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("npu", False),
        ("cpu[threads=1,mkldnn=off]", False),
        ("npu, inductor", True),
        ("sim (a-flaw, another)", False),
        ("sim (a-flaw, another), inductor", True),
    ],
)
def test_compiled_targets_are_known_by_their_name(name, expected):
    assert is_compiled(name) is expected
