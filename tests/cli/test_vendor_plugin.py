"""A vendor's package, installed with its metadata: the skeleton of `examples/vendor_plugin`, and broken ones."""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import shadowrun
from shadowrun.cli.studies import campaign
from shadowrun.errors import UsageError
from shadowrun.platforms import backends, devices, plugin_file, plugins, unsupported
from tests import forked

ROOT = Path(__file__).parents[2]
CACHED = (plugin_file.plugin_file, backends.backend_of, plugins._read_entry_points)
SKELETON = ROOT / "examples" / "vendor_plugin"
PROGRAM = """
import torch
x = torch.linspace(-0.9, 0.9, 12).reshape(3, 4)
y = torch.erfinv(x) + torch.cumsum(x, 1)
print(tuple((x @ x.T).shape))
"""


def install(site, project, *packages):
    """What ``pip install --no-deps -t`` leaves: the packages, and a folder of metadata with the entry points."""
    data = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for package in packages:
        shutil.copytree(project / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    describe(site, data["name"], data["version"], data["entry-points"])


def describe(site, name, version, groups):
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in table.items()) for group, table in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    install(site, SKELETON, "vpu_plugin")
    return site


@pytest.fixture(scope="module")
def started(site):
    """The process that commands with the package are forked from: torch has started the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{site}")
        with forked.Server(["torch.testing._internal.common_methods_invocations"]) as started:
            yield started


@pytest.fixture
def forked_shell(site, started, shell):
    """As `shell`, with the package of the module."""
    variables = {"PYTHONPATH": f"{ROOT}{os.pathsep}{site}"}
    return lambda *words: started.shadowrun(words, Path.cwd(), variables)


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Runs a command in a process of its own, with packages of a folder: a device cannot be taken back."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM, encoding="utf-8")

    def run(site, *words, **variables):
        env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{site}", "OMP_NUM_THREADS": "1"} | variables
        words = [sys.executable, "-P", "-m", "shadowrun", *words]
        return subprocess.run(words, capture_output=True, text=True, check=False, env=env)

    return run


def found(**options):
    run = shadowrun.load(".shadowrun", **options)
    return {finding.op: finding.kind for finding in run.findings()}


def test_a_run_on_its_device(site, shell):
    done = shell(site, "run", "--target", "vpu", "train.py")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "On vpu the program does not run: 1 operator missing" in done.stdout
    assert "ticket 12, in release 1.1 (shadowrun.toml:18 of vpu-plugin)" in done.stdout
    # The only witness of a copy by hand.
    assert "the backend's own counter of aten::erfinv rose" in done.stdout
    assert "plugin 1.0" in done.stdout
    assert shell(site, "report").stdout.startswith("shadowrun  vpu against cpu\nPASSED")
    assert shell(site, "report", "--no-vendor-known").stdout.startswith("shadowrun  vpu against cpu\nFAILED")
    # Read where the package is not installed.
    assert found() == {"aten::cumsum": "unsupported", "aten::erfinv": "fallback"}


def test_its_settings(forked_shell):
    done = forked_shell("run", "--no-vendor-known", "--target", "vpu[fast_math=on,rounding=reversed]", "train.py")
    assert done.returncode == 1
    assert found() == {"aten::cumsum": "unsupported", "aten::mm": "mismatch", "aten::erfinv": "fallback"}
    assert shadowrun.load(".shadowrun").info.target == "vpu[fast_math=on,rounding=reversed]"
    refused = forked_shell("run", "--target", "vpu[rounding=up]", "train.py")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "rounding='up' in platform 'vpu[rounding=up]' cannot be used: give forward, reversed" in refused.stderr
    script = forked_shell("repro", "--finding", "2", "--target", "vpu[fast_math=on,rounding=reversed]")
    (path,) = Path("repro").glob("*/repro.py")
    text = path.read_text(encoding="utf-8")
    assert "import vpu_plugin.settings" in text, script.stderr
    assert "vpu_plugin.settings.fast_math(True).__enter__()" in text


def test_a_sweep_and_its_support(forked_shell):
    words = ("sweep", "--target", "vpu", "--ops", "cumsum,exp", "--parts", "forward", "--samples", "2", "--jobs", "1")
    done = forked_shell(*words, "-o", "junit.xml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "known      ticket 12, in release 1.1 (shadowrun.toml:18 of vpu-plugin)" in done.stdout
    assert '<skipped message="known issue: ticket 12' in Path("junit.xml").read_text(encoding="utf-8")
    strict = forked_shell(*words, "--no-vendor-known")
    assert strict.returncode == 1
    assert "FAILED: cases that count against the target: 2 unsupported" in strict.stderr
    table = forked_shell("support", "--import", "vpu_plugin")
    assert "vpu      cpu          1       0    1" in table.stdout


def test_the_device_starts_without_torchs_autoload(site, shell):
    done = shell(site, "run", "--target", "vpu", "train.py", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr
    assert "shadowrun  vpu against cpu" in done.stdout


def test_a_switched_off_autoload_is_named(tmp_path, shell):
    site = tmp_path / "only-torchs"
    describe(site, "chip", "1", {"torch.backends": {"chip_package": "chip:load"}})
    (site / "chip.py").write_text(
        "def load():\n    from shadowrun import sim\n    sim.enable('mychip')\n", encoding="utf-8"
    )
    done = shell(site, "run", "--target", "mychip", "train.py")
    assert "shadowrun  mychip against cpu" in done.stdout, done.stderr
    off = shell(site, "run", "--target", "mychip", "train.py", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (off.returncode, off.stdout) == (2, "")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD keeps torch from starting chip_package." in off.stderr


def test_a_package_that_fails_at_torchs_start(tmp_path, shell):
    site = tmp_path / "broken"
    describe(site, "chip", "1", {"torch.backends": {"chip_package": "chip:load"}})
    (site / "chip.py").write_text("def load():\n    raise OSError('libchip.so: cannot open')\n", encoding="utf-8")
    for words in (("run", "--target", "cpu[threads=1]", "train.py"), ("platforms",)):
        done = shell(site, *words)
        assert done.returncode == 2
        assert "The package 'chip_package', which torch starts when it is imported, failed: OSError" in done.stderr
        assert "[shadowrun explain bad-plugin]" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_reset_after_each_case_that_ended_its_process(tmp_path, shell):
    reset = f"{sys.executable} -c \"open('log', 'a').write('reset ')\""
    words = ("--flaws", "erfinv-crashes", "--ops", "erfinv,exp", "--parts", "forward", "--reset-command", reset)
    done = shell(tmp_path, "sweep", *words)
    assert done.returncode == 1, done.stderr
    assert "erfinv  [none]: crash" in done.stdout
    assert set(Path("log").read_text(encoding="utf-8").split()) == {"reset"}


# -- the file of a package -----------------------------------------------------------------------------


@pytest.fixture
def brought(tmp_path, monkeypatch):
    """Installs a file; gives a function that reads it."""
    monkeypatch.syspath_prepend(tmp_path)

    def read(text, value="chip:plugin.toml"):
        for cached in CACHED:
            cached.cache_clear()
        (tmp_path / "chip").mkdir(exist_ok=True)
        (tmp_path / "chip" / "plugin.toml").write_text(text, encoding="utf-8")
        shutil.rmtree(tmp_path / "chip-1.dist-info", ignore_errors=True)
        describe(tmp_path, "chip", "1", {"shadowrun.backends": {"chip": value}})
        return backends.backend_of("chip")

    yield read
    for cached in CACHED:
        cached.cache_clear()


def test_all_keys(brought):
    row = brought("""
