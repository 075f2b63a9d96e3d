import pytest
import torch

import shadowrun
from shadowrun.errors import DataFileError
from shadowrun.studies.zoo.graph import DEVICE, Runner
from shadowrun.studies.zoo.input_values import make_inputs
from shadowrun.studies.zoo.sources.call_lists import collect_run, collect_traces

GROUPED = """Operator: aten.add.Tensor
cnt: 3, ((T([4, 5], f32), T([5], f32)), {'alpha': 2})
cnt: 1, ((T([4, 5], f16, [1, 4]), 1.5), {})
Operator: aten.zeros.default
cnt: 1, (([2, 3],), {'dtype': f32, 'device': 'cuda', 'pin_memory': False})
"""
ONE_LINE = "aten.embedding.default, 7, ((T([9, 4], f32), T([2, 3], i64), -1), {})\n"


def everything(_):
    return True


def collected(tmp_path, text, wanted=everything):
    path = tmp_path / "trace.txt"
    path.write_text(text)
    return collect_traces(path, wanted, lambda *_: None)


def test_calls_of_a_trace_are_programs(tmp_path):
    found = collected(tmp_path, GROUPED + ONE_LINE)
    assert [(p.graph.nodes[0].name, p.count) for p in found.programs] == [
        ("aten::add.Tensor", 3),
        ("aten::add.Tensor", 1),
        ("aten::zeros", 1),
        ("aten::embedding", 7),
    ]
    one, strided, zeros, _ = (p.graph for p in found.programs)
    assert dict(one.nodes[0].kwargs) == {"alpha": 2}
    assert (strided.inputs[0].dtype, strided.inputs[0].strides) == (torch.float16, (1, 4))
    assert dict(zeros.nodes[0].kwargs)["device"] is DEVICE
    for program in found.programs:
        assert isinstance(Runner(program.graph)(make_inputs(program.graph.inputs))[0], torch.Tensor)
    assert len(collected(tmp_path, GROUPED, lambda name: "zeros" in name).programs) == 1


@pytest.mark.parametrize(
    "call",
    [
        "aten.from_file.default, 1, (('/etc/passwd', False, 4), {})",
        "aten.add.Tensor, 1, ((__import__('os').system('true'), 1), {})",
        "aten.add.Tensor, 1, ((T([2], f32), open), {})",
        "aten.add.Tensor, 1, (([x for x in (1,)], 1), {})",
        "aten.add.Tensor, 1, ((T([99999999999], f32), 1), {})",
        "aten.add.Tensor, 1, ((T([2], f32), torch.hub), {})",
        "aten.add.Tensor, 1, ((T([2], f32), '/etc/passwd'), {})",
        "aten.add.Tensor, 1, (T([2], f32)",
        "os.system, 1, (('true',), {})",
        "aten.add.Tensor, 1, ((" + "(" * 5000 + ", {})",
    ],
)
def test_a_hostile_call_is_left_out_with_its_reason(tmp_path, call):
    found = collected(tmp_path, call + "\n" + ONE_LINE)
    assert len(found.programs) == 1
    assert sum(len(s.left_out) for s in found.stages) == 1


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(DataFileError, match="cannot be read"):
        collect_traces(tmp_path / "none", everything, lambda *_: None)


def test_calls_of_a_run_are_programs(tmp_path):
    path = tmp_path / "run.shadowrun"
    with shadowrun.compare("cpu[threads=1]", ref="cpu", file=path):
        torch.softmax(torch.randn(3, 4) @ torch.randn(4, 5), -1)
    found = collect_run(path, everything, lambda *_: None)
    assert {"aten::mm", "aten::_softmax"} <= {p.graph.nodes[0].name for p in found.programs}
