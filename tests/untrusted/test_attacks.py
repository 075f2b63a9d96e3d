"""Files of an attacker, given to the commands that run something: nothing of the attacker's is run, opened or started.

Each test plants what would leave a trace (a file in the working directory, a changed victim, a started process), runs
the real command, and looks for the trace. The data file is a real one, edited as an SQLite client could.
"""

import ast
import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import sqlite3
import stat
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

import shadowrun
from shadowrun.cli.main import main
from shadowrun.errors import DataFileError
from shadowrun.platforms import plugins
from shadowrun.repro import script as scripting
from shadowrun.sim import FATAL
from shadowrun.store import captured_inputs as tensors
from shadowrun.studies.sweep import rebuild_case
from shadowrun.studies.sweep.cases import Case, CaseFinding, CaseOutcome, Kind, Part
from shadowrun.studies.sweep.coverage_file import CoverageFile, SweepInfo
from shadowrun.studies.sweep.inputs import printed
from shadowrun.studies.sweep.rebuild_case import Sampler

PRECIOUS = "precious\n"
EVIL = "import pathlib; pathlib.Path('PWNED').touch()"
LAUNCH = f'__import__("pathlib").Path({str(Path("PWNED"))!r}).touch()'


@pytest.fixture(scope="module")
def recorded(sim_device, tmp_path_factory):
    """A data file with one mismatch of ``aten::mm`` and its captured inputs."""
    folder = tmp_path_factory.mktemp("recorded")
    with sim_device.flaws("matmul-in-bf16"), shadowrun.compare("sim", file=folder / "x.shadowrun"):
        a = torch.randn(8, 8).to("sim")
        a @ a
    return folder


