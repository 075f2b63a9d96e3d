"""Which mitigations are tried, in which combinations, and what the report says of them."""

import dataclasses
import itertools
import json
import math
import re

import numpy as np
import pytest

from shadowrun.errors import PlatformError, UsageError
from shadowrun.platforms.spec import parse
from shadowrun.report.document import render
from shadowrun.studies.grid import RECORDED, Cell
from shadowrun.studies.mitigate import sweep as sweeping
from shadowrun.studies.mitigate.mitigations import chosen, conflicts, platform_under, why_not_applicable
from shadowrun.studies.mitigate.report import mitigation_document
from shadowrun.studies.mitigate.sweep import Seconds, Sweep, Trial
from tests.studies.classes.conftest import recorded

EVERY = {m.name: m for m in chosen(further=["onednn_isa=AVX2"])}
PLATFORMS = ("cpu", "cpu[threads=1]", "cpu[isa=default]")


def test_settings_of_mitigations_replace_those_of_the_platform():
    spec = parse("cpu[threads=4,mkldnn=on,env:MKL_CBWR=AVX2]")
    under = platform_under(spec, [EVERY["threads=1"], EVERY["mkl_cbwr=COMPATIBLE"], EVERY["float64"]])
    assert str(under) == "cpu[mkl_cbwr=COMPATIBLE,mkldnn=on,threads=1]"
    assert platform_under(spec, []) == spec
    for mitigation in EVERY.values():
        assert str(platform_under(parse("cpu"), [mitigation])) == "cpu" + f"[{mitigation.settings}]" * bool(
            mitigation.settings
        )


def test_what_is_chosen():
    assert [m.name for m in chosen(["threads=1", "truncate=4"], bits=[4])] == ["threads=1", "truncate=4"]
    assert [m.name for m in chosen(["threads=1"], bits=[4])] == ["threads=1", "truncate=4"], (
        "what was asked for is there"
    )
    assert [m.name for m in chosen(["threads=1"])] == ["threads=1"]
    assert not conflicts([EVERY["threads=1"], EVERY["float64"]])
    assert conflicts([EVERY["truncate=8"], EVERY["truncate=16"]])
    assert conflicts([EVERY["mkldnn=off"], *chosen(["mkldnn=off"], further=["mkldnn=on"])[1:]])
    assert conflicts([EVERY["isa=default"], *chosen(["isa=default"], further=["isa=avx2"])[1:]])
    with pytest.raises(UsageError, match=r"--only 'thread=1' is no mitigation\. Did you mean 'threads=1'"):
        chosen(["thread=1"])
    with pytest.raises(UsageError, match="--truncate 53"):
        chosen(bits=[53])
    with pytest.raises(PlatformError, match="Unknown setting 'color'"):
        chosen(further=["color=red"])


def test_what_is_not_applicable():
    plain = recorded("a", [("", "aten::mm", [], [np.ones(2, np.float32)])], {"mkl": "2026"})
    why = {name: why_not_applicable(m, plain) for name, m in EVERY.items()}
    assert why["tf32=off"] == why["bf16_reduction=off"] == "the program made no call on a CUDA device"
    assert why["mkldnn=off"] == "this torch was built without oneDNN"
    assert why["float64"] == why["truncate=8"] == "the program calls no torch.nn.Module, which the wrapper needs"
    assert why["mkl_cbwr=COMPATIBLE"] == why["threads=1"] == why["deterministic"] == ""
    module = recorded("a", [("fc", "aten::mm", [], [np.ones((2, 2), np.float16)])])
    why = {name: why_not_applicable(m, module) for name, m in EVERY.items()}
    assert why["channels_last"] == "no module of the program has a result with 4 dimensions"
    assert why["truncate=16"] == "no result of a module has more than 16 mantissa bits"
    assert why["float64"] == why["truncate=8"] == ""
    assert why["mkl_cbwr=COMPATIBLE"] == "this torch was built without MKL"
    images = recorded("a", [("conv", "aten::convolution", [], [np.ones((1, 2, 3, 3), np.float64)])])
    assert why_not_applicable(EVERY["channels_last"], images) == ""
    assert why_not_applicable(EVERY["float64"], images) == "no module computes in a shorter format"


