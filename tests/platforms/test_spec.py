"""The words for platforms: what is read, and what is refused with which sentence."""

import importlib.metadata
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadowrun.errors import PlatformError
from shadowrun.platforms import PlatformSpec, known_devices, parse, plugins
from shadowrun.platforms.settings import environment


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("cpu", "cpu"),
        ("cuda:1", "cuda:1"),
        (" npu ", "npu"),
        ("sim", "sim"),
        ("lazy:0", "lazy:0"),
        ("cpu[threads=1]", "cpu[threads=1]"),
        ("cpu[mkldnn=FALSE, deterministic=1]", "cpu[deterministic=on,mkldnn=off]"),
        (
            "cpu[threads=1,mkldnn=off,float32_matmul_precision=medium,deterministic=on,flush_denormal=on]",
            "cpu[deterministic=on,float32_matmul_precision=medium,flush_denormal=on,mkldnn=off,threads=1]",
        ),
        (
            "cpu[onednn_isa=sse41,mkl_cbwr=avx2_strict,isa=DEFAULT,threads=2]",
            "cpu[isa=default,mkl_cbwr=AVX2_STRICT,onednn_isa=SSE41,threads=2]",
        ),
        ("cpu[env:MKL_CBWR=COMPATIBLE]", "cpu[env:MKL_CBWR=COMPATIBLE]"),
        ("cpu[threads=1, env:B = 2 ,env:A=x=y z]", 'cpu[env:A="x=y z",env:B=2,threads=1]'),
        ('cpu[env:A="MKL,STRICT"]', 'cpu[env:A="MKL,STRICT"]'),
        (r'cpu[env:A="a\"b\\c\n]", isa="avx2"]', r'cpu[env:A="a\"b\\c\n]",isa=avx2]'),
        ("cpu[env:A=]", 'cpu[env:A=""]'),
        (r"cpu[env:A=a]b\c]", r'cpu[env:A="a]b\\c"]'),
        ("cpu[python=~/venv/bin/python]", "cpu[python=~/venv/bin/python]"),
        ("cpu[python=/with space/bin/python]", 'cpu[python="/with space/bin/python"]'),
        (torch.device("cuda", 3), "cuda:3"),
        (torch.device("cpu"), "cpu"),
        (PlatformSpec("xpu", 2), "xpu:2"),
    ],
)
def test_canonical_text(text, canonical):
    assert str(parse(text)) == canonical
    assert parse(canonical) == parse(text)


def test_settings_are_values_not_words():
    spec = parse("cpu[threads=01,mkldnn=no,float32_matmul_precision=high]")
    assert spec.settings == (("float32_matmul_precision", "high"), ("mkldnn", False), ("threads", 1))
    assert spec.device_string == "cpu"


@pytest.mark.parametrize(
    ("spec", "slug", "sentence"),
    [
        ("cudda:1", "unknown-device", "Unknown device 'cudda' in platform 'cudda:1'. Did you mean 'cuda'?"),
        ("CPU", "unknown-device", "Did you mean 'cpu'?"),
        ("gpu", "unknown-device", "Devices: cpu, cuda,"),
        ("privateuseone", "unknown-device", "Unknown device 'privateuseone'"),
        ("", "bad-spec", "Platform '' cannot be read"),
        (f"cuda:{'9' * 5000}", "bad-spec", "cannot be read"),
        (f"cpu[threads={'9' * 5000}]", "bad-setting", "give a whole number from 1 to 1024"),
        ("cuda:", "bad-spec", "write device, device:index or device[key=value,...]"),
        ("cuda:-1", "bad-spec", "cannot be read"),
        ("cpu[threads=1", "bad-spec", "cannot be read"),
        ("cpu[threads=1]x", "bad-spec", "cannot be read"),
        ("cpu[]", "bad-spec", "Setting '' in platform 'cpu[]' cannot be read: write key=value."),
        ("cpu[threads]", "bad-spec", "Setting 'threads' in platform"),
        ("cpu[threads=1,threads=2]", "bad-spec", "Setting 'threads' is given twice"),
        ("meta", "bad-spec", "has shapes but no values"),
        (7, "bad-spec", "7 is no platform"),
        (None, "bad-spec", "None is no platform"),
        ("npu[threads=1]", "unknown-setting", "Device 'npu' in platform 'npu[threads=1]' has no settings; cpu has: "),
        ("cuda[threads=1]", "unknown-setting", "'cuda[threads=1]'. Settings of cuda: compute, deterministic, tf32."),
        ("cuda[tf32=high]", "bad-setting", "tf32='high' in platform 'cuda[tf32=high]' cannot be used: give on or off"),
        ("cuda[env:A=1]", "unknown-setting", "Unknown setting 'env:A' in platform 'cuda[env:A=1]'"),
        ("cpu[thread=1]", "unknown-setting", "Unknown setting 'thread' in platform 'cpu[thread=1]'. Did you mean"),
        ("cpu[threads=0]", "bad-setting", "threads='0' in platform 'cpu[threads=0]' cannot be used: give a whole"),
        ("cpu[threads=many]", "bad-setting", "give a whole number from 1 to 1024"),
        ("cpu[threads=²]", "bad-setting", "give a whole number"),
        ("cpu[mkldnn=maybe]", "bad-setting", "give on or off"),
        ("cpu[isa=sse2]", "bad-setting", "give default, avx2, avx512"),
        ("cpu[float32_matmul_precision=low]", "bad-setting", "give highest, high, medium"),
        ('cpu[env:A="x]', "bad-spec", "Setting 'env:A=\"x' in platform"),
        ('cpu[env:A="x"y]', "bad-spec", "A value with commas goes in quotes, as in JSON"),
        (r'cpu[env:A="\x"]', "bad-spec", r'"\x" in platform'),
        ("cpu[env:A=1,env:A=2]", "bad-spec", "Setting 'env:A' is given twice"),
        ("cpu[threads=1,]", "bad-spec", "Setting '' in platform"),
        ("cpu[env:=1]", "bad-setting", "'' in platform 'cpu[env:=1]' is no name of an environment variable"),
        ("cpu[env:A-B=1]", "bad-setting", "'A-B' in platform"),
        (r'cpu[env:A="\u0000"]', "bad-setting", "cannot be the value of an environment variable"),
        (r'cpu[env:A="\ud800"]', "bad-setting", "cannot be the value of an environment variable"),
        ("cpu[isa=avx2,env:ATEN_CPU_CAPABILITY=default]", "bad-setting", "isa is the same as env:ATEN_CPU_CAPABILITY"),
        ("cpu[threads=2,env:OMP_NUM_THREADS=1]", "bad-setting", "sets OMP_NUM_THREADS twice"),
        ("cpu[python=]", "bad-setting", "give the path of an interpreter"),
        ("cpu[enw:A=1]", "unknown-setting", "Unknown setting 'enw:A'"),
        ("cpu[threads=4,flush_denormal=on]", "bad-setting", "flush_denormal=on reaches one thread only"),
    ],
)
def test_refused(spec, slug, sentence):
    with pytest.raises(PlatformError) as caught:
        parse(spec)
    assert sentence in str(caught.value)
    assert caught.value.slug == slug


