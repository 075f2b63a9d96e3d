"""Ledgers, settings and damaged captured inputs: a result, or an error of ours."""

from __future__ import annotations

import itertools
import random
import zipfile
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shadowrun.errors import DataFileError, UsageError
from shadowrun.settings import read_settings
from shadowrun.store.captured_inputs import StoredCall, load, save, write_private

if TYPE_CHECKING:
    from pathlib import Path

LEDGER = """\
[[known]]
operator = "aten::mm"
platform = "npu*"
module = "*.encoder"
status = "mismatch"
reason = "bf16, ticket 1"
expires = 2031-01-01

[[tolerance]]
operator = "aten::exp"
rtol = 1e-3
atol = 0.0
"""
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
VALUES = st.sampled_from(
    ["1", "-1", "1e999", "nan", "true", "[]", "{}", "''", '"["', "2031-99-01", "1979-05-27T07:32:00Z", "[" * 100_000,
     "9" * 5000, "9" * 400, '"\\u0000"', '"***[!"', "{a = {b = {}}}", '"""\n\n"""', '"\\ud800"', "0x_",
     "[[known]]", "0x" + "f" * 5000]
)  # fmt: skip


def outcome(path: Path, content: bytes) -> None:
    """A ledger is read, or refused; nothing else."""
    path.write_bytes(content)
    try:
        found = type(read_settings(path).known).__name__
    except UsageError as error:
        found = error.slug
    assert found in ("tuple", "bad-settings")


@QUICK
@given(st.integers(0, len(LEDGER)), st.integers(0, 40), st.binary(max_size=40))
def test_a_ledger_with_other_bytes(tmp_path, at, n, new):
    outcome(tmp_path / "ledger.toml", LEDGER.encode()[:at] + new + LEDGER.encode()[at + n :])


def test_a_tolerance_that_no_float_can_hold(tmp_path):
    outcome(tmp_path / "shadowrun.toml", b'[tolerance."aten::exp"]\nrtol = 1' + b"0" * 400 + b"\natol = 0\n")


