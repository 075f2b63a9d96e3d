"""Rows of two engines: step t of a decoder against position t of a prefill, and names that correspond."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from shadowrun.cli.main import main
from shadowrun.recording.file_format.recording_file import read
from shadowrun.studies.diff.name_map import NameMap, RowRule
from shadowrun.studies.diff.recordings import diff_recordings
from tests import forked
from tests.studies.diff.kit import Tape

X = np.arange(6, dtype=np.float32)
LAYERS, POSITIONS, WIDTH = 2, 5, 6


def made_of(path, chunks, *, name="h.{}.mlp", calls=("aten::mm",)):
    """An engine that goes through all layers for each chunk of positions, with rows of these values."""
    values = np.random.default_rng(0).standard_normal((LAYERS, len(calls), POSITIONS, WIDTH)).astype(np.float32)
    tape, start = Tape(path), 0
    for size in chunks:
        for layer in range(LAYERS):
            for number, op in enumerate(calls):
                rows = values[layer, number, start : start + size]
                site = f"engine.py:{number}"
                tape.call(op, [tape.leaf(X)], [rows], module=name.format(layer), rows=8, site=site)
        start += size
    return tape.read()


def rows_of(first, second, rule, modules=None):
    (found,) = diff_recordings(first, second, NameMap(modules or {}, (rule,))).rows
    return found


def test_each_module_has_its_own_sequence(tmp_path):
    """A decoder's rows of one layer are not next to each other: the other layers come in between."""
    prefill = made_of(tmp_path / "a.shadowrec", [5])
    decode = made_of(tmp_path / "b.shadowrec", [2, 1, 1, 1])
    found = rows_of(prefill, decode, RowRule(module="h.*.mlp"))
    assert [(p.module, p.number) for p in found.pairs] == [(f"h.{i}.mlp", n) for i in range(2) for n in range(5)]
    assert all(pair.equal for pair in found.pairs)
    assert (found.n_first, found.n_second, found.n_other_form, found.alone) == (10, 10, 0, ())
    assert found.has_modules
    skipped = rows_of(prefill, decode, RowRule(module="h.*.mlp", skip=(1, 1)))
    assert [pair.equal for pair in skipped.pairs] == [True] * 8


def test_each_operator_of_a_module_has_its_own_sequence(tmp_path):
    """Also where one engine calls another operator for it."""
    prefill = made_of(tmp_path / "a.shadowrec", [5], calls=("aten::mm", "aten::mm"))
    decode = made_of(tmp_path / "b.shadowrec", [2, 3], calls=("aten::addmm", "aten::mm"))
    found = rows_of(prefill, decode, RowRule(module="h.*", op="aten::*mm"))
    assert [pair.equal for pair in found.pairs] == [True] * 20


@pytest.mark.parametrize(
    ("rule", "modules"),
    [
        (RowRule(module="h.*.mlp", second_module="layers.*.ff"), {}),
        (RowRule(module="h.*.mlp"), {"layers.*.ff": "h.*.mlp"}),
        (RowRule(module="h.*.mlp", second_module="*.mlp"), {"layers.*.ff": "h.*.mlp"}),
    ],
)
def test_other_names(tmp_path, rule, modules):
    prefill = made_of(tmp_path / "a.shadowrec", [5])
    decode = made_of(tmp_path / "b.shadowrec", [1] * 5, name="layers.{}.ff")
    found = rows_of(prefill, decode, rule, modules)
    assert [pair.equal for pair in found.pairs] == [True] * 10