package = "chip.device"
distribution = "chip-package"
streams = true
fallback-counters = "chip.counters"
reset = "chip.reset"
environment = ["CHIP_FAST"]
[settings]
deterministic = true
mode = {apply = "chip.settings:mode", values = ["a", "b"]}
[[missing]]
exception = ["OSError"]
text = "E404 NAME"
means = "dtype"
[[known]]
operator = "aten::mm"
platform = "chip:1"
reason = "x"
""")
    assert (row.package, row.distribution, row.streams) == ("chip.device", "chip-package", True)
    assert (row.fallback_counters, row.reset, row.environment) == ("chip.counters", "chip.reset", ("CHIP_FAST",))
    assert row.settings == ("deterministic", "mode")
    assert row.own_settings == (plugin_file.VendorSetting("mode", "chip.settings", "mode", ("a", "b")),)
    assert row.missing_kernel == ((("OSError",), "E404 NAME", shadowrun.Cause.MISSING_DTYPE),)
    assert [line.origin for line in plugin_file.known_issues("chip:1")] == ["plugin.toml:15 of chip"]
    assert plugin_file.known_issues("chip:0") == ()
    assert "chip" not in sys.modules


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pakage = 'x'", "unknown key 'pakage'"),
        ("package = 'import os; os'", "use the name of a module"),
        ("streams = 1", "use true or false"),
        ("environment = 'X'", "use a list of texts"),
        ("[settings]\nX = {apply = 'a:b'}", "use a name of small letters"),
        ("[settings]\nx = {apply = 'a b'}", 'use {apply = "module:function"}'),
        ("[settings]\nx = {apply = 'a:b', values = ['a,b']}", "use words of letters"),
        ("[settings]\nx = true", 'use {apply = "module:function"}'),
        ("[[missing]]\ntext = 'x'", "use exception ="),
        ("[[missing]]\nexception = ['E']\ntext = '('\nmeans = 'dtype'", "missing.text = '('"),
        ("[[known]]\noperator = 'x'", "'platform' is missing"),
        ("= 1", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused(brought, text, says):
    with pytest.raises(UsageError) as caught:
        brought(text)
    assert says in str(caught.value)


def test_the_list_of_platforms_shows_what_was_read(brought):
    brought("[settings]\nmode = {apply = 'chip.settings:mode'}\n[[known]]\noperator='x'\nplatform='chip'\nreason='y'")
    (found,) = (device for device in devices() if device.device_type == "chip")
    assert found.detail.endswith("; described by chip: settings mode; 1 known issue")


def test_the_broken_file_of_another_device_ends_no_run(brought):
    with contextlib.suppress(UsageError):
        brought("streams = 1")
    unsupported._patterns.cache_clear()
    assert not unsupported.classify(NotImplementedError("no")).supported


def test_a_missing_file_is_named(brought):
    with pytest.raises(UsageError, match=r"names a file that does not exist: write package:file\.toml"):
        brought("", value="chip:other.toml")


def test_reports_of_a_campaign_take_its_known_issues(brought):
    brought('[[known]]\noperator = "aten::mm"\nplatform = "chip"\nreason = "x"\n')
    args = argparse.Namespace(known=None, no_known=False, no_vendor_known=False)
    lines = campaign._ledger(["chip (preset young)", "chip, inductor", "cpu"], args)
    assert [line.reason for line in lines] == ["x"]
    args.no_vendor_known = True
    assert campaign._ledger(["chip"], args) == ()


def test_no_package_redefines_the_reference(brought, tmp_path):
    brought("")
    shutil.rmtree(tmp_path / "chip-1.dist-info")
    describe(tmp_path, "chip", "1", {"shadowrun.backends": {"cpu": "chip:nothing.toml"}})
    for cached in CACHED:
        cached.cache_clear()
    assert backends.backend_of("cpu") is backends.BACKENDS["cpu"]
