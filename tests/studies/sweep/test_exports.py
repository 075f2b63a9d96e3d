"""Lists for other test suites, read by those that use them: torch's device-type tests, torchgen, pandas."""

import csv
import io
import subprocess
import sys

import pandas as pd
import pytest
import torch

from shadowrun.cli.studies import support
from shadowrun.errors import UsageError
from shadowrun.studies.sweep.cases import CaseFinding, Kind, Part
from shadowrun.studies.sweep.reports import exports
from shadowrun.studies.sweep.reports.support import read_sweeps
from tests.coverage_kit import CRASH, FALLBACK, MISMATCH, UNSUPPORTED, write

pytestmark = pytest.mark.usefixtures("forked_processes")

DTYPES = ("float32", "bfloat16")
FAILING = {
    ("cumsum", None, None): UNSUPPORTED,
    ("exp", None, Part.FORWARD): FALLBACK,
    ("matmul", "bfloat16", Part.FORWARD): MISMATCH,
    ("softmax", None, Part.BACKWARD): MISMATCH,
    ("add", "float32", Part.OUT): CRASH,
}


@pytest.fixture
def sweep(tmp_path):
    (sweep,) = read_sweeps([write(tmp_path / "a", FAILING, dtypes=DTYPES)])
    return sweep


def test_the_names_of_the_command_line():
    assert exports.LISTS == support._LISTS


class Operators:
    """As the `ops` decorator of torch's tests, as far as its configuration uses it."""

    def __init__(self, op_list):
        self.op_list = op_list


def test_torchs_device_tests_take_the_lists(sweep):
    from torch.testing._internal.common_device_type import DeviceTypeTestBase
    from torch.testing._internal.common_methods_invocations import op_db

    names = {}
    exec(compile(exports.export("opinfo", sweep), "skips.py", "exec"), names)

    class Base(DeviceTypeTestBase):
        device_type = "vpu"

    Base.set_test_configs(op_overrides=names["op_overrides"](), op_allowlist=names["OP_ALLOWLIST"])
    chosen = Operators(op_db)
    Base._apply_op_allowlist(chosen)
    # All but the one that fails entirely; entries of one name count each.
    allowed = {"add", "exp", "linalg.norm.subgradients_at_zero", "matmul", "softmax"}
    assert {op.full_name for op in chosen.op_list} == allowed
    n_before = {op.full_name: len(op.decorators) for op in chosen.op_list}
    Base._apply_op_overrides(chosen)
    by_name = {op.full_name: op for op in chosen.op_list}
    n_added = {name: len(by_name[name].decorators) - n for name, n in n_before.items()}
    # A fallback is right; gradients have two classes of tests.
    assert n_added == {"add": 1, "exp": 0, "linalg.norm.subgradients_at_zero": 0, "matmul": 1, "softmax": 2}

    def skipped(name, cls, test, dtype):
        found = [d for d in by_name[name].decorators[n_before[name] :] if d.is_active(cls, test, "vpu", dtype, {})]
        functions = [decorator for d in found for decorator in d.decorators]
        return [getattr(decorate(lambda: None), "__unittest_skip_why__", None) for decorate in functions]

    assert skipped("matmul", "TestCommon", "test_out", torch.bfloat16) == [
        "mismatch in aten::mm: reduced precision: inputs rounded to bf16"
    ]
    assert skipped("matmul", "TestCommon", "test_out", torch.float32) == []
    assert skipped("softmax", "TestBwdGradients", "test_fn_grad", torch.float32) != []
    assert skipped("softmax", "TestCommon", "test_out", torch.float32) == []
    # A crash would end all tests of the process.
    assert skipped("add", "TestCommon", "test_dtypes", torch.float32) == ["crash in aten::exp: signal 11 (SIGSEGV)"]
    kept = names["apply_to"]([op for op in op_db if op.full_name in ("cumsum", "exp")])
    assert [op.full_name for op in kept] == ["exp"]


def test_torchgen_reads_the_yaml(sweep, tmp_path):
    import torchgen
    from torchgen.gen import get_grouped_native_functions, parse_native_yaml
    from torchgen.gen_backend_stubs import parse_backend_yaml

    path = tmp_path / "vpu.yaml"
    path.write_text(exports.export("backend-yaml", sweep), encoding="utf-8")
    folder = f"{torchgen.__path__[0]}/packaged/ATen/native"
    parsed = parse_native_yaml(f"{folder}/native_functions.yaml", f"{folder}/tags.yaml")
    read = parse_backend_yaml(str(path), get_grouped_native_functions(parsed.native_functions), parsed.backend_indices)
    assert (str(read.backend_key), read.cpp_namespace) == ("PrivateUse1", "at_vpu")
    names = {str(name) for name in read.backend_indices[read.backend_key].index}
    assert {"add.Tensor", "exp", "_softmax", "_softmax_backward_data"} - {"exp"} <= names
    assert not {"cumsum", "cumsum.out", "mm", "matmul"} & names


