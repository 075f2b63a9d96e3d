"""`shadowrun repro` of a compiled region: from the data file of a run to a script that shows the fault alone."""

import ast
import json
import operator
import os
from pathlib import Path

import pytest
import torch
from torch import fx

import shadowrun
from shadowrun import DataFileError, UsageError
from shadowrun.cli.main import main
from shadowrun.compiled import graph_text
from shadowrun.compiled.compile_spec import CompileSpec
from shadowrun.compiled.regions import inductor_rng
from shadowrun.compiled.regions.captured_region import CapturedRegion
from shadowrun.repro import script as scripting
from shadowrun.store import captured_inputs
from shadowrun.types import Permissions
from tests import forked
from tests.compiled import faulty, models, planted, regions

FEW = ("convolution's bias gradient", "a pass that swaps operands")
SHOWN = [n for n, f in planted.FAULTS.items() if (f.model, f.phase) != ("perceptron", "forward")]
"""Not that one: it is random, and only compile_check can distinguish a backend's other random numbers from a fault."""
USED_BY_SCRIPTS = (
    *("torch._dynamo.backends.debugging", "torch._inductor.scheduler"),
    "torch.distributed.tensor.experimental",
)


@pytest.fixture(scope="module")
def scripts():
    with forked.Server(USED_BY_SCRIPTS) as started:
        yield started


@pytest.fixture(autouse=True)
def quick(scripts, monkeypatch, fresh_dynamo, one_thread):
    """Scripts are run in forked processes."""
    monkeypatch.setattr(scripting, "run_script", lambda path, *_: again(scripts, path))


def again(scripts, path, **environment):
    """Run a script with the faults that are there now, or with others."""
    now = {name: os.environ.get(name, "") for name in ("FAULT", "MENDED")}
    return scripts.try_script(path, **now | environment)


def compare(folder, **options):
    return regions.compare(file=folder / "run.shadowrun", **options)


def only(run):
    (finding,) = run.findings()
    return finding


def n_elements(made):
    """How many a script has in its inputs."""
    saved = torch.load(made.script.with_name("inputs.pt"), weights_only=True)
    return sum(t.numel() for t in saved["inputs"])


def kept(run):
    """What is kept of the one finding of a run."""
    name = captured_inputs.captured_calls(run._data)[only(run).captured][2]
    return CapturedRegion.read(captured_inputs.load(run._data.tensors, name), Permissions(modules=True))


def test_the_command_writes_it_and_the_script_runs_in_a_process_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.undo()  # before the others: the process that their scripts are forked from starts meanwhile
    monkeypatch.chdir(tmp_path)
    model, x = models.make("gated")
    with regions.compare(file=".shadowrun"):
        torch.compile(model, backend=faulty.tanh_is_wrong)(x)
    # A backend is called where a person names it, not for a file that does.
    for words in ([], ["--import", "tests.compiled.faulty"]):
        assert main(["repro", *words]) == 2
        out = capsys.readouterr().out
        assert "is in module tests.compiled.faulty, and only the data file names it" in out
        assert not Path("repro").exists()
    assert main(["repro", "--import", "tests.compiled.faulty:tanh_is_wrong"]) == 0
    out = capsys.readouterr().out
    script = Path("repro") / "01-compiled-graph-0-mismatch" / "repro.py"
    assert f"1. mismatch compiled::graph 0: {script} (f32[1, 1]), exits 1 here" in out
    assert "elements differ by more than rounding explains" in out
    assert "aten.tanh.default" in script.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in SHOWN])
