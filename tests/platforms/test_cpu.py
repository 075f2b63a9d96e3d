"""CPU settings are applied for one block and put back exactly."""

import pytest
import torch

from shadowrun.platforms import resolve, torchplatform
from shadowrun.platforms.cpu import flushes_denormals


@pytest.fixture(autouse=True)
def threads_are_restored():
    """Else the next tests of the process run with other sums where OMP_NUM_THREADS=1."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def state():
    return {
        "threads": torch.get_num_threads(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "deterministic": torch.get_deterministic_debug_mode(),
        "denormal": flushes_denormals(),
        "mkldnn_precision": torch.backends.mkldnn.matmul.fp32_precision,
        "cuda_precision": torch.backends.cuda.matmul.fp32_precision,
        "legacy_precision": torch.get_float32_matmul_precision(),
    }


@pytest.mark.parametrize(
    ("settings", "inside"),
    [
        ("threads=1", {"threads": 1}),
        ("threads=3", {"threads": 3}),
        ("mkldnn=off", {"mkldnn": False}),
        ("float32_matmul_precision=medium", {"mkldnn_precision": "bf16"}),
        ("float32_matmul_precision=high", {"mkldnn_precision": "tf32"}),
        ("float32_matmul_precision=highest", {"mkldnn_precision": "ieee"}),
        ("deterministic=on", {"deterministic": 2}),
        ("flush_denormal=on", {"denormal": True, "threads": 1}),
        ("mkldnn=off,deterministic=on,threads=1", {"mkldnn": False, "deterministic": 2, "threads": 1}),
    ],
)
def test_only_what_is_named_changes_and_comes_back(settings, inside):
    torch.set_num_threads(2)
    before = state()
    # The legacy reader raises while the new setting is in force: torch's own rule about mixing the two.
    with resolve(f"cpu[{settings}]").context():
        now = {key: read() for key, read in READERS.items()}
    assert now == {key: before[key] for key in READERS} | inside
    assert state() == before


READERS = {
    "threads": torch.get_num_threads,
    "mkldnn": lambda: torch.backends.mkldnn.enabled,
    "deterministic": torch.get_deterministic_debug_mode,
    "denormal": flushes_denormals,
    "mkldnn_precision": lambda: torch.backends.mkldnn.matmul.fp32_precision,
    "cuda_precision": lambda: torch.backends.cuda.matmul.fp32_precision,
}


def test_settings_of_the_user_come_back():
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with resolve("cpu[deterministic=off,float32_matmul_precision=highest,flush_denormal=off]").context():
            assert torch.get_deterministic_debug_mode() == 0
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.get_deterministic_debug_mode() == 1
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.mkldnn.matmul.fp32_precision = "none"


def test_restored_after_an_exception():
    before = state()
    with pytest.raises(ZeroDivisionError), resolve("cpu[mkldnn=off,flush_denormal=on]").context():
        _ = 1 / 0
    assert state() == before


def test_blocks_nest():
    torch.set_num_threads(2)
    one, three = resolve("cpu[threads=1]"), resolve("cpu[threads=3]")
    with one.context():
        with three.context():
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_subnormals_are_really_flushed():
    tiny = torch.full((100_000,), 1e-40)
    with resolve("cpu[flush_denormal=on]").context():
        flushed = tiny * 1.0
    kept = tiny * 1.0
    # Integer views: comparing floats while flushing would call both zero.
    assert flushed.view(torch.int32).count_nonzero() == 0
    assert kept.view(torch.int32).count_nonzero() == 100_000


def test_flush_denormal_of_the_user_comes_back():
    torch.set_flush_denormal(True)
    try:
        with resolve("cpu[flush_denormal=off]").context():
            assert not flushes_denormals()
        assert flushes_denormals()
    finally:
        torch.set_flush_denormal(False)


def test_settings_work_where_global_flags_are_frozen(monkeypatch):
    flags = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", False)
    with pytest.raises(RuntimeError, match="not allowed to set"):
        torch.backends.mkldnn.enabled = False
    with resolve("cpu[mkldnn=off]").context():
        assert not torchplatform.mkldnn_enabled()
    assert torchplatform.mkldnn_enabled()