@QUICK
@given(st.integers(0, LEDGER.count("=") - 1), VALUES)
def test_a_ledger_with_other_values(tmp_path, which, value):
    lines = LEDGER.splitlines()
    at = [k for k, line in enumerate(lines) if "=" in line][which]
    lines[at] = f"{lines[at].partition('=')[0]}= {value}"
    outcome(tmp_path / "ledger.toml", "\n".join(lines).encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("key", ["operator", "platform", "module", "status", "reason", "expires", "rtol", "other"])
@pytest.mark.parametrize("value", ["0x" + "f" * 5000, '"' + "[" * 100_000 + '"', '["' + "a" * 100_000 + '"]'])
def test_a_value_too_long_to_print(tmp_path, key, value):
    """A number without end was a traceback, a pattern of brackets took hours, and a long text was printed in full."""
    path = tmp_path / "ledger.toml"
    lines = [f"{key} = {value}" if line.startswith(f"{key} =") else line for line in LEDGER.splitlines()]
    path.write_text("\n".join(lines if key != "other" else [f"other = {value}"]))
    try:
        read = read_settings(path)
    except UsageError as error:
        assert (error.slug, len(str(error)) < 1000) == ("bad-settings", True)  # noqa: PT017 - or it is read
    else:
        assert key == "reason", read


@QUICK
@given(st.text(max_size=300))
def test_a_ledger_of_any_text(tmp_path, text):
    outcome(tmp_path / "ledger.toml", text.encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("seed", range(60))
def test_captured_inputs_with_other_bytes(tmp_path, seed):
    call = StoredCall("aten::mm", (torch.ones(2, 3), [torch.zeros(3, dtype=torch.int64), 1.5]), {"dim": 1})
    folder = tmp_path / "x.shadowrun.tensors"
    save(folder, "0.pt", call)
    chance = random.Random(seed)
    data = bytearray((folder / "0.pt").read_bytes())
    for _ in range(chance.choice((1, 2, 20))):
        data[chance.randrange(len(data))] = chance.randrange(256)
    if seed % 5 == 0:
        del data[chance.randrange(len(data)) :]
    (folder / "0.pt").write_bytes(data)
    try:
        found = type(load(folder, "0.pt")).__name__
    except DataFileError as error:
        found = error.slug
    assert found in ("StoredCall", "captured-inputs")


@pytest.mark.parametrize(("n", "repeated"), [(49, True), (400, False)])
def test_captured_inputs_with_tuples_without_end(tmp_path, n, repeated):
    """Python's hash of a tuple calls itself for each in it: until the stack is full, or 2^49 times."""
    nested: tuple[object, ...] = ()
    for _ in range(n):
        # Twice the same one: `torch.save` names the second by its number in the memo.
        nested = (nested, nested) if repeated else (nested, 0, 0)
    large = torch.ones([1] * 64).to_sparse()
    content = {"format": 1, "op": "aten::mm", "args": [], "kwargs": {}, "tensors": [large, torch.ones([1] * 200)]}
    write_private(content, tmp_path / "0.pt")
    assert load(tmp_path, "0.pt").op == "aten::mm"
    write_private(content | {"more": nested}, tmp_path / "0.pt")
    with pytest.raises(DataFileError) as found:
        load(tmp_path, "0.pt")
    assert str(found.value.__cause__) == "values in values"


def doubled(n, *, filled_later):
    """A pickle's codes for a list of two lists of two lists ..., by the memo; filled before it is held, or after."""
    numbers = [chr(100 + k) for k in range(n)]
    lists = "".join(f"]q{number}" for number in numbers)
    pairs = [f"h{of}(h{one}h{one}e" for one, of in itertools.pairwise(numbers)]
    return lists + "".join(reversed(pairs) if filled_later else pairs), f"h{numbers[-1]}"


def called_with(values, before=""):
    """Codes of a list with what comes before, and what a function that `torch.save` writes makes of the values."""
    return lambda _: f"]({before}ctorch._utils\n_rebuild_qtensor\n({values * 7}tRe"


STORAGE = "X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpu"
DOUBLED, LAST = doubled(20, filled_later=False)
LATER, _ = doubled(20, filled_later=True)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        # torch prints arguments that do not fit: these have 2^20 lists, and could have 2^60.
        (called_with(LAST, DOUBLED), "values in values"),
        (called_with(LAST, LATER), "values in values"),
        (called_with("h\7", "]q\7h\7a"), "values in themselves"),
        (lambda _: f"]({DOUBLED}({STORAGE}{LAST}tQe", "values in values"),
        # An encoding is a module, which may load a library; that of `punycode` takes hours for a text of 300 KB.
        (lambda made: f"c_codecs\nencode\n({made}tR", "_codecs encode in it"),
        (lambda made: f"ccollections\nCounter\n({made}tR", "collections Counter in it"),
    ],
)
def test_captured_inputs_with_what_torch_does_not_write(tmp_path, change, why):
    folder = tmp_path / "x.shadowrun.tensors"
    save(folder, "0.pt", StoredCall("aten::mm", (torch.ones(2),), {}))
    with zipfile.ZipFile(folder / "0.pt") as archive:
        pickled = archive.read("archive/data.pkl")
    text = "X\x05\0\0\0ascii"
    changed = pickled.replace(b"}q\0(", b"}q\0(X\4\0\0\0more" + change(text).encode("latin-1"), 1)
    writer = torch._C.PyTorchFileWriter(str(folder / "0.pt"))
    for name, data in (("data.pkl", changed), ("byteorder", b"little"), ("data/0", bytes(8))):
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    with pytest.raises(DataFileError) as found:
        load(folder, "0.pt")
    assert str(found.value.__cause__) == why


def _all_kinds():
    x = torch.rand(4, 4)
    yield from (x, x.bool(), x.bfloat16(), x.to(torch.complex64), torch.nn.Parameter(x), x.to(torch.float8_e5m2))
    yield from (
        x.to(torch.int32).to(torch.uint16),
        torch._neg_view(x),
        x.to(torch.complex64).conj(),
        x.requires_grad_(),
    )
    yield from (x.to_sparse(), x.to_sparse_csr(), x.to_sparse_bsc((2, 2)), torch.nested.nested_tensor([x, x]))
    yield torch.quantize_per_tensor(x, 1.0, 0, torch.qint8)
    yield torch.quantize_per_channel(x, torch.ones(4), torch.zeros(4), 0, torch.quint8)


@pytest.mark.filterwarnings("ignore")
def test_captured_inputs_of_all_kinds_of_tensors(tmp_path):
    kinds = [t.detach() if type(t) is torch.Tensor else t for t in _all_kinds()]
    save(tmp_path, "0.pt", StoredCall("aten::mm", (kinds, torch.float16, 1 + 2j), {"layout": torch.strided}))
    loaded = load(tmp_path, "0.pt")
    assert [(type(t), t.dtype, t.layout) for t in loaded.args[0]] == [(type(t), t.dtype, t.layout) for t in kinds]
