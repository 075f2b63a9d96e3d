"""Graphs that other tools wrote: GraphNet's layout and torch.export's archives, read as data and never run as code."""

import json
import zipfile

import pytest
import torch

from shadowrun.cli.main import main
from shadowrun.errors import DataFileError
from shadowrun.studies.zoo.graph import Fill, Runner
from shadowrun.studies.zoo.input_values import make_inputs
from shadowrun.studies.zoo.sources.exported import collect_exported
from shadowrun.studies.zoo.sources.graph_folders import collect_folders

MODEL = '''\
import torch

from torch import device

from torch import inf


class GraphModule(torch.nn.Module):
    def forward(
        self,
        s0: torch.SymInt,
        L_x_: torch.Tensor,
        L_ids_: torch.Tensor,
        L_self_modules_fc_parameters_weight_: torch.nn.parameter.Parameter,
        L_self_modules_fc_parameters_bias_: torch.nn.parameter.Parameter,
        L_self_buffers_running_var_: torch.Tensor,
    ):
        """A graph of mine."""
        l_x_ = L_x_
        linear = torch._C._nn.linear(
            l_x_, L_self_modules_fc_parameters_weight_, L_self_modules_fc_parameters_bias_
        )
        l_x_ = None
        used = torch._C._log_api_usage_once("mine")
        gelu = torch.nn.functional.gelu(linear, approximate="tanh")
        view = gelu.view(s0, -1, 2)
        part = view[(slice(None, None, None), slice(0, 2, None), Ellipsis)]
        part += 1.0
        mask = part.__eq__(inf)
        filled = part.masked_fill_(mask, -1.5)
        rows = torch.nn.functional.embedding(L_ids_, L_self_modules_fc_parameters_weight_)
        ones = torch.ones((2, 3), dtype=torch.float32, device=device(type="cpu"))
        added = torch.ops.aten.add.Tensor(L_self_buffers_running_var_, 2, alpha=3)
        pooled = -rows.sum(dim=-1) / ones[0, 0]
        first, second = added.split(2)
        second[0] = 0.5
        return (filled, pooled, first @ second, torch.conv1d(ones[None], ones[None][:, :, :1]))
'''
META = """\
class Program_weight_tensor_meta_s0:
    name = "s0"
    shape = []
    dtype = "torch.int64"
    data = [2]


class Program_weight_tensor_meta_L_x_:
    name = "L_x_"
    shape = [2, 8]
    dtype = "torch.float32"
    device = "cpu"
    mean = 0.004
    std = 0.997
    data = None
"""
WEIGHTS = """\
class Program_weight_tensor_meta_L_ids_:
    name = "L_ids_"
    shape = [3]
    dtype = "torch.int64"
    mean = None
    std = None
    data = [1, 3, 0]


class Program_weight_tensor_meta_L_self_modules_fc_parameters_weight_:
    name = "L_self_modules_fc_parameters_weight_"
    shape = [4, 8]
    dtype = "torch.float32"
    mean = 0.0
    std = 0.25
    data = None


class Program_weight_tensor_meta_L_self_modules_fc_parameters_bias_:
    name = "L_self_modules_fc_parameters_bias_"
    shape = [4]
    dtype = "torch.float32"
    mean = 0.0
    std = 0.0
    data = None


class Program_weight_tensor_meta_L_self_buffers_running_var_:
    name = "L_self_buffers_running_var_"
    shape = [4]
    dtype = "torch.float32"
    mean = 1.0
    std = 0.5
    min_val = 0
"""


def folder(path, model=MODEL, weights=WEIGHTS, inputs=META):
    path.mkdir(parents=True)
    (path / "model.py").write_text(model)
    (path / "weight_meta.py").write_text(weights)
    (path / "input_meta.py").write_text(inputs)
    return path


def read(path, collect=collect_folders, pattern=lambda _: True):
    """Programs, and what was left out with the reason."""
    found = collect(path, pattern, lambda *_: None)
    return found.programs, {what: why for stage in found.stages for what, why in stage.left_out}


def test_a_folder_becomes_the_operators_that_reach_the_kernels(tmp_path):
    folder(tmp_path / "mine" / "one")
    (program,), left_out = read(tmp_path)
    assert left_out == {}
    assert program.name == "mine/one"
    names = [node.name for node in program.graph.nodes]
    assert {"aten::addmm", "aten::gelu", "aten::add_.Tensor", "aten::masked_fill_.Scalar", "aten::embedding"} <= {
        *names
    }
    assert {"aten::add.Tensor", "aten::dot", "aten::convolution"} <= {*names}
    by_name = {i.name: i for i in program.graph.inputs}
    weight = by_name["L_self_modules_fc_parameters_weight_"]
    assert (weight.role, weight.fill, weight.requires_grad) == ("parameter", Fill("normal", 0.0, 0.25), True)
    assert by_name["L_self_modules_fc_parameters_bias_"].fill == Fill("constant", 0.0)
    assert by_name["L_self_buffers_running_var_"].fill == Fill("uniform", 0.5, 1.5)
    assert by_name["L_ids_"].fill.kind == "integers"
    shapes = [tuple(t.shape) for t in Runner(program.graph)(make_inputs(program.graph.inputs))]
    assert (2, 2, 2) in shapes
    assert (3,) in shapes


