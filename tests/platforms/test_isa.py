"""Instruction sets that a processor lacks are refused, and settings that it does not heed are named."""

import platform

import pytest

import shadowrun
from shadowrun.errors import PlatformError
from shadowrun.platforms import cpu, resolve

AVX2 = frozenset(["sse4_1", "avx", "avx2", "fma"])
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
X86_LINUX = platform.system() == "Linux" and platform.machine() == "x86_64"


def processor(monkeypatch, vendor, flags):
    monkeypatch.setattr(cpu, "_cpuinfo", lambda: (vendor, frozenset(flags)))


@pytest.mark.parametrize(
    ("flags", "environment", "missing"),
    [
        (AVX2, {"ATEN_CPU_CAPABILITY": "avx512"}, "avx512f, avx512bw, avx512dq, avx512vl"),
        ({"avx"}, {"ATEN_CPU_CAPABILITY": "avx2"}, "avx2, fma"),
        (AVX2, {"ATEN_CPU_CAPABILITY": "avx2"}, ""),
        (AVX2, {"ATEN_CPU_CAPABILITY": "default"}, ""),
        (AVX512, {"ATEN_CPU_CAPABILITY": "avx512"}, ""),
        (AVX512, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}, ""),
        (AVX512, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "avx512_bf16"),
        (AVX2, {"ONEDNN_MAX_CPU_ISA": "ALL"}, ""),
        (AVX2, {"MKL_CBWR": "AVX512"}, ""),
        (frozenset(), {"ATEN_CPU_CAPABILITY": "avx512"}, ""),
    ],
)
def test_what_is_lacking(monkeypatch, flags, environment, missing):
    processor(monkeypatch, "GenuineIntel", flags)
    found = cpu.missing_instructions(environment)
    assert (found[2] if found else "") == missing


@pytest.mark.parametrize("spec", ["cpu[isa=avx512]", "cpu[env:ATEN_CPU_CAPABILITY=avx512]"])
def test_a_platform_that_the_processor_cannot_be_is_refused(monkeypatch, spec):
    processor(monkeypatch, "GenuineIntel", AVX2)
    platform = resolve(spec)
    with pytest.raises(PlatformError, match=r"lacks instructions that ATEN_CPU_CAPABILITY=avx512 asks for") as caught:
        platform.start()
    assert caught.value.slug == "absent-isa"
    assert platform.remote.pid == 0


def test_torch_is_asked_where_the_system_does_not_know(monkeypatch):
    """An interpreter whose torch takes no notice of the word, as on another architecture."""
    processor(monkeypatch, "", ())
    worker = resolve("cpu[isa=default]").remote
    with pytest.raises(PlatformError, match="computes with NEON instructions, not with DEFAULT") as caught:
        worker._refuse_other({"ATEN_CPU_CAPABILITY": "default"}, "NEON")
    assert caught.value.slug == "absent-isa"
    worker._refuse_other({"ATEN_CPU_CAPABILITY": "default"}, "DEFAULT")
    worker._refuse_other({}, "NEON")


def test_settings_without_effect(monkeypatch):
    both = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "MKL_CBWR": "AVX2,STRICT", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    processor(monkeypatch, "GenuineIntel", AVX2)
    assert cpu.settings_without_effect(both, mkl=True, mkldnn=True) == []
    assert len(cpu.settings_without_effect(both, mkl=False, mkldnn=False)) == 3
    processor(monkeypatch, "AuthenticAMD", AVX2)
    notes = cpu.settings_without_effect(both, mkl=True, mkldnn=True)
    assert notes[0].startswith("MKL_ENABLE_INSTRUCTIONS has no effect: MKL heeds it on Intel's processors only")
    assert notes[1].startswith("MKL_CBWR=AVX2,STRICT is the same as AUTO")
    assert cpu.settings_without_effect({"MKL_CBWR": "COMPATIBLE"}, mkl=True, mkldnn=True) == []


@pytest.mark.skipif(not X86_LINUX, reason="needs Linux's list of what the processor has")
def test_this_processor_is_read():
    vendor, flags = cpu._cpuinfo()
    assert vendor
    assert "sse4_1" in flags


@pytest.mark.skipif(not X86_LINUX or cpu._cpuinfo()[0] == "GenuineIntel", reason="Intel's processors heed it")
def test_a_setting_without_effect_is_a_note_of_the_run():
    run = shadowrun.compare("cpu[mkl_isa=AVX2]")
    run._target.stop()
    assert "MKL_ENABLE_INSTRUCTIONS has no effect" in run.info.target_fingerprint["without_effect"]
    assert run.info.notes[0].startswith("cpu[mkl_isa=AVX2]: MKL_ENABLE_INSTRUCTIONS has no effect")
