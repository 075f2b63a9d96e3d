"""Messages between a process and its worker: what shared memory does, and what it leaves behind."""

import contextlib
import gc
import os
import socket
import threading
import time
from pathlib import Path

import pytest
import torch

from shadowrun.platforms.worker import channel, mailbox
from shadowrun.platforms.worker import channel as channels
from shadowrun.platforms.worker.channel import Channel, ChannelClosed, SegmentPool
from shadowrun.platforms.worker.wire import Unsendable

MIB = 1 << 20
needs_memfd = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has memory without a name")


@contextlib.contextmanager
def ends(**options):
    here, there = socket.socketpair()
    with here, there:
        yield Channel(here, **options), Channel(there, answers=True, **options)


def ask(asking, answering, message, answer):
    """Send a message, answer it with what a function makes of it, and receive that."""

    def serve():
        answering.send(answer(answering.receive()))

    server = threading.Thread(target=serve)
    server.start()
    asking.send(message)
    received = asking.receive()
    server.join()
    return received


def n_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


@needs_memfd
def test_the_answering_end_works_in_the_shared_memory():
    """What it writes to an argument needs no copy back, and what it does not write to is not copied at all."""
    sent = torch.zeros(2 * MIB)
    with ends() as (asking, answering):

        def write(message):
            message[0].add_(1)
            address = message[0].data_ptr()
            assert answering._received.address <= address < answering._received.address + answering._received.size
            return message

        got = ask(asking, answering, [sent], write)[0]
        assert got.sum() == sent.numel()
        assert not sent.any()
        assert answering._sent is None
        assert asking._sent.in_use
        del got
        assert not asking._sent.in_use


@needs_memfd
def test_an_answer_that_is_held_is_left_alone():
    x = torch.arange(2.0 * MIB)
    with ends() as (asking, answering):
        answers = [ask(asking, answering, [x], lambda message, k=k: [message[0] + k])[0] for k in range(4)]
        for k, answer in enumerate(answers):
            assert torch.equal(answer, x + k)
        assert len(answering._pool._segments) == 4
        del answers, answer
        assert torch.equal(ask(asking, answering, [x], lambda message: [message[0] * 2])[0], x * 2)
        assert len(answering._pool._segments) == 4


@needs_memfd
def test_small_answers_are_copied_and_hold_nothing():
    with ends() as (asking, answering):
        kept = [ask(asking, answering, [torch.ones(5)], lambda message: [message[0] * 3])[0] for _ in range(20)]
        assert all(t.tolist() == [3.0] * 5 for t in kept)
        # The first question brings the mailbox, which has the place for all others.
        assert (len(asking._pool._segments), len(answering._pool._segments)) == (1, 0)
        kept[0].resize_(100)


@needs_memfd
def test_segments_are_used_again_and_bounded(monkeypatch):
    monkeypatch.setattr(channel, "KEPT_BYTES", 8 * MIB)
    with ends() as (asking, answering):
        asking._pool, answering._pool = SegmentPool(8 * MIB), SegmentPool(8 * MIB)
        before = n_descriptors()
        for n in (3 * MIB, 200, 2 * MIB, 1, 3 * MIB + 7, 40_000, 2 * MIB) * 3:
            x = torch.full((n,), n % 100, dtype=torch.uint8)
            assert torch.equal(ask(asking, answering, [x], lambda message: [message[0] + 1])[0], x + 1)
        for end in (asking, answering):
            assert sum(s.size for s in end._pool._segments.values()) <= 8 * MIB + 3 * MIB + (1 << 16)
            assert len(end._pool._segments) <= 4
        big = torch.ones(32 * MIB, dtype=torch.uint8)
        ask(asking, answering, [big], lambda message: [message[0] + 1])
        for _ in range(2):
            ask(asking, answering, [torch.ones(1)], lambda message: [message[0] + 1])
        for end in (asking, answering):
            assert sum(s.size for s in end._pool._segments.values()) <= 8 * MIB
            assert end._others.keys() <= ({*asking._pool._segments} | {*answering._pool._segments})
        assert n_descriptors() <= before + 16


@needs_memfd
def test_nothing_is_left_when_both_ends_are_closed():
    gc.collect()
    before = n_descriptors()
    with ends() as (asking, answering):
        ask(asking, answering, [torch.ones(2 * MIB)], lambda message: [message[0] + 1])
    del asking, answering
    gc.collect()
    assert n_descriptors() == before


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("shift", [0, 1, 4, 9, 16])
def test_memory_begins_at_the_same_place_of_a_cache_line(shared, shift):
    base = torch.arange(400, dtype=torch.uint8)
    assert base.data_ptr() % 64 == 0
    view = base[shift:].view(-1)
    with ends(shared=shared) as (asking, answering):
        there = []
        ask(
            asking, answering, [base[300:], view[:60]], lambda message: there.extend(t.data_ptr() % 64 for t in message)
        )
        assert there == [300 % 64, shift]


@pytest.mark.parametrize("refuse", ["memfd_create", "posix_fallocate"])
@needs_memfd
def test_without_memory_to_share_the_bytes_go_through_the_socket(monkeypatch, refuse):
    def refused(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, refuse, refused)
    x = torch.arange(3.0 * MIB)
    before = n_descriptors()
    with ends() as (asking, answering):
        got = ask(asking, answering, [x, x[5:9]], lambda message: [message[0] + 1, message[1]])
        assert torch.equal(got[0], x + 1)
        assert torch.equal(got[1], x[5:9])
        assert not asking._pool._segments
        assert n_descriptors() == before + 2