HOSTILE = {
    "import": ("import os\n        x = os.system('touch hacked')", "Import is no statement"),
    "system": ("x = os.system('touch hacked')", "os.system is no function on tensors"),
    "dunder": ("x = L_x_.__class__.__subclasses__()", "does more than compute tensors"),
    "method": ("x = L_x_.__reduce__()", "ValueError"),
    "format": ("x = 'a'.format(L_x_)", "ValueError"),
    "eval": ("x = eval('1')", "eval is no function"),
    "getattr": ("x = getattr(torch, 'load')('x')", "cannot be called"),
    "load": ("x = torch.load('x')", "torch.load is no function on tensors"),
    "library": ("x = torch.ops.load_library('x')", "load_library"),
    "save": ("x = torch.save(L_x_, 'x')", "torch.save is no function on tensors"),
    "file": ("x = torch.from_file('x')", "no function on tensors"),
    "private": ("x = torch._C._jit_set_profiling_mode(True)", "no function on tensors"),
    "module": ("x = torch.hub.load('x')", "no function on tensors"),
    "attribute": ("x = torch.backends", "is no constant of torch"),
    "if": ("if L_x_:\n            pass", "If is no statement"),
    "with": ("with open('x') as f:\n            pass", "With is no statement"),
    "lambda": ("x = (lambda: 1)()", "cannot be called"),
    "comprehension": ("x = [i for i in L_x_]", "ListComp is no value"),
    "f-string": ("x = f'{L_x_}'", "JoinedStr is no value"),
    "stars": ("x = torch.add(*L_x_)", "Starred is no value"),
    "unknown": ("x = y + 1", "nothing is named y"),
    "operator": ("x = operator.methodcaller('x')", "This torch has no operator operator.methodcaller"),
    "attrgetter": ("x = operator.attrgetter('x')(L_x_)", "cannot be called"),
    "text": ("x = torch.add(L_x_, 'x')", "no choice"),
    "an index outside": (
        "x = torch.ops.aten.embedding_dense_backward.default(L_x_, L_x_.long() + 10**9, 3, -1, False)",
        "Refused: ",
    ),
    "sparse": ("x = torch.ops.aten.to_sparse_csc.default(L_x_)", "to_sparse_csc"),
    "meta": ("x = torch.ones(2, device='meta')", "no choice"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_code_of_somebody_else_is_left_out_and_not_run(tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    line, why = HOSTILE[what]
    head = "class GraphModule(torch.nn.Module):\n    def forward(self, L_x_: torch.Tensor):\n"
    folder(tmp_path / "evil", f"{head}        {line}\n        return (L_x_ + 1,)\n")
    before = sorted(p.name for p in tmp_path.rglob("*"))
    programs, left_out = read(tmp_path)
    assert programs == []
    assert why in left_out["evil"], left_out
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_code_at_the_top_of_a_file_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    evil = "import pathlib\npathlib.Path('hacked').touch()\n"
    folder(tmp_path / "evil", evil + MODEL, evil + WEIGHTS, evil + META)
    programs, _ = read(tmp_path)
    assert len(programs) == 1
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"model": "def f(:\n"}, "model.py cannot be read: SyntaxError"),
        ({"model": "x = " + "(" * 5000}, "model.py cannot be read"),
        ({"model": "x = 1\n"}, "0 functions forward"),
        ({"weights": WEIGHTS.replace("[4, 8]", "[4, -8]")}, "has no shape"),
        ({"weights": WEIGHTS.replace("[4, 8]", "[100000, 100000]")}, "elements, more than"),
        ({"weights": WEIGHTS.replace("torch.float32", "torch.load")}, "has no dtype of torch"),
        ({"weights": WEIGHTS.replace("[1, 3, 0]", "['a']")}, "are no numbers"),
        ({"inputs": ""}, "nothing describes its input s0"),
        ({"weights": WEIGHTS.replace("[1, 3, 0]", "[1, 3, 9]")}, "IndexError"),
    ],
)
def test_folders_that_are_damaged(tmp_path, files, why):
    folder(tmp_path / "bad", **files)
    programs, left_out = read(tmp_path)
    assert programs == []
    assert why in left_out["bad"], left_out


