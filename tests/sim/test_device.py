"""The clean device behaves as a device should."""

import copy
import io

import pytest
import torch
from torch.nn import functional as F

import shadowrun


def test_tensors_are_genuine_privateuse1_tensors():
    x = torch.randn(2, 3).to("sim")
    assert type(x) is torch.Tensor
    assert x.device == torch.device("sim", 0)
    assert x.is_sim
    assert x.untyped_storage().device.type == "sim"
    assert x.data_ptr() != 0
    assert "device='sim:0'" in repr(x)


def test_methods_that_torch_generates():
    x = torch.ones(2)
    assert x.sim().is_sim
    assert torch.nn.Linear(2, 2).sim().weight.is_sim
    with torch.device("sim"):
        assert torch.zeros(2).is_sim


@pytest.mark.parametrize("shape", [(), (0,), (3, 1, 2), (2, 0, 3)])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint8]
)
def test_round_trip(shape, dtype):
    x = torch.randint(0, 2, shape).to(dtype)
    y = x.to("sim")
    assert (y.dtype, y.shape, y.stride()) == (x.dtype, x.shape, x.stride())
    assert torch.equal(y.cpu(), x)


def test_views_alias():
    x = torch.zeros(4, 6, device="sim")
    for view in (x[1], x.t(), x.view(6, 4), x[:, ::2], x.unfold(1, 2, 2), x.as_strided((2, 2), (1, 3), 5), x.detach()):
        assert view._base is x or view.untyped_storage()._cdata == x.untyped_storage()._cdata
    x[:, ::2].t().mul_(2).add_(3)
    assert x.cpu().sum() == 36
    assert x._version > 0
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        x.t().view(-1)


def test_in_place_returns_the_very_tensor():
    x = torch.ones(3, device="sim")
    assert x.add_(1) is x
    out = torch.empty(0, device="sim")
    assert torch.add(x, x, out=out) is out
    assert out.tolist() == [4, 4, 4]
    values, indices = torch.empty(0, device="sim"), torch.empty(0, dtype=torch.int64, device="sim")
    torch.max(torch.eye(3, device="sim"), 1, out=(values, indices))
    assert indices.tolist() == [0, 1, 2]


def test_out_on_a_view_writes_through():
    x = torch.zeros(2, 3, device="sim")
    torch.add(torch.ones(3, device="sim"), 1, out=x[1])
    assert x.tolist() == [[0, 0, 0], [2, 2, 2]]


def test_strides_of_size_one_dimensions_survive():
    x = torch.empty_strided((3, 1, 4), (1, 7, 3))
    assert x.to("sim").stride() == x.to("cpu", copy=True).stride()
    assert torch.empty_strided((3, 1, 4), (1, 7, 3), device="sim").stride() == (1, 7, 3)


def test_resize_keeps_the_values():
    x = torch.arange(4, device="sim")
    assert x.resize_(2, 3) is x
    assert x.flatten()[:4].tolist() == [0, 1, 2, 3]
    assert x.resize_(2).tolist() == [0, 1]


def test_what_has_the_size_keeps_its_strides():
    for device in ("cpu", "sim"):
        x = torch.empty(4, 3, device=device).t()
        assert x.resize_(3, 4).stride() == (1, 3)
        assert torch.full((3, 4), 2.0, out=x).stride() == (1, 3)
        assert x.resize_((3, 4), memory_format=torch.contiguous_format).stride() == (4, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64])
@pytest.mark.parametrize("name", ["fmod", "remainder"])
def test_a_number_keeps_its_precision(name, dtype):
    for x in (torch.tensor([21, 7, 3], dtype=dtype), torch.tensor(21, dtype=dtype)):
        expected, actual = getattr(torch, name)(x, 0.05), getattr(torch, name)(x.to("sim"), 0.05)
        assert actual.dtype is expected.dtype
        assert torch.equal(actual.cpu(), expected)


def test_conjugate_and_negative_views_copy():
    x = torch.randn(4, dtype=torch.complex64)
    y = x.to("sim")
    assert torch.equal(y.conj().cpu(), x.conj())
    assert torch.equal(y.conj().clone().cpu(), x.conj().clone())
    assert torch.equal(y.conj().imag.cpu(), x.conj().imag)
    assert torch.equal((y.conj() * y).cpu(), x.conj() * x)
    y.conj().copy_(x)
    assert torch.equal(y.cpu(), x.conj())


def test_random_stream_is_the_devices_own():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    a = torch.randn(4, device="sim")
    b = F.dropout(torch.ones(100, device="sim"), 0.5)
    torch.bernoulli(torch.full((4,), 0.5, device="sim"))
    torch.randperm(5, device="sim")
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    torch.rand(7)
    assert torch.equal(torch.randn(4, device="sim").cpu(), a.cpu())
    assert torch.equal(F.dropout(torch.ones(100, device="sim"), 0.5).cpu(), b.cpu())
    state = torch.sim.get_rng_state()
    c = torch.rand(3, device="sim")
    torch.sim.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="sim").cpu(), c.cpu())


