"""Classes, repeats, nearness, the graph and claims, on recordings made by hand."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shadowrun
from shadowrun.errors import UsageError
from shadowrun.recording.file_format.recording_file import read
from shadowrun.report.document import render
from shadowrun.studies.classes.classes_by_call import along_graph, by_operator
from shadowrun.studies.classes.equivalence import classes_of, common_keys, letter, outputs_of
from shadowrun.studies.classes.explain import claims, flag_clusters
from shadowrun.studies.classes.platforms import filter_platforms, platforms_of
from shadowrun.studies.classes.report import classes_document
from shadowrun.studies.classes.samples import difference, ulp_difference
from shadowrun.studies.classes.study import Study
from tests.studies.classes.conftest import recorded


def f32(*values):
    return np.array(values, np.float32)


def bits(*values):
    return np.array(values, np.uint32).view(np.float32)


def study(*results, op="aten::mm", **options):
    return Study.from_platforms(
        platforms_of([recorded(f"p{i}", [("fc", op, [], [r])]) for i, r in enumerate(results)]), **options
    )


def texts(*results, **options):
    return [m.text for m in study(*results, **options).outputs[0].classes.members]


def test_letters_are_in_first_seen_order():
    assert texts(f32(2), f32(1), f32(2), f32(3)) == ["A", "B", "A", "C"]
    assert [letter(n) for n in (0, 25, 26, 27, 51, 52, 701, 702)] == ["A", "Z", "AA", "AB", "AZ", "BA", "ZZ", "AAA"]


def test_dtypes_and_shapes_are_classes_too():
    assert texts(f32(0), np.zeros(1, np.int32), np.zeros((1, 1), np.float32)) == ["A", "B", "C"]


NANS = [bits(0x7FC00000), bits(0xFFC00000), bits(0x7FC00001)]


def test_by_bytes_payloads_and_negative_zero_are_distinct():
    assert texts(*NANS) == ["A", "B", "C"]
    assert texts(f32(0.0), f32(-0.0)) == ["A", "B"]


def test_by_value_they_are_equal():
    assert texts(*NANS, bits(0x7F800000), by_value=True) == ["A", "A", "A", "B"]
    assert texts(f32(0.0, 1), f32(-0.0, 1), f32(-0.0, -1), by_value=True) == ["A", "A", "B"]


def test_by_value_what_samples_cannot_decide_is_counted_and_different():
    many = np.ones(1000, np.float32)
    negative, positive = many.copy(), many.copy()
    negative[[3, 5]], positive[[3, 5]] = -0.0, 0.0
    found = study(positive, negative, by_value=True).outputs[0].classes
    assert (found.n_classes, found.n_undecided) == (2, 1)
    # Another count of zeros decides.
    found = study(positive, negative, many, by_value=True).outputs[0].classes
    assert (found.n_classes, found.n_undecided) == (3, 1)
    # Without a NaN or a negative zero, bytes are values.
    other = positive.copy()
    other[5] = 1
    other[6] = 0
    assert study(positive, other, by_value=True).outputs[0].classes.n_undecided == 0


def test_two_recordings_of_one_fingerprint_are_repeats():
    values = [f32(1), f32(2), f32(2), f32(3)]
    recordings = [
        recorded(f"p{i}", [("", "aten::mm", [], [v])], {"cpu": "x" if i < 3 else "y", "memory_gib": i})
        for i, v in enumerate(values)
    ]
    platforms = platforms_of(recordings, repeats=True)
    assert [(p.name, len(p.recordings)) for p in platforms] == [("p0", 3), ("p3", 1)]
    found = Study.from_platforms(platforms)
    members = found.outputs[0].classes.members
    assert [(m.text, m.n_mode, m.n_repeats, m.n_distinct) for m in members] == [("A*", 2, 3, 2), ("B", 1, 1, 1)]
    assert not found.unreliable_outputs
    thirds = platforms_of([recordings[0], recordings[1], recorded("p", [("", "aten::mm", [], [f32(9)])], {"cpu": "x"})])
    assert len(thirds) == 3
    assert [
        m.platform
        for _, m in Study.from_platforms([*platforms_of(recordings[:2], repeats=True), platforms[1]]).unreliable_outputs
    ] == ["p0"]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=8, unique=True))
def test_the_tree_is_single_linkage_by_remaining_precision(values):
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    distance = pytest.importorskip("scipy.spatial.distance")
    found = study(*map(bits, values)).outputs[0].classes
    lost = np.array([
        [next((k for k in range(24) if a >> k == b >> k), 24) for a in values] for b in values
    ])  # fmt: skip
    joined = hierarchy.linkage(distance.squareform(lost), "single")
    for k, labels in enumerate(found.truncated):
        flat = hierarchy.fcluster(joined, k, "distance")
        same = [[x == y for y in flat] for x in flat]
        assert same == [[x == y for y in labels] for x in labels]
    assert found.min_precision == 23 - min(23, lost.max())
    assert found.lost_bits == (None if lost.max() > 23 else lost.max())


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 0x7F7FFFFF), min_size=2, max_size=6))
def test_the_bound_on_ulp_holds(values):
    found = study(*map(bits, values)).outputs[0].classes
    if found.max_ulp is not None:
        assert max(abs(a - b) for a, b in itertools.product(values, values)) <= found.max_ulp


def test_a_power_of_two_has_no_remaining_precision_and_few_ulp():
    found = study(f32(1), np.nextafter(f32(1), f32(0))).outputs[0]
    assert (found.classes.min_precision, found.max_ulp, found.classes.max_ulp) == (0, 1, None)


def test_differences_of_samples():
    a, b = (study(v, v).outputs[0].classes.values[0] for v in (f32(-0.0, 8), f32(0.0, 6)))
    assert difference(a, b) == 0.25
    assert ulp_difference(a, b) == 0x00400000
    infinite = study(f32(np.inf, 8), f32(1, 1)).outputs[0].classes.values
    assert difference(*infinite) == np.inf


def test_platforms_with_a_shorter_format_or_other_inputs_are_apart():
    rng = np.random.default_rng(0)
    exact = rng.random(50).astype(np.float32)
    near = np.nextafter(exact, f32(2))
    short = (exact.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # bfloat16
    found = study(exact, near, short, rng.random(50).astype(np.float32)).outputs[0]
    assert (found.classes.n_classes, found.outliers.n_classes, found.outliers.platforms) == (4, 2, ("p2", "p3"))


def graph(*names):
    """Two branches: conv differs on the second platform, its relu agrees again; add differs on the third."""

    def calls(platform):
        conv = f32(-1, 1) if platform == "a" else f32(-2, 1)
        return [
            ("x", "aten::rand", [], [f32(1, 2)]),
            ("conv", "aten::convolution", [0], [conv]),
            ("side", "aten::exp", [0], [f32(3, 4)]),
            ("relu", "aten::relu", [1], [np.maximum(conv, f32(0, 0))]),
            ("add", "aten::add.Tensor", [3, 2], [f32(5, 6) + (0 if platform != "c" else f32(1, 1))]),
        ]  # fmt: skip

    return platforms_of([recorded(name, calls(name)) for name in names])


def test_changes_are_credited_to_the_call_that_made_them():
    changes = {c.key.op: c for c in along_graph(graph("a", "b", "c"))}
    assert {op: (c.n_before, c.n_classes, c.n_added, c.n_merged) for op, c in changes.items()} == {
        "aten::rand": (1, 1, 0, 0),
        "aten::convolution": (1, 2, 1, 0),
        "aten::exp": (1, 1, 0, 0),  # after a call with two classes in the trace, and not its child
        "aten::relu": (2, 1, 0, 1),
        "aten::add.Tensor": (1, 2, 1, 0),
    }
    assert [key.op for key in changes["aten::add.Tensor"].parents] == ["aten::relu", "aten::exp"]
    relu = changes["aten::relu"]
    assert (relu.precision_before, relu.precision, relu.trend) == (0, 23, "up")
    assert changes["aten::rand"].precision_before is None
    found = {o.op: o for o in by_operator(along_graph(graph("a", "b")))}
    assert (found["aten::convolution"].n_added, found["aten::relu"].n_merged, found["aten::relu"].n_up) == (1, 1, 1)
    assert next(iter(found)) == "aten::convolution"


def test_a_relu_that_lowers_the_precision_breaks_the_claim():
    def calls(wrong):
        return [("", "aten::rand", [], [f32(1 + wrong * 2**-20)]), ("", "aten::relu", [0], [f32(1 + wrong)])]

    platforms = platforms_of([recorded(f"p{i}", calls(i)) for i in (0, 1)])
    claim = claims([], platforms, along_graph(platforms))[-1]
    assert (claim.holds, claim.n_tested, claim.n_broken) == (False, 1, 1)
    platforms = graph("a", "b")
    assert claims([], platforms, along_graph(platforms))[-1].holds is True


def test_equal_fingerprints_and_equal_results():
    def claim(*platforms):
        made = platforms_of([recorded(str(i), [("", "f", [], [f32(v)])], {"cpu": cpu}) for i, (cpu, v) in platforms])
        every = [classes_of(made, output) for output in outputs_of(made)]
        return [c.holds for c in claims(every, made, [])[1:3]]

    assert claim(*enumerate([("x", 1), ("x", 1), ("y", 2)])) == [True, True]
    assert claim(*enumerate([("x", 1), ("x", 2), ("y", 3)])) == [False, None]
    assert claim(*enumerate([("x", 1), ("y", 1)])) == [None, False]


def test_flags_of_all_and_clusters_within_a_class():
    flags = [["sse", "avx", "fma", "odd"], ["sse", "avx", "fma"], ["sse"]]
    made = platforms_of([
        recorded(str(i), [("", "f", [], [f32(i // 2)])], {"cpu_flag_list": own}) for i, own in enumerate(flags)
    ])  # fmt: skip
    found = flag_clusters(classes_of(made, outputs_of(made)[0]), made)
    assert (found.n_flags, found.n_common) == (4, 1)
    assert [(c.name, c.flags, c.classes, c.aligned) for c in found.clusters] == [
        ("fma", ("avx", "fma"), ("A",), True),
        ("odd", ("odd",), ("A",), False),
    ]


def test_outputs_are_the_last_call_of_each_step_or_those_asked_for():
    made = graph("a", "b")
    assert [o.name for o in outputs_of(made)] == ["add/aten::add.Tensor"]
    assert [o.name for o in outputs_of(made, ["*/aten::re*", "conv/*"])] == [
        "conv/aten::convolution",
        "relu/aten::relu",
    ]
    assert [o.name for o in outputs_of(made, ["aten::exp"])] == ["side/aten::exp"]
    with pytest.raises(UsageError, match="no recorded call matches"):
        outputs_of(made, ["nothing"])


def test_the_next_batch_is_no_output_of_a_step(tmp_path):
    """Without `run.step()`, it is made before the next step begins."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with shadowrun.record(tmp_path / "a.shadowrec"):
        for _ in range(2):
            x, y = torch.randn(4, 3), torch.stack([torch.randint(0, 2, (4,))])[0]
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            loss.item()
        torch.stack([torch.randint(0, 2, (4,))])
    found = outputs_of(platforms_of([read(tmp_path / "a.shadowrec")]))
    assert [(o.key.step, o.name) for o in found] == [(0, "aten::_local_scalar_dense"), (1, "aten::_local_scalar_dense")]


