"""A digest is the same by its definition, by C with each set of instructions, in numpy and by operators on integers."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import shadowrun
from shadowrun import sim
from shadowrun.native import core
from shadowrun.numerics.hash_ladder import ladder
from shadowrun.recording.digests import tensor_digest
from shadowrun.recording.digests.digest_operators import digest_parts
from shadowrun.recording.digests.number_formats import NUMBER_FORMATS, Encoding
from shadowrun.recording.digests.pending_digests import PendingDigests, digest_method
from shadowrun.recording.digests.tensor_digest import Digest, Packed, digest, digest_rows, pack, unpack
from shadowrun.recording.file_format.recording_file import read
from shadowrun.recording.model import RESULT, sample_positions

REAL = sorted(NUMBER_FORMATS, key=str)
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
SETS = ["plain", "avx2", "avx512"]
COUNTS = ("n_nan", "n_pos_inf", "n_neg_inf", "n_zero", "n_neg_zero", "n_subnormal")


def by_definition(t: torch.Tensor) -> Digest:
    """The ladder in numpy, and statistics by torch's own functions, of a real tensor on the CPU."""
    form, flat = NUMBER_FORMATS[t.dtype], t.contiguous().reshape(-1)
    bits = flat.view(form.ints).numpy().view(f"u{form.width // 8}")
    rungs, samples = ladder(bits, form.mantissa), bits[sample_positions(len(bits))].astype(np.uint64)
    values = torch.from_numpy(bits != 0).double() if t.dtype is torch.bool else flat.to(torch.float64)
    zero, finite = values == 0, values[values.isfinite()]
    is_float = form.encoding not in (Encoding.SIGNED, Encoding.UNSIGNED)
    subnormal = is_float * ~zero & (values.abs() < form.normal)
    masks = values.isnan(), values.isposinf(), values.isneginf(), zero & ~values.signbit(), zero & values.signbit()
    counts = [int(mask.sum()) for mask in (*masks, subnormal)]
    if not len(finite):
        return Digest(rungs, samples, *counts, math.nan, math.nan, math.nan)
    low, high = float(finite.min()), float(finite.max())
    scale = max(abs(low), abs(high)) or 1.0
    return Digest(rungs, samples, *counts, low, high, min(scale * float((finite / scale).norm()), sys.float_info.max))


def agree(found: Digest, wanted: Digest) -> None:
    assert found.rungs.tolist() == wanted.rungs.tolist()
    assert found.samples.tolist() == wanted.samples.tolist()
    assert {name: getattr(found, name) for name in COUNTS} == {name: getattr(wanted, name) for name in COUNTS}
    assert (found.min, found.max) == (wanted.min, wanted.max) or (math.isnan(found.min) and math.isnan(wanted.min))
    assert found.norm == pytest.approx(wanted.norm, rel=1e-12, abs=0, nan_ok=True)


def by_operators(t: torch.Tensor, n_rows: int = 0, memory_bytes: int = 1 << 16) -> Packed:
    """As on an accelerator."""
    n_leading = t.shape[0] if t.dim() else 0
    return PendingDigests(memory_bytes).add(t, min(n_rows, n_leading), n_leading, 1).get()


def by_c(t: torch.Tensor, instructions: str) -> Digest:
    form = NUMBER_FORMATS[t.dtype]
    return unpack(core.digest_memory(t.data_ptr(), t.numel(), 0, 0, form.place, 1, instructions))


def by_numpy(t: torch.Tensor) -> Digest:
    found = tensor_digest._in_numpy(t, 0)
    assert found is not None
    return unpack(found)