@pytest.mark.parametrize("shared", [True, False])
def test_a_word_that_the_other_torch_lacks(monkeypatch, shared):
    """The message is read to its end: the next one arrives."""
    with ends(shared=shared) as (asking, answering):
        asking.send([torch.ones(3), torch.bfloat16])
        monkeypatch.delattr(torch, "bfloat16")
        with pytest.raises(Unsendable, match=r"torch \S+ has no torch.bfloat16"):
            answering.receive()
        answering.send("no")
        assert asking.receive() == "no"


@pytest.mark.parametrize("shared", [True, False])
def test_a_time_limit_is_for_the_whole_message(shared):
    with ends(shared=shared) as (asking, answering):
        asking.limit(0.2)
        with pytest.raises(TimeoutError):
            asking.receive()
        answering.limit(0.4)
        stop = threading.Event()

        def trickle():
            asking.connection.sendall(channels._HEAD.pack(1000))
            while not stop.wait(0.05):
                asking.connection.sendall(b"x")

        asking.limit(None)
        sender = threading.Thread(target=trickle)
        sender.start()
        try:
            with pytest.raises(TimeoutError):
                answering.receive()
        finally:
            stop.set()
            sender.join()


@pytest.mark.parametrize("n", [0, 3])
def test_an_end_that_is_closed(n):
    here, there = socket.socketpair()
    with there:
        here.sendall(b"x" * n)
        here.close()
        with pytest.raises(ChannelClosed):
            Channel(there).receive()


@needs_memfd
@pytest.mark.parametrize("n", [1, 3000, 12_000, 13_000, MIB])
@pytest.mark.parametrize("text", [1, 20_000])
def test_messages_of_every_size_arrive_in_order(n, text):
    """In the mailbox, in a segment, and with a text that only the socket can carry, one after another."""
    with ends() as (asking, answering):
        for k in range(6):
            size, words = (n, "x" * text) if k % 2 else (2, "y")
            x = torch.full((size,), float(k))
            got, said = ask(asking, answering, [x, words], lambda message: [message[0] + 1, message[1] + "!"])
            assert torch.equal(got, x + 1)
            assert said == words + "!"


@needs_memfd
def test_an_end_that_sleeps_is_woken_and_one_that_looks_is_not():
    with ends() as (asking, answering):
        ask(asking, answering, [1], lambda message: message)
        assert asking._mailbox.take(2) is None  # it sleeps from now on
        answering._mailbox.put(1, b"old")
        assert not answering._mailbox.put(1, b"old")
        assert answering._mailbox.put(2, b"new")
        assert asking._mailbox.take(2) == b"new"


@needs_memfd
def test_an_end_whose_processor_others_use_sleeps_at_once(monkeypatch):
    """To give way to them costs more than to be woken; after some waits it looks again."""
    times, gave_way = iter(range(0, 10**12, 1000)), []

    def give_way():
        gave_way.append(1)
        for _ in range(mailbox._CROWDED_NS // 1000):
            next(times)

    monkeypatch.setattr(mailbox, "_clock", lambda: next(times))
    monkeypatch.setattr(mailbox, "_give_way", give_way)
    with ends() as (asking, answering):
        ask(asking, answering, [1], lambda message: message)
        box = asking._mailbox
        box._spins, box._crowded = True, 0
        gave_way.clear()
        waits = [(box.take(7), len(gave_way))[1] for _ in range(mailbox._CROWDED_WAITS + 1)]
        assert waits == [1] * mailbox._CROWDED_WAITS + [2]


@needs_memfd
def test_arrival_is_seen_without_reading_and_bytes_that_came_too_late_do_not_count():
    with ends() as (asking, answering):
        ask(asking, answering, [1], lambda message: message)
        assert not asking.arrives(0)
        answering.connection.sendall(channels._HEAD.pack(channels._WAKE | 1))
        assert not asking.arrives(0.01)
        asking.send([2])
        answering.send([answering.receive()[0] + 1])
        assert asking.arrives(0)
        assert asking.arrives(1)
        assert asking.receive() == [3]
        answering.connection.close()
        assert asking.arrives(1)


@needs_memfd
def test_a_byte_that_came_too_late_is_passed_over():
    """An end that woke by itself finds the byte in the socket later, before another message."""
    with ends() as (asking, answering):
        for k in range(5):
            answering.connection.sendall(channels._HEAD.pack(channels._WAKE | k))
            for size in (1, MIB):
                x = torch.full((size,), float(k))
                assert torch.equal(ask(asking, answering, [x], lambda message: [message[0] * 2])[0], x * 2)


@needs_memfd
def test_two_processes_that_each_fall_asleep_lose_no_message():
    here, there = socket.socketpair()
    with here:
        child = os.fork()
        if child == 0:
            here.close()
            answering = Channel(there, answers=True)
            with contextlib.suppress(ChannelClosed):
                while True:
                    k, pause = answering.receive()
                    time.sleep(pause)
                    answering.send(k)
            os._exit(0)
        there.close()
        asking = Channel(here)
        asking.limit(30)
        for k in range(3000):
            # Around the time for which an end looks before it sleeps.
            pause = (k % 7) * 3e-5
            asking.send((k, pause if k % 3 else 0.0))
            if k % 2:
                time.sleep(pause)
            assert asking.receive() == k
    assert os.waitpid(child, 0)[1] == 0