def test_where():
    made = platforms_of([recorded(n, [], {"cpu": cpu}) for n, cpu in (("a", "Intel Xeon"), ("b", "AMD EPYC"))])
    assert [p.name for p in filter_platforms(made, [("vendor", "AMD")])] == ["b"]
    assert [p.name for p in filter_platforms(made, [("name", "a*")])] == ["a"]
    with pytest.raises(UsageError, match="there are architecture"):
        filter_platforms(made, [("colour", "red")])


def test_calls_that_only_some_platforms_have():
    both = graph("a", "b")
    made = [*both, *platforms_of([recorded("c", [("x", "aten::rand", [], [f32(1, 2)])])])]
    keys, n_any = common_keys(made)
    assert ([key.op for key in keys], n_any) == (["aten::rand"], 5)
    assert Study.from_platforms(made).are_different_programs
    assert not Study.from_platforms(both).are_different_programs
    assert [c.key.op for c in along_graph(made)] == ["aten::rand"]


def test_another_version_is_no_other_program():
    versions = [{"version:torch": v, "rank 1 version:numpy": "2"} for v in ("2.13.0", "2.15.0", "2.13.0")]
    calls = [("", "f", [], [f32(1)])]
    study = Study.from_platforms(
        platforms_of([recorded(n, calls, provenance=p) for n, p in zip("abc", versions, strict=True)])
    )
    assert not study.input_disagreements
    assert study.versions == {"torch": {"2.13.0": ("a", "c"), "2.15.0": ("b",)}}
    said = " ".join(render(classes_document(study), "txt").split())
    assert "Versions differ between the recordings: torch 2.13.0, 2.15.0. Their classes say nothing of hardware" in said
    assert "Inputs or program differ" not in said