@pytest.fixture
def attack(recorded, tmp_path, monkeypatch):
    """A copy of it, for an attacker to edit."""
    for name in ("x.shadowrun", "x.shadowrun.tensors"):
        source = recorded / name
        shutil.copytree(source, tmp_path / name) if source.is_dir() else shutil.copy(source, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    Path("VICTIM").write_text(PRECIOUS, encoding="utf-8")
    return Attack(Path("x.shadowrun"))


class Attack:
    """Edits of a data file and of the files next to it."""

    def __init__(self, data):
        self.data = data

    def sql(self, text, *values):
        connection = sqlite3.connect(self.data)
        found = connection.execute(text, values).fetchall()
        connection.commit()
        connection.close()
        return found

    def info(self, **changes):
        ((text,),) = self.sql("select value from meta where key = 'info'")
        self.sql("update meta set value = ? where key = 'info'", json.dumps(json.loads(text) | changes))

    def target(self, text, **facts):
        self.info(target=text, target_fingerprint=facts)

    def operator(self, name, inputs, *args, tensors=(), **kwargs):
        """Another operator in the place of ``aten::mm``, in the records and in the captured inputs."""
        self.sql("update context set inputs = ? where op_id = (select id from op where name = 'aten::mm')", inputs)
        self.sql("update op set name = ? where name = 'aten::mm'", name)
        content = {
            "format": 1,
            "op": name,
            "args": list(args),
            "kwargs": kwargs,
            "tensors": tensors if isinstance(tensors, dict) else list(tensors),
        }
        for file in Path("x.shadowrun.tensors").iterdir():
            torch.save(content, file)

    def graph(self, *nodes, inputs=(), **how):
        """A compiled region with this graph."""
        ((op,),) = self.sql("select id from op where name = 'aten::mm'")
        self.sql("insert into region values (?, 'eager', 2, '')", op)
        compiled = {"name": "eager", "module": "", "is_function": False, "importable": True, "mode": None}
        compiled |= {"options": {}, "dynamic": None, "left_out": []} | how
        text = json.dumps([[*node, ["", ""]] for node in nodes])
        kwargs = {"graph": text, "how": json.dumps(compiled), "devices": [""] * len(inputs), "needs_grad": []}
        args = [{"tensor": k} for k in range(len(inputs))]
        self.operator("compiled::graph 0", "f32[2]", *args, tensors=inputs, is_plain=True, **kwargs)


@pytest.fixture
def untried(monkeypatch):
    """Scripts are written, not run; regions are not compiled."""
    from shadowrun.compiled.compile_spec import CompileSpec

    done = subprocess.CompletedProcess("repro.py", 1, "as it should", "")
    monkeypatch.setattr(scripting, "run_script", lambda *_: done)
    monkeypatch.setattr(CompileSpec, "look_for_compiler", lambda _: 1 / 0)


@pytest.fixture(autouse=True)
def untouched(tmp_path):
    """No trace is left, whatever the command said."""
    yield
    assert [p for p in tmp_path.rglob("*") if p.name.startswith("PWNED")] == []
    victim = tmp_path / "VICTIM"
    assert not victim.exists() or victim.read_text(encoding="utf-8") == PRECIOUS


def refused(capsys, *command):
    """What a command says that writes or runs nothing."""
    assert main(list(command)) == 2
    said = capsys.readouterr()
    assert not Path("repro").exists()
    assert "Traceback" not in said.err
    return said.out + said.err


# -- 1. names in scripts ---------------------------------------------------------------------------


NAMES = [
    f'a": {LAUNCH}, "b',
    f"output 0]: {LAUNCH}  #",
    f'self"]; {LAUNCH}; x["self',
    f"output 0[{LAUNCH}]",
    "output 0[0]\nimport os",
    "output \u0660",
    "output 00",
    "output 7",
    "self ",
    "\uff53elf",
    "mat2[1][0]",
    "self\\",
    "{__import__('os')}",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", ["cpu[threads=1]", "vulkan"])  # here, and not here
def test_the_name_of_a_result_is_one_that_the_operator_has(attack, capsys, name, target):
    """Where nothing shows the fault here, the script uses what the data file has."""
    attack.target(target)
    attack.sql("update tensor set name = ?", name)
    assert "of aten::mm, which has none of that name" in refused(capsys, "repro", "x.shadowrun")


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("name", ["output 0", "self", "mat2[3]"])
def test_names_that_the_recorder_writes_are_taken(attack, name):
    attack.target("cpu[threads=1]")
    attack.sql("update tensor set name = ?", name)
    assert main(["repro", "x.shadowrun", "--no-minimise"]) == 0
    (script,) = Path("repro").glob("*/repro.py")
    assert f'ALLOWED = {{"{name}": ' in script.read_text(encoding="utf-8")


def test_texts_of_the_file_are_only_texts_in_a_script(attack):
    """Module, line, explanation and versions are anything; the script is one program, and does what it did before."""
    bad = f'"""\n{EVIL}\n"""\\'
    attack.target("cpu[threads=1]")
    attack.info(versions={bad: bad, "torch": bad}, target="cpu[threads=1]", target_fingerprint={})
    for table in ("verdict", "context"):
        columns = [row[1] for row in attack.sql(f"pragma table_info({table})")]
        for column in {"explanation", "evidence", "site", "module"} & set(columns):
            attack.sql(f"update {table} set {column} = ?", bad)
    main(["repro", "x.shadowrun", "--no-minimise"])
    for script in Path("repro").glob("*/repro.py"):
        tree = ast.parse(script.read_text(encoding="utf-8"))
        assert not any(isinstance(node, ast.Constant) and node.value == "PWNED" for node in ast.walk(tree))


# -- 2. operators ----------------------------------------------------------------------------------


OPERATORS = {
    "aten::from_file": ["VICTIM", True, 1000],
    "aten::save": [{"tensor": 0}, "PWNED"],
    "aten::set_.source_Tensor": [{"tensor": 0}, {"tensor": 0}],
    "aten::_reshape_alias": [{"tensor": 0}, [1 << 20], [1]],
    "aten::_sparse_coo_tensor_unsafe": [{"tensor": 0}, {"tensor": 0}, [2]],
    "aten::sparse_coo_tensor.indices_size": [{"tensor": 0}, {"tensor": 0}, [2]],
    "aten::sparse_csr_tensor.crow_col_value_size": [{"tensor": 0}, {"tensor": 0}, {"tensor": 0}, [2]],
    "aten::_weight_norm_interface_backward": [*[{"tensor": 0}] * 4, 0],
    "aten::fused_moving_avg_obs_fake_quant": [*[{"tensor": 0}] * 7, 0.1, 0, 255, 0, True],
    "aten::_fused_moving_avg_obs_fq_helper": [*[{"tensor": 0}] * 7, 0.1, 0, 255, 0, True],
    "aten::_fused_moving_avg_obs_fq_helper_functional": [*[{"tensor": 0}] * 7, 0.1, 0, 255, 0, True],
    "aten::segment_reduce": [{"tensor": 0}, "sum"],
    "aten::_segment_reduce_backward": [{"tensor": 0}, {"tensor": 0}, {"tensor": 0}, "sum"],
    "aten::_reshape_alias_copy": [{"tensor": 0}, [1 << 20], [1]],
    "c10d_functional::wait_tensor": [{"tensor": 0}],
    "aten::_nested_view_from_buffer": [{"tensor": 0}, {"tensor": 0}, {"tensor": 0}, {"tensor": 0}],
    "aten::_nested_tensor_size": [{"tensor": 0}],
    "aten::_nested_tensor_strides": [{"tensor": 0}],
    "aten::_nested_tensor_storage_offsets": [{"tensor": 0}],
    "aten::_assert_async.msg": [{"tensor": 0}, "PWNED"],
    "aten::warn": ["PWNED"],
    "prim::Print": ["PWNED"],
    "c10d::barrier": [],
    "profiler::_record_function_enter": ["PWNED"],
    "quantized::linear_unpack": [{"tensor": 0}],
    "torch::load": ["VICTIM"],
    "load_library::x": ["PWNED"],
    "_ops::x": [],
    "aten::add.__class__": [],
    "aten::": [],
    "aten::add\u202e": [{"tensor": 0}],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_no_operator_that_does_more_than_compute(attack, capsys, name):
    attack.target("cpu[threads=1]")
    attack.operator(name, "f32[2]", *OPERATORS[name], tensors=[torch.ones(2)])
    refused(capsys, "repro", "x.shadowrun")
    assert main(["slowdown", "x.shadowrun", "--target", "cpu[threads=1]"]) in (0, 2)
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    if not said.err:  # the file itself was not refused
        assert "Not timed (1)" in said.out


def test_no_path_reaches_an_operator_of_a_sweep_or_of_slowdown(attack, capsys):
    attack.target("cpu[threads=1]")
    attack.operator("aten::from_file", "'VICTIM', True, 100000", "VICTIM", True, 100000)
    assert main(["slowdown", "x.shadowrun"]) == 0
    assert "aten::from_file is not called for a file: reads a file" in capsys.readouterr().out
    assert main(["sweep", "--target", "cpu[threads=1]", "--from", "x.shadowrun", "--jobs", "1"]) == 0
    assert Path("VICTIM").stat().st_size == len(PRECIOUS)


@pytest.mark.parametrize(
    ("name", "inputs", "said"),
    [
        ("aten::ones", "[1000000, 1000000]", "would make more than"),
        ("aten::empty_strided", "[2], [1000000000000]", "would make more than"),
        ("aten::mm", "f32[1000000, 1000000], f32[1000000, 1000000]", "larger than 2 GiB"),
        ("aten::cat", "[f32[2], … 999999999999 more]", "more entries"),
        ("aten::div.Tensor_mode", "f32[2], f32[2], rounding_mode='/etc/passwd'", "is no choice for rounding_mode"),
        ("aten::sum", "f32[2], dtype=torch.load", "is no constant"),
        ("aten::sum", "f32[2], dtype=torch._dynamo", "is no constant"),
        ("aten::sum", "f32[2], evil=1", "takes other arguments"),
        ("aten::cat", "[" * 100_000, "cannot be made"),
        ("aten::sum", "'\\x'", "recorded in part"),
        ("aten::ones", "[-1]", ""),
    ],
)
def test_inputs_that_cannot_be_made_are_left_out(attack, capsys, name, inputs, said):
    attack.operator(name, inputs)
    attack.target("cpu[threads=1]")
    assert main(["slowdown", "x.shadowrun"]) == 0
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("aten::gelu", [{"tensor": 0}], {"approximate": "../VICTIM"}),
        ("aten::to.device", [{"tensor": 0}, "npu", 5], {}),
        ("aten::add.Tensor", [{"tensor": 0}, {"tensor": 0}], {"generator": 1}),
        ("aten::ones", [[1 << 40]], {}),
        ("aten::relu", [{"tensor": 0}] * 9, {}),
        ("aten::relu", ["PWNED"], {}),
        ("aten::add.Scalar", [{"tensor": 0}, 10**30], {}),
    ],
)
def test_captured_arguments_fit_their_schema(attack, capsys, name, args, kwargs):
    attack.target("cpu[threads=1]")
    attack.operator(name, "f32[2]", *args, tensors=[torch.ones(2)], **kwargs)
    assert "The captured inputs do not fit" in refused(capsys, "repro", "x.shadowrun")


def test_an_archive_that_is_larger_than_its_file_is_not_read(attack, capsys):
    """Storages of zeros, compressed: a megabyte that becomes gigabytes."""
    (file,) = Path("x.shadowrun.tensors").glob("*.pt")
    with zipfile.ZipFile(file) as old:
        members = {entry.filename: old.read(entry) for entry in old.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for member, content in members.items():
            new.writestr(member, content if "/data/" not in member else bytes(1 << 26))
    attack.target("cpu[threads=1]")
    assert "cannot be read" in refused(capsys, "repro", "x.shadowrun")


def with_two_lists(packed):
    """An archive whose end names the list of what is packed; right before the end lies one that says it is small."""
    end = packed.rindex(b"PK\5\6")
    size, place = struct.unpack("<II", packed[end + 12 : end + 20])
    small, at = bytearray(packed[place : place + size]), 0
    while at < size:
        small[at + 24 : at + 28] = struct.pack("<I", 1)
        at += 46 + sum(struct.unpack("<HHH", small[at + 28 : at + 34]))
    return packed[:end] + small + packed[end:]


def packed_again(content, change=lambda name, data: data, how=zipfile.ZIP_DEFLATED):
    """A file of torch's as an archive of Python's."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w", how) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))
    return out.getvalue()


@pytest.mark.parametrize("what", ["two lists", "two lists, one with a comment", "packed", "before", "of old", "tar"])
def test_torch_reads_the_archive_that_was_looked_at(attack, capsys, monkeypatch, what):
    """A few bytes that become many once torch reads another list of members than Python, or another format."""
    (file,) = Path("x.shadowrun.tensors").glob("*.pt")
    content = file.read_bytes()
    if what.startswith("two lists"):
        content = with_two_lists(packed_again(content))
        if "comment" in what:
            content = content[:-2] + b"\1\0 "
    elif what == "packed":
        content = packed_again(content)
    elif what == "before":
        content = b"x" + content
    elif what == "of old":
        old = io.BytesIO()
        torch.save(torch.load(file, weights_only=True), old, _use_new_zipfile_serialization=False)
        content = old.getvalue() + content
    else:
        content = bytes(512) + content
    file.write_bytes(content)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("read"))
    attack.target("cpu[threads=1]")
    assert "cannot be read" in refused(capsys, "repro", "x.shadowrun")


class Rebuilt:
    """Pickles as a call of a function that `weights_only` allows."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def test_a_sparse_tensor_has_indices_within_its_size(attack, capsys):
    parts = (torch.tensor([[10**6]]), torch.ones(1), torch.Size([2]), True)
    bad = Rebuilt(torch._utils._rebuild_sparse_tensor, torch.sparse_coo, parts)
    attack.target("cpu[threads=1]")
    attack.operator("aten::_to_dense", "f32[2]", {"tensor": 0}, tensors=[bad])
    assert "cannot be read" in refused(capsys, "repro", "x.shadowrun")


@pytest.mark.parametrize("graph", [False, True])
def test_captured_tensors_have_values(attack, capsys, graph):
    """One of 4 TiB in a file of a kilobyte: it lies on the device "meta", wherever it is loaded to."""
    bad = Rebuilt(torch._utils._rebuild_meta_tensor_no_storage, torch.float32, (1 << 40,), (1,), False)
    attack.target("cpu[threads=1]")
    if graph:
        attack.graph(INPUT, node("torch.relu", "%p"), output("f"), inputs=[bad])
    else:
        attack.operator("aten::relu", "f32[2]", {"tensor": 0}, tensors=[bad])
    assert "cannot be read" in refused(capsys, "repro", "x.shadowrun")


@pytest.mark.parametrize("what", ["sparse_csr", "sparse_coo", "nested"])
def test_no_other_tensor_has_the_indices_of_a_sparse_one(attack, capsys, what):
    """A graph, or the operator itself, would write to them once they were checked."""
    other = torch.tensor([0, 1]) if what != "sparse_coo" else torch.tensor([[0]])
    if what == "sparse_csr":
        parts = torch.sparse_csr, (other, torch.tensor([0]), torch.ones(1), torch.Size([1, 2]), True)
        bad = Rebuilt(torch._utils._rebuild_sparse_tensor, *parts)
    elif what == "sparse_coo":
        parts = torch.sparse_coo, (other, torch.ones(1), torch.Size([2]), True)
        bad = Rebuilt(torch._utils._rebuild_sparse_tensor, *parts)
    else:
        other = torch.tensor([[2], [4]])
        sizes = other, torch.ones_like(other), torch.tensor([0, 2])
        bad = Rebuilt(torch._utils._rebuild_nested_tensor, torch.ones(6), *sizes)
    attack.target("cpu[threads=1]")
    attack.operator("aten::relu", "f32[2]", {"tensor": 1}, tensors=[other, bad])
    assert "cannot be read" in refused(capsys, "repro", "x.shadowrun")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_that_share_their_indices_are_read(tmp_path):
    a = torch.eye(3).to_sparse_csr()
    tensors.save(tmp_path / "x", "0.pt", tensors.StoredCall("aten::add.Tensor", (a, a.detach(), torch.ones(3)), {}))
    x, y, _ = tensors.load(tmp_path / "x", "0.pt").args
    assert x.col_indices().data_ptr() == y.col_indices().data_ptr()


def with_attributes(t):
    """A tensor with attributes that hide methods, as `weights_only` lets it be made."""
    from collections import OrderedDict

    return Rebuilt(torch._utils._rebuild_parameter_with_state, t, False, OrderedDict(), {"numel": 3})


@pytest.mark.parametrize("place", ["in the list", "among the arguments", "in a tuple", "under a key"])
def test_a_tensor_is_looked_at_wherever_it_is(attack, capsys, place):
    bad, fine = with_attributes(torch.ones(3)), torch.ones(3)
    attack.target("cpu[threads=1]")
    argument, tensors = {
        "in the list": ({"tensor": 0}, [bad]),
        "among the arguments": (bad, [fine]),
        "in a tuple": ((bad,), [fine]),
        "under a key": ({"tensor": fine}, {fine: bad}),
    }[place]
    attack.operator("aten::relu", "f32[2]", argument, tensors=tensors)
    assert "cannot be read" in refused(capsys, "repro", "x.shadowrun")


# -- graphs ----------------------------------------------------------------------------------------

INPUT = ["placeholder", "p", "", [], {"dict": []}]


def node(target, *args, kind="call_function", name="f", **kwargs):
    named = {"dict": [[k, v] for k, v in kwargs.items()]}
    return [kind, name, target, [{"node": a[1:]} if str(a).startswith("%") else a for a in args], named]


def output(name):
    return ["output", "output", "", [{"tuple": [{"node": name}]}], {"dict": []}]


GRAPHS = {
    "a file is mapped and written to": [
        node("torch.ops.aten.from_file.default", "VICTIM", True, 9),
        node("torch.ops.aten.copy_.default", "%f", "%p", name="g"),
    ],
    "a file by a function": [node("torch.from_file", "VICTIM", True, 9)],
    "a file by a method": [node("from_file", "%p", "VICTIM", kind="call_method")],
    "memory that is not the tensor's": [node("torch.ops.aten._reshape_alias.default", "%p", [1 << 30], [1])],
    "indices that are not checked": [
        node("torch.ops.aten.full.default", [1, 1], 10**11, name="f"),
        node("torch.ops.aten.sparse_coo_tensor.indices_size", "%f", "%p", [2], name="g"),
        node("to_dense", "%g", kind="call_method", name="h"),
    ],
    "indices that change after their check": [
        node("torch.ops.aten.sparse_csr_tensor.crow_col_value_size", "%p", "%p", "%p", [2, 2], name="g"),
        node("torch.ops.aten.fill_.Scalar", "%p", 10**11, name="h"),
    ],
    "storage": [node("untyped_storage", "%p", kind="call_method")],
    "storage by a function": [node("torch.Tensor.storage", "%p")],
    "an array, whose methods write files": [node("numpy", "%p", kind="call_method")],
    "what unpickles": [node("torch.Tensor.__reduce_ex__", "%p", 2)],
    "what sets its state": [node("torch.Tensor.__setstate__", "%p", {"tuple": []})],
    "what loads a module": [node("module_load", "%p", "%p", kind="call_method")],
    "a hook": [node("register_hook", "%p", "%p", kind="call_method")],
    "an attribute of any object": [node("operator.attrgetter", "__class__")],
    "a function of Python's": [node("builtins.eval", "1")],
    "a private function": [node("torch._C._cuda_init")],
    "a module of torch": [node("torch.utils.cpp_extension.load_inline", "PWNED")],
    "a method of a text": [node("split", "a,b", ",", kind="call_method")],
    "a text to a function": [node("torch.nn.functional.gelu", "%p", approximate="/etc/passwd")],
    "a text to an operator": [node("torch.ops.aten.gelu.default", "%p", approximate="$(touch PWNED)")],
    "a collective": [node("torch.ops._c10d_functional.all_reduce.default", "%p", "sum", "0")],
    "a higher-order operator": [node("torch.ops.higher_order.cond", "%p")],
    "a library": [node("torch.ops.load_library", "./x.so")],
    "a class": [node("torch.classes.load_library", "./x.so")],
    "autocast for any module of torch": [node("torch.amp.autocast_mode._enter_autocast", "os", None, True, None)],
    "a name in the code": [[*INPUT[:1], "torch", *INPUT[2:]]],
    "a name in other letters": [[*INPUT[:1], "\uff50", *INPUT[2:]]],
    "a device without values": [node("torch.ops.aten.zeros.default", [2], device={"device": "meta"}), output("f")],
    "an endless list": [node("torch.ops.aten.zeros.default", [1 << 40])],
}


@pytest.mark.parametrize("name", GRAPHS)
def test_no_graph_does_more_than_compute(attack, capsys, name):
    attack.target("cpu")
    *_, last = nodes = GRAPHS[name]
    attack.graph(INPUT, *nodes, *([] if last[0] == "output" else [output(last[1])]), inputs=[torch.ones(9)])
    refused(capsys, "repro", "x.shadowrun", "--no-minimise")


def method(name, on, result, *args):
    return node(name, f"%{on}", *args, kind="call_method", name=result)


WITH_INDICES = {
    "indices of an alias are turned around": (
        torch.eye(3)[:1].to_sparse,
        [method("detach", "p", "a"), method("t_", "p", "b"), method("to_dense", "a", "f")],
    ),
    "a tensor becomes sparse": (
        lambda: torch.eye(3),
        [method("to_sparse", "p", "a"), method("to_dense", "a", "f")],
    ),
    "sizes of a nested tensor": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        [method("relu", "p", "a"), method("sum", "a", "f")],
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested tensors")
@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("name", WITH_INDICES)
def test_tensors_of_a_graph_are_dense(attack, capsys, name):
    """Aliases of one tensor share its indices, and not its size: what turns the indices around led out of memory."""
    given, nodes = WITH_INDICES[name]
    attack.target("cpu")
    attack.graph(INPUT, *nodes, output("f"), inputs=[given()])
    assert "for a file, tensors are dense" in refused(capsys, "repro", "x.shadowrun", "--no-minimise")


@pytest.mark.usefixtures("untried")
def test_indices_that_a_graph_computes_are_looked_at(attack, capsys):
    """This one is written to: the place in memory is the file's choice."""
    attack.target("cpu")
    nodes = [
        node("torch.ops.aten.full.default", [4], 10**7, name="i"),
        node("torch.ops.aten.embedding_dense_backward.default", "%p", "%i", 3, -1, True, name="f"),
    ]
    attack.graph(INPUT, *nodes, output("f"), inputs=[torch.ones(4, 2)])
    assert "not below num_weights" in refused(capsys, "repro", "x.shadowrun", "--no-minimise")


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("name", ["torch.native_batch_norm", "torch.batch_norm_update_stats"])
def test_functions_of_a_graph_are_looked_at(attack, capsys, name):
    """They are no operators by name, and call those that do not check their sizes."""
    attack.target("cpu")
    few = node("torch.ops.aten.full.default", [1], 1.0, name="w")
    stats = ["%w", "%w", 0.1] if "update" in name else ["%w", "%w", None, None, True, 0.1, 1e-5]
    called = node(name, "%p", *stats, name="b")
    attack.graph(
        INPUT, few, called, node("operator.getitem", "%b", 0, name="f"), output("f"), inputs=[torch.ones(2, 90)]
    )
    assert "for each channel" in refused(capsys, "repro", "x.shadowrun", "--no-minimise")


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("index", [-1, -20_000, 3])
def test_the_seeds_of_a_graph_are_looked_at(attack, capsys, index):
    """Inductor's own operator: compiled code reads before the seeds where eager counts from their end."""
    attack.target("cpu")
    nodes = [
        node("torch.ops.prims.inductor_seeds.default", 3, {"device": "cpu"}, name="s"),
        node("torch.ops.prims.inductor_lookup_seed.default", "%s", index, name="k"),
        node("torch.ops.aten.add.Tensor", "%p", "%k", name="f"),
    ]
    attack.graph(INPUT, *nodes, output("f"), inputs=[torch.ones(2)])
    assert "none of the seeds" in refused(capsys, "repro", "x.shadowrun", "--no-minimise")


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("step", [1, 100])
@pytest.mark.parametrize("name", ["torch.ops.aten.as_strided.default", "torch.ops.aten.as_strided_copy.default"])
def test_no_graph_reaches_beyond_a_part_of_its_own(attack, capsys, name, step):
    """The rest of the memory is there in eager; compiled code computes the part alone."""
    attack.target("cpu")
    nodes = [
        node("torch.ops.aten.full.default", [1000], 0.5, name="x"),
        node("torch.ops.aten.mul.Tensor", "%x", "%p", name="y"),
        node("torch.ops.aten.slice.Tensor", "%y", 0, 0, 10 * step, step, name="s"),
        node(name, "%s", [9 * step + 1], [1], 0, name="f"),
    ]
    attack.graph(INPUT, *nodes, output("f"), inputs=[torch.ones(())])
    assert "reaches beyond its tensor" in refused(capsys, "repro", "x.shadowrun", "--no-minimise")


@pytest.mark.parametrize("options", [(), ("--no-minimise",)])
def test_kernels_that_compiled_code_calls_are_looked_at(attack, capsys, options):
    """Inductor leaves a product with ones out: a kernel takes the neighbours of its only number for places."""
    attack.target("cpu")
    shape = [1, 1, 1, 1, 8]
    nodes = [
        node("torch.ops.aten.slice.Tensor", "%p", 0, 0, 1, name="a"),
        node("torch.ops.aten.view.default", "%a", [1] * 5, name="b"),
        node("torch.ops.aten.expand.default", "%b", shape, name="c"),
        node("torch.ops.aten.full.default", shape, 1, name="o", dtype={"torch": "int64"}),
        node("torch.ops.aten.mul.Tensor", "%c", "%o", name="i"),
        node("torch.ops.aten.full.default", shape, 0.5, name="g"),
        node("torch.ops.aten.full.default", shape, 0.25, name="x"),
        node("torch.ops.aten.adaptive_max_pool3d_backward.default", "%g", "%x", "%i", name="f"),
    ]
    given = torch.full((8,), 3)
    given[0] = 0
    attack.graph(INPUT, *nodes, output("f"), inputs=[given], name="inductor")
    assert "in an order that no pooling gives them" in refused(capsys, "repro", "x.shadowrun", *options)


def test_a_captured_tensor_without_elements_lies_nowhere(attack, capsys):
    attack.target("cpu[threads=1]")
    far = torch.empty(0).set_(torch.empty(4).untyped_storage(), 10**11, (0,), (1,))
    attack.operator("aten::relu", "f32[0]", {"tensor": 0}, tensors=[far])
    assert "cannot be read" in refused(capsys, "repro", "x.shadowrun")


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_tensor_gets_no_other_size(attack, capsys):
    """In CSC, torch leaves it too few indices for its columns."""
    attack.target("cpu[threads=1]")
    given = [torch.eye(3)[:1].to_sparse_csc(), torch.eye(3)[:1].to_sparse_csc()]
    attack.operator("aten::resize_as_", "f32[1, 3]", {"tensor": 0}, {"tensor": 1}, tensors=given)
    assert "does not check the indices" in refused(capsys, "repro", "x.shadowrun")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"module": "evil", "name": "evil"}, "only the data file names it"),
        ({"module": "evil", "name": "compile", "is_function": True}, "only the data file names it"),
        ({"module": "os", "name": "system", "is_function": True}, "only the data file names it"),
        ({"module": "evil", "name": "inductor", "is_function": True}, "only the data file names it"),
        ({"name": "evil"}, "only the data file names it"),
        ({"name": "tvm"}, "only the data file names it"),
        ({"module": "evil; import os"}, "hold no graph of its own"),
        ({"mode": "max\\'"}, "There is no mode"),
    ],
)
def test_no_module_is_imported_for_a_file(attack, capsys, monkeypatch, how, said):
    Path("evil.py").write_text(EVIL, encoding="utf-8")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    attack.target("cpu")
    attack.graph(INPUT, node("torch.ops.aten.relu.default", "%p"), output("f"), inputs=[torch.ones(3)], **how)
    assert said in refused(capsys, "repro", "x.shadowrun")
    assert "evil" not in sys.modules


