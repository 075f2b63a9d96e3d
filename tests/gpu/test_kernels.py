"""Names of the kernels of a GPU, for `kernels=` of a recording."""

import torch

import shadowrun
from shadowrun.recording.file_format.recording_file import read
from shadowrun.recording.kernel_paths import path_of


def test_kernels_of_a_gpu(tmp_path, capfd):
    a, x, w = (torch.rand(size, device="cuda") for size in ((256, 256), (4, 32, 32, 32), (32, 32, 3, 3)))
    with shadowrun.record(tmp_path / "a.shadowrec", kernels=True):
        a @ a
        torch.nn.functional.conv2d(x, w)
        a.relu()
        a.view(-1)
    recording = read(tmp_path / "a.shadowrec")
    numbers = recording.calls["kernel"].tolist()
    names = {recording.context_of(call).op: recording.kernels[n] if n >= 0 else "" for call, n in enumerate(numbers)}
    assert path_of(names["aten::mm"]) == "GEMM"
    assert path_of(names["aten::convolution"])
    assert names["aten::relu"].startswith("cuda ")
    assert names["aten::view"] == ""
    assert "profiler_start" not in capfd.readouterr().err
