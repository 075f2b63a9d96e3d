"""The figures of Schlögl et al. (NeurIPS 2023), counted again from their published results."""

import base64
import json
import lzma
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from shadowrun.errors import DataFileError, UsageError
from shadowrun.recording.file_format.recording_file import read
from shadowrun.studies.classes.equivalence import classes_of, outputs_of
from shadowrun.studies.classes.explain import by_fact, flag_clusters, outliers
from shadowrun.studies.classes.import_published import read_published, save_published
from shadowrun.studies.classes.platforms import filter_platforms, find_recordings, load, platforms_of

SHARED = Path(__file__).parents[3].parent / "shared" / "data" / "schloegl2023" / "recordings.jsonl.xz"
published = pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data/schloegl2023, which is not published")


@pytest.fixture(scope="module")
def machines():
    return platforms_of(read_published(SHARED))


def classes(platforms, model):
    """Classes of a model's three samples."""
    return [classes_of(platforms, output) for output in outputs_of(platforms, [f"{model}/prediction"])]


@published
@pytest.mark.parametrize(
    ("model", "n_cpus", "cpus", "n_gpus", "gpus", "both"),
    [
        ("cifar10_small", 65, [3, 3, 3], 11, [8, 8, 8], [11, 11, 11]),
        ("cifar10_medium", 65, [16, 16, 16], 11, [9, 10, 10], [25, 26, 26]),
        ("cifar10_large", 58, [20, 20, 20], 7, [5, 5, 5], [25, 25, 25]),
        ("deep_weeds", 65, [16, 16, 16], 11, [10, 10, 10], [26, 26, 26]),
    ],
)
def test_classes_of_each_model(machines, model, n_cpus, cpus, n_gpus, gpus, both):
    for condition, n, expected in (
        ([("device", "cpu")], n_cpus, cpus),
        ([("device", "gpu")], n_gpus, gpus),
        ([], n_cpus + n_gpus, both),
    ):
        found = classes(filter_platforms(machines, condition), model)
        assert [c.output.key.step for c in found] == [0, 1, 6]
        assert [(len(c.members), c.n_classes) for c in found] == [(n, k) for k in expected]


@published
def test_39_of_99_outputs_of_gpus_differ_from_run_to_run_and_none_of_cpus(machines):
    models = ("cifar10_small", "cifar10_medium", "deep_weeds")
    members = [
        m
        for model in models
        for c in classes(filter_platforms(machines, [("device", "gpu")]), model)
        for m in c.members
    ]
    assert (sum(m.star for m in members), len(members)) == (39, 99)
    assert {m.n_repeats for m in members} == {10, 20}
    # CPUs were repeated in another experiment: six machines, ten runs.
    racing = platforms_of(read_published(SHARED, "race_conditions"))
    repeated = classes(racing, "cifar10_medium")[0].members
    assert [(m.n_repeats, m.n_distinct) for m in repeated] == [(10, 1)] * 6


@published
def test_the_class_of_a_platform_is_that_of_its_most_frequent_result(machines):
    v100 = next(p for p in machines if "v100" in p.name)
    found = classes([v100], "cifar10_medium")[0].members[0]
    assert (found.text, found.n_repeats, found.n_mode, found.n_distinct) == ("A*", 20, 13, 5)


@published
def test_core_counts_of_one_cloud(machines):
    cpus = filter_platforms(machines, [("device", "cpu"), ("cloud", "gcloud")])
    for found in classes(cpus, "cifar10_medium"):
        groups = by_fact(found, cpus, "cores").groups
        assert groups == (("2", 9, 5), ("4", 9, 4), ("8", 9, 4), ("16", 9, 3), ("32", 9, 3))


@published
def test_flag_clusters_of_nine_dual_core_cpus(machines):
    """Table 1: five classes, 15 clusters; avx2, avx512f, vbmi and sse4a go with them."""
    cpus = filter_platforms(machines, [("device", "cpu"), ("cloud", "gcloud"), ("cores", "2")])
    found = classes(cpus, "cifar10_medium")[0]
    architectures = {}
    for member, platform in zip(found.members, cpus, strict=True):
        architectures.setdefault(member.text, set()).add(platform.facts["architecture"])
    assert list(architectures.values()) == [
        {"Zen 2", "Zen 3"},
        {"Broadwell", "Haswell"},
        {"Cascade Lake", "Skylake"},
        {"Ice Lake"},
        {"Ivy Bridge", "Sandy Bridge"},
    ]
    flags = flag_clusters(found, cpus)
    assert (len(flags.clusters), flags.n_flags, flags.n_platforms) == (15, 125, 9)
    aligned = {c.name: c.classes for c in flags.clusters if c.aligned}
    assert aligned["avx2"] == ("A", "B", "C", "D")
    assert aligned["avx512f"] == ("C", "D")
    assert aligned["avx512vbmi"] == ("D",)
    assert aligned["sse4a"] == ("A",)
    assert flags.n_distinguished == flags.n_classes == 5
    assert flag_clusters(classes(machines, "deep_weeds")[0], machines).n_flags == 169


@published
@pytest.mark.parametrize(
    ("model", "expected", "precision"),
    [
        ("cifar10_medium", [3, 9, 4], [(5, 10), (15, 23), (41, 52)]),
        ("cifar10_small", [1, 3, 2], None),
        ("deep_weeds", [3, 8, 5], None),
    ],
)
def test_casts_of_weights_and_inputs(model, expected, precision):
    platforms = platforms_of(read_published(SHARED, "precision"))
    found = [classes(platforms, f"{model}_float{n_bits}")[0] for n_bits in (16, 32, 64)]
    assert [len(c.members) for c in found] == [14, 14, 14]
    assert [c.n_classes for c in found] == expected
    if precision is not None:
        assert [(c.min_precision, c.mantissa) for c in found] == precision