@pytest.mark.usefixtures("untried")
def test_a_module_next_to_a_backend_of_torch_is_not_in_the_script(attack, monkeypatch):
    """A name that torch has, and a module of the attacker's that would register it: the script imported that."""
    Path("evil.py").write_text(EVIL, encoding="utf-8")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    attack.target("cpu")
    graph = INPUT, node("torch.ops.aten.relu.default", "%p"), output("f")
    attack.graph(*graph, inputs=[torch.ones(3)], name="eager", module="evil")
    assert main(["repro", "x.shadowrun", "--no-minimise"]) == 0
    assert all("evil" not in p.read_text(encoding="utf-8") for p in Path("repro").glob("*/repro.py"))


@pytest.mark.parametrize("tried", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_inductor_gets_no_compiler_and_no_cache_of_the_attackers(attack, request, tried):
    if not tried:
        request.getfixturevalue("untried")
    cxx = Path("cxx.sh")
    cxx.write_text("#!/bin/sh\ntouch PWNED\nexit 1\n", encoding="utf-8")
    cxx.chmod(0o755)
    options = {"cpp.cxx": str(cxx.absolute()), "fx_graph_remote_cache": True, "trace.enabled": True, "freezing": False}
    options |= {"assert_indirect_indexing": False, "x'); import os  #": 1}
    attack.target("cpu")
    graph = INPUT, node("torch.ops.aten.relu.default", "%p"), output("f")
    attack.graph(*graph, inputs=[torch.ones(3)], name="inductor", options=options)
    assert main(["repro", "x.shadowrun", "--no-minimise"]) == 0
    (script,) = Path("repro").glob("*/repro.py")
    assert 'options={"freezing": False}' in script.read_text(encoding="utf-8")


# -- 3. platforms ----------------------------------------------------------------------------------


@pytest.fixture
def interpreter(attack):
    """A program that leaves a trace when it is started."""
    path = attack.data.with_name("x.shadowrun.tensors") / "evil.sh"
    path.write_text("#!/bin/sh\ntouch PWNED\nexit 1\n", encoding="utf-8")
    path.chmod(0o755)


PLATFORMS = [
    "cpu[env:LD_PRELOAD=./x.shadowrun.tensors/9.pt]",
    "cpu[env:PYTHONSTARTUP=x.py]",
    "cpu[env:OMP_TOOL_LIBRARIES=./x.so,threads=1]",
    "cpu[python=x.shadowrun.tensors/evil.sh]",
    'cpu[env:A="\u202e"]',
    "npu",
    "hpu:1",
]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("command", ["repro", "slowdown"])
@pytest.mark.parametrize("side", ["target", "ref"])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_platform_that_starts_something_is_named_by_a_person_only(attack, capsys, command, side, platform):
    attack.info(**{"target": "cpu[threads=1]", "target_fingerprint": {}} | {side: platform})
    said = refused(capsys, command, "x.shadowrun")
    assert "only the data file names it" in said
    offered = f"--{side} " in said
    assert offered == platform.isascii()


def test_the_text_to_paste_is_accepted_and_no_other(attack, capsys):
    """Named, it is used, and the script has the environment in plain sight."""
    platform = "cpu[env:SHADOWRUN_HARMLESS=1]"
    attack.target(platform)
    assert f"name it: --target '{platform}'" in refused(capsys, "repro", "x.shadowrun")
    assert "is not the platform" in refused(capsys, "repro", "x.shadowrun", "--target", "cpu[env:SHADOWRUN_HARMLESS=2]")
    assert "is not the platform" in refused(capsys, "repro", "x.shadowrun", "--target", "cpu")
    assert main(["repro", "x.shadowrun", "--no-minimise", "--target", platform]) == 0
    (script,) = Path("repro").glob("*/repro.py")
    assert 'ENVIRONMENT = {"target": {"SHADOWRUN_HARMLESS": "1"}' in script.read_text(encoding="utf-8")


@pytest.mark.parametrize("flaws", [["nan-drop', []); import os  #"], "x", [1], [["a"]], {"a": 1}])
def test_flaws_of_a_simulated_device_are_of_the_catalogue(attack, capsys, flaws):
    attack.target("sim", simulated_flaws=flaws, device="sim")
    assert "data-file-corrupt" in refused(capsys, "repro", "x.shadowrun") or not Path("repro").exists()


def test_a_simulated_device_of_the_file_is_none_of_torchs(attack, capsys):
    attack.target("cuda", simulated_flaws=[], device="cuda")
    assert "cannot be simulated" in refused(capsys, "repro", "x.shadowrun")


def test_an_entry_point_of_torchs_own_name_is_a_plug_in(attack, capsys, monkeypatch):
    """A package may bring a device under a name that torch knows: for a file it is not loaded."""
    import importlib.metadata

    entry = importlib.metadata.EntryPoint("maia", "evil:start", "shadowrun.platforms")
    found = plugins.entry_points
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == entry.group else found(group))
    Path("evil.py").write_text(EVIL, encoding="utf-8")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    attack.target("maia")
    assert "only the data file names it" in refused(capsys, "repro", "x.shadowrun")


