"""Evidence of CPU fallback: what the detector sees, and that the user's own warnings are unchanged."""

import os
import tempfile
import warnings

import pytest
import torch

import shadowrun
from shadowrun import Cause, Status
from shadowrun.platforms import torchplatform
from shadowrun.platforms.fallback import FallbackDetector

TEXT = "The operator 'aten::fmax' is not currently supported on the SIM backend and will fall back to run on the CPU."


@pytest.fixture
def witness(sim_device):
    witness = FallbackDetector("PrivateUse1")
    witness.start()
    yield witness
    witness.stop()


def watched(witness, body, key="key", *, name="aten::fmax", mute=True):
    with witness.watch(key, name, mute=mute) as found:
        body()
    return found


def warn():
    warnings.warn_explicit(TEXT, UserWarning, "kernel.py", 1, registry={})


def write():
    os.write(2, f"[W] Warning: CAUTION: {TEXT}\n".encode())


def to_cpu():
    torch.ops.aten._to_cpu([torch.ones(2).to("sim")])


@pytest.mark.parametrize("mute", [True, False])
def test_the_operator_that_moves_inputs_to_the_cpu_is_seen(witness, mute):
    ((cause, evidence),) = watched(witness, to_cpu, mute=mute)
    assert cause is Cause.SILENT_FALLBACK
    assert "aten::_to_cpu was called 1 time during the call" in evidence
    assert "2 times" in watched(witness, lambda: (to_cpu(), to_cpu()))[0][1]


def test_a_factory_that_falls_back_has_no_tensor_to_move_and_is_seen(witness):
    ((cause, evidence),) = watched(witness, lambda: torch.ops.aten._to_cpu([]), name="aten::tril_indices")
    assert cause is Cause.SILENT_FALLBACK
    assert "aten::_to_cpu was called 1 time during the call" in evidence


@pytest.mark.filterwarnings("error")
def test_a_backend_s_own_kernel_is_put_aside_where_warnings_are_errors(sim_device):
    library = torch.library.Library("aten", "IMPL")
    library.impl("_to_cpu", lambda tensors: [t.cpu() for t in tensors], "PrivateUse1")
    witness = FallbackDetector("PrivateUse1")
    witness.start()
    try:
        assert watched(witness, to_cpu)
    finally:
        witness.stop()
        library._destroy()


@pytest.mark.parametrize("number", [True, 3, 0.1, 2j])
def test_a_number_goes_back_as_the_tensor_that_torch_makes_of_it(number):
    """Kernels in Python get Python numbers for such tensors: of lower rank than tensors where types are promoted."""
    torchplatform.prepare_wrapped_numbers()
    made = torchplatform.wrapped_number(number)
    assert (made.dim(), made.device.type, made.item()) == (0, "cpu", number)
    for dtype in (torch.bool, torch.int8, torch.float16, torch.float32, torch.complex64):
        zero_dim = torch.ones((), dtype=dtype)
        assert torch.result_type(zero_dim, made) == torch.result_type(zero_dim, number)
    other = torchplatform.wrapped_number(number)
    assert other.untyped_storage().data_ptr() != made.untyped_storage().data_ptr()


def test_a_call_that_ran_for_the_user_only_is_replayed_once_for_warnings(witness):
    watched(witness, to_cpu, "user's", mute=False)
    assert witness.begin_warning_probe("user's")
    assert not witness.begin_warning_probe("user's"), "once"
    watched(witness, to_cpu, "replay")
    assert not witness.begin_warning_probe("replay"), "all warnings were collected"
    with pytest.warns(UserWarning, match="will fall back"):
        watched(witness, warn, "warned", mute=False)
    assert not witness.begin_warning_probe("warned"), "nothing left to collect"
    watched(witness, warn, "user's")
    assert watched(witness, to_cpu, "user's", name="aten::other", mute=False)[0][0] is Cause.WARNED_FALLBACK


def test_replays_do_not_use_up_warnings_that_torch_gives_once(witness):
    assert not torch.is_warn_always_enabled()
    assert watched(witness, lambda: None) == []
    with witness.watch("key", "aten::fmax", mute=True):
        assert torch.is_warn_always_enabled()
    assert not torch.is_warn_always_enabled()
    with witness.watch("key", "aten::fmax", mute=False):
        assert not torch.is_warn_always_enabled()


def test_moving_a_tensor_is_no_fallback(witness):
    x = torch.ones(3).to("sim")
    assert watched(witness, lambda: (x.cpu(), x.to("cpu", torch.float64), x + 1, x.sum().item())) == []


def test_nothing_is_seen_outside_of_a_watched_call(witness):
    to_cpu()
    assert watched(witness, lambda: None) == []


@pytest.mark.parametrize("action", ["default", "error", "ignore", "always", "once", "module"])
def test_a_replay_s_warning_is_heard_under_any_filter_and_shown_under_none(witness, action, recwarn):
    registry = {}

    def warn():
        warnings.warn_explicit(TEXT, UserWarning, "kernel.py", 1, registry=registry)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter(action)
        filters = list(warnings.filters)
        ((cause, evidence),) = watched(witness, warn)
        assert warnings.filters == filters, "the user's filters stay"
        assert cause is Cause.WARNED_FALLBACK
        assert "Python warning: aten::fmax falls back to the CPU" in evidence
        assert shown == []
        assert set(registry) <= {"version"}, "his own warning at this place is not used up"