def test_calls_that_another_version_makes_more_often_are_not_common():
    once = [("a", "aten::mul", [], [f32(1)]), ("b", "aten::mul", [], [f32(2)])]
    twice = [("a", "aten::mul", [], [f32(9)]), *once]
    made = platforms_of([recorded("first", once), recorded("second", twice)])
    keys, n_any = common_keys(made)
    assert ([(key.module, key.occurrence) for key in keys], n_any) == ([("b", 0)], 3)
    assert [(c.key.module, c.n_added) for c in along_graph(made)] == [("b", 0)]


def test_provenance_comes_first():
    def found(*provenances):
        made = [recorded(str(i), [("", "f", [], [f32(i)])], provenance=p) for i, p in enumerate(provenances)]
        return Study.from_platforms(platforms_of(made))

    assert list(found({"input:0": "1", "script": "s"}, {"input:0": "2", "script": "s"}).input_disagreements) == [
        "input:0"
    ]
    assert list(found({"input:0": "1"}, {"input:0": "1", "parameter:w": "2"}).input_disagreements) == ["parameter:w"]
    # A generator that only one machine has belongs to its device.
    assert not found({"generator:cpu": "1", "generator:cuda:0": "2"}, {"generator:cpu": "1"}).input_disagreements
    assert list(found({"generator:cpu": "1"}, {"generator:cpu": "2"}).input_disagreements) == ["generator:cpu"]
    assert not found({}, {"input:0": "1"}).input_disagreements