def instruction_sets() -> list[str]:
    """Those of this processor."""
    known = []
    for name in SETS if core is not None else ():
        try:
            by_c(torch.zeros(1), name)
        except ValueError:
            continue
        known.append(name)
    return known


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0, special: float = 0.0) -> torch.Tensor:
    """Any bits; a part of them NaN, infinities, zeros, subnormals and the ends of the range."""
    form, rng = NUMBER_FORMATS[dtype], np.random.default_rng(seed)
    unsigned = f"u{form.width // 8}"
    bits = rng.integers(0, 2**form.width, shape, unsigned, endpoint=False)
    sign, normal = 1 << (form.width - 1), 1 << form.mantissa
    chosen = [0, 1, normal - 1, normal, sign - normal - 1, sign - normal, sign - normal + 1, sign - 1]
    chosen = np.array([*chosen, *((sign + c) % 2**form.width for c in chosen)], unsigned)
    bits = np.where(rng.random(shape) < special, rng.choice(chosen, shape), bits).astype(unsigned)
    if dtype is torch.bool:
        bits &= 1
    signed = bits.reshape(shape).view(f"i{form.width // 8}")
    return torch.tensor(signed, device="cpu").clone(memory_format=torch.contiguous_format).view(dtype)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(REAL))
    n = draw(st.one_of(st.integers(0, 70), st.sampled_from([127, 128, 129, 1000, 1023, 1025, 4096, 4100, 8200])))
    return random_bits(dtype, (n,), draw(st.integers(0, 1000)), draw(st.sampled_from([0.0, 0.1, 1.0])))


@given(t=tensors())
@settings(max_examples=300, deadline=None)
def test_all_ways_agree(t):
    wanted = by_definition(t)
    if t.numel():
        agree(unpack(by_operators(t)), wanted)
    agree(by_numpy(t), wanted)
    agree(digest(t), wanted)
    for instructions in instruction_sets():
        agree(by_c(t, instructions), wanted)


@pytest.mark.parametrize("around", [2.0**450, 2.0**-450, 2.0**-500, 2.0**1023, 5e-324])
@pytest.mark.parametrize("others", [0.0, 0.9, 1e-7])
def test_norms_at_the_ends_of_the_range_agree(around, others):
    """Squares of numbers that lie on both sides of where a way begins to scale them, and norms that overflow."""
    t = torch.tensor([around, -1.5 * around, others * around, 1.99 * around], dtype=torch.float64)
    for values in (t, t[:2], t[2:], torch.full((3,), around, dtype=torch.float64)):
        wanted = by_definition(values)
        for found in (by_numpy(values.contiguous()), unpack(by_operators(values)), digest(values)):
            agree(found, wanted)


def test_a_norm_that_is_the_greatest_number_is_finite():
    greatest = sys.float_info.max
    t = torch.tensor([-greatest, 2.954923619803521e300], dtype=torch.float64)
    ways = by_definition(t), by_numpy(t), unpack(by_operators(t)), digest(t)
    assert [found.norm for found in ways] == [greatest] * 4


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("n", [66_000, (1 << 18) + 77])
def test_large_tensors_agree(dtype, n):
    """More than one chunk of C, and more than one piece of the operators."""
    t = random_bits(dtype, (n,), special=0.01)
    wanted = by_definition(t)
    agree(digest(t), wanted)
    agree(unpack(by_operators(t)), wanted)
    agree(by_numpy(t), wanted)


NEARLY_FINITE = {
    "normal": {},
    "zeros": {0.5: 0.0},
    "negative zeros": {0.5: 0.0, 0.3: -0.0},
    "one zero": {0.0: -0.0},
    "subnormal": {0.5: 1e-39, 0.1: -1e-44, 0.05: 0.0},
    "largest": {0.5: 3e38, 0.1: -3.4e38},
    "a NaN": {0.1: 0.0, 0.0: math.nan},
    "infinities": {0.1: math.inf, 0.05: -math.inf, 0.01: 1e-40},
}


@pytest.mark.parametrize("n", [31, 32, 33, 4096, 8200, (1 << 18) + 77])
@pytest.mark.parametrize("kind", NEARLY_FINITE)
def test_float32_that_is_nearly_all_finite(kind, n):
    """For these, C has a loop that counts nothing: what there is to count must still be counted."""
    rng = np.random.default_rng(n)
    values, at = rng.standard_normal(n).astype(np.float32), rng.random(n)
    for part, value in NEARLY_FINITE[kind].items():
        values[at <= max(part, at.min())] = value  # one at least
    t = torch.from_numpy(values)
    wanted = by_definition(t)
    agree(by_numpy(t), wanted)
    for instructions in instruction_sets():
        agree(by_c(t, instructions), wanted)