def test_the_script_shows_the_fault_and_nothing_once_it_is_mended(tmp_path, monkeypatch, scripts, name):
    fault = planted.FAULTS[name]
    model, x = models.make(fault.model)
    monkeypatch.setenv("FAULT", name)
    with compare(tmp_path):
        compiled = torch.compile(model, backend=faulty.planted_fault)
        for _ in range(2):
            compiled(x).square().sum().backward()
    run = shadowrun.load(tmp_path / "run.shadowrun")
    finding = only(run)
    assert finding.phases == (fault.phase,)
    file = tmp_path / "run.shadowrun"
    assert finding.commands == (f"shadowrun repro {file} --finding 1",)
    of = {row.name: row.commands for row in run.regions().rows}
    assert of.pop(finding.op) == (f"shadowrun repro {file} --finding '{finding.op}'",)
    assert not any(of.values())
    assert len(list((tmp_path / "run.shadowrun.tensors").iterdir())) == 1  # of two calls
    stream = torch.get_rng_state()
    named = ["tests.compiled.faulty:planted_fault"]
    made = run.repro(finding, tmp_path / "repro", time_limit_s=20, allow=named)
    assert torch.equal(torch.get_rng_state(), stream)
    assert made.shows_fault is True, made
    text = made.script.read_text(encoding="utf-8")
    told = ast.get_docstring(ast.parse(text))
    assert told.startswith(f"{fault.op}, compiled with planted_fault, is wrong")
    assert "models.py" in told
    assert any(module in told for module in fault.module)
    assert "shadowrun import" not in text
    versions = json.loads(made.script.with_name("versions.json").read_text(encoding="utf-8"))["versions"]
    assert versions["torch"] == torch.__version__
    mended = again(scripts, made.script, FAULT="")
    assert mended.returncode == 0, mended.stdout
    # The region as it was.
    whole = run.repro(finding, tmp_path / "whole", minimise=False, allow=named)
    assert whole.shows_fault is True, whole
    assert len(whole.script.read_text(encoding="utf-8")) > len(text)
    assert 4 * n_elements(made) < n_elements(whole)
    mended = again(scripts, whole.script, FAULT="")
    assert mended.returncode == 0, mended.stdout


def test_an_input_that_is_written_to_is_kept_as_it_was_before(tmp_path, monkeypatch, scripts):
    def count(x, buffer):
        buffer.add_(x)
        return x * 2

    monkeypatch.setenv("FAULT", "sums too great")
    x, buffer = torch.arange(6.0).reshape(2, 3).t(), torch.ones(3, 2)
    with compare(tmp_path) as run:
        torch.compile(count, backend=faulty.planted_in_place)(x, buffer)
    assert not torch.equal(buffer, torch.ones(3, 2))
    shown = kept(run)
    assert [tuple(t.stride()) for t in shown.inputs] == [(2, 1), (1, 3)]
    assert torch.equal(shown.inputs[0], torch.ones(3, 2))
    assert torch.equal(shown.inputs[1], x)
    for minimise in (True, False):
        made = run.repro(only(run), tmp_path / "a", minimise=minimise)
        assert made.shows_fault is True, made
        assert again(scripts, made.script, FAULT="").returncode == 0
    text = made.script.read_text(encoding="utf-8")
    assert "inputs[k] for k in [0]" in text
    assert "result 1" in made.said  # the buffer


def test_inputs_that_share_memory_share_it_in_the_script(tmp_path, monkeypatch, scripts):
    def add_and_read(x, y):
        x.add_(1)
        return y * 2

    x = torch.randn(4, 3, requires_grad=True)
    with compare(tmp_path) as run, torch.no_grad():
        torch.compile(add_and_read, backend=faulty.adds_too_much)(x, x.detach()[1:, 1])
    shown = kept(run)
    a, b = shown.inputs
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert torch.equal(a[1:, 1], b)
    made = run.repro(only(run), tmp_path / "a", minimise=False)
    assert made.shows_fault is True, made
    saved = torch.load(tmp_path / "a" / "inputs.pt", weights_only=True)["inputs"]
    assert saved[0].requires_grad
    assert not saved[1].requires_grad
    assert again(scripts, made.script, MENDED="1").returncode == 0


def test_sizes_that_are_symbols(tmp_path, monkeypatch, scripts):
    monkeypatch.setenv("FAULT", "tanh a little too small")
    with compare(tmp_path) as run:
        compiled = torch.compile(
            lambda x: torch.tanh(x.reshape(-1)) * x.shape[0], backend=faulty.planted_fault, dynamic=True
        )
        for n in (3, 5):
            compiled(torch.randn(n, 4))
    assert any(type(v) is int for v in kept(run).inputs)
    for minimise in (True, False):
        made = run.repro(only(run), tmp_path / "a", minimise=minimise)
        assert made.shows_fault is True, made
        assert "dynamic=True" in made.script.read_text(encoding="utf-8")
        assert again(scripts, made.script, FAULT="").returncode == 0