# -- coverage files --------------------------------------------------------------------------------


def coverage(case=None, kind=Kind.MISMATCH, explanation="x", **info):
    """A coverage file with one finding."""
    file = CoverageFile.begin(Path("e.shadowcov"), SweepInfo(**{"target": "cpu[threads=1]", "ref": "cpu"} | info))
    found = [CaseFinding(kind, "aten::exp", "", "implementation", explanation, "y")]
    file.add(case or Case("exp", "float32", Part.FORWARD, 0), CaseOutcome.from_findings(found, "f32[20, 20]"))
    file.close()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_coverage_file_starts_nothing(tmp_path, monkeypatch, capsys, platform):
    monkeypatch.chdir(tmp_path)
    coverage(target=platform, target_fingerprint={"platform": platform}, versions={"torch": torch.__version__})
    assert "only the data file names it" in refused(capsys, "repro", "e.shadowcov", "--finding", "1")


@pytest.mark.parametrize("source", ["/etc/passwd", "../x.shadowrun", "a/b.shadowrun", "..", ".", "", "x" * 5000])
def test_a_coverage_file_does_not_tell_which_other_files_are_read(tmp_path, monkeypatch, capsys, source):
    monkeypatch.chdir(tmp_path)
    coverage(source=source, versions={"torch": torch.__version__})
    assert "give its path with --from DATA" in refused(capsys, "repro", "e.shadowcov", "--finding", "1")


