"""Data files with random calls: `slowdown`, `sweep --from`, `explain` and `repro` give a result, or one line.

A few of each in each run of the tests; the operators are those whose arguments have to fit each other.
"""

from __future__ import annotations

import ast
import contextlib
import random
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
import torch

import shadowrun
from shadowrun.cli.main import main
from shadowrun.intercept.untrusted.op_allowlist import operator_named
from shadowrun.repro import script
from shadowrun.store import captured_inputs
from shadowrun.store.captured_inputs import StoredCall
from shadowrun.studies.sweep import recorded_calls

OPERATORS = (
    *("add.Tensor", "random_.from", "max_pool2d_with_indices_backward", "embedding_dense_backward", "_embedding_bag"),
    *("native_batch_norm", "reflection_pad1d_backward", "_softmax_backward_data", "_fft_c2c", "index_put_", "cat"),
    *("fractional_max_pool2d_backward", "lu_unpack", "embedding_backward", "_ctc_loss", "native_group_norm", "full"),
)
SIZES = (0, 1, 1, 2, 3, 8)
NUMBERS = (0, 1, 1, 2, 3, -1, 64, -(2**63))
DTYPES = {"f32": torch.float32, "f64": torch.float64, "i64": torch.int64, "b8": torch.bool, "bf16": torch.bfloat16}


def tensor(chance, name):
    dtype = "i64" if any(word in name for word in ("ind", "offset", "target", "pivots")) else chance.choice([*DTYPES])
    return dtype, [chance.choice(SIZES) for _ in range(chance.choice((1, 2, 2, 3, 4)))]


def arguments(chance, name, as_text):
    """Random values for a schema, by position and by name: texts as the recorder writes them, or values."""

    def one(kind, argument):
        if kind.startswith("Optional[") and chance.random() < 0.4:
            return "None" if as_text else None
        kind = re.sub(r"^Optional\[(.*)\]$", r"\1", kind)
        if kind.startswith("List["):
            found = [one(kind[5:-1], argument) for _ in range(chance.choice((0, 1, 2, 2, 3)))]
            return f"[{', '.join(found)}]" if as_text else found
        if kind == "Tensor":
            dtype, shape = tensor(chance, argument)
            if as_text:
                return f"{dtype}[{', '.join(map(str, shape))}]"
            made = torch.randn(shape) if chance.random() < 0.5 else torch.full(shape, chance.choice((1, 7, 10**7)))
            return made.to(DTYPES[dtype])
        value = {"bool": chance.random() < 0.5, "float": chance.choice((0.5, 0.0, float("inf")))}.get(kind)
        value = chance.choice(NUMBERS) if value is None and kind in ("int", "number") else value
        return str(value) if as_text else value

    schema = operator_named(f"aten::{name}")._schema.arguments
    made = [(a, one(str(a.type), a.name)) for a in schema]
    return [v for a, v in made if not a.kwarg_only], {a.name: v for a, v in made if a.kwarg_only}


@pytest.fixture(scope="module")
def run_file(sim_device, tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    with sim_device.flaws("matmul-in-bf16"), shadowrun.compare("sim", file=folder / "x.shadowrun"):
        a = torch.randn(8, 8).to("sim")
        a @ a
    return folder


@pytest.fixture
def changed(run_file, tmp_path, monkeypatch):
    """Puts another call in the place of ``aten::mm``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "_try", lambda *_: (None, ""))

    def change(name, text, args, kwargs):
        shutil.copytree(run_file, tmp_path, dirs_exist_ok=True)
        connection = sqlite3.connect("x.shadowrun")
        connection.execute(
            "update context set inputs = ? where op_id = (select id from op where name = 'aten::mm')", [text]
        )
        connection.execute("update op set name = ? where name = 'aten::mm'", [f"aten::{name}"])
        connection.commit()
        ((seq,),) = connection.execute("select seq from capture")
        connection.close()
        for file in Path("x.shadowrun.tensors").iterdir():
            captured_inputs.save(file.parent, file.name, StoredCall(f"aten::{name}", tuple(args), kwargs))
        return str(seq)

    return change


def ends(capsys, *argv):
    """Run a command: it ends with a result or one line."""
    assert main([*argv]) in (0, 1, 2)
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert "shadowrun: internal error" not in err
    return out


@pytest.mark.parametrize("name", OPERATORS)
def test_calls_of_slowdown_and_sweep(changed, capsys, name):
    for seed in range(4):
        chance = random.Random(f"{name} {seed}")
        args, kwargs = arguments(chance, name, as_text=True)
        text = ", ".join([*args, *(f"{k}={v}" for k, v in kwargs.items())])
        if seed > 1:  # damaged
            at = chance.randrange(len(text))
            text = (
                text[:at] + chance.choice(("[", "… 99999 more", "9" * 30, "\x1b[31m", "nan", "self=")) + text[at + 2 :]
            )
        changed(name, text, (), {})
        assert "\x1b" not in ends(capsys, "slowdown", "x.shadowrun", "--rounds", "3", "--target", "cpu", "--ref", "cpu")
        for (op, _), texts in recorded_calls.read_calls(Path("x.shadowrun")).items():
            for one in texts:
                with contextlib.suppress(recorded_calls.UnreadableCall):  # the only one that it may raise
                    recorded_calls.sample(op, one, seed)


@pytest.mark.parametrize("name", OPERATORS)
def test_calls_of_explain_and_repro(changed, capsys, name):
    for seed in range(4):
        torch.manual_seed(seed)
        number = changed(name, "f32[2]", *arguments(random.Random(f"{name} {seed}"), name, as_text=False))
        ends(capsys, "explain", "x.shadowrun", number)
        ends(capsys, "repro", "x.shadowrun", "--time-limit", "1")
        for written in Path("repro").rglob("*.py"):
            ast.parse(written.read_text())


def test_scripts_are_not_written_through_a_link(changed, capsys):
    """An archive may have a link in the place of the folder that `repro` writes to."""
    changed("mm", "f32[8, 8], f32[8, 8]", (torch.randn(8, 8), torch.randn(8, 8)), {})
    Path("elsewhere").mkdir()
    Path("repro").symlink_to(Path("elsewhere").absolute())
    assert main(["repro", "x.shadowrun", "--no-minimise"]) == 2
    assert "is a link" in capsys.readouterr().out
    assert not list(Path("elsewhere").iterdir())