@pytest.mark.parametrize("dtype", [d for d in REAL if d.itemsize < 4 and d is not torch.bool], ids=str)
def test_every_number_of_8_and_16_bits(dtype):
    form = NUMBER_FORMATS[dtype]
    t = torch.arange(1 << form.width, dtype=torch.int32).to(form.ints).view(dtype)
    wanted = by_definition(t)
    agree(unpack(by_operators(t)), wanted)
    agree(by_numpy(t), wanted)
    for instructions in instruction_sets():
        agree(by_c(t, instructions), wanted)


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.skipif(core is None, reason="no C extension")
def test_memory_that_is_not_aligned(instructions):
    if instructions not in instruction_sets():
        pytest.skip(f"no {instructions}")
    raw = np.random.default_rng(0).integers(0, 256, 4 * 5000 + 1, np.uint8)
    form = NUMBER_FORMATS[torch.float32]
    found = unpack(core.digest_memory(raw.ctypes.data + 1, 5000, 0, 0, form.place, 1, instructions))
    agree(found, by_definition(torch.from_numpy(raw[1:].copy()).view(torch.float32)))


def without_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_digest, "core", None)
    monkeypatch.setattr(tensor_digest, "_quickly", tensor_digest._in_numpy)


SHAPES = {
    "0-dim": lambda t: t.reshape(-1)[7],
    "empty": lambda t: t[:, :0],
    "transposed": lambda t: t.t(),
    "every other": lambda t: t[::2, 1::3],
    "expanded": lambda t: t[:1].expand(5, -1),
    "offset": lambda t: t.reshape(-1)[3:],
    "channels last": lambda t: t[:30, :30].reshape(2, 3, 5, 30).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("way", ["c", "numpy"])
@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tensor_digests_as_its_contiguous_values(dtype, shape, way, monkeypatch):
    if way == "numpy":
        without_c(monkeypatch)
    real = torch.float16 if dtype is torch.complex32 else dtype.to_real() if dtype.is_complex else dtype
    t = random_bits(real, (40, 61, 2) if dtype.is_complex else (40, 61), special=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of complex32
        t = torch.view_as_complex(t) if dtype.is_complex else t
        values = SHAPES[shape](t)
        found = digest(values)
        parts = torch.view_as_real(values) if dtype.is_complex else values
        wanted = by_definition(parts.contiguous())
        if dtype.is_complex:
            at = sample_positions(values.numel())
            at = np.stack([2 * at, 2 * at + 1], 1).reshape(-1)
            bits = parts.reshape(-1).view(NUMBER_FORMATS[real].ints).numpy()
            wanted = wanted._replace(samples=bits.view(f"u{bits.itemsize}")[at].astype(np.uint64))
    agree(found, wanted)


@pytest.mark.skipif(core is None, reason="no C extension")
@pytest.mark.parametrize(
    "make",
    [
        *(lambda t: t.permute(3, 1, 0, 2), lambda t: t[:, ::2, :, 1], lambda t: t[:1, :, :1].expand(3, 5, 4, -1)),
        *(lambda t: t.transpose(1, 2)[1], lambda t: t.flip(0).as_strided((3, 4), (1, 0))),
    ],
)
def test_c_digests_what_does_not_lie_in_order(make):
    t = make(torch.randn(7, 5, 90, 11))
    assert not t.is_contiguous()
    assert core.digest(t, 2) == core.digest(t.contiguous(), 2)


def test_lazy_conjugation_and_negation_are_carried_out():
    z = torch.randn(100, dtype=torch.complex64)
    agree(digest(z.conj()), digest(z.conj().resolve_conj()))
    agree(digest(z.conj().imag), by_definition(-z.imag))
    assert digest(z).rungs[0] != digest(z.conj()).rungs[0]
    agree(digest(torch._efficientzerotensor((3, 4))), by_definition(torch.zeros(3, 4)))


def test_numbers_of_a_small_tensor():
    nan, inf = float("nan"), float("inf")
    found = digest(torch.tensor([3.0, -4.0, nan, inf, inf, -inf, 0.0, -0.0, -0.0, 1e-40]))
    assert found[2:8] == (1, 2, 1, 1, 2, 1)
    assert found[8:] == (-4, 3, 5)
    assert math.isnan(digest(torch.tensor([nan, inf])).norm)
    assert str(digest(torch.tensor([-0.0])).min) == "0.0"


@pytest.mark.parametrize("scale", [1e200, 1e-200, 5e-324])
def test_norm_of_numbers_whose_squares_leave_the_range(scale):
    t = torch.tensor([3.0, 4.0, float("nan"), float("inf")], dtype=torch.float64) * scale
    assert digest(t).norm == 5 * scale
    assert unpack(by_operators(t)).norm == 5 * scale
    assert by_numpy(t).norm == pytest.approx(5 * scale, rel=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(5, 33), (70, 2, 3), (3, 70_000), (7,), (4, 0), (0, 4), ()])
def test_rows_have_ladders_of_their_own(dtype, shape, monkeypatch):
    t = random_bits(dtype, shape)
    n_rungs = NUMBER_FORMATS[dtype].mantissa + 1
    for way in ("c", "numpy"):
        if way == "numpy":
            without_c(monkeypatch)
        found = digest_rows(t, 4)
        rows = t[:4] if shape else ()
        assert found.shape == (len(rows), n_rungs)
        assert found.tolist() == [digest(row.clone()).rungs.tolist() for row in rows]
        assert digest_rows(t, 0).shape == (0, n_rungs)
    for memory_bytes in (1 << 16, 1 << 21):  # rows one by one and in pieces; all at once
        *_, of_rows = by_operators(t, 4, memory_bytes) if t.numel() else (b"",)
        assert np.frombuffer(of_rows, np.uint64).tolist() == (found.reshape(-1).tolist() if t.numel() else [])
    assert found.tolist() == digest_rows(t.unsqueeze(-1).expand(*shape, 2)[..., 0], 4).tolist()


def test_packed_bytes_are_the_columns_of_a_recording():
    statistics, rungs, samples, row_rungs = pack(torch.randn(3, 50), 2)
    names = [*COUNTS, "min", "max", "norm"]
    assert len(statistics) == RESULT.itemsize - RESULT.fields["n_nan"][1]
    assert list(RESULT.names[-9:]) == names
    assert (len(rungs), len(samples), len(row_rungs)) == (8 * 24, 8 * 64, 2 * 8 * 24)


class Own(torch.Tensor):
    """Has memory of its own."""


def test_what_has_no_values_has_no_digest():
    with FakeTensorMode():
        fake = torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of nested and quantized tensors
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        sparse = [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()]
    for t in (fake, torch.ones(3, device="meta"), *sparse, quantized, nested, jagged):
        assert digest(t) is None
        assert digest_rows(t, 3) is None
    assert digest(torch.ones(3).as_subclass(Own)).rungs.tolist() == digest(torch.ones(3)).rungs.tolist()
    assert digest(torch.nn.Parameter(torch.ones(3))).n_zero == 0


class Log(TorchDispatchMode):
    """Lists what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class FunctionLog(TorchFunctionMode):
    """Lists what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("where", ["cpu", "cpu without C", "sim"])
def test_the_program_does_not_notice(where, clean_sim, monkeypatch):
    if where == "cpu without C":
        without_c(monkeypatch)
    z = torch.randn(50, 40, dtype=torch.complex64, device="cpu").to("sim" if where == "sim" else "cpu")
    x = torch.randn(50, 40).to(z.device).requires_grad_()
    version, state = x._version, torch.get_rng_state()
    functions, log = FunctionLog(), Log()
    with functions, log, warnings.catch_warnings():
        warnings.simplefilter("error")
        for t in (x, x[:, ::2], z.detach(), z.conj()):
            functions.seen.clear()
            log.seen.clear()
            assert digest(t) is not None
            assert not log.seen
    assert not [f for f in functions.seen if "Tensor" not in f and "built-in" in f]
    assert x._version == version
    assert x.grad_fn is None
    assert torch.equal(torch.get_rng_state(), state)


def profiled(between) -> list[str]:
    with torch.profiler.profile(acc_events=True) as profiler:
        torch.ones(3) + 1
        between()
        torch.ones(3) * 2
    return [event.name for event in profiler.events() if event.name.startswith("aten::")]


def test_a_profiler_of_the_program_sees_its_own_operators_only(clean_sim):
    on_device, transposed = torch.randn(50, 40).to("sim"), torch.ones(3, 4).t()
    plain = profiled(lambda: None)
    assert "aten::mul" in plain
    assert profiled(lambda: (digest(on_device), digest(transposed))) == plain


@pytest.mark.parametrize("dtype", [*REAL, torch.complex64], ids=str)
@given(data=st.data())
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_accelerator_digests_where_the_tensor_lies(dtype, data, clean_sim, monkeypatch):
    real = torch.float32 if dtype.is_complex else dtype
    n = data.draw(st.sampled_from([0, 1, 31, 32, 33, 64, 65, 1000, 70_000]))
    t = random_bits(real, (n, 2), data.draw(st.integers(0, 100)), 0.1)
    t = torch.view_as_complex(t) if dtype.is_complex else t
    t = t if data.draw(st.booleans()) else t[::2]
    assert digest_method("sim", real) is digest_parts
    fetched = []
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: (fetched.append(self.nbytes), cpu(self))[1])
    found = pack(t.to("sim"), 3)
    monkeypatch.undo()
    assert len(fetched) == 1
    # Of floats of 8 bits, counts of 256 codes for the tensor and for each row.
    assert sum(fetched) < (12_000 if NUMBER_FORMATS[real].encoding is Encoding.CODES else 8000)
    agree(unpack(found), unpack(pack(t, 3)))
    assert found[3] == pack(t, 3)[3]