@pytest.mark.parametrize("part", [Part.FORWARD, Part.INVALID, Part.SLICE, Part.TAIL])
@pytest.mark.parametrize("dtype", ["_meta_registrations", "load", "float33", "", "bits8"])
def test_a_dtype_of_a_coverage_file_is_one(tmp_path, monkeypatch, capsys, dtype, part):
    """torch imports modules of its own for an attribute that it lacks."""
    monkeypatch.chdir(tmp_path)
    lazy, asked = torch.__getattr__, []
    monkeypatch.setattr(torch, "__getattr__", lambda name: asked.append(name) or lazy(name))
    coverage(Case("exp", dtype, part, 0), versions={"torch": torch.__version__})
    assert "cannot be made again" in refused(capsys, "repro", "e.shadowcov", "--finding", "1")
    assert dtype not in asked


@pytest.mark.parametrize("kind", [Kind.PASS, Kind.NOT_VALID, Kind.UNVERIFIED])
def test_what_is_no_fault_is_none_whatever_its_explanation(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    coverage(kind=kind, explanation="on the reference: crash")
    assert main(["repro", "e.shadowcov"]) == 0
    assert "There are no findings" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["f32[0, 99999999999999999999]", "bits8[2]", "u1[2]"])
def test_forms_that_torch_cannot_make(attack, capsys, form):
    attack.target("cpu[threads=1]")
    attack.operator("aten::relu", form)
    coverage(Case("aten::relu", "float32", Part.FORWARD, 0), source="x.shadowrun")
    attack.sql("update context set dtypes = 'f32'")
    said = refused(capsys, "repro", "e.shadowcov", "--finding", "1")
    assert "its inputs cannot be made" in said or "no tensor has such a shape" in said