def trial(names, letters, processor=1.0, wall=None, *, digests=None, failed=()):
    labels = tuple(ord(letter) - ord("A") if letter != "-" else -1 for letter in letters)
    cells = tuple(
        Cell(platform, f"{n}.shadowrec", "SIGILL" if n in failed else RECORDED, note="crashed" * (n in failed))
        for n, platform in enumerate(PLATFORMS)
    )
    seconds = tuple(Seconds(processor, processor if wall is None else wall) for _ in cells) if processor else ()
    return Trial(
        *(tuple(EVERY[name] for name in names), cells, len(cells), labels),
        *(tuple((label,) for label in labels) if digests is None else digests, (20, 23), 3, (), seconds),
    )


def swept(*singles, combinations=(), base="ABC"):
    before = trial([], base, digests=((7,), (8,), (9,)))
    return Sweep("x.py", PLATFORMS, ("fc/aten::mm",), before, singles, combinations, {"tf32=off": "no CUDA"}, 0, 1)


def names(candidates):
    return [[m.name for m in mitigations] for mitigations in candidates]


def test_combinations_that_should_leave_fewest_classes_come_first_then_the_cheapest():
    found = swept(
        trial(["threads=1"], "AAB", 2.0),
        trial(["isa=default"], "ABA", 3.0),
        trial(["mkldnn=off"], "ABA", 1.5),
        trial(["channels_last"], "ABC", 0.5),
        trial(["mkl_cbwr=COMPATIBLE"], "ABC", digests=((7,), (8,), (9,))),  # without any effect: in no combination
        trial(["deterministic"], "AA-", failed=[2]),  # it fails on a platform
    )
    expected = names(sweeping._candidates(found))
    assert expected[:3] == [
        ["threads=1", "mkldnn=off", "channels_last"],
        ["threads=1", "mkldnn=off"],
        ["threads=1", "isa=default", "channels_last"],
    ]
    assert len(expected) == 2**4 - 4 - 1
    assert found.best.name == "mkldnn=off", "two classes, and the cheapest"


def test_what_is_enough_alone_is_in_no_combination_and_dearer_ones_are_left_out():
    found = swept(
        trial(["threads=1"], "AAB", 0.5),
        trial(["mkldnn=off"], "ABA", 1.5),
        trial(["isa=default"], "ABA", 4.0),
        trial(["float64"], "AAA", 3.0),
    )
    # isa=default costs 2.0 with threads=1, and 3.0 with mkldnn=off too; float64 alone costs 3.0.
    assert names(sweeping._candidates(found)) == [["threads=1", "mkldnn=off"], ["threads=1", "isa=default"]]
    assert found.best.name == "float64"
    solved = swept(*found.singles, combinations=[trial(["threads=1", "mkldnn=off"], "AAA", 0.8)])
    assert names(sweeping._candidates(solved)) == []
    assert solved.best.name == "threads=1 + mkldnn=off"


def test_truncations_are_not_combined():
    found = swept(trial(["truncate=8"], "ABB"), trial(["truncate=16"], "AAB"), trial(["threads=1"], "AAB"))
    assert ["truncate=8", "truncate=16"] not in names(sweeping._candidates(found))
    assert len(names(sweeping._candidates(found))) == 2


@pytest.mark.parametrize("labels", list(itertools.product(range(3), repeat=3)))
def test_expected_classes_are_the_connected_parts(labels):
    other = (0, 1, 0)
    joined = {i: {j for j in range(3) if labels[i] == labels[j] or other[i] == other[j]} for i in range(3)}
    for k, i, j in itertools.product(range(3), repeat=3):
        if k in joined[i] and j in joined[k]:
            joined[i].add(j)
    assert sweeping._expected_classes([labels, other]) == len({frozenset(part) for part in joined.values()})


class Runner:
    """Stands for the processes: each set of mitigations has these classes and this time."""

    platforms = PLATFORMS
    n_runs = 1
    n_planned = 0

    def __init__(self, outcomes):
        self.outcomes = outcomes
        self.tried = []

    def plan(self, n_trials):
        self.n_planned += n_trials * 6

    def record(self, mitigations):
        self.tried.append(" + ".join(m.name for m in mitigations))

    def trial(self, mitigations, _found):
        return trial([m.name for m in mitigations], *self.outcomes[self.tried[-1]])

    def time(self, trials):
        return list(trials)