def test_what_inductor_draws_becomes_an_input(tmp_path):
    """The graph alone, without the stream, does what it did in the program."""
    from torch._inductor import inductor_prims as prims

    def dropped(x):
        seed = prims.lookup_seed(prims.seeds(2, torch.device("cpu")), 1)
        return (x * (prims.random(x.shape, seed, "rand") > 0.5)).relu(), seed

    results = []

    def without_relu(x):
        seed = inductor_rng._seeds(2, torch.device("cpu"))[1]
        results[:] = (x * (inductor_rng._random(x.shape, seed, "rand") > 0.5), seed)
        return tuple(results)

    x = torch.randn(40)
    call = regions.region(dropped, without_relu, x)
    with compare(tmp_path) as run:
        call()
    shown = kept(run)
    assert len(shown.inputs) == 3
    assert not any(map(inductor_rng.is_random_node, shown.module.graph.nodes))
    torch.rand(7)
    out, seed = shown.module(*shown.inputs)
    assert torch.equal(out, results[0].relu())
    assert torch.equal(seed, results[1])
    assert (shown.compile_spec.name, shown.compile_spec.dynamic) == ("inductor", None)


def test_what_is_too_large_says_so(tmp_path):
    model, x = models.make("gated")
    with compare(tmp_path, capture=1000) as run:
        torch.compile(model, backend=faulty.tanh_is_wrong)(x)
    finding = only(run)
    assert finding.captured < 0
    assert finding.commands == ()
    assert "inputs not kept: 0.000" in finding.evidence
    assert "where capture= has room for 0.000238 MiB" in finding.evidence
    with pytest.raises(UsageError, match=r"were captured: 0.000\d+ MiB, where .* `shadowrun compile --repro DIR`"):
        run.repro(finding, tmp_path / "a")


def test_what_was_not_to_be_kept_says_what_to_do(tmp_path):
    model, x = models.make("gated")
    with compare(tmp_path, capture=False) as run:
        torch.compile(model, backend=faulty.tanh_is_wrong)(x)
    assert "not kept" not in only(run).evidence
    with pytest.raises(UsageError, match="had capture=False"):
        run.repro(only(run), tmp_path / "a")


def test_nothing_is_kept_of_regions_that_are_right(tmp_path):
    from tests.compiled.backends import split

    model, x = models.make("gated")
    with compare(tmp_path) as run:
        torch.compile(model, backend=split())(x).sum().backward()
    assert len(run.regions().rows) == 2
    assert run.findings() == []
    assert not (tmp_path / "run.shadowrun.tensors").exists()


def test_a_backend_without_a_name_of_its_own_is_refused(tmp_path):
    model, x = models.make("gated")
    with compare(tmp_path) as run:
        torch.compile(model, backend=planted.compiler(planted.FAULTS["tanh a little too small"]))(x)
    with pytest.raises(UsageError, match="cannot import the backend"):
        run.repro(only(run), tmp_path / "a")


def test_a_backend_that_is_not_here(tmp_path, monkeypatch):
    model, x = models.make("gated")
    with compare(tmp_path) as run:
        torch.compile(model, backend=faulty.tanh_is_wrong)(x)
    read = CompileSpec.from_text
    monkeypatch.setattr(
        CompileSpec, "from_text", lambda text: read(text.replace("tests.compiled.faulty", "no_such_module"))
    )
    made = run.repro(only(run), tmp_path / "a")
    assert made.shows_fault is None
    assert "No module named 'no_such_module'; put the folder of no_such_module on PYTHONPATH" in made.notes[0]
    saved = torch.load(tmp_path / "a" / "inputs.pt", weights_only=True)
    assert all(isinstance(bound, torch.Tensor) for bound in saved["allowed"])  # with nothing to compare, one for each