def test_a_device_that_went_wrong_is_digested_by_the_cpu(tmp_path, clean_sim):
    def recorded(name):
        x = torch.arange(600.0).to("sim")
        with shadowrun.record(tmp_path / name):
            x + 1
        return read(tmp_path / name)

    right = recorded("a.shadowrec")
    with sim.flaws("index-select-off-by-one"):
        wrong = recorded("b.shadowrec")
    assert (wrong.rungs == right.rungs).all()
    assert (wrong.results == right.results).all()


def test_the_same_without_the_c_extension():
    code = (
        "import torch; from shadowrun.native import core; from shadowrun.recording.digests.tensor_digest import pack\n"
        "torch.manual_seed(0); assert core is None\n"
        "print([[part.hex() for part in pack(torch.randn(n, 3), 2)[1:]] for n in (0, 1, 50, 30_000)])"
    )
    run = subprocess.run([sys.executable, "-c", code], env={"SHADOWRUN_NATIVE": "0"}, capture_output=True, check=True)
    torch.manual_seed(0)
    here = [[part.hex() for part in pack(torch.randn(n, 3), 2)[1:]] for n in (0, 1, 50, 30_000)]
    assert run.stdout.decode().strip() == str(here)


@pytest.mark.skipif(core is None, reason="no C extension")
@pytest.mark.parametrize(
    "arguments",
    [(0, 5, 0, 0, 0, 1), (1, 5, 0, 0, 99, 1), (1, 5, 0, 0, -1, 1), (1, 5, 0, 0, 0, 2), (1, 5, 0, 0, 0, 0)],
)
def test_c_refuses_what_it_cannot_digest(arguments):
    with pytest.raises(ValueError, match="no memory that can be digested"):
        core.digest_memory(*arguments)
    with pytest.raises(ValueError, match="no instructions"):
        core.digest_memory(0, 0, 0, 0, 0, 1, "mmx")
