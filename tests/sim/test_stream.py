"""The simulated device in asynchronous mode: host memory must not be read before a synchronization."""

import pytest
import torch

from shadowrun import sim


@pytest.fixture(autouse=True)
def lagging(clean_sim):
    with clean_sim.asynchronous():
        yield


def copied(values):
    host = torch.empty(values.shape)
    host.copy_(values, non_blocking=True)
    return host


def test_a_copy_that_does_not_block_is_poison_until_a_synchronization():
    device = torch.arange(4.0).to("sim")
    host = copied(device * 2)
    assert not torch.equal(host, torch.arange(4.0) * 2)
    torch.sim.synchronize()
    assert torch.equal(host, torch.arange(4.0) * 2)


def test_an_event_waits_for_what_came_before_it_and_no_more():
    device = torch.arange(4.0).to("sim")
    first, event = copied(device), torch.sim.Event()
    event.record()
    second = copied(device)
    event.synchronize()
    assert torch.equal(first, torch.arange(4.0))
    assert not torch.equal(second, torch.arange(4.0))


def test_the_copy_has_what_the_device_held_at_its_place_in_the_stream():
    device = torch.zeros(3).to("sim")
    host = copied(device)
    device.add_(1)
    torch.sim.synchronize()
    assert host.tolist() == [0, 0, 0]
    assert device.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "wait", [lambda t: t.sum().item(), lambda t: t.cpu(), lambda t: t.nonzero(), lambda t: t.tolist()]
)
def test_what_hands_values_to_the_host_waits(wait):
    device = torch.arange(4.0).to("sim")
    host = copied(device)
    wait(device)
    assert torch.equal(host, torch.arange(4.0))


def test_asking_an_event_lets_time_pass():
    host, event = copied(torch.arange(4.0).to("sim")), torch.sim.Event()
    event.record()
    assert not event.query()
    assert event.query()
    assert torch.equal(host, torch.arange(4.0))


def test_a_stream_waits_for_all_and_streams_and_events_of_other_streams_are_ordered():
    host, stream = copied(torch.ones(2).to("sim")), torch.sim.current_stream()
    event = stream.record_event()
    stream.wait_event(event)
    event.wait(stream)
    stream.synchronize()
    assert host.tolist() == [1, 1]
    assert stream.query()


def test_without_the_mode_copies_are_there_at_once(lagging):
    with sim.asynchronous():
        pass
    sim.enable("sim")
    assert not torch.sim.is_asynchronous()
    assert torch.equal(copied(torch.ones(2).to("sim")), torch.ones(2))