def test_flush_denormal_off_goes_with_threads():
    assert dict(parse("cpu[threads=4,flush_denormal=off]").settings) == {"threads": 4, "flush_denormal": False}


def test_every_setting_of_the_message_is_accepted():
    with pytest.raises(PlatformError, match="Settings of cpu: ") as caught:
        parse("cpu[x=1]")
    names = str(caught.value).partition("Settings of cpu: ")[2].rstrip(".").split(", ")
    for name in names:
        words = {
            "compute": "float64",
            "float32_matmul_precision": "high",
            "isa": "AVX2",
            "mkl_cbwr": "avx2",
            "mkl_isa": "AVX2",
        }
        value = {**words, "onednn_isa": "avx2"}.get(name, "1")
        assert dict(parse(f"cpu[{name}={value}]").settings)[name] in (1, True, "1", "high", "avx2", "AVX2", "float64")


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        spec = parse(text)
    except PlatformError:
        return
    assert parse(str(spec)) == spec


@given(
    st.dictionaries(
        st.from_regex(r"env:[A-Za-z_][A-Za-z0-9_]*", fullmatch=True) | st.just("python"),
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
        max_size=4,
    )
)
def test_any_value_has_a_text(values):
    spec = PlatformSpec("cpu", None, tuple(sorted(values.items())))
    assert parse(str(spec)) == spec
    assert spec.needs_process is bool(values)
    assert environment(spec.settings) == {k[4:]: v for k, v in values.items() if k != "python"}


def test_reports_and_data_files_have_no_names_of_folders():
    spec = parse('cpu[python=venv,env:LD_PRELOAD=/home/me/lib.so,env:N="a, b",threads=2]')
    assert spec.public == 'cpu[env:LD_PRELOAD="(a path)",env:N="a, b",python="(a path)",threads=2]'
    assert parse("cpu[env:N=1]").public == "cpu[env:N=1]"
    assert parse("cuda:1").public == "cuda:1"


def test_spec_needs_no_torch():
    code = "import shadowrun.platforms as p, sys; p.parse('cpu[threads=1]'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_known_devices_are_sorted_and_without_the_unnamed_private_device():
    known = known_devices()
    assert known == sorted(known)
    assert {"cpu", "cuda", "npu", "lazy", "sim"} <= set(known)
    assert "privateuseone" not in known


def test_entry_points_add_devices(monkeypatch):
    entry = importlib.metadata.EntryPoint("myaccel", "package:start", "shadowrun.platforms")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == "shadowrun.platforms" else [])
    assert str(parse("myaccel:2")) == "myaccel:2"


def test_packages_are_read_once_until_one_is_installed(tmp_path, monkeypatch):
    os.utime(tmp_path, (1, 1))  # a clock of milliseconds would not show the change
    monkeypatch.syspath_prepend(tmp_path)
    assert "myaccel" not in known_devices()
    info = tmp_path / "chip-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: chip\nVersion: 1\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[shadowrun.platforms]\nmyaccel = chip:start\n", encoding="utf-8")
    assert "myaccel" in known_devices()

    def refused(**_):
        raise AssertionError

    monkeypatch.setattr(importlib.metadata, "entry_points", refused)
    assert "myaccel" in known_devices()
