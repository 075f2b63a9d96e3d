"""What a project's files say, where they are looked for, and the errors for what has no meaning."""

from __future__ import annotations

import datetime as dt

import pytest

from shadowrun import settings
from shadowrun.config import Config
from shadowrun.errors import UsageError
from shadowrun.settings import fits_operator, fits_platform, read_settings


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "er")
    return tmp_path


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def rules_on(platform, **options):
    look_up = Config.from_options(**options).tolerance_on(platform)
    return look_up or (lambda _op, _dtype: None)


def test_the_nearest_of_each_file_is_read_and_shadowrun_toml_decides(folder):
    write(folder / "pyproject.toml", '[tool.shadowrun.tolerance]\n"aten::mm" = {rtol = 1, atol = 1}\n')
    write(folder / "deep" / "pyproject.toml", "[tool.other]\nx = 1\n")  # nothing of ours: looked past
    assert rules_on("npu")("aten::mm", "f32") == (1, 1)
    write(folder / "shadowrun.toml", '[tolerance]\n"aten::mm" = {rtol = 3, atol = 3}\n')
    assert rules_on("npu")("aten::mm", "f32") == (3, 3)
    write(folder / "deep" / "shadowrun.toml", '[tolerance]\n"aten::mm" = {rtol = 2, atol = 2}\n')
    assert rules_on("npu")("aten::mm", "f32") == (2, 2)
    assert rules_on("npu", settings=folder / "shadowrun.toml")("aten::mm", "f32") == (3, 3)
    assert rules_on("npu", settings=False)("aten::mm", "f32") is None
    assert [p.name for p in Config.from_options().settings] == ["pyproject.toml", "shadowrun.toml"]


def test_without_files_there_is_nothing(folder):
    assert read_settings(start=folder / "deep") == settings.Settings()
    assert Config.from_options().tolerance_on("npu") is None


def test_the_last_rule_that_fits_decides(folder):
    write(
        folder / "shadowrun.toml",
        """
        [tolerance]
        "*" = {rtol = 1, atol = 0}
        "mm" = [
          {rtol = 2, atol = 0, dtype = "torch.bfloat16"},
          {rtol = 3, atol = 0, platform = "npu"},
          {rtol = 4, atol = 0, dtype = "f1*", platform = "cuda*"},
        ]
        """,
    )
    npu, cuda = rules_on("npu:1"), rules_on("cuda:0")
    assert [npu("aten::mm", d) for d in ("f32", "bf16")] == [(3, 0), (3, 0)]
    assert [cuda("aten::mm", d) for d in ("f32", "bf16", "f16")] == [(1, 0), (2, 0), (4, 0)]
    assert cuda("aten::bmm", "bf16") == (1, 0)
    given = {"aten::mm": {"rtol": 9.0, "atol": 0.0}}
    assert rules_on("npu", tolerance=given)("aten::mm", "f32") == (9, 0)
    assert rules_on("npu", tolerance=given)("aten::exp", "f32") == (1, 0)
    assert rules_on("npu", tolerance=given, rtol=0.5, atol=0.5)("aten::mm", "f32") == (0.5, 0.5)


@pytest.mark.parametrize(
    ("pattern", "platform", "fits"),
    [
        ("npu", "npu:0", True),
        ("npu*", "npu:0", True),
        ("npu:1", "npu:0", False),
        ("cpu", "cpu[threads=1]", True),
        ("cpu[threads=1]", "cpu[threads=1]", True),
        ("cpu[threads=1]", "cpu[threads=2]", False),
        ("cud", "cuda", False),
        ("*", "anything", True),
    ],
)
def test_platforms(pattern, platform, fits):
    assert fits_platform(pattern, platform) is fits


def test_operators_as_in_the_option_ops():
    assert all(fits_operator(p, "aten::add.Tensor") for p in ("aten::add.Tensor", "aten::add", "add", "add.*", "*"))
    assert not any(fits_operator(p, "aten::add.Tensor") for p in ("ad", "aten::addmm", "mul*", "Tensor"))