def test_modules_of_one_engine_only_are_named(tmp_path, capsys):
    prefill = made_of(tmp_path / "a.shadowrec", [5])
    decode = made_of(tmp_path / "b.shadowrec", [5], name="h.1{}.mlp")
    found = rows_of(prefill, decode, RowRule(module="h.*.mlp"))
    assert found.pairs == ()
    assert found.alone == ("h.0.mlp", "h.1.mlp", "h.10.mlp", "h.11.mlp")
    (tmp_path / "names.toml").write_text('[[rows]]\nmodule = "h.*.mlp"\n', encoding="utf-8")
    files = [str(tmp_path / name) for name in ("a.shadowrec", "b.shadowrec", "names.toml")]
    assert main(["diff", *files[:2], "--map", files[2]]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "modules of one recording only: h.0.mlp, h.1.mlp, h.10.mlp, …" in said
    assert "! no rows of h.*.mlp * could be compared: modules, dtypes or lengths differ" in said


def test_a_name_that_no_module_has_is_a_warning(tmp_path, capsys):
    """As where the two sides of a line are in the wrong order: the map had no effect, and nothing said so."""
    made_of(tmp_path / "a.shadowrec", [5])
    made_of(tmp_path / "b.shadowrec", [5], name="layers.{}.ff")
    names = tmp_path / "names.toml"
    names.write_text('[modules]\n"layers.*.ff" = "h.*.mlp"\n"h.*.mlp" = "layers.*.ff"\n', encoding="utf-8")
    assert main(["diff", str(tmp_path / "a.shadowrec"), str(tmp_path / "b.shadowrec"), "--map", str(names)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "! --map: b.shadowrec has no module 'h.*.mlp'; its names come first in a line" in said
    assert "no module 'layers" not in said


def test_a_rule_without_rows_is_a_warning_and_fails_the_gate(tmp_path, capsys):
    made_of(tmp_path / "a.shadowrec", [5])
    (tmp_path / "names.toml").write_text('[[rows]]\nmodule = "h.9"\n', encoding="utf-8")
    a, names = (str(tmp_path / name) for name in ("a.shadowrec", "names.toml"))
    (tmp_path / "b.shadowrec").write_bytes(Path(a).read_bytes())
    assert main(["diff", a, str(tmp_path / "b.shadowrec"), "--map", names]) == 0
    assert "! no rows of h.9 * are in the first recording" in capsys.readouterr().out
    assert main(["diff", a, str(tmp_path / "b.shadowrec"), "--map", names, "--fail-on", "kernel"]) == 1
    assert "no rows of h.9 * are in the first recording" in capsys.readouterr().err


def test_parameters_correspond_by_the_map(tmp_path):
    recordings = []
    for name, module, digest in (("a", "h.0", "1"), ("b", "layers.0", "1"), ("c", "layers.0", "2")):
        tape = Tape(tmp_path / f"{name}.shadowrec", provenance={f"parameter:{module}.weight": digest})
        tape.call("aten::neg", [tape.leaf(X)], [-X], module=module)
        recordings.append(tape.read())
    names = NameMap({"layers.*": "h.*"}, ())
    assert not diff_recordings(recordings[0], recordings[1]).provenance.is_same
    assert diff_recordings(recordings[0], recordings[1], names).provenance.is_same
    different = diff_recordings(recordings[0], recordings[2], names).provenance.different
    assert different == {"parameter": ("parameter:h.0.weight",)}


# -- a real pair ---------------------------------------------------------------------------------------

ENGINES = Path(__file__).with_name("engines.py")
NAMES = """
[modules]
"Engine.blocks.*.attn.qkv" = "GPT2LMHeadModel.transformer.h.*.attn.c_attn"
"Engine.blocks.*.down" = "GPT2LMHeadModel.transformer.h.*.mlp.c_proj"
"Engine.head" = "GPT2LMHeadModel.lm_head"

[[rows]]
module = "*.h.*.attn.c_attn"
op = "aten::addmm"

[[rows]]
module = "*.h.*.mlp.c_proj"
op = "aten::addmm"

[[rows]]
module = "*.lm_head"
op = "aten::mm"
skip = [0, {skip}]
"""


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Recordings of a decoder of transformers, its own prefill, and the prefill of the other engine."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("engines")

    def record(file, *words):
        # In a forked process, of one thread: the order of additions then does not depend on the machine's cores.
        done = forked.shadowrun(
            "record", "--rows", "16", "-o", file, ENGINES, *words, folder=folder, HF_HUB_OFFLINE="1"
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    tokens = record("decode.shadowrec", "transformers", "decode")
    record("prefill.shadowrec", "transformers", "prefill", *tokens[:-1])
    assert record("own.shadowrec", "own", "prefill", *tokens[:-1]) == []
    return folder


@pytest.mark.parametrize("other", ["prefill", "own"])
def test_decode_steps_are_positions_of_the_prefill(engines, other, tmp_path):
    def bits(skip):
        (tmp_path / "names.toml").write_text(NAMES.format(skip=skip), encoding="utf-8")
        files = [str(engines / f"{name}.shadowrec") for name in ("decode", other)]
        assert main(["diff", *files, "--map", str(tmp_path / "names.toml"), "-o", str(tmp_path / "x.json")]) == 0
        found = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["rows"]
        differing = [[row["remaining"] for row in rule["different"]] for rule in found]
        return found, [
            statistics.median(d + [23] * (r["n_compared"] - len(d))) for d, r in zip(differing, found, strict=True)
        ]

    found, medians = bits(4)
    # 2 layers, and 5 tokens of the prompt with 5 new ones that are given back; logits of the prompt's last token only.
    assert [(r["n_first"], r["n_second"], r["n_compared"], r["n_other_form"]) for r in found] == [
        *[(20, 20, 20, 0)] * 2,
        (6, 6, 6, 0),
    ]
    assert all(rule["modules_of_one_only"] == [] for rule in found)
    assert all(median > 9 for median in medians), medians
    # Off by one position, nothing agrees: the comparison is of the right rows.
    assert bits(3)[1][2] < 3
    assert {row["module"] for row in found[0]["different"]} <= {
        f"GPT2LMHeadModel.transformer.h.{i}.attn.c_attn" for i in (0, 1)
    }


def test_both_engines_have_the_same_calls_where_names_correspond(engines):
    names = NameMap({"Engine.blocks.*.down": "GPT2LMHeadModel.transformer.h.*.mlp.c_proj"}, ())
    first, second = (read(engines / f"{name}.shadowrec") for name in ("prefill", "own"))
    found = diff_recordings(first, second, names)
    pairs = found.difference.alignment.pairs
    of = {first.context_of(int(a)).module: second.context_of(int(b)).module for a, b in pairs}
    assert of["GPT2LMHeadModel.transformer.h.1.mlp.c_proj"] == "Engine.blocks.1.down"