def test_combinations_are_tried_until_none_can_be_better():
    found = swept(
        trial(["threads=1"], "AAB", 2.0), trial(["isa=default"], "ABA", 3.0), trial(["mkldnn=off"], "ABA", 1.5)
    )
    # The first leaves two classes, against expectation; the next leaves one, and costs less than the third would.
    outcomes = {"threads=1 + mkldnn=off": ("AAB", 3.0), "threads=1 + isa=default": ("AAA", 4.0)}
    runner = Runner(outcomes)
    result = sweeping._with_combinations(found, runner, 12)
    assert runner.tried == list(outcomes)
    assert (result.best.name, result.n_untried) == ("threads=1 + isa=default", 0)
    assert [t.name for t in result.combinations] == list(outcomes)
    assert runner.n_planned == 2 * (6 + 3)
    runner = Runner(outcomes)
    limited = sweeping._with_combinations(found, runner, 1)
    assert (runner.tried, limited.n_untried) == (["threads=1 + mkldnn=off"], 3)
    assert limited.best.name == "mkldnn=off"


def test_classes_are_of_all_outputs_together():
    def run(first, second):
        values = [("fc", "aten::mm", [], [np.float32([first])]), ("out", "aten::relu", [0], [np.float32([second])])]
        return recorded("a", values)

    recordings = [run(1, 1), run(1, 2), run(1, 1)]
    found = sweeping._Results.from_recordings(recordings, PLATFORMS, ["*/aten::mm", "*/aten::relu"])
    assert found.outputs == ("fc/aten::mm", "out/aten::relu")
    assert found.labels == (0, 1, 0)
    assert (found.bits, found.ignored) == ((0, 23), None), "another exponent: no number of bits to ignore"
    near = float(np.nextafter(np.float32(1), np.float32(2)))
    found = sweeping._Results.from_recordings([run(1, 1), run(1, near)], PLATFORMS[:2], ["*/aten::relu"])
    assert (found.labels, found.bits, found.ignored) == ((0, 1), (22, 23), 1)
    with pytest.raises(UsageError, match="no recorded call matches"):
        sweeping._Results.from_recordings(recordings, PLATFORMS, ["nothing"])


def test_random_numbers_that_differ_are_named():
    def run(drawn):
        return recorded("a", [("", "aten::rand", [], [np.float32([drawn])]), ("", "aten::exp", [0], [np.float32([2])])])

    assert sweeping._differing([run(1), run(2)]) == ("random numbers of aten::rand",)
    assert sweeping._differing([run(1), run(1)]) == ()


@pytest.fixture
def found():
    return swept(
        trial(["threads=1"], "AAB", 0.5, 0.9),
        trial(["isa=default"], "A-A", 0, failed=[1]),
        combinations=[trial(["threads=1", "mkldnn=off"], "AAA", 0.8, 1.6)],
    )


def test_the_report(found):
    text = render(mitigation_document(found), "txt")
    assert "as it is: 3 classes" in text
    words = " ".join(text.split())
    assert "cheapest that leaves one class: threads=1 + mkldnn=off, 0.80 times the processor time, 1.60 times" in words
    assert "processors stand idle" in words
    assert re.search(r"^threads=1 +2 +3 +20 of 23 +3 +0\.50 +0\.90$", text, re.MULTILINE)
    assert re.search(r"^isa=default +1 +3 +20 of 23 +3 +- +- +fails on 1 platform$", text, re.MULTILINE)
    assert re.search(r"^isa=default +cpu\[threads=1\] +SIGILL +crashed$", text, re.MULTILINE)
    assert re.search(r"^tf32=off +no CUDA$", text, re.MULTILINE)
    assert re.search(r"^threads=1 +A +A +B$", text, re.MULTILINE)
    data = json.loads(render(mitigation_document(found), "json"))
    assert data["best"] == ["threads=1", "mkldnn=off"]
    assert [t["processor_time_ratio"] for t in data["trials"]] == [1.0, 0.5, None, 0.8]
    assert data["trials"][2]["classes"] == ["A", None, "A"]
    assert math.isnan(found.singles[1].ratio(found.base, "wall"))


def test_time_is_of_the_platforms_that_ran_both():
    base, slow = trial([], "ABC", 2.0), trial(["threads=1"], "ABC", 3.0)
    failed = dataclasses.replace(slow, seconds=(None, *slow.seconds[1:]))
    assert slow.ratio(base, "wall") == failed.ratio(base, "processor") == 1.5
    assert math.isnan(dataclasses.replace(slow, seconds=(None,) * 3).ratio(base, "wall"))


def test_platforms_that_agree_need_nothing():
    text = render(mitigation_document(swept(trial(["threads=1"], "AAA", 0.5), base="AAA")), "txt")
    assert "the platforms agree already: no mitigation is needed" in text