def test_the_user_s_own_warning_reaches_him_once(witness):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        ((cause, _),) = watched(witness, warn, mute=False)
        watched(witness, warn, mute=True)
    assert cause is Cause.WARNED_FALLBACK
    assert [str(w.message) for w in shown] == [TEXT]


def test_a_warning_that_is_an_error_is_the_user_s_exception(witness):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="will fall back"):
            watched(witness, warn, mute=False)


def test_other_warnings_are_no_evidence(witness):
    def other():
        warnings.warn_explicit("the CPU is hot", UserWarning, "kernel.py", 1, registry={})
        os.write(2, b"loading kernels for this GPU\n")

    assert watched(witness, other) == []


def test_descriptor_two_is_read_and_swallowed_in_a_replay(witness, capfd):
    ((cause, evidence),) = watched(witness, write)
    assert cause is Cause.WARNED_FALLBACK
    assert "warning on stderr: aten::fmax falls back" in evidence
    assert capfd.readouterr().err == ""


def test_descriptor_two_of_the_user_s_call_reaches_it_once(witness, capfd):
    ((cause, _),) = watched(witness, write, mute=False)
    assert cause is Cause.WARNED_FALLBACK
    assert capfd.readouterr().err.count(TEXT) == 1


def test_other_text_of_a_replay_is_kept(witness, capfd):
    watched(witness, lambda: os.write(2, b"something else\n"))
    assert capfd.readouterr().err == "something else\n"


def test_a_warning_that_comes_once_counts_from_then_on(witness):
    assert watched(witness, warn, "first")[0][0] is Cause.WARNED_FALLBACK
    assert watched(witness, lambda: None, "first")[0][0] is Cause.WARNED_FALLBACK
    assert watched(witness, lambda: None, "other dtype") == []
    silent = watched(witness, to_cpu, "other dtype")
    assert silent[0][0] is Cause.WARNED_FALLBACK, "it warned of this operator once in this process"
    assert watched(witness, to_cpu, "third", name="aten::fmin")[0][0] is Cause.SILENT_FALLBACK


def test_an_exception_of_the_call_passes_and_its_text_too(witness, capfd):
    def fails():
        os.write(2, b"before it died\n")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        watched(witness, fails)
    assert capfd.readouterr().err == "before it died\n"
    assert watched(witness, lambda: None, "later") == []


def test_without_room_for_a_file_a_witness_less(witness, monkeypatch, capfd):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert watched(witness, write) == []
    assert TEXT in capfd.readouterr().err
    assert watched(witness, warn, "again")[0][0] is Cause.WARNED_FALLBACK


def test_all_is_as_before_after_stop(sim_device):
    show = warnings._showwarnmsg
    witness = FallbackDetector("PrivateUse1")
    for _ in range(2):
        witness.start()
        assert warnings._showwarnmsg is not show
        assert watched(witness, to_cpu)
        witness.stop()
        assert warnings._showwarnmsg is show
        assert witness._library is None
    witness.stop()


def test_another_hook_is_left_in_place(sim_device):
    plain = warnings._showwarnmsg
    witness = FallbackDetector("PrivateUse1")
    witness.start()
    ours, seen = warnings._showwarnmsg, []

    def theirs(message):
        seen.append(message)
        ours(message)

    warnings._showwarnmsg = theirs
    try:
        witness.stop()
        assert warnings._showwarnmsg is theirs
        with pytest.warns(UserWarning, match="still shown"):
            warnings.warn("still shown", stacklevel=1)
        assert len(seen) == 1
    finally:
        warnings._showwarnmsg = plain


def test_the_cpu_is_not_watched():
    assert not FallbackDetector("CPU").active
    assert not FallbackDetector(None).active
    witness = FallbackDetector("CPU")
    show = warnings._showwarnmsg
    witness.start()
    assert warnings._showwarnmsg is show
    witness.stop()


# -- in a comparison ---------------------------------------------------------------------------------


def std_of_one(device="cpu"):
    return torch.ones(1).to(device).std()  # warns: degrees of freedom


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("target", ["cpu[threads=1]", "sim"])
@pytest.mark.parametrize("action", ["always", "default", "ignore"])
def test_a_warning_of_an_operator_reaches_the_user_as_without_us(clean_sim, target, device, action):
    def shown(run):
        globals().pop("__warningregistry__", None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            if run is None:
                std_of_one(device)
            else:
                with run:
                    std_of_one(device)
        return [(str(w.message), w.category) for w in caught]

    plain = shown(None)
    run = shadowrun.compare(target)
    assert shown(run) == plain
    assert run.counts()[Status.ERROR] == 0


@pytest.mark.filterwarnings("default")
def test_the_user_s_stderr_and_warnings_come_once(clean_sim, capfd, recwarn):
    names = [n for n, f in clean_sim.CATALOGUE.items() if f.cause is Cause.WARNED_FALLBACK]
    assert names
    for name in names:
        for device in ("sim", "cpu"):
            recwarn.clear()
            capfd.readouterr()
            with clean_sim.flaws(name), shadowrun.compare("sim") as run:
                clean_sim.trigger(name)(device)
            texts = [str(w.message) for w in recwarn] + capfd.readouterr().err.splitlines()
            reported = [t for t in texts if "fall" in t and "CPU" in t]
            assert len(reported) == (1 if device == "sim" else 0), (name, device, reported)
            assert "fallback" in {f.kind for f in run.findings()}