def test_expected_accuracy(sweep, tmp_path):
    table = pd.read_csv(io.StringIO(exports.export("accuracy", sweep)))
    assert list(table.columns) == ["name", "accuracy", "graph_breaks"]

    def field(name):  # as check_accuracy.py of torch's benchmarks looks it up
        return table.loc[table["name"] == name]["accuracy"].item()

    assert field("cumsum.float32") == "fail_to_run"
    assert (field("matmul.bfloat16"), field("matmul.float32")) == ("fail_accuracy", "pass")
    assert field("exp.float32") == "pass"
    (plain,) = read_sweeps([write(tmp_path / "b", {})])
    rows = list(csv.reader(io.StringIO(exports.export("accuracy", plain))))
    assert rows[1] == ["add", "pass", "0"]


def test_recorded_calls_are_named_as_the_dispatcher_does(tmp_path):
    path = write(tmp_path / "a", {("aten::mm", None, None): MISMATCH}, operators=["aten::mm", "aten::add.Tensor"])
    (sweep,) = read_sweeps([path])
    assert "supported:\n  - add.Tensor\n" in exports.export("backend-yaml", sweep)
    with pytest.raises(UsageError, match=r"'aten::add\.Tensor' is no name of torch's database"):
        exports.export("opinfo", sweep)


@pytest.mark.parametrize(
    "evil",
    [
        "\"\"\"\n'''\\\nimport os; os.abort()\nx = ({",
        "coding: utf-7 +AAo-1/0+AAo-#",
        "#coding: utf-7 +ACIAIgAi-;1/0#",
        "coding: unicode_escape\n1/0\n#",
        "coding: raw_unicode_escape\\u000a1/0",
    ],
)
def test_a_file_from_elsewhere_does_not_become_code(tmp_path, evil):
    finding = CaseFinding(Kind.MISMATCH, evil, evil, "implementation", evil, evil)
    path = write(tmp_path / "a", {("exp", None, None): finding}, operators=["exp"], ref=evil, versions={"torch": evil})
    (sweep,) = read_sweeps([path])
    names = {}
    exec(compile(exports.export("opinfo", sweep).encode(), "skips.py", "exec"), names)  # decoded as Python does a file
    assert set(names["SKIPS"]) == {"exp"}
    dtype = write(tmp_path / "c", {("exp", None, None): finding}, operators=["exp"], dtypes=["x,); import os; (0"])
    with pytest.raises(UsageError, match="is no dtype"):
        exports.export("opinfo", read_sweeps([dtype])[0])
    other = write(tmp_path / "b", {}, operators=["exp"], target="x\nimport os")
    with pytest.raises(UsageError, match="is no device type"):
        exports.export("opinfo", read_sweeps([other])[0])


@pytest.mark.slow
def test_generated_tests_are_skipped(tmp_path):
    """With torch's own machinery from end to end, on a device of PrivateUse1."""
    (sweep,) = read_sweeps([write(tmp_path / "a", FAILING, dtypes=DTYPES)])
    (tmp_path / "skips.py").write_text(exports.export("opinfo", sweep), encoding="utf-8")
    (tmp_path / "test_ours.py").write_text(
        """
import unittest, torch
from shadowrun import sim
sim.enable("vpu", flaws=["missing-cumsum"])
import skips
from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase
skips.configure()
NAMES = ("add", "cumsum", "exp", "matmul")
class TestCommon(TestCase):
    # The first by name, of which torch 2.13 alone would apply no skips.
    @ops([op for op in op_db if op.name == "cumsum"], allowed_dtypes=(torch.float32,))
    def test_a(self, device, dtype, op):
        self.test_runs(device, dtype, op)
    @ops([op for op in op_db if op.full_name in NAMES], allowed_dtypes=(torch.float32, torch.bfloat16))
    def test_runs(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype):
            self.assertEqual(op(sample.input, *sample.args, **sample.kwargs).device.type, "vpu")
instantiate_device_type_tests(TestCommon, globals(), only_for="vpu")
unittest.main(verbosity=2)
""",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, "test_ours.py"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("test_")]
    skipped = {line.split()[0].removeprefix("test_") for line in lines if "skipped" in line}
    cumsum = {f"{name}_vpu_float32" for name in ("a_cumsum", "runs_cumsum")} | {"runs_cumsum_vpu_bfloat16"}
    assert skipped == {*cumsum, "runs_add_vpu_float32", "runs_matmul_vpu_bfloat16"}
    assert len(lines) == 9
