"""Kernel paths per layer: of recordings made by hand, and of a convolution that ran by two libraries."""

import csv
import dataclasses
import io
import json
import re

import numpy as np
import pytest
import torch
from torch import nn

import shadowrun
from shadowrun.cli.main import main
from shadowrun.platforms.cpu import CpuSettings
from shadowrun.recording.file_format.recording_writer import SUFFIX
from shadowrun.report.document import ISSUE_FORMATS, RENDERERS, render
from shadowrun.studies.classes.layer_kernels import groups_of, layer_kernels
from shadowrun.studies.classes.platforms import find_recordings, load, platforms_of
from shadowrun.studies.classes.report import classes_document
from shadowrun.studies.classes.study import Study
from tests.studies.classes.conftest import recorded

DIRECT = "aten::mkldnn_convolution; onednn convolution jit:avx2"
WINOGRAD = "aten::mkldnn_convolution; onednn convolution jit_wino:avx512_core"
GEMM = "aten::_slow_conv2d_forward; mkl SGEMM CNR:OFF"
RELU = "aten::relu AVX2"


def platform(name, value, kernel):
    """A convolution that ran by a kernel, and an activation, in each of two steps."""
    x = np.array([value], np.float32)
    calls = [("conv", "aten::convolution", [], [x]), ("act", "aten::relu", [0], [x])] * 2
    recording = recorded(name + SUFFIX, calls)
    recording.calls["step"] = [0, 0, 1, 1]
    recording.calls["occurrence"] = 0
    if kernel:
        recording.calls["kernel"] = [0, 1, 0, 1]
    return dataclasses.replace(recording, kernels=(kernel, RELU) if kernel else ())


@pytest.fixture
def platforms():
    rows = [("a", 1, DIRECT), ("b", 2, WINOGRAD), ("c", 1, DIRECT), ("d", 3, GEMM), ("e", 4, "")]
    return platforms_of([platform(*row) for row in rows], "abcde")


def test_layers_that_multiply_are_listed_once_for_all_steps(platforms):
    (layer,) = layer_kernels(platforms)
    assert (layer.key.module, layer.key.step, layer.n_classes) == ("conv", 0, 4)
    assert layer.paths == ("direct", "Winograd", "direct", "GEMM", "")
    assert layer.kernels[3] == GEMM
    assert [group.numbers for group in groups_of([layer])] == [(0, 2), (1,), (3,), (4,)]


def test_a_step_with_other_kernels_is_another_row():
    first, second = (platform(name, 1, DIRECT) for name in "ab")
    second.calls["kernel"][2] = 1
    assert [layer.key.step for layer in layer_kernels(platforms_of([first, second]))] == [0, 1]


def test_without_kernels_there_is_no_section():
    study = Study.from_platforms(platforms_of([platform("a", 1, ""), platform("b", 2, "")]))
    assert study.layers == ()
    document = classes_document(study)
    assert "Kernel paths" not in render(document, "txt")
    assert json.loads(render(document, "json"))["layers"] == []


def test_the_section_in_every_format(platforms):
    document = classes_document(Study.from_platforms(platforms))
    texts = {extension: render(document, extension) for extension in set(RENDERERS) - set(ISSUE_FORMATS)}
    assert re.search(r"^conv/aten::convolution +4 +direct +Winograd +GEMM +\?$", texts["txt"], re.MULTILINE)
    assert re.search(r"^ +1 +2 +a, c$", texts["txt"], re.MULTILINE)
    assert "| conv/aten::convolution | 0 | 4 | direct | Winograd | GEMM | ? |" in texts["md"]
    assert "jit_wino:avx512_core" in texts["html"]
    (layer,) = json.loads(texts["json"])["layers"]
    assert [p["path"] for p in layer["platforms"]] == ["direct", "Winograd", "direct", "GEMM", ""]
    rows = [r for r in csv.DictReader(io.StringIO(texts["csv"])) if r["output"] == "conv/aten::convolution"]
    assert [(r["platform"], r["class"], r["path"]) for r in rows] == [
        ("a", "A", "direct"), ("b", "B", "Winograd"), ("c", "A", "direct"), ("d", "C", "GEMM"), ("e", "D", "")
    ]  # fmt: skip
    assert rows[1]["kernel"] == WINOGRAD


def test_kernels_of_an_output_are_in_its_rows(platforms):
    document = classes_document(Study.from_platforms(platforms, ["conv/*"]))
    rows = list(csv.DictReader(io.StringIO(render(document, "csv"))))
    assert [(r["step"], r["path"]) for r in rows][:5] == [
        ("0", "direct"), ("0", "Winograd"), ("0", "direct"), ("0", "GEMM"), ("0", "")
    ]  # fmt: skip
    assert len(rows) == 10


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN in this torch")
def test_two_libraries_are_two_groups_and_diff_says_kernel(tmp_path, capsys):
    net = nn.Sequential(nn.Conv2d(32, 32, 3), nn.ReLU())
    x = torch.rand(4, 32, 32, 32)
    for name, settings in (("on", ()), ("again", ()), ("off", (("mkldnn", False),))):
        with CpuSettings(settings), shadowrun.record(tmp_path / f"{name}.shadowrec", kernels=True), torch.no_grad():
            net(x)
    (layer,) = layer_kernels(load(find_recordings([tmp_path])))
    assert [group.numbers for group in groups_of([layer])] == [(0, 2), (1,)]  # again, off, on
    assert layer.paths[1] == "GEMM"
    files = [str(tmp_path / f"{name}.shadowrec") for name in ("on", "off")]
    assert main(["diff", *files, "-f", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["first_divergence"]
    assert found["outcome"] == "kernel"
    assert found["second"]["kernel"].startswith("aten::_slow_conv2d_forward")
    assert main(["diff", *files]) == 0
    assert re.search(r"^ +path +(direct|GEMM) in the first, GEMM in the second$|^ +path +GEMM$",
                     capsys.readouterr().out, re.MULTILINE)  # fmt: skip
