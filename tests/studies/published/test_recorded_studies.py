"""The recorded studies: nets are the same on all machines, and classes and deviations are those of the recordings."""

import dataclasses
import json

import pytest
import torch

import shadowrun
from shadowrun.cli.main import main
from shadowrun.report.document import ISSUE_FORMATS, RENDERERS, render
from shadowrun.studies.grid import RECORDED, Cell
from shadowrun.studies.published import programs
from shadowrun.studies.published.recorded_studies import read_study
from shadowrun.studies.published.tables import TABLES, study_document

pytestmark = pytest.mark.usefixtures("forked_processes")

IMAGE = programs._image


def recorded_twice(tmp_path, monkeypatch, study, change=lambda x: x):
    """Two recordings in this process; the second gets changed images."""
    cells = []
    for name, image in (("one", IMAGE), ("two", lambda sample: change(IMAGE(sample)))):
        monkeypatch.setattr(programs, "_image", image)
        with shadowrun.record(tmp_path / f"{name}.shadowrec", modules=["?*"], kernels=study == "resnet18"):
            programs.main([study, "--quick"])
        cells.append(Cell(name, f"{name}.shadowrec", RECORDED))
    cells.append(Cell("absent", "absent.shadowrec", "cannot run here", note="no such instructions"))
    return read_study(study, cells, tmp_path, quick=True)


@pytest.mark.parametrize("study", programs.STUDIES)
def test_equal_runs_are_one_class(tmp_path, monkeypatch, study):
    found = recorded_twice(tmp_path, monkeypatch, study)
    for variant in found.variants:
        assert found.classes(variant).n_classes == 1
    document = study_document(found)
    for extension in set(RENDERERS) - set(ISSUE_FORMATS):
        text = render(document, extension)
        assert "torch" in text or extension == "csv"
    assert "absent: left out: cannot run here" in render(document, "txt")
    assert len(document.data["variants"]) == len(found.variants)


def test_a_deviation_is_measured_before_and_after_each_activation(tmp_path, monkeypatch):
    found = recorded_twice(tmp_path, monkeypatch, "activations", lambda x: x * 1.001)
    relu = [change for change in found.of_variant("small:relu:0") if change.key.op == "aten::relu"]
    assert len(relu) == 4
    first = relu[0]
    before, after = found.deviating(first.parents[0]), found.deviating(first.key)
    # ReLU makes the negative half of the elements equal.
    assert before > 0.95
    assert 0.2 < after < 0.8
    assert found.classes("small:relu:0").n_classes == 2
    (row, *_) = [row for row in study_document(found).data["table"] if row["activation"] == "relu"]
    low, high = row["deviating %: before -> after"].split(" -> ")[0].split("-")
    assert 0 < float(low) <= float(high) <= 100
    assert row["(pub)"] == "3 / 1 / 0"


def test_classes_and_kernels_of_each_layer(tmp_path, monkeypatch):
    document = study_document(recorded_twice(tmp_path, monkeypatch, "resnet18", lambda x: x * 1.001))
    table = document.data["table"]
    assert [row["layer"] for row in table][:2] == ["0 convolution", "1 relu"]
    # Other images: the inputs of every call differ already.
    assert [(row["classes before"], row["after"], row["added"]) for row in table[:2]] == [("2", "2", "")] * 2
    multiplying = [row for row in table if row["paths: platforms"]]
    assert [row["layer"].split()[1] for row in multiplying] == ["convolution"] * 3 + ["addmm"] * 2
    assert {row["paths: platforms"] for row in multiplying} <= {"GEMM 2", "direct 2"}
    text = render(document, "txt")
    assert "2 platforms, 2 classes of the output. Classes are added at 0 calls: none." in text
    assert "Kernel paths per layer (5)" in text


def test_calls_that_change_the_classes_are_a_table(tmp_path, monkeypatch):
    found = recorded_twice(tmp_path, monkeypatch, "untrained")
    assert "classes before" not in render(study_document(found), "txt")
    adding = dataclasses.replace(found.of_variant("small:he")[1], n_classes=2, n_added=1)
    changes = tuple(adding if change.key == adding.key else change for change in found.changes)
    text = render(study_document(dataclasses.replace(found, changes=changes)), "txt")
    (row,) = [line for line in text.splitlines() if line.startswith("1 relu ")]
    assert row.split()[:5] == ["1", "relu", "1", "2", "1"]


def test_casts_are_separate_variants(tmp_path, monkeypatch):
    found = recorded_twice(tmp_path, monkeypatch, "casts", lambda x: x * (1 + 2**-20))
    classes = {variant: found.classes(variant) for variant in found.variants}
    # The change is below the resolution of both 16-bit dtypes for nearly all elements, and above that of the others.
    assert classes["small:float32"].n_classes == 2
    assert classes["small:float64"].n_classes == 2
    assert [c.mantissa for c in classes.values()] == [10, 7, 23, 52]
    assert "Dendrogram: small in float64" in render(study_document(found), "txt")


def test_nets_have_the_published_sizes():
    def count(net):
        return sum(p.numel() for p in net.parameters())

    assert 11.1e6 < count(programs.ResNet18()) < 11.3e6
    assert programs.ResNet18()(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert programs.SmallNet()(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_weights_come_from_a_seed_only():
    first = dict(programs._filled(programs.SmallNet()).state_dict())
    torch.manual_seed(1)
    again = programs._filled(programs.SmallNet()).state_dict()
    assert all(torch.equal(first[name], value) for name, value in again.items())


def test_sizes_of_the_convolutions():
    for name, conv, x in programs.STUDIES["multiplications"](quick=True):
        n = conv(x).numel() * conv.weight[0].numel()
        wanted = 10 ** int(name[2])
        assert 0.5 < n / wanted < 2, name
    assert len(programs.variants("distributions", quick=True)) == 12


def test_every_study_has_a_table_and_a_name_in_the_help(capsys):
    assert list(TABLES) == list(programs.STUDIES)
    with pytest.raises(SystemExit):
        main(["study", "--help"])
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in TABLES)


def test_the_command_in_fresh_processes(capsys):
    targets = ["--target", "cpu[threads=1]", "--target", "cpu[isa=default]"]
    assert main(["study", "distributions", "--quick", *targets, "-f", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [p["platform"] for p in document["platforms"]] == ["cpu[threads=1]", "cpu[isa=default]"]
    assert [p["outcome"] for p in document["platforms"]] == ["recorded", "recorded"]
    assert len(document["table"]) == 12
    assert torch.__version__ in document["machine"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["casts", "--target", "cpu"], "two platforms or more"),
        (["casts", "--ops", "mm"], "--ops is an option of the study order"),
        (["casts", "--target", "sim", "--target", "cpu"], "CPU's settings"),
        (["casts", "--target", "cpu[abacus=1]", "--target", "cpu"], "abacus"),
        (["casts", "-o", "x.abacus"], "abacus"),
        (["casts", "-j", "0"], "-j 0: use a number of processes >= 1"),
        (["order", "-j", "2"], "--jobs is for studies that record platforms"),
    ],
)
def test_bad_input(args, message, capsys):
    assert main(["study", *args]) == 2
    assert message in capsys.readouterr().err
