"""Two recordings: which calls correspond, what each difference is credited to, and what the report says first."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from shadowrun.cli.main import main
from shadowrun.studies.diff.align import align, family, renamed
from shadowrun.studies.diff.name_map import NameMap, RowRule
from shadowrun.studies.diff.recordings import FAIL_ON, diff_recordings
from shadowrun.studies.diff.report_data import precision_figure
from shadowrun.studies.diff.rounding import Rounding
from shadowrun.studies.diff.values import Values
from tests.studies.diff.kit import Tape, f32, next_up

X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)


def program(path, *, product=None, relu=None, op="aten::mm", device="cpu", kernel=None, arguments="[]", x=X, **process):
    """A product and a ReLU of two leaves."""
    tape = Tape(path, **process)
    a, b = tape.leaf(x), tape.leaf(W)
    product = x @ W if product is None else product
    h = tape.call(
        op, [a, b], [product], module="fc", site="net.py:3", device=device, kernel=kernel, arguments=arguments
    )
    relu = np.maximum(product, 0) if relu is None else relu
    tape.call("aten::relu", [h], [relu], module="act", site="net.py:4", device=device)
    return tape


def diffed(tmp_path, first=None, second=None, names=None):
    a = program(tmp_path / "a.shadowrec", **(first or {})).read()
    b = program(tmp_path / "b.shadowrec", **(second or {})).read()
    return diff_recordings(a, b, names)


def outcomes(found):
    return [str(found.difference.outcome(pair)) for pair in range(len(found.difference.alignment.pairs))]


def test_equal_programs_are_equal(tmp_path):
    found = diffed(tmp_path)
    assert outcomes(found) == ["equal", "equal"]
    assert found.failures(frozenset(FAIL_ON)) == []


CHANGED = next_up(X @ W, 3)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ({"product": CHANGED}, ["algorithm", "input"]),
        ({"product": CHANGED, "kernel": "gemm_b"}, ["kernel", "input"]),
        ({"product": CHANGED, "device": "cuda"}, ["kernel", "input"]),
        ({"product": CHANGED, "arguments": "[2]"}, ["arguments", "input"]),
        ({"product": (X @ W).astype(np.float16)}, ["form", "input"]),
        ({"product": np.asfortranarray(X @ W)}, ["form", "equal"]),
        ({"product": np.asfortranarray(X @ W), "device": "cuda"}, ["equal", "equal"]),
        ({"x": next_up(X)}, ["input", "input"]),
        ({"product": CHANGED, "relu": np.maximum(X @ W, 0)}, ["algorithm", "equal"]),
        ({"relu": np.maximum(CHANGED, 0)}, ["equal", "algorithm"]),
    ],
)
def test_what_a_difference_is_credited_to(tmp_path, second, expected):
    assert outcomes(diffed(tmp_path, {"kernel": "gemm_a"}, second)) == expected


def test_names_of_devices_in_arguments_are_no_difference(tmp_path):
    first = {"arguments": '[{"tensor": null}, {"device": "cpu"}]'}
    second = {"arguments": '[{"tensor": null}, {"device": "cuda:1"}]', "device": "cuda"}
    assert outcomes(diffed(tmp_path, first, second)) == ["equal", "equal"]


def test_the_first_divergence_and_what_it_reaches(tmp_path):
    found = diffed(tmp_path, second={"product": CHANGED})
    (origin,) = found.flow.origins
    assert (origin.pair, origin.n_reached, origin.depth) == (0, 1, 1)
    assert found.flow.origin.tolist() == [0, 0]
    assert found.flow.parents_of(1) == [0]


def one_call(path, op, values, *, inputs=(X,), arguments="[]", kind="results"):
    tape = Tape(path)
    tape.call(op, [tape.leaf(i) for i in inputs], arguments=arguments, **{kind: [values]})
    return tape.read()


def judged(tmp_path, op, first, second, **call):
    recordings = [one_call(tmp_path / f"{n}.shadowrec", op, v, **call) for n, v in (("a", first), ("b", second))]
    (judgement,) = diff_recordings(*recordings).judgements.values()
    return judgement


LONG = np.random.default_rng(2).standard_normal(10_000).astype(np.float32) + np.float32(3)


@pytest.mark.parametrize(
    ("op", "first", "second", "rounding", "why"),
    [
        ("aten::add.Tensor", X, next_up(X), "yes", "all 32 elements"),
        ("aten::add.Tensor", f32(1.0), f32(1.0000001), "yes", "all elements, by digests"),
        ("aten::add.Tensor", X, next_up(X, 2), "no", "beyond"),
        ("aten::clone", X, next_up(X), "no", "rounds nothing"),
        ("aten::gt.Tensor", np.array([True]), np.array([False]), "no", "rounds nothing"),
        ("aten::argmax", np.array([1]), np.array([2]), "unknown", "leaves open"),
        ("aten::exp", f32(1.0, np.nan), f32(1.0, 2.0), "no", "NaN"),
        ("aten::uniform_", X, next_up(X, 9), "unknown", "random"),
        (
            "aten::tanh",
            LONG,
            np.where(np.arange(10_000) == 7, next_up(LONG, 2**20), next_up(LONG)),
            "yes",
            "64 samples",
        ),
        (
            "aten::tanh",
            LONG,
            np.where(np.arange(10_000) == 7, next_up(LONG, 2**20), LONG),
            "unknown",
            "equal in 64 samples of 10,000",
        ),
        ("aten::linalg_qr", X, 2 * X, "unknown", "no bound"),
    ],
)
def test_rounding(tmp_path, op, first, second, rounding, why):
    found = judged(tmp_path, op, first, second)
    assert (str(found.rounding), why in found.why) == (rounding, True), found


def test_rounding_of_a_product(tmp_path):
    exact = X @ W
    near = exact + np.float32(1e-7) * np.float32(np.linalg.norm(X) * np.linalg.norm(W)) / np.float32(8)
    assert judged(tmp_path, "aten::mm", exact, near, inputs=(X, W)).rounding is Rounding.YES
    assert judged(tmp_path, "aten::mm", exact, 2 * exact, inputs=(X, W)).rounding is Rounding.NO
    between = exact + np.float32(4e-6 * np.linalg.norm(X) * np.linalg.norm(W))
    assert judged(tmp_path, "aten::mm", exact, between, inputs=(X, W)).rounding is Rounding.UNKNOWN


@pytest.mark.parametrize("n", [1, 2, 5, 100])
def test_the_bounds_enclose_the_distance(tmp_path, n):
    values = np.full(40, 1.0, np.float32)
    found = judged(tmp_path, "aten::exp", values, next_up(values, n))
    assert found.min_ulp == n <= found.max_ulp < 2 * n + 1


def test_views_with_other_arguments_are_not_equal(tmp_path):
    recordings = []
    for name, index in (("a", 0), ("b", 1)):
        tape = Tape(tmp_path / f"{name}.shadowrec")
        row = tape.call("aten::select.int", [tape.leaf(X)], arguments=f"[0, {index}]", views=[X[index]])
        tape.call("aten::neg", [row], [-X[index]])
        recordings.append(tape.read())
    assert outcomes(diff_recordings(*recordings)) == ["arguments", "input"]


def test_a_view_in_the_order_of_its_base_is_as_good_as_a_copy(tmp_path):
    recordings = []
    for name, kind in (("a", "views"), ("b", "results")):
        tape = Tape(tmp_path / f"{name}.shadowrec")
        flat = tape.call("aten::view", [tape.leaf(X)], **{kind: [X.reshape(-1)]})
        tape.call("aten::neg", [flat], [-X.reshape(-1) if name == "a" else next_up(-X.reshape(-1))])
        recordings.append(tape.read())
    assert outcomes(diff_recordings(*recordings)) == ["equal", "algorithm"]


def test_what_is_not_digested_is_not_called_equal(tmp_path):
    recordings = []
    for name in "ab":
        tape = Tape(tmp_path / f"{name}.shadowrec")
        tape.call("aten::sparse", [tape.leaf(X)], [X], digested=False)
        tape.call("aten::empty.memory_format", [], [X], digested=False)
        recordings.append(tape.read())
    # The values of an uninitialised tensor mean nothing.
    assert outcomes(diff_recordings(*recordings)) == ["not digested", "equal"]


def sequence(path, ops, *, module="", values=None):
    """Calls of one input each, a chain."""
    tape = Tape(path)
    row = tape.leaf(f32(0.0))
    for number, op in enumerate(ops):
        value = number if values is None else values[number]
        row = tape.call(f"aten::{op}", [row], [f32(value)], module=module)
    return tape.read()


def test_an_inserted_call_is_a_row_and_moves_no_other(tmp_path):
    a = sequence(tmp_path / "a.shadowrec", ["mm", "add", "mm", "mm", "relu"], values=[1, 2, 3, 4, 5])
    b = sequence(tmp_path / "b.shadowrec", ["mm", "add", "mm", "mm", "mm", "relu"], values=[1, 2, 9, 3, 4, 5])
    found = align(Values(a), Values(b))
    assert found.only_first.tolist() == []
    assert len(found.only_second) == 1
    assert found.pairs.tolist()[:2] == [[0, 0], [1, 1]]
    assert found.pairs.tolist()[-1] == [4, 5]


def test_inputs_decide_which_call_was_inserted(tmp_path):
    recordings = []
    for name, values in (("a", (1, 2, 3)), ("b", (1, 9, 2, 3))):
        tape = Tape(tmp_path / f"{name}.shadowrec")
        for value in values:
            tape.call("aten::neg", [tape.leaf(f32(value))], [f32(-value)])
        recordings.append(Values(tape.read()))
    found = align(*recordings)
    assert found.pairs.tolist() == [[0, 0], [1, 2], [2, 3]]
    assert found.only_second.tolist() == [1]


def test_counterparts_of_another_device(tmp_path):
    recordings = []
    for name, op in (
        ("a", "_scaled_dot_product_flash_attention_for_cpu"),
        ("b", "_scaled_dot_product_efficient_attention"),
    ):
        tape = Tape(tmp_path / f"{name}.shadowrec")
        q, k = tape.leaf(X), tape.leaf(W)
        extra = [f32(7)] if name == "b" else []
        tape.call(f"aten::{op}", [q, k], [X if name == "a" else next_up(X), *extra], module="attn")
        recordings.append(tape.read())
    found = diff_recordings(*recordings)
    assert found.difference.alignment.by == {"counterpart": 1}
    assert outcomes(found) == ["kernel"]


# -- another version of torch ----------------------------------------------------------------------


@pytest.mark.parametrize(("values", "by"), [((1, 2, 3), "equal"), ((9, 9, 3), "input")])
@pytest.mark.parametrize("renamed_op", ["_unsafe_view", "new_name"])
def test_a_renamed_operator_is_a_counterpart(tmp_path, renamed_op, values, by):
    a = sequence(tmp_path / "a.shadowrec", ["addmm", "view", "relu"], values=[1, 2, 3])
    b = sequence(tmp_path / "b.shadowrec", ["addmm", renamed_op, "relu"], values=values)
    found = diff_recordings(a, b)
    known = by == "equal" or renamed_op == "_unsafe_view"
    assert found.difference.alignment.by.get("counterpart", 0) == known
    assert outcomes(found)[1] == (by if known else "equal")
    # Of a name that is not known, equal inputs and results show that it is the same computation.
    assert found.n_missing == (0 if known else 2)


def test_counterparts_are_rows(tmp_path, capsys):
    values = [1, 2, 3, 4]
    files, out_file = (tmp_path / "a.shadowrec", tmp_path / "b.shadowrec"), tmp_path / "diff.json"
    sequence(files[0], ["addmm", "view", "relu", "view"], values=values)
    sequence(files[1], ["addmm", "_unsafe_view", "relu", "_unsafe_view"], values=[1, 2, 3, 5])
    _, out, _ = text_of(capsys, *files)
    assert "Counterparts (1)" in out
    assert "aten::view aten::_unsafe_view 2 1 1" in out
    text_of(capsys, *files, "-o", out_file)
    assert json.loads(out_file.read_text())["counterparts"] == [
        {"first": "aten::view", "second": "aten::_unsafe_view", "n_calls": 2, "n_equal": 1, "call": 1}
    ]


def normalized(path, *, fused, h=2.0, result=5.0):
    """A product, a norm that one version of torch has as one operator, and what reads it."""
    tape = Tape(path)
    row = tape.call("aten::mm", [tape.leaf(f32(1.0))], [f32(h)], module="fc")
    if fused:
        row = tape.call("aten::_fused_rms_norm", [row], [f32(result)], module="norm")
    else:
        square = tape.call("aten::pow.Tensor_Scalar", [row], [f32(h * h)], module="norm")
        row = tape.call("aten::mul.Tensor", [row, square], [f32(result)], module="norm")
    row = tape.call("aten::t", [row], [], views=[f32(result)], module="head")
    row = tape.call("aten::mm", [row], [f32(result * 3)], module="head")
    return tape.read()


@pytest.mark.parametrize("fused_first", [True, False])
@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ({}, ["equal", "equal", "equal"]),
        ({"result": 5.0000005}, ["equal", "other calls", "input"]),
        ({"h": 3.0, "result": 6.0}, ["algorithm", "input", "input"]),
    ],
)
def test_a_difference_arises_in_calls_that_one_recording_lacks(tmp_path, second, expected, fused_first):
    found = diff_recordings(
        normalized(tmp_path / "a.shadowrec", fused=fused_first),
        normalized(tmp_path / "b.shadowrec", fused=not fused_first, **second),
    )
    assert outcomes(found) == expected
    assert found.n_missing == 3
    arising = [(o.pair, o.n_reached) for o in found.flow.origins]
    assert arising == ([] if "input" not in expected else [(1, 1)] if "other calls" in expected else [(0, 2)])
    if "other calls" in expected:
        assert found.judgements[1].rounding is Rounding.UNKNOWN
        assert found.failures(frozenset({"algorithm"})) == []


@pytest.mark.parametrize(
    ("generators", "expected"), [(("1", "1"), "algorithm"), (("1", "2"), "input"), (("", "2"), "algorithm")]
)
def test_a_draw_is_credited_to_the_state_of_its_generator(tmp_path, generators, expected):
    recordings = []
    for name, state, value in zip("ab", generators, (1, 2), strict=True):
        tape = Tape(tmp_path / f"{name}.shadowrec", provenance={"generator:cpu": state} if state else {})
        memory = tape.call("aten::empty.memory_format", [], [f32(0)], digested=False)
        tape.call("aten::uniform_", [memory], [], written=[f32(value)])
        recordings.append(tape.read())
    assert outcomes(diff_recordings(*recordings)) == ["equal", expected]


def test_versions_are_credited_before_the_hardware(tmp_path, capsys):
    first = {"torch": "2.13.0", "onednn": "v3.12", "cpu": "x", "mkl": "1"}
    second = {"torch": "2.15.0", "onednn": "v3.13", "cpu": "y", "mkl": "1", "cuda": "13.2"}
    a = program(tmp_path / "a.shadowrec", fingerprint=first, provenance={"version:torch": "2.13.0"}).write()
    b = program(tmp_path / "b.shadowrec", fingerprint=second, provenance={"version:torch": "2.15.0"}, product=CHANGED)
    status, out, _ = text_of(capsys, a, b.write(), "--fail-on", "provenance")
    assert status == 0
    # What only one of them has belongs to its device.
    assert "VERSIONS DIFFER: torch 2.13.0 and 2.15.0, onednn v3.12 and v3.13. No difference below is credited" in out
    assert "algorithm: equal inputs, other results; versions differ, and no other kernel is known" in out
    assert "PROVENANCE" not in out
    assert "torch 2.13.0 2.15.0 onednn v3.12 v3.13 cpu x y cuda - 13.2" in out.partition("Facts in which")[2]


@pytest.mark.parametrize(
    ("op", "expected"),
    [("aten::convolution", "convolution"), ("aten::_unsafe_view", "reshape"), ("aten::view_as_real", "view_as_real"),
     ("aten::_safe_softmax", "softmax"), ("aten::_log_softmax", "log_softmax"),
     ("aten::cudnn_convolution", "convolution"), ("aten::abs", "abs"),
     ("aten::convolution_backward", "convolution backward"), ("aten::addmm.out", "product")],
)  # fmt: skip
def test_families(op, expected):
    assert family(op) == expected


@pytest.mark.parametrize(
    ("module", "expected"),
    [("layers.3.attn", "h.3.attention"), ("layers.3.attn.q", "h.3.attention.q"), ("head", "lm_head"), ("a", "a"),
     ("headless", "headless")],
)  # fmt: skip
def test_renaming(module, expected):
    assert renamed(module, {"layers.*.attn": "h.*.attention", "head": "lm_head"}) == expected


def test_other_names_of_modules(tmp_path):
    a = sequence(tmp_path / "a.shadowrec", ["mm", "relu"], module="h.0")
    b = sequence(tmp_path / "b.shadowrec", ["mm", "relu"], module="layers.0")
    assert diff_recordings(a, b, NameMap({"layers.*": "h.*"})).difference.alignment.by == {"key": 2}


def test_rows_of_a_prefill_are_steps_of_a_decoder(tmp_path):
    logits = np.random.default_rng(3).standard_normal((5, 6)).astype(np.float32)
    prefill = Tape(tmp_path / "prefill.shadowrec")
    prefill.call("aten::mm", [prefill.leaf(X)], [logits], module="head", rows=8)
    decode = Tape(tmp_path / "decode.shadowrec")
    for t in range(2, 5):
        row = next_up(logits[t : t + 1], 4) if t == 3 else logits[t : t + 1]
        decode.call("aten::mm", [decode.leaf(X)], [row], module="logits", rows=8, step=t)
    names = NameMap({}, (RowRule(module="head", second_module="logits", skip=(2, 0)),))
    (found,) = diff_recordings(prefill.read(), decode.read(), names).rows
    assert [pair.equal for pair in found.pairs] == [True, False, True]
    assert (found.pairs[1].first, found.pairs[1].second) == ((0, 3), (1, 0))
    # 4 units in the last place: 2 bits are lost for sure, and more where an element carries.
    assert 0 < found.pairs[1].remaining <= 20


# -- what comes first ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        ({"script": "1"}, {"script": "2"}, "the script"),
        ({"parameter:fc.weight": "1"}, {"parameter:fc.weight": "2"}, "parameters (parameter:fc.weight)"),
        ({"generator:cpu": "1"}, {"generator:cpu": "2"}, "states of generators (generator:cpu)"),
        ({"input:0": "1"}, {}, "only the first has input:0"),
        ({"generator": "1"}, {"generator": "2"}, "states of generators (generator)"),
        ({"generator:cuda:0": "1", "version:torch": "1"}, {"version:torch": "2"}, ""),
    ],
)
def test_provenance(tmp_path, first, second, line):
    found = diffed(tmp_path, {"provenance": first}, {"provenance": second})
    assert found.provenance.line == line
    assert found.failures(frozenset({"provenance"})) == ([f"provenance differs: {line}"] if line else [])


def test_facts_of_the_platforms_are_no_provenance(tmp_path):
    found = diffed(tmp_path, {"fingerprint": {"threads": 1, "cpu": "x"}}, {"fingerprint": {"threads": 8, "cpu": "x"}})
    assert found.provenance.is_same
    assert [(f.name, f.first, f.second) for f in found.provenance.facts] == [("threads", "1", "8")]


def text_of(capsys, *arguments):
    status = main(["diff", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, " ".join(captured.out.split()), captured.err


def test_the_headline_is_the_provenance(tmp_path, capsys):
    a = program(tmp_path / "a.shadowrec", provenance={"input:0": "1"}).write()
    b = program(tmp_path / "b.shadowrec", provenance={"input:0": "2"}, x=next_up(X)).write()
    status, out, err = text_of(capsys, a, b, "--fail-on", "provenance")
    assert status == 1
    assert out.startswith("shadowrun a.shadowrec against b.shadowrec ! PROVENANCE DIFFERS: inputs (input:0). No ")
    assert "First divergence" not in out
    assert err == "shadowrun: FAILED: provenance differs: inputs (input:0)\n"


@pytest.mark.parametrize(
    ("kind", "status"),
    [("any", 1), ("algorithm", 1), ("kernel", 0), ("not-rounding", 0), ("missing", 0), ("provenance", 0)],
)
def test_fail_on(tmp_path, capsys, kind, status):
    a, b = program(tmp_path / "a.shadowrec").write(), program(tmp_path / "b.shadowrec", product=next_up(X @ W)).write()
    assert text_of(capsys, a, b, "--fail-on", kind)[0] == status


def test_every_format(tmp_path, capsys):
    a, b = program(tmp_path / "a.shadowrec").write(), program(tmp_path / "b.shadowrec", product=CHANGED).write()
    files = [tmp_path / f"diff.{extension}" for extension in ("txt", "md", "json", "csv", "html")]
    assert text_of(capsys, a, b, *(part for file in files for part in ("-o", file)))[0] == 0
    data = json.loads(files[2].read_text())
    assert data["first_divergence"]["first"] | {"kernel": ""} == {
        "call": 0, "step": 0, "rank": 0, "phase": "forward", "module": "fc", "op": "aten::mm", "site": "net.py:3",
        "device": "cpu", "kernel": "",
    }  # fmt: skip
    assert data["n_by_outcome"]["algorithm"] == 1
    assert [r["origin"] for r in data["reached"]] == [0]
    assert files[3].read_text().splitlines()[1].startswith("algorithm,0,0,0,forward,fc,aten::mm,net.py:3,")
    assert all("aten::mm" in file.read_text() for file in files)


def test_a_limit_counts_what_it_leaves_out(tmp_path, capsys):
    sequence(tmp_path / "a.shadowrec", ["mm"])
    sequence(tmp_path / "b.shadowrec", ["mm", *["abs"] * 9])
    _, out, _ = text_of(capsys, tmp_path / "a.shadowrec", tmp_path / "b.shadowrec", "-n", "2")
    assert "and 7 more calls" in out


# -- bad input -----------------------------------------------------------------------------------------


def test_different_programs_say_so(tmp_path):
    a = sequence(tmp_path / "a.shadowrec", ["mm", "relu", "sum"])
    b = sequence(tmp_path / "b.shadowrec", ["conv", "tanh", "mean", "sum"], values=[7, 8, 9, 10])
    assert "recordings of different programs" in diff_recordings(a, b).warnings[0]


def test_other_steps_ranks_and_killed_processes_say_so(tmp_path):
    tapes = [Tape(tmp_path / f"{name}.shadowrec", rank=n) for n, name in enumerate("ab")]
    for step, tape in enumerate(tapes):
        tape.call("aten::mm", [tape.leaf(X)], [X], step=step)
    a, b = tapes[0].read(), tapes[1].changed(complete=False).read()
    found = diff_recordings(a, b)
    assert [w.partition(":")[0] for w in found.warnings] == [
        "the recordings are of different steps",
        "the recordings are of different ranks",
        "b.shadowrec was not ended",
    ]
    assert found.failures(frozenset({"kernel"})) == ["no call of the two recordings could be compared"]


def test_empty_recordings_pass_no_gate(tmp_path, capsys):
    a, b = (Tape(tmp_path / f"{n}.shadowrec").write() for n in "ab")
    status, out, _ = text_of(capsys, a, b, "--fail-on", "any")
    assert status == 1
    assert "no calls are recorded in a.shadowrec and b.shadowrec" in out


def test_one_file_twice_and_equal_names(tmp_path, capsys):
    a = program(tmp_path / "a.shadowrec").write()
    (tmp_path / "other").mkdir()
    b = program(tmp_path / "other" / "a.shadowrec").write()
    assert "both names are of one file" in text_of(capsys, a, a)[1]
    out = text_of(capsys, a, b)[1]
    assert "both names are of one file" not in out
    assert str(b) in out


@pytest.mark.parametrize(
    ("content", "slug"), [(None, "data-file-missing"), (b"text", "data-file-not-ours"), (b"", "data-file-not-ours")]
)
def test_what_is_no_recording(tmp_path, capsys, content, slug):
    a, b = program(tmp_path / "a.shadowrec").write(), tmp_path / "b.shadowrec"
    if content is not None:
        b.write_bytes(content)
    status, _, err = text_of(capsys, a, b)
    assert (status, slug in err) == (2, True), err


def test_a_damaged_recording(tmp_path, capsys):
    a, b = program(tmp_path / "a.shadowrec").write(), program(tmp_path / "b.shadowrec").write()
    data = bytearray(b.read_bytes())
    data[4096:8192] = bytes(4096)
    b.write_bytes(data)
    status, _, err = text_of(capsys, a, b)
    assert (status, "data-file-" in err, "Traceback" in err) == (2, True, False)


@pytest.mark.parametrize(
    "text",
    ["[modules", "[other]\na = 1", "[modules]\na = 1", '[modules]\n"a" = "b.*"', "[rows]\na = 1",
     "[[rows]]\nmodul = 'a'", "[[rows]]\nskip = [1]", "[[rows]]\nop = 3"],
)  # fmt: skip
def test_a_bad_map(tmp_path, capsys, text):
    a = program(tmp_path / "a.shadowrec").write()
    names = tmp_path / "names.toml"
    names.write_text(text)
    status, _, err = text_of(capsys, a, a, "--map", names)
    assert (status, "bad-map" in err) == (2, True), err


def test_no_torch_is_imported(tmp_path):
    a, b = program(tmp_path / "a.shadowrec").write(), program(tmp_path / "b.shadowrec", product=CHANGED).write()
    code = "import sys; from shadowrun.cli.main import main; main(['diff', *sys.argv[1:], '-f', 'html']); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, a, b], check=False, stdout=subprocess.DEVNULL).returncode == 0


def test_the_picture_has_each_pair_and_marks_the_first_divergence(tmp_path):
    assert precision_figure(diffed(tmp_path)) == ()
    (figure,) = precision_figure(diffed(tmp_path, second={"product": CHANGED}))
    assert figure.svg.count("<circle") == 2 + len({"algorithm", "input"})
    assert "first divergence: aten::mm" in figure.svg
    titles = re.findall(r"<title>call \d: [^<]+</title>", figure.svg)
    assert len(titles) == 2
    assert re.search(r"call 0: aten::mm in fc: algorithm, \d+ bits left", titles[0])
    assert "2 pairs of calls; at least" in figure.caption


def test_the_picture_of_many_calls_is_bounded_and_keeps_the_worst(tmp_path):
    def tape(path, wrong):
        found = Tape(path)
        row = found.leaf(X)
        for n in range(1500):
            row = found.call("aten::neg", [row], [next_up(X, 5) if n == wrong else X], module=f"m{n}")
        return found.read()

    (figure,) = precision_figure(
        diff_recordings(tape(tmp_path / "a.shadowrec", -1), tape(tmp_path / "b.shadowrec", 777))
    )
    assert figure.svg.count("<circle") < 420
    assert "call 777: aten::neg" in figure.svg