@pytest.mark.parametrize("part", [Part.SLICE, Part.LAYOUT, Part.TAIL, Part.BACKWARD])
def test_a_recorded_call_has_no_other_parts(attack, capsys, monkeypatch, part):
    """An item of a batch or another layout is another call, whose arguments need not fit each other."""
    monkeypatch.setattr(rebuild_case, "printed", lambda _: "f32[20, 20]")
    monkeypatch.setattr(rebuild_case.case_programs, "program", lambda *_: pytest.fail("it was made"))
    attack.target("cpu[threads=1]")
    attack.operator("aten::relu", "f32[20, 20]")
    coverage(Case("aten::relu", "float32", part, 0), source="x.shadowrun")
    attack.sql("update context set dtypes = 'f32'")
    assert "cannot be made again" in refused(capsys, "repro", "e.shadowcov", "--finding", "1")


# -- what others may read --------------------------------------------------------------------------


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_values_of_the_program_are_for_its_owner_only(tmp_path, clean_sim):
    before = os.umask(0o022)
    try:
        with clean_sim.flaws("matmul-in-bf16"), shadowrun.compare("sim", file=tmp_path / "run.shadowrun") as run:
            a = torch.randn(8, 8).to("sim")
            a @ a
        (finding,) = run.findings()
        made = run.repro(finding, tmp_path / "repro", minimise=False)
    finally:
        os.umask(before)
    folder = tmp_path / "run.shadowrun.tensors"
    (kept,) = folder.iterdir()
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (folder, kept, made.script.with_name("inputs.pt"))]
    assert [oct(mode) for mode in modes] == ["0o700", "0o600", "0o600"]


# -- what lies around the file ---------------------------------------------------------------------


def test_what_lies_where_the_script_goes_is_not_run_and_not_written_through(attack):
    """An archive may bring the folder of the script, too: modules by torch's name, links to files of the reader's."""
    folder = Path("repro") / "01-aten-mm-mismatch"
    folder.mkdir(parents=True)
    for module in ("torch.py", "pathlib.py", "sys.py", "sitecustomize.py"):
        (folder / module).write_text(EVIL, encoding="utf-8")
        Path(module).write_text(EVIL, encoding="utf-8")
    for name in ("repro.py", "versions.json", "inputs.pt", "repro.py.part", "inputs.pt.part"):
        (folder / name).symlink_to(Path("VICTIM").absolute())
    assert main(["repro", "x.shadowrun", "--no-minimise"]) == 0
    assert not (folder / "repro.py").is_symlink()
    assert not (folder / "inputs.pt").is_symlink()


@pytest.mark.skipif(os.name != "posix", reason="links are POSIX's")
@pytest.mark.parametrize("there", ["VICTIM", "NEW"])
def test_what_lies_where_a_report_goes_is_not_written_through(attack, capsys, there):
    for name in ("r.html", "r.json.part", "r.md.part"):
        Path(name).symlink_to(there)
    main(["report", "x.shadowrun", "-o", "r.html", "-o", "r.json", "-o", "r.md"])
    assert not any(Path(name).is_symlink() for name in ("r.html", "r.json", "r.md"))
    assert Path("VICTIM").read_text(encoding="utf-8") == PRECIOUS
    assert not Path("NEW").exists()


@pytest.mark.skipif(os.name != "posix", reason="links are POSIX's")
def test_a_coverage_file_is_not_made_through_a_link(tmp_path):
    (tmp_path / "x.shadowcov").symlink_to(tmp_path / "NEW")
    CoverageFile.begin(tmp_path / "x.shadowcov", SweepInfo("npu", "cpu")).close()
    assert not (tmp_path / "NEW").exists()


@pytest.mark.skipif(os.name != "posix", reason="links are POSIX's")
def test_a_coverage_file_is_not_continued_through_a_link(tmp_path):
    """A sweep that went on with a `.shadowcov` of somebody else's wrote into another sweep of the user's."""
    mine = tmp_path / "mine.shadowcov"
    CoverageFile.begin(mine, SweepInfo("npu", "cpu")).close()
    before = mine.read_bytes()
    (tmp_path / "x.shadowcov").symlink_to(mine)
    with pytest.raises(DataFileError, match="is a link"):
        CoverageFile.begin(tmp_path / "x.shadowcov", SweepInfo("npu", "cpu"))
    assert mine.read_bytes() == before


def test_the_folder_of_a_script_is_no_link(attack, capsys):
    there = Path("elsewhere")
    there.mkdir()
    (there / "repro.py").write_text(PRECIOUS, encoding="utf-8")
    Path("repro").mkdir()
    (Path("repro") / "01-aten-mm-mismatch").symlink_to(there.absolute())
    assert main(["repro", "x.shadowrun", "--no-minimise"]) == 2
    assert "is a link" in capsys.readouterr().out
    assert [p.read_text(encoding="utf-8") for p in there.iterdir()] == [PRECIOUS]