def test_a_graph_is_the_same_after_it_was_text():
    def function(x, n):
        values, _ = x.masked_fill(x < 0.5, float("-inf")).max(0)
        low = torch.nn.functional.gelu(x[1:, None, ..., :2]).to(torch.float64)
        return values, low.contiguous(memory_format=torch.contiguous_format), torch.zeros(n // 2), n * 2

    module = fx.symbolic_trace(function)
    for node in module.graph.nodes:
        node.meta["place"] = ("a.py:1 in f", "layers.0")
    again = graph_text.from_text(graph_text.to_text(module))
    assert again.code == module.code
    assert {tuple(n.meta["place"]) for n in again.graph.nodes} == {("a.py:1 in f", "layers.0")}
    x = torch.rand(3, 4)
    for a, e in zip(again(x, 7), function(x, 7), strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(e))


@pytest.mark.parametrize("target", [torch.load, eval, operator.attrgetter, torch.utils.data.get_worker_info])
def test_a_graph_that_calls_something_else_is_not_kept(target):
    graph = fx.Graph()
    graph.output((graph.call_function(target, (graph.placeholder("x"),)),))
    with pytest.raises(captured_inputs.NotStorable, match="a call of"):
        graph_text.to_text(fx.GraphModule(torch.nn.Module(), graph))


@pytest.mark.parametrize(
    "node",
    [
        ["call_function", "a", "os.system", {"tuple": ["true"]}, {"dict": []}, ["", ""]],
        ["call_function", "a", "torch.load", {"tuple": ["x.pt"]}, {"dict": []}, ["", ""]],
        ["call_function", "a", "operator.attrgetter", {"tuple": ["x"]}, {"dict": []}, ["", ""]],
        ["call_function", "a", "torch.ops.load_library.x.y", {"tuple": ["x.so"]}, {"dict": []}, ["", ""]],
        ["call_method", "a", "__reduce__", {"tuple": []}, {"dict": []}, ["", ""]],
        ["get_attr", "a", "x", {"tuple": []}, {"dict": []}, ["", ""]],
        ["placeholder", "a):\n  import os\ndef b(c", "", {"tuple": []}, {"dict": []}, ["", ""]],
        ["placeholder", "a=1/0", "", {"tuple": []}, {"dict": []}, ["", ""]],  # would run when the function is made
        ["call_function", "a", "torch.relu", {"tuple": []}, {"dict": [["x=1) or exit(", 1]]}, ["", ""]],
        ["call_function", "a", "torch.relu", {"tuple": [{"node": "b"}]}, {"dict": []}, ["", ""]],
        ["call_function", "a", "torch.relu", {"tuple": [{"torch": "load"}]}, {"dict": []}, ["", ""]],
    ],
)
def test_text_of_others_does_not_become_code(node):
    with pytest.raises((ValueError, UsageError)):
        graph_text.from_text(json.dumps([node]))


def test_options_of_lists_are_read_again():
    how = CompileSpec.from_arguments(
        faulty.tanh_is_wrong, None, {"a": 1, "b": ["x", [2.5]], "c": {"d": [None, True]}}, None, None
    )
    assert how.left_out == ()
    assert CompileSpec.from_text(how.text()) == how


@pytest.mark.parametrize("text", ["[" * 100_000, '{"options": ' * 50_000, "{}", "[]", '{"name": 1}'])
def test_a_text_that_is_no_backend_is_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        CompileSpec.from_text(text)


def test_a_list_that_a_file_names_is_left_out_of_the_options():
    how = CompileSpec.by_inductor({"epilogue_fusion": [1], "cpp.cxx": ["sh"], "max_autotune": True})
    read = CompileSpec.from_text(how.text()).from_file(Permissions())
    assert read.options == {"max_autotune": True}
    assert read.left_out == ("epilogue_fusion", "cpp.cxx")


@pytest.mark.parametrize("change", [{"module": "os; import x"}, {"name": "a as b"}, {"mode": 1}])
def test_a_backend_of_others_does_not_become_code(change):
    how = CompileSpec.from_arguments(faulty.tanh_is_wrong, None, {"a": 1}, None, None)
    assert CompileSpec.from_text(how.text()) == how
    if "mode" in change:
        assert CompileSpec.from_text(json.dumps(json.loads(how.text()) | change)).mode == "1"
        return
    with pytest.raises(ValueError, match=r".+"):
        CompileSpec.from_text(json.dumps(json.loads(how.text()) | change))


def test_a_data_file_that_was_changed(tmp_path):
    model, x = models.make("gated")
    with compare(tmp_path) as run:
        torch.compile(model, backend=faulty.tanh_is_wrong)(x)
    name = captured_inputs.captured_calls(run._data)[only(run).captured][2]
    call = captured_inputs.load(run._data.tensors, name)
    for changed in ({"graph": "[]"}, {"how": "{}"}, {"graph": "import os"}, {"devices": ["cpu"]}):
        captured_inputs.save(
            run._data.tensors, name, captured_inputs.StoredCall(call.op, call.args, call.kwargs | changed)
        )
        with pytest.raises(DataFileError, match="hold no graph of its own"):
            run.repro(only(run), tmp_path / "a")
