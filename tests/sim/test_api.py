"""What enable() refuses; each in its own process, since torch renames PrivateUse1 once."""

import subprocess
import sys

import pytest

from shadowrun.errors import PlatformError


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)


def test_importing_registers_nothing_and_needs_no_torch():
    result = run(
        "import sys; from shadowrun import sim\n"
        "assert 'torch' not in sys.modules and not sim.is_enabled() and sim.active() == ()\n"
        "assert len(sim.CATALOGUE) >= 62 and len(sim.FATAL) == 3 and not sim.is_enabled()\n"
        "import torch; assert torch._C._get_privateuse1_backend_name() == 'privateuseone'"
    )
    assert result.returncode == 0, result.stderr


def test_one_name_per_process():
    result = run(
        "from shadowrun import sim; from shadowrun.errors import PlatformError; import torch\n"
        "sim.enable('npu'); assert torch.ones(2).npu().device.type == 'npu' and sim.device_name() == 'npu'\n"
        "sim.enable('npu', flaws=['tril-of-inf']); assert sim.active() == ('tril-of-inf',)\n"
        "try: sim.enable('sim')\n"
        "except PlatformError as e: print(e.slug, e)"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("sim-one-name the simulated device is registered as 'npu'")


def test_another_backend_holds_the_key():
    result = run(
        "import torch; torch.utils.rename_privateuse1_backend('acme')\n"
        "from shadowrun import sim; from shadowrun.errors import PlatformError\n"
        "try: sim.enable()\n"
        "except PlatformError as e: print(e.slug, e)"
    )
    assert result.stdout.startswith("privateuse1-taken "), result.stderr
    assert "'acme'" in result.stdout


def test_flaws_before_enable():
    result = run(
        "from shadowrun import sim; from shadowrun.errors import PlatformError\n"
        "try:\n    with sim.flaws('tril-of-inf'): pass\n"
        "except PlatformError as e: print(e.slug)"
    )
    assert result.stdout == "sim-not-enabled\n", result.stderr


@pytest.mark.parametrize(
    ("arguments", "slug", "text"),
    [
        ({"flaws": ["maximum-drop-nan"]}, "sim-unknown-flaw", "'maximum-drop-nan'. Did you mean 'maximum-drops-nan'?"),
        ({"preset": "yung"}, "sim-unknown-preset", "'yung'. Did you mean 'young'? There are: clean, young"),
        ({"preset": "zzzz"}, "sim-unknown-preset", "'zzzz'. There are: clean"),
    ],
)
def test_unknown_names(sim, arguments, slug, text):
    with pytest.raises(PlatformError) as caught:
        sim.enable(**arguments)
    assert caught.value.slug == slug
    assert text in str(caught.value)
    assert sim.active() == ()


def test_flaws_restore_what_was_active(sim):
    sim.enable(preset="rounding", flaws=["tril-of-inf"])
    with sim.flaws("maximum-drops-nan"):
        assert sim.active() == ("maximum-drops-nan",)
    assert sim.active() == ("sum-in-other-order", "tanh-one-ulp-off", "tril-of-inf")
    sim.enable()


def test_a_process_with_an_exception_in_backward_ends_well():
    result = run(
        "from shadowrun import sim; sim.enable(); import torch\n"
        "class F(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x): return x * 2\n"
        "    @staticmethod\n    def backward(ctx, g): raise ValueError('mine')\n"
        "F.apply(torch.ones(3, device='sim', requires_grad=True)).sum().backward()"
    )
    assert result.returncode == 1
    assert "ValueError: mine" in result.stderr
