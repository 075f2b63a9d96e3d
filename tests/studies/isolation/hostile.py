"""A worker whose cases do what a broken kernel does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def start(settings, channel):
    """Each case of a task is the name of a function below."""
    if settings.get("broken_while") and Path(settings["broken_while"]).exists():
        sys.exit(3)

    def run(task):
        for number in range(task["start"], len(task["cases"])):
            channel.step.begin(number)
            channel.step.on_target()
            channel.step.in_op("aten::" + task["cases"][number])
            if not globals()[task["cases"][number]](settings, channel):
                channel.send([number, os.getpid()])
            channel.step.end()

    return run


def fine(settings, channel):
    pass


def segfaults(settings, channel):
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves(settings, channel):
    os._exit(7)


def hangs(settings, channel):
    time.sleep(1000)


def eats(settings, channel):
    kept = []
    while True:
        kept.append(bytearray(os.urandom(1 << 20) * 16))


def prints(settings, channel):
    text = b"x" * (1 << 20)
    for _ in range(300):
        os.write(1, text)
        os.write(2, text)


def forks(settings, channel):
    """A child keeps the pipes open, and the parent ends."""
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(9)


def spawns(settings, channel):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    channel.send([-1, child.pid])
    time.sleep(1000)


def once(settings, channel):
    """Ends the process the first time only."""
    if not Path(settings["mark"]).exists():
        Path(settings["mark"]).touch()
        os.kill(os.getpid(), signal.SIGSEGV)


def loses(settings, channel):
    """The device answers no more until the command was run."""
    if Path(settings["broken_while"]).exists():
        channel.send({"lost": "no answer"})
        os._exit(1)


def breaks(settings, channel):
    Path(settings["broken_while"]).touch()
    channel.send({"lost": "no answer"})
    os._exit(1)


def sends_and_ends(settings, channel):
    """The outcome is on its way, and then the process ends."""
    channel.send([int(settings["number"]), os.getpid()])
    os._exit(5)