def test_no_such_folders(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(DataFileError) as caught:
            read(path)
        assert caught.value.slug == "zoo-source-file"


class Exported(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("places", torch.arange(4.0))

    def forward(self, x, ids):
        first, second = torch.split(self.norm(self.fc(x)), 2, 1)
        total = torch.cat([first, second.relu()], 1) + self.places
        return total, torch.nn.functional.embedding(ids, self.fc.weight).sum(-1), total.topk(2)[0]


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "model.pt2"
    torch.manual_seed(0)
    torch.export.save(torch.export.export(Exported().eval(), (torch.randn(3, 8), torch.tensor([1, 2]))), path)
    return path


def test_an_exported_program(archive, tmp_path, monkeypatch, capsys):
    (program,), left_out = read(archive, collect_exported)
    assert left_out == {}
    names = [node.name for node in program.graph.nodes]
    assert names[:3] == ["aten::t", "aten::addmm", "aten::native_batch_norm"]
    assert "aten::topk" in names
    assert [i.name for i in program.graph.inputs if i.role == "parameter"] == [
        "fc.weight", "fc.bias", "norm.weight", "norm.bias",
    ]  # fmt: skip
    results = Runner(program.graph)(make_inputs(program.graph.inputs))
    assert [tuple(t.shape) for t in results] == [(3, 4), (2,), (3, 2)]
    monkeypatch.chdir(tmp_path)
    assert main(["zoo", "add", "exported", str(archive)]) == 0
    assert "1 programs of exported" in capsys.readouterr().err
    assert main(["zoo", "add", "exported"]) == 2
    assert "Name the file" in capsys.readouterr().err


def test_sizes_that_vary_have_their_hint(tmp_path):
    class Net(torch.nn.Module):
        def forward(self, x):
            return x.reshape(x.shape[0] * 2, -1).relu()

    path = tmp_path / "model.pt2"
    batch = torch.export.Dim("batch", min=2, max=64)
    torch.export.save(torch.export.export(Net(), (torch.randn(6, 4),), dynamic_shapes=({0: batch},)), path)
    (program,), left_out = read(path, collect_exported)
    assert left_out == {}
    assert program.graph.inputs[0].shape == (6, 4)


def changed(archive, path, change):
    """A copy of an archive with another graph; what is pickled in it would end the process."""
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(path, "w") as new:
        for item in old.infolist():
            content = old.read(item)
            if item.filename.endswith("models/model.json"):
                data = json.loads(content)
                content = change(data)
                content = json.dumps(data if content is None else content).encode()
            if item.filename.endswith(".pt"):
                content = b"cos\nabort\n(tR."
            new.writestr(item.filename, content)
    return path


def test_nothing_is_unpickled(archive, tmp_path):
    (program,), _ = read(changed(archive, tmp_path / "x.pt2", lambda _: None), collect_exported)
    assert program.graph.nodes


def nodes(data):
    return data["graph_module"]["graph"]["nodes"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: nodes(d)[0].update(target="torch.ops.aten.from_file.default"), "from_file"),
        (lambda d: nodes(d)[0].update(target="os.system"), "does more than compute"),
        (lambda d: nodes(d)[0].update(target=["x"]), "a call of no operator"),
        (lambda d: nodes(d)[0].update(inputs=[]), "is missing value for argument"),
        (lambda d: nodes(d)[0]["inputs"][0]["arg"].update(as_tensor={"name": "none"}), "another form"),
        (lambda d: d["graph_module"].pop("graph"), "another form"),
        (lambda _: [1], "another form"),
        (lambda d: d["graph_module"]["graph"]["tensor_values"]["x"].update(dtype=99), "a dtype with the number 99"),
        (lambda d: d["graph_module"]["graph"]["tensor_values"]["x"].update(layout=2), "no dense tensor"),
        (lambda d: d["graph_module"]["graph"]["tensor_values"]["x"]["sizes"].append({"as_int": 1 << 40}), "no dense"),
    ],
)
def test_archives_that_were_tampered_with(archive, tmp_path, change, why):
    programs, left_out = read(changed(archive, tmp_path / "x.pt2", change), collect_exported)
    assert programs == []
    assert why in left_out["x.pt2"], left_out


def test_files_that_are_no_archives(tmp_path):
    (tmp_path / "a.pt2").write_bytes(b"mine")
    with zipfile.ZipFile(tmp_path / "b.pt2", "w") as archive:
        archive.writestr("x/models/model.json", "[" * 100_000)
    with zipfile.ZipFile(tmp_path / "c.pt2", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/models/model.json", " " * (70 << 20))
    programs, left_out = read(tmp_path, collect_exported)
    assert programs == []
    assert "no archive" in left_out["a.pt2"]
    assert "no JSON" in left_out["b.pt2"]
    assert "more than 64 MiB" in left_out["c.pt2"]
    with pytest.raises(DataFileError, match=r"no \.pt2 file"):
        read(tmp_path / "none", collect_exported)
