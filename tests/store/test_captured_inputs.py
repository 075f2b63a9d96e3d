"""Captured inputs: what is stored is loaded unchanged, and an untrusted folder does no harm."""

import pickle
import subprocess
import sys
import warnings

import pytest
import torch

from shadowrun import DataFileError
from shadowrun.store import captured_inputs
from shadowrun.store.captured_inputs import NotStorable, StoredCall


def kept(folder, *args, **kwargs):
    captured_inputs.save(folder, "0.pt", StoredCall("aten::op", args, kwargs))
    return captured_inputs.load(folder, "0.pt")


def test_tensors_keep_strides_and_what_they_share(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    loaded = kept(tmp_path, base.t(), [base, None], base, other=base[:, 1:])
    (turned, (first, nothing), same), cut = loaded.args, loaded.kwargs["other"]
    assert turned.stride() == (1, 4)
    assert nothing is None
    assert same is first
    assert cut.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    assert (cut.storage_offset(), cut.stride()) == (1, (4, 1))
    assert torch.equal(turned, base.t())


@pytest.mark.parametrize(
    "value",
    [1, True, -2.5, float("inf"), "mean", None, 1 + 2j, torch.bfloat16, torch.strided, torch.channels_last,
     torch.device("cuda:1"), [1, [2.0, None]]],
    ids=str,
)  # fmt: skip
def test_plain_values_come_back_as_they_were(tmp_path, value):
    loaded = kept(tmp_path, value).args[0]
    assert loaded == value
    assert type(loaded) is type(value)


def test_conjugates_and_sparse_tensors(tmp_path):
    c = torch.tensor([1 + 2j]).conj()
    loaded = kept(tmp_path, c, torch.eye(2).to_sparse())
    assert loaded.args[0].is_conj()
    assert torch.equal(loaded.args[0], c)
    assert torch.equal(loaded.args[1].to_dense(), torch.eye(2))


_LOAD = """
from pathlib import Path
from shadowrun.store import captured_inputs
print(captured_inputs.load(Path({!r}), "0.pt").args[0])
"""


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_what_torch_warns_of_sparse_tensors_is_no_damage(tmp_path, layout):
    with warnings.catch_warnings(action="ignore"):
        captured_inputs.save(tmp_path, "0.pt", StoredCall("aten::op", (torch.eye(2).to_sparse(layout=layout),), {}))
    # Torch warns once in a process.
    ran = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", _LOAD.format(str(tmp_path))],
                         capture_output=True, text=True, check=False)  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    assert f"layout={layout}" in ran.stdout


def test_what_no_such_file_can_hold_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(NotStorable, match="Generator"):
        captured_inputs.save(tmp_path / "t", "0.pt", StoredCall("aten::op", (torch.Generator(),), {}))
    assert not list(tmp_path.rglob("*.p*"))


@pytest.mark.parametrize("name", ["../0.pt", "/0.pt", "a/0.pt", "0.pt\n", "0.pkl", "..", "", "²9.pt"])
def test_names_stay_in_the_folder(tmp_path, name):
    (tmp_path / "t").mkdir()
    captured_inputs.save(tmp_path, "0.pt", StoredCall("aten::op", (), {}))
    with pytest.raises(DataFileError, match=r"not a name of captured inputs|are gone") as caught:
        captured_inputs.load(tmp_path / "t", name)
    assert caught.value.slug == "captured-inputs"


def test_links_are_not_followed(tmp_path):
    captured_inputs.save(tmp_path, "0.pt", StoredCall("aten::op", (), {}))
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "1.pt").symlink_to(tmp_path / "0.pt")
    with pytest.raises(DataFileError, match="not a name of captured inputs"):
        captured_inputs.load(tmp_path / "t", "1.pt")


class Evil:
    def __reduce__(self):
        return exec, ("import pathlib; pathlib.Path('harm').touch()",)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: torch.save({"op": Evil()}, path),
        lambda path: path.write_bytes(pickle.dumps(Evil())),
        lambda path: path.write_bytes(b"PK\3\4"),
        lambda path: torch.save([1], path),
    ],
)
def test_files_of_others_run_nothing(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "0.pt")
    with pytest.raises(DataFileError, match="cannot be read"):
        captured_inputs.load(tmp_path, "0.pt")
    assert not (tmp_path / "harm").exists()


def test_only_our_files_are_cleared(tmp_path):
    folder = captured_inputs.folder_of(tmp_path / "run.shadowrun")
    captured_inputs.save(folder, "0.pt", StoredCall("aten::op", (), {}))
    (folder / "1.pt.part").touch()
    (folder / "letter.txt").touch()
    captured_inputs.clear(tmp_path / "run.shadowrun")
    assert [p.name for p in folder.iterdir()] == ["letter.txt"]
    (folder / "letter.txt").unlink()
    captured_inputs.clear(tmp_path / "run.shadowrun")
    assert not folder.exists()


def test_the_file_that_was_looked_at_is_the_one_that_is_read(tmp_path, monkeypatch):
    """Another is put in its place between the check and torch's reading."""
    for name, value in (("0.pt", 1), ("1.pt", 2)):
        captured_inputs.save(tmp_path, name, captured_inputs.StoredCall("aten::relu", (value,), {}))
    check = captured_inputs._check_size

    def swap(*given):
        check(*given)
        (tmp_path / "1.pt").replace(tmp_path / "0.pt")

    monkeypatch.setattr(captured_inputs, "_check_size", swap)
    assert captured_inputs.load(tmp_path, "0.pt").args == (1,)