def test_fork_rng_and_checkpoint():
    from torch.utils.checkpoint import checkpoint

    state = torch.sim.get_rng_state()
    with torch.random.fork_rng(device_type="sim"):
        torch.rand(3, device="sim")
    assert torch.equal(torch.sim.get_rng_state(), state)
    x = torch.randn(8, device="sim", requires_grad=True)
    y = checkpoint(lambda v: F.dropout(v, 0.5).square(), x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(x.grad == 0, y.detach() == 0)


def test_save_load_and_deepcopy():
    x = torch.randn(3, 4).to("sim")
    pair = {"whole": x, "view": x[1]}
    twin = copy.deepcopy(pair)
    twin["whole"].zero_()
    assert twin["view"].sum().item() == 0
    assert x.abs().sum().item() > 0
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["whole"].is_sim
    assert torch.equal(loaded["whole"].cpu(), x.cpu())
    file.seek(0)
    assert torch.load(file, map_location="cpu")["view"].device.type == "cpu"
    cpu_file = io.BytesIO()
    torch.save(x.cpu(), cpu_file)
    cpu_file.seek(0)
    assert torch.load(cpu_file, map_location="sim").is_sim


def test_storages():
    storage = torch.UntypedStorage(8, device="sim")
    assert (storage.device.type, storage.nbytes()) == ("sim", 8)
    assert storage.cpu().device.type == "cpu"
    assert torch.UntypedStorage(8).to(device="sim").device.type == "sim"
    assert torch.UntypedStorage(8).clone().device.type == "cpu"
    assert storage.clone().is_sim


def test_mixed_devices_are_refused():
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, device="sim") + torch.ones(2)
    assert (torch.ones(2, device="sim") + torch.tensor(1.0)).tolist() == [2, 2]
    assert torch.arange(4, device="sim")[torch.tensor([1, 2])].tolist() == [1, 2]


def test_errors_of_the_cpu_come_through():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ones(2, 3, device="sim") @ torch.ones(2, 3, device="sim")


def test_cache_like_writes():
    cache = torch.zeros(2, 4, 3, device="sim")
    cache[:, 1] = torch.ones(2, 3, device="sim")
    cache.index_put_(
        (torch.tensor([0], device="sim"), torch.tensor([2], device="sim")), torch.full((3,), 5.0, device="sim")
    )
    cache.index_copy_(1, torch.tensor([3], device="sim"), torch.full((2, 1, 3), 7.0, device="sim"))
    grown = torch.cat([cache, torch.ones(2, 1, 3, device="sim")], 1)
    assert grown.cpu()[0, :, 0].tolist() == [0, 1, 5, 7, 1]


def test_python_numbers_in_tensor_slots():
    x = torch.tensor([5.0, -5.0], device="sim")
    assert torch.remainder(x, 3).tolist() == [2, 1]
    assert torch.where(x > 0, 1.0, x).tolist() == [1, -5]
    assert (2 ** torch.arange(3, device="sim")).dtype == torch.int64


def test_an_exception_in_backward_reaches_the_caller_unchanged():
    error = KeyError("of the user")

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            raise error

    x = torch.ones(3, device="sim", requires_grad=True)
    for _ in range(3):
        with pytest.raises(KeyError) as caught:
            Raises.apply(x).sum().backward()
        assert caught.value is error
    x.sum().backward()


def test_inference_mode_and_function_modes():
    with torch.inference_mode():
        assert (torch.ones(2, device="sim").softmax(0) @ torch.ones(2, device="sim")).item() == 1
    torch.set_default_device("sim")
    try:
        assert F.gelu(torch.zeros(2, 2)).add_(1).sum().item() == 4
    finally:
        torch.set_default_device(None)


def test_device_module():
    assert torch.sim.is_available()
    assert torch.sim.device_count() == 1
    assert torch.accelerator.current_accelerator().type == "sim"
    torch.sim.synchronize()
    with pytest.raises(RuntimeError, match="invalid device ordinal 1"):
        torch.sim.set_device(1)


def test_memory_is_released():
    import gc
    import weakref

    x = torch.randn(64).to("sim")
    storage = weakref.ref(x.untyped_storage()._shadow)
    y = x[3:]
    del x
    gc.collect()
    assert storage() is not None
    del y
    gc.collect()
    assert storage() is None


def _observed(device):
    """The running minimum, maximum, scale and zero point of an observer, empty before."""
    like = {"device": device}
    state = [torch.empty(0, **like) for _ in range(3)] + [torch.empty(0, dtype=torch.int32, **like)]
    on = torch.ones(1, dtype=torch.long, **like)
    x = torch.arange(36.0).reshape(4, 9).to(device)
    torch.ops.aten._fused_moving_avg_obs_fq_helper(x, on, on, *state, 0.01, -128, 127, 0, True, True)
    return [t.cpu() for t in state]


def _grown(device):
    """`addbmm_` on the CPU gives what it writes to the size of the product."""
    x = torch.ones(1, device=device)
    same = x.addbmm_(torch.ones(2, 5, 4, device=device), torch.ones(2, 4, 10, device=device))
    assert same is x
    return [x.cpu()]


@pytest.mark.parametrize("program", [_observed, _grown])
def test_operators_that_resize_what_they_write_to(sim, program):
    here, there = program("cpu"), program("sim")
    assert [t.shape for t in here] == [t.shape for t in there]
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    with shadowrun.compare("sim", slow_ratio=1e9) as run:
        program("cpu")
    assert not run.findings(), run.findings()