@published
def test_platforms_with_other_inputs_or_weights_make_26_classes_of_20(machines):
    for found in classes(machines, "deep_weeds"):
        without = outliers(found)
        assert (found.n_classes, without.n_classes, len(without.platforms)) == (26, 20, 8)
        assert all(name.startswith("local/") for name in without.platforms)
    for found in classes(machines, "cifar10_medium"):
        assert outliers(found).platforms == ("local/consumer-GTX_970",)
    assert [outliers(c).n_classes for c in classes(machines, "cifar10_medium")] == [24, 25, 25]


@published
def test_single_instructions_agree_on_all_cpus():
    platforms = platforms_of(read_published(SHARED, "raw_simd"))
    assert [(len(c.members), c.n_classes) for c in classes(platforms, "raw_simd")] == [(15, 1)]


@published
def test_saved_recordings_are_the_same(machines, tmp_path):
    save_published(SHARED, tmp_path)
    saved = load(find_recordings([tmp_path]))
    assert Counter(p.fingerprint for p in saved) == Counter(p.fingerprint for p in machines)
    for model in ("cifar10_small", "deep_weeds"):
        counts = [sorted(Counter(c.labels).values()) for c in classes(saved, model)]
        assert counts == [sorted(Counter(c.labels).values()) for c in classes(machines, model)]


def entry(host, values, repeats=None, **changed):
    """One line of results."""
    data = {
        "cpu_info": {"flags": ["sse", "avx"], "vendor_id_raw": "GenuineIntel", "brand_raw": "Xeon", "count": 2},
        "device": {"device_type": "CPU"},
        "prediction": prediction(values),
        "model_type": "net",
    }
    if repeats is not None:
        data["all_predictions"] = [prediction(v) for v in repeats]
    return json.dumps({"path": f"equivalence_classes/here/cpu/{host}-net-i3.json", "data": data | changed})


def prediction(values):
    data = base64.b64encode(np.array(values, np.float32).tobytes()).decode()
    return {"bytes": data, "dtype": "float32", "shape": [1, len(values)]}


def test_lines_and_folders_give_the_same(tmp_path):
    lines = [entry("a", [1, 2]), entry("b", [1, 2.5], [[1, 2.5], [1, 2], [1, 2.5]])]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with lzma.open(tmp_path / "lines.jsonl.xz", "wt", encoding="utf-8") as file:
        file.write("\n".join(lines))
    for line in map(json.loads, lines):
        path = tmp_path / line["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(line["data"]), encoding="utf-8")
    for source in ("lines.jsonl", "lines.jsonl.xz", "."):
        platforms = platforms_of(read_published(tmp_path / source))
        assert [p.name for p in platforms] == ["here/a", "here/b"]
        found = classes(platforms, "net")[0]
        assert (found.output.key.step, [m.text for m in found.members]) == (3, ["A", "B*"])


def test_a_list_of_inferences_is_repeats(tmp_path):
    one, other = (json.loads(entry("a", values))["data"] for values in ([1, 2], [1, 3]))
    line = {"path": "equivalence_classes/here/cpu/a-net-i0.json", "data": [one, other, other]}
    (tmp_path / "lines.jsonl").write_text(json.dumps(line), encoding="utf-8")
    member = classes(platforms_of(read_published(tmp_path / "lines.jsonl")), "net")[0].members[0]
    assert (member.n_repeats, member.n_mode, member.n_distinct) == (3, 2, 2)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "no JSON",
        "[1]",
        '{"path": "other/a.json", "data": {}}',
        '{"path": "equivalence_classes/a.json", "data": {}}',
        '{"path": "equivalence_classes/a.json", "data": []}',
        entry("a", [1, 2], cpu_info={}),
        entry("a", [1, 2], prediction={"bytes": "?", "dtype": "float32", "shape": [2]}),
        entry("a", [1, 2], prediction={"bytes": "AAAA", "dtype": "float32", "shape": [2]}),
        entry("a", [1, 2], prediction={"bytes": "AAAA", "dtype": "object", "shape": [1]}),
        entry("a", [1, 2], prediction={"bytes": "", "dtype": "float32", "shape": [2**62, 2**62]}),
        entry("a", [1, 2], all_predictions=[]),
    ],
)
def test_damaged_results_are_refused(tmp_path, content):
    path = tmp_path / "lines.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataFileError, match=r"lines\.jsonl"):
        read_published(path)


def test_missing_results_and_experiments_are_refused(tmp_path):
    with pytest.raises(DataFileError, match="No such file"):
        read_published(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="race_conditions"):
        read_published(tmp_path, "other")


def test_a_recording_that_was_saved_can_be_read(tmp_path):
    (tmp_path / "lines.jsonl").write_text(entry("a b/../c", [1, 2]), encoding="utf-8")
    (path,) = save_published(tmp_path / "lines.jsonl", tmp_path)
    assert path.parent == tmp_path
    assert len(read(path).calls) == 1


def test_names_that_are_no_utf8_are_saved(tmp_path):
    (tmp_path / "lines.jsonl").write_text(entry("a\ud800", [1, 2], model_type="m\ud800"), encoding="utf-8")
    (path,) = save_published(tmp_path / "lines.jsonl", tmp_path)
    assert len(read(path).calls) == 1