def test_a_lock_is_not_made_through_a_link(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("y.shadowrun-lock").symlink_to(Path("PWNED-lock").absolute())
    compared = shadowrun.compare("cpu[threads=1]", file="y.shadowrun")
    with pytest.raises(DataFileError, match="is a link"), compared:
        pass
    assert [p.name for p in Path().iterdir()] == ["y.shadowrun-lock"]


def test_workers_of_a_sweep_import_nothing_of_the_working_directory(attack, capsys):
    for module in ("json.py", "torch.py", "os.py"):
        Path(module).write_text(EVIL, encoding="utf-8")
    assert (
        main(["sweep", "--target", "cpu[threads=1]", "--from", "x.shadowrun", "--jobs", "1", "--ops", "aten::mm"]) == 0
    )
    capsys.readouterr()


@pytest.mark.usefixtures("untried")
def test_a_name_of_any_length_is_no_name_of_a_folder(attack, capsys):
    attack.target("cpu")
    attack.graph(INPUT, node("torch.ops.aten.relu.default", "%p"), output("f"), inputs=[torch.ones(3)])
    name = "compiled::graph " + "9" * 300
    attack.sql("update op set name = ? where name like 'compiled::%'", name)
    (file,) = Path("x.shadowrun.tensors").glob("*.pt")
    torch.save(torch.load(file, weights_only=True) | {"op": name}, file)
    assert main(["repro", "x.shadowrun", "--no-minimise"]) == 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nodes", "inputs"),
    [
        ([node("torch.ops.aten.index.Tensor", "%p", [{"node": "p"}])], [torch.tensor([10**9])]),
        ([node("torch.ops.aten.as_strided.default", "%p", [1 << 20], [1])], [torch.ones(3)]),
        ([node("torch.ops.aten._unsafe_index.Tensor", "%p", [{"node": "p"}])], [torch.tensor([10**9])]),
        ([node("torch.ops.aten.expand.default", "%p", [1 << 50]), node("torch.exp", "%f", name="g")], [torch.ones(1)]),
        ([node("torch.ops.aten.ones.default", [10**30])], [torch.ones(1)]),
        ([node("operator.getitem", "%p", 5)], [torch.ones(1)]),
    ],
)
def test_a_graph_that_eager_refuses_is_never_compiled(attack, capsys, monkeypatch, nodes, inputs):
    from shadowrun.compiled.compile_spec import CompileSpec

    monkeypatch.setattr(CompileSpec, "look_for_compiler", lambda _: pytest.fail("compiled"))
    attack.target("cpu")
    attack.graph(INPUT, *nodes, output(nodes[-1][1]), inputs=inputs, name="inductor")
    said = refused(capsys, "repro", "x.shadowrun", "--no-minimise")
    assert "does not run eagerly" in said or "No script is written" in said


def test_lists_that_hold_themselves_many_times_end(attack, capsys):
    grown = [1]
    for _ in range(64):
        grown = [grown, grown]
    attack.target("cpu[threads=1]")
    attack.operator("aten::sum.dim_IntList", "f32[2], [0]", {"tensor": 0}, grown, tensors=[torch.ones(2)])
    assert "cannot be read" in refused(capsys, "repro", "x.shadowrun")


@pytest.mark.parametrize("positions", [[float("inf")], [10**30], ["x"], [None], 5])
def test_positions_of_a_graphs_inputs_are_numbers(attack, capsys, positions):
    attack.target("cpu[threads=1]")
    attack.graph(INPUT, output("p"), inputs=[torch.ones(2)])
    for file in Path("x.shadowrun.tensors").iterdir():
        content = torch.load(file, weights_only=True)
        content["kwargs"]["needs_grad"] = positions
        torch.save(content, file)
    assert "hold no graph" in refused(capsys, "repro", "x.shadowrun")


def test_options_of_the_run_are_numbers(attack, capsys):
    attack.info(target="cpu[threads=1]", target_fingerprint={}, config={"rtol": "x", "atol": [1], "max_bytes": 1e400})
    main(["repro", "x.shadowrun", "--no-minimise"])
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("text", ["f32[2], " + "9" * 5000, "f32[2], " + "-" * 100_000 + "1", "f32[2], " + "(" * 5000])
def test_numbers_of_any_length_are_left_out(attack, capsys, text):
    attack.target("cpu[threads=1]")
    attack.operator("aten::add.Scalar", text)
    assert main(["slowdown", "x.shadowrun"]) == 0
    assert "aten::add.Scalar" in capsys.readouterr().out.partition("Not timed (1)")[2]


# -- simulated devices that end the process --------------------------------------------------------


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("flaw", sorted(FATAL))
def test_no_file_ends_or_hangs_the_command(attack, capsys, flaw):
    """`erfinv` on such a device ends the process: only who names it wants that."""
    attack.info(target_fingerprint={"simulated_flaws": ["matmul-in-bf16", flaw]})
    said = " ".join(refused(capsys, "repro", "x.shadowrun").split())
    assert f"The simulated device of this file has {flaw}, which would end or block this process" in said
    assert "name the device: --target sim" in said
    assert main(["repro", "x.shadowrun", "--target", "sim", "--no-minimise"]) == 0


def test_no_file_with_a_graph_ends_or_hangs_the_command(attack, capsys):
    """The graph's inputs may lie on that device, and it runs in this process."""
    flaw = min(FATAL)
    attack.info(target_fingerprint={"simulated_flaws": [flaw]})
    attack.graph(INPUT, node("torch.exp", "%p"), output("f"), inputs=[torch.ones(2)])
    assert f"has {flaw}, which would end or block this process" in refused(capsys, "repro", "x.shadowrun")


@pytest.mark.parametrize("flaw", sorted(FATAL))
def test_no_coverage_file_ends_or_hangs_the_command(attack, capsys, flaw):
    """A case that ends a process is run in one of its own; this one is said to be wrong."""
    operator = flaw.partition("-")[0]
    path = Path("x.shadowcov")
    info = SweepInfo("sim", "cpu", versions={"torch": torch.__version__}, target_fingerprint={"platform": "sim"})
    info.target_fingerprint["simulated_flaws"] = [flaw]
    file = CoverageFile.begin(path, info)
    found = CaseFinding(Kind.MISMATCH, f"aten::{operator}", cause="implementation")
    number, sample = next(Sampler(operator, "float32", 0, 3).samples(Part.FORWARD))
    file.add(Case(operator, "float32", Part.FORWARD, number), CaseOutcome((found,), printed(sample)))
    file.close()
    assert "which would end or block this process" in " ".join(
        refused(capsys, "repro", str(path), "--finding", "1").split()
    )


IN_A_PROGRAM = """
import torch, shadowrun
run = shadowrun.load("x.shadowrun", known=False)
{wanted}
from shadowrun import sim
print(hasattr(torch, "npu"), torch.accelerator.is_available(), sim.is_enabled())
"""