def test_a_line_of_the_ledger(folder):
    text = '[[known]]\noperator="a"\nplatform="b"\nreason="c"\n\n[[known]]\noperator="d"\nplatform="e"\nreason="f"\n'
    text += 'module="g"\nstatus="slow"\nexpires=2027-01-31\n'
    path = write(folder / "vendor.toml", text)
    first, second = read_settings(path).known
    assert (first.origin, first.kind, first.module, first.expires) == ("vendor.toml:1", "", "*", None)
    assert (second.origin, second.kind, second.module) == ("vendor.toml:6", "slow", "g")
    assert second.expires == dt.date(2027, 1, 31)
    assert Config.from_options(known=path).known == (first, second)
    assert Config.from_options(known=False).known == ()
    inline = write(folder / "pyproject.toml", '[tool.shadowrun]\nknown=[{operator="a",platform="b",reason="c"}]\n')
    assert [line.origin for line in read_settings(inline).known] == ["pyproject.toml, known 1"]


KNOWN = '[[known]]\noperator = "a"\nplatform = "b"\nreason = "c"\n'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = [", "is not TOML: "),
        ("tolerances = 1", "unknown key 'tolerances'. Did you mean 'tolerance'? Keys: tolerance, known, run."),
        ("tolerance = 1", "tolerance = 1: use a table such as"),
        ('[tolerance]\n"mm" = 1', "tolerance of 'mm': value = 1: use {rtol = 1e-3, atol = 1e-5}"),
        ('[tolerance]\n"mm" = {rtol = 1}', "tolerance of 'mm': 'atol' is missing: give rtol and atol together"),
        ('[tolerance]\n"mm" = {rtol = -1, atol = 0}', "rtol = -1: use a finite number >= 0."),
        ('[tolerance]\n"mm" = {rtol = nan, atol = 0}', "rtol = nan: use a finite number >= 0."),
        ('[tolerance]\n"mm" = {rtol = true, atol = 0}', "rtol = True: use a finite number >= 0."),
        ('[tolerance]\n"mm" = {rtol = 1, atol = 0, dytpe = "f32"}', "unknown key 'dytpe'. Did you mean 'dtype'?"),
        (
            '[tolerance]\n"mm" = {rtol = 1, atol = 0, dtype = "bf61"}',
            "dtype = 'bf61': did you mean 'bf16'? use a float",
        ),
        ('[tolerance]\n"mm" = {rtol = 1, atol = 0, dtype = "int64"}', "use a floating-point or complex dtype"),
        ("known = 3", "begin each line of the ledger with [[known]]"),
        (KNOWN + 'expiry = "x"', "shadowrun.toml:1: unknown key 'expiry'. Did you mean 'expires'?"),
        (KNOWN.replace('"c"', '" "'), "shadowrun.toml:1: reason = ' ': use a text that is not empty."),
        (KNOWN.replace("reason", "module"), "shadowrun.toml:1: 'reason' is missing: every entry needs it."),
        ("\n\n" + KNOWN + 'status = "wrong"', "shadowrun.toml:3: status = 'wrong': use one of unsupported, error,"),
        (KNOWN + 'expires = "soon"', "expires = 'soon': use a date such as 2027-01-31."),
        (KNOWN + "expires = 2027", "expires = 2027: use a date such as 2027-01-31."),
    ],
)
def test_what_has_no_meaning_is_refused(folder, text, sentence):
    path = write(folder / "shadowrun.toml", text)
    with pytest.raises(UsageError) as caught:
        Config.from_options()
    assert sentence in str(caught.value)
    assert str(path) in str(caught.value)
    assert caught.value.slug == "bad-settings"
    Config.from_options(settings=False)


def test_files_that_cannot_be_read(folder):
    for option in ("settings", "known"):
        with pytest.raises(UsageError, match=r"settings 'nothing\.toml' cannot be read \(No such file") as caught:
            Config.from_options(**{option: "nothing.toml"})
        assert caught.value.slug == "settings-missing"
        with pytest.raises(UsageError, match="use a file, None or False"):
            Config.from_options(**{option: True})
    write(folder / "shadowrun.toml", "").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not TOML"):
        Config.from_options()


def test_tolerances_in_the_program_are_checked_as_well():
    with pytest.raises(UsageError, match=r"compare\(\), tolerance of 'mm': 'atol' is missing"):
        Config.from_options(tolerance={"mm": {"rtol": 1.0}})


def test_the_run_has_its_tolerances_but_no_path(folder):
    write(folder / "shadowrun.toml", '[tolerance]\n"mm" = {rtol = 1e-3, atol = 0}\n' + KNOWN)
    printed = Config.from_options().printable()
    assert printed["tolerance"] == ["mm * on *: rtol 0.001, atol 0 (shadowrun.toml)"]
    assert printed["settings"] == ["shadowrun.toml"]
    assert "known" not in printed
    assert Config.from_options(settings=False).printable()["tolerance"] is None