SIMULATED = {
    "by its fingerprint": {"target": "npu", "target_fingerprint": {"simulated_flaws": []}},
    "by its name": {"target": "sim", "target_fingerprint": {}},
    "as the reference": {
        "target": "cpu[threads=1]",
        "target_fingerprint": {},
        "ref": "sim",
        "ref_fingerprint": {"simulated_flaws": []},
    },
}


@pytest.mark.parametrize("how", SIMULATED)
@pytest.mark.parametrize("allowed", [False, True])
def test_no_file_gives_a_program_an_accelerator(attack, allowed, how):
    """torch renames its private device once: `torch_npu` could not be imported after it."""
    attack.info(**SIMULATED[how])
    name = "npu" if how == "by its fingerprint" else "sim"
    allow = f", allow=['{name}']" if allowed else ""
    wanted = f"""
(finding,) = run.findings()
print(run.explain(finding.captured{allow}).note)
try: run.repro(finding, "r", minimise=False{allow})
except shadowrun.PlatformError as error: print(error)
"""
    program = [sys.executable, "-c", IN_A_PROGRAM.format(wanted=wanted)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert done.stdout.endswith(f"{allowed}\n")
    said = done.stdout.count(f"would be registered in this program for good, as '{name}'")
    assert said == (0 if allowed else 2)


# -- what a terminal shows meanwhile ---------------------------------------------------------------


class Watched(io.StringIO):
    """A terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize("name", ["\x1b]0;PWNED\x07", "[/bold]", "\u202e", "[link=x]"])
@pytest.mark.parametrize("command", ["slowdown", "sweep"])
def test_progress_bars_show_names_as_text(attack, monkeypatch, capsys, command, name):
    """What runs now is named there: an operator of the file."""
    attack.target("cpu[threads=1]")
    attack.sql("update op set name = 'aten::' || id || ?", name)
    terminal = Watched()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    given = ["x.shadowrun"] if command == "slowdown" else ["--from", "x.shadowrun", "--jobs", "1"]
    assert main([command, *given, "--target", "cpu[threads=1]"]) == 0
    shown = terminal.getvalue()
    assert "aten::" in shown
    assert "\x1b]" not in shown
    assert "\u202e" not in shown
    if name.startswith("["):
        assert name in shown
    if command == "sweep":
        capsys.readouterr()
        assert main([command, *given, "--target", "cpu[threads=1]", "--list"]) == 0
        listed = capsys.readouterr().out
        assert "aten::" in listed
        assert all(line.isprintable() for line in listed.splitlines())


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [MemoryError("of numpy"), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), None]
)
def test_memory_that_runs_out_anywhere_is_one_line(attack, capsys, monkeypatch, error):
    """Where it is not expected, as in the analysis of what was computed."""
    from shadowrun.compiled.repro import GraphScriptMaker

    def analyse(*_):
        raise error or RuntimeError("something else")

    monkeypatch.setattr(GraphScriptMaker, "_allowed", analyse)
    attack.target("cpu")
    attack.graph(INPUT, node("torch.ops.aten.relu.default", "%p"), output("f"), inputs=[torch.ones(3)])
    assert main(["repro", "x.shadowrun", "--no-minimise"]) == 2
    said = capsys.readouterr()
    assert ("takes more memory than there is" in said.out) == (error is not None)
    assert ("Traceback" in said.err) == (error is None)


# -- 7. calls that end their process -----------------------------------------------------------------


def shadowrun_command(*words):
    return subprocess.run(
        [sys.executable, "-m", "shadowrun", *words], check=False, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("command", ["explain", "repro"])
def test_a_kernel_that_ends_its_process_ends_with_a_message(attack, command):
    """The smallest integer divided by -1 overflows in the processor; the shell said "Floating point exception"."""
    operands = torch.tensor([-(2**31)] * 8, dtype=torch.int32), torch.tensor([-1] * 8, dtype=torch.int32)
    places = {"tensor": 0}, {"tensor": 1}
    attack.operator("aten::div.Tensor_mode", "i32[8], i32[8]", *places, tensors=operands, rounding_mode="trunc")
    words = ("x.shadowrun", "2") if command == "explain" else ("x.shadowrun", "--call", "2")
    ended = shadowrun_command(command, *words)
    assert ended.returncode == 2, ended
    assert "calls-ended-process" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_command_in_a_child_is_the_command(attack):
    plain = shadowrun_command("explain", "x.shadowrun", "2")
    assert plain.returncode == 0, plain
    assert "aten::mm" in plain.stdout
    assert shadowrun_command("explain", "x.shadowrun", "99").returncode == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_in_a_child(tmp_path, number):
    """Both processes end by it, as one process did."""
    code = (
        "import os, signal, sys, time\n"
        "from shadowrun.cli.child_process import in_child\n"
        # A background job of a shell begins with this signal ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        # The child is ready before the parent is, as on a busy machine.
        "set_handler = signal.signal\n"
        "signal.signal = lambda *args: (time.sleep(0.3), set_handler(*args))\n"
        "ended = in_child()\n"
        "if ended is None:\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    child = int(process.stdout.readline())
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    assert process.wait(60) == -number
    process.stdout.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


HELD = """
import os, signal, sys, time
from shadowrun.cli import child_process
signal.signal(signal.SIGINT, signal.default_int_handler)
child_process._AFTER_INTERRUPT_S = {first}
ended = child_process.in_child()
if ended is None:
    def report(*_):  # as `replay` does after Ctrl-C
        time.sleep(1.5)
        os._exit(7)
    signal.signal(signal.SIGINT, {handler})
    print(os.getpid(), flush=True)
    time.sleep(60)
sys.exit(ended)
"""


def test_interrupts_in_a_pager_do_not_end_the_report(tmp_path):
    """Ctrl-C there ends a search; the person goes on reading."""
    pager = tmp_path / "pager.py"
    pager.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "sys.stdin.read(); print(os.getpid(), flush=True); time.sleep(4); print('left', flush=True)\n"
    )
    program = (
        "import signal, sys\n"
        "from shadowrun.cli import child_process, output_options\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "child_process._AFTER_INTERRUPT_S = 1.0\n"
        "if (ended := child_process.in_child()) is None:\n"
        "    output_options.show_by_pager('a report'); sys.exit(5)\n"
        "sys.exit(ended)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # In a CI service there is no pager.
        env={**os.environ, "CI": "", "TERM": "xterm", "SHADOWRUN_PAGER": shlex.join([sys.executable, str(pager)])},
    )
    assert int(process.stdout.readline())
    for _ in range(3):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.3)
    assert process.communicate(timeout=60)[0].strip() == b"left"
    assert process.returncode == 5


@pytest.mark.parametrize(
    ("handler", "first", "n", "status"),
    [
        ("signal.SIG_IGN", 60, 2, -signal.SIGINT),  # a kernel does not look at signals
        ("signal.SIG_IGN", 1, 1, -signal.SIGINT),
        ("report", 60, 1, -signal.SIGINT),  # it ends by itself, after what Ctrl-C was for
    ],
)
def test_interrupts_end_a_child_that_a_kernel_holds(handler, first, n, status):
    process = subprocess.Popen(
        [sys.executable, "-c", HELD.format(handler=handler, first=first)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    child = int(process.stdout.readline())
    for _ in range(n):
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
    try:
        assert process.wait(20) == status
    finally:
        process.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
